import pytest

from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.outputs import EngineLoad, SampledStep
from engine.request import FinishReason, RequestStatus
from engine.sampling_params import InvalidParameter
from engine.scheduler import Scheduler
from engine.scheduler.scheduler import SchedulerCounts
from tests.engine.cost import lines_run
from tests.engine.scheduler.device import Clock, Device, make_request, next_token, run_step, shares, true_output

BLOCK = 4


class Engine:
    """A scheduler on a device without a model."""

    def __init__(self, *, blocks: int = 64, seqs: int = 8, budget: int = 16, length: int = 128, **options) -> None:
        self.clock = Clock()
        self.kv = KVCacheManager(
            blocks, block_size=BLOCK, root=bytes(32), enable_prefix_caching=options.pop("caching", True)
        )
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=length,
            clock=self.clock,
            **options,
        )
        self.device = Device(BLOCK, seqs)
        self.tokens: dict[str, list[int]] = {}

    def add(self, request_id: str, prompt, **options):
        request = make_request(request_id, prompt, **options)
        self.scheduler.add(request)
        return request

    def step(self):
        work, outputs = run_step(self.scheduler, self.device)
        for request_id, output in outputs.items():
            self.tokens.setdefault(request_id, []).extend(output.new_token_ids)
        return work, outputs

    def finish(self) -> None:
        for _ in range(1000):
            if not self.scheduler.has_unfinished():
                break
            self.step()
        assert not self.scheduler.has_unfinished()
        assert self.kv.block_pool.num_used == 0

    def blocks(self, request_id: str) -> list[int]:
        return [block.block_id for block in self.kv.req_to_blocks[request_id]]


def prompt(number: int, length: int) -> list[int]:
    """Prompts of different numbers share no block."""
    return [number, *range(1, length)]


# ---- the rule ----


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_requests():
    engine = Engine(budget=8)
    engine.add("short", prompt(1, 3), max_tokens=10)
    engine.add("long", prompt(2, 14), max_tokens=10)
    assert shares(engine.step()[0]) == {"short": 3, "long": 5}
    work, outputs = engine.step()
    assert shares(work) == {"short": 1, "long": 7}
    assert [step.samples for step in work.steps] == [True, False]
    assert outputs.keys() == {"short"}
    work, outputs = engine.step()
    assert shares(work) == {"short": 1, "long": 2}
    assert [step.samples for step in work.steps] == [True, True]
    assert outputs.keys() == {"short", "long"}
    assert shares(engine.step()[0]) == {"short": 1, "long": 1}


def test_starts_carry_everything_and_later_steps_only_what_is_new():
    engine = Engine()
    engine.add("a", prompt(1, 7), max_tokens=10)
    work, _ = engine.step()
    (start,) = work.starts
    assert (start.token_ids, start.block_ids, start.num_computed_tokens) == (tuple(prompt(1, 7)), (0, 1), 0)
    assert work.steps[0].new_block_ids == ()
    assert engine.step()[0].steps[0].new_block_ids == ()
    work, _ = engine.step()
    assert work.starts == ()
    assert (work.steps[0].num_computed_tokens, work.steps[0].new_block_ids) == (8, (2,))


def test_no_more_requests_run_than_may():
    engine = Engine(seqs=2)
    for number in range(3):
        engine.add(f"r{number}", prompt(number, 2), max_tokens=2)
    assert shares(engine.step()[0]).keys() == {"r0", "r1"}
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 1)
    engine.step()
    work, _ = engine.step()
    assert shares(work).keys() == {"r2"}
    assert set(work.released) == {"r0", "r1"}


def test_every_running_request_moves_while_an_earlier_one_prefills():
    engine = Engine(budget=8, policy="priority")
    engine.add("low", prompt(1, 2), priority=1, max_tokens=20)
    engine.step()
    engine.add("high", prompt(2, 30), priority=0, max_tokens=20)
    assert shares(engine.step()[0]) == {"low": 1, "high": 7}
    assert shares(engine.step()[0]) == {"high": 7, "low": 1}


def test_a_budget_that_cannot_serve_all_requests_is_refused():
    with pytest.raises(InvalidParameter, match="max_num_batched_tokens=4: must be at least max_num_seqs, 8"):
        Engine(seqs=8, budget=4)


