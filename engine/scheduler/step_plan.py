"""A step in the making, and then in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.kv_cache.free_block_queue import KVCacheBlock
from engine.outputs import ScheduledStart, ScheduledStep
from engine.request import Request


@dataclass(slots=True)
class StepPlan:
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
