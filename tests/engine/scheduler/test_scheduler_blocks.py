from engine.request import FinishReason, RequestStatus
from engine.scheduler.counts import SchedulerCounts
from tests.engine.scheduler.device import make_request, shares, true_output
from tests.engine.scheduler.engine import BLOCK, Engine, prompt

# ---- prefix cache ----


def test_a_later_request_starts_after_the_shared_prefix():
    engine = Engine()
    engine.add("a", [*range(8), 20], max_tokens=20)
    engine.step()
    second = engine.add("b", [*range(8), 30, 31], max_tokens=20)
    work, outputs = engine.step()
    assert work.starts[0].block_ids[:2] == tuple(engine.blocks("a")[:2])
    assert shares(work) == {"a": 1, "b": 2}
    assert outputs["b"].num_cached_tokens == second.num_cached_tokens == 8
    assert [block.ref_count for block in engine.kv.req_to_blocks["b"]] == [2, 2, 1]
    assert engine.scheduler.take_counts() == SchedulerCounts(prefix_queried=19, prefix_hit=8)
    assert engine.scheduler.take_counts() == SchedulerCounts()


def test_siblings_compute_their_prompt_once():
    engine = Engine(budget=8)
    for number in range(3):
        engine.add(f"s{number}", range(14), seed=number, max_tokens=4)
    engine.add("other", prompt(40, 3), max_tokens=4)
    # The siblings wait for the blocks that the first one computes; nobody else waits for them.
    assert shares(engine.step()[0]) == {"s0": 8}
    assert shares(engine.step()[0]) == {"s0": 6, "other": 2}
    work, _ = engine.step()
    assert shares(work) == {"s0": 1, "s1": 2, "s2": 2, "other": 1}
    assert len({engine.blocks(f"s{number}")[2] for number in range(3)}) == 1
    assert len({engine.blocks(f"s{number}")[3] for number in range(3)}) == 3
    engine.finish()
    for number in range(3):
        assert engine.tokens[f"s{number}"] == true_output(
            make_request("s", range(14), seed=number, max_tokens=4).spec, 99
        )


def test_a_request_that_waits_for_blocks_keeps_its_place():
    engine = Engine(seqs=2, budget=8)
    engine.add("a", range(22), max_tokens=4)
    engine.add("b", range(22), max_tokens=4)
    engine.add("c", prompt(40, 2), max_tokens=4)
    # The step that ends a's prompt has room for two more tokens, and c may not have them: its place is b's.
    assert [shares(engine.step()[0]) for _ in range(3)] == [{"a": 8}, {"a": 8}, {"a": 6}]
    assert shares(engine.step()[0]) == {"a": 1, "b": 2}


def test_siblings_do_not_wait_without_prefix_caching():
    engine = Engine(budget=16, caching=False)
    engine.add("a", range(8), max_tokens=4)
    engine.add("b", range(8), max_tokens=4)
    assert shares(engine.step()[0]) == {"a": 8, "b": 8}
    engine.finish()
    assert engine.scheduler.take_counts() == SchedulerCounts()


def test_a_request_for_prompt_logprobs_fills_the_cache_but_does_not_read_it():
    engine = Engine()
    engine.add("a", range(12), prompt_logprobs=0, max_tokens=1)
    engine.finish()
    engine.add("b", range(12), prompt_logprobs=0, max_tokens=1)
    assert shares(engine.step()[0]) == {"b": 12}
    engine.add("c", range(12), max_tokens=1)
    assert shares(engine.step()[0]) == {"c": 4}


# ---- blocks run out ----


def test_the_last_request_is_preempted_and_resumes_from_the_cache_with_the_same_tokens():
    engine = Engine(blocks=9, budget=32)
    specs = [engine.add(name, prompt(number, 10), max_tokens=14).spec for number, name in enumerate("ab")]
    while engine.scheduler.requests["b"].status is not RequestStatus.PREEMPTED:
        work, _ = engine.step()
    # a took a block from b in this very step, and b could not start anew in it.
    assert shares(work) == {"a": 1}
    assert "b" in work.released
    assert engine.scheduler.num_waiting == 1
    while "b" not in {start.spec.request_id for start in work.starts}:
        work, _ = engine.step()
    assert work.starts[0].num_computed_tokens >= 8
    engine.finish()
    assert [engine.tokens[spec.request_id] for spec in specs] == [true_output(spec, 128) for spec in specs]
    assert engine.scheduler.take_counts().preemptions == 1


