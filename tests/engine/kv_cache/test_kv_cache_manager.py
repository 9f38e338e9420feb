import pytest

from engine.kv_cache.block_hash import hash_blocks
from engine.kv_cache.events import BlockStored
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.request import EngineRequest, ExtraKey, Request
from engine.sampling_params import SamplingParams
from tests.engine.cost import lines_run

ROOT = bytes(32)


def manager(num_blocks: int = 10, *, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size=4, root=ROOT, enable_prefix_caching=caching)


def request(kv: KVCacheManager, request_id: str, tokens, **spec) -> Request:
    params = spec.pop("params", SamplingParams())
    new = Request.of(
        EngineRequest(request_id=request_id, prompt_token_ids=tuple(tokens), params=params, seed=0, **spec), 0.0
    )
    kv.prepare(new)
    return new


def compute(kv: KVCacheManager, req: Request, count: int) -> None:
    """What a step that ran does."""
    before = req.num_computed_tokens
    req.num_computed_tokens += count
    kv.store_blocks(req, before, req.num_computed_tokens)


def run(kv: KVCacheManager, req: Request, count: int | None = None) -> list[int]:
    """Starts a request from the cache, computes its tokens and returns its blocks."""
    cached, _ = kv.match_prefix(req)
    count = req.num_tokens - len(cached) * kv.block_size if count is None else count
    assert kv.allocate_slots(req, count, cached) is not None
    req.num_computed_tokens = len(cached) * kv.block_size
    compute(kv, req, count)
    return block_ids(kv, req)


def block_ids(kv: KVCacheManager, req: Request) -> list[int]:
    return [block.block_id for block in kv.req_to_blocks[req.request_id]]


def free_ids(kv: KVCacheManager) -> list[int]:
    return [block.block_id for block in kv.block_pool.free_block_queue]


def test_a_request_gets_blocks_only_when_its_last_one_is_full():
    kv = manager()
    req = request(kv, "a", range(6))
    assert [block.block_id for block in kv.allocate_slots(req, 6)] == [0, 1]
    compute(kv, req, 6)
    req.token_ids += [6, 7, 8]
    assert kv.allocate_slots(req, 2) == []
    compute(kv, req, 2)
    assert [block.block_id for block in kv.allocate_slots(req, 1)] == [2]
    assert block_ids(kv, req) == [0, 1, 2]
    kv.check_integrity()


def test_allocation_that_does_not_fit_changes_nothing():
    kv = manager(3)
    first, second = request(kv, "a", range(8)), request(kv, "b", range(8))
    run(kv, first)
    assert kv.allocate_slots(second, 8) is None
    assert kv.allocate_slots(second, 4, reserve=1) is None
    assert "b" not in kv.req_to_blocks
    assert free_ids(kv) == [2]
    assert kv.allocate_slots(second, 4) is not None
    kv.check_integrity()


def test_a_hit_shares_full_blocks_and_leaves_one_token_to_compute():
    kv = manager()
    first, second, longer = request(kv, "a", range(8)), request(kv, "b", range(8)), request(kv, "c", range(9))
    assert run(kv, first) == [0, 1]
    # The last of 8 tokens is to be computed: its block cannot be shared.
    assert run(kv, second) == [0, 2]
    assert second.num_computed_tokens == 8
    assert run(kv, longer) == [0, 1, 3]
    assert [block.ref_count for block in kv.block_pool.blocks[:4]] == [3, 2, 1, 1]
    kv.check_integrity()


def test_a_match_names_the_block_that_is_missing():
    kv = manager()
    run(kv, request(kv, "a", range(8)))
    other = request(kv, "b", [*range(4), *range(50, 60)])
    cached, missing = kv.match_prefix(other)
    assert [block.block_id for block in cached] == [0]
    assert missing == other.block_hashes[1]
    assert kv.match_prefix(request(kv, "c", range(8))).missing is None


def test_the_tail_of_a_chain_is_evicted_first():
    kv = manager(4)
    req = request(kv, "a", range(14))
    assert run(kv, req) == [0, 1, 2, 3]
    kv.free(req)
    # Block 3 is partial and has no name; then the chain from its tail.
    assert free_ids(kv) == [3, 2, 1, 0]
    assert run(kv, request(kv, "b", range(50, 58))) == [3, 2]
    assert [block.block_id for block in kv.match_prefix(request(kv, "c", range(14))).blocks] == [0, 1]


def test_a_hit_rescues_blocks_so_that_they_become_the_youngest():
    kv = manager(4)
    old, new = request(kv, "old", range(4)), request(kv, "new", range(20, 24))
    for req in (old, new):
        run(kv, req)
        kv.free(req)
    assert free_ids(kv) == [2, 3, 0, 1]
    again = request(kv, "again", range(5))
    assert run(kv, again) == [0, 2]
    kv.free(again)
    assert free_ids(kv) == [2, 3, 1, 0]


def test_rescued_blocks_count_as_taken_from_the_free_ones():
    kv = manager(3)
    first = request(kv, "a", range(8))
    run(kv, first)
    kv.free(first)
    second = request(kv, "b", range(13))
    cached, _ = kv.match_prefix(second)
    assert len(cached) == 2
    # 2 rescued and 2 new blocks; the pool has 3.
    assert kv.allocate_slots(second, 5, cached) is None
    assert [block.ref_count for block in cached] == [0, 0]
    assert kv.allocate_slots(second, 4, cached) is not None


