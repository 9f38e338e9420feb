"""What a service is told of a cluster that cannot run it, and which GPUs its replicas are kept from."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from app.config import Ingress, ModelDeployment
from app.requirements import GPUS, KIND, MissingResources, check_cluster, node_labels

BESIDE = Ingress(num_cpus=0)
"""Ingresses that take nothing from a node."""


def node(cpus: float = 8, gpus: float = 0, kind: str | None = None, *, alive: bool = True, **more: float) -> Any:
    labels = {} if kind is None else {KIND: kind}
    return {"Alive": alive, "Labels": labels, "Resources": {"CPU": cpus, **({"GPU": gpus} if gpus else {}), **more}}


def model(name: str = "big", **given: Any) -> ModelDeployment:
    return ModelDeployment.model_validate({"name": name, "model": "demo", "num_cpus": 2, **given})


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Of Serve's logger, which hands nothing on."""
    logger = logging.getLogger("ray.serve")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


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
    check_cluster([model(num_gpus=1, gpu_memory_gb=24)], BESIDE, nodes)


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
            r"model 'big' needs a GPU with 24 GB or more; the cluster's are T4 \(16 GB, compute capability 7.5\)",
        ),
        ({"num_gpus": 1, "gpu_memory_gb": 80}, [node(gpus=1, kind="A100")], r"the cluster's are A100 \(40 GB"),
        (
            {"num_gpus": 1, "gpu_memory_gb": 40, "engine": {"kv_cache_dtype": "fp8"}},
            [node(gpus=1, kind="A100-80G")],
            r"40 GB or more and compute capability 8.9 or more \(kv_cache_dtype: fp8\); the cluster's are A100-80G",
        ),
        (
            {"num_gpus": 2},
            [node(gpus=1), node(gpus=1)],
            "a replica of model 'big' needs 2 CPU, 2 GPU on one node; the cluster's nodes have at most 8 CPU, 1 GPU",
        ),
        ({"num_cpus": 16}, [node(), node()], "needs 16 CPU on one node; the cluster's nodes have at most 8 CPU"),
        ({"resources": {"fast": 1}}, [node()], "needs 2 CPU, 1 fast on one node; .* at most 8 CPU, 0 fast"),
        (
            {"num_replicas": 5},
            [node()],
            r"no node has room left for 1 of 5 replicas of model 'big' \(2 CPU each\); all need 10 CPU, .* has 8",
        ),
        (
            {"num_gpus": 1, "num_replicas": 3},
            [node(gpus=2)],
            r"1 of 3 replicas of model 'big' \(2 CPU, 1 GPU each\); all need 3 GPU, the cluster has 2",
        ),
        (
            {"resources": {"fast": 1}, "num_replicas": 3},
            [node(fast=1), node(fast=1)],
            "1 of 3 replicas .*; all need 3 fast, the cluster has 2",
        ),
        ({"num_cpus": 5, "num_replicas": 3}, [node(), node()], r"1 of 3 replicas of model 'big' \(5 CPU each\)"),
        (
            {"num_gpus": 1, "gpu_memory_gb": 24, "num_replicas": 2},
            [node(gpus=8, kind="V100"), node(gpus=1, kind="H100")],
            r"1 of 2 replicas of model 'big' on GPUs with 24 GB or more \(2 CPU, 1 GPU each\)$",
        ),
    ],
)
def test_what_is_missing_is_named(given: dict[str, Any], nodes: list[Any], says: str) -> None:
    with pytest.raises(MissingResources, match=says):
        check_cluster([model(**given)], BESIDE, nodes)


def test_cluster_in_which_no_way_was_found_but_there_is_one_is_left_in_peace(
    warnings: pytest.LogCaptureFixture,
) -> None:
    fours, threes = model("fours", num_cpus=4, num_replicas=2), model("threes", num_cpus=3, num_replicas=4)
    check_cluster([fours, threes], BESIDE, [node(cpus=10), node(cpus=10)])
    assert "room_uncertain: no node has room left for 1 of 4 replicas of model 'threes'" in warnings.text


