"""Models on the C++ kernels, at every instruction set that this processor has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import ModelConfig, cache_folder
from kernels.cpu.build import build, supported_levels
from kernels.cpu.library import CpuKernels
from tests.engine.models.tiny import Runner, config_of, expected_logits, save_tiny

IDS = [(7 * i * i + 3 * i + 1) % 131 for i in range(75)]
# Sizes that fill no vector, heads of every kind, biases, norms and windows.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"hidden_size": 54, "intermediate_size": 90, "head_dim": 16}),
    "llama biases": (
        "LlamaForCausalLM",
        {"head_dim": 32, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama one head": ("LlamaForCausalLM", {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 80}),
    "llama many heads to one": (
        "LlamaForCausalLM",
        {"hidden_size": 52, "num_attention_heads": 26, "num_key_value_heads": 1, "head_dim": 16},
    ),
    "llama3 rope": (
        "LlamaForCausalLM",
        {
            "head_dim": 64,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "mistral window": ("MistralForCausalLM", {"head_dim": 96, "sliding_window": 20}),
    "qwen2": ("Qwen2ForCausalLM", {"num_attention_heads": 3, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 256, "num_attention_heads": 4}),
}


@pytest.fixture(scope="module", params=supported_levels())
def kernels(request: pytest.FixtureRequest) -> Iterator[CpuKernels]:
    return CpuKernels(build(request.param, cache_folder() / "kernels"), num_threads=2)


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelConfig]:
    architecture, config = MODELS[request.param]
    folder: Path = tmp_path_factory.mktemp("model")
    return save_tiny(folder, architecture, **config), config_of(folder)


def test_logits_equal_transformers(saved: tuple[Any, ModelConfig], kernels: CpuKernels) -> None:
    model, config = saved
    expected = expected_logits(model, IDS)
    # Sums of another order, of logits that these weights make as large as 10.
    allowed = 1e-5 * max(1.0, float(expected.abs().max()))
    for chunks in ([75], [30, 1, 17, 27], [1]):
        logits = Runner(config, kernels=kernels).logits(IDS, chunks)
        torch.testing.assert_close(logits, expected, rtol=0.0, atol=allowed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_its_batch(saved: tuple[Any, ModelConfig], kernels: CpuKernels, dtype: Any) -> None:
    _, config = saved
    config = replace(config, dtype=dtype)
    alone = Runner(config, kernels=kernels).logits(IDS, [75])
    for chunks in ([30, 1, 17, 27], [1]):
        assert torch.equal(Runner(config, kernels=kernels).logits(IDS, chunks), alone)
    runner = Runner(config, num_requests=3, kernels=kernels)
    runner.step({0: IDS[:40], 1: IDS[5:20]})
    runner.step({0: IDS[40:44], 1: IDS[20:21], 2: IDS[30:60]})
    assert torch.equal(runner.step({1: IDS[21:22], 0: IDS[44:45], 2: IDS[60:61]})[0][0], alone[44])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kept_tokens_alone_give_the_same_logits(
    saved: tuple[Any, ModelConfig], kernels: CpuKernels, dtype: Any
) -> None:
    _, config = saved
    config = replace(config, dtype=dtype)
    step = {0: IDS[:40], 1: IDS[5:20]}
    every = Runner(config, num_requests=2, kernels=kernels).flat_step(step)
    for kept in ([39, 54], [3], list(range(55)), []):
        indices = torch.tensor(kept, dtype=torch.int64)
        runner = Runner(config, num_requests=2, kernels=kernels)
        assert torch.equal(runner.flat_step(step, indices), every[indices])
        # Nothing is missing from the cache afterwards.
        assert torch.equal(runner.flat_step({1: IDS[20:22]}), _after(config, kernels, step, {1: IDS[20:22]}))


def _after(config: ModelConfig, kernels: CpuKernels, first: dict[int, list[int]], then: dict[int, list[int]]) -> Any:
    runner = Runner(config, num_requests=2, kernels=kernels)
    runner.flat_step(first)
    return runner.flat_step(then)


def test_bfloat16_stays_close(saved: tuple[Any, ModelConfig], kernels: CpuKernels) -> None:
    model, config = saved
    logits = Runner(replace(config, dtype="bfloat16"), kernels=kernels).logits(IDS, [60, 1])
    expected = expected_logits(model, IDS)
    assert (logits - expected).norm() < 0.05 * expected.norm()


def test_the_number_of_threads_changes_nothing(saved: tuple[Any, ModelConfig]) -> None:
    _, config = saved
    more = CpuKernels(build(supported_levels()[0], cache_folder() / "kernels"), num_threads=5)
    one = CpuKernels(build(supported_levels()[0], cache_folder() / "kernels"), num_threads=1)
    assert torch.equal(Runner(config, kernels=more).logits(IDS, [75]), Runner(config, kernels=one).logits(IDS, [75]))