def test_a_block_is_found_only_after_its_step_has_run():
    kv = manager()
    first = request(kv, "a", range(8))
    kv.allocate_slots(first, 8)
    assert kv.match_prefix(request(kv, "b", range(9))).blocks == []
    compute(kv, first, 7)
    assert len(kv.match_prefix(request(kv, "b", range(9))).blocks) == 1
    compute(kv, first, 1)
    assert len(kv.match_prefix(request(kv, "b", range(9))).blocks) == 2


def test_blocks_of_a_failed_step_are_never_found():
    kv = manager()
    failed = request(kv, "a", range(8))
    kv.allocate_slots(failed, 8)
    kv.free(failed)
    assert kv.match_prefix(request(kv, "b", range(9))).blocks == []
    assert kv.snapshot() == []


def test_blocks_of_generated_tokens_are_found_too():
    kv = manager()
    req = request(kv, "a", range(3))
    run(kv, req)
    req.token_ids += range(3, 9)
    kv.allocate_slots(req, 6)
    compute(kv, req, 6)
    assert req.block_hashes == hash_blocks(range(9), 4, ROOT)
    assert len(kv.match_prefix(request(kv, "b", range(9))).blocks) == 2


def test_requests_with_other_extra_keys_share_nothing():
    kv = manager()
    run(kv, request(kv, "a", range(9), extra_keys=(ExtraKey("salt", "x"),)))
    assert kv.match_prefix(request(kv, "b", range(9))).blocks == []
    assert kv.match_prefix(request(kv, "c", range(9), extra_keys=(ExtraKey("salt", "y"),))).blocks == []
    assert len(kv.match_prefix(request(kv, "d", range(9), extra_keys=(ExtraKey("salt", "x"),))).blocks) == 2


def test_hashes_that_came_with_a_request_are_used_and_completed():
    kv = manager()
    hashes = hash_blocks(range(12), 4, ROOT)
    assert request(kv, "a", range(12), block_hashes=tuple(hashes[:2])).block_hashes == hashes


def test_hashes_of_another_model_or_of_too_many_blocks_are_computed_anew():
    kv = manager()
    hashes = hash_blocks(range(12), 4, ROOT)
    foreign = tuple(hash_blocks(range(12), 4, bytes([1]) * 32))
    assert request(kv, "a", range(12), block_hashes=foreign).block_hashes == hashes
    assert request(kv, "b", range(6), block_hashes=tuple(hashes)).block_hashes == hashes[:1]
    assert request(kv, "c", range(3), block_hashes=tuple(hashes)).block_hashes == []


def test_prompt_logprobs_still_owed_are_not_skipped_by_a_hit():
    kv = manager()
    run(kv, request(kv, "a", range(20)))
    asks = request(kv, "b", range(20), params=SamplingParams(prompt_logprobs=0))
    assert kv.match_prefix(asks) == ([], None)
    asks.num_prompt_logprobs = 11
    assert len(kv.match_prefix(asks).blocks) == 2
    asks.num_prompt_logprobs = 19
    assert len(kv.match_prefix(asks).blocks) == 4


def test_a_request_resumed_with_output_owes_no_prompt_logprobs():
    kv = manager()
    run(kv, request(kv, "a", range(20)))
    resumed = request(
        kv, "b", range(18), output_token_ids=(18, 19), params=SamplingParams(prompt_logprobs=0, max_tokens=5)
    )
    assert len(kv.match_prefix(resumed).blocks) == 4


def test_without_prefix_caching_nothing_is_hashed_found_or_told():
    kv = manager(caching=False)
    first = request(kv, "a", range(9))
    assert run(kv, first) == [0, 1, 2]
    kv.free(first)
    assert first.block_hashes == []
    assert kv.match_prefix(request(kv, "b", range(9))) == ((), None)
    assert kv.take_events() == []
    kv.check_integrity()


def test_reset_waits_until_no_request_holds_blocks():
    kv = manager()
    req = request(kv, "a", range(9))
    run(kv, req)
    assert kv.block_pool.num_used == 3
    assert not kv.reset_prefix_cache()
    kv.free(req)
    assert kv.reset_prefix_cache()
    assert kv.match_prefix(request(kv, "b", range(9))).blocks == []


def test_stored_events_continue_a_chain():
    kv = manager()
    req = request(kv, "a", range(12))
    kv.allocate_slots(req, 12)
    compute(kv, req, 9)
    compute(kv, req, 3)
    first, second, third = req.block_hashes
    assert kv.take_events() == [BlockStored((first, second), None), BlockStored((third,), second)]


def test_cost_of_a_request_does_not_depend_on_the_size_of_the_pool():
    def life(kv: KVCacheManager) -> int:
        first, again = request(kv, "a", range(40)), request(kv, "b", range(41))

        def both() -> None:
            run(kv, first)
            kv.free(first)
            run(kv, again)
            kv.free(again)

        return lines_run(both)

    assert life(manager(16)) == life(manager(200_000))


def test_integrity_check_sees_a_wrong_reference_count():
    kv = manager()
    run(kv, request(kv, "a", range(9)))
    kv.block_pool.blocks[1].ref_count = 2
    with pytest.raises(AssertionError, match="has 1 users"):
        kv.check_integrity()
