"""The batch of a step in the making, and those in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.kv_cache.free_block_queue import KVCacheBlock
from engine.outputs import ScheduledStart, ScheduledStep, SchedulerOutput
from engine.request import Request


@dataclass(slots=True)
class ScheduledBatch:
    """What the scheduler has decided for one step. Made anew for every step, and kept until its results are taken in.

    Attributes:
        budget: tokens that the step still has room for.
        promised: free blocks that the requests in it will soon ask for. A request that starts leaves them alone:
            otherwise one of them would be preempted at once, in the end for nothing.
        requests: whose share each of `steps` is. Results belong to these objects: by the time that they arrive, an id
            may have passed to another request.
    """

    budget: int
    now: float
    promised: int = 0
    requests: list[Request] = field(default_factory=list)
    steps: list[ScheduledStep] = field(default_factory=list)
    starts: list[ScheduledStart] = field(default_factory=list)

    def add_start(self, request: Request, blocks: Sequence[KVCacheBlock]) -> None:
        block_ids = tuple([block.block_id for block in blocks])
        self.starts.append(
            ScheduledStart(
                request.spec,
                tuple(request.token_ids),
                block_ids,
                request.num_computed_tokens,
                request.num_prompt_logprobs,
            )
        )

    def add_step(
        self,
        request: Request,
        num_tokens: int,
        *,
        blocks_to_come: int,
        new_blocks: Sequence[KVCacheBlock] = (),
        drafts: Sequence[int] = (),
    ) -> None:
        """Adds a request's share, and moves the request past it.

        Args:
            blocks_to_come: that its present tokens will need after this step.
        """
        first = request.num_computed_tokens
        request.num_computed_tokens = last = first + num_tokens
        samples = last >= len(request.token_ids) + request.num_pending_tokens
        if samples:
            request.num_pending_tokens += 1 + len(drafts)
        self.requests.append(request)
        self.steps.append(
            ScheduledStep(
                request.spec.request_id,
                first,
                num_tokens,
                tuple([block.block_id for block in new_blocks]) if new_blocks else (),
                samples,
                tuple(drafts) if drafts else (),
            )
        )
        self.budget -= num_tokens
        # One more for the tokens that it generates.
        self.promised += blocks_to_come + 1

    def blocks_made_full(self, block_size: int) -> Iterator[bytes]:
        """Hashes of blocks that can be matched once the step has run, as far as they are known."""
        for request, step in zip(self.requests, self.steps, strict=True):
            if request.is_running:
                first = step.num_computed_tokens
                yield from request.block_hashes[first // block_size : (first + step.num_tokens) // block_size]


class StepsInFlight:
    """Steps that were scheduled and whose results have not been taken in, oldest first. Owned by the Scheduler."""

    def __init__(self) -> None:
        self._steps: deque[tuple[SchedulerOutput, ScheduledBatch]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[ScheduledBatch]:
        return (batch for _, batch in self._steps)

    def __contains__(self, request: Request) -> bool:
        """Whether a request has a part in any of them."""
        return any(request in batch.requests for batch in self)

    def add(self, batch: ScheduledBatch, released: tuple[str, ...]) -> SchedulerOutput:
        """A batch is complete: what the executor is told of it."""
        output = SchedulerOutput(tuple(batch.steps), tuple(batch.starts), released)
        self._steps.append((output, batch))
        return output

    def land(self, output: SchedulerOutput) -> list[Request]:
        """Takes the oldest one out, and returns whose its results are."""
        if not output.steps:
            return []
        oldest, batch = self._steps.popleft()
        assert oldest is output, "results come in another order than the steps"
        return batch.requests

    def drop(self, output: SchedulerOutput) -> list[Request]:
        """No results will come of any of them; returns who had a part in the oldest one."""
        for batch in self:
            for request in batch.requests:
                request.num_pending_tokens = 0
        requests = self.land(output)
        self._steps.clear()
        return requests

    def blocks_made_full(self, block_size: int) -> Iterator[bytes]:
        """See ScheduledBatch."""
        for batch in self:
            yield from batch.blocks_made_full(block_size)
