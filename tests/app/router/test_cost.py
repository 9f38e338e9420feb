"""What the costs of replicas are made of."""

import pytest

from app.router.cost import LEAST_COPY_WEIGHT, UNCACHED_WEIGHT, USES_PER_REPLICA, Churn, PrefixUses, load_cost, slowness
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


def test_a_prefix_that_is_used_once_is_not_worth_a_copy() -> None:
    uses = PrefixUses()
    assert {uses.copy_weight(bytes([number]), 1, 4) for number in range(200)} == {UNCACHED_WEIGHT}
    assert uses.copy_weight(None, 0, 4) == UNCACHED_WEIGHT


def test_a_prefix_is_worth_copies_until_each_has_its_share_of_the_uses() -> None:
    uses = PrefixUses()
    for _ in range(USES_PER_REPLICA * 4):
        uses.copy_weight(b"hot", 1, 4)
    weights = [uses.copy_weight(b"hot", copies, 4) for copies in (1, 4, 16, 100)]
    assert weights[0] == weights[1] == LEAST_COPY_WEIGHT
    assert LEAST_COPY_WEIGHT < weights[2] < weights[3] == UNCACHED_WEIGHT


def test_uses_are_forgotten() -> None:
    uses = PrefixUses()
    for _ in range(100):
        uses.copy_weight(b"old", 1, 2)
    for number in range(2 * USES_PER_REPLICA):
        uses.copy_weight(number.to_bytes(2, "little"), 1, 2)
    assert uses.copy_weight(b"old", 1, 2) == UNCACHED_WEIGHT
    assert len(uses._uses) <= 2 * USES_PER_REPLICA


def test_new_blocks_are_dearer_where_more_come_in() -> None:
    churn = Churn()
    churn.note_prompt(100, 50)
    assert churn.factors(2)(1) == 1.0
    for _ in range(100):
        churn.note(1, 30, 1000)
        churn.note(2, 10, 1000)
    factor = churn.factors(2)
    assert 0.8 < factor(2) < 1.0 < factor(1) < 1.5
    for _ in range(500):
        churn.note(1, 10, 1000)
        churn.note(2, 10, 1000)
    assert churn.factors(2)(1) == pytest.approx(1.0, abs=0.02)
    assert 0.8 < churn.factors(2)(4) < churn.factors(2)(2), "a replica that has stored nothing"


def test_churn_does_not_count_where_prompts_have_nothing_in_common() -> None:
    churn = Churn()
    for _ in range(100):
        churn.note_prompt(100, 0)
        churn.note(1, 30, 1000)
        churn.note(2, 10, 1000)
    assert churn.factors(2)(1) == churn.factors(2)(2) == 1.0
    churn.note_prompt(100, 90)
    assert 1.0 < churn.factors(2)(1) < 1.05


def test_churn_stays_finite_for_ever() -> None:
    churn = Churn()
    churn.note_prompt(100, 50)
    for _ in range(3000):
        churn.note(1, 200, 1000)
        churn.note(2, 100, 1000)
    assert churn.factors(2)(1) == pytest.approx(1.0 + 0.5 / 3, abs=0.05)
    churn.drop(1)
    assert churn.factors(1)(2) == pytest.approx(1.0)
