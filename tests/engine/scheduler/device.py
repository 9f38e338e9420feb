"""A device without a model: each KV slot keeps the name of the tokens whose keys a real one would have there."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.outputs import EngineOutput, SampledStep, ScheduledStart, ScheduledStep, SchedulerOutput, TokenLogprobs
from engine.request import EngineRequest, GrammarSpec, Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.scheduler.scheduler import NO_WORK

VOCAB = 50
EOS = 49


def content(before: int, token: int) -> int:
    """Name of a token after all those before it."""
    return int.from_bytes(hashlib.blake2b(f"{before},{token}".encode(), digest_size=7).digest(), "little")


def contents(tokens: Iterable[int]) -> list[int]:
    names = [0]
    for token in tokens:
        names.append(content(names[-1], token))
    return names[1:]


def next_token(name: int, seed: int) -> int:
    """What is sampled after the token of this name."""
    return content(name, -1 - seed) % VOCAB


def true_output(spec: EngineRequest, max_model_len: int) -> list[int]:
    """What a request must give, whatever happens to it on its way."""
    tokens = [*spec.prompt_token_ids, *spec.output_token_ids]
    room = max_model_len if spec.params.max_tokens is None else len(spec.prompt_token_ids) + spec.params.max_tokens
    output: list[int] = []
    while len(tokens) < min(room, max_model_len):
        token = next_token(contents(tokens)[-1], spec.seed)
        tokens.append(token)
        output.append(token)
        enough = len(tokens) - len(spec.prompt_token_ids) >= spec.params.min_tokens
        if enough and (token in spec.eos_token_ids or token in spec.params.stop_token_ids):
            break
    return output


@dataclass
class Row:
    spec: EngineRequest
    tokens: list[int]
    block_ids: list[int]
    prompt_logprobs: int


@dataclass
class Device:
    """Obeys the executor's protocol, and asserts that no step reads a slot that holds anything but the right keys."""

    block_size: int
    max_num_seqs: int
    rows: dict[str, Row] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)

    def execute(self, work: SchedulerOutput) -> list[SampledStep]:
        for request_id in work.released:
            del self.rows[request_id]
        for start in work.starts:
            self._start(start)
        assert len(self.rows) <= self.max_num_seqs
        for step in work.steps:
            self.rows[step.request_id].block_ids += step.new_block_ids
        # Keys of all tokens are written before any are read, as by attention over a flat batch.
        for step in work.steps:
            self._write(step)
        return [self._read(step) for step in work.steps]

    def fail(self, *works: SchedulerOutput) -> None:
        """Leaves garbage in all slots that the steps write to, and forgets the requests."""
        for work in works:
            for request_id in work.released:
                del self.rows[request_id]
            for start in work.starts:
                self._start(start)
            for step in work.steps:
                row = self.rows[step.request_id]
                row.block_ids += step.new_block_ids
                for position in range(step.num_computed_tokens, step.num_computed_tokens + step.num_tokens):
                    self.slots[self._slot(row, position)] = -1
        self.rows.clear()

    def _start(self, start: ScheduledStart) -> None:
        assert start.spec.request_id not in self.rows
        self.rows[start.spec.request_id] = Row(
            start.spec, list(start.token_ids), list(start.block_ids), start.num_prompt_logprobs
        )

    def _slot(self, row: Row, position: int) -> int:
        return row.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, step: ScheduledStep) -> None:
        row = self.rows[step.request_id]
        tokens = [*row.tokens, *step.spec_token_ids]
        assert 0 < step.num_tokens <= len(tokens) - step.num_computed_tokens
        names = contents(tokens)
        for position in range(step.num_computed_tokens, step.num_computed_tokens + step.num_tokens):
            self.slots[self._slot(row, position)] = names[position]

    def _read(self, step: ScheduledStep) -> SampledStep:
        row = self.rows[step.request_id]
        end = step.num_computed_tokens + step.num_tokens
        names = contents([*row.tokens, *step.spec_token_ids][:end])
        assert [self.slots.get(self._slot(row, position)) for position in range(end)] == names
        assert step.samples == (end >= len(row.tokens))
        prompt_logprobs = self._prompt_logprobs(row, step)
        if not step.samples:
            assert not step.spec_token_ids
            return SampledStep(prompt_logprobs=prompt_logprobs)
        new = [next_token(names[len(row.tokens) - 1], row.spec.seed)]
        for draft in step.spec_token_ids:
            if draft != new[-1]:
                break
            new.append(next_token(contents([*row.tokens, *new])[-1], row.spec.seed))
        row.tokens += new
        logprobs = rows_for(new) if row.spec.params.logprobs is not None else None
        return SampledStep(tuple(new), logprobs, prompt_logprobs)

    def _prompt_logprobs(self, row: Row, step: ScheduledStep) -> TokenLogprobs | None:
        if row.spec.params.prompt_logprobs is None:
            return None
        first = max(step.num_computed_tokens, row.prompt_logprobs) + 1
        last = min(step.num_computed_tokens + step.num_tokens, len(row.spec.prompt_token_ids) - 1)
        return rows_for(row.spec.prompt_token_ids[first : last + 1]) if first <= last else None


