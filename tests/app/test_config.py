"""What a configuration may say, and what it is told where it may not."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingContext
from ray.serve.schema import ServeDeploySchema

from app.config import CONTROL_CALLS, Access, ApiKey, Autoscaling, Ingress, ModelDeployment, ServiceConfig
from app.main import build
from app.requirements import KIND

DEMO = Path(__file__).parents[2] / "serve_configs" / "demo.yaml"


def model(**given: Any) -> dict[str, Any]:
    return {"name": "demo", "model": "demo"} | given


@pytest.mark.parametrize(
    ("given", "where", "says"),
    [
        (
            {"models": [model(), model(name="two", resume_wait_s=600)]},
            "",
            "ingress.idle_timeout_s=600: must be longer than resume_wait_s of model 'two', which is 600",
        ),
        ({"models": [model(replicas=2)]}, "models.0", "unknown key 'replicas'; did you mean 'num_replicas'?"),
        ({"models": [model()], "ingres": {}}, "", "did you mean 'ingress'?"),
        ({"models": [model()], "ingress": {"zzz": 1}}, "ingress", "unknown key 'zzz'; known: num_replicas"),
        ({"models": []}, "models", "at least 1 item"),
        ({"models": [model(num_replicas=0)]}, "models.0.num_replicas", "greater than or equal to 1"),
        ({"models": [model(lease_s=0)]}, "models.0.lease_s", "greater than 0"),
        (
            {"models": [model(engine={"max_num_seq": 4})]},
            "models.0",
            "engine: unknown engine argument 'max_num_seq'; did you",
        ),
        ({"models": [model(engine={"max_num_seqs": 0})]}, "models.0", "engine: max_num_seqs=0: must be a whole number"),
        ({"models": [model(engine={"dtype": "int8"})]}, "models.0", "must be one of auto, float32"),
        ({"models": [model(engine={"model": "x"})]}, "models.0", "belongs beside `engine`"),
        (
            {"models": [model(engine={"async_scheduling": "off"})]},
            "models.0",
            "engine: async_scheduling='off': must be",
        ),
        (
            {"models": [model(engine={"gpu_memory_utilization": "0.5"})]},
            "models.0",
            "engine: gpu_memory_utilization='0.5': must be a number",
        ),
        (
            {"models": [model(engine={"device": "cuda"})]},
            "models.0",
            "engine: device='cuda': needs `num_gpus: 1` beside `engine`",
        ),
        (
            {"models": [model(engine={"kv_cache_dtype": "fp8"})]},
            "models.0",
            "rules out; with num_gpus=0 the engine's device is 'cpu'",
        ),
        ({"models": [model(), model()]}, "models", "name 'demo' is used twice"),
        (
            {"models": [model(autoscaling={"min_replicas": 3, "max_replicas": 2, "target_ongoing_requests": 8})]},
            "models.0.autoscaling",
            "max_replicas=2: must be at least min_replicas, which is 3",
        ),
        (
            {"models": [model(num_replicas=2, autoscaling={"max_replicas": 4, "target_ongoing_requests": 8})]},
            "models.0",
            "num_replicas: autoscaling decides it",
        ),
        ({"models": [model()], "access": {}}, "access", "either `keys_file`, or `keys_env`, or `open: true`"),
        ({"models": [model()], "access": {"open": True, "keys_env": "K"}}, "access", "say who may use the service"),
        ({"models": [model()], "access": {"keys_file": ""}}, "access.keys_file", "at least 1 character"),
        ({"models": [model(name="a/b"), model(name="a b")]}, "models", "special characters only"),
        (
            {"models": [model()], "access": {"open": True, "isolate_prefix_cache": True}},
            "access",
            "isolate_prefix_cache: keys tell clients apart",
        ),
        ({"models": [model(lease_s=float("inf"))]}, "models.0.lease_s", "finite number"),
        ({"models": [model()], "ingress": {"heartbeat_s": float("nan")}}, "ingress.heartbeat_s", "finite number"),
        ({"models": [model(resources={"fast": float("inf")})]}, "models.0.resources.fast", "finite number"),
    ],
)
def test_an_error_names_the_field_and_what_it_may_be(given: dict[str, Any], where: str, says: str) -> None:
    with pytest.raises(ValidationError) as error:
        ServiceConfig.model_validate({"access": {"open": True}} | given)
    assert [(".".join(map(str, e["loc"])), says in e["msg"]) for e in error.value.errors()] == [(where, True)], error


def test_a_service_is_open_only_where_that_is_said() -> None:
    with pytest.raises(ValidationError, match="say who may use the service"):
        ServiceConfig.model_validate({"models": [model()]})


@pytest.mark.parametrize(
    ("num_gpus", "device", "runs_on"),
    [
        (0, None, "cpu"),
        (0, "auto", "cpu"),
        (0, "cpu", "cpu"),
        (0.5, None, "cuda"),
        (1, "auto", "cuda"),
        (1, "cuda", "cuda"),
        (1, "cpu", "cpu"),
    ],
)
def test_a_gpu_is_used_only_where_one_is_reserved(num_gpus: float, device: str | None, runs_on: str) -> None:
    engine = {} if device is None else {"device": device}
    config = ModelDeployment.model_validate(model(num_gpus=num_gpus, engine=engine))
    assert config.engine_config().device == runs_on


def test_every_field_is_documented() -> None:
    classes: list[type[BaseModel]] = [ServiceConfig, ModelDeployment, Autoscaling, Ingress, Access, ApiKey]
    undocumented = [f"{c.__name__}.{n}" for c in classes for n, f in c.model_fields.items() if not f.description]
    assert undocumented == []


def test_rays_own_limit_leaves_the_decision_to_the_replica() -> None:
    config = ModelDeployment(name="m", model="demo", engine={"max_num_seqs": 8}, max_queued_requests=4)
    assert config.ongoing_limit == 8 + 4 + CONTROL_CALLS
    assert ModelDeployment(name="m", model="demo", max_ongoing_requests=3).ongoing_limit == 3 + CONTROL_CALLS


def test_the_demo_configuration_is_valid_and_stays_on_this_machine() -> None:
    schema = ServeDeploySchema.model_validate(yaml.safe_load(DEMO.read_text()))
    assert schema.http_options.host == "127.0.0.1"
    (application,) = schema.applications
    config = ServiceConfig.model_validate(application.args)
    (demo,) = config.models
    assert config.ingress.num_cpus == 0
    assert demo.num_cpus >= (demo.engine_config().num_threads or 1)


def test_an_application_has_a_deployment_for_each_model_and_an_ingress() -> None:
    autoscaling = {"min_replicas": 2, "max_replicas": 4, "target_ongoing_requests": 8}
    models = [model(), model(name="second/one", num_cpus=2, num_gpus=1, autoscaling=autoscaling)]
    config = ServiceConfig.model_validate({"models": models, "access": {"open": True}, "cluster_autoscales": True})
    application = build(config)
    handles = application._bound_deployment.init_args[1]
    deployments = {name: bound._bound_deployment for name, bound in handles.items()}
    assert {d.name for d in deployments.values()} == {"model-demo", "model-second-one"}
    assert deployments["second/one"].ray_actor_options["num_gpus"] == 1
    scaled = deployments["second/one"]._deployment_config.autoscaling_config
    assert (scaled.min_replicas, scaled.max_replicas) == (2, 4)
    assert deployments["demo"].num_replicas == 1
    assert application._bound_deployment.name == "ingress"


def replicas_model(config: dict[str, Any]) -> serve.Deployment:
    """The deployment of the only model of a configuration."""
    given = ServiceConfig.model_validate({"access": {"open": True}, "cluster_autoscales": True} | config)
    ((_, bound),) = build(given)._bound_deployment.init_args[1].items()
    return bound._bound_deployment


def test_replicas_are_kept_from_gpus_with_too_little_memory() -> None:
    options = replicas_model({"models": [model(num_gpus=1, gpu_memory_gb=24)]}).ray_actor_options
    assert options["label_selector"] == {KIND: "!in(K80,P4,P100,V100,T4,A2,A16,RTX-A4000)"}
    assert "label_selector" not in replicas_model({"models": [model(num_gpus=1)]}).ray_actor_options


@pytest.mark.parametrize("target", [0.5, 1, 48])
@pytest.mark.parametrize("ingresses", [1, 5])
@pytest.mark.parametrize("replicas", [1, 2, 8])
@pytest.mark.parametrize("requests", [0, 1, 7.5, 100])
def test_autoscaling_follows_requests_and_not_the_streams_of_ingresses(
    target: float, ingresses: int, replicas: int, requests: float
) -> None:
    autoscaling = {
        "max_replicas": 1000,
        "target_ongoing_requests": target,
        "upscale_delay_s": 0,
        "downscale_delay_s": 0,
    }
    deployment = replicas_model({"models": [model(autoscaling=autoscaling)], "ingress": {"num_replicas": ingresses}})
    config = deployment._deployment_config.autoscaling_config
    context = AutoscalingContext(
        deployment_id=DeploymentID("model-demo"),
        deployment_name="model-demo",
        app_name="app",
        current_num_replicas=replicas,
        target_num_replicas=replicas,
        running_replicas=[],
        # What Ray counts: each replica has a stream to each ingress.
        total_num_requests=requests + replicas * ingresses,
        total_queued_requests=0.0,
        aggregated_metrics=None,
        raw_metrics=None,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=1000,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=config,
    )
    decided, _ = _apply_autoscaling_config(config.policy.get_policy())(context)
    assert max(1, decided) == max(1, math.ceil(requests / target))
