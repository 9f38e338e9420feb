"""Steps that are scheduled while the one before them runs."""

from engine.outputs import SampledStep
from engine.request import FinishReason, GrammarSpec, RequestStatus
from tests.engine.scheduler.device import make_request, shares, true_output
from tests.engine.scheduler.engine import Engine, output_of, prompt


def overlapped(**options) -> Engine:
    return Engine(depth=1, **options)


def in_flight(engine: Engine) -> list[dict[str, int]]:
    return [shares(work) for work in engine.loop.in_flight]


# ---- pending tokens ----


def test_the_next_step_computes_a_token_that_nobody_has_seen():
    engine = overlapped()
    request = engine.add("a", prompt(1, 5), max_tokens=4)
    work, outputs = engine.step()
    assert (shares(work), outputs) == ({"a": 5}, {})
    work, outputs = engine.step()
    assert (work.steps[0].num_computed_tokens, shares(work)) == (5, {"a": 1})
    assert outputs["a"].new_token_ids == tuple(output_of(max_tokens=4)[:1])
    assert (request.num_tokens, request.num_pending_tokens, request.num_computed_tokens) == (6, 1, 6)
    engine.finish()
    assert engine.tokens["a"] == output_of(max_tokens=4)


def test_a_length_is_exact():
    engine = overlapped()
    engine.add("a", prompt(1, 5), max_tokens=4)
    engine.add("b", prompt(2, 5), max_tokens=1)
    steps = []
    while engine.loop.busy:
        steps.append(shares(engine.step()[0]))
    # The fourth token of a and the first of b are put out and never computed; the last step has nothing to start.
    assert steps == [{"a": 5, "b": 5}, {"a": 1}, {"a": 1}, {"a": 1}, {}]


def test_the_context_is_not_exceeded():
    engine = overlapped(length=9, blocks=3)
    engine.add("a", prompt(1, 5), max_tokens=None)
    last = engine.finish()
    assert len(engine.tokens["a"]) == 4
    assert last["a"].finish_reason is FinishReason.LENGTH


def test_what_is_computed_after_a_stop_is_dropped():
    tokens = output_of(max_tokens=20)
    engine = overlapped()
    spec = engine.add("a", prompt(1, 5), stop_token_ids=[tokens[2]], logprobs=0, max_tokens=20).spec
    end = len(true_output(spec, 128))
    for _ in range(end + 1):
        _, outputs = engine.step()
    assert (outputs["a"].finish_reason, outputs["a"].stop_reason) == (FinishReason.STOP, tokens[2])
    assert outputs["a"].timing.num_generated_tokens == end
    # Its last step still runs, and its blocks are free.
    assert in_flight(engine) == [{"a": 1}]
    assert engine.kv.block_pool.num_used == 0
    assert engine.step()[1] == {}
    assert engine.tokens["a"] == tokens[:end]


def test_a_block_that_only_a_dropped_token_made_full_is_not_cached():
    tokens = output_of(max_tokens=20)
    engine = overlapped()
    engine.add("a", prompt(1, 5), stop_token_ids=[tokens[2]], max_tokens=20)
    engine.finish()
    # 5 tokens of the prompt and 2 of the output were computed in steps that count; the eighth is the stop token.
    assert len(engine.tokens["a"]) == 3
    assert sum(len(run.block_hashes) for run in engine.kv.snapshot()) == 1


def test_a_request_without_usable_logits_ends_and_what_runs_behind_it_is_dropped():
    engine = overlapped()
    engine.add("a", prompt(1, 5), max_tokens=9)
    engine.add("b", prompt(2, 5), max_tokens=9)
    engine.step()
    engine.loop.start()
    first = engine.loop.in_flight.popleft()
    results = engine.device.execute(first)
    outputs = engine.take(engine.scheduler.update(first, [SampledStep(error="NaN"), results[1]]))
    assert outputs["a"].finish_reason is FinishReason.ERROR
    engine.finish()
    assert engine.tokens["a"] == []
    assert engine.tokens["b"] == true_output(make_request("b", prompt(2, 5), max_tokens=9).spec, 128)


def test_a_grammar_needs_to_see_each_token():
    engine = overlapped()
    engine.add("free", prompt(1, 5), max_tokens=3)
    engine.add("bound", prompt(2, 5), max_tokens=3, grammar=GrammarSpec("regex", ".*"))
    steps = []
    while engine.loop.busy:
        steps.append(shares(engine.step()[0]))
    assert steps == [{"free": 5, "bound": 5}, {"free": 1}, {"free": 1, "bound": 1}, {}, {"bound": 1}, {}]
    assert engine.tokens["bound"] == true_output(make_request("b", prompt(2, 5), max_tokens=3).spec, 128)


def test_drafts_wait_for_the_token_before_them_and_the_next_step_for_theirs():
    engine = overlapped()
    truth = output_of(max_tokens=9)
    request = engine.add("a", prompt(1, 5), max_tokens=9)
    engine.step()
    engine.step()
    request.spec_token_ids = [40, 41]  # of the first token; the second is pending
    assert shares(engine.step()[0]) == {}
    assert request.spec_token_ids == []
    request.spec_token_ids = [truth[2], (truth[3] + 1) % 50]
    assert shares(engine.step()[0]) == {"a": 3}
    assert request.num_pending_tokens == 3
    work, outputs = engine.step()
    assert (shares(work), outputs["a"].new_token_ids) == ({}, tuple(truth[2:4]))
    assert (request.num_pending_tokens, request.num_computed_tokens) == (0, 8)
    engine.finish()
    assert engine.tokens["a"] == truth


