"""All KV blocks of an engine: who uses them, and which contents can be found again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from engine.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from engine.kv_cache.free_block_queue import FreeBlockQueue, KVCacheBlock


class BlockPool:
    """Gives out blocks, counts their users and remembers the contents of those that were given back.

    A block that is given back keeps its content until it is reused, least recently used first; blocks without a content
    that could be matched are reused before all others. A hash names one block at a time.

    Owned by the KVCacheManager, touched on the engine's thread alone. Every operation is O(1) a block, whatever the
    pool's size.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: must be 1 or more")
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_block_queue = FreeBlockQueue(self.blocks)
        self._cached: dict[bytes, KVCacheBlock] = {}
        self._events: list[KVEvent] = []

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks without a user, those with a content included."""
        return len(self.free_block_queue)

    @property
    def num_used(self) -> int:
        return len(self.blocks) - len(self.free_block_queue)

    def find(self, block_hash: bytes) -> KVCacheBlock | None:
        """The block that holds this content, in use or free."""
        return self._cached.get(block_hash)

    def share(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Adds a user to each; those that were free are rescued from the queue."""
        for block in blocks:
            if block.ref_count == 0:
                self.free_block_queue.remove(block)
            block.ref_count += 1

    def take(self, count: int) -> list[KVCacheBlock]:
        """Gives out `count` blocks with one user each; their contents are forgotten.

        Raises:
            ValueError: fewer are free. Nothing was taken.
        """
        if count > len(self.free_block_queue):
            raise ValueError(f"{count} KV blocks wanted, {len(self.free_block_queue)} are free")
        taken, evicted = [], []
        for _ in range(count):
            block = self.free_block_queue.popleft()
            block.ref_count = 1
            if block.block_hash is not None:
                evicted.append(block.block_hash)
                self._forget(block)
            taken.append(block)
        if evicted:
            self._events.append(BlockRemoved(tuple(evicted)))
        return taken

    def free(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Takes a user from each; of those that have none left, the first given is evicted first."""
        for block in blocks:
            if block.ref_count < 1:
                raise ValueError(f"{block} is free already")
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.block_hash is None:
                    self.free_block_queue.appendleft(block)
                else:
                    self.free_block_queue.append(block)

    def store(self, blocks: Sequence[KVCacheBlock], block_hashes: Sequence[bytes], parent_hash: bytes | None) -> None:
        """Makes the contents of full blocks, which are in use, findable.

        Where another block holds the same content already, that one keeps the name if it is in use; if it is free it
        loses it, as its copy will stay longer.
        """
        stored: list[KVCacheBlock] = []
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            holder = self._cached.get(block_hash)
            if holder is None:
                stored.append(block)
            elif holder.ref_count == 0:
                self._forget(holder)
                self.free_block_queue.remove(holder)
                self.free_block_queue.appendleft(holder)
            if holder is None or holder.ref_count == 0:
                block.block_hash, block.parent_hash = block_hash, parent_hash
                self._cached[block_hash] = block
            parent_hash = block_hash
        self._events.extend(_chains(stored))

    def clear(self) -> bool:
        """Forgets all contents; False, and nothing done, while blocks are in use."""
        if self.num_used:
            return False
        for block in self._cached.values():
            block.block_hash = block.parent_hash = None
        self._cached.clear()
        self._events.append(AllBlocksCleared())
        return True

    def snapshot(self) -> list[BlockStored]:
        """All contents that can be found now, for a router that missed events. O(cached blocks)."""
        return _chains(self._cached.values())

    def take_events(self) -> list[KVEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check_integrity(self) -> None:
        """Compares all that is stored twice. O(blocks); for tests and an idle engine.

        Raises:
            AssertionError: the pool is broken.
        """
        assert all(block.block_id == index for index, block in enumerate(self.blocks)), "block ids are out of order"
        free = list(self.free_block_queue)
        assert len(free) == len(self.free_block_queue), "the free queue's size is not its length"
        for before, after in pairwise(free):
            assert after.previous is before, f"{after} does not point back to {before}"
        in_queue = {block.block_id for block in free}
        assert len(in_queue) == len(free), "a block is in the free queue twice"
        for block in self.blocks:
            assert block.ref_count >= 0, f"{block} has a negative reference count"
            assert (block.ref_count == 0) == (block.block_id in in_queue), f"{block} is in use or free, not both"
            assert block.ref_count == 0 or block.previous is block.next is None, f"{block} is in use and still linked"
        named = {block.block_hash: block for block in self.blocks if block.block_hash is not None}
        assert named == self._cached, "hashes and blocks disagree"

    def _forget(self, block: KVCacheBlock) -> None:
        assert block.block_hash is not None
        del self._cached[block.block_hash]
        block.block_hash = block.parent_hash = None


def _chains(blocks: Iterable[KVCacheBlock]) -> list[BlockStored]:
    """One entry for each run of blocks of which each is the parent of the next."""
    chains: list[BlockStored] = []
    run: list[bytes] = []
    parent: bytes | None = None
    for block in blocks:
        assert block.block_hash is not None
        if run and block.parent_hash != run[-1]:
            chains.append(BlockStored(tuple(run), parent))
            run = []
        if not run:
            parent = block.parent_hash
        run.append(block.block_hash)
    if run:
        chains.append(BlockStored(tuple(run), parent))
    return chains
