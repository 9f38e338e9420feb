"""`manta check`: one line for what is wrong, before anything starts."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from app.api_keys import key_line, new_key
from app.cli.main import app
from tests.certificates import write_certificate

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
    ("host", "port", "problem"),
    [
        ("nowhere.invalid", 8000, "port 8000 on nowhere.invalid cannot be listened on ("),
        ("192.0.2.1", 8000, "port 8000 on 192.0.2.1 cannot be listened on (Cannot assign requested address)"),
        ("127.0.0.1", 80_000, "port 80000 on 127.0.0.1 cannot be listened on ("),
    ],
)
def test_an_address_that_is_none_of_this_machine_is_not_called_taken(
    tmp_path: Path, host: str, port: int, problem: str
) -> None:
    content = demo(port)
    content["http_options"]["host"] = host
    code, output = check(tmp_path, content)
    assert code == 2
    assert f"service.yaml: http_options: {problem}" in output
    assert "in use" not in output
    assert "Traceback" not in output


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


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "': there is no such file, or it cannot be read"), ("nothing", "': has no certificates (")],
)
def test_authorities_that_are_absent_or_none_are_named(
    tmp_path: Path, port: int, content: str | None, problem: str
) -> None:
    authorities = tmp_path / "ca.pem"
    if content is not None:
        authorities.write_text(content)
    given = demo(port)
    given["http_options"] |= {**write_certificate(tmp_path), "ssl_ca_certs": str(authorities)}
    code, output = check(tmp_path, given)
    assert code == 2
    assert f"http_options: ssl_ca_certs='{authorities}{problem}" in output
    given["http_options"]["ssl_ca_certs"] = given["http_options"]["ssl_certfile"]
    assert check(tmp_path, given)[0] == 0


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


@pytest.mark.parametrize("name", ["app.grpc.proxy.add_manat", "app.proxies:add_manta", "app.grpc.proxy", "x"])
def test_a_grpc_service_that_is_not_there_is_named(tmp_path: Path, port: int, name: str) -> None:
    content = demo(port)
    content["grpc_options"]["grpc_servicer_functions"][0] = name
    code, output = check(tmp_path, content)
    assert code == 2
    assert f"grpc_servicer_functions: '{name}' cannot be imported (" in output


def test_paths_with_a_colon_or_a_dot_are_the_same(tmp_path: Path, port: int) -> None:
    content = demo(port)
    content["grpc_options"]["grpc_servicer_functions"] = ["app.grpc.proxy:add_manta", "app.grpc.proxy.add_health"]
    application = content["applications"][0]
    application["import_path"] = "app.main.build"
    assert check(tmp_path, content)[0] == 0
    application["args"]["models"] = []
    assert check(tmp_path, content)[0] == 2, "its args are looked at as well"


def test_a_grpc_service_may_lie_where_the_command_is_run(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "services_of_a_user.py").write_text("def add(servicer, server): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".")])
    content = demo(port)
    content["grpc_options"]["grpc_servicer_functions"] = ["services_of_a_user.add"]
    assert check(tmp_path, content)[0] == 0


def test_http_and_grpc_have_ports_of_their_own(tmp_path: Path, port: int) -> None:
    content = demo(port)
    content["grpc_options"]["port"] = port
    code, output = check(tmp_path, content)
    assert code == 2
    assert f"grpc_options: port: {port} is the port of http_options" in output


@pytest.mark.parametrize(
    ("place", "typo", "meant"),
    [
        ((), "http_option", "http_options"),
        (("http_options",), "hst", "host"),
        (("grpc_options",), "prt", "port"),
        (("applications", 0), "route_prefx", "route_prefix"),
        (("applications", 0, "deployments", 0), "num_replica", "num_replicas"),
    ],
)
def test_a_typo_in_serves_own_keys_is_named_with_what_was_meant(
    tmp_path: Path, port: int, place: tuple[str | int, ...], typo: str, meant: str
) -> None:
    content = demo(port)
    content["applications"][0]["deployments"] = [{"name": "ingress"}]
    assert check(tmp_path, content)[0] == 0
    at: Any = content
    for step in place:
        at = at[step]
    at[typo] = at.pop(meant, 1)
    code, output = check(tmp_path, content)
    where = "".join(f".{step}" if isinstance(step, int) else f": {step}" for step in place)
    assert code == 2
    assert f"service.yaml{where}: unknown key '{typo}'; did you mean '{meant}'?\n" in output


def test_a_typo_is_named_beside_what_it_leaves_out(tmp_path: Path, port: int) -> None:
    content = demo(port)
    content["applications"][0]["import_pth"] = content["applications"][0].pop("import_path")
    code, output = check(tmp_path, content)
    assert (code, output.count("\n")) == (2, 2)
    assert "unknown key 'import_pth'; did you mean 'import_path'?\n" in output
    assert "import_path: Field required\n" in output


@pytest.mark.parametrize("import_path", ["app.mian:build", "app.main:biuld"])
def test_a_file_without_an_application_of_ours_is_refused(tmp_path: Path, port: int, import_path: str) -> None:
    content = demo(port)
    content["applications"][0]["import_path"] = import_path
    code, output = check(tmp_path, content)
    assert code == 2
    assert f"no application's import_path is Manta's, 'app.main:build'; there is '{import_path}'" in output
    other = {**content["applications"][0], "name": "other", "route_prefix": "/other", "args": {}}
    content["applications"] = [demo(port)["applications"][0], other]
    assert check(tmp_path, content)[0] == 0, "others may stand beside it"


@pytest.mark.parametrize("kind", ["keys_file", "keys_env"])
def test_keys_that_are_absent_are_a_warning_and_wrong_ones_an_error(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    place = str(tmp_path / "keys.yaml") if kind == "keys_file" else "KEYS_OF_A_TEST"
    content = demo(port)
    content["applications"][0]["args"]["access"] = {kind: place}

    def checked_with(keys: str) -> tuple[int, str]:
        if kind == "keys_file":
            Path(place).write_text(keys)
        else:
            monkeypatch.setenv(place, keys)
        return check(tmp_path, content)

    code, output = check(tmp_path, content)
    assert code == 0
    assert output.startswith(
        f"warning: {tmp_path / 'service.yaml'}: manta: args: access: {kind}='{place}': there is no"
    )
    code, output = checked_with("[]")
    assert code == 2
    assert f"args: access: {kind} {place}: has no key" in output
    code, output = checked_with(key_line("me", new_key()))
    assert (code, "warning" in output) == (0, False)


def test_keys_may_be_in_the_environment_that_the_file_gives(tmp_path: Path, port: int) -> None:
    content = demo(port)
    application = content["applications"][0]
    application["args"]["access"] = {"keys_env": "KEYS_OF_A_TEST"}
    application["runtime_env"] = {"env_vars": {"KEYS_OF_A_TEST": key_line("me", new_key())}}
    code, output = check(tmp_path, content)
    assert (code, "warning" in output) == (0, False)
