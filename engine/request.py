"""A request: what travels to an engine, and what the engine keeps of it while it runs."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.sampling_params import SamplingParams

Clock = Callable[[], float]
"""Seconds since the epoch, or of a virtual time; passed to everything that asks for the time."""


class ExtraKey(NamedTuple):
    """Something besides the tokens that makes a KV block different: `("salt", …)`, `("lora", …)`."""

    kind: str
    value: str


class GrammarSpec(NamedTuple):
    """What a request's output must look like.

    Attributes:
        kind: `json_schema`, `regex`, `ebnf` or `choice`.
        text: the grammar, normalised, so that equal grammars share a compilation.
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence to generate, as it travels from the text side to an engine.

    Attributes:
        request_id: ours, unique over the whole service.
        client_request_id: the client's name for it; for logs alone.
        model: the name under which it was asked for.
        prompt_token_ids: one token or more.
        output_token_ids: what a resumed request had already received. Limits, penalties and usage count from the
            original prompt, and only further tokens are put out.
        num_prompt_logprobs: rows of prompt logprobs that a resumed request had already received.
        params: with n = 1; the Processor turns n > 1 into as many requests.
        seed: of the random choices, an unsigned 64-bit number.
        eos_token_ids: tokens that end it; empty where the params ignore them.
        priority: a lower number runs first under the `priority` policy.
        arrival_time: when the client's request arrived, by the clock of the process that took it.
        deadline: when it is no longer wanted, by the same clock; None is never.
        block_hashes: of the prompt's full blocks; empty lets the engine compute them.
        extra_keys: part of the hash of each of its blocks.
        grammar: what its output must look like.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    client_request_id: str | None = None
    model: str = ""
    output_token_ids: tuple[int, ...] = ()
    num_prompt_logprobs: int = 0
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    arrival_time: float = 0.0
    deadline: float | None = None
    block_hashes: tuple[bytes, ...] = ()
    extra_keys: tuple[ExtraKey, ...] = ()
    grammar: GrammarSpec | None = None


def child_seed(seed: int, index: int) -> int:
    """Seed of the index-th of n completions; the first keeps the request's own.

    n = 1 and the first of many therefore give the same tokens.
    """
    if index == 0:
        return seed
    digest = hashlib.sha256(seed.to_bytes(8, "little") + index.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little")


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are OpenAI's where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestStatus(enum.Enum):
    """Where a request stands in the scheduler.

    WAITING → RUNNING → FINISHED; RUNNING → PREEMPTED → RUNNING; any → FINISHED on an abort, and PREEMPTED → FINISHED
    where the token of a step that was in flight ends it.
    """

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """What an engine keeps of a request.

    Owned by the Scheduler, touched on the engine's thread alone.

    Attributes:
        spec: what arrived.
        token_ids: prompt and output, growing.
        num_computed_tokens: tokens whose keys and values are in the KV blocks once the steps in flight have run.
        num_pending_tokens: that steps in flight sample, after those in token_ids. A step that verifies drafts counts
            each of them; which were right is known with its result.
        num_expected_cached: tokens of it that the prefix cache had when it came, or requests before it were to compute.
        claimed_blocks: hashes of the blocks that it is counted on to compute; it has none once it has a token.
        num_cached_tokens: prompt tokens that the prefix cache gave when it first started; -1 until then.
        block_hashes: of its full blocks so far.
        spec_token_ids: drafts to verify in its next step.
        num_prompt_logprobs: rows of prompt logprobs that were put out; a preempted request goes on after them.
        order: its place in the scheduler's line, unique; the lowest runs first and is preempted last.
        queued_at, scheduled_at, first_token_at, finished_at: times by the engine's clock; None until they come.
    """

    spec: EngineRequest
    token_ids: list[int]
    queued_at: float
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_expected_cached: int = 0
    claimed_blocks: Sequence[bytes] = ()
    num_cached_tokens: int = -1
    block_hashes: list[bytes] = field(default_factory=list)
    spec_token_ids: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    order: tuple[int, float, int] = (0, 0.0, 0)
    finish_reason: FinishReason | None = None
    scheduled_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    @classmethod
    def of(cls, spec: EngineRequest, now: float) -> Request:
        return cls(
            spec=spec,
            token_ids=[*spec.prompt_token_ids, *spec.output_token_ids],
            queued_at=now,
            block_hashes=list(spec.block_hashes),
            # The first output token comes after the last row, so whoever resumes with output has them all.
            num_prompt_logprobs=len(spec.prompt_token_ids) - 1 if spec.output_token_ids else spec.num_prompt_logprobs,
        )

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def num_tokens(self) -> int:
        """Prompt and output, as far as known; drafts do not count."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Of the original prompt, whatever was resumed."""
        return len(self.spec.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.spec.prompt_token_ids)

    @property
    def num_wanted_tokens(self) -> int:
        """Still to be computed, pending ones included; drafts do not count."""
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def num_expected_tokens(self) -> int:
        """To be computed once it starts, if the prefix cache then has what it was expected to have."""
        return len(self.token_ids) - self.num_expected_cached

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether rows of prompt logprobs that it asked for are still to come."""
        return self.spec.params.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    @property
    def is_running(self) -> bool:
        return self.status is RequestStatus.RUNNING

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED
