"""What `serve run` builds: the ingress and one deployment for each model."""

# No `from __future__ import annotations` here: Ray validates the arguments only by a real class.
from dataclasses import asdict
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, BackpressureConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from app.config import CONTROL_CALLS, ModelDeployment, ServiceConfig
from app.ingress import IngressDeployment
from app.replica import LLMReplica
from app.requirements import check_cluster, node_labels
from app.router.index import RoutingSettings

INGRESS_NAME = "ingress"

QUEUE_RETRY_S = 1.0
"""When a client comes again that found too many waiting for an ingress: nobody knows when a place is free."""

ROUNDING = 1e-9
"""What keeps a whole number of replicas from being rounded up to the next one."""


def build(config: ServiceConfig) -> serve.Application:
    """The application of a configuration: `import_path: app.main:build`, the configuration under `args`.

    Raises:
        MissingResources: the cluster it is built on cannot run it, and does not grow.
    """
    if ray.is_initialized() and not config.cluster_autoscales:
        check_cluster(config.models, config.ingress, ray.nodes())
    ingress = config.ingress
    models = {model.name: _replicas(model, ingress.num_replicas, config.log_level) for model in config.models}
    deployment = serve.deployment(
        name=INGRESS_NAME,
        num_replicas=ingress.num_replicas,
        max_ongoing_requests=ingress.max_ongoing_requests + CONTROL_CALLS,
        max_queued_requests=ingress.max_queued_requests,
        backpressure_config=BackpressureConfig(retry_after_s=QUEUE_RETRY_S),
        ray_actor_options={"num_cpus": ingress.num_cpus},
        health_check_period_s=ingress.health_check_period_s,
        health_check_timeout_s=ingress.health_check_timeout_s,
        graceful_shutdown_timeout_s=ingress.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=LoggingConfig(log_level=config.log_level, enable_access_log=ingress.access_log),
    )
    return deployment(IngressDeployment).bind(config, models)


def _number_of_replicas(model: ModelDeployment, num_streams: int) -> dict[str, Any]:
    """How many there are, or the policy that says so.

    Ray counts a replica's open streams of outputs as requests that it has. With so many more to be had, and with
    this factor on the way from the present number to the desired one, its policy comes to requests / target again:
    replicas + (target + streams) / target * ((requests + streams * replicas) / (target + streams) - replicas).

    Args:
        num_streams: those that each replica always has, one for each ingress.
    """
    if model.autoscaling is None:
        return {"num_replicas": model.num_replicas}
    target = model.autoscaling.target_ongoing_requests
    counted = target + num_streams
    factor = counted / target
    return {
        "autoscaling_config": AutoscalingConfig(
            **model.autoscaling.model_dump(exclude={"target_ongoing_requests"}),
            target_ongoing_requests=counted,
            upscaling_factor=factor * (1 - ROUNDING),
            downscaling_factor=factor * (1 + ROUNDING),
        )
    }


def _replicas(model: ModelDeployment, num_ingresses: int, log_level: str) -> serve.Application:
    actor_options: dict[str, Any] = {"num_cpus": model.num_cpus, "num_gpus": model.num_gpus}
    if model.resources:
        actor_options["resources"] = model.resources
    if labels := node_labels(model):
        actor_options["label_selector"] = labels
    engine = model.engine_config()
    deployment = serve.deployment(
        name=model.deployment_name,
        **_number_of_replicas(model, num_ingresses),
        max_ongoing_requests=model.ongoing_limit,
        ray_actor_options=actor_options,
        health_check_period_s=model.health_check_period_s,
        health_check_timeout_s=model.health_check_timeout_s,
        graceful_shutdown_timeout_s=model.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        # A line for each call would say again what the ingress's line says.
        logging_config=LoggingConfig(log_level=log_level, enable_access_log=False),
        # By its import path: Ray pickles the class that it finds there by value.
        request_router_config=RequestRouterConfig(
            request_router_class="app.router.router:PrefixCacheRouter",  # type: ignore[arg-type]
            request_router_kwargs=asdict(
                RoutingSettings(engine.block_size, model.max_queued_requests, num_ingresses=num_ingresses)
            ),
        ),
    )
    return deployment(LLMReplica).bind(
        engine,
        model.max_queued_requests,
        model.lease_s,
        model.stall_timeout_s,
        model.max_queue_wait_s,
    )