def test_ids_are_unique():
    engine = Engine()
    engine.add("a", [1])
    with pytest.raises(ValueError, match="'a': is in use"):
        engine.add("a", [2])


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


# ---- order ----


def test_priority_orders_the_line_by_priority_then_arrival_then_entry():
    engine = Engine(seqs=1, policy="priority")
    engine.add("late", [1], priority=1, arrival=9.0, max_tokens=1)
    engine.add("early", [2], priority=1, arrival=3.0, max_tokens=1)
    engine.add("urgent", [3], priority=-1, arrival=9.5, max_tokens=1)
    engine.add("early2", [4], priority=1, arrival=3.0, max_tokens=1)
    ran = []
    while engine.scheduler.has_unfinished():
        ran += shares(engine.step()[0])
    assert ran == ["urgent", "early", "early2", "late"]


def test_fcfs_knows_no_priority():
    engine = Engine(seqs=1)
    engine.add("first", [1], priority=9, arrival=9.0, max_tokens=1)
    engine.add("second", [2], max_tokens=1)
    assert shares(engine.step()[0]).keys() == {"first"}


# ---- how requests end ----


def output_of(**options) -> list[int]:
    return true_output(make_request("x", prompt(1, 5), **options).spec, 128)


def test_an_end_of_sequence_token_ends_a_request_without_a_stop_reason():
    tokens = output_of(max_tokens=10)
    engine = Engine()
    engine.add("a", prompt(1, 5), eos=[tokens[3]], stop_token_ids=[tokens[3]], max_tokens=10)
    outputs = {}
    while engine.scheduler.has_unfinished():
        _, outputs = engine.step()
    assert (outputs["a"].finish_reason, outputs["a"].stop_reason) == (FinishReason.STOP, None)
    assert engine.tokens["a"] == tokens[: tokens.index(tokens[3]) + 1]


def test_a_stop_token_is_named_and_wins_over_the_length():
    tokens = output_of(max_tokens=3)
    engine = Engine()
    engine.add("a", prompt(1, 5), stop_token_ids=[tokens[2]], max_tokens=3)
    outputs = {}
    while engine.scheduler.has_unfinished():
        _, outputs = engine.step()
    assert (outputs["a"].finish_reason, outputs["a"].stop_reason) == (FinishReason.STOP, tokens[2])


def test_stop_tokens_do_not_count_before_min_tokens():
    tokens = output_of(max_tokens=10)
    engine = Engine()
    engine.add("a", prompt(1, 5), eos=tokens[:6], min_tokens=4, max_tokens=10)
    engine.finish()
    assert engine.tokens["a"] == tokens[:4]


def test_length_counts_from_the_original_prompt():
    whole = output_of(max_tokens=6)
    engine = Engine()
    engine.add("a", prompt(1, 5), output=whole[:4], max_tokens=6)
    outputs = {}
    while engine.scheduler.has_unfinished():
        _, outputs = engine.step()
    assert engine.tokens["a"] == whole[4:]
    assert outputs["a"].finish_reason is FinishReason.LENGTH


def test_the_context_bounds_a_request_without_max_tokens():
    engine = Engine(length=9)
    engine.add("a", prompt(1, 5), max_tokens=None)
    engine.finish()
    assert len(engine.tokens["a"]) == 4


def test_a_request_resumed_at_its_limit_ends_without_a_step():
    engine = Engine()
    engine.add("a", prompt(1, 5), output=[7, 8], max_tokens=2)
    assert engine.scheduler.has_unfinished()
    work, outputs = engine.step()
    assert work.steps == ()
    assert (outputs["a"].finish_reason, outputs["a"].new_token_ids) == (FinishReason.LENGTH, ())
    assert not engine.scheduler.has_unfinished()


def test_timing_comes_with_the_first_token_and_at_the_end():
    engine = Engine(budget=8)
    engine.add("a", prompt(1, 12), arrival=90.0, max_tokens=3)
    engine.step()
    timings = []
    for now in (101.0, 102.0, 103.0):
        engine.clock.now = now
        timings.append(engine.step()[1]["a"].timing)
    first, middle, last = timings
    assert (first.queued_at, first.scheduled_at, first.first_token_at, first.finished_at) == (90.0, 100.0, 101.0, None)
    assert middle is None
    assert (last.first_token_at, last.finished_at) == (101.0, 103.0)


