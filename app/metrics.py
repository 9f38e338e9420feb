"""The metrics of a whole service as one page, whichever ingress is asked for it.

Every series carries the label `replica`, the id of the process that counts it. Ray never uses such an id again, so a
series ends with its process and none ever goes backwards; one that did not answer in time is missing from one scrape.
Totals over replicas are for the reader to make: `sum(rate(…))`, which knows how to treat series that end.
"""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector


class SharedPage:
    """One gathering for all who ask while it goes on, and for some time after. Lives on one event loop.

    Nobody needs a key to ask, and each gathering asks every process of the service.

    Args:
        gather: makes a page.
        max_age_s: how long a page is given to whoever asks for another one.
    """

    def __init__(self, gather: Callable[[], Awaitable[bytes]], max_age_s: float) -> None:
        self._gather = gather
        self._max_age_s = max_age_s
        self._page = b""
        self._good_until = float("-inf")
        self._gathering: asyncio.Task[bytes] | None = None

    async def get(self) -> bytes:
        loop = asyncio.get_running_loop()
        if self._gathering is None:
            if loop.time() < self._good_until:
                return self._page
            # Not in the context of whoever came first: what Ray keeps there ends with that request.
            self._gathering = loop.create_task(self._make(), context=contextvars.Context())
        # Others wait for it too: whoever leaves must not end it.
        return await asyncio.shield(self._gathering)

    async def _make(self) -> bytes:
        try:
            self._page = await self._gather()
            self._good_until = asyncio.get_running_loop().time() + self._max_age_s
            return self._page
        finally:
            self._gathering = None


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
