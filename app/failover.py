"""Requests that outlive their replica: what a client was told is kept, and the rest comes from another one."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from app.transport import (
    PROVEN_TOKENS,
    EngineFailed,
    NoReplica,
    QueueFull,
    ReplicaClient,
    ReplicaDied,
    ReplicaLost,
    TransportError,
    TrialBusy,
)
from engine.outputs import EngineOutput
from engine.request import Clock, EngineRequest, FinishReason

logger = logging.getLogger("ray.serve")

MAX_DEATHS = 3
"""Replicas that may die under a request in a row; if it proved itself on none of them, it is taken to be the cause.

It is not alone there: those beside it go from one dying replica to the next with it. So the last attempt is a trial, in
which a replica has no other suspect, and those who are innocent prove it (see transport.PROVEN_TOKENS).
"""

MAX_DEATHS_IN_ALL = 10
"""Replicas that may die under one request, whatever it got from each: no request is tried for ever."""

RETRY_PAUSE_S = 0.2
"""Before an attempt: Ray may take a moment to see that a replica is gone, or that another one is there."""

LONGEST_PAUSE_S = 2.0
"""Pauses double while nobody takes the request, up to this."""


class ResumingClient:
    """An EngineClient whose requests go on elsewhere when their replica dies.

    A token follows from seed, position and the tokens before it, so that a resumed sequence is the one that would have
    come. Lives on one event loop.

    Args:
        client: serves the attempts.
        resume_wait_s: how long a request that has lost its replica waits for another that takes it.
        on_resume: called each time that a request has lost its replica and is tried on another.
    """

    def __init__(
        self,
        client: ReplicaClient,
        *,
        resume_wait_s: float,
        on_resume: Callable[[], None] = lambda: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._client = client
        self._on_resume = on_resume
        self._resume_wait_s = resume_wait_s
        self._clock = clock
        self._sequences: dict[str, _Sequence] = {}

    async def generate(self, requests: Sequence[EngineRequest]) -> AsyncGenerator[list[EngineOutput], None]:
        """See EngineClient. Close the iterator (`aclosing`) where it is left early.

        Raises:
            EngineFailed: the replicas that tried it died of it.
            ReplicaLost: none took over in time.
            NoReplica, QueueFull: none took it in the first place.
        """
        sequences = {spec.request_id: _Sequence(spec) for spec in requests}
        self._sequences |= sequences
        recovery = _Recovery(self._resume_wait_s, self._clock)
        pending = list(requests)
        try:
            while pending:
                by_name = {sequence.name: sequence for sequence in sequences.values()}
                # An engine client's iterators are generators, which is what closing them is about.
                attempt = cast(
                    AsyncGenerator[list[EngineOutput], None],
                    self._client.generate(pending, on_trial=recovery.is_suspect),
                )
                try:
                    async with aclosing(attempt):
                        async for outputs in attempt:
                            yield [by_name[output.request_id].take(output) for output in outputs]
                    return
                except (ReplicaLost, NoReplica, QueueFull) as error:
                    if isinstance(error, ReplicaLost):
                        recovery.note_loss(error, is_proven=all(each.is_proven for each in by_name.values()))
                        self._on_resume()
                    await recovery.wait(error, pending)
                left = [sequence for sequence in sequences.values() if not sequence.finished]
                if ended := [sequence.end_aborted() for sequence in left if sequence.is_aborted]:
                    yield ended
                pending = [sequence.rest(recovery.attempts) for sequence in left if not sequence.finished]
        finally:
            for request_id in sequences:
                del self._sequences[request_id]

    def abort(self, request_ids: Iterable[str]) -> None:
        """See EngineClient."""
        known = [self._sequences[each] for each in request_ids if each in self._sequences]
        for sequence in known:
            sequence.is_aborted = True  # where it is between two attempts, no other client knows of it
        self._client.abort([sequence.name for sequence in known])


class _Sequence:
    """What has been delivered of a request.

    Attributes:
        name: of the present attempt; replicas that are merely cut off may still run an earlier one.
        is_aborted: whether that was asked for.
    """

    def __init__(self, spec: EngineRequest) -> None:
        self.name = spec.request_id
        self.finished = False
        self.is_aborted = False
        self._spec = spec
        self._token_ids = list(spec.output_token_ids)
        self._num_before = len(self._token_ids)
        self._num_prompt_logprobs = spec.num_prompt_logprobs

    def take(self, output: EngineOutput) -> EngineOutput:
        """Notes what an output delivers, and gives it the request's own id."""
        self._token_ids += output.new_token_ids
        if output.prompt_logprobs is not None:
            self._num_prompt_logprobs += len(output.prompt_logprobs.ranks)
        self.finished = output.finished
        return output if self.name == self._spec.request_id else replace(output, request_id=self._spec.request_id)

    @property
    def is_proven(self) -> bool:
        """Whether the present attempt has come so far that it is not what its replica dies of."""
        return self.finished or len(self._token_ids) - self._num_before >= PROVEN_TOKENS

    def end_aborted(self) -> EngineOutput:
        return self.take(EngineOutput(self.name, finish_reason=FinishReason.ABORT))

    def rest(self, attempt: int) -> EngineRequest:
        """What another replica has to do."""
        self.name = f"{self._spec.request_id}~{attempt}"
        self._num_before = len(self._token_ids)
        return replace(
            self._spec,
            request_id=self.name,
            output_token_ids=tuple(self._token_ids),
            num_prompt_logprobs=self._num_prompt_logprobs,
        )


