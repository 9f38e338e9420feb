"""`manta check`: what a service file has wrong, before anything is started."""

from __future__ import annotations

import importlib
import os
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from app.cli.errors import fail, user_errors

if TYPE_CHECKING:
    from ray.serve.schema import HTTPOptionsSchema, gRPCOptionsSchema

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
    problems += _tls_problems(schema.http_options, f"{file}: http_options")
    host, port = schema.http_options.host, schema.http_options.port
    if not problems and _is_taken(host, port):
        end_or_choose = "end what uses it, or choose another under http_options"
        problems.append(f"{file} itself is right, but port {port} on {host} is in use; {end_or_choose}")
    problems += _grpc_problems(schema.grpc_options, port, str(file), look_at_port=not problems)
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


def _tls_problems(options: HTTPOptionsSchema, where: str) -> list[str]:
    """Serve's proxy would not start, again and again."""
    certificate, key = options.ssl_certfile, options.ssl_keyfile
    if certificate is None or key is None:
        return []
    for name, path in (("ssl_certfile", certificate), ("ssl_keyfile", key)):
        if not os.access(path, os.R_OK):
            return [f"{where}: {name}={path!r}: there is no such file, or it cannot be read"]
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            certificate, key, options.ssl_keyfile_password or ""
        )
    except (ssl.SSLError, OSError) as error:
        return [f"{where}: ssl_certfile and ssl_keyfile are no certificate and its key ({error})"]
    return []


def _grpc_problems(options: gRPCOptionsSchema, http_port: int, file: str, *, look_at_port: bool) -> list[str]:
    """Serve starts a gRPC proxy where it is told whose methods it serves; on all interfaces, always."""
    problems = []
    for name in options.grpc_servicer_functions:
        module, _, function = name.rpartition(".")
        try:
            getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            problems.append(f"{file}: grpc_options: grpc_servicer_functions: {name!r} cannot be imported ({error})")
    if not options.grpc_servicer_functions or problems or not look_at_port:
        return problems
    if options.port == http_port:
        return [f"{file}: grpc_options: port: {http_port} is the port of http_options; choose another"]
    if _is_taken("::" if socket.has_dualstack_ipv6() else "0.0.0.0", options.port):
        end_or_choose = "end what uses it, or choose another under grpc_options"
        return [f"{file} itself is right, but port {options.port} for gRPC is in use; {end_or_choose}"]
    return []


def _problems(error: ValidationError, where: str) -> list[str]:
    return [": ".join(filter(None, (where, ".".join(map(str, each["loc"])), each["msg"]))) for each in error.errors()]


def _is_taken(host: str, port: int) -> bool:
    """Serve's proxies would not notice: they share their ports with whoever has them already."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False
