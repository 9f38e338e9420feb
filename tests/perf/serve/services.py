"""The services that are measured: started as their users start them, on a free port of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from rich.console import Console

from tests.perf.peers.environments import prepare

ROOT = Path(__file__).parents[3]
MODEL = "demo"
START_SECONDS = 300
STOP_SECONDS = 60

DIRECT = "manta-direct"
PORTS = {"MIN": 0, "MAX": 9}

MANTA: Mapping[str, dict[str, str]] = {
    "manta": {},
    DIRECT: {"RAY_SERVE_ENABLE_DIRECT_INGRESS": "1"},
    "manta-grpc": {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "1"},
    "manta-optimized": {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"},
    "manta-haproxy": {"RAY_SERVE_ENABLE_HA_PROXY": "1"},
}
"""The demo service, to the variables of Ray Serve that choose the way between client and ingress. With direct ingress
each ingress listens on a port of its own, which a balancer has to find; HAProxy does."""

SERVICES = (*MANTA, "vllm")


@dataclass(frozen=True)
class Service:
    """A service that answers; its model is called MODEL.

    Attributes:
        process: its first; all others descend from it.
    """

    url: str
    process: subprocess.Popen[bytes]


@dataclass(frozen=True)
class _Start:
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@contextmanager
def running(name: str, console: Console) -> Iterator[Service]:
    """One of SERVICES, from when it answers.

    Raises:
        subprocess.SubprocessError, OSError, RuntimeError: it cannot be started.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        start = _vllm(port, console) if name == "vllm" else _manta(port, Path(folder), MANTA[name])
        # Threads are the service's to choose.
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("RAY_") and key != "OMP_NUM_THREADS"
        }
        log = Path(folder) / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                start.command,
                cwd=ROOT,
                env={**environment, **start.environment},
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                _wait_until_it_answers(f"http://127.0.0.1:{port}", process, log)
                yield Service(f"http://127.0.0.1:{port}", process)
            finally:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _manta(port: int, folder: Path, variables: Mapping[str, str]) -> _Start:
    config = yaml.safe_load((ROOT / "serve_configs" / "demo.yaml").read_text())
    direct = MANTA[DIRECT].items() <= variables.items()
    config["http_options"]["port"] = free_port() if direct else port
    if "grpc_options" in config:
        config["grpc_options"]["port"] = free_port()
    (folder / "service.yaml").write_text(yaml.safe_dump(config))
    command = [str(Path(sys.executable).parent / "serve"), "run", str(folder / "service.yaml")]
    # `local`: a cluster of its own, even where another one runs on this machine.
    environment = {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0", **variables}
    if direct:
        environment |= {
            f"RAY_SERVE_DIRECT_INGRESS_{end}_HTTP_PORT": str(port + beyond) for end, beyond in PORTS.items()
        }
    return _Start(command, environment)


def _vllm(port: int, console: Console) -> _Start:
    python, model = prepare("vllm", console.print)
    cache = python.parent.parent / "cache"
    # What `vllm serve` runs; that command itself looks for a package `vllm`, and the CPU build's is called otherwise.
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += [
        "--served-model-name",
        MODEL,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "2048",
    ]
    cores = len(os.sched_getaffinity(0))
    environment = {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_AOT_COMPILE": "0",
    }
    return _Start(command, environment)


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"it did not start:\n{log.read_text(errors='replace')[-3000:]}")
