"""The page of metrics of several processes."""

import pickle

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from app.metrics import collect_families, render


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
