"""Rule 3: the same tokens, whatever the path. Every feature of the engine is held to this matrix.

The baseline runs each request alone, step after step, on an engine without a prefix cache; every other path must give
the same tokens, and must be seen to have been that path.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine import LLM, RequestOutput, SamplingParams
from engine.outputs import SchedulerOutput
from tests.engine.questions import questions

MAX_TOKENS = 40
SHARED = "You are a careful assistant who answers in full sentences and never invents facts. " * 4

GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
SEEDED = [
    SamplingParams(temperature=1.0, seed=11, max_tokens=MAX_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=40, seed=12, max_tokens=MAX_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=13, repetition_penalty=1.2, max_tokens=MAX_TOKENS, ignore_eos=True),
    SamplingParams(temperature=1.2, min_p=0.05, seed=14, presence_penalty=0.5, max_tokens=MAX_TOKENS, ignore_eos=True),
]


def prompts() -> list[str]:
    return [SHARED + question for question in questions(8)]


def params() -> list[SamplingParams]:
    return [GREEDY if index % 2 == 0 else SEEDED[index // 2 % len(SEEDED)] for index in range(8)]


Engine = Callable[..., AbstractContextManager[LLM]]


def metric(llm: LLM, name: str) -> float:
    return sum(
        sample.value
        for family in llm.core.metrics.registry.collect()
        for sample in family.samples
        if sample.name == name
    )


class Kind(NamedTuple):
    """Of engines that must agree with each other, and whether each of their steps is scheduled beside the one before.

    The C++ kernels hold the rule in bfloat16 as well: their sums have the same order for any number of rows.
    """

    dtype: str
    kernels: str
    overlaps: bool = False


KINDS = [
    Kind("float32", "auto"),
    Kind("float32", "auto", overlaps=True),
    Kind("bfloat16", "auto"),
    Kind("bfloat16", "auto", overlaps=True),
    Kind("float32", "torch"),
]


@pytest.fixture(
    scope="module",
    params=KINDS,
    ids=["float32", "float32-overlapped", "bfloat16", "bfloat16-overlapped", "float32-torch"],
)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(scope="module")
def engine(kind: Kind, demo_folder: Path) -> Engine:
    """Makes engines that differ in nothing but the arguments given."""

    @contextmanager
    def make(**changed: Any) -> Iterator[LLM]:
        arguments: dict[str, Any] = {
            "dtype": kind.dtype,
            "cpu_kernels": kind.kernels,
            "async_scheduling": kind.overlaps,
            "max_model_len": 512,
            "num_kv_blocks": 512,
            "debug_integrity": True,
            **changed,
        }
        with LLM(str(demo_folder), **arguments) as llm:
            yield llm
            overlapped = metric(llm, "manta_engine_overlapped_steps_total")
            # All but the first of each burst, and those in which one of eight requests is tried alone after a failure.
            alone = 8 * metric(llm, "manta_engine_failed_steps_total")
            least = 0.8 * (metric(llm, "manta_engine_steps_total") - alone)
            assert overlapped > least if arguments["async_scheduling"] else overlapped == 0

    return make


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def baselines() -> dict[tuple[str, str], list[list[int]]]:
    return {}


@pytest.fixture(scope="module")
def alone(kind: Kind, engine: Engine, baselines: dict[tuple[str, str], list[list[int]]]) -> list[list[int]]:
    if kind[:2] not in baselines:
        with engine(enable_prefix_caching=False, async_scheduling=False) as llm:
            baselines[kind[:2]] = [
                tokens(llm.generate([prompt], each, use_tqdm=False))[0]
                for prompt, each in zip(prompts(), params(), strict=True)
            ]
    return baselines[kind[:2]]


def test_baseline_is_not_trivial(alone: list[list[int]]) -> None:
    assert all(len(each) == MAX_TOKENS for each in alone)
    assert len({tuple(each) for each in alone}) == len(alone)


def test_batched(engine: Engine, alone: list[list[int]]) -> None:
    with engine(enable_prefix_caching=False) as llm:
        assert tokens(llm.generate(prompts(), params(), use_tqdm=False)) == alone
        # All in one batch: as many steps as one request takes, not eight times as many.
        assert metric(llm, "manta_engine_steps_total") <= MAX_TOKENS + 2


def test_chunked(engine: Engine, alone: list[list[int]]) -> None:
    with engine(enable_prefix_caching=False, max_num_seqs=8, max_num_batched_tokens=16) as llm:
        outputs = llm.generate(prompts(), params(), use_tqdm=False)
        assert tokens(outputs) == alone
        prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        assert metric(llm, "manta_engine_steps_total") > prompt_tokens / 16


def test_warm_prefix_cache(engine: Engine, alone: list[list[int]]) -> None:
    with engine() as llm:
        assert tokens(llm.generate(prompts(), params(), use_tqdm=False)) == alone
        again = llm.generate(prompts(), params(), use_tqdm=False)
        assert tokens(again) == alone
        assert all(output.num_cached_tokens >= len(output.prompt_token_ids) - 16 for output in again)


def test_forced_preemption(engine: Engine, alone: list[list[int]]) -> None:
    with engine(enable_prefix_caching=False, max_model_len=192, num_kv_blocks=36) as llm:
        assert tokens(llm.generate(prompts(), params(), use_tqdm=False)) == alone
        assert metric(llm, "manta_preemptions_total") > 0


def test_resumed(engine: Engine, alone: list[list[int]]) -> None:
    """What a failover does: another engine goes on from the tokens that were delivered."""
    with engine() as llm:
        rest: dict[str, list[int]] = {}
        for index, (prompt, each) in enumerate(zip(prompts(), params(), strict=True)):
            (request,) = llm._processor.process(prompt, each, request_id=str(index)).children
            delivered = alone[index][: 1 + 5 * index]
            llm.core.add_request(dataclasses.replace(request, output_token_ids=tuple(delivered)))
            rest[request.request_id] = delivered
        while llm.core.has_work():
            for output in llm.core.step().outputs:
                rest[output.request_id] = [*rest[output.request_id], *output.new_token_ids]
                assert output.timing is None or output.timing.num_generated_tokens < MAX_TOKENS
        assert list(rest.values()) == alone


@contextmanager
def failing(llm: LLM, fails: Callable[[SchedulerOutput], bool]) -> Iterator[None]:
    """Steps of which this is true run, and then their results are lost."""
    worker = llm.core._executor._worker
    submit = worker.submit

    def submits(work: SchedulerOutput) -> Any:
        handle = submit(work)
        if fails(work):
            raise MemoryError("no memory for this step")
        return handle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "submit", submits)
        yield


def test_with_a_failing_step(engine: Engine, alone: list[list[int]]) -> None:
    """A chunk of the prompts fails, and a step in which all decode."""
    with engine(max_num_batched_tokens=300) as llm:
        step = itertools.count(1)
        with failing(llm, lambda work: next(step) in (3, 40)):
            assert tokens(llm.generate(prompts(), params(), use_tqdm=False)) == alone
        assert metric(llm, "manta_engine_failed_steps_total") == 2


def test_beside_a_request_that_cannot_run(engine: Engine, alone: list[list[int]]) -> None:
    """It gets ten tokens, then every step fails that has it; nobody else sees anything of that."""
    bad = 3
    ends: dict[str, int] = {}

    def has_bad(work: SchedulerOutput) -> bool:
        for start in work.starts:
            if start.spec.seed == params()[bad].seed:
                ends[start.spec.request_id] = len(start.spec.prompt_token_ids) + 10
        parts = [part for part in work.steps if part.request_id in ends]
        return any(part.num_computed_tokens + part.num_tokens >= ends[part.request_id] for part in parts)

    with engine(enable_prefix_caching=False) as llm:
        with failing(llm, has_bad):
            outputs = llm.generate(prompts(), params(), use_tqdm=False)
        assert metric(llm, "manta_engine_failed_steps_total") == 2
    assert outputs[bad].error == "a step of the engine failed: no memory for this step"
    assert tokens(outputs) == [*alone[:bad], alone[bad][:10], *alone[bad + 1 :]]


def test_all_at_once(engine: Engine, alone: list[list[int]]) -> None:
    with engine(
        max_model_len=192,
        num_kv_blocks=26,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        scheduling_policy="priority",
    ) as llm:
        for ranks in (range(8), reversed(range(8))):
            outputs = llm.generate(prompts(), params(), use_tqdm=False, priority=list(ranks))
            assert tokens(outputs) == alone
        assert metric(llm, "manta_preemptions_total") > 0
        assert metric(llm, "manta_prefix_cache_hit_tokens_total") > 0


def test_one_of_many_completions(engine: Engine, alone: list[list[int]]) -> None:
    with engine() as llm:
        many = llm.generate(prompts()[1:2], replace(params()[1], n=3), use_tqdm=False)[0]
        assert many.outputs[0].token_ids == alone[1]
        # The children share the prompt's blocks: only the first computes them.
        assert metric(llm, "manta_prefix_cache_hit_tokens_total") >= 2 * (len(many.prompt_token_ids) // 16 * 16 - 16)


def test_stops_and_logprobs(engine: Engine, alone: list[list[int]]) -> None:
    """Whoever stops in the middle has exactly what it would have alone, and that is what is counted."""
    places = [3 * index for index in range(8)]
    stopping = [
        replace(each, stop_token_ids=[alone[index][places[index]]], logprobs=2, prompt_logprobs=1)
        for index, each in enumerate(params())
    ]
    with engine(async_scheduling=False) as llm:
        expected = llm.generate(prompts(), stopping, use_tqdm=False)
    with engine() as llm:
        outputs = llm.generate(prompts(), stopping, use_tqdm=False)
        ends = [each.index(each[place]) + 1 for each, place in zip(alone, places, strict=True)]
        assert tokens(outputs) == [each[:end] for each, end in zip(alone, ends, strict=True)]
        assert metric(llm, "manta_generated_tokens_total") == sum(ends)
    for output, other in zip(outputs, expected, strict=True):
        assert output.outputs == other.outputs
        assert output.prompt_logprobs == other.prompt_logprobs
        assert output.outputs[0].finish_reason == "stop"
