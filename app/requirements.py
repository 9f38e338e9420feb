"""Whether a cluster has what a service needs, said before Ray waits for it without an end, and which GPUs do."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from app.config import Ingress, ModelDeployment

logger = logging.getLogger("ray.serve")

KIND = "ray.io/accelerator-type"
"""The label by which Ray names a node's kind of GPU."""

FP8_CAPABILITY = 8.9
"""Least compute capability of a GPU for keys and values in FP8."""


class Gpu(NamedTuple):
    """What one GPU has: the least of what is sold under its name."""

    memory_gb: float
    capability: float


GPUS = {
    "K80": Gpu(12, 3.7),
    "P4": Gpu(8, 6.1),
    "P40": Gpu(24, 6.1),
    "P100": Gpu(12, 6.0),
    "V100": Gpu(16, 7.0),
    "T4": Gpu(16, 7.5),
    "A2": Gpu(16, 8.6),
    "A10": Gpu(24, 8.6),
    "A10G": Gpu(24, 8.6),
    "A16": Gpu(16, 8.6),
    "A30": Gpu(24, 8.0),
    "A40": Gpu(48, 8.6),
    "A100": Gpu(40, 8.0),
    "A100-40G": Gpu(40, 8.0),
    "A100-80G": Gpu(80, 8.0),
    "RTX-A4000": Gpu(16, 8.6),
    "RTX-A5000": Gpu(24, 8.6),
    "RTX-A6000": Gpu(48, 8.6),
    "L4": Gpu(24, 8.9),
    "L40": Gpu(48, 8.9),
    "L40S": Gpu(48, 8.9),
    "H20": Gpu(96, 9.0),
    "H100": Gpu(80, 9.0),
    "GH200": Gpu(96, 9.0),
    "H200": Gpu(141, 9.0),
    "B200": Gpu(180, 10.0),
    "GB200": Gpu(180, 10.0),
    "B300": Gpu(262, 10.3),
    "GB300": Gpu(262, 10.3),
    "RTX-PRO-6000": Gpu(96, 12.0),
}
"""NVIDIA's GPUs by Ray's names for them. Ray itself calls an A100 of either size `A100`; whoever labels the node
`A100-80G` says more. GPUs that are not here, or whose nodes have no such label, are taken to be good enough."""

GRAIN = 1e-4
"""Ray counts resources in steps of this size."""


class MissingResources(RuntimeError):
    """The cluster cannot run the service; the message says what it lacks."""


def node_labels(model: ModelDeployment) -> dict[str, str]:
    """Ray's label selector for a model's replicas: it keeps them from GPUs that are known not to do."""
    excluded = [kind for kind, gpu in GPUS.items() if not _does(gpu, model)] if model.num_gpus > 0 else []
    return {KIND: f"!in({','.join(excluded)})"} if excluded else {}


