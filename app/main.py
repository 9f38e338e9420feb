"""What `serve run` builds: the ingress and one deployment for each model."""

# No `from __future__ import annotations` here: Ray validates the arguments only by a real class.
from dataclasses import asdict, replace
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, BackpressureConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from app.autoscaling_config import Autoscaling
from app.config import CONTROL_CALLS, ModelDeployment, ServiceConfig
from app.ingress import IngressDeployment
from app.replica import LLMReplica
from app.requirements import check_cluster, node_labels
from app.router.states import RoutingSettings
from engine.config import EngineConfig

INGRESS_NAME = "ingress"

ROUTER = "app.router.router:PrefixCacheRouter"
"""By its import path: Ray pickles the class that it finds there by value."""

QUEUE_RETRY_S = 1.0
"""When a client comes again that found too many waiting for an ingress: nobody knows when a place is free."""

METRICS_INTERVAL_S = 1.0
"""How often replicas and ingresses report to the autoscaling policy. With Ray's default of 10 s it would see a burst
as late."""

METRICS_LOOK_BACK_S = 5.0
"""What Ray keeps of the reports. For so long a request that waited for a replica counts after one has taken it."""


def build(config: ServiceConfig) -> serve.Application:
    """The application of a configuration: `import_path: app.main:build`, the configuration under `args`.

    Raises:
        MissingResources: the cluster it is built on cannot run it, and does not grow.
    """
    return application(config, ROUTER)


def application(config: ServiceConfig, router: str) -> serve.Application:
    """What `build` gives, with the request router of this import path before the models."""
    if ray.is_initialized() and not config.cluster_autoscales:
        check_cluster(config.models, config.ingress, ray.nodes())
    ingress = config.ingress
    models = {model.name: _replicas(model, ingress.num_replicas, config.log_level, router) for model in config.models}
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


def autoscaling_config(
    autoscaling: Autoscaling, engine: EngineConfig, log_level: str, max_ongoing_requests: int | None = None
) -> AutoscalingConfig:
    """Ray's configuration for replicas with that engine, whose number our policy decides.

    Args:
        max_ongoing_requests: that a replica is given; None is as many as its engine runs.
    """
    goals = autoscaling.goals(engine)
    if max_ongoing_requests is not None:
        goals = replace(goals, max_num_seqs=min(goals.max_num_seqs, max_ongoing_requests))
    return AutoscalingConfig(
        min_replicas=autoscaling.min_replicas,
        max_replicas=autoscaling.max_replicas,
        # The policy has thresholds and delays of its own: Ray does what it says at once.
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        metrics_interval_s=METRICS_INTERVAL_S,
        look_back_period_s=METRICS_LOOK_BACK_S,
        policy=AutoscalingPolicy(
            # By its import path: Ray pickles what it finds there by value.
            policy_function="app.autoscaling:AutoscalingPolicy",
            policy_kwargs=asdict(goals) | {"log_level": log_level},
        ),
    )


def _replicas(model: ModelDeployment, num_ingresses: int, log_level: str, router: str) -> serve.Application:
    actor_options: dict[str, Any] = {"num_cpus": model.num_cpus, "num_gpus": model.num_gpus}
    if model.resources:
        actor_options["resources"] = model.resources
    if labels := node_labels(model):
        actor_options["label_selector"] = labels
    engine = model.engine_config()
    scaling = None
    if model.autoscaling is not None:
        scaling = autoscaling_config(model.autoscaling, engine, log_level, model.max_ongoing_requests)
    deployment = serve.deployment(
        name=model.deployment_name,
        num_replicas=None if scaling else model.num_replicas,
        autoscaling_config=scaling,
        max_ongoing_requests=model.ongoing_limit,
        ray_actor_options=actor_options,
        health_check_period_s=model.health_check_period_s,
        health_check_timeout_s=model.health_check_timeout_s,
        graceful_shutdown_timeout_s=model.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        # A line for each call would say again what the ingress's line says.
        logging_config=LoggingConfig(log_level=log_level, enable_access_log=False),
        request_router_config=RequestRouterConfig(
            request_router_class=router,  # type: ignore[arg-type]
            request_router_kwargs=asdict(
                RoutingSettings(
                    engine.block_size,
                    model.max_queued_requests,
                    num_ingresses,
                    engine.max_num_seqs,
                    engine.enable_prefix_caching,
                )
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
