"""`manta serve`: `serve run`, with the proxy that Manta wants before it, and an end that lets requests end."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from app import proxy
from app.cli.check import BUILDER, check
from app.cli.errors import fail

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("ray.serve")

GRPC_MESSAGE_BYTES = 64 << 20
"""Longest message, request or answer, that Serve's gRPC proxy handles; its own limit is 2 GiB."""

WAIT_S = 5.0
"""How long one question to the ingresses waits for their requests to end."""

ANSWER_S = 5.0
"""How much later the answer may come."""

ON_ITS_WAY_S = 0.5
"""What an ingress has ended may still be on its way through the proxy."""

ATTEMPTS = 3
RETRY_S = 1.0
"""Questions in a row without an answer, and the pause after each; then there is no ingress, or none that works."""

DID_NOT_START = 1


def serve(file: Annotated[Path, typer.Argument(help="A service file, as `serve run` takes it.")]) -> None:
    """Check a service file and run it; Ctrl-C or SIGTERM refuses new requests and waits for those that run.

    They have the longest graceful_shutdown_timeout_s of the file to end; a second signal cuts them.
    """
    check(file)
    os.environ.setdefault(proxy.VARIABLE, proxy.CALLBACK)
    os.environ.setdefault("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", str(GRPC_MESSAGE_BYTES))

    import ray
    import ray.serve
    from ray.serve.scripts import run

    # Done before `serve run` does it, since Ray puts a handler of its own on SIGTERM there.
    ray.init(address=os.environ.get("RAY_ADDRESS"), namespace="serve")
    stop = _stop_at_signals()
    try:
        run.main([str(file), "--non-blocking"], standalone_mode=False)
    except SystemExit:
        raise fail("the service did not start", DID_NOT_START) from None
    stop.wait()
    try:
        _drain(_services(file))
    except KeyboardInterrupt:
        logger.warning("draining_cut")
    ray.serve.shutdown()
    ray.shutdown()
    logger.info("service_stopped")


def _stop_at_signals() -> threading.Event:
    """An event that the first SIGINT or SIGTERM sets. Later ones raise KeyboardInterrupt in the main thread."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return stop


def _services(file: Path) -> dict[str, float]:
    """The file's applications that are Manta's, to the seconds that their requests may take to end."""
    from app.config import ServiceConfig

    services = {}
    for application in yaml.safe_load(file.read_text())["applications"]:
        if application["import_path"] == BUILDER:
            config = ServiceConfig.model_validate(application["args"])
            seconds = [model.graceful_shutdown_timeout_s for model in config.models]
            services[application.get("name", "default")] = max(config.ingress.graceful_shutdown_timeout_s, *seconds)
    return services


def _drain(services: dict[str, float]) -> None:
    """Has all ingresses refuse requests, and returns when none is left or its time is over.

    Ray stops its proxies first, and with them every request; so this is done before Ray hears of the end.
    """
    from ray import serve

    from app.main import INGRESS_NAME

    handles = [serve.get_deployment_handle(INGRESS_NAME, name) for name in services]
    deadline = time.monotonic() + max(services.values(), default=0.0)
    wait_s = 0.0
    unanswered = 0
    while unanswered < ATTEMPTS:
        in_flight = _in_flight(handles, wait_s)
        if in_flight is None:
            unanswered += 1
            time.sleep(RETRY_S)
            continue
        unanswered = 0
        logger.info("draining in_flight=%d", in_flight)
        if in_flight == 0:
            time.sleep(ON_ITS_WAY_S)
            return
        wait_s = min(WAIT_S, deadline - time.monotonic())
        if wait_s <= 0:
            logger.warning("draining_over in_flight=%d", in_flight)
            return


def _in_flight(handles: list[DeploymentHandle[Any]], wait_s: float) -> int | None:
    """Requests that ingresses, which take no more, serve so many seconds later; None where they do not answer."""
    try:
        questions = [handle.broadcast("drain", wait_s) for handle in handles]
        answers = [question.results(timeout_s=wait_s + ANSWER_S) for question in questions]
    except Exception as error:
        # Of whichever kind: the service is to end all the same.
        logger.warning("draining_unanswered error=%s", type(error).__name__)
        return None
    return sum(sum(answer) for answer in answers)
