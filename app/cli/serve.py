"""`manta serve`: `serve run`, with the proxy that Manta wants before it, and an end that lets requests end."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
import yaml

from app import proxy
from app.cli.check import check, is_ours
from app.cli.errors import fail

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview

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
"""Questions in a row that nobody answers, and the pause after one that somebody does not; then no ingress works."""

POLL_S = 1.0
"""How often Serve is asked whether the applications run."""

DID_NOT_START = 1

ERROR_TYPE = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*: ")
"""What a traceback's last line begins with."""


def serve(file: Annotated[Path, typer.Argument(help="A service file, as `serve run` takes it.")]) -> None:
    """Check a service file and run it; Ctrl-C or SIGTERM refuses new requests and waits for those that run.

    They have the longest graceful_shutdown_timeout_s of the file to end; a second signal cuts them. Where an
    application cannot be started all of them end, with exit code 1.
    """
    check(file)
    # Now: the file may be another one, or none, when the service ends.
    names = [application.get("name", "default") for application in yaml.safe_load(file.read_text())["applications"]]
    services = _services(file)
    os.environ.setdefault(proxy.VARIABLE, proxy.CALLBACK)
    os.environ.setdefault("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", str(GRPC_MESSAGE_BYTES))

    import ray
    import ray.serve
    from ray.serve.scripts import run

    # Done before `serve run` does it, since Ray puts a handler of its own on SIGTERM there.
    ray.init(address=os.environ.get("RAY_ADDRESS"), namespace="serve")
    stop = _stop_at_signals()
    try:
        # With RAY_ADDRESS as its address, which is the default, it would complain of the ray.init() here.
        run.main([str(file), "--non-blocking", "--address", "auto"], standalone_mode=False)
    except SystemExit:
        raise fail("the service did not start", DID_NOT_START) from None
    failure = None
    try:
        failure = _failure_to_start(names, stop)
        if failure is None:
            stop.wait()
        else:
            services.pop(failure.application, None)  # it has no requests
        _drain(services)
    except KeyboardInterrupt:
        logger.warning("draining_cut")
    ray.serve.shutdown()
    ray.shutdown()
    logger.info("service_stopped")
    if failure is not None:
        raise fail(failure.reason, DID_NOT_START)


class Failure(NamedTuple):
    """An application that cannot be started, and why."""

    application: str
    reason: str


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


def _failure_to_start(names: Collection[str], stop: threading.Event) -> Failure | None:
    """Waits until all applications have run, one cannot be started, or `stop` is set."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.schema import ApplicationStatus

    starting = set(names)
    while starting and not stop.is_set():
        try:
            applications = serve.status().applications
        except RayError:  # Serve's controller does not answer, and is started anew if it does not run
            applications = {}
        for name in sorted(starting & applications.keys()):
            application = applications[name]
            if application.status == ApplicationStatus.RUNNING:
                starting.remove(name)
            elif application.status == ApplicationStatus.DEPLOY_FAILED:
                return Failure(name, _reason(application))
        if starting:
            stop.wait(POLL_S)
    return None


def _reason(application: ApplicationStatusOverview) -> str:
    """The last line of what Serve says of a failed application, which is a traceback's, without the error's type."""
    failed = (each for each in application.deployments.values() if each.status == "DEPLOY_FAILED")
    message = next((each.message for each in failed if each.message), application.message)
    lines = message.strip().splitlines() or ["the service did not start"]
    return ERROR_TYPE.sub("", lines[-1].strip())


def _services(file: Path) -> dict[str, float]:
    """The file's applications that are Manta's, to the seconds that their requests may take to end."""
    from app.config import ServiceConfig

    services = {}
    for application in yaml.safe_load(file.read_text())["applications"]:
        if is_ours(application["import_path"]):
            config = ServiceConfig.model_validate(application["args"])
            seconds = [model.graceful_shutdown_timeout_s for model in config.models]
            services[application.get("name", "default")] = max(config.ingress.graceful_shutdown_timeout_s, *seconds)
    return services


def _drain(services: dict[str, float]) -> None:
    """Has all ingresses refuse requests, and returns when none is left or its time is over.

    Ray stops its proxies first, and with them every request; so this is done before Ray hears of the end. An ingress
    that does not answer may have requests: Ray replaces one that does not work, and until then it is asked again.
    """
    deadline = time.monotonic() + max(services.values(), default=0.0)
    wait_s = 0.0
    unanswered = 0
    while unanswered < ATTEMPTS:
        in_flight, silent = _in_flight(list(services), wait_s)
        if in_flight:
            logger.info("draining in_flight=%d", sum(in_flight))
        for error in silent:
            logger.warning("draining_unanswered error=%s", type(error).__name__)
        if not sum(in_flight) and not silent:
            time.sleep(ON_ITS_WAY_S)
            return
        if silent:
            time.sleep(RETRY_S)
        unanswered = 0 if in_flight else unanswered + 1
        wait_s = min(WAIT_S, deadline - time.monotonic())
        if wait_s <= 0:
            logger.warning("draining_over in_flight=%d", sum(in_flight))
            return


def _in_flight(applications: Sequence[str], wait_s: float) -> tuple[list[int], list[Exception]]:
    """How many requests each ingress, which takes no more, serves so many seconds later; and why others do not answer.

    Applications that have no ingress, since they never started, are in neither.
    """
    from ray import serve

    from app.main import INGRESS_NAME

    def ask(application: str) -> list[int | Exception]:
        try:
            question = serve.get_deployment_handle(INGRESS_NAME, application).broadcast("drain", wait_s)
            return question.results(timeout_s=wait_s + ANSWER_S, return_exceptions=True)
        except KeyError:  # Serve knows of no such deployment
            return []
        except Exception as error:
            # Of whichever kind: the service is to end all the same.
            return [error]

    asking = ThreadPoolExecutor(max(1, len(applications)))
    try:
        answers = [answer for answers in asking.map(ask, applications) for answer in answers]
    finally:
        asking.shutdown(wait=False)
    return (
        [answer for answer in answers if not isinstance(answer, Exception)],
        [answer for answer in answers if isinstance(answer, Exception)],
    )
