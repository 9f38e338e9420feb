"""Engine arguments: what is taken, and how the rest is refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig, ModelConfig, available_threads, cache_folder
from engine.sampling_params import InvalidParameter


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float64"),
        ("device", "tpu"),
        ("load_format", "pt"),
        ("scheduling_policy", "lifo"),
        ("max_model_len", 0),
        ("max_num_seqs", 0),
        ("max_num_seqs", 1.5),
        ("max_num_batched_tokens", 255),
        ("block_size", True),
        ("kv_cache_memory_bytes", -1),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.1),
        ("gpu_memory_utilization", float("nan")),
        ("num_threads", 0),
        ("max_logprobs", -1),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=f"^{name}=") as refused:
        EngineConfig.from_args("demo", {name: value})
    assert refused.value.param == name


def test_values_of_another_type_are_refused_by_name() -> None:
    """For every argument: a list is never right, a text is no number and no truth value, true is no number."""
    allowed = {"bool": "must be true or false", "int": "must be a whole number", "float": "must be a number above 0"}
    for each in fields(EngineConfig):
        kind = str(each.type).removesuffix(" | None")
        wrong: list[Any] = [
            ["x"],
            *({"int": ["1", True], "float": ["0.5", True], "bool": ["off", "no", 1]}.get(kind, [])),
        ]
        for value in wrong:
            with pytest.raises(InvalidParameter) as refused:
                EngineConfig(**{"model": "demo", each.name: value})
            assert str(refused.value).startswith(f"{each.name}={value!r}: {allowed.get(kind, 'must be ')}")
            assert refused.value.param == each.name


def test_optional_arguments_may_be_left_open() -> None:
    optional = [each.name for each in fields(EngineConfig) if "None" in str(each.type)]
    assert {"async_scheduling", "num_threads", "revision"} <= set(optional)
    assert EngineConfig.from_args("demo", dict.fromkeys(optional)) == EngineConfig(model="demo")


@pytest.mark.parametrize(
    ("others", "culprit"),
    [
        ({"gpu_kernels": "torch"}, "gpu_kernels='torch'"),
        ({"gpu_kernels": "torch", "device": "cuda"}, "gpu_kernels='torch'"),
        ({"device": "cpu"}, "device='cpu'"),
    ],
)
def test_fp8_is_refused_where_no_triton_kernel_can_run(others: dict[str, Any], culprit: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^kv_cache_dtype='fp8': needs the Triton kernels .*, which {culprit}"):
        EngineConfig.from_args("demo", {"kv_cache_dtype": "fp8", **others})


def test_fp8_is_taken_where_triton_kernels_may_run() -> None:
    for others in ({}, {"device": "cuda"}, {"device": "cpu", "gpu_kernels": "triton"}):
        assert EngineConfig.from_args("demo", {"kv_cache_dtype": "fp8", **others}).kv_cache_dtype == "fp8"


def test_quantised_weights_exclude_fp8_keys() -> None:
    with pytest.raises(InvalidParameter, match=r"^quantization='int8': .*kv_cache_dtype='fp8' rules out"):
        EngineConfig(model="demo", quantization="int8", kv_cache_dtype="fp8")


def test_unknown_arguments_are_refused_with_what_was_meant() -> None:
    with pytest.raises(InvalidParameter, match=r"'max_num_seq'; did you mean 'max_num_seqs'\?"):
        EngineConfig.from_args("demo", {"max_num_seq": 4})
    with pytest.raises(InvalidParameter, match=r"known: .*max_model_len"):
        EngineConfig.from_args("demo", {"zzz": 4})


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MANTA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "manta"
    monkeypatch.setenv("MANTA_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_threads_are_bounded_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert available_threads() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "junk")
    assert available_threads() >= 1


def test_bytes_of_a_block_count_keys_and_values_of_all_layers() -> None:
    config = ModelConfig(
        name="x",
        path=Path("x"),
        architecture="LlamaForCausalLM",
        vocab_size=10,
        hidden_size=64,
        intermediate_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_model_len=64,
        dtype="bfloat16",
    )
    assert config.kv_block_bytes(16) == 2 * 3 * 2 * 16 * 16 * 2