# ---- aborts, deadlines, failures ----


def test_an_aborted_request_frees_its_blocks_at_once_and_its_row_with_the_next_step():
    engine = Engine()
    engine.add("a", prompt(1, 9), max_tokens=20)
    engine.add("b", prompt(2, 4), max_tokens=20)
    engine.step()
    used = engine.kv.block_pool.num_used
    aborted = engine.scheduler.abort("a")
    assert aborted.finish_reason is FinishReason.ABORT
    assert engine.kv.block_pool.num_used == used - 3
    engine.scheduler.check_integrity()
    assert engine.scheduler.abort("a") is None
    work, outputs = engine.step()
    assert work.released == ("a",)
    assert outputs.keys() == {"b"}


def test_a_request_aborted_while_its_step_runs_gets_nothing():
    engine = Engine()
    engine.add("a", prompt(1, 9), max_tokens=20)
    work = engine.scheduler.schedule()
    sampled = engine.device.execute(work)
    engine.scheduler.abort("a")
    assert engine.scheduler.update(work, sampled) == []
    assert engine.kv.snapshot() == []
    engine.finish()


def test_a_row_is_released_once_even_if_nothing_runs_for_a_while():
    engine = Engine()
    engine.add("a", prompt(1, 4), max_tokens=1)
    engine.step()
    assert engine.scheduler.schedule().released == ()
    engine.add("b", prompt(2, 4), max_tokens=1)
    assert engine.step()[0].released == ("a",)
    engine.add("c", prompt(3, 4), max_tokens=1)
    assert engine.step()[0].released == ("b",)


def test_a_waiting_request_that_is_aborted_never_had_a_row():
    engine = Engine(seqs=1)
    engine.add("a", prompt(1, 4), max_tokens=3)
    engine.add("b", prompt(2, 4), max_tokens=3)
    engine.step()
    assert engine.scheduler.abort("b").status is RequestStatus.FINISHED
    assert engine.step()[0].released == ()
    engine.finish()


def test_requests_past_their_deadline_end_running_or_waiting():
    engine = Engine(seqs=2)
    for name, deadline in (("runs", 105.0), ("stays", None), ("waits", 103.0), ("later", 200.0)):
        engine.add(name, prompt(ord(name[0]), 4), deadline=deadline, max_tokens=5)
    engine.step()
    engine.clock.now = 105.0
    work, outputs = engine.step()
    assert {name for name, output in outputs.items() if output.finish_reason is FinishReason.ABORT} == {"runs", "waits"}
    assert outputs["runs"].timing.finished_at == 105.0
    assert shares(work).keys() == {"stays", "later"}
    engine.finish()


def test_a_deadline_does_not_outlive_its_request():
    engine = Engine()
    engine.add("a", prompt(1, 4), deadline=105.0, max_tokens=5)
    engine.step()
    engine.scheduler.abort("a")
    engine.add("a", prompt(1, 4), deadline=200.0, max_tokens=5)
    engine.clock.now = 105.0
    _, outputs = engine.step()
    assert outputs["a"].finish_reason is None
    engine.finish()


def test_deadlines_of_ended_requests_do_not_pile_up():
    engine = Engine()
    for number in range(1000):
        engine.add(f"r{number}", [number], deadline=1e9 - number, max_tokens=1)
        engine.finish()
    assert len(engine.scheduler._deadlines) < 100


def test_a_failed_step_costs_its_requests_and_leaves_nothing_in_the_cache():
    engine = Engine(seqs=2)
    for number, name in enumerate("abc"):
        engine.add(name, prompt(number, 8), max_tokens=4)
    work = engine.scheduler.schedule()
    engine.device.fail(work)
    outputs = engine.scheduler.fail_step(work, "the device is gone")
    assert [(output.request_id, output.finish_reason, output.error) for output in outputs] == [
        ("a", FinishReason.ERROR, "the device is gone"),
        ("b", FinishReason.ERROR, "the device is gone"),
    ]
    assert engine.kv.block_pool.num_used == 0
    engine.scheduler.check_integrity()
    engine.add("again", prompt(0, 8), max_tokens=4)
    work, _ = engine.step()
    assert work.released == ()
    assert shares(work) == {"c": 8, "again": 8}
    engine.finish()


