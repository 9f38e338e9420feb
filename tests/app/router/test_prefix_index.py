"""Which replicas hold which blocks."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from app.router.prefixes import CachedBlocks, PrefixIndex
from engine.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

A, B, C = 1, 2, 4
ALL = A | B | C


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}{position}".encode() for position in range(length)]


def holding(**chains: list[bytes]) -> PrefixIndex:
    index = PrefixIndex()
    for name, hashes in chains.items():
        tell(index, {"a": A, "b": B, "c": C}[name], BlockStored(tuple(hashes), None))
    return index


def tell(index: PrefixIndex, bit: int, *events: KVEvent) -> None:
    blocks = index.blocks_of(bit)
    if blocks._next_seq is None:
        blocks._next_seq = 0
    assert not blocks.apply(blocks._next_seq, events)


def test_each_replica_matches_as_far_as_its_own_blocks_reach() -> None:
    prompt = chain("x", 5)
    index = holding(a=prompt[:2], b=prompt[:4], c=chain("y", 5))
    assert index.match(prompt, ALL) == {A: 2, B: 4}
    assert index.match(prompt[:3], ALL) == {A: 2, B: 3}
    assert index.match(prompt, A | C) == {A: 2}
    assert index.match([], ALL) == {}


def test_a_block_behind_a_missing_one_does_not_count() -> None:
    prompt = chain("x", 4)
    index = holding(a=prompt)
    tell(index, A, BlockRemoved((prompt[1],)))
    assert index.match(prompt, ALL) == {A: 1}
    tell(index, A, BlockRemoved((prompt[0],)))
    assert index.match(prompt, ALL) == {}


def test_a_prompt_on_its_way_counts_until_it_is_there_or_is_given_up() -> None:
    prompt = chain("x", 4)
    index = holding(a=prompt[:1])
    index.expect(A, prompt[1:])
    index.expect(A, prompt[2:])
    index.expect(B, prompt)
    assert index.match(prompt, ALL) == {A: 4, B: 4}
    index.arrived(A, prompt[1:])
    assert index.match(prompt, ALL) == {A: 1, B: 4}, "the other prompt comes without the block before it"
    tell(index, A, BlockStored((prompt[1],), prompt[0]))
    assert index.match(prompt, ALL) == {A: 4, B: 4}
    index.arrived(A, prompt[2:])
    index.arrived(B, prompt)
    assert index.match(prompt, ALL) == {A: 2}
    assert (index._coming, index._coming_counts) == ({}, {}), "nothing is left behind"


def test_blocks_that_are_cleared_or_dropped_are_those_of_one_replica() -> None:
    prompt = chain("x", 3)
    index = holding(a=prompt, b=prompt, c=prompt)
    tell(index, A, AllBlocksCleared())
    index.drop(B)
    assert index.match(prompt, ALL) == {C: 3}
    index.drop(C)
    assert len(index) == 0


def test_beyond_its_bound_the_tails_of_what_was_least_used_go_first() -> None:
    index = PrefixIndex(max_blocks=6)
    old, new = chain("old", 3), chain("new", 3)
    tell(index, A, BlockStored(tuple(old), None))
    tell(index, B, BlockStored(tuple(new), None))
    index.touch(old)
    tell(index, A, BlockStored((b"one",), None))
    assert index.match(new, ALL) == {B: 2}
    assert index.match(old, ALL) == {A: 3}
    tell(index, A, BlockStored((b"two", b"three", b"four"), None))
    assert index.match(new, ALL) == {}
    assert index.match(old, ALL) == {A: 2}
    assert len(index) == 6
    assert index.blocks_of(B).hashes == set()


def test_a_chain_that_came_in_parts_loses_its_tail_first_once_it_was_used() -> None:
    index = PrefixIndex(max_blocks=6)
    prompt = chain("x", 6)
    for part in (prompt[:2], prompt[2:4], prompt[4:]):
        tell(index, A, BlockStored(tuple(part), None))
    index.touch(prompt)
    tell(index, B, BlockStored((b"new", b"newer"), None))
    assert index.match(prompt, ALL) == {A: 4}
    assert index.blocks_of(A).hashes == set(prompt[:4])


def test_decisions_go_on_while_events_come_on_another_thread() -> None:
    prompts = [chain(f"{number}-", 40) for number in range(30)]
    index = PrefixIndex(max_blocks=500)
    errors: list[BaseException] = []

    def feed() -> None:
        try:
            for turn in range(300):
                bit = 1 << turn % 3
                prompt = prompts[turn % len(prompts)]
                tell(index, bit, BlockStored(tuple(prompt), None), BlockRemoved(tuple(prompt[20:])))
                index.touch(prompt)
                if turn % 50 == 0:
                    index.drop(bit)
        except BaseException as error:
            errors.append(error)

    feeder = threading.Thread(target=feed)
    feeder.start()
    while feeder.is_alive():
        for prompt in prompts:
            index.expect(B, prompt)
            index.match(prompt, ALL)
            index.blocks_of(C)
            index.arrived(B, prompt)
    feeder.join()
    assert not errors


BLOCKS = st.lists(st.integers(0, 9).map(lambda number: bytes([number])), min_size=1, max_size=5, unique=True)


class Prefixes(RuleBasedStateMachine):
    """Against sets."""

    @initialize()
    def begin(self) -> None:
        self.index = PrefixIndex()
        self.stored: dict[int, set[bytes]] = {bit: set() for bit in (A, B, C)}
        self.coming: list[tuple[int, list[bytes]]] = []

    @rule(bit=st.sampled_from([A, B, C]), blocks=BLOCKS)
    def store(self, bit: int, blocks: list[bytes]) -> None:
        tell(self.index, bit, BlockStored(tuple(blocks), None))
        self.stored[bit] |= set(blocks)

    @rule(bit=st.sampled_from([A, B, C]), blocks=BLOCKS)
    def remove(self, bit: int, blocks: list[bytes]) -> None:
        tell(self.index, bit, BlockRemoved(tuple(blocks)))
        self.stored[bit] -= set(blocks)

    @rule(bit=st.sampled_from([A, B, C]))
    def clear(self, bit: int) -> None:
        tell(self.index, bit, AllBlocksCleared())
        self.stored[bit].clear()

    @rule(bit=st.sampled_from([A, B, C]))
    def drop(self, bit: int) -> None:
        self.index.drop(bit)
        self.stored[bit].clear()

    @rule(bit=st.sampled_from([A, B, C]), blocks=BLOCKS)
    def expect(self, bit: int, blocks: list[bytes]) -> None:
        self.index.expect(bit, blocks)
        self.coming.append((bit, blocks))

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        if self.coming:
            bit, blocks = self.coming.pop(data.draw(st.integers(0, len(self.coming) - 1)))
            self.index.arrived(bit, blocks)

    @invariant()
    def matches_are_those_of_the_sets(self) -> None:
        for prompt in ([bytes([i]) for i in range(10)], [bytes([i]) for i in (3, 1, 4, 5, 9, 2, 6)]):
            expected = {}
            for bit in (A, B, C):
                has = self.stored[bit].union(*(blocks for each, blocks in self.coming if each == bit))
                depth = next((place for place, block in enumerate(prompt) if block not in has), len(prompt))
                if depth:
                    expected[bit] = depth
            assert self.index.match(prompt, ALL) == expected

    @invariant()
    def nothing_is_kept_that_nobody_has(self) -> None:
        assert len(self.index) == len(set().union(*self.stored.values()))


TestPrefixes = Prefixes.TestCase


# ---- one replica's events ----


@st.composite
def kv_events(draw: st.DrawFn) -> list[KVEvent]:
    block = st.integers(0, 5).map(lambda i: bytes([i]))
    blocks = st.lists(block, min_size=1, max_size=3).map(tuple)
    one = st.one_of(blocks.map(lambda b: BlockStored(b, None)), blocks.map(BlockRemoved), st.just(AllBlocksCleared()))
    return draw(st.lists(one, max_size=30))


def contents(events: list[KVEvent]) -> set[bytes]:
    index = PrefixIndex()
    tell(index, A, *events)
    return index.blocks_of(A).hashes


@given(kv_events(), st.data())
def test_blocks_are_right_after_any_gap_and_late_snapshot(events: list[KVEvent], data: st.DataObject) -> None:
    """A reader that starts, or loses messages, anywhere; a snapshot taken later than the number it bears."""
    blocks = PrefixIndex().blocks_of(A)
    pending_snapshot: tuple[int, set[bytes]] | None = None
    i = 0
    while i < len(events):
        size = data.draw(st.integers(1, 4))
        part = events[i : i + size]
        lost = data.draw(st.booleans()) and pending_snapshot is None
        if not lost and blocks.apply(i, part):
            taken_at = data.draw(st.integers(i, min(i + size, len(events))))
            pending_snapshot = (data.draw(st.integers(i, taken_at)), contents(events[:taken_at]))
        i += len(part)
        if pending_snapshot is not None and data.draw(st.booleans()):
            restore(blocks, pending_snapshot)
            pending_snapshot = None
    if blocks.apply(len(events), []):
        pending_snapshot = (len(events), contents(events))
    if pending_snapshot is not None:
        restore(blocks, pending_snapshot)
    assert blocks.hashes == contents(events)


def restore(blocks: CachedBlocks, snapshot: tuple[int, set[bytes]]) -> None:
    seq, hashes = snapshot
    blocks.restore(seq, [BlockStored(tuple(sorted(hashes)), None)])


@pytest.mark.parametrize("after", [1, 3])
def test_a_reader_that_lost_the_stream_asks_for_a_snapshot_again(after: int) -> None:
    blocks = PrefixIndex().blocks_of(A)
    assert blocks.apply(0, [BlockStored((b"x",), None)])
    blocks.restore(1, [BlockStored((b"x",), None)])
    assert not blocks.apply(1, [])
    blocks.forget()
    assert blocks.apply(after, [])
