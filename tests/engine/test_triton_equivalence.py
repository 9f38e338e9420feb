"""Rule 3 on the GPU's path: a tiny model on the Triton kernels, in their interpreter.

The baseline is torch on the CPU, each request alone. Every other path runs device tables, Triton kernels, the device's
sampler and, but for `eager`, replayed decode steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.outputs import TokenLogprobs
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.worker.graph_runner import GraphRunner
from tests.engine.models.tiny import save_tiny

MAX_TOKENS = 6
SHARED = tuple((7 * i) % 120 + 3 for i in range(18))
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.0, seed=11, max_tokens=MAX_TOKENS),
    SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, repetition_penalty=1.3, min_tokens=3, logprobs=0),
    SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=12, max_tokens=MAX_TOKENS, presence_penalty=0.5),
]
REQUESTS = [
    EngineRequest(
        request_id=str(index),
        prompt_token_ids=(*SHARED, *(range(20 + index, 23 + 2 * index))),
        params=params,
        seed=params.seed or 0,
        eos_token_ids=(2,),
    )
    for index, params in enumerate(PARAMS)
]

Results = dict[str, tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]]


def save(folder: Path, architecture: str, **config: Any) -> Path:
    save_tiny(folder, architecture, num_hidden_layers=2, head_dim=32, max_position_embeddings=128, **config)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that norms its heads."""
    return save(tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM")


@contextmanager
def engine(folder: Path, **changed: Any) -> Iterator[EngineCore]:
    arguments: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "gpu_kernels": "triton",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "num_kv_blocks": 32,
        "enable_prefix_caching": False,
        "debug_integrity": True,
        **changed,
    }
    core = EngineCore.from_config(EngineConfig(model=str(folder), **arguments))
    try:
        yield core
    finally:
        core.shutdown()


def run(core: EngineCore, requests: list[EngineRequest]) -> Results:
    """Tokens, their log-probabilities and the prompt's, by request."""
    for request in requests:
        core.add_request(request)
    results: Results = {request.request_id: ([], [], []) for request in requests}
    while core.has_work():
        for output in core.step().outputs:
            assert output.error is None
            tokens, logprobs, prompt_logprobs = results[output.request_id]
            tokens += output.new_token_ids
            logprobs += [output.logprobs] if output.logprobs else []
            prompt_logprobs += [output.prompt_logprobs] if output.prompt_logprobs else []
    return results


def run_alone(folder: Path, requests: list[EngineRequest]) -> Results:
    with engine(folder, gpu_kernels="torch", cpu_kernels="torch") as core:
        return dict(item for request in requests for item in run(core, [request]).items())


@pytest.fixture(scope="module")
def alone(folder: Path) -> Results:
    return run_alone(folder, REQUESTS)


def assert_same(results: Results, expected: Results) -> None:
    for name, (tokens, *logprobs) in expected.items():
        assert results[name][0] == tokens
        for ours, theirs in zip(results[name][1:], logprobs, strict=True):
            assert joined(ours, "token_ids") == joined(theirs, "token_ids")
            assert joined(ours, "ranks") == joined(theirs, "ranks")
            np.testing.assert_allclose(joined(ours, "logprobs"), joined(theirs, "logprobs"), atol=1e-5)


def joined(parts: list[TokenLogprobs], field: str) -> list[Any]:
    return list(itertools.chain.from_iterable(getattr(part, field).tolist() for part in parts))


def metric(core: EngineCore, name: str) -> float:
    samples = itertools.chain.from_iterable(family.samples for family in core.metrics.registry.collect())
    return sum(sample.value for sample in samples if sample.name == name)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the decode steps that were replayed."""
    sizes: list[int] = []
    replay = GraphRunner.replay

    def counted(self: GraphRunner, padded: int) -> Any:
        sizes.append(padded)
        return replay(self, padded)

    monkeypatch.setattr(GraphRunner, "replay", counted)
    return sizes


def test_baseline_is_not_trivial(alone: Results) -> None:
    assert len({tuple(tokens) for tokens, _, _ in alone.values()}) == len(REQUESTS)
    assert sum(len(tokens) for tokens, _, _ in alone.values()) > 2 * MAX_TOKENS
    assert len(joined(alone["0"][2], "ranks")) == len(REQUESTS[0].prompt_token_ids) - 1


@pytest.mark.parametrize("overlap", [False, True])
def test_eager(folder: Path, alone: Results, replays: list[int], overlap: bool) -> None:
    with engine(folder, enforce_eager=True, async_scheduling=overlap) as core:
        assert_same(run(core, REQUESTS), alone)
        assert (metric(core, "manta_engine_overlapped_steps_total") > 0) == overlap
    assert not replays


@pytest.mark.parametrize("overlap", [False, True])
def test_graphs(folder: Path, alone: Results, replays: list[int], overlap: bool) -> None:
    with engine(folder, async_scheduling=overlap) as core:
        assert_same(run(core, REQUESTS[:3]), {name: alone[name] for name in "012"})
        assert (metric(core, "manta_engine_overlapped_steps_total") > 0) == overlap
    assert 4 in replays  # three requests, padded


def test_chunked_in_blocks_of_32(folder: Path, alone: Results) -> None:
    with engine(folder, max_num_batched_tokens=9, block_size=32) as core:
        assert_same(run(core, REQUESTS), alone)
        assert metric(core, "manta_engine_steps_total") > sum(len(each.prompt_token_ids) for each in REQUESTS) / 9


def test_warm_prefix_cache(folder: Path, alone: Results) -> None:
    with engine(folder, enable_prefix_caching=True) as core:
        run(core, REQUESTS[1:2])
        assert_same(run(core, REQUESTS), alone)
        # All but the one that asks for log-probabilities of its prompt.
        assert metric(core, "manta_prefix_cache_hit_tokens_total") == 3 * 16


def test_preempted(folder: Path) -> None:
    """Two requests of five blocks each at their end share eight."""
    prompt = tuple(i % 120 + 3 for i in range(47))
    long = [
        replace(request, prompt_token_ids=prompt, params=replace(request.params, max_tokens=20), eos_token_ids=())
        for request in REQUESTS[1:3]
    ]
    with engine(folder, max_model_len=80, num_kv_blocks=8, async_scheduling=True) as core:
        assert_same(run(core, long), run_alone(folder, long))
        assert metric(core, "manta_preemptions_total") > 0


def test_sliding_window(tmp_path: Path) -> None:
    folder = save(tmp_path, "MistralForCausalLM", sliding_window=12)
    with engine(folder, async_scheduling=True) as core:
        assert_same(run(core, REQUESTS), run_alone(folder, REQUESTS))


def test_resumed(folder: Path, alone: Results) -> None:
    delivered = {request.request_id: alone[request.request_id][0][:3] for request in REQUESTS}
    rest = [replace(request, output_token_ids=tuple(delivered[request.request_id])) for request in REQUESTS]
    with engine(folder, async_scheduling=True) as core:
        results = run(core, rest)
    assert {name: delivered[name] + results[name][0] for name in delivered} == {
        name: tokens for name, (tokens, _, _) in alone.items()
    }


def test_fp8_keys_and_values_stay_near(folder: Path, alone: Results) -> None:
    """First tokens are predicted from the same history: their log-probabilities differ by what FP8 rounds."""
    with engine(folder, kv_cache_dtype="fp8") as core:
        results = run(core, REQUESTS[:1])
    ours, theirs = (np.array(joined(each["0"][2], "logprobs"))[:, 0] for each in (results, alone))
    assert 0 < np.abs(ours - theirs).mean() < 0.1
