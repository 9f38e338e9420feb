"""`manta check`: what a service file has wrong, before anything is started."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from app.cli.errors import fail, user_errors

BUILDER = "app.main:build"


def check(file: Annotated[Path, typer.Argument(help="A service file, as `serve run` takes it.")]) -> None:
    """Validate a service file and see whether its port is free."""
    from ray.serve.schema import ServeDeploySchema

    with user_errors():
        text = file.read_text()
    try:
        content = yaml.safe_load(text)
        schema = ServeDeploySchema.model_validate(content)
    except yaml.YAMLError as error:
        raise fail(f"{file}: {error}") from None
    except ValidationError as error:
        raise fail("\n".join(_problems(error, str(file)))) from None
    problems = [
        problem
        for application in schema.applications
        if application.import_path == BUILDER
        for problem in _check_args(application.args, f"{file}: {application.name}: args")
    ]
    host, port = schema.http_options.host, schema.http_options.port
    if not problems and _is_taken(host, port):
        end_or_choose = "end what uses it, or choose another under http_options"
        problems.append(f"{file} itself is right, but port {port} on {host} is in use; {end_or_choose}")
    if problems:
        raise fail("\n".join(problems))
    typer.echo(f"{file} is right; its models are looked up when it is started", err=True)


def _check_args(args: Any, where: str) -> list[str]:
    from app.config import ServiceConfig

    try:
        ServiceConfig.model_validate(args)
    except ValidationError as error:
        return _problems(error, where)
    return []


def _problems(error: ValidationError, where: str) -> list[str]:
    return [": ".join(filter(None, (where, ".".join(map(str, each["loc"])), each["msg"]))) for each in error.errors()]


def _is_taken(host: str, port: int) -> bool:
    """Serve's proxy would not notice: it shares its port with whoever has it already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False
