from engine.request import FinishReason, RequestStatus
from tests.engine.scheduler.device import shares
from tests.engine.scheduler.engine import Engine, output_of, prompt

# ---- how requests end ----


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


def test_a_failed_step_leaves_nothing_in_the_cache_and_costs_who_fails_again():
    engine = Engine(seqs=2)
    for number, name in enumerate("abc"):
        engine.add(name, prompt(number, 8), max_tokens=4)
    work = engine.scheduler.schedule()
    engine.device.fail(work)
    assert engine.scheduler.fail_step(work, "the device is gone") == []
    assert engine.kv.block_pool.num_used == 0
    engine.scheduler.check_integrity()
    work, _ = engine.step()
    assert (work.released, shares(work)) == ((), {"a": 8})
    work = engine.scheduler.schedule()
    assert (work.released, shares(work)) == ((), {"b": 8})
    engine.device.fail(work)
    (output,) = engine.scheduler.fail_step(work, "it is gone")
    assert (output.request_id, output.finish_reason, output.error) == ("b", FinishReason.ERROR, "it is gone")
    assert engine.kv.block_pool.num_used == 0
    engine.scheduler.check_integrity()
    engine.add("again", prompt(1, 8), max_tokens=4)
    work, _ = engine.step()
    # The block that a's successful step made full was stored, those of b were not.
    assert (work.released, shares(work)) == ((), {"a": 1, "c": 8})
    assert engine.finish()["again"].num_cached_tokens == 0
