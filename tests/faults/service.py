"""A service of two ingresses and two replicas, in a Ray cluster of its own, that can be looked into and broken."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from app.config import ServiceConfig
from app.main import INGRESS_NAME, build
from tests.faults.replica import FaultyReplica, ReplicaState, StepFault

MODEL = "tiny"
APP = "faults"
NUM_REPLICAS = 2
NUM_INGRESSES = 2
STALL_TIMEOUT_S = 4.0
CALL_TIMEOUT_S = 10.0
ENGINE_GAUGES = ("manta_requests_running", "manta_requests_waiting", "manta_kv_cache_usage_ratio")
HTTP_GAUGE = "manta_http_requests_in_flight"


def config_of(model_folder: Path) -> ServiceConfig:
    return ServiceConfig.model_validate(
        {
            "access": {"open": True},
            "log_level": "WARNING",
            "models": [
                {
                    "name": MODEL,
                    "model": str(model_folder),
                    "num_replicas": NUM_REPLICAS,
                    "num_cpus": 0.1,
                    "engine": {
                        "load_format": "dummy",
                        "dtype": "float32",
                        "num_kv_blocks": 512,
                        "max_num_seqs": 16,
                        "num_threads": 1,
                        "debug_integrity": True,
                    },
                    "lease_s": 2.0,
                    "stall_timeout_s": STALL_TIMEOUT_S,
                    "health_check_period_s": 0.5,
                    "graceful_shutdown_timeout_s": 5,
                }
            ],
            "ingress": {
                "num_replicas": NUM_INGRESSES,
                "health_check_period_s": 0.5,
                "graceful_shutdown_timeout_s": 5,
                "access_log": False,
                "heartbeat_s": 600,
                "metrics_max_age_s": 0,
            },
        }
    )


class Service:
    """The running service, seen from a process that is none of it.

    Attributes:
        url: its address, without a path.
    """

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self._model = model
        self._handle = serve.get_deployment_handle(model, APP)

    # ---- what there is ----

    async def replicas(self) -> dict[str, ReplicaState]:
        """The replicas that answer."""
        ids = sorted(self._actors(self._model))
        states = await asyncio.gather(*(self._ask(i, "state") for i in ids), return_exceptions=True)
        return {i: state for i, state in zip(ids, states, strict=True) if isinstance(state, ReplicaState)}

    async def ingresses(self) -> dict[str, int]:
        """The process id of each ingress that answers."""
        return await _numbers(
            self._actors(INGRESS_NAME), lambda actor: actor.__ray_call__.remote(lambda _: os.getpid())
        )

    async def ongoing(self, deployment: str) -> dict[str, int]:
        """Calls that Ray counts in each replica of a deployment that answers."""
        return await _numbers(self._actors(deployment), lambda actor: actor.get_num_ongoing_requests.remote())

    async def leftovers(self) -> list[str]:
        """What keeps the service from being whole and at rest."""
        replicas, ingresses = await asyncio.gather(self.replicas(), self.ingresses())
        found = []
        if len(replicas) != NUM_REPLICAS:
            found.append(f"{len(replicas)} replicas")
        if len(ingresses) != NUM_INGRESSES:
            found.append(f"{len(ingresses)} ingresses")
        for state in replicas.values():
            if state.load != (0, 0, 0):
                running, waiting, blocks = state.load
                found.append(f"running {running}, waiting {waiting}, KV blocks {blocks}")
            if state.calls or state.unfinished or state.requests:
                found.append(f"calls {state.calls}, counted {state.unfinished}, in the engine {state.requests}")
            if state.sessions != set(ingresses):
                found.append(f"streams to {sorted(state.sessions)}, ingresses {sorted(ingresses)}")
        engines, fronts = await asyncio.gather(self.ongoing(self._model), self.ongoing(INGRESS_NAME))
        if len(engines) != NUM_REPLICAS or len(fronts) != NUM_INGRESSES:
            found.append(f"Ray counts the calls of {len(engines)} replicas and {len(fronts)} ingresses")
        # The streams, one for each ingress, are calls as well.
        found += [f"Ray counts {count} calls in a replica" for count in engines.values() if count != NUM_INGRESSES]
        found += [f"Ray counts {count} calls in an ingress" for count in fronts.values() if count]
        return found + await self._told_by_metrics()

    async def _told_by_metrics(self) -> list[str]:
        """What /metrics says is going on."""
        try:
            async with httpx.AsyncClient(timeout=CALL_TIMEOUT_S) as http:
                page = (await http.get(f"{self.url}/metrics")).raise_for_status().text
        except httpx.HTTPError as error:
            return [f"/metrics: {error!r}"]
        return going_on(page)

    # ---- what can be done to it ----

    async def set_fault(self, replica_id: str, fault: StepFault | None) -> None:
        await self._ask(replica_id, "set_fault", fault)

    async def set_faults(self, fault: StepFault | None) -> None:
        """The same fault for each replica that is there."""
        for replica_id in await self.replicas():
            await self.set_fault(replica_id, fault)

    async def _ask(self, replica_id: str, method: str, *args: Any) -> Any:
        call = self._handle.options(method_name=method).remote(*args, pinned_to=replica_id)
        return await asyncio.wait_for(call, CALL_TIMEOUT_S)

    @staticmethod
    def _actors(deployment: str) -> dict[str, Any]:
        prefix = f"SERVE_REPLICA::{APP}#{deployment}#"
        found = {}
        for entry in ray.util.list_named_actors(all_namespaces=True):
            if entry["name"].startswith(prefix):
                try:
                    actor = ray.get_actor(entry["name"], namespace=entry["namespace"])
                except ValueError:
                    continue  # it has just died
                found[entry["name"].removeprefix(prefix)] = actor
        return found


async def _numbers(actors: dict[str, Any], ask: Callable[[Any], Any]) -> dict[str, int]:
    """What each actor says that answers in time."""
    answers = await asyncio.gather(
        *(asyncio.wait_for(ask(actor), CALL_TIMEOUT_S) for actor in actors.values()), return_exceptions=True
    )
    return {i: answer for i, answer in zip(actors, answers, strict=True) if isinstance(answer, int)}


def going_on(page: str) -> list[str]:
    """What a page of /metrics says is going on beside the question for it, and what it does not say."""
    expected = dict.fromkeys(ENGINE_GAUGES, (NUM_REPLICAS, 0.0)) | {HTTP_GAUGE: (NUM_INGRESSES, 1.0)}
    values: dict[str, list[float]] = {name: [] for name in expected}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in expected:
                values[sample.name].append(sample.value)
    return [
        f"{name} {values[name]}"
        for name, (count, total) in expected.items()
        if len(values[name]) != count or sum(values[name]) != total
    ]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@contextmanager
def started(model_folder: Path) -> Iterator[Service]:
    """The service, on a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = config_of(model_folder)
    # More logical CPUs than there may be: the processes mostly wait.
    ray.init("local", num_cpus=8, include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": "127.0.0.1", "port": port},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        with patch("app.main.LLMReplica", FaultyReplica):
            application = build(config)
        serve.run(application, name=APP, route_prefix="/", logging_config={})
        yield Service(f"http://127.0.0.1:{port}", config.models[0].deployment_name)
        serve.shutdown()
    finally:
        ray.shutdown()
