"""Finds or fetches a model, and reads from its files what the engine has to know of it.

Weights are read from safetensors or GGUF alone: nothing here unpickles, and no code that comes with a model is run.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from engine.config import DTYPE_BYTES, ROPE_TYPES, DType, EngineConfig, ModelConfig, RopeConfig
from engine.demo_model import FetchError, fetch_demo
from engine.sampling_params import InvalidParameter, SamplingParams

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    Fields = PretrainedConfig | SimpleNamespace

__all__ = ["SUPPORTED_ARCHITECTURES", "FetchError", "fetch_demo", "load_model_config", "resolve_model"]

SUPPORTED_ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Class name, as a config's `architectures` has it, to transformers' model type."""

_TEXT_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
_OTHER_WEIGHTS = ("original/*", "consolidated*")  # the same weights once more, as the publisher had them
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PLAIN_FIELDS: dict[str, type] = {
    "vocab_size": int,
    "hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "head_dim": int,
    "max_position_embeddings": int,
    "rms_norm_eps": float,
    "tie_word_embeddings": bool,
}
_OLD_NAMES = {"rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype"}
_MALFORMED = (TypeError, KeyError, AttributeError, ValueError, IndexError, ArithmeticError)
"""What reading fields of an unexpected kind may raise."""

_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p")


