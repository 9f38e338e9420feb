"""Which replicas hold which KV blocks, by the hashes of the blocks' contents."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

MAX_BLOCKS = 1_000_000
"""Different blocks that are remembered, at some 250 bytes each: 16 million tokens of prefixes."""


class PrefixIndex:
    """For each block, the set of replicas that have it, one bit a replica.

    There are two tables. `stored` is what the replicas' KV events say; its size is bounded, and of what was used least
    recently the tail of a chain goes first, since nothing behind a missing block can be matched: chains are put in
    order when a prompt gets its first token, and when it ends. `coming` is what prompts that are on their way to a
    replica will leave there: each block counts from the decision to send the prompt until its first token, by when the
    events have said so.

    Two threads share it without a lock, each writing one of the tables: that of the transport `stored`, that of the
    router `coming`. A reader may see a table in the middle of a change, as if half of it had not come yet. A bit is not
    given out again before the transport has dropped what it stood for.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._stored: OrderedDict[bytes, int] = OrderedDict()
        self._coming: dict[bytes, int] = {}
        self._coming_counts: dict[tuple[int, bytes], int] = {}
        self._holdings: dict[int, CachedBlocks] = {}

    def __len__(self) -> int:
        """Blocks in `stored`."""
        return len(self._stored)

    def match(self, block_hashes: Sequence[bytes], replicas: int) -> dict[int, int]:
        """How many leading blocks of a prompt each replica has; those that have none are left out.

        Args:
            replicas: the bits of those that are asked about.

        Returns:
            A replica's bit to its number of blocks. O(blocks + replicas).
        """
        depths: dict[int, int] = {}
        stored, coming = self._stored.get, self._coming.get
        depth = 0
        for depth, block_hash in enumerate(block_hashes):
            holders = replicas & (stored(block_hash, 0) | coming(block_hash, 0))
            if holders != replicas:
                if depth:
                    _set_bits(depths, replicas ^ holders, depth)
                replicas = holders
                if not holders:
                    return depths
        if block_hashes:
            _set_bits(depths, replicas, depth + 1)
        return depths

    # ---- on the router's thread ----

    def expect(self, bit: int, block_hashes: Iterable[bytes]) -> None:
        """Notes that a replica will soon have these blocks; to be taken back by `arrived`."""
        coming, counts = self._coming, self._coming_counts
        for block_hash in block_hashes:
            key = (bit, block_hash)
            count = counts.get(key, 0)
            counts[key] = count + 1
            if not count:
                coming[block_hash] = coming.get(block_hash, 0) | bit

    def arrived(self, bit: int, block_hashes: Iterable[bytes]) -> None:
        """Ends what `expect` noted: the replica has told of these blocks by now, or never will."""
        coming, counts = self._coming, self._coming_counts
        for block_hash in block_hashes:
            key = (bit, block_hash)
            count = counts[key] - 1
            if count:
                counts[key] = count
                continue
            del counts[key]
            holders = coming[block_hash] & ~bit
            if holders:
                coming[block_hash] = holders
            else:
                del coming[block_hash]

    # ---- on the transport's ----

    def blocks_of(self, bit: int) -> CachedBlocks:
        """What a replica holds, to be kept up to date by its events."""
        blocks = self._holdings.get(bit)
        if blocks is None:
            blocks = self._holdings[bit] = CachedBlocks(self, bit)
        return blocks

    def drop(self, bit: int) -> None:
        """Forgets a replica, so that its bit can be another's."""
        blocks = self._holdings.pop(bit, None)
        if blocks is not None:
            self._clear(blocks)

    def touch(self, block_hashes: Sequence[bytes]) -> None:
        """Marks a chain as just used, its tail the least recently."""
        stored = self._stored
        for block_hash in reversed(block_hashes):
            if block_hash in stored:
                stored.move_to_end(block_hash)

    def _store(self, blocks: CachedBlocks, block_hashes: Sequence[bytes]) -> None:
        stored, bit = self._stored, blocks.bit
        for block_hash in reversed(block_hashes):
            stored[block_hash] = stored.get(block_hash, 0) | bit
            stored.move_to_end(block_hash)
        blocks.hashes.update(block_hashes)
        while len(stored) > self._max_blocks:
            evicted, holders = stored.popitem(last=False)
            while holders:
                lowest = holders & -holders
                holders ^= lowest
                if (held := self._holdings.get(lowest)) is not None:
                    held.hashes.discard(evicted)

    def _remove(self, blocks: CachedBlocks, block_hashes: Iterable[bytes]) -> None:
        stored, bit = self._stored, blocks.bit
        for block_hash in block_hashes:
            holders = stored.get(block_hash, 0) & ~bit
            if holders:
                stored[block_hash] = holders
            else:
                stored.pop(block_hash, None)
        blocks.hashes.difference_update(block_hashes)

    def _clear(self, blocks: CachedBlocks) -> None:
        self._remove(blocks, list(blocks.hashes))


class CachedBlocks:
    """The blocks in one replica's prefix cache, kept up to date by its events.

    Every event has a number. A reader that finds a gap, its first event included, asks for a snapshot and goes on
    collecting events meanwhile. Events that are in the snapshot already may be applied again: the last event of a
    block decides.

    Attributes:
        hashes: of its blocks, as far as they are remembered.
    """

    def __init__(self, index: PrefixIndex, bit: int) -> None:
        self.bit = bit
        self.hashes: set[bytes] = set()
        self._index = index
        self._next_seq: int | None = None
        self._awaiting_snapshot = False
        self._held_back: list[tuple[int, Sequence[KVEvent]]] = []

    def apply(self, seq: int, events: Sequence[KVEvent]) -> bool:
        """Takes in events, the first of which is number seq. True: something is missing, fetch a snapshot."""
        gap = seq != self._next_seq
        self._next_seq = seq + len(events)
        if gap and not self._awaiting_snapshot:
            self._awaiting_snapshot = True
            self._held_back = [(seq, events)]
            return True
        if not self._awaiting_snapshot:
            for event in events:
                self._apply_one(event)
        elif events:
            self._held_back.append((seq, events))
        return False

    def restore(self, seq: int, stored: Iterable[BlockStored]) -> None:
        """Starts again from a snapshot that has every event below seq in it."""
        self._index._clear(self)
        for chain in stored:
            self._apply_one(chain)
        for first, events in self._held_back:
            for event in events[max(0, seq - first) :]:
                self._apply_one(event)
        self._held_back = []
        self._awaiting_snapshot = False

    def hold(self, block_hashes: Sequence[bytes]) -> None:
        """The replica has found these blocks in its cache."""
        if not self.hashes.issuperset(block_hashes):
            self._index._store(self, block_hashes)

    def forget(self) -> None:
        """Whatever is known is old: the next event asks for a snapshot."""
        self._next_seq = None
        self._awaiting_snapshot = False
        self._held_back = []

    def _apply_one(self, event: KVEvent) -> None:
        match event:
            case BlockStored(block_hashes):
                self._index._store(self, block_hashes)
            case BlockRemoved(block_hashes):
                self._index._remove(self, block_hashes)
            case AllBlocksCleared():
                self._index._clear(self)


def _set_bits(depths: dict[int, int], bits: int, depth: int) -> None:
    while bits:
        lowest = bits & -bits
        depths[lowest] = depth
        bits ^= lowest
