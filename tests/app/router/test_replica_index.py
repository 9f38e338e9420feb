"""Where a call goes, by what a process knows of the replicas."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.router.cost import LEAST_SENT
from app.router.index import ReplicaIndex
from app.router.states import RoutingSettings
from app.transport import StreamItem
from engine.kv_cache.events import BlockRemoved, BlockStored, KVEvent
from engine.outputs import EngineLoad, EngineOutput
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.step_times import NO_STEPS, StepTimes

SIZE = 16
IDLE = EngineLoad(0, 0, 0, 0, 1000)


def prompt(name: str, blocks: int, *, shared: int = 0) -> EngineRequest:
    """Its first `shared` blocks are the same in all."""
    hashes = [f"{'shared' if place < shared else name}-{place}".encode() * 4 for place in range(blocks)]
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(range(blocks * SIZE)),
        params=SamplingParams(max_tokens=4),
        seed=0,
        block_hashes=tuple(hashes),
    )


class Fleet:
    """An index, and what its replicas say."""

    def __init__(self, names: str, **settings: int) -> None:
        self.index = ReplicaIndex(RoutingSettings(SIZE, **settings))
        self.seqs: Counter[str] = Counter()
        self.join(names)

    def join(self, names: str) -> None:
        self.index.set_members({*self.index.members, *names})
        for name in names:
            self.say(name)
            self.index.restore_blocks(name, 0, [])

    def say(
        self,
        name: str,
        load: EngineLoad = IDLE,
        events: tuple[KVEvent, ...] = (),
        known: tuple[str, ...] = (),
        first_of: tuple[str, ...] = (),
    ) -> None:
        outputs = [EngineOutput(each, (1,)) for each in first_of]
        self.index.receive(name, StreamItem(outputs, self.seqs[name], list(events), load, known))
        self.seqs[name] += len(events)

    def send(self, *requests: EngineRequest) -> str:
        """Begins a call; the first choice takes it."""
        call_id = requests[0].request_id
        self.index.begin(call_id, requests)
        first = self.index.choose(call_id, self.index.members)[0]
        self.index.assign(call_id, first, accepted=True)
        return first

    def hold(self, name: str, request: EngineRequest) -> None:
        self.say(name, events=(BlockStored(tuple(request.block_hashes), None),))


def load(running: int = 0, waiting: int = 0, queued: int = 0, used: int = 0, times: StepTimes = NO_STEPS) -> EngineLoad:
    return EngineLoad(running, waiting, queued, used, 1000, 0, times)


# ---- prefixes and load ----


def test_a_prompt_goes_where_its_prefix_is() -> None:
    for name in "abc":
        fleet = Fleet("abc")
        fleet.hold(name, prompt("first", 20))
        assert fleet.send(replace(prompt("first", 25), request_id="again")) == name


def test_of_two_that_hold_it_the_longer_match_wins_and_then_the_lower_load() -> None:
    fleet = Fleet("abc")
    whole = prompt("x", 20)
    fleet.hold("a", replace(whole, block_hashes=whole.block_hashes[:5]))
    fleet.hold("b", whole)
    assert fleet.send(replace(whole, request_id="1")) == "b"
    fleet.hold("a", whole)
    fleet.say("b", load(running=20))
    assert fleet.send(replace(whole, request_id="2")) == "a"


def test_a_decision_counts_at_once_for_those_that_share_the_prefix() -> None:
    fleet = Fleet("abcdefgh")
    places = {fleet.send(prompt(f"r{number}", 20, shared=19)) for number in range(4)}
    assert len(places) == 1


def test_a_hot_prefix_spreads_once_its_replica_is_too_loaded() -> None:
    fleet = Fleet("abcd")
    places = Counter(fleet.send(prompt(f"r{number}", 20, shared=18)) for number in range(100))
    assert len(places) == 4
    assert max(places.values()) < 60


def test_a_prefix_does_not_outweigh_a_queue_that_takes_longer_than_computing_it() -> None:
    fleet = Fleet("ab")
    fleet.hold("a", prompt("x", 20))
    fleet.say("a", load(running=4, queued=300))
    assert fleet.send(prompt("x", 20)) == "a"
    fleet.say("a", load(running=4, waiting=9, queued=30_000))
    assert fleet.send(replace(prompt("x", 20), request_id="y")) == "b"


def test_a_replica_without_a_free_seat_is_left_to_longer_prefixes() -> None:
    fleet = Fleet("ab", max_num_seqs=8)
    fleet.hold("a", prompt("x", 2, shared=2))
    fleet.hold("a", prompt("y", 40))
    fleet.say("a", load(running=7))
    assert fleet.send(prompt("1", 20, shared=2)) == "a"
    assert fleet.send(prompt("2", 20, shared=2)) == "b", "the first one took the last seat"
    assert fleet.send(replace(prompt("y", 60), request_id="3")) == "a"
    fleet.say("a", load(running=8, waiting=40))
    assert fleet.send(replace(prompt("y", 60), request_id="4")) == "b"


def test_a_burst_between_two_reports_is_spread_evenly() -> None:
    fleet = Fleet("abcdefgh")
    places = Counter(fleet.send(prompt(f"r{number}", 20)) for number in range(80))
    assert len(places) == 8
    assert max(places.values()) <= 12


def test_a_burst_over_several_ingresses_is_spread_too() -> None:
    fleets = [Fleet("abcdefgh", num_ingresses=4) for _ in range(4)]
    places = Counter(fleets[number % 4].send(prompt(f"r{number}", 20)) for number in range(160))
    assert len(places) == 8
    assert max(places.values()) <= 2 * 160 / 8


def test_with_other_ingresses_what_was_sent_counts_for_what_they_sent_unseen() -> None:
    """The longer match is worth a queue of one prompt, but not of what four ingresses may have sent there."""
    places = []
    for num_ingresses in (1, 4):
        fleet = Fleet("ab", num_ingresses=num_ingresses)
        fleet.hold("a", prompt("x", 24, shared=4))
        first = prompt("1", 24, shared=4)
        fleet.index.begin("1", [first])
        fleet.index.assign("1", "a", accepted=True)
        places.append(fleet.send(prompt("2", 5, shared=4)))
    assert places == ["a", "b"]


def test_ingresses_that_know_nothing_send_a_new_prefix_to_the_same_replica() -> None:
    for number in range(20):
        assert Fleet("abcdefgh").send(prompt(f"r{number}", 4)) == Fleet("hgfedcba").send(prompt(f"r{number}", 4))


def test_different_prompts_go_everywhere_when_all_are_idle() -> None:
    fleet = Fleet("abcd")
    places: Counter[str] = Counter()
    for number in range(200):
        request = prompt(f"r{number}", 4, shared=1)
        first = fleet.send(request)
        fleet.hold(first, request)
        fleet.index.end(request.request_id, [request.request_id])
        places[first] += 1
    assert len(places) == 4
    assert max(places.values()) < 80


def test_a_new_replica_gets_work_at_once() -> None:
    fleet = Fleet("abc")
    for name in "abc":
        fleet.say(name, load(running=8, queued=100))
    fleet.join("n")
    assert fleet.send(prompt("x", 20)) == "n"


def test_a_new_replica_is_not_flooded() -> None:
    fleet = Fleet("abc")
    for number in range(60):
        request = prompt(f"old{number}", 20, shared=10)
        fleet.hold(fleet.send(request), request)
        fleet.index.end(request.request_id, [request.request_id])
    fleet.join("n")
    places = Counter(fleet.send(prompt(f"new{number}", 20)) for number in range(40))
    assert 8 <= places["n"] <= 15


def test_a_slow_replica_gets_less() -> None:
    fleet = Fleet("abcd")
    fast, slow = NO_STEPS, NO_STEPS
    for tokens in (32, 2048) * 50:
        fast = fast.after(tokens, 0.005 + 2e-5 * tokens)
        slow = slow.after(tokens, 3 * (0.005 + 2e-5 * tokens))
    for _ in range(3):
        for name in "abcd":
            fleet.say(name, load(times=slow if name == "d" else fast))
    places = Counter(fleet.send(prompt(f"r{number}", 20)) for number in range(200))
    assert 0 < places["d"] < 0.6 * min(places[name] for name in "abc")


def test_one_slow_step_does_not_starve_a_replica_for_ever() -> None:
    fleet = Fleet("abcd")
    times = dict.fromkeys("abcd", NO_STEPS)
    times["d"] = times["d"].after(320, 30.0)
    places: Counter[str] = Counter()
    for number in range(2000):
        request = prompt(f"r{number}", 20)
        first = fleet.send(request)
        times[first] = times[first].after(320, 0.011).after(1, 0.005)
        fleet.say(first, load(times=times[first]), known=(request.request_id,), first_of=(request.request_id,))
        fleet.index.end(request.request_id, [request.request_id])
        places[first] += 1
    assert places["d"] > 200
    assert fleet.index._replicas["d"].slowness < 2.5, "it was taken to be a hundred times as slow"


def test_a_call_that_ray_asks_about_again_counts_as_before() -> None:
    fleet = Fleet("ab")
    request = prompt("x", 20)
    fleet.index.begin("x", [request])
    for _ in range(40):
        first = fleet.index.choose("x", "ab")[0]
        assert fleet.index._replicas[first].new_tokens == 20 * SIZE
        assert sum(state.new_requests for state in fleet.index._replicas.values()) == 1
    assert len(fleet.index._uses._recent) == 1


def test_a_call_that_has_its_first_token_already_is_not_counted_when_ray_says_who_took_it() -> None:
    fleet = Fleet("ab")
    fleet.index.begin("x", [prompt("x", 20)])
    first, other = fleet.index.choose("x", "ab")
    fleet.say(other, known=("x",), first_of=("x",))
    fleet.index.assign("x", other, accepted=True)
    assert [fleet.index._replicas[name].new_tokens for name in (first, other)] == [0, 0]
    assert fleet.index.replica_of("x") == other


def test_blocks_that_were_forgotten_are_learned_from_what_a_prompt_found() -> None:
    fleet = Fleet("ab")
    request = prompt("x", 20)
    fleet.index.begin("x", [request])
    fleet.index.assign("x", "a", accepted=True)
    output = EngineOutput("x", (1,), num_cached_tokens=12 * SIZE)
    fleet.index.receive("a", StreamItem([output], fleet.seqs["a"], [], IDLE))
    assert fleet.index.cached_blocks("a") == set(request.block_hashes[:12])


def test_small_differences_of_speed_do_not_draw_all_work_to_one() -> None:
    places: Counter[str] = Counter()
    for number in range(100):
        fleet = Fleet("abcd")
        for name, factor in zip("abcd", (1.0, 1.1, 0.95, 1.05), strict=True):
            fleet.say(name, load(times=NO_STEPS.after(32, 0.005 * factor).after(2048, 0.045 * factor)))
        places[fleet.send(prompt(f"r{number}", 4))] += 1
    assert max(places.values()) < 50


def test_sequences_that_decode_and_full_kv_blocks_make_a_replica_dearer() -> None:
    fleet = Fleet("ab")
    fleet.say("a", load(running=30))
    assert fleet.send(prompt("x", 1)) == "b"
    fleet.say("a", load(running=30, used=500))
    fleet.say("b", load(running=29, used=990), known=("x",), first_of=("x",))
    assert fleet.send(prompt("y", 1)) == "a"


def test_what_a_load_counts_already_is_not_counted_twice() -> None:
    fleet = Fleet("ab")
    first, second = (fleet.send(prompt(name, 50)) for name in "xy")
    fleet.say(first, load(running=1, queued=16), known=("x",))
    fleet.say(second, load(running=1, queued=900), known=("y",))
    assert fleet.send(prompt("z", 50)) == first
    assert [fleet.index._replicas[name].new_tokens for name in (first, second)] == [50 * SIZE, 0]


@pytest.mark.parametrize("how", ["first token", "end", "refusal"])
def test_a_call_leaves_nothing_behind_however_it_goes_on(how: str) -> None:
    fleet = Fleet("ab")
    request = prompt("x", 50)
    first = fleet.send(request)
    match how:
        case "first token":
            fleet.say(first, first_of=("x",))
        case "end":
            fleet.index.end("x", ["x"])
        case "refusal":
            assert fleet.index.refuse("x")
    fleet.index.set_members("ab")
    fleet.send(prompt("other", 1))
    state = fleet.index._replicas[first]
    assert state.new_tokens <= SIZE
    assert fleet.index.prefixes.match(request.block_hashes, state.bit) == {}
    fleet.index.end("x", ["x"])
    fleet.index.end("other", ["other"])
    fleet.send(prompt("last", 1))
    assert sum(each.new_requests for each in fleet.index._replicas.values()) == 1
    assert set(fleet.index._calls) == set(fleet.index._unstarted) == {"last"}


def test_prompts_whose_logprobs_are_asked_for_find_no_prefix_anywhere() -> None:
    fleet = Fleet("ab")
    fleet.hold("a", prompt("x", 20))
    fleet.say("a", load(running=9))
    request = replace(prompt("x", 20), params=SamplingParams(max_tokens=4, prompt_logprobs=0))
    assert fleet.send(request) == "b"


def test_equal_tokens_with_another_salt_are_another_prefix() -> None:
    """The hashes come with the salt in them: the index compares nothing else."""
    fleet = Fleet("ab")
    fleet.hold("a", prompt("salted", 20))
    fleet.say("a", load(running=9))
    assert fleet.send(prompt("unsalted", 20)) == "b"


# ---- who cannot take it ----


def test_a_replica_with_a_full_queue_or_a_broken_stream_comes_last() -> None:
    fleet = Fleet("abc", max_queued_requests=4)
    fleet.hold("a", prompt("x", 20))
    fleet.say("a", load(waiting=4))
    fleet.index.lose("b")
    fleet.say("c", load(running=500, waiting=3, queued=99_999))
    fleet.index.begin("x", [prompt("x", 20)])
    assert fleet.index.choose("x", "abc")[0] == "c"
    fleet.say("b")
    assert fleet.index.choose("x", "abc")[0] == "b"


def test_replicas_that_refused_are_left_out_while_there_are_others() -> None:
    fleet = Fleet("ab")
    fleet.hold("a", prompt("x", 20))
    assert fleet.send(prompt("x", 20)) == "a"
    assert fleet.index.refuse("x"), "b is left"
    assert fleet.index.replica_of("x") is None
    assert fleet.index.choose("x", "ab") == ["b"]
    assert not fleet.index.refuse("x"), "it is given to b, which has not answered"
    fleet.index.assign("x", "b", accepted=True)
    assert not fleet.index.refuse("x"), "nobody is left"
    assert sorted(fleet.index.choose("x", "ab")) == ["a", "b"]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 900)), min_size=1, max_size=8),
    st.integers(0, 5),
)
def test_every_replica_is_ranked_once_and_a_full_one_first_only_if_all_are(
    loads: list[tuple[int, int, int]], max_queued_requests: int
) -> None:
    names = "abcdefgh"[: len(loads)]
    fleet = Fleet(names, max_queued_requests=max_queued_requests)
    for name, (running, waiting, queued) in zip(names, loads, strict=True):
        fleet.say(name, load(running, waiting, queued))
    fleet.index.begin("x", [prompt("x", 3)])
    order = fleet.index.choose("x", names)
    assert sorted(order) == sorted(names)
    full = {name for name, each in zip(names, loads, strict=True) if each[1] >= max(max_queued_requests, 1)}
    assert order[0] not in full or len(full) == len(names)


def test_where_the_prefixes_fail_it_goes_by_load(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet("abc")
    fleet.say("a", load(running=3))
    fleet.say("b", load(running=1))
    fleet.say("c", load(running=2))

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(fleet.index.prefixes, "match", broken)
    fleet.index.begin("x", [prompt("x", 3)])
    assert fleet.index.choose("x", "abc") == ["b", "c", "a"]


def test_replicas_that_nothing_is_known_of_are_taken_in_turn() -> None:
    index = ReplicaIndex()
    index.set_members("abc")
    places: Counter[str] = Counter()
    for number in range(30):
        index.begin(f"r{number}", [prompt(f"r{number}", 3)])
        places[index.choose(f"r{number}", "abc")[0]] += 1
    assert set(places.values()) == {10}


# ---- replicas and calls come and go ----


def test_a_replica_that_comes_back_under_its_bit_has_nothing_of_the_one_before() -> None:
    fleet = Fleet("ab")
    fleet.hold("a", prompt("x", 20))
    bit = fleet.index._replicas["a"].bit
    fleet.index.set_members("b")
    fleet.index.drop("a")
    fleet.join("n")
    assert fleet.index._replicas["n"].bit == bit
    assert fleet.index.cached_blocks("n") == fleet.index.cached_blocks("a") == frozenset()
    fleet.say("n", load(running=9))
    assert fleet.send(prompt("x", 20)) == "b"


def test_what_a_replica_was_sent_does_not_count_for_the_next_under_its_bit() -> None:
    fleet = Fleet("ab")
    for number in range(8):
        fleet.send(prompt(f"{number}", 20))
    bit, other = (fleet.index._replicas[name].bit for name in "ab")
    assert fleet.index._sent.shares([bit, other])[0] > LEAST_SENT
    fleet.index.set_members("b")
    fleet.index.drop("a")
    fleet.join("n")
    assert fleet.index._replicas["n"].bit == bit
    assert fleet.index._sent.shares([bit, other])[0] == LEAST_SENT


def test_what_was_on_its_way_to_a_replica_that_was_dropped_is_not_taken_to_be_at_the_next() -> None:
    fleet = Fleet("a")
    fleet.send(prompt("x", 20))
    fleet.index.set_members("b")
    fleet.index.drop("a")
    fleet.join("c")
    fleet.index.begin("again", [replace(prompt("x", 20), request_id="again")])
    fleet.index.choose("again", ["b"])
    bits = [fleet.index._replicas[name].bit for name in "bc"]
    assert fleet.index.prefixes.match(prompt("x", 20).block_hashes, sum(bits)) == {bits[0]: 20}


def test_a_block_that_was_found_and_removed_since_is_not_there() -> None:
    fleet = Fleet("a")
    fleet.hold("a", prompt("x", 20))
    fleet.send(prompt("x", 20))
    found = EngineOutput("x", (1,), num_cached_tokens=19 * SIZE)
    removed = BlockRemoved(tuple(prompt("x", 20).block_hashes))
    fleet.index.receive("a", StreamItem([found], fleet.seqs["a"], [removed], IDLE, ()))
    assert fleet.index.cached_blocks("a") == frozenset()


def test_replicas_without_a_prefix_cache_share_equal_prompts() -> None:
    fleets = [Fleet("abcd", enable_prefix_caching=cached) for cached in (True, False)]
    places = [Counter(fleet.send(prompt(f"{number}", 20, shared=19)) for number in range(8)) for fleet in fleets]
    assert max(places[0].values()) > 2
    assert set(places[1].values()) == {2}


@pytest.mark.parametrize("first_token", [True, False])
def test_the_blocks_of_a_prompt_that_was_just_there_are_the_last_to_be_forgotten(first_token: bool) -> None:
    fleet = Fleet("a")
    fleet.index.prefixes._max_blocks = 45
    for name in "xy":
        fleet.hold("a", prompt(name, 20))
    fleet.send(prompt("x", 20))
    if first_token:
        fleet.say("a", first_of=("x",))
    else:
        fleet.index.end("x", ["x"])
    fleet.hold("a", prompt("z", 20))
    bit = fleet.index._replicas["a"].bit
    kept = [fleet.index.prefixes.match(prompt(name, 20).block_hashes, bit)[bit] for name in "xyz"]
    assert kept == [20, 5, 20]


def test_a_member_is_not_dropped() -> None:
    fleet = Fleet("a")
    fleet.hold("a", prompt("x", 2))
    fleet.index.drop("a")
    assert len(fleet.index.cached_blocks("a")) == 2


def test_a_replica_that_left_is_remembered_until_it_is_dropped() -> None:
    fleet = Fleet("ab")
    for name in itertools.islice(itertools.count(), 4):
        fleet.send(prompt(f"r{name}", 2))
    fleet.index.set_members("")
    assert fleet.index.in_flight("a") + fleet.index.in_flight("b") == 4
    for name in range(4):
        fleet.index.end(f"r{name}", [f"r{name}"])
    assert fleet.index.in_flight("a") + fleet.index.in_flight("b") == 0
    fleet.index.drop("a")
    assert set(fleet.index._replicas) == {"b"}


def test_a_call_that_ended_before_it_was_routed_leaves_nothing_behind() -> None:
    fleet = Fleet("a")
    fleet.index.begin("x", [prompt("x", 3)])
    fleet.index.end("x", ["x"])
    assert fleet.index.choose("x", "a") == ["a"]
    fleet.index.assign("x", "a", accepted=True)
    assert (fleet.index.in_flight("a"), fleet.index.replica_of("x")) == (0, None)
    assert fleet.index._replicas["a"].new_requests == 0


def test_listeners_hear_changes_of_members_alone() -> None:
    index = ReplicaIndex()
    heard: list[frozenset[str]] = []
    unsubscribe = index.subscribe(lambda: heard.append(index.members))
    index.set_members(["a"])
    index.set_members(["a"])
    index.set_members(["a", "b"])
    unsubscribe()
    index.set_members([])
    assert heard == [{"a"}, {"a", "b"}]