class _Recovery:
    """Whether, and when, a request is tried once more.

    Attributes:
        attempts: beyond the first.
    """

    def __init__(self, wait_s: float, clock: Clock) -> None:
        self.attempts = 0
        self._wait_s = wait_s
        self._clock = clock
        self._waiting_since: float | None = None
        self._just_lost = False
        self._pause_s = RETRY_PAUSE_S
        self._dead: set[str | None] = set()
        self._deaths = 0

    @property
    def is_suspect(self) -> bool:
        """Whether the next death under it would be the last."""
        return len(self._dead) >= MAX_DEATHS - 1

    def note_loss(self, error: ReplicaLost, *, is_proven: bool) -> None:
        """A replica died, or only the connection with it did.

        Args:
            is_proven: whether all sequences had come so far on it that none of them can be the cause.

        Raises:
            EngineFailed: no other is to be risked.
        """
        # Of one that is not known by name nobody can say that it is yet another one.
        is_news = is_proven or error.replica_id not in self._dead
        if is_proven:
            self._dead.clear()
        if isinstance(error, ReplicaDied) and is_news:
            self._deaths += 1
            if not is_proven:
                self._dead.add(error.replica_id)
            if len(self._dead) >= MAX_DEATHS or self._deaths >= MAX_DEATHS_IN_ALL:
                raise EngineFailed(f"the request was given up: {self._deaths} replicas that served it died") from error
        elif not is_proven and self._waiting_since is not None:
            return  # the same once more, or a connection that breaks again and again
        self._waiting_since = self._clock()
        self._just_lost = True
        self._pause_s = RETRY_PAUSE_S

    async def wait(self, error: TransportError, pending: Sequence[EngineRequest]) -> None:
        """Returns when it is time for another attempt.

        Raises:
            TransportError: there is to be none.
        """
        if self._waiting_since is None:
            raise error
        if isinstance(error, TrialBusy):
            self._waiting_since = self._clock()  # there are replicas; it waits for other requests
        elif not self._just_lost and self._clock() - self._waiting_since >= self._wait_s:
            raise ReplicaLost(f"the replica was lost, and no other took the request in time: {error}") from error
        self.attempts += 1
        if self._just_lost:
            self._just_lost = False
            logger.warning("resuming request_id=%s attempt=%d reason=%s", pending[0].request_id, self.attempts, error)
        # Those who lost the same replica must not all come at the same moments.
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.5))
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
