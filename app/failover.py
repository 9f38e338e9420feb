"""Requests that outlive their replica: what a client was told is kept, and the rest comes from another one."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from app.transport import EngineClient, EngineFailed, NoReplica, QueueFull, ReplicaDied, TransportError
from engine.outputs import EngineOutput
from engine.request import Clock, EngineRequest, FinishReason

logger = logging.getLogger("ray.serve")

MAX_DEATHS = 3
"""Replicas that may die under a request in a row; if it got no token between them it is taken to be the cause."""

RETRY_PAUSE_S = 0.2
"""Between two attempts: Ray may take a moment to see that a replica is gone, or that another one is there."""


class ResumingClient:
    """An EngineClient whose requests go on elsewhere when their replica dies.

    A token follows from seed, position and the tokens before it, so that a resumed sequence is the one that would have
    come. Lives on one event loop.

    Args:
        client: serves the attempts.
        resume_wait_s: how long a request that has lost its replica waits for another that takes it.
        on_resume: called at each attempt beyond a request's first.
    """

    def __init__(
        self,
        client: EngineClient,
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
            ReplicaDied, NoReplica, QueueFull: none took over in time.
        """
        sequences = {spec.request_id: _Sequence(spec) for spec in requests}
        self._sequences |= sequences
        recovery = _Recovery(self._resume_wait_s, self._clock)
        pending = list(requests)
        try:
            while pending:
                by_name = {sequence.name: sequence for sequence in sequences.values()}
                # An engine client's iterators are generators, which is what closing them is about.
                attempt = cast(AsyncGenerator[list[EngineOutput], None], self._client.generate(pending))
                try:
                    async with aclosing(attempt):
                        async for outputs in attempt:
                            recovery.note(outputs)
                            yield [by_name[output.request_id].take(output) for output in outputs]
                    return
                except (ReplicaDied, NoReplica, QueueFull) as error:
                    await recovery.wait(error, pending)
                    self._on_resume()
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
        self._num_prompt_logprobs = spec.num_prompt_logprobs

    def take(self, output: EngineOutput) -> EngineOutput:
        """Notes what an output delivers, and gives it the request's own id."""
        self._token_ids += output.new_token_ids
        if output.prompt_logprobs is not None:
            self._num_prompt_logprobs += len(output.prompt_logprobs.ranks)
        self.finished = output.finished
        return output if self.name == self._spec.request_id else replace(output, request_id=self._spec.request_id)

    def end_aborted(self) -> EngineOutput:
        return self.take(EngineOutput(self.name, finish_reason=FinishReason.ABORT))

    def rest(self, attempt: int) -> EngineRequest:
        """What another replica has to do."""
        self.name = f"{self._spec.request_id}~{attempt}"
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
        self._lost_at: float | None = None
        self._dead: set[str | None] = set()

    def note(self, outputs: Sequence[EngineOutput]) -> None:
        """Whatever a replica gives shows that the request does not kill it at once."""
        if any(output.new_token_ids or output.prompt_logprobs is not None for output in outputs):
            self._lost_at = None
            self._dead.clear()

    async def wait(self, error: TransportError, pending: Sequence[EngineRequest]) -> None:
        """Returns when it is time for another attempt.

        Raises:
            TransportError: there is to be none.
        """
        now = self._clock()
        if isinstance(error, ReplicaDied):
            # Of one that is not known by name nobody can say that it is yet another one.
            self._dead.add(error.replica_id)
            if len(self._dead) >= MAX_DEATHS:
                raise EngineFailed(f"the request was given up: {MAX_DEATHS} replicas that served it died") from error
            self._lost_at = now if self._lost_at is None else self._lost_at
        if self._lost_at is None or now - self._lost_at >= self._wait_s:
            raise error
        self.attempts += 1
        logger.warning("resuming request_id=%s attempt=%d reason=%s", pending[0].request_id, self.attempts, error)
        await asyncio.sleep(RETRY_PAUSE_S)