# ---- drafts ----


def test_accepted_drafts_give_several_tokens_and_rejected_ones_are_rolled_back():
    engine = Engine()
    request = engine.add("a", prompt(1, 5), max_tokens=20)
    truth = output_of(max_tokens=20)
    engine.step()
    request.spec_token_ids = [truth[1], truth[2], (truth[3] + 1) % 50]
    work, outputs = engine.step()
    assert (work.steps[0].num_tokens, work.steps[0].spec_token_ids[:2]) == (4, tuple(truth[1:3]))
    assert outputs["a"].new_token_ids == tuple(truth[1:4])
    assert request.num_computed_tokens == request.num_tokens - 1 == 8
    assert request.spec_token_ids == []
    engine.finish()
    assert engine.tokens["a"] == truth


def test_several_new_tokens_are_cut_after_the_first_that_ends_the_request():
    engine = Engine()
    truth = output_of(max_tokens=20)
    stop = next(index for index in range(2, 20) if truth[index] not in truth[:index])
    request = engine.add("a", prompt(1, 5), eos=[truth[stop]], logprobs=0, max_tokens=20)
    engine.step()
    request.spec_token_ids = truth[1 : stop + 3]
    _, outputs = engine.step()
    assert outputs["a"].new_token_ids == tuple(truth[1 : stop + 1])
    assert outputs["a"].logprobs.token_ids[:, 0].tolist() == truth[1 : stop + 1]
    assert len(outputs["a"].logprobs.logprobs) == len(outputs["a"].logprobs.ranks) == stop
    assert outputs["a"].finish_reason is FinishReason.STOP


def test_drafts_are_clipped_to_the_budget_and_to_what_can_still_be_put_out():
    engine = Engine(seqs=2, budget=6)
    truth = output_of(max_tokens=20)
    request = engine.add("a", prompt(1, 5), max_tokens=4)
    engine.add("b", [40], max_tokens=20)
    engine.step()
    request.spec_token_ids = truth[1:9]
    # Three more tokens: two drafts and the one that is sampled after them.
    work, outputs = engine.step()
    assert work.steps[0].spec_token_ids == tuple(truth[1:3])
    assert (outputs["a"].new_token_ids, outputs["a"].finish_reason) == (tuple(truth[1:4]), FinishReason.LENGTH)
    other = engine.scheduler.requests["b"]
    other.spec_token_ids = [1] * 9
    assert shares(engine.step()[0]) == {"b": 6}


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


# ---- cost and load ----


def test_load_counts_what_is_still_to_be_prefilled():
    engine = Engine(budget=8)
    engine.add("a", prompt(1, 12), max_tokens=4)
    engine.add("b", prompt(2, 5), max_tokens=4)
    engine.add("c", prompt(3, 7), max_tokens=4)
    assert engine.scheduler.load() == EngineLoad(0, 3, 24, 0, 64)
    engine.step()
    assert engine.scheduler.load() == EngineLoad(1, 2, 4 + 12, 2, 64)
    engine.step()
    # a decodes; 4 of b's tokens are computed.
    assert engine.scheduler.load() == EngineLoad(2, 1, 7, 3 + 1, 64)


def test_cost_of_a_step_does_not_depend_on_the_pool_or_the_line():
    def cost(blocks: int, waiting: int) -> int:
        engine = Engine(blocks=blocks, seqs=4, budget=64)
        for number in range(4 + waiting):
            engine.add(f"r{number}", [number, 1, 2], max_tokens=50)
        engine.step()
        engine.step()

        def step() -> None:
            work = engine.scheduler.schedule()
            engine.scheduler.update(work, [SampledStep((next_token(1, 0),)) for _ in work.steps])
            engine.scheduler.load()

        return lines_run(step)

    assert cost(64, 1) == cost(20_000, 3_000)


def test_cost_of_an_abort_does_not_depend_on_the_line():
    def cost(waiting: int) -> int:
        engine = Engine()
        for number in range(waiting):
            engine.add(f"r{number}", [number, 1, 2])
        return lines_run(lambda: engine.scheduler.abort("r1"))

    assert cost(2) == cost(3_000)
