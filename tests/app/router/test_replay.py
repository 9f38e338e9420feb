"""A trace over HTTP against real replicas, in its smallest form: see tests/perf/routing/replay.py."""

from pathlib import Path

from app.cli.bench.workload import trace_requests
from app.simulation.requests import at_rate, num_prompt_tokens, simulated_requests
from app.simulation.routing import ideal_hit_ratio, setup_for
from tests.perf.routing.replay import CUT, within
from tests.perf.routing.turn import Turn, fleet, replay

REPLICAS = 2
CONTEXT = 512
"""Of the tiny model."""


async def test_all_are_answered_and_hits_are_near_those_of_one_shared_cache_but_not_with_round_robin(
    serve_url: str, tiny_folder: Path
) -> None:
    requests, num_left_out = within(simulated_requests(trace_requests(CUT, 150)), CONTEXT)
    assert num_left_out > 0
    requests = at_rate(requests, 10_000)
    setup = setup_for(requests, num_replicas=REPLICAS, cache_fraction=0.5)
    turns: dict[str, Turn] = {}
    for name in ("round_robin", "prefix_cache"):
        with fleet(name, tiny_folder, setup):
            turns[name] = await replay(requests, setup, serve_url)

    tokens = num_prompt_tokens(requests)
    for turn in turns.values():
        assert len(turn.answers) == len(requests)
        for request, answer in zip(requests, turn.answers, strict=True):
            lengths = len(request.prompt_token_ids), request.params.max_tokens
            assert (answer.prompt_tokens, answer.output_tokens) == lengths
        assert len(turn.computed) == REPLICAS
        assert sum(turn.computed) == tokens - sum(answer.cached_tokens for answer in turn.answers)
    near = 0.75 * ideal_hit_ratio(requests, REPLICAS * setup.num_kv_blocks)
    assert turns["round_robin"].figures["hit_ratio"] < near < turns["prefix_cache"].figures["hit_ratio"]
