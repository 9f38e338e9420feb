"""What a configuration may say, and what it is told where it may not."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError
from ray import serve
from ray.serve.schema import ServeDeploySchema

from app.autoscaling import Goals
from app.autoscaling_config import Autoscaling
from app.config import CONTROL_CALLS, Access, ApiKey, Ingress, ModelDeployment, ServiceConfig
from app.main import build
from app.requirements import KIND

# Ray means to replace the setting by environment variables.
pytestmark = pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")

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
            {"models": [model(autoscaling={"min_replicas": 3, "max_replicas": 2})]},
            "models.0.autoscaling",
            "max_replicas=2: must be at least min_replicas, which is 3",
        ),
        ({"models": [model(autoscaling={"max_replicas": 0})]}, "models.0.autoscaling.max_replicas", "equal to 1"),
        (
            {"models": [model(autoscaling={"max_replicas": 2, "ttft_target_s": 0})]},
            "models.0.autoscaling.ttft_target_s",
            "greater than 0",
        ),
        (
            {"models": [model(autoscaling={"max_replicas": 2, "target_utilization": 1.5})]},
            "models.0.autoscaling.target_utilization",
            "less than or equal to 1",
        ),
        (
            {"models": [model(autoscaling={"max_replicas": 2, "target_ongoing_requests": 8})]},
            "models.0.autoscaling",
            "unknown key 'target_ongoing_requests'; how many requests a replica can have is measured; say by ttft",
        ),
        (
            {"models": [model(autoscaling={"max_replicas": 2, "ttft_s": 8})]},
            "models.0.autoscaling",
            "unknown key 'ttft_s'; did you mean 'ttft_target_s'?",
        ),
        (
            {
                "models": [model(autoscaling={"max_replicas": 2, "min_replicas": 0})],
                "ingress": {"idle_timeout_s": 250},
            },
            "",
            "ingress.idle_timeout_s=250: must be longer than replica_wait_s of model 'demo', which is 300",
        ),
        (
            {"models": [model(num_replicas=2, autoscaling={"max_replicas": 4})]},
            "models.0",
            "num_replicas: autoscaling decides it",
        ),
        ({"models": [model(num_replicas="auto")]}, "models.0.num_replicas", "write `autoscaling: {max_replicas: 4}`"),
        ({"models": [model(autoscaling="auto")]}, "models.0.autoscaling", "write `autoscaling: {max_replicas: 4}`"),
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
    autoscaling = {"min_replicas": 2, "max_replicas": 4}
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


def test_ray_does_what_the_autoscaling_policy_says_at_once() -> None:
    autoscaling = {"min_replicas": 0, "max_replicas": 9, "ttft_target_s": 3.0}
    deployment = replicas_model({"models": [model(autoscaling=autoscaling, engine={"max_num_seqs": 5})]})
    config = deployment._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas) == (0, 9)
    assert (config.upscale_delay_s, config.downscale_delay_s, config.get_upscaling_factor()) == (0, 0, 1)
    assert config.look_back_period_s > config.metrics_interval_s, "Ray would drop what it has before more comes"
    kwargs = dict(config.policy.policy_kwargs)
    assert kwargs.pop("log_level") == "INFO"
    goals = Goals(**kwargs)
    assert (goals.ttft_target_s, goals.max_num_seqs) == (3.0, 5)
    assert config.policy.get_policy().__name__ == "AutoscalingPolicy"


@pytest.mark.parametrize(
    ("given", "wait_s"),
    [
        ({}, 10),
        ({"autoscaling": {"max_replicas": 2}}, 10),
        ({"autoscaling": {"max_replicas": 2, "min_replicas": 0}}, 300),
        ({"autoscaling": {"max_replicas": 2, "min_replicas": 0}, "replica_wait_s": 20}, 20),
    ],
)
def test_requests_wait_longer_where_there_may_be_no_replica(given: dict[str, Any], wait_s: float) -> None:
    assert ModelDeployment.model_validate(model(**given)).longest_replica_wait_s == wait_s
