"""`manta serve`: what it does when a service cannot be started, and its end: who is asked, and for how long."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions
import yaml
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
    ServeStatus,
)
from typer.testing import CliRunner

from app import proxy
from app.cli import serve as command
from app.cli.main import app

DEMO = Path(__file__).parents[3] / "serve_configs" / "demo.yaml"
PROD = DEMO.with_name("prod.yaml")


class Ingresses:
    """An application's, which answer as they are told, at last for ever; an answer that is an exception is raised."""

    def __init__(self, answers: Sequence[list[int | Exception] | Exception]) -> None:
        self._answers = list(answers)
        self.waits: list[float] = []

    def broadcast(self, method: str, wait_s: float) -> Ingresses:
        assert method == "drain"
        self.waits.append(wait_s)
        return self

    def results(self, *, timeout_s: float, return_exceptions: bool) -> list[int | Exception]:
        assert timeout_s > self.waits[-1]
        assert return_exceptions
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


Drain = Callable[..., list[str]]


@pytest.fixture
def drain(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Drain:
    """Drains applications; returns what was logged."""
    monkeypatch.setattr(command, "ON_ITS_WAY_S", 0.0)
    monkeypatch.setattr(command, "RETRY_S", 0.0)
    # Serve configures the one that the command has, whenever it is first imported.
    logger = logging.Logger("serve")
    logger.addHandler(caplog.handler)
    monkeypatch.setattr(command, "logger", logger)

    def run(*applications: Ingresses | None, seconds: float = 3600.0) -> list[str]:
        """None has no ingress, so that Serve does not know the deployment."""
        started = {str(index): ingresses for index, ingresses in enumerate(applications) if ingresses is not None}
        monkeypatch.setattr("ray.serve.get_deployment_handle", lambda deployment, name: started[name])
        command._drain({str(index): seconds for index in range(len(applications))})
        return [record.getMessage() for record in caplog.records]

    return run


def test_it_waits_until_no_ingress_serves_a_request(drain: Drain) -> None:
    ingresses = Ingresses([[2, 1], [0, 1], [0, 0]])
    assert drain(ingresses) == [f"draining in_flight={n}" for n in (3, 1, 0)]
    assert ingresses.waits[0] == 0, "what comes is refused before anything is waited for"
    assert ingresses.waits[1] > 0


def test_it_waits_no_longer_than_the_file_says(drain: Drain) -> None:
    assert drain(Ingresses([[1]]), seconds=0.0) == ["draining in_flight=1", "draining_over in_flight=1"]


def test_an_ingress_that_is_replaced_meanwhile_is_waited_for(drain: Drain) -> None:
    assert drain(Ingresses([[1], RuntimeError("died"), TimeoutError(), [1], [0]])) == [
        "draining in_flight=1",
        "draining_unanswered error=RuntimeError",
        "draining_unanswered error=TimeoutError",
        "draining in_flight=1",
        "draining in_flight=0",
    ]


def test_a_service_whose_ingresses_never_answer_ends_all_the_same(drain: Drain) -> None:
    assert drain(Ingresses([RuntimeError()])) == ["draining_unanswered error=RuntimeError"] * command.ATTEMPTS


def test_ingress_that_is_silent_does_not_cut_those_of_another(drain: Drain) -> None:
    busy: list[list[int | Exception] | Exception] = [[1, RuntimeError("lost")]] * (command.ATTEMPTS + 2)
    ingresses = Ingresses([*busy, [0, RuntimeError("lost")], [0, 0]])
    logged = drain(ingresses)
    assert logged.count("draining in_flight=1") == len(busy)
    assert logged[-3:] == ["draining in_flight=0", "draining_unanswered error=RuntimeError", "draining in_flight=0"]


def test_application_that_is_silent_does_not_cut_another(drain: Drain) -> None:
    busy = [[1]] * (command.ATTEMPTS + 2)
    logged = drain(Ingresses([RuntimeError("lost")] * len(busy) + [[0]]), Ingresses([*busy, [0]]))
    assert logged.count("draining in_flight=1") == logged.count("draining_unanswered error=RuntimeError") == len(busy)
    assert logged[-1] == "draining in_flight=0"


def test_ingress_that_stays_silent_beside_others_is_given_the_files_time(drain: Drain) -> None:
    assert drain(Ingresses([[0, RuntimeError("lost")]]), seconds=0.0) == [
        "draining in_flight=0",
        "draining_unanswered error=RuntimeError",
        "draining_over in_flight=0",
    ]


def test_application_that_never_started_holds_nobody_up(drain: Drain) -> None:
    assert drain(None) == []
    assert drain(None, Ingresses([[1], [0]])) == ["draining in_flight=1", "draining in_flight=0"]


@pytest.fixture
def _signals() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_interrupts(first: signal.Signals) -> None:
    stop = command._stop_at_signals()
    os.kill(os.getpid(), first)
    assert stop.wait(10)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


def test_requests_get_the_longest_time_that_a_file_gives() -> None:
    assert command._services(DEMO) == {"manta": 60.0}
    assert command._services(PROD) == {"manta": 600.0}


def test_application_is_ours_however_its_path_is_written(tmp_path: Path) -> None:
    content = yaml.safe_load(DEMO.read_text())
    content["applications"][0]["import_path"] = "app.main.build"
    content["applications"].append({"name": "other", "import_path": "app.other:build"})
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(content))
    assert command._services(tmp_path / "service.yaml") == {"manta": 60.0}


