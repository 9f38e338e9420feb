"""The demo service as a user starts it: `serve run` on its own configuration, on a free port."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
START_SECONDS = 300
STOP_SECONDS = 180


@dataclass(frozen=True)
class Service:
    """A running service.

    Attributes:
        url: its address, without a path.
        grpc_port: of its gRPC proxy.
        process: of `serve run`.
        log: what it printed.
        verify: whom to trust, as httpx takes it.
    """

    url: str
    grpc_port: int
    process: subprocess.Popen[bytes]
    log: Path
    verify: ssl.SSLContext | bool = True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="package")
def service(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    config = yaml.safe_load((ROOT / "serve_configs" / "demo.yaml").read_text())
    config["applications"][0]["args"]["ingress"]["metrics_max_age_s"] = 0
    with started(config, tmp_path_factory.mktemp("service")) as running:
        yield running


@contextmanager
def started(config: dict[str, Any], folder: Path, command: Sequence[str] = ("serve", "run")) -> Iterator[Service]:
    """A configuration under `serve run`, or another command, on free ports of this machine."""
    assert config["http_options"]["host"] == "127.0.0.1"
    config["http_options"]["port"] = port = free_port()
    config["grpc_options"]["port"] = grpc_port = free_port()
    (folder / "service.yaml").write_text(yaml.safe_dump(config))
    log = folder / "log"
    # The service starts a cluster of its own, whatever cluster the environment points to or runs on this machine.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / command[0]), *command[1:], str(folder / "service.yaml")],
            cwd=ROOT,
            env={**environment, "RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"},
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        certificate = config["http_options"].get("ssl_certfile")
        scheme = "https" if certificate else "http"
        verify = ssl.create_default_context(cafile=certificate) if certificate else True
        running = Service(f"{scheme}://127.0.0.1:{port}", grpc_port, process, log, verify)
        try:
            _wait_until_it_answers(running)
            yield running
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise


def _wait_until_it_answers(service: Service) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if service.process.poll() is not None:
            break
        try:
            if httpx.get(f"{service.url}/health", verify=service.verify).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    pytest.fail(f"the service did not start:\n{service.log.read_text()[-4000:]}")
