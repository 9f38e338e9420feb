"""The page of metrics of several processes."""

import asyncio
import pickle

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from app.metrics import SharedPage, collect_families, render


def test_processes_are_told_apart_by_their_replica_label() -> None:
    pages = {}
    for name, value in (("a", 3), ("b", 4)):
        registry = CollectorRegistry()
        Counter("manta_tokens", "Tokens", ["model"], registry=registry).labels(model="demo").inc(value)
        Histogram("manta_seconds", "Seconds", buckets=(1, 2), registry=registry).observe(1.5)
        # As they travel between processes.
        pages[name] = pickle.loads(pickle.dumps(collect_families(registry)))
    only_b = CollectorRegistry()
    Gauge("manta_running", "Running", registry=only_b).set(7)
    pages["b"] += collect_families(only_b)

    text = render(pages).decode()
    assert text.count("# TYPE manta_tokens_total counter") == 1
    samples = {
        (s.name, s.labels.get("le"), s.labels["replica"]): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    assert samples["manta_tokens_total", None, "a"] == 3
    assert samples["manta_tokens_total", None, "b"] == 4
    assert samples["manta_seconds_bucket", "2.0", "a"] == 1
    assert samples["manta_seconds_bucket", "1.0", "b"] == 0
    assert samples["manta_running", None, "b"] == 7
    assert "_created" not in text
    assert ("manta_running", None, "a") not in samples


class Pages:
    """Gathers numbered pages, each of them when it is let."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_end = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> bytes:
        self.begun += 1
        page = b"%d" % self.begun
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return page


async def test_those_who_ask_at_the_same_time_share_a_gathering() -> None:
    pages = Pages()
    shared = SharedPage(pages, max_age_s=0)
    asking = [asyncio.create_task(shared.get()) for _ in range(5)]
    await asyncio.sleep(0)
    asking[0].cancel()  # whoever came first leaves
    await asyncio.sleep(0)
    asking.append(asyncio.create_task(shared.get()))
    await asyncio.sleep(0)
    pages.may_end.set()
    assert await asyncio.gather(*asking[1:]) == [b"1"] * 5
    assert asking[0].cancelled()
    assert await shared.get() == b"2"


async def test_page_is_good_for_some_time() -> None:
    pages = Pages()
    pages.may_end.set()
    kept = SharedPage(pages, max_age_s=3600)
    assert [await kept.get(), await kept.get()] == [b"1", b"1"]


async def test_failed_gathering_fails_all_who_wait_and_is_not_kept() -> None:
    pages = Pages()
    shared = SharedPage(pages, max_age_s=3600)
    pages.error = RuntimeError("broken")
    pages.may_end.set()
    results = await asyncio.gather(shared.get(), shared.get(), return_exceptions=True)
    assert [repr(result) for result in results] == ["RuntimeError('broken')"] * 2
    with pytest.raises(RuntimeError):
        await shared.get()
    pages.error = None
    assert await shared.get() == b"3"