def check_cluster(models: Sequence[ModelDeployment], ingress: Ingress, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Checks that there are nodes for every replica that is always there, and for the ingresses beside them.

    What other applications hold is not looked at: the service may be about to take their place. What is refused fits in
    no way; where no way was found, though there may be one, that is a warning.

    Args:
        nodes: as ray.nodes() gives them.

    Raises:
        MissingResources: there are not.
    """
    alive = sorted((_Node.of(node) for node in nodes if node["Alive"]), key=lambda node: node.rank)
    lacks = [lack for model in models if (lack := _lack(model, alive))]
    if not lacks:
        claims = [*(_Claim.of_model(model, alive) for model in models), _Claim.of_ingress(ingress, alive)]
        lacks = _lacking_room(claims, alive)
    if lacks:
        raise MissingResources("; ".join(lacks))
    for model in models:
        if _wants(model):
            _warn_of_unknown(model, alive)


@dataclass(slots=True)
class _Node:
    kind: str | None
    resources: Mapping[str, float]
    free: dict[str, float]

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> "_Node":
        resources = node["Resources"]
        return cls(node.get("Labels", {}).get(KIND), resources, dict(resources))

    @property
    def gpus(self) -> float:
        return self.resources.get("GPU", 0)

    @property
    def gpu(self) -> Gpu | None:
        """None where its kind is not known."""
        return GPUS.get(self.kind or "")

    @property
    def rank(self) -> tuple[bool, float]:
        """What is filled first: nodes with better GPUs are left to those that need them."""
        return self.gpus > 0, self.gpu.memory_gb if self.gpu else 0.0

    @property
    def shown(self) -> str:
        if self.gpu is None:
            return self.kind or "of unknown kind"
        return f"{self.kind} ({self.gpu.memory_gb:g} GB, compute capability {self.gpu.capability:.1f})"

    def take(self, needs: Mapping[str, float]) -> bool:
        """Takes what is needed, where it is left."""
        if any(self.free.get(name, 0) < amount - GRAIN / 2 for name, amount in needs.items()):
            return False
        for name, amount in needs.items():
            self.free[name] -= amount
        return True


@dataclass(frozen=True, slots=True)
class _Claim:
    """Processes that are always there, and what each of them takes from the node that it is on."""

    what: str
    number: int
    needs: Mapping[str, float]
    nodes: Sequence[_Node]

    @classmethod
    def of_model(cls, model: ModelDeployment, nodes: Sequence[_Node]) -> "_Claim":
        what = f"replicas of model '{model.name}'" + (f" on GPUs with {_wants(model)}" if _wants(model) else "")
        return cls(what, model.least_replicas, _needs(model), _usable(model, nodes))

    @classmethod
    def of_ingress(cls, ingress: Ingress, nodes: Sequence[_Node]) -> "_Claim":
        return cls("ingresses", ingress.num_replicas, {"CPU": ingress.num_cpus} if ingress.num_cpus else {}, nodes)


def _lacking_room(claims: Sequence[_Claim], nodes: Sequence[_Node]) -> list[str]:
    """What certainly has no place on the nodes; what perhaps has none is logged.

    It is certain where one claim has no place even alone, since first-fit packs equal processes as well as can be, and
    where those that fit on some of the nodes only need more than these have.
    """
    left = _left_over(claims, nodes)
    if not left:
        return []
    text = f"no node has room left for {' and '.join(left)}"
    totals = _shortages(claims, nodes)
    if totals or any(_left_over([claim], nodes) or _shortages(claims, claim.nodes) for claim in claims):
        return [text, *totals]
    logger.warning("room_uncertain: %s, as they were counted; Ray may place them in another way", text)
    return []


def _left_over(claims: Sequence[_Claim], nodes: Sequence[_Node]) -> list[str]:
    """What finds no place on the empty nodes: first-fit decreasing, what fits fewest nodes first."""
    there = _total(nodes)

    def order(claim: _Claim) -> tuple[int, float]:
        shares = [amount / there[name] for name, amount in claim.needs.items() if there.get(name)]
        return len(claim.nodes), -max(shares, default=0.0)

    for node in nodes:
        node.free = dict(node.resources)
    left = []
    for claim in sorted(claims, key=order):
        for placed in range(claim.number if claim.needs else 0):
            if not any(node.take(claim.needs) for node in claim.nodes):
                left.append(f"{claim.number - placed} of {claim.number} {claim.what} ({_shown(claim.needs)} each)")
                break
    return left


def _shortages(claims: Sequence[_Claim], nodes: Sequence[_Node]) -> list[str]:
    """What these nodes have less of than those claims need that fit on no other node."""
    there, ids = _total(nodes), {id(node) for node in nodes}
    bound = [claim for claim in claims if all(id(node) in ids for node in claim.nodes)]
    needed = {
        name: sum(claim.number * claim.needs.get(name, 0) for claim in bound) for claim in bound for name in claim.needs
    }
    return [
        f"all need {amount:g} {name}, the cluster has {there.get(name, 0):g}"
        for name, amount in needed.items()
        if amount > there.get(name, 0) + GRAIN / 2
    ]


def _total(nodes: Sequence[_Node]) -> dict[str, float]:
    names = {name for node in nodes for name in node.resources}
    return {name: sum(node.resources.get(name, 0) for node in nodes) for name in names}


def _needs(model: ModelDeployment) -> dict[str, float]:
    needs = {"CPU": model.num_cpus, "GPU": model.num_gpus, **model.resources}
    return {name: amount for name, amount in needs.items() if amount > 0}


def _lack(model: ModelDeployment, nodes: Sequence[_Node]) -> str | None:
    """What keeps a replica of a model from every node, were they all empty."""
    if model.num_gpus > 0:
        with_gpus = [node for node in nodes if node.gpus > 0]
        kind = f"a GPU with {_wants(model)}" if _wants(model) else "a GPU"
        if not with_gpus:
            return f"model '{model.name}' needs {kind}; the cluster has none"
        if not _usable(model, nodes):
            there = ", ".join(sorted({node.shown for node in with_gpus}))
            return f"model '{model.name}' needs {kind}; the cluster's are {there}"
    needs, usable = _needs(model), _usable(model, nodes)
    if any(all(node.resources.get(name, 0) >= amount for name, amount in needs.items()) for node in usable):
        return None
    most = {name: max((node.resources.get(name, 0) for node in usable), default=0) for name in needs}
    wanted = f"a replica of model '{model.name}' needs {_shown(needs)} on one node"
    return f"{wanted}; the cluster's nodes have at most {_shown(most)}"


def _usable(model: ModelDeployment, nodes: Sequence[_Node]) -> list[_Node]:
    """Nodes whose GPUs would do, or all where a model needs none."""
    if model.num_gpus == 0:
        return list(nodes)
    return [node for node in nodes if node.gpus > 0 and (node.gpu is None or _does(node.gpu, model))]


def _does(gpu: Gpu, model: ModelDeployment) -> bool:
    return gpu.memory_gb >= (model.gpu_memory_gb or 0) and gpu.capability >= _least_capability(model)


def _least_capability(model: ModelDeployment) -> float:
    return FP8_CAPABILITY if model.engine_config().kv_cache_dtype == "fp8" else 0.0


def _wants(model: ModelDeployment) -> str:
    """What its GPUs must have, in words; empty where any will do."""
    if model.num_gpus == 0:
        return ""
    memory = f"{model.gpu_memory_gb:g} GB or more" if model.gpu_memory_gb else ""
    fp8 = f"compute capability {FP8_CAPABILITY} or more (kv_cache_dtype: fp8)" if _least_capability(model) else ""
    return " and ".join(filter(None, (memory, fp8)))


def _warn_of_unknown(model: ModelDeployment, nodes: Sequence[_Node]) -> None:
    if unknown := {node.shown for node in nodes if node.gpus > 0 and node.gpu is None}:
        logger.warning(
            "gpus_unknown model=%s: that these have %s is taken for granted: %s; a node's label %s names its kind",
            model.name,
            _wants(model),
            ", ".join(sorted(unknown)),
            KIND,
        )


def _shown(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())