def rows_for(tokens: Sequence[int]) -> TokenLogprobs:
    ids = np.array(tokens, np.int32).reshape(-1, 1)
    return TokenLogprobs(ids, -ids.astype(np.float32), np.ones(len(tokens), np.int32))


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_request(
    request_id: str,
    prompt: Iterable[int],
    *,
    priority: int = 0,
    arrival: float = 0.0,
    deadline: float | None = None,
    output: Sequence[int] = (),
    eos: Sequence[int] = (),
    seed: int = 0,
    grammar: GrammarSpec | None = None,
    **params: object,
) -> Request:
    spec = EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**params),  # type: ignore[arg-type]
        seed=seed,
        output_token_ids=tuple(output),
        eos_token_ids=tuple(eos),
        priority=priority,
        arrival_time=arrival,
        deadline=deadline,
        grammar=grammar,
    )
    return Request.of(spec, arrival)


class Loop:
    """The engine's loop: schedule, execute, update; with depth 1 a step is scheduled while the one before it runs.

    A step is executed as late as may be, so that nothing of it may depend on what the scheduler does meanwhile.

    Attributes:
        in_flight: steps that were scheduled and not executed.
    """

    def __init__(self, scheduler: Scheduler, device: Device, depth: int = 0) -> None:
        self.scheduler = scheduler
        self.device = device
        self.depth = depth
        self.in_flight: deque[SchedulerOutput] = deque()

    def step(self) -> tuple[SchedulerOutput, list[EngineOutput]]:
        """What was scheduled, and what the oldest step in flight gave."""
        work = self.start()
        return work, self.finish(work)

    def start(self) -> SchedulerOutput:
        work = self.scheduler.schedule()
        if work.steps:
            self.in_flight.append(work)
        return work

    def finish(self, work: SchedulerOutput) -> list[EngineOutput]:
        if not self.in_flight or (work.steps and len(self.in_flight) <= self.depth):
            return self.scheduler.update(NO_WORK, [])
        oldest = self.in_flight.popleft()
        return self.scheduler.update(oldest, self.device.execute(oldest))

    def fail(self, error: str) -> list[EngineOutput]:
        """The oldest step fails, and what runs behind it is lost. Nothing where nothing is to run."""
        if not self.in_flight and not self.start().steps:
            return self.scheduler.update(NO_WORK, [])
        oldest, behind = self.in_flight.popleft(), list(self.in_flight)
        self.in_flight.clear()
        self.device.fail(oldest, *behind)
        return self.scheduler.fail_step(oldest, error)

    @property
    def busy(self) -> bool:
        return bool(self.in_flight) or self.scheduler.has_unfinished()


def shares(work: SchedulerOutput) -> dict[str, int]:
    """Tokens that each request computes in a step."""
    return {step.request_id: step.num_tokens for step in work.steps}
