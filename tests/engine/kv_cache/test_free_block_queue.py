import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache.free_block_queue import FreeBlockQueue, KVCacheBlock


def make(count: int) -> tuple[FreeBlockQueue, list[KVCacheBlock]]:
    blocks = [KVCacheBlock(block_id) for block_id in range(count)]
    return FreeBlockQueue(blocks), blocks


def ids(queue: FreeBlockQueue) -> list[int]:
    return [block.block_id for block in queue]


def test_blocks_come_out_in_their_order():
    queue, _ = make(3)
    assert [queue.popleft().block_id for _ in range(3)] == [0, 1, 2]
    assert len(queue) == 0
    with pytest.raises(IndexError, match="no free KV block"):
        queue.popleft()


def test_a_block_leaves_from_the_head_the_middle_and_the_tail():
    queue, blocks = make(5)
    for index in (2, 0, 4):
        queue.remove(blocks[index])
    assert ids(queue) == [1, 3]
    assert blocks[2].previous is blocks[2].next is None


def test_blocks_are_added_at_either_end():
    queue, blocks = make(3)
    taken = [queue.popleft() for _ in range(3)]
    queue.append(taken[1])
    queue.append(taken[2])
    queue.appendleft(taken[0])
    assert ids(queue) == [0, 1, 2]
    assert blocks[0].next is blocks[1]


def test_a_block_is_neither_added_nor_removed_twice():
    queue, blocks = make(2)
    with pytest.raises(ValueError, match="in the free queue already"):
        queue.append(blocks[1])
    queue.remove(blocks[1])
    with pytest.raises(ValueError, match="not in the free queue"):
        queue.remove(blocks[1])
    assert ids(queue) == [0]


@given(st.lists(st.tuples(st.sampled_from(["popleft", "remove", "append", "appendleft"]), st.integers(0, 7))))
def test_it_behaves_like_a_list(operations):
    queue, blocks = make(8)
    expected = list(range(8))
    for operation, block_id in operations:
        if operation == "popleft" and expected:
            assert queue.popleft().block_id == expected.pop(0)
        elif operation == "remove" and block_id in expected:
            queue.remove(blocks[block_id])
            expected.remove(block_id)
        elif operation == "append" and block_id not in expected:
            queue.append(blocks[block_id])
            expected.append(block_id)
        elif operation == "appendleft" and block_id not in expected:
            queue.appendleft(blocks[block_id])
            expected.insert(0, block_id)
        assert ids(queue) == expected
        assert len(queue) == len(expected)