@pytest.mark.usefixtures("_signals")
def test_file_that_is_gone_at_the_end_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(DEMO.read_text())
    monkeypatch.setenv(proxy.VARIABLE, "")  # the command sets it
    drained: list[dict[str, float]] = []

    def run_and_stop(*_: Any, **__: Any) -> None:
        file.unlink()
        os.kill(os.getpid(), signal.SIGTERM)

    for name in ("ray.init", "ray.shutdown", "ray.serve.shutdown"):
        monkeypatch.setattr(name, lambda **_: None)
    monkeypatch.setattr("ray.serve.scripts.run.main", run_and_stop)
    monkeypatch.setattr(command, "check", lambda file: None)  # the port may be taken
    monkeypatch.setattr(command, "_drain", drained.append)
    done = CliRunner().invoke(app, ["serve", str(file)])
    assert (done.exit_code, drained) == (0, [{"manta": 60.0}]), done.output


def status_of(*states: tuple[ApplicationStatus, str, dict[str, str]]) -> ServeStatus:
    """Of the demo's application and of others; each state with its message and those of deployments that failed."""
    names = ["manta", *(f"other-{index}" for index in range(1, len(states)))]
    return ServeStatus(
        applications={
            name: ApplicationStatusOverview(
                status,
                message,
                0.0,
                {
                    deployment: DeploymentStatusOverview(
                        DeploymentStatus.DEPLOY_FAILED, DeploymentStatusTrigger.REPLICA_STARTUP_FAILED, {}, text
                    )
                    for deployment, text in failed.items()
                },
            )
            for name, (status, message, failed) in zip(names, states, strict=True)
        }
    )


DEPLOYING = (ApplicationStatus.DEPLOYING, "", {})
RUNNING = (ApplicationStatus.RUNNING, "", {})
BUILD_FAILED = (
    ApplicationStatus.DEPLOY_FAILED,
    "Deploying app 'manta' failed with exception:\nTraceback (most recent call last):\n  File\n"
    "app.requirements.MissingResources: model 'small' needs a GPU: one with 24 GB\n\n",
    {},
)
REPLICA_FAILED = (
    ApplicationStatus.DEPLOY_FAILED,
    "Failed to update the deployments ['ingress'].",
    {"ingress": "The deployment failed to start 3 times in a row. Error:\napp.api_keys.KeysUnreadable: no keys"},
)


@dataclass
class Started:
    """What a service that was started did."""

    exit_code: int
    stderr: str
    drained: list[dict[str, float]]
    shut_down: int


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, _signals: None) -> Callable[[Sequence[ServeStatus | Exception]], Started]:
    """Runs the command on the demo while Serve says that of it; then SIGTERM comes."""
    monkeypatch.setenv(proxy.VARIABLE, "")
    monkeypatch.setattr(command, "POLL_S", 0.0)
    monkeypatch.setattr(command, "check", lambda file: None)
    monkeypatch.setattr("ray.serve.scripts.run.main", lambda *_, **__: None)
    for name in ("ray.init", "ray.shutdown"):
        monkeypatch.setattr(name, lambda **_: None)

    def run(states: Sequence[ServeStatus | Exception]) -> Started:
        drained: list[dict[str, float]] = []
        shut_down: list[None] = []
        left = list(states)

        def status() -> ServeStatus:
            state = left.pop(0)
            if not left:
                os.kill(os.getpid(), signal.SIGTERM)
            if isinstance(state, Exception):
                raise state
            return state

        monkeypatch.setattr("ray.serve.status", status)
        monkeypatch.setattr("ray.serve.shutdown", lambda: shut_down.append(None))
        monkeypatch.setattr(command, "_drain", drained.append)
        patience = threading.Timer(60, os.kill, (os.getpid(), signal.SIGTERM))
        patience.start()
        done = CliRunner().invoke(app, ["serve", str(DEMO)])
        patience.cancel()
        return Started(done.exit_code, done.stderr, drained, len(shut_down))

    return run


Start = Callable[[Sequence[ServeStatus | Exception]], Started]


@pytest.mark.parametrize(
    ("failed", "reason"),
    [(BUILD_FAILED, "model 'small' needs a GPU: one with 24 GB"), (REPLICA_FAILED, "no keys")],
)
def test_service_that_cannot_be_started_says_why_and_ends(start: Start, failed: Any, reason: str) -> None:
    started = start([ServeStatus(), status_of(DEPLOYING), status_of(failed), status_of(failed)])
    assert (started.exit_code, started.stderr, started.shut_down) == (1, f"error: {reason}\n", 1)
    assert started.drained == [{}], "nobody is asked for requests that cannot be there"


def test_service_that_has_started_goes_on(start: Start) -> None:
    running = status_of(DEPLOYING)
    started = start([running, ray.exceptions.RayError(), status_of(RUNNING, BUILD_FAILED)])
    assert (started.exit_code, started.stderr) == (0, ""), "what the file does not have is another's"
    assert started.drained == [{"manta": 60.0}]


def test_service_may_be_ended_while_it_starts(start: Start) -> None:
    started = start([status_of(DEPLOYING)])
    assert (started.exit_code, started.drained, started.shut_down) == (0, [{"manta": 60.0}], 1)


def test_a_file_that_is_wrong_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("ray.init", refuse)
    (tmp_path / "service.yaml").write_text("applications: [{name: x}]")
    done = CliRunner().invoke(app, ["serve", str(tmp_path / "service.yaml")])
    assert (done.exit_code, done.output.startswith("error: ")) == (2, True)
