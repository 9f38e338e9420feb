import pytest

from engine.outputs import EngineLoad, SampledStep
from engine.request import FinishReason
from engine.sampling_params import InvalidParameter
from tests.engine.cost import lines_run
from tests.engine.scheduler.device import make_request, next_token, shares
from tests.engine.scheduler.engine import Engine, output_of, prompt

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


def test_load_leaves_out_what_the_prefix_cache_has_of_those_that_wait():
    engine = Engine(seqs=1, budget=16)
    engine.add("first", prompt(1, 12), max_tokens=1)
    engine.step()
    engine.add("running", prompt(2, 8), max_tokens=9)
    engine.step()
    engine.add("again", [*prompt(1, 12), 7, 8], max_tokens=4)
    assert engine.scheduler.load().queued_prefill_tokens == 2
    engine.scheduler.abort("again")
    assert engine.scheduler.load().queued_prefill_tokens == 0


def test_load_counts_once_what_several_that_wait_have_in_common():
    engine = Engine(seqs=1, budget=16)
    common = prompt(1, 12)
    for name in "abc":
        engine.add(name, [*common, ord(name), 8], max_tokens=4)
    assert engine.scheduler.load().queued_prefill_tokens == 14 + 2 + 2
    engine.scheduler.abort("a")
    assert engine.scheduler.load().queued_prefill_tokens == 2 + 2
    engine.add("d", [*common, 9, 8], max_tokens=4)
    assert engine.scheduler.load().queued_prefill_tokens == 2 + 2 + 14
    for name in "bcd":
        engine.scheduler.abort(name)
    assert engine.scheduler.load().queued_prefill_tokens == 0
    assert len(engine.scheduler._claims) == 0


def test_load_counts_all_tokens_of_a_request_for_prompt_logprobs():
    engine = Engine(seqs=1, budget=16)
    engine.add("a", prompt(1, 14), max_tokens=4)
    engine.add("b", prompt(1, 14), max_tokens=4, prompt_logprobs=0)
    assert engine.scheduler.load().queued_prefill_tokens == 14 + 14
    engine.add("c", prompt(1, 14), max_tokens=4)
    assert engine.scheduler.load().queued_prefill_tokens == 14 + 14 + 2


def test_load_counts_all_tokens_of_all_without_a_prefix_cache():
    engine = Engine(caching=False)
    for name in "ab":
        request = make_request(name, prompt(1, 14))
        request.block_hashes = [b"0", b"1", b"2"]  # its sender does not know that nobody needs them
        engine.scheduler.add(request)
    assert engine.scheduler.load().queued_prefill_tokens == 14 + 14


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
