"""Manta beside its peers: what becomes of the figures. The engines themselves are not run here."""

from pathlib import Path

import pytest
from rich.console import Console

from tests.perf.peers import __main__ as peers
from tests.perf.peers.workloads import WORKLOADS


def figures(speed: float, startup: float) -> dict[str, float]:
    return dict.fromkeys(WORKLOADS, speed) | {"startup": startup}


def test_ratio_is_of_medians_to_the_best_peer_and_above_one_is_better() -> None:
    result = peers.summarise(
        {
            "manta": [figures(speed, 2.0) for speed in (300.0, 10.0, 200.0)],
            "vllm": [figures(50.0, 20.0)],
            "openvino": [figures(100.0, 1.0)],
        }
    )

    assert result["single_128x128"] == {
        "manta": 200.0,
        "openvino": 100.0,
        "vllm": 50.0,
        "transformers": None,
        "ratio_to_best_peer": 2.0,
    }
    assert result["startup"]["ratio_to_best_peer"] == 0.5
    assert result.keys() == {*WORKLOADS, "startup"}


def test_manta_alone_has_no_ratio() -> None:
    assert peers.summarise({"manta": [figures(1.0, 1.0)]})["startup"]["ratio_to_best_peer"] is None


@pytest.mark.parametrize("fails_at", ["installation", "warm-up", "second round"])
def test_peer_that_fails_is_left_out_and_the_rest_go_on(monkeypatch: pytest.MonkeyPatch, fails_at: str) -> None:
    def prepare(name: str, report: object) -> tuple[Path, Path]:
        if (name, fails_at) == ("vllm", "installation"):
            raise OSError("no space")
        return Path("python"), Path("model")

    def run(name: str, python: Path, model: Path, *, seed: int, workloads: list[str]) -> dict[str, float]:
        if name == "vllm" and seed == {"warm-up": 0, "second round": 200}.get(fails_at):
            raise RuntimeError("out of memory")
        return figures(1.0, 1.0)

    monkeypatch.setattr(peers, "prepare", prepare)
    monkeypatch.setattr(peers, "run", run)
    console = Console(record=True, quiet=False, width=200)

    turns = peers.compare(["manta", "vllm", "openvino"], 2, console)

    assert {name: len(each) for name, each in turns.items()} == {"manta": 2, "openvino": 2}
    assert "vllm is left out" in console.export_text()


def test_failing_manta_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: object, **options: object) -> dict[str, float]:
        raise RuntimeError("broken")

    monkeypatch.setattr(peers, "prepare", lambda name, report: (Path("python"), Path("model")))
    monkeypatch.setattr(peers, "run", run)

    with pytest.raises(RuntimeError, match="broken"):
        peers.compare(["manta", "vllm"], 1, Console(quiet=True))
