"""KV blocks, and the queue of those that nobody uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class KVCacheBlock:
    """A block's bookkeeping. Owned by the BlockPool; made once, and never thrown away.

    Attributes:
        block_id: its place in the KV cache's tensors.
        ref_count: requests that use it; 0 means that it is in the free queue.
        block_hash: name of its content while that can be matched, in use or free; else None.
        parent_hash: with block_hash, that of the block before it; None at the start of a sequence.
        previous, next: neighbours in the free queue; None while it is in use.
    """

    __slots__ = ("block_hash", "block_id", "next", "parent_hash", "previous", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.parent_hash: bytes | None = None
        self.previous: KVCacheBlock | None = None
        self.next: KVCacheBlock | None = None

    def __repr__(self) -> str:
        name = self.block_hash.hex()[:8] if self.block_hash else None
        return f"KVCacheBlock({self.block_id}, ref_count={self.ref_count}, block_hash={name})"


class FreeBlockQueue:
    """A doubly linked list through the blocks themselves, in the order in which they are reused.

    Taking from the head, adding at either end and removing from the middle are O(1). Two sentinels, which no caller
    sees, spare every operation the question whether a neighbour exists.
    """

    __slots__ = ("_head", "_size", "_tail")

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._head = self._tail = KVCacheBlock(-1)
        self._size = len(blocks)
        last = self._head
        for block in blocks:
            last.next, block.previous = block, last
            last = block
        self._tail = KVCacheBlock(-1)
        last.next, self._tail.previous = self._tail, last

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """From the next one to be reused to the last. For tests and checks."""
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next

    def popleft(self) -> KVCacheBlock:
        """Takes the block that has waited longest.

        Raises:
            IndexError: the queue is empty.
        """
        block = self._head.next
        if block is None or block is self._tail:
            raise IndexError("no free KV block")
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Takes a block out of the middle."""
        before, after = block.previous, block.next
        if before is None or after is None:
            raise ValueError(f"{block} is not in the free queue")
        before.next, after.previous = after, before
        block.previous = block.next = None
        self._size -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Adds a block that is reused last."""
        before = self._tail.previous
        assert before is not None
        self._link(before, block, self._tail)

    def appendleft(self, block: KVCacheBlock) -> None:
        """Adds a block that is reused next."""
        after = self._head.next
        assert after is not None
        self._link(self._head, block, after)

    def _link(self, before: KVCacheBlock, block: KVCacheBlock, after: KVCacheBlock) -> None:
        if block.next is not None:
            raise ValueError(f"{block} is in the free queue already")
        before.next, block.previous = block, before
        block.next, after.previous = after, block
        self._size += 1
