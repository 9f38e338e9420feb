"""The metrics of a whole service as one page, whichever ingress is asked for it.

Every series carries the label `replica`, the id of the process that counts it. Ray never uses such an id again, so a
series ends with its process and none ever goes backwards; one that did not answer in time is missing from one scrape.
Totals over replicas are for the reader to make: `sum(rate(…))`, which knows how to treat series that end.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector


def collect_families(registry: CollectorRegistry) -> list[Metric]:
    """A registry's families with their samples, as values that can travel."""
    return list(registry.collect())


def labelled(families: Iterable[Metric], **labels: str) -> list[Metric]:
    """The same families with these labels on every sample."""
    result = []
    for family in families:
        copy = Metric(family.name, family.documentation, family.type)
        for sample in family.samples:
            # Start times (`_created`) would be a second family for each counter and histogram; nobody reads them.
            if not sample.name.endswith("_created"):
                copy.samples.append(sample._replace(labels={**sample.labels, **labels}))
        result.append(copy)
    return result


def render(families: Mapping[str, Sequence[Metric]]) -> bytes:
    """Prometheus' text format of the families of several processes, each family once.

    Args:
        families: by replica id.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(families))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, families: Mapping[str, Sequence[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for replica_id, families in sorted(self._families.items()):
            for family in labelled(families, replica=replica_id):
                merged.setdefault(family.name, Metric(family.name, family.documentation, family.type)).samples.extend(
                    family.samples
                )
        yield from merged.values()