def resolve_model(name: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Where a model lies on this machine, after fetching what is absent.

    Args:
        name: `demo`, a folder, a `.gguf` file or a hub id.
        revision: branch, tag or commit of a hub model.
        weights: False leaves a hub model's weights out, for those who need its config and tokenizer alone.

    Returns:
        A folder with a config.json, or a .gguf file.

    Raises:
        InvalidParameter: there is no such folder or file, or it holds no model.
        FetchError: the demo model or the hub model could not be fetched.
    """
    path = Path(name).expanduser()
    if name == "demo":
        path = fetch_demo()
    elif path.is_file():
        if path.suffix != ".gguf":
            raise InvalidParameter.of("model", name, "is a file, but not a .gguf file")
        return path
    elif not path.is_dir():
        if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
            raise InvalidParameter.of("model", name, "no such folder or file, and not a hub id (`owner/name`)")
        path = _fetch_from_hub(name, revision, weights)
    if not (path / "config.json").is_file():
        raise InvalidParameter.of("model", name, f"{path} has no config.json{_gguf_hint(path)}")
    return path


def _gguf_hint(folder: Path) -> str:
    files = sorted(folder.glob("*.gguf"))
    return f"; to use its GGUF weights, name the file: {files[0]}" if files else ""


def _fetch_from_hub(name: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import errors, snapshot_download

    patterns = [*_TEXT_FILES, "*.safetensors"] if weights else list(_TEXT_FILES)
    what = f"model {name!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=list(_OTHER_WEIGHTS))
        )
    except errors.HFValidationError as error:
        raise InvalidParameter.of("model", name, f"is not a hub id: {error}") from error
    except errors.GatedRepoError as error:
        raise FetchError(f"{what} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise FetchError(f"{what}: the hub has the model, but not this revision") from error
    except errors.RepositoryNotFoundError as error:
        raise FetchError(f"{what}: neither a folder here nor a model on the hub that may be read") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise FetchError(
            f"{what} is neither a folder here nor in the hub's cache, and the hub is out of reach"
        ) from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise FetchError(f"{what} could not be fetched from the hub: {error}") from error


def load_model_config(config: EngineConfig, *, weights: bool = True) -> ModelConfig:
    """Resolves the model and reads its config.json (or GGUF), generation_config.json and tokenizer's end tokens.

    Args:
        weights: as in `resolve_model`; dummy weights need none in any case.

    Raises:
        InvalidParameter: the model is not supported, or the engine's arguments ask for more than it has.
        FetchError: it could not be fetched.
    """
    path = resolve_model(config.model, config.revision, weights=weights and config.load_format != "dummy")
    try:
        model = _read_model_config(config, path)
    except InvalidParameter:
        raise
    except _MALFORMED as error:
        rule = f"its config cannot be read: {type(error).__name__}: {error}"
        raise InvalidParameter.of("model", config.model, rule) from error
    _check_values(model)
    return model


def _read_model_config(config: EngineConfig, path: Path) -> ModelConfig:
    raw = {} if path.is_file() else _read_json(path / "config.json")
    if raw:
        _check_supported(config.model, raw)
    hf = _plain_config(raw) or _transformers_config(config.model, path)
    architecture = _architecture(config.model, hf)
    if getattr(hf, "hidden_act", "silu") != "silu":
        raise InvalidParameter.of("model", config.model, f"its activation {hf.hidden_act!r} is not supported; silu is")
    generation = {} if path.is_file() else _read_json(path / "generation_config.json")
    heads = hf.num_attention_heads
    if not isinstance(heads, int) or heads < 1:
        raise InvalidParameter("model", f"{config.model}: num_attention_heads is {heads!r}, and must be at least 1")
    kv_heads = getattr(hf, "num_key_value_heads", None) or heads
    rope = _rope(config.model, hf)
    bias = bool(getattr(hf, "attention_bias", False))
    eos = _ids(hf.eos_token_id if path.is_file() else raw.get("eos_token_id"))
    eos |= _ids(generation.get("eos_token_id")) | (set() if path.is_file() else _tokenizer_eos(path))
    return ModelConfig(
        name=config.model,
        path=path,
        revision=config.revision,
        architecture=architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // heads,
        max_model_len=_max_model_len(config, hf.max_position_embeddings, rope),
        dtype=_dtype(config, hf),
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        rms_norm_eps=hf.rms_norm_eps,
        rope=rope,
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        attention_bias=bias or architecture == "Qwen2ForCausalLM",
        attention_output_bias=bias,
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=_sliding_window(hf),
        eos_token_ids=tuple(sorted(token for token in eos if token < hf.vocab_size)),
        generation_defaults=_generation_defaults(config.model, generation),
    )


def _check_values(model: ModelConfig) -> None:
    """Refuses what would compute nonsense, or fail somewhere deep in a layer."""

    def check(name: str, value: Any, right: bool, rule: str) -> None:
        if not right:
            raise InvalidParameter("model", f"{model.name}: its config has {name}={value!r}, which must be {rule}")

    sizes = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_model_len,
    }
    for name, size in sizes.items():
        check(name, size, isinstance(size, int) and size >= 1, "a whole number of at least 1")
    heads, kv_heads = model.num_heads, model.num_kv_heads
    check("num_attention_heads", heads, heads % kv_heads == 0, f"a multiple of num_key_value_heads={kv_heads}")
    for name, number in {"rms_norm_eps": model.rms_norm_eps, "rope_theta": model.rope.theta}.items():
        check(name, number, 0 < number < math.inf, "a positive number")
    for window in model.sliding_window:
        check("sliding_window", window, window is None or (isinstance(window, int) and window >= 1), "at least 1")


def _read_json(path: Path) -> dict[str, Any]:
    """The file's object; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidParameter("model", f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidParameter("model", f"{path} does not hold a JSON object")
    return value


def _check_supported(name: str, raw: dict[str, Any]) -> None:
    """Refuses by the plain file, before transformers tries to make sense of what it may not know either."""
    known = ", ".join(SUPPORTED_ARCHITECTURES)
    architectures = raw.get("architectures") or []
    if architectures and architectures[0] not in SUPPORTED_ARCHITECTURES:
        raise InvalidParameter.of(
            "model", name, f"its architecture {architectures[0]} is not supported; these are: {known}"
        )
    if not architectures and raw.get("model_type") not in SUPPORTED_ARCHITECTURES.values():
        raise InvalidParameter.of(
            "model",
            name,
            f"its model_type {raw.get('model_type')!r} is not supported; these architectures are: {known}",
        )
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise InvalidParameter.of("model", name, f"its weights are quantized ({method}), which is not supported")


def _plain_config(raw: dict[str, Any]) -> SimpleNamespace | None:
    """A config.json that states what the engine asks, under today's names, as transformers' own of late do.

    None for any other: defaults, older names, windows and scaled rotary embeddings are transformers' to read. Its
    import takes as long as that of torch.
    """
    model_type = raw.get("model_type")
    rope = raw.get("rope_parameters")
    if model_type not in SUPPORTED_ARCHITECTURES.values() or raw.keys() & _OLD_NAMES:
        return None
    if any(type(raw.get(field)) is not kind for field, kind in _PLAIN_FIELDS.items()):
        return None
    if any(type(raw.get(field, False)) is not bool for field in ("attention_bias", "mlp_bias")):
        return None
    if raw.get("hidden_act") != "silu" or raw.get("dtype") not in list(DTYPE_BYTES):
        return None
    if raw.get("sliding_window") is not None or ("sliding_window" not in raw and model_type != "llama"):
        return None
    if not isinstance(rope, dict) or rope.keys() != {"rope_type", "rope_theta"} or rope["rope_type"] != "default":
        return None
    if type(rope["rope_theta"]) not in (int, float):
        return None
    if raw["num_attention_heads"] < 1 or raw["hidden_size"] % raw["num_attention_heads"]:
        return None
    return SimpleNamespace(**raw)


def _transformers_config(name: str, path: Path) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        if path.is_file():
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # it raises whatever its validators and readers happen to
        raise InvalidParameter.of("model", name, f"its config cannot be read: {error}") from error


def _architecture(name: str, hf: Fields) -> str:
    for architecture, model_type in SUPPORTED_ARCHITECTURES.items():
        if hf.model_type == model_type:
            return architecture
    known = ", ".join(SUPPORTED_ARCHITECTURES)
    raise InvalidParameter.of("model", name, f"its type {hf.model_type!r} is not supported; these are: {known}")


def _rope(name: str, hf: Fields) -> RopeConfig:
    scaling = dict(hf.rope_parameters or {})
    theta = scaling.pop("rope_theta", None)
    theta = 10_000.0 if theta is None else float(theta)
    rope_type = scaling.pop("rope_type", "default")
    scaling.pop("type", None)  # the older name of rope_type
    if scaling.pop("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise InvalidParameter.of("model", name, "it rotates only a part of each head, which is not supported")
    if rope_type not in ROPE_TYPES:
        raise InvalidParameter.of(
            "model", name, f"its rope type {rope_type!r} is not supported; these are: {', '.join(ROPE_TYPES)}"
        )
    if rope_type == "default":
        return RopeConfig(theta=theta)
    scaling.setdefault("original_max_position_embeddings", hf.max_position_embeddings)
    return RopeConfig(theta=theta, rope_type=rope_type, scaling=scaling)


def _max_model_len(config: EngineConfig, positions: int, rope: RopeConfig) -> int:
    """What the engine serves, within the positions that the model was trained or scaled to."""
    factor = float(rope.scaling.get("factor") or 1.0)
    limit = positions
    if rope.rope_type == "linear":
        limit = int(positions * factor)
    elif rope.rope_type == "yarn":  # some configs count max_position_embeddings before the scaling, others after it
        limit = max(positions, int(rope.scaling["original_max_position_embeddings"] * factor))
    if config.max_model_len is not None and config.max_model_len > limit:
        raise InvalidParameter(
            "max_model_len", f"max_model_len={config.max_model_len:,}: the model's own limit is {limit:,}"
        )
    return config.max_model_len or limit


def _dtype(config: EngineConfig, hf: Fields) -> DType:
    if config.dtype != "auto":
        return config.dtype
    named = getattr(hf, "dtype", None)
    dtype = "float32" if named is None else str(named).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise InvalidParameter(
            "dtype", f"dtype='auto': the checkpoint's is {dtype}; choose one of {', '.join(DTYPE_BYTES)}"
        )
    return dtype  # type: ignore[return-value]


def _sliding_window(hf: Fields) -> tuple[int | None, ...]:
    """One entry a layer. Mistral's window holds for all of them, Qwen's for those that layer_types names.

    Llama has none, whatever its config says.
    """
    layers = hf.num_hidden_layers
    window = None if hf.model_type == "llama" else getattr(hf, "sliding_window", None)
    if window is None or not getattr(hf, "use_sliding_window", True):
        return (None,) * layers
    types = getattr(hf, "layer_types", None) or ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _ids(value: Any) -> set[int]:
    """Token ids of a field that holds one, a list, or nothing."""
    values = value if isinstance(value, list) else [value]
    return {i for i in values if isinstance(i, int) and not isinstance(i, bool) and i >= 0}


def _tokenizer_eos(folder: Path) -> set[int]:
    """The id of the token that tokenizer_config.json calls eos_token, without loading the tokenizer."""
    settings = _read_json(folder / "tokenizer_config.json")
    eos = settings.get("eos_token") or _read_json(folder / "special_tokens_map.json").get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if not text:
        return set()
    for number, token in settings.get("added_tokens_decoder", {}).items():
        if token.get("content") == text:
            return {int(number)}
    return {token["id"] for token in _added_tokens(folder / "tokenizer.json") if token.get("content") == text}


def _added_tokens(path: Path) -> list[dict[str, Any]]:
    """That list of a tokenizer.json alone: some lines of megabytes, and the first list of this name."""
    if not path.is_file():
        return []
    try:
        text = path.read_text(encoding="utf-8")
        found = re.search(r'"added_tokens"\s*:\s*(?=\[)', text)
        tokens: list[dict[str, Any]] = json.JSONDecoder().raw_decode(text, found.end())[0] if found else []
    except ValueError as error:
        raise InvalidParameter("model", f"{path} is not valid JSON: {error}") from error
    return tokens


def _generation_defaults(name: str, generation: dict[str, Any]) -> dict[str, Any]:
    """Sampling fields of generation_config.json.

    A file that says `do_sample: false` wants none of those that shape a random choice; one that says nothing is
    taken at its word, as other servers do, and what it leaves out is SamplingParams' own default.
    """
    names = ["repetition_penalty"]
    if generation.get("do_sample") is not False:
        names += _SAMPLING_FIELDS
    defaults = {field: generation[field] for field in names if generation.get(field) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidParameter as error:
        raise InvalidParameter.of("model", name, f"its generation_config.json has {error}") from error
    return defaults
