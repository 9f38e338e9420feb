import pytest

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored

A, B, C = (bytes([value]) * 32 for value in b"ABC")


def free_ids(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_block_queue]


def test_blocks_are_given_out_in_order_with_one_user():
    pool = BlockPool(4)
    taken = pool.take(3)
    assert [block.block_id for block in taken] == [0, 1, 2]
    assert [block.ref_count for block in taken] == [1, 1, 1]
    assert (pool.num_free, pool.num_used) == (1, 3)
    pool.check_integrity()


def test_taking_more_than_there_are_takes_none():
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="3 KV blocks wanted, 2 are free"):
        pool.take(3)
    assert free_ids(pool) == [0, 1]


def test_freed_contents_wait_behind_all_other_blocks_in_the_order_given():
    pool = BlockPool(4)
    first, second, third = pool.take(3)
    pool.store([first, second], [A, B], None)
    pool.free([third, second, first])
    # third holds nothing that could be matched and goes first; block 3 was never used.
    assert free_ids(pool) == [2, 3, 1, 0]
    pool.check_integrity()


def test_a_freed_block_keeps_its_content_until_it_is_reused():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.store([block], [A], None)
    pool.free([block])
    assert pool.find(A) is block
    pool.take(1)
    assert pool.find(A) is block
    assert pool.take(1) == [block]
    assert pool.find(A) is None
    pool.check_integrity()


def test_a_shared_block_is_rescued_from_the_middle_and_freed_by_its_last_user():
    pool = BlockPool(3)
    blocks = pool.take(3)
    pool.store(blocks, [A, B, C], None)
    pool.free(blocks)
    pool.share([blocks[1]])
    assert free_ids(pool) == [0, 2]
    pool.share([blocks[1]])
    pool.free([blocks[1]])
    assert free_ids(pool) == [0, 2]
    pool.free([blocks[1]])
    assert free_ids(pool) == [0, 2, 1]
    with pytest.raises(ValueError, match="is free already"):
        pool.free([blocks[1]])
    pool.check_integrity()


def test_a_second_copy_stays_nameless_while_the_first_is_in_use():
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.store([first], [A], None)
    pool.take_events()
    pool.store([second], [A], None)
    assert pool.find(A) is first
    assert second.block_hash is None
    assert pool.take_events() == []
    pool.free([second])
    assert free_ids(pool) == [1, 2]
    pool.check_integrity()


def test_a_copy_in_use_takes_the_name_from_a_free_one_which_is_reused_next():
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.store([first], [A], None)
    pool.free([first])
    pool.take_events()
    pool.store([second], [A], None)
    assert pool.find(A) is second
    assert first.block_hash is None
    assert free_ids(pool) == [0, 2]
    assert pool.take_events() == []
    pool.check_integrity()


def test_events_tell_what_was_stored_after_what_and_what_was_removed():
    pool = BlockPool(3)
    blocks = pool.take(3)
    pool.store(blocks[:2], [A, B], None)
    pool.store(blocks[2:], [C], B)
    pool.free(reversed(blocks))
    pool.take(2)
    assert pool.take_events() == [BlockStored((A, B), None), BlockStored((C,), B), BlockRemoved((C, B))]
    assert pool.take_events() == []


def test_events_name_the_right_parent_around_a_copy():
    pool = BlockPool(4)
    (held,) = pool.take(1)
    pool.store([held], [B], A)
    pool.take_events()
    pool.store(pool.take(3), [A, B, C], None)
    assert pool.take_events() == [BlockStored((A,), None), BlockStored((C,), B)]


def test_clear_forgets_all_contents_once_nothing_is_in_use():
    pool = BlockPool(2)
    blocks = pool.take(2)
    pool.store(blocks, [A, B], None)
    pool.free([blocks[0]])
    pool.take_events()
    assert not pool.clear()
    assert pool.find(A) is blocks[0]
    pool.free([blocks[1]])
    assert pool.clear()
    assert pool.find(A) is pool.find(B) is None
    assert pool.take_events() == [AllBlocksCleared()]
    assert pool.snapshot() == []
    pool.check_integrity()


def test_snapshot_lists_what_can_be_found_by_runs():
    pool = BlockPool(4)
    blocks = pool.take(3)
    pool.store(blocks[:1], [A], None)
    pool.store(blocks[2:], [C], B)
    pool.store(blocks[1:2], [B], A)
    assert pool.snapshot() == [BlockStored((A,), None), BlockStored((C,), B), BlockStored((B,), A)]
    pool.free(blocks[2:])
    pool.take(2)
    assert pool.snapshot() == [BlockStored((A, B), None)]


@pytest.mark.parametrize("damage", ["ref_count", "block_hash", "link"])
def test_integrity_check_sees_damage(damage):
    pool = BlockPool(3)
    (block,) = pool.take(1)
    if damage == "ref_count":
        block.ref_count = 0
    elif damage == "block_hash":
        block.block_hash = A
    else:
        pool.blocks[2].previous = pool.blocks[0]
    with pytest.raises(AssertionError):
        pool.check_integrity()
