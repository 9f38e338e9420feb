"""Which KV blocks each request has, and what it finds in the prefix cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from engine.kv_cache.block_hash import hash_block, hash_blocks
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.events import BlockStored, KVEvent
from engine.kv_cache.free_block_queue import KVCacheBlock
from engine.request import Request


class PrefixMatch(NamedTuple):
    """What the prefix cache has of a request.

    Attributes:
        blocks: its leading blocks; nobody holds them for it yet.
        missing: hash of the block after those, where the request could use that one too.
    """

    blocks: Sequence[KVCacheBlock]
    missing: bytes | None


NO_MATCH = PrefixMatch((), None)


class KVCacheManager:
    """Gives requests the blocks for their tokens, and shares full blocks between equal prefixes.

    A block's content gets its name only when the step that computed it has run (`store_blocks`): a failed step leaves
    nothing behind that could be matched, and no request reads what is still being written.

    Owned by the Scheduler, touched on the engine's thread alone. Costs follow the blocks that a call touches.
    """

    def __init__(self, num_blocks: int, *, block_size: int, root: bytes, enable_prefix_caching: bool = True) -> None:
        """Makes all blocks.

        Args:
            root: `engine.kv_cache.block_hash.root_hash` of the model that fills the blocks.
        """
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.block_pool = BlockPool(num_blocks)
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        self._root = root

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def prepare(self, request: Request) -> None:
        """Completes the block hashes of a request that arrived.

        Those that came with it are taken over if the first is right: a sender with another model, revision, dtype or
        block size differs in every one.
        """
        if not self.enable_prefix_caching:
            return
        keys, size = request.spec.extra_keys, self.block_size
        known = request.block_hashes
        if known:
            first = hash_block(self._root, request.token_ids[:size], keys)
            if known[0] != first or len(known) > request.num_tokens // size:
                known = []
        request.block_hashes = hash_blocks(request.token_ids, size, self._root, keys, known=known)

    def match_prefix(self, request: Request) -> PrefixMatch:
        """The longest run of cached blocks that a request without blocks can start from.

        At least one token is left to compute. A request that still owes prompt logprobs computes every token whose
        logits those come from.
        """
        if not self.enable_prefix_caching:
            return NO_MATCH
        limit = request.num_tokens - 1
        if request.owes_prompt_logprobs:
            limit = min(limit, request.num_prompt_logprobs)
        blocks: list[KVCacheBlock] = []
        find = self.block_pool.find
        for block_hash in request.block_hashes[: limit // self.block_size]:
            block = find(block_hash)
            if block is None:
                return PrefixMatch(blocks, block_hash)
            blocks.append(block)
        return PrefixMatch(blocks, None)

    def allocate_slots(
        self, request: Request, num_tokens: int, cached: Sequence[KVCacheBlock] = (), *, reserve: int = 0
    ) -> list[KVCacheBlock] | None:
        """Makes room for the next tokens of a request.

        Args:
            num_tokens: tokens beyond the computed ones (request.num_computed_tokens and those in `cached`).
            cached: blocks of match_prefix that a starting request takes over.
            reserve: blocks that must still be free afterwards.

        Returns:
            The new blocks, without `cached`; empty where its last block has room. None, and nothing changed, if the
            pool cannot give them.
        """
        held = self.req_to_blocks.get(request.request_id)
        num_held = len(held) if held else 0
        total = request.num_computed_tokens + num_tokens + len(cached) * self.block_size
        count = self.blocks_for(total) - num_held - len(cached)
        if count <= 0 and held is not None:
            return []
        pool = self.block_pool
        rescued = sum(block.ref_count == 0 for block in cached)
        if count + rescued + reserve > pool.num_free:
            return None
        pool.share(cached)
        blocks = pool.take(count)
        if held is None:
            self.req_to_blocks[request.request_id] = [*cached, *blocks]
        else:
            held.extend(blocks)
        return blocks

    def store_blocks(self, request: Request, num_computed_before: int, num_computed: int) -> None:
        """Names the blocks that became full between two numbers of computed tokens, once their step has run."""
        size = self.block_size
        first, last = num_computed_before // size, num_computed // size
        if first >= last or not self.enable_prefix_caching:
            return
        if len(request.block_hashes) < last:
            request.block_hashes = hash_blocks(
                request.token_ids, size, self._root, request.spec.extra_keys, known=request.block_hashes
            )
        hashes = request.block_hashes
        blocks = self.req_to_blocks[request.request_id][first:last]
        self.block_pool.store(blocks, hashes[first:last], hashes[first - 1] if first else None)

    def free(self, request: Request) -> None:
        """Gives a request's blocks back; the tail of its chain is evicted first. Nothing if it has none."""
        self.block_pool.free(reversed(self.req_to_blocks.pop(request.request_id, ())))

    def reset_prefix_cache(self) -> bool:
        """Forgets all contents; False, and nothing done, while requests hold blocks."""
        return self.block_pool.clear()

    def snapshot(self) -> list[BlockStored]:
        """All blocks that can be matched now, in runs of consecutive ones."""
        return self.block_pool.snapshot()

    def take_events(self) -> list[KVEvent]:
        """Changes of the prefix cache since the last call. To be called after every step: they are kept until then."""
        return self.block_pool.take_events()

    def check_integrity(self) -> None:
        """Compares reference counts with the requests' blocks. O(blocks); for tests and an idle engine.

        Raises:
            AssertionError: the bookkeeping is broken.
        """
        self.block_pool.check_integrity()
        uses = Counter(block.block_id for blocks in self.req_to_blocks.values() for block in blocks)
        for block in self.block_pool.blocks:
            assert block.ref_count == uses[block.block_id], f"{block} has {uses[block.block_id]} users"
        for request_id, blocks in self.req_to_blocks.items():
            assert len({block.block_id for block in blocks}) == len(blocks), f"{request_id} has a block twice"
