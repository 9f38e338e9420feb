"""The deployment that speaks HTTP and gRPC: it makes the application and gives it the models to serve."""

import asyncio
import contextvars
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Metric
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import proxy
from app.api_keys import load_keys
from app.config import ModelDeployment, ServiceConfig
from app.engine_client import RayEngineClient
from app.failover import ResumingClient
from app.grpc.exchange import GrpcSide
from app.grpc.metrics import GrpcMetrics
from app.grpc.servicer import GrpcServicer
from app.logs import log_through_serve
from app.metrics import SharedPage, collect_families, labelled, render
from app.openai.application import create_app
from app.openai.auth import KeyRing
from app.openai.intake import Intake
from app.openai.metrics import IngressMetrics
from app.openai.rate_limits import Client
from app.openai.served_model import Limits, ServedModel
from app.transport import NoReplica
from engine.hub import load_model_config
from engine.processor import Processor
from engine.tokenizer import load_tokenizer

logger = logging.getLogger("ray.serve")

READY_POLL_S = 0.2


class RayReceive:
    """ASGI middleware: a `receive` that Ray fails is one whose client has gone.

    Serve's receive is a call of the proxy. When a client leaves, Serve cancels the request and Ray the calls made under
    it; where the proxy itself is lost, so are its clients.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_or_disconnect() -> Message:
            try:
                return await receive()
            except RayError:
                return {"type": "http.disconnect"}

        await self._app(scope, receive_or_disconnect if scope["type"] == "http" else receive, send)


@serve.ingress()
class IngressDeployment(GrpcServicer):
    """One ingress process. Everything runs on Serve's loop for user code.

    Args:
        config: the service's.
        handles: of the models' deployments, by the names that clients use.
    """

    def __init__(self, config: ServiceConfig, handles: Mapping[str, DeploymentHandle[Any]]) -> None:
        log_through_serve()
        self._config = config
        keys = load_keys(config.access, os.environ)
        self._keys = None
        if keys is not None:
            isolate = config.access.isolate_prefix_cache
            self._keys = KeyRing(keys, time.time, shares=config.ingress.num_replicas, isolate_prefix_cache=isolate)
        self._intake = Intake()
        if not config.access.open and not proxy.is_installed(os.environ):
            # The proxy of this node has the environment that this process has.
            logger.warning(
                "proxy_obeys_clients: x-request-disconnect-disabled and other headers of Ray's take effect; start Ray "
                "with %s=%s on every node, or the service with `manta serve`",
                proxy.VARIABLE,
                proxy.CALLBACK,
            )
        context = serve.get_replica_context()
        self._replica_id = context.replica_id.unique_id
        self._own_deployment = (context.deployment, context.app_name)
        self._registry = CollectorRegistry()
        self._clients = {model.name: self._client(handles[model.name], model) for model in self._config.models}
        self._announcement = asyncio.get_running_loop().create_task(self._announce())

    def __serve_build_asgi_app__(self) -> FastAPI:
        metrics = IngressMetrics(self._registry)
        models = {model.name: self._served(model, metrics) for model in self._config.models}
        ingress = self._config.ingress
        limits = Limits(
            max_body_bytes=ingress.max_body_bytes,
            body_timeout=ingress.body_timeout_s,
            max_choices=ingress.max_choices,
            max_logprobs=ingress.max_logprobs,
            request_timeout=ingress.request_timeout_s,
            idle_timeout=ingress.idle_timeout_s,
            cors_origins=ingress.cors_origins,
            heartbeat=ingress.heartbeat_s,
            coalesce=ingress.coalesce_s,
        )
        app = create_app(
            models,
            limits,
            metrics,
            self._check_models,
            SharedPage(self._gather_metrics, ingress.metrics_max_age_s).get,
            ready=self._check_ready,
            keys=self._keys,
            intake=self._intake,
            shows_request_id=False,  # Serve's proxy draws the id and adds it to the answer
        )
        app.add_middleware(RayReceive)
        self.grpc_side = GrpcSide(
            service=app.state.service,
            keys=self._keys,
            intake=self._intake,
            metrics=GrpcMetrics(self._registry),
            local_only=ingress.grpc_clients == "local",
            check_ready=self._check_ready,
            everyone=Client("everyone", time.time),
        )
        return app

    async def own_metrics(self) -> tuple[str, list[Metric]]:
        """This process's replica id and metrics; other ingresses ask for them."""
        return self._replica_id, collect_families(self._registry)

    async def drain(self, wait_s: float) -> int:
        """Takes no more requests, and waits so long for those that are served; how many there are then."""
        self._intake.close()
        return await self._intake.drained(wait_s)

    async def __del__(self) -> None:
        if intake := getattr(self, "_intake", None):
            intake.close()
        if announcement := getattr(self, "_announcement", None):
            announcement.cancel()
        for client in getattr(self, "_clients", {}).values():
            await client.close()

    def _client(self, handle: DeploymentHandle[Any], config: ModelDeployment) -> RayEngineClient:
        return RayEngineClient(
            handle,
            ingress_id=self._replica_id,
            ingress=ray.get_runtime_context().current_actor,
            replica_wait_s=config.longest_replica_wait_s,
            gather_s=self._config.ingress.coalesce_s,
        )

    def _served(self, model: ModelDeployment, metrics: IngressMetrics) -> ServedModel:
        engine = model.engine_config()
        # The weights are the replicas' business.
        model_config = load_model_config(engine, weights=False)
        tokenizer = load_tokenizer(model_config.path)
        tokenizer.prepare_chats()
        processor = Processor(
            model_config,
            tokenizer,
            block_size=engine.block_size,
            max_logprobs=engine.max_logprobs,
            refuse_excess_max_tokens=engine.refuse_excess_max_tokens,
        )
        return ServedModel(
            name=model.name,
            model_config=model_config,
            processor=processor,
            tokenizer=tokenizer,
            client=ResumingClient(
                self._clients[model.name],
                resume_wait_s=model.resume_wait_s,
                on_resume=metrics.resumed.labels(model.name).inc,
            ),
            created=int(time.time()),
        )

    async def _check_models(self) -> None:
        if down := self._models_down():
            raise NoReplica(f"no replica is up of: {', '.join(down)}")

    async def _check_ready(self) -> None:
        if self._intake.closed:
            raise NoReplica("the service is shutting down")
        await self._check_models()

    def _models_down(self) -> list[str]:
        """Those that have no replica, though they always should."""
        return [
            model.name
            for model in self._config.models
            if model.least_replicas and not self._clients[model.name].replicas.members
        ]

    async def _announce(self) -> None:
        """Tells whoever started the service that it answers now."""
        while self._models_down():
            await asyncio.sleep(READY_POLL_S)
        logger.info("service_ready models=%s", ",".join(self._clients))

    async def _gather_metrics(self) -> bytes:
        timeout_s = self._config.ingress.metrics_timeout_s
        families: dict[str, Sequence[Metric]] = {}
        calls = [client.call_replicas("metrics", timeout_s) for client in self._clients.values()]
        ingresses, *engines = await asyncio.gather(self._ingress_metrics(timeout_s), *calls)
        families |= ingresses
        for name, replicas in zip(self._clients, engines, strict=True):
            # An engine does not know under which name it is served.
            families |= {replica: labelled(metrics, model=name) for replica, metrics in replicas.items()}
        return render(families)

    async def _ingress_metrics(self, timeout_s: float) -> dict[str, list[Metric]]:
        """Of all ingresses; of this one alone where the others do not answer in time."""
        own = dict([await self.own_metrics()])

        async def ask() -> list[tuple[str, list[Metric]]]:
            name, app_name = self._own_deployment
            response = serve.get_deployment_handle(name, app_name).broadcast("own_metrics")
            return await response.results_async(timeout_s=timeout_s)

        try:
            # A handle call needs a context of its own: see RayEngineClient.
            answers = await asyncio.get_running_loop().create_task(ask(), context=contextvars.Context())
        except Exception as error:
            logger.warning("ingress_metrics_incomplete error=%r", error)
            return own
        return own | dict(answers)
