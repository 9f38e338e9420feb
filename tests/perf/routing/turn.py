"""One turn: a fleet of fresh replicas behind one router, the replay over HTTP, and what that came to."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from app.cli.bench.calls import Form
from app.cli.bench.client import Answer, ServiceClient
from app.cli.bench.load import run_load
from app.config import ServiceConfig
from app.main import application
from app.simulation.requests import BLOCK_SIZE
from app.simulation.routing import RoutingSetup
from engine import EngineRequest
from tests.perf.routing.routers import ROUTERS

APP = "replay"
MODEL = "replayed"
VOCABULARY = 30_000
"""Token ids in prompts; fewer than the demo's tokenizer has."""

WARM_UPS = 8
"""Short requests for each replica before the replay."""

REQUEST_SECONDS = 120


@dataclass(frozen=True)
class Turn:
    """What came of the requests.

    Attributes:
        answers: in the order of the requests.
        computed: prompt tokens that each replica computed.
    """

    answers: list[Answer]
    computed: list[int]

    @property
    def figures(self) -> dict[str, float]:
        """As those of `manta bench routing`, in seconds."""
        times = [each.token_times[0] - each.sent_at for each in self.answers]
        p50, p99 = np.percentile(times, (50, 99))
        prompt, cached = (
            sum(getattr(each, f"{kind}_tokens") for each in self.answers) for kind in ("prompt", "cached")
        )
        return {
            "hit_ratio": cached / prompt,
            "ttft_p50": float(p50),
            "ttft_p99": float(p99),
            "imbalance": max(self.computed) * len(self.computed) / sum(self.computed),
        }


@contextmanager
def fleet(router: str, model: Path, setup: RoutingSetup) -> Iterator[None]:
    """An application of cold replicas behind one of ROUTERS, on the Serve that runs in this process."""
    config = ServiceConfig.model_validate(
        {
            "models": [
                {
                    "name": MODEL,
                    "model": str(model),
                    "engine": {
                        "load_format": "dummy",
                        "num_threads": 1,
                        "block_size": BLOCK_SIZE,
                        "num_kv_blocks": setup.num_kv_blocks,
                        "max_model_len": setup.max_model_len,
                    },
                    "num_replicas": setup.num_replicas,
                    # Nothing is refused: all routers serve the same requests.
                    "max_queued_requests": 10_000,
                    "max_queue_wait_s": None,
                    "graceful_shutdown_timeout_s": 1,
                }
            ],
            "access": {"open": True},
            "ingress": {
                "num_replicas": setup.num_ingresses,
                # Of every replica, however busy it is.
                "metrics_timeout_s": REQUEST_SECONDS,
                "metrics_max_age_s": 0,
                "graceful_shutdown_timeout_s": 1,
            },
            "log_level": "WARNING",
        }
    )
    serve.run(application(config, ROUTERS[router]), name=APP, route_prefix=f"/{APP}")
    try:
        yield
    finally:
        serve.delete(APP)


async def replay(requests: Sequence[EngineRequest], setup: RoutingSetup, serve_url: str) -> Turn:
    """Sends the requests to a fleet at their arrival times.

    Raises:
        RuntimeError: one failed.
    """
    form = Form("completions", MODEL, as_text=False, ignore_eos=True)
    unlike_all = [[VOCABULARY + number] * (BLOCK_SIZE + 1) for number in range(WARM_UPS * setup.num_replicas)]
    calls = [
        form.call(prompt_of(request), request.params.max_tokens or 1, request.arrival_time) for request in requests
    ]
    url = f"{serve_url}/{APP}"
    async with ServiceClient(url, "completions", timeout=REQUEST_SECONDS) as client:
        await run_load([form.call(prompt, 2) for prompt in unlike_all], client.send, concurrency=None)
        before = computed_tokens(url)
        answers, _ = await run_load(calls, client.send, concurrency=None)
    if failures := [each.failure for each in answers if each.failure is not None]:
        raise RuntimeError(f"{len(failures)} of {len(answers)} requests failed: {failures[0]}")
    after = computed_tokens(url)
    return Turn(answers, [after[replica] - before[replica] for replica in before])


def prompt_of(request: EngineRequest) -> list[int]:
    """The prompt of a simulated request in token ids that a model has: as there, blocks are equal or not."""
    numbers = request.prompt_token_ids
    return [n // VOCABULARY if i % BLOCK_SIZE == 0 else n % VOCABULARY for i, n in enumerate(numbers)]


def computed_tokens(url: str) -> dict[str, int]:
    """Prompt tokens that a replica computed so far, by its label; those that it computed again are counted once."""
    with urllib.request.urlopen(f"{url}/metrics") as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    tokens: dict[str, int] = {}
    for name, sign in (("queried", 1), ("hit", -1)):
        for family in families:
            for sample in family.samples:
                if sample.name == f"manta_prefix_cache_{name}_tokens_total":
                    replica = sample.labels["replica"]
                    tokens[replica] = tokens.get(replica, 0) + sign * int(sample.value)
    return tokens
