"""Which kernels a CPU worker gets."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import ModelConfig
from engine.sampling_params import InvalidParameter
from engine.worker.cpu_kernels import load_cpu_kernels
from kernels.cpu.build import BuildError, build, supported_levels
from kernels.cpu.library import CpuKernels
from tests.engine.models.tiny import config_of, save_tiny


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, "LlamaForCausalLM", head_dim=16)
    return config_of(folder)


def load(model_config: ModelConfig, folder: Path, choice: Any = "auto", block_size: int = 16) -> CpuKernels | None:
    return load_cpu_kernels(choice, model_config, block_size=block_size, num_threads=1, cache_folder=folder)


def test_they_are_built_once_and_kept(model_config: ModelConfig, tmp_path: Path) -> None:
    assert load(model_config, tmp_path, "portable") is not None
    (library,) = tmp_path.iterdir()
    # transformers looks for libraries called kernels.
    assert library.name.startswith("manta_cpu_portable_")
    built = library.stat().st_mtime_ns
    assert load(model_config, tmp_path, "portable") is not None
    assert [path.stat().st_mtime_ns for path in tmp_path.iterdir()] == [built]


def test_torch_can_be_chosen(model_config: ModelConfig, tmp_path: Path) -> None:
    assert load(model_config, tmp_path, "torch") is None
    assert not list(tmp_path.iterdir())


def test_without_a_compiler_torch_serves_with_a_warning(
    model_config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert load(model_config, tmp_path / "cache") is None
    assert "no C++ compiler was found" in caplog.text
    with pytest.raises(InvalidParameter, match=r"cpu_kernels='portable': no C\+\+ compiler was found"):
        load(model_config, tmp_path / "cache", "portable")


def test_where_the_library_cannot_be_kept_torch_serves_with_a_warning(
    model_config: ModelConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        assert load(model_config, tmp_path / "file" / "cache") is None
    assert "Not a directory" in caplog.text
    with pytest.raises(InvalidParameter, match=r"cpu_kernels='portable': .*Not a directory"):
        load(model_config, tmp_path / "file" / "cache", "portable")


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text('#!/bin/sh\n[ "$1" = -dumpfullversion ] && exit\necho "no space left" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(compiler.parent))
    with pytest.raises(BuildError, match="no space left"):
        build("portable", tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    ("changes", "block_size", "reason"),
    [
        ({"dtype": "float16"}, 16, "float16"),
        ({}, 32, "blocks of 16 tokens, not of 32"),
        ({"head_dim": 40}, 16, "not of 40"),
        ({"head_dim": 512}, 16, "not of 512"),
        ({"hidden_size": 33}, 16, "even"),
    ],
)
def test_models_that_they_do_not_suit_run_on_torch(
    model_config: ModelConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    block_size: int,
    reason: str,
) -> None:
    config = replace(model_config, **changes)
    with caplog.at_level(logging.WARNING):
        assert load(config, tmp_path, block_size=block_size) is None
    assert reason in caplog.text
    with pytest.raises(InvalidParameter, match=reason):
        load(config, tmp_path, "portable", block_size)


def test_an_instruction_set_that_the_processor_lacks_is_refused(
    model_config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert supported_levels()[-1] == "portable"
    monkeypatch.setattr("engine.worker.cpu_kernels.supported_levels", lambda: ["avx2", "portable"])
    with pytest.raises(InvalidParameter, match="cpu_kernels='avx512_bf16': this processor has avx2, portable"):
        load(model_config, tmp_path, "avx512_bf16")
