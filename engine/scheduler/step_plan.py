"""A step in the making."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.kv_cache.free_block_queue import KVCacheBlock
from engine.outputs import ScheduledStart, ScheduledStep
from engine.request import Request


@dataclass(slots=True)
class StepPlan:
    """What the scheduler has decided so far. Made anew for every step.

    Attributes:
        budget: tokens that the step still has room for.
        promised: free blocks that the requests in it will soon ask for. A request that starts leaves them alone:
            otherwise one of them would be preempted at once, in the end for nothing.
    """

    budget: int
    now: float
    promised: int = 0
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
        """Adds a request's share.

        Args:
            blocks_to_come: that its present tokens will need after this step.
        """
        self.steps.append(
            ScheduledStep(
                request.spec.request_id,
                request.num_computed_tokens,
                num_tokens,
                tuple([block.block_id for block in new_blocks]) if new_blocks else (),
                request.num_computed_tokens + num_tokens >= request.num_tokens,
                tuple(drafts) if drafts else (),
            )
        )
        self.budget -= num_tokens
        # One more for the tokens that it generates.
        self.promised += blocks_to_come + 1
