"""How long a request is counted on for the blocks that it shares with others."""

from engine.scheduler.claims import PromptClaims
from tests.engine.scheduler.device import make_request
from tests.engine.scheduler.engine import BLOCK, Engine, prompt


def test_a_claim_ends_with_the_claimers_first_token():
    engine = Engine(budget=8)
    engine.add("a", prompt(1, 14), max_tokens=9)
    engine.step()
    assert len(engine.scheduler._claims) == 3
    engine.step()
    assert len(engine.scheduler._claims) == 0


def test_a_claim_that_ended_can_be_made_by_another_and_stays_with_it():
    claims = PromptClaims()
    first, second, third = (make_request(name, prompt(1, 14)) for name in "abc")
    for request in (first, second, third):
        request.block_hashes = [b"0", b"1", b"2"]
    claims.claim(first, 0, BLOCK)
    claims.release(first)
    claims.claim(second, 0, BLOCK)
    claims.release(first)
    claims.claim(third, 0, BLOCK)
    assert [request.num_expected_cached for request in (first, second, third)] == [0, 0, 12]