def test_drafts_may_follow_a_prompt_of_which_a_part_is_in_flight():
    engine = overlapped(seqs=1, budget=4)
    truth = output_of(max_tokens=9)
    request = engine.add("a", prompt(1, 5), max_tokens=9)
    engine.step()
    request.spec_token_ids = truth[:2]
    work, _ = engine.step()
    assert (work.steps[0].num_tokens, work.steps[0].spec_token_ids) == (3, tuple(truth[:2]))
    work, outputs = engine.step()
    assert (shares(work), outputs["a"].new_token_ids) == ({}, tuple(truth[:3]))
    engine.finish()
    assert engine.tokens["a"] == truth


def test_a_request_waits_for_a_block_that_a_step_in_flight_computes():
    engine = overlapped(budget=32)
    engine.add("a", range(8), max_tokens=9)
    engine.step()
    engine.add("b", [*range(8), 30], max_tokens=9)
    assert shares(engine.step()[0]) == {"a": 1}
    assert shares(engine.step()[0]) == {"a": 1, "b": 1}
    engine.finish()


# ---- blocks run out ----


def test_a_preempted_request_gets_its_pending_token_before_it_starts_again():
    engine = overlapped(blocks=9, budget=32)
    specs = [engine.add(name, prompt(number, 10), max_tokens=14).spec for number, name in enumerate("ab")]
    request = engine.scheduler.requests["b"]
    while request.status is not RequestStatus.PREEMPTED:
        engine.take(engine.loop.finish(engine.loop.start()))
    assert request.num_pending_tokens == 0
    # Its token came with the update of the very step in which it was preempted.
    assert request.num_tokens == 10 + len(engine.tokens["b"])
    assert engine.scheduler._waiting.num_tokens == request.num_tokens
    engine.finish()
    assert [engine.tokens[spec.request_id] for spec in specs] == [true_output(spec, 128) for spec in specs]
    assert engine.scheduler.take_counts().preemptions == 1


def test_a_preempted_request_does_not_start_while_its_step_is_in_flight():
    engine = overlapped(blocks=20, budget=32)
    request = engine.add("a", prompt(1, 20), prompt_logprobs=0, max_tokens=3)
    engine.loop.start()
    # Nothing runs out here by itself: the running request is made to lose its blocks as schedule() does it.
    engine.scheduler._preempt(engine.scheduler._running.pop())
    work = engine.loop.start()
    assert work.steps == ()
    engine.take(engine.loop.finish(work))
    assert (request.num_tokens, request.num_prompt_logprobs) == (21, 19)
    assert engine.kv.snapshot() == []
    work, _ = engine.step()
    assert work.released == ("a",)
    assert (work.starts[0].token_ids, work.starts[0].num_prompt_logprobs) == (tuple(request.token_ids), 19)
    engine.finish()


def test_a_pending_token_may_end_a_request_that_was_preempted():
    engine = overlapped(blocks=20)
    engine.add("a", prompt(1, 5), max_tokens=1)
    engine.loop.start()
    engine.scheduler._preempt(engine.scheduler._running.pop())
    outputs = engine.take(engine.loop.finish(engine.loop.start()))
    assert outputs["a"].finish_reason is FinishReason.LENGTH
    assert (engine.scheduler.num_waiting, engine.scheduler.has_unfinished()) == (0, False)


def test_a_request_that_fills_the_pool_may_still_end_with_its_pending_token():
    tokens = output_of(max_tokens=20)
    stop = tokens[3]
    engine = overlapped(blocks=2)
    engine.add("a", prompt(1, 5), eos=[stop], max_tokens=20)
    last = engine.finish()
    assert last["a"].finish_reason is FinishReason.STOP
    assert engine.tokens["a"] == tokens[: tokens.index(stop) + 1]


def test_a_request_that_outgrows_the_pool_ends_with_an_error():
    engine = overlapped(blocks=3)
    spec = engine.add("a", prompt(1, 10), max_tokens=20).spec
    last = engine.finish()
    assert last["a"].error == "request has 13 tokens; all 3 KV blocks hold 12"
    assert engine.tokens["a"] == true_output(spec, 13)


# ---- aborts and failures ----


def test_an_id_may_be_used_again_while_steps_of_its_former_owner_are_in_flight():
    engine = overlapped()
    engine.add("a", prompt(1, 5), seed=1, max_tokens=9)
    engine.step()
    engine.loop.start()
    engine.scheduler.abort("a")
    again = engine.add("a", prompt(2, 6), seed=2, max_tokens=9).spec
    engine.take(engine.loop.finish(engine.loop.in_flight[-1]))
    work, _ = engine.step()
    assert (work.released, [start.spec for start in work.starts]) == (("a",), [again])
    engine.finish()
    assert engine.tokens["a"] == true_output(again, 128)


def test_a_request_of_a_failed_step_is_tried_alone_and_those_behind_it_go_on():
    engine = overlapped(seqs=3, budget=16)
    specs = [engine.add("a", prompt(1, 16), max_tokens=5).spec]
    engine.step()
    specs.append(engine.add("b", prompt(2, 6), max_tokens=5).spec)
    engine.loop.start()
    assert in_flight(engine) == [{"a": 16}, {"a": 1, "b": 6}]
    assert engine.take(engine.loop.fail("the device is gone")) == {}
    for request in engine.scheduler.requests.values():
        assert (request.status, request.num_pending_tokens) == (RequestStatus.PREEMPTED, 0)
    assert engine.kv.block_pool.num_used == 0
    steps = [engine.step()[0] for _ in range(3)]
    assert [(work.released, shares(work)) for work in steps] == [((), {"a": 16}), ((), {}), ((), {"a": 1, "b": 6})]
    engine.finish()
    assert [engine.tokens[name] for name in "ab"] == [true_output(spec, 128) for spec in specs]
