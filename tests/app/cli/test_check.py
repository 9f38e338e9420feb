"""`manta check`: one line for what is wrong, before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from app.cli.main import app

DEMO = Path(__file__).parents[3] / "serve_configs" / "demo.yaml"


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check(folder: Path, content: Any) -> tuple[int, str]:
    file = folder / "service.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    result = CliRunner().invoke(app, ["check", str(file)])
    return result.exit_code, result.output


def demo(port: int) -> dict[str, Any]:
    content = yaml.safe_load(DEMO.read_text())
    content["http_options"]["port"] = port
    return content


def test_the_demo_is_right(tmp_path: Path, port: int) -> None:
    code, output = check(tmp_path, demo(port))
    assert code == 0
    assert "is right" in output


def test_a_typo_is_named_with_what_was_meant(tmp_path: Path, port: int) -> None:
    content = demo(port)
    content["applications"][0]["args"]["models"][0]["num_replica"] = 2
    code, output = check(tmp_path, content)
    assert code == 2
    assert "models.0: unknown key 'num_replica'; did you mean 'num_replicas'?" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ({"device": "cuda"}, "models.0: engine: device='cuda': needs `num_gpus: 1` beside `engine`; num_gpus is 0"),
        ({"enforce_eager": "no"}, "models.0: engine: enforce_eager='no': must be true or false"),
        (
            {"kv_cache_memory_bytes": "1GiB"},
            "models.0: engine: kv_cache_memory_bytes='1GiB': must be a whole number, 1 or more",
        ),
    ],
)
def test_a_wrong_engine_argument_is_named(tmp_path: Path, port: int, engine: dict[str, Any], problem: str) -> None:
    content = demo(port)
    content["applications"][0]["args"]["models"][0]["engine"] = engine
    code, output = check(tmp_path, content)
    assert (code, output) == (2, f"error: {tmp_path / 'service.yaml'}: manta: args: {problem}\n")


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        code, output = check(tmp_path, demo(number))
    assert code == 2
    assert f"service.yaml itself is right, but port {number} on 127.0.0.1 is in use" in output


@pytest.mark.parametrize("content", ["a: [", "just text", {"applications": [{"name": "x"}]}])
def test_a_file_of_another_kind_is_refused_in_words(tmp_path: Path, content: Any) -> None:
    code, output = check(tmp_path, content)
    assert code == 2
    assert output.startswith("error: ")
    assert "Traceback" not in output
