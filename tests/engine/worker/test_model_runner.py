"""What a runner makes of a step, around the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.torch_attention import TorchAttention
from engine.models import load_model
from engine.outputs import ScheduledStart, ScheduledStep, SchedulerOutput, TokenLogprobs
from engine.request import EngineRequest
from engine.sampling.host_sampler import HostSampler
from engine.sampling_params import SamplingParams
from engine.worker.model_input import HostBuffers
from engine.worker.model_runner import ModelRunner
from tests.engine.models.tiny import BLOCK_SIZE, SIZES, config_of, expected_logits, new_kv_caches, save_tiny

PROMPT = tuple(range(3, 43))
BLOCKS = (5, 2, 7)
ASKS = EngineRequest(
    request_id="a", prompt_token_ids=PROMPT, params=SamplingParams(temperature=0.0, prompt_logprobs=2), seed=0
)


def make_runner(attention: Any, device: str = "cpu") -> ModelRunner:
    place = torch.device(device)
    buffers = HostBuffers(
        max_num_seqs=2, max_model_len=64, max_num_batched_tokens=64, block_size=BLOCK_SIZE, device=place
    )
    return ModelRunner(attention, buffers, HostSampler(2, SIZES["vocab_size"] or 0), device=place)


def chunk(first: int, last: int, *, reported: int | None = None, released: tuple[str, ...] = ()) -> SchedulerOutput:
    """Computes tokens [first, last) of the prompt; a start where `reported` says how many rows were put out."""
    starts = () if reported is None else (ScheduledStart(ASKS, PROMPT, BLOCKS, first, reported),)
    step = ScheduledStep("a", first, last - first, (), samples=last == len(PROMPT))
    return SchedulerOutput((step,), starts, released)


def test_prompt_logprobs_go_on_after_a_preemption_without_gap_or_repeat(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "LlamaForCausalLM")
    config = config_of(tmp_path)
    attention = TorchAttention()
    with torch.inference_mode():
        model = load_model(config, load_format="auto", device="cpu", attention=attention)
    runner = make_runner(attention)
    runner.bind(model, new_kv_caches(attention, config, 8))

    parts: list[TokenLogprobs] = []
    # The second start finds 16 tokens in the prefix cache and computes 7 of its tokens once more.
    for work in (chunk(0, 23, reported=0), chunk(16, 31, reported=23, released=("a",)), chunk(31, 40)):
        (result,) = runner.submit(work).result()
        assert result.prompt_logprobs is not None
        parts.append(result.prompt_logprobs)
    assert [len(part.ranks) for part in parts] == [23, 8, 8]

    expected = expected_logits(reference, PROMPT).log_softmax(-1)[:-1]
    targets = torch.tensor(PROMPT[1:])[:, None]
    chosen = np.concatenate([part.logprobs[:, 0] for part in parts])
    np.testing.assert_allclose(chosen, expected.gather(1, targets)[:, 0], atol=1e-5)
    best = np.concatenate([part.token_ids[:, 1:] for part in parts])
    np.testing.assert_array_equal(best, expected.topk(2).indices)
    ranks = np.concatenate([part.ranks for part in parts])
    np.testing.assert_array_equal(ranks, 1 + (expected > expected.gather(1, targets)).sum(1))


class _Elsewhere:
    """A model on another device; it remembers where its inputs lay."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv_caches: Any, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        inputs = [token_ids, positions] if kept is None else [token_ids, positions, kept]
        self.seen |= {tensor.device.type for tensor in inputs}
        return torch.zeros(len(token_ids if kept is None else kept), 4)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), SIZES["vocab_size"] or 0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_models_inputs_lie_on_its_device(device: str) -> None:
    model = _Elsewhere()
    runner = make_runner(TorchAttention(), device)
    runner.bind(model, [])
    runner.submit(chunk(0, 40, reported=0)).result()
    assert model.seen == {device}