def test_models_that_need_the_same_few_nodes_are_refused_together() -> None:
    models = [model(name, num_gpus=1, gpu_memory_gb=80) for name in ("one", "two")]
    with pytest.raises(MissingResources, match="1 of 1 replicas of model 'two' on GPUs with 80 GB or more"):
        check_cluster(models, BESIDE, [node(gpus=1, kind="H100"), node(gpus=8, kind="T4")])


def test_everything_that_is_missing_is_named_at_once() -> None:
    models = [model("one", num_gpus=1), model("two", num_cpus=100)]
    with pytest.raises(MissingResources, match=r"model 'one' needs a GPU; .*; a replica of model 'two' needs 100 CPU"):
        check_cluster(models, BESIDE, [node()])


def test_ingresses_need_room_too() -> None:
    models = [model("one", num_replicas=2), model("two")]
    check_cluster(models, Ingress(num_replicas=2, num_cpus=1), [node(cpus=8)])
    with pytest.raises(MissingResources, match=r"2 of 2 ingresses \(1 CPU each\); all need 8 CPU, the cluster has 6"):
        check_cluster(models, Ingress(num_replicas=2, num_cpus=1), [node(cpus=6)])
    with pytest.raises(MissingResources, match=r"1 of 1 ingresses \(1 CPU each\); all need 1 CPU, the cluster has 0"):
        check_cluster([model(num_cpus=0)], Ingress(num_cpus=1), [node(cpus=0)])


def test_those_that_fit_fewest_nodes_choose_first() -> None:
    fp8 = model("fp8", num_gpus=1, engine={"kv_cache_dtype": "fp8"})
    nodes = [node(gpus=1, kind="L4"), node(gpus=1, kind="A100-80G")]
    check_cluster([model("any", num_gpus=1), fp8], BESIDE, nodes)


def test_better_gpus_are_left_to_those_that_need_them() -> None:
    fp8 = model("fp8", num_gpus=1, engine={"kv_cache_dtype": "fp8"})
    large = model("large", num_gpus=1, gpu_memory_gb=80, num_replicas=2)
    check_cluster([fp8, large], BESIDE, [node(gpus=1, kind=kind) for kind in ("H100", "L4", "A100-80G")])


def test_fractions_add_up() -> None:
    check_cluster([model(num_cpus=0.1, num_replicas=3)], BESIDE, [node(cpus=0.3)])


def kinds_in(selector: str) -> set[str]:
    found = re.fullmatch(r"!in\((.*)\)", selector)
    assert found is not None
    return set(found[1].split(","))


def test_replicas_are_kept_from_gpus_that_do_not_do() -> None:
    (excluded,) = node_labels(model(num_gpus=1, gpu_memory_gb=80)).values()
    kinds = kinds_in(excluded)
    assert {"T4", "V100", "L4", "A100", "L40S"} <= kinds
    assert not {"A100-80G", "H100", "H200", "B200"} & kinds
    (excluded,) = node_labels(model(num_gpus=1, engine={"kv_cache_dtype": "fp8"})).values()
    assert kinds_in(excluded) & {"A100-80G", "V100", "L4", "H100"} == {"A100-80G", "V100"}


def test_replicas_that_run_anywhere_are_not_kept_from_anything() -> None:
    assert node_labels(model()) == {}
    assert node_labels(model(num_gpus=1)) == {}
    assert node_labels(model(gpu_memory_gb=80)) == {}


def test_every_kind_that_ray_knows_of_nvidia_s_is_in_the_table() -> None:
    import ray.util.accelerators.accelerators as names

    known = {value for name, value in vars(names).items() if name.startswith("NVIDIA_")}
    assert known <= GPUS.keys()


def test_gpus_of_which_nothing_is_known_are_warned_of(warnings: pytest.LogCaptureFixture) -> None:
    nodes = [node(gpus=1, kind="L4"), node(gpus=1, kind="NEWEST")]
    check_cluster([model(num_gpus=1), model("text")], BESIDE, nodes)
    assert warnings.text == ""
    check_cluster([model(num_gpus=1, gpu_memory_gb=24)], BESIDE, nodes)
    assert "gpus_unknown model=big" in warnings.text
    assert "24 GB or more is taken for granted: NEWEST;" in warnings.text
