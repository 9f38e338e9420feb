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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def port() -> int:
    return free_port()


def check(folder: Path, content: Any) -> tuple[int, str]:
    file = folder / "service.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    result = CliRunner().invoke(app, ["check", str(file)])
    return result.exit_code, result.output


def demo(port: int) -> dict[str, Any]:
    content = yaml.safe_load(DEMO.read_text())
    content["http_options"]["port"] = port
    content["grpc_options"]["port"] = free_port()
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


@pytest.mark.parametrize(
    ("certificate", "key", "problem"),
    [
        (None, "here", "ssl_certfile={folder}/absent.pem': there is no such file"),
        ("here", None, "ssl_keyfile={folder}/absent.pem': there is no such file"),
        ("here", "here", "ssl_certfile and ssl_keyfile are no certificate and its key"),
    ],
)
def test_a_certificate_that_is_absent_or_none_is_named(
    tmp_path: Path, port: int, certificate: str | None, key: str | None, problem: str
) -> None:
    (tmp_path / "here.pem").write_text("nothing")
    content = demo(port)
    content["http_options"] |= {
        "ssl_certfile": str(tmp_path / f"{certificate or 'absent'}.pem"),
        "ssl_keyfile": str(tmp_path / f"{key or 'absent'}.pem"),
    }
    code, output = check(tmp_path, content)
    assert code == 2
    assert output.startswith(f"error: {tmp_path / 'service.yaml'}: http_options: ")
    assert problem.format(folder=f"'{tmp_path}") in output
    assert "Traceback" not in output


@pytest.mark.parametrize("content", ["a: [", "just text", {"applications": [{"name": "x"}]}])
def test_a_file_of_another_kind_is_refused_in_words(tmp_path: Path, content: Any) -> None:
    code, output = check(tmp_path, content)
    assert code == 2
    assert output.startswith("error: ")
    assert "Traceback" not in output


def test_a_grpc_port_that_is_taken_on_any_address_is_named(tmp_path: Path, port: int) -> None:
    content = demo(port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        content["grpc_options"]["port"] = number = taken.getsockname()[1]
        code, output = check(tmp_path, content)
        assert code == 2
        assert f"port {number} for gRPC is in use" in output
        del content["grpc_options"]["grpc_servicer_functions"]
        assert check(tmp_path, content)[0] == 0, "Serve then starts no gRPC proxy"


def test_a_grpc_service_that_is_not_there_is_named(tmp_path: Path, port: int) -> None:
    content = demo(port)
    content["grpc_options"]["grpc_servicer_functions"][0] = "app.grpc.proxy.add_manat"
    code, output = check(tmp_path, content)
    assert code == 2
    assert "grpc_servicer_functions: 'app.grpc.proxy.add_manat' cannot be imported" in output


def test_http_and_grpc_have_ports_of_their_own(tmp_path: Path, port: int) -> None:
    content = demo(port)
    content["grpc_options"]["port"] = port
    code, output = check(tmp_path, content)
    assert code == 2
    assert f"grpc_options: port: {port} is the port of http_options" in output
