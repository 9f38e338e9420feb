"""`manta serve` as its users meet it: keys over TLS, Ray's headers without effect, and an end in peace."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from app.api_keys import key_line, new_key
from tests.certificates import write_certificate
from tests.e2e.conftest import ROOT, STOP_SECONDS, Service, started

KEY = new_key()
MINE = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def guarded(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The demo with a key and a certificate, under `manta serve`. The last test ends it."""
    folder = tmp_path_factory.mktemp("guarded")
    config: dict[str, Any] = yaml.safe_load((ROOT / "serve_configs" / "demo.yaml").read_text())
    (folder / "keys.yaml").write_text(key_line("tests", KEY))
    config["applications"][0]["args"]["access"] = {"keys_file": str(folder / "keys.yaml")}
    config["http_options"] |= write_certificate(folder)
    with started(config, folder, ("manta", "serve")) as running:
        yield running


@pytest.fixture
def http(guarded: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, verify=guarded.verify, headers=MINE, timeout=120) as client:
        yield client


def manta(service: Service, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / "manta"), *args],
        env=os.environ | {"SSL_CERT_FILE": str(service.log.parent / "cert.pem")} | environment,
        input="What is the capital of France?\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def body(max_tokens: int, **given: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "One, two,", "max_tokens": max_tokens, "ignore_eos": True} | given


def test_terminal_chat_speaks_tls_and_shows_its_key(guarded: Service) -> None:
    args = ["chat", "--url", guarded.url, "--temperature", "0"]
    done = manta(guarded, *args, MANTA_API_KEY=KEY)
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n")
    refused = manta(guarded, *args)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "wants a key" in refused.stderr


def test_benchmark_speaks_tls(guarded: Service, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    args = ["--num-prompts", "2", "--input-len", "8", "--output-len", "4", "--json", str(report)]
    done = manta(guarded, "bench", "serve", "--base-url", guarded.url, "--api-key", KEY, *args)
    assert done.returncode == 0, done.stderr
    assert json.loads(report.read_text())["completed"] == 2


def test_plain_http_is_not_answered(guarded: Service) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(guarded.url.replace("https", "http") + "/health")


def test_a_header_of_ray_s_limits_nothing(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json=body(64), headers={"x-request-timeout-seconds": "0.01"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 64


def test_the_log_complains_of_nothing(guarded: Service) -> None:
    log = guarded.log.read_text()
    assert "proxy_obeys_clients" not in log
    assert "An address was passed" not in log, "Serve's words for the cluster that is there already"


def test_sigterm_refuses_what_comes_and_lets_end_what_runs(guarded: Service, http: httpx.Client) -> None:
    begun = threading.Event()
    events: list[str] = []

    def stream() -> None:
        given = body(600, stream=True, stream_options={"include_usage": True})
        with (
            httpx.Client(base_url=guarded.url, verify=guarded.verify, headers=MINE, timeout=120) as client,
            client.stream("POST", "/v1/completions", json=given) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
                    begun.set()

    reader = threading.Thread(target=stream)
    reader.start()
    assert begun.wait(60)
    guarded.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 60
    while (refused := http.post("/v1/completions", json=body(1))).status_code == 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert refused.headers["retry-after"]
    assert (http.get("/ready").status_code, http.get("/health").status_code) == (503, 200)
    assert reader.is_alive(), "the test is too slow to say anything"
    reader.join()
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == 600
    assert guarded.process.wait(STOP_SECONDS) == 0
    log = guarded.log.read_text()
    assert "draining in_flight=1" in log
    assert "draining in_flight=0" in log
    assert "service_stopped" in log
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", httpx.URL(guarded.url).port))