def test_a_preempted_request_resumes_before_those_that_never_ran():
    engine = Engine(blocks=9, budget=32)
    for number, name in enumerate("abc"):
        engine.add(name, prompt(number, 10), max_tokens=14)
    started = []
    while engine.scheduler.has_unfinished():
        started += [start.spec.request_id for start in engine.step()[0].starts]
    assert started[:4] == ["a", "b", "b", "c"]


def test_under_priority_the_least_important_request_is_preempted():
    engine = Engine(blocks=10, budget=32, policy="priority")
    engine.add("low", prompt(1, 10), priority=5, max_tokens=14)
    engine.step()
    engine.add("high", prompt(2, 10), priority=1, max_tokens=14)
    while engine.scheduler.requests["low"].status is not RequestStatus.PREEMPTED:
        engine.step()
    assert engine.scheduler.requests["high"].status is RequestStatus.RUNNING
    engine.finish()


def test_no_request_starts_with_blocks_that_running_ones_are_about_to_need():
    engine = Engine(blocks=8, budget=32)
    engine.add("a", prompt(1, 15), max_tokens=3)
    engine.step()
    engine.add("b", prompt(2, 8), max_tokens=3)
    # 4 blocks are free. b starts with 2 of them, and the other 2 are for what a and b generate.
    engine.add("c", prompt(3, 4), max_tokens=2)
    assert shares(engine.step()[0]).keys() == {"a", "b"}
    assert engine.scheduler.num_waiting == 1
    engine.finish()
    assert engine.scheduler.take_counts().preemptions == 0


def test_a_prompt_starts_only_when_all_of_it_has_room():
    engine = Engine(blocks=8, budget=8)
    engine.add("a", prompt(1, 12), max_tokens=4)
    engine.step()
    engine.add("b", prompt(2, 20), max_tokens=4)
    engine.add("c", prompt(3, 4), max_tokens=4)
    while "a" in engine.scheduler.requests:
        # c does not overtake b.
        assert shares(engine.step()[0]).keys() == {"a"}
    engine.finish()
    assert engine.scheduler.take_counts().preemptions == 0


def test_a_request_that_no_pool_of_this_size_can_hold_ends_with_an_error():
    engine = Engine(blocks=3)
    engine.add("big", prompt(1, 13), max_tokens=4)
    engine.add("small", prompt(2, 4), max_tokens=4)
    work, outputs = engine.step()
    assert shares(work) == {"small": 4}
    assert outputs["big"].finish_reason is FinishReason.ERROR
    assert outputs["big"].error == "request has 13 tokens; all 3 KV blocks hold 12"
    engine.finish()


def test_a_request_that_outgrows_the_pool_ends_with_an_error():
    engine = Engine(blocks=3)
    spec = engine.add("a", prompt(1, 10), max_tokens=20).spec
    outputs = {}
    while engine.scheduler.has_unfinished():
        _, outputs = engine.step()
    assert outputs["a"].finish_reason is FinishReason.ERROR
    assert outputs["a"].error == "request has 13 tokens; all 3 KV blocks hold 12"
    assert engine.tokens["a"] == true_output(spec, 13)
    assert engine.kv.block_pool.num_used == 0


# ---- prompt logprobs ----


def test_prompt_logprobs_come_in_chunks_and_once_each_even_after_a_preemption():
    engine = Engine(blocks=12, budget=8)
    engine.add("first", prompt(1, 15), max_tokens=20)
    engine.step()
    engine.step()
    asks = engine.add("asks", prompt(2, 20), prompt_logprobs=0, max_tokens=2)
    rows: list[int] = []
    starts = []
    while engine.scheduler.has_unfinished():
        work, outputs = engine.step()
        starts += [start for start in work.starts if start.spec.request_id == "asks"]
        if "asks" in outputs and outputs["asks"].prompt_logprobs is not None:
            rows += outputs["asks"].prompt_logprobs.token_ids[:, 0].tolist()
        if len(starts) == 1 and 0 < asks.num_prompt_logprobs < 19:
            # Nothing runs out here by itself: the running request is made to lose its blocks as _preempt does it.
            victim = engine.scheduler._running.pop()
            assert victim is asks
            engine.scheduler._preempt(asks)
            engine.scheduler.check_integrity()
    assert rows == prompt(2, 20)[1:]
    first, again = starts
    assert (first.num_computed_tokens, first.num_prompt_logprobs) == (0, 0)
    assert again.num_prompt_logprobs > 0
    assert again.num_computed_tokens == again.num_prompt_logprobs // BLOCK * BLOCK
