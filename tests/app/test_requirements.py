"""What a service is told of a cluster that cannot run it."""

from __future__ import annotations

from typing import Any

import pytest

from app.config import ModelDeployment
from app.requirements import MissingResources, check_cluster


def node(cpus: float = 8, gpus: float = 0, kind: str | None = None, *, alive: bool = True, **more: float) -> Any:
    resources = {"CPU": cpus, **({"GPU": gpus} if gpus else {}), **more}
    if kind is not None:
        resources[f"accelerator_type:{kind}"] = 1.0
    return {"Alive": alive, "Resources": resources}


def model(name: str = "big", **given: Any) -> ModelDeployment:
    return ModelDeployment.model_validate({"name": name, "model": "demo", "num_cpus": 2, **given})


@pytest.mark.parametrize(
    "nodes",
    [
        [node(gpus=1, kind="L4")],
        [node(), node(gpus=1, kind="T4"), node(gpus=8, kind="H100")],
        [node(gpus=1, kind="NEWEST")],
        [node(gpus=1)],
    ],
    ids=["just enough", "one of several", "a kind that is not known", "no kind"],
)
def test_a_cluster_that_has_the_gpu_is_left_in_peace(nodes: list[Any]) -> None:
    check_cluster([model(num_gpus=1, gpu_memory_gb=24)], nodes)


@pytest.mark.parametrize(
    ("given", "nodes", "says"),
    [
        (
            {"num_gpus": 1, "gpu_memory_gb": 24},
            [node()],
            "model 'big' needs a GPU with 24 GB or more; the cluster has none",
        ),
        ({"num_gpus": 1}, [node(), node(gpus=4, alive=False)], "model 'big' needs a GPU; the cluster has none"),
        (
            {"num_gpus": 1, "gpu_memory_gb": 24},
            [node(gpus=4, kind="T4")],
            r"model 'big' needs a GPU with 24 GB or more; the cluster's are T4 \(16 GB\)",
        ),
        (
            {"num_gpus": 2},
            [node(gpus=1), node(gpus=1)],
            "a replica of model 'big' needs 2 CPU, 2 GPU on one node; the cluster's nodes have at most 8 CPU, 1 GPU",
        ),
        ({"num_cpus": 16}, [node(), node()], "needs 16 CPU on one node; the cluster's nodes have at most 8 CPU"),
        ({"resources": {"fast": 1}}, [node()], "needs 2 CPU, 1 fast on one node; .* at most 8 CPU, 0 fast"),
        ({"num_replicas": 5}, [node()], "the models' replicas need 10 CPUs together; the cluster has 8"),
        ({"num_gpus": 1, "num_replicas": 3}, [node(gpus=2)], "need 3 GPUs together; the cluster has 2"),
    ],
)
def test_what_is_missing_is_named(given: dict[str, Any], nodes: list[Any], says: str) -> None:
    with pytest.raises(MissingResources, match=says):
        check_cluster([model(**given)], nodes)


def test_everything_that_is_missing_is_named_at_once() -> None:
    models = [model("one", num_gpus=1), model("two", num_cpus=100)]
    with pytest.raises(MissingResources, match=r"model 'one' needs a GPU; .*; a replica of model 'two' needs 100 CPU"):
        check_cluster(models, [node()])
