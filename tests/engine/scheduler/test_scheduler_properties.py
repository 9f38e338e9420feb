"""Random lives of an engine: whatever happens, the bookkeeping holds and every request gets its tokens."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.outputs import EngineOutput, SchedulerOutput
from engine.request import FinishReason, GrammarSpec, Request
from engine.scheduler import Scheduler
from tests.engine.scheduler.device import EOS, Clock, Device, Loop, make_request, true_output

BLOCK = 4
LENGTH = 40
FAMILIES = [list(range(LENGTH)), [*range(6), *range(20, 54)], [7] * LENGTH]
ENDS_UNFINISHED = (FinishReason.ABORT, FinishReason.ERROR)


class EngineLife(RuleBasedStateMachine):
    depth = 0

    @initialize(
        blocks=st.integers(LENGTH // BLOCK, 16),
        seqs=st.integers(1, 6),
        budget=st.integers(6, 40),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
    )
    def start(self, blocks, seqs, budget, policy, caching):
        self.clock = Clock()
        self.kv = KVCacheManager(blocks, block_size=BLOCK, root=bytes(32), enable_prefix_caching=caching)
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=LENGTH,
            policy=policy,
            clock=self.clock,
        )
        self.loop = Loop(self.scheduler, Device(BLOCK, seqs), self.depth)
        self.asked: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.prompt_rows: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.router: set[bytes] = set()
        self.failed_together: set[str] = set()

    @rule(
        family=st.integers(0, len(FAMILIES) - 1),
        length=st.integers(1, LENGTH - 1),
        copies=st.integers(1, 3),
        max_tokens=st.integers(1, 30),
        priority=st.integers(0, 2),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        patience=st.sampled_from([None, None, None, 3]),
        resumed=st.booleans(),
        grammar=st.sampled_from([None, None, None, GrammarSpec("regex", ".*")]),
    )
    def add(self, family, length, copies, max_tokens, priority, prompt_logprobs, patience, resumed, grammar):
        for copy in range(copies):
            options = {
                "priority": priority,
                "arrival": self.clock.now,
                "deadline": None if patience is None else self.clock.now + patience,
                "eos": [EOS],
                "seed": copy,
                "max_tokens": max_tokens,
                "prompt_logprobs": prompt_logprobs,
                "grammar": grammar,
            }
            request_id = f"r{len(self.asked)}"
            request = make_request(request_id, FAMILIES[family][:length], **options)
            if resumed:
                output = true_output(request.spec, LENGTH)[: max_tokens // 2]
                if EOS not in output:
                    request = make_request(request_id, FAMILIES[family][:length], output=output, **options)
            self.asked[request_id] = request
            self.scheduler.add(request)

    @rule(count=st.integers(1, 8), drafts=st.sampled_from([(0, 0), (0, 0), (2, 1), (3, 0), (0, 2)]))
    def steps(self, count, drafts):
        for _ in range(count):
            self.draft(*drafts)
            self.step()
            self.bookkeeping_holds()

    def step(self):
        self.take(self.loop.finish(self.schedule()))

    def schedule(self) -> SchedulerOutput:
        before = [step for work in self.loop.in_flight for step in work.steps]
        unknown = {step.request_id for step in before if step.samples}
        work = self.loop.start()
        assert work.num_tokens <= self.scheduler._max_num_batched_tokens
        waits = {request.request_id for request in self.scheduler._running}
        waits -= {step.request_id for step in work.steps}
        if self.scheduler._probation:
            assert len(work.steps) + len(before) <= 1
        else:
            # Whoever ran before and runs still has its part, or waits for a token in flight.
            assert waits <= unknown
        starts = {start.spec.request_id for start in work.starts}
        for step in work.steps:
            request = self.scheduler.requests[step.request_id]
            if step.spec_token_ids or request.spec.grammar is not None:
                assert step.request_id not in unknown or step.request_id in starts
        return work

    def draft(self, right: int, wrong: int) -> None:
        """Gives decoding requests drafts of which the first are right."""
        for request in self.scheduler._running:
            if request.num_wanted_tokens == 1 and not request.spec_token_ids:
                oracle = make_request("x", request.token_ids, seed=request.spec.seed, max_tokens=right + 1)
                request.spec_token_ids = [*true_output(oracle.spec, 2 * LENGTH)[:right], *[0] * wrong]

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data(), during_a_step=st.booleans(), again=st.booleans())
    def abort(self, data, during_a_step, again):
        work = self.schedule() if during_a_step else None
        if self.scheduler.requests:
            request_id = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
            self.ends[request_id] = self.scheduler.abort(request_id).finish_reason
            if again:
                self.tokens_are_right()
                self.add_again(request_id)
        if work is not None:
            self.take(self.loop.finish(work))

    def add_again(self, request_id: str) -> None:
        """Another request with the id of one that has ended, of which steps may be in flight."""
        del self.ends[request_id]
        self.tokens.pop(request_id, None)
        self.prompt_rows.pop(request_id, None)
        spec = self.asked[request_id].spec
        self.asked[request_id] = make_request(request_id, spec.prompt_token_ids, eos=[EOS], seed=9, max_tokens=9)
        self.scheduler.add(self.asked[request_id])

    @rule(trouble=st.sampled_from(["wait", "wait", "reset the cache", "fail"]))
    def trouble(self, trouble):
        match trouble:
            case "wait":
                self.clock.now += 1.0
            case "reset the cache":
                assert self.kv.reset_prefix_cache() == (not self.kv.req_to_blocks)
            case "fail":
                self.fail()

    def fail(self) -> None:
        """The oldest step fails. It costs a request that was alone in it because of another failure, and no others."""
        if not self.loop.in_flight:
            self.loop.start()
        failed = [step.request_id for work in list(self.loop.in_flight)[:1] for step in work.steps]
        outputs = self.loop.fail("broken")
        ended = [output.request_id for output in outputs if output.error == "broken"]
        assert ended in ([], failed)
        assert self.failed_together.issuperset(ended)
        self.failed_together.update(failed)
        self.take(outputs)

    def take(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.ends
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.prompt_logprobs is not None:
                rows = output.prompt_logprobs.token_ids[:, 0].tolist()
                self.prompt_rows.setdefault(output.request_id, []).extend(rows)
            if output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason
                assert output.timing.finished_at is not None

    @invariant()
    def bookkeeping_holds(self):
        self.scheduler.check_integrity()

    @invariant()
    def events_tell_what_is_cached(self):
        for event in self.scheduler.take_events():
            match event:
                case BlockStored(block_hashes=hashes):
                    assert self.router.isdisjoint(hashes)
                    self.router.update(hashes)
                case BlockRemoved(block_hashes=hashes):
                    assert self.router.issuperset(hashes)
                    self.router.difference_update(hashes)
                case AllBlocksCleared():
                    self.router.clear()
        assert self.router == {name for run in self.kv.snapshot() for name in run.block_hashes}

    @invariant()
    def tokens_are_right(self):
        for request_id, request in self.asked.items():
            truth = true_output(request.spec, LENGTH)
            got = self.tokens.get(request_id, [])
            end = self.ends.get(request_id)
            assert got == truth[: len(got)]
            if end is not None and end not in ENDS_UNFINISHED:
                assert got == truth
                ended_by_eos = bool(got) and got[-1] == EOS
                assert end is (FinishReason.STOP if ended_by_eos else FinishReason.LENGTH)
            if request.spec.params.prompt_logprobs is not None and not request.spec.output_token_ids:
                rows = self.prompt_rows.get(request_id, [])
                prompt = list(request.spec.prompt_token_ids)[1:]
                assert rows == prompt[: len(rows)]
                assert rows == prompt or not got

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        # Some request moves in every step, so this many suffice for all, or there is a livelock.
        for _ in range((1 + self.depth) * 60 * (len(self.scheduler.requests) + 1)):
            if not self.loop.busy:
                break
            self.step()
            self.bookkeeping_holds()
        self.tokens_are_right()
        self.events_tell_what_is_cached()
        assert self.ends.keys() == self.asked.keys()
        assert self.kv.block_pool.num_used == 0
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)


class OverlappedLife(EngineLife):
    depth = 1


SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
TestEngineLife = EngineLife.TestCase
TestEngineLife.settings = SETTINGS
TestOverlappedLife = OverlappedLife.TestCase
TestOverlappedLife.settings = SETTINGS
