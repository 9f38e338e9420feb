"""What the costs of replicas are made of."""

import pytest

from app.router.cost import (
    COPY_WEIGHT,
    LEAST_COPY_WEIGHT,
    LEAST_SENT,
    MOST_SENT,
    USES_PER_REPLICA,
    PrefixUses,
    SentWork,
    load_cost,
    slowness,
)
from engine.outputs import EngineLoad
from engine.step_times import NO_STEPS, StepTimes, pooled


def steps(factor: float, count: int = 50) -> StepTimes:
    times = NO_STEPS
    for tokens in (32, 2048) * count:
        times = times.after(tokens, factor * (0.005 + 2e-5 * tokens))
    return times


def test_queued_tokens_come_before_sequences_and_full_kv_blocks_make_these_dear() -> None:
    assert load_cost(EngineLoad(0, 0, 700, 0, 1000)) == 700
    assert load_cost(EngineLoad(5, 5, 700, 500, 1000)) < 750
    assert load_cost(EngineLoad(5, 5, 700, 1000, 1000)) > 1000
    assert load_cost(EngineLoad(5, 5, 700, 0, 0)) == load_cost(EngineLoad(5, 5, 700, 0, 1000))


def test_slowness_compares_steps_of_equal_size() -> None:
    decoding = NO_STEPS
    for _ in range(50):
        decoding = decoding.after(32, 0.005 + 32 * 2e-5)
    fleet = pooled([*[steps(1)] * 20, steps(3), decoding])
    assert slowness(decoding, fleet) == slowness(steps(1), fleet) == 1.0
    assert 2.0 < slowness(steps(3), fleet) < 3.0


def test_a_replica_without_steps_or_with_few_is_taken_to_be_like_the_others() -> None:
    assert slowness(NO_STEPS, steps(1)) == slowness(NO_STEPS, NO_STEPS) == 1.0
    assert slowness(NO_STEPS.after(32, 0.02), pooled([steps(1)] * 4)) < 1.5


def noted(*prefixes: bytes, replicas: int = 4) -> PrefixUses:
    uses = PrefixUses()
    for prefix in prefixes:
        uses.note(prefix, replicas)
    return uses


def test_a_prefix_that_is_used_once_is_not_worth_a_copy() -> None:
    uses = noted(*(bytes([number]) for number in range(200)))
    assert {uses.copy_weight(bytes([number]), 1) for number in range(200)} == {COPY_WEIGHT}
    assert uses.copy_weight(None, 0) == COPY_WEIGHT


def test_a_prefix_is_worth_copies_until_each_has_its_share_of_the_uses() -> None:
    uses = noted(*[b"hot"] * USES_PER_REPLICA * 4)
    weights = [uses.copy_weight(b"hot", copies) for copies in (1, 4, 16, 200)]
    assert weights[0] == weights[1] == LEAST_COPY_WEIGHT
    assert LEAST_COPY_WEIGHT < weights[2] < weights[3] == COPY_WEIGHT


def test_uses_are_forgotten() -> None:
    uses = noted(*[b"old"] * 100, *(number.to_bytes(2, "little") for number in range(2 * USES_PER_REPLICA)), replicas=2)
    assert uses.copy_weight(b"old", 1) == COPY_WEIGHT
    assert len(uses._uses) <= 2 * USES_PER_REPLICA


def test_what_was_sent_lately_is_told_against_the_mean_and_within_bounds() -> None:
    sent = SentWork()
    assert sent.shares([1, 2]) == [LEAST_SENT, LEAST_SENT], "nobody got anything"
    for _ in range(100):
        sent.note(1, 300, 2)
        sent.note(2, 200, 2)
    assert sent.shares([1, 2]) == pytest.approx([1.2, 0.8], abs=0.02)
    assert sent.shares([1, 2, 4])[2] == LEAST_SENT, "one that has just come"
    for _ in range(100):
        sent.note(2, 200, 2)
    assert sent.shares([1, 2, 4, 8, 16]) == [LEAST_SENT, MOST_SENT, LEAST_SENT, LEAST_SENT, LEAST_SENT]


def test_what_was_sent_stays_finite_for_ever() -> None:
    sent = SentWork()
    for _ in range(5000):
        sent.note(1, 300, 2)
        sent.note(2, 200, 2)
    assert sent.shares([1, 2]) == pytest.approx([1.2, 0.8], abs=0.02)
    sent.drop(1)
    assert sent.shares([1, 2]) == pytest.approx([LEAST_SENT, MOST_SENT])
