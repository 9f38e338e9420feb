"""Which request is counted on for a prompt block that several of those who wait have in common."""

from __future__ import annotations

from engine.request import Request


class PromptClaims:
    """Blocks of prompts that are yet to be computed, each counted on from one request. Owned by the Scheduler.

    The first request to come with a block claims it: it will compute and cache the block. Those that come after it, as
    long as it has no token and has not ended, expect to find the block cached. So what they have in common counts once
    among the tokens that wait.

    An expectation is made when its request comes, and kept. Where a claimer ends before it has computed its blocks,
    those that expect them are not looked for: their tokens are a lower bound then, until they start. The next request
    to come claims the blocks anew.

    Claiming is O(blocks of the prompt), releasing O(blocks claimed), however many wait.
    """

    def __init__(self) -> None:
        self._claimed: set[bytes] = set()

    def __len__(self) -> int:
        """Blocks that are claimed."""
        return len(self._claimed)

    def claim(self, request: Request, num_cached: int, block_size: int) -> None:
        """A request came: sets what it expects to find cached, and what it is counted on to compute.

        Args:
            num_cached: its leading blocks that the prefix cache has and it can start from.
            block_size: in tokens.
        """
        # At least one token is computed, so a last block that this one would fill is never taken from the cache.
        hashes = request.block_hashes[: (request.num_tokens - 1) // block_size]
        found = num_cached
        if not request.owes_prompt_logprobs:  # else it computes them itself, whoever else does
            while found < len(hashes) and hashes[found] in self._claimed:
                found += 1
        request.num_expected_cached = found * block_size
        request.claimed_blocks = [each for each in hashes[found:] if each not in self._claimed]
        self._claimed.update(request.claimed_blocks)

    def release(self, request: Request) -> None:
        """A request has its first token, so that its blocks are cached, or it has ended."""
        self._claimed.difference_update(request.claimed_blocks)
        request.claimed_blocks = ()
