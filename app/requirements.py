"""Whether a cluster has what a service needs, said before Ray waits for it without an end."""

from collections.abc import Mapping, Sequence
from typing import Any

from app.config import ModelDeployment

ACCELERATOR = "accelerator_type:"
"""Prefix of the resource by which Ray names a node's kind of GPU."""

GPU_MEMORY_GB = {
    "T4": 16,
    "V100": 16,
    "P100": 16,
    "A10": 24,
    "A10G": 24,
    "L4": 24,
    "A100-40G": 40,
    "L40S": 48,
    "A100-80G": 80,
    "H100": 80,
    "GH200": 96,
    "H200": 141,
    "B200": 180,
}
"""What NVIDIA's GPUs have, at least, by Ray's names for them. Others are taken to have enough."""


class MissingResources(RuntimeError):
    """The cluster cannot run the service; the message says what it lacks."""


def check_cluster(models: Sequence[ModelDeployment], nodes: Sequence[Mapping[str, Any]]) -> None:
    """Checks that every model's replica fits a node, and all of them the cluster.

    Args:
        nodes: as ray.nodes() gives them.

    Raises:
        MissingResources: some do not.
    """
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    missing = [lack for model in models if (lack := _lack(model, resources))]
    for name, unit in (("GPU", "GPUs"), ("CPU", "CPUs")) if not missing else ():
        needed = sum(model.least_replicas * _needs(model).get(name, 0) for model in models)
        there = sum(node.get(name, 0) for node in resources)
        if needed > there:
            missing.append(f"the models' replicas need {needed:g} {unit} together; the cluster has {there:g}")
    if missing:
        raise MissingResources("; ".join(missing))


def _needs(model: ModelDeployment) -> dict[str, float]:
    needs = {"CPU": model.num_cpus, "GPU": model.num_gpus, **model.resources}
    return {name: amount for name, amount in needs.items() if amount > 0}


def _lack(model: ModelDeployment, nodes: Sequence[Mapping[str, float]]) -> str | None:
    """What keeps a replica of a model from every node."""
    with_gpus = [node for node in nodes if node.get("GPU", 0) > 0]
    if model.num_gpus > 0:
        kind = f"a GPU with {model.gpu_memory_gb:g} GB or more" if model.gpu_memory_gb else "a GPU"
        if not with_gpus:
            return f"model '{model.name}' needs {kind}; the cluster has none"
        nodes = [node for node in with_gpus if _memory_gb(node) >= (model.gpu_memory_gb or 0)]
        if not nodes:
            there = ", ".join(sorted({f"{_kind(node)} ({_memory_gb(node):g} GB)" for node in with_gpus}))
            return f"model '{model.name}' needs {kind}; the cluster's are {there}"
    needs = _needs(model)
    if any(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes):
        return None
    wanted = ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
    most = ", ".join(f"{max((node.get(name, 0) for node in nodes), default=0):g} {name}" for name in needs)
    return f"a replica of model '{model.name}' needs {wanted} on one node; the cluster's nodes have at most {most}"


def _kind(node: Mapping[str, float]) -> str:
    return next((name.removeprefix(ACCELERATOR) for name in node if name.startswith(ACCELERATOR)), "of unknown kind")


def _memory_gb(node: Mapping[str, float]) -> float:
    return GPU_MEMORY_GB.get(_kind(node), float("inf"))
