"""The end of `manta serve`: who is asked, for how long, and what a second signal does."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli import serve as command
from app.cli.main import app

DEMO = Path(__file__).parents[3] / "serve_configs" / "demo.yaml"
PROD = DEMO.with_name("prod.yaml")


class Ingresses:
    """An application's, which answer as they are told; an answer that is an exception is raised."""

    def __init__(self, answers: Sequence[list[int] | Exception]) -> None:
        self._answers = list(answers)
        self.waits: list[float] = []

    def broadcast(self, method: str, wait_s: float) -> Ingresses:
        assert method == "drain"
        self.waits.append(wait_s)
        return self

    def results(self, *, timeout_s: float) -> list[int]:
        assert timeout_s > self.waits[-1]
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

    def run(ingresses: Ingresses, seconds: float = 3600.0) -> list[str]:
        monkeypatch.setattr("ray.serve.get_deployment_handle", lambda deployment, name: ingresses)
        command._drain({"manta": seconds})
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


def test_a_file_that_is_wrong_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr("ray.init", refuse)
    (tmp_path / "service.yaml").write_text("applications: [{name: x}]")
    done = CliRunner().invoke(app, ["serve", str(tmp_path / "service.yaml")])
    assert (done.exit_code, done.output.startswith("error: ")) == (2, True)
