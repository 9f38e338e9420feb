"""`manta check`: what a service file has wrong, before anything is started."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import sys
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from app.cli.errors import fail, user_errors

if TYPE_CHECKING:
    from ray.serve.schema import HTTPOptionsSchema, gRPCOptionsSchema

    from app.config import Access

BUILDER = "app.main:build"


def is_ours(import_path: str) -> bool:
    """Whether an application is Manta's; Serve takes a path with a dot before its last name as well."""
    return import_path in (BUILDER, BUILDER.replace(":", "."))


def check(file: Annotated[Path, typer.Argument(help="A service file, as `serve run` takes it.")]) -> None:
    """Validate a service file and see whether its port is free."""
    from ray.serve.schema import ServeDeploySchema

    with user_errors():
        text = file.read_text()
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise fail(f"{file}: {error}") from None
    problems = list(_unknown_keys(content, str(file)))
    try:
        schema = ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        raise fail("\n".join(problems + _problems(error, str(file)))) from None
    ours = [application for application in schema.applications if is_ours(application.import_path)]
    if not ours:
        found = ", ".join(repr(application.import_path) for application in schema.applications) or "none"
        problems.append(f"{file}: no application's import_path is Manta's, {BUILDER!r}; there is {found}")
    for application in ours:
        environ = os.environ | (application.runtime_env.get("env_vars") or {})
        problems += _check_args(application.args, environ, f"{file}: {application.name}: args")
    problems += _tls_problems(schema.http_options, f"{file}: http_options")
    host, port = schema.http_options.host, schema.http_options.port
    if not problems:
        problems += _port_problems(host, port, str(file), "http_options", f"port {port} on {host}")
    problems += _grpc_problems(schema.grpc_options, port, str(file), look_at_port=not problems)
    if problems:
        raise fail("\n".join(problems))
    typer.echo(f"{file} is right; its models are looked up when it is started", err=True)


def _check_args(args: Any, environ: Mapping[str, str], where: str) -> list[str]:
    from app.config import ServiceConfig

    try:
        config = ServiceConfig.model_validate(args)
    except ValidationError as error:
        return _problems(error, where)
    return _keys_problems(config.access, environ, f"{where}: access")


def _keys_problems(access: Access, environ: Mapping[str, str], where: str) -> list[str]:
    """Keys that are absent may be there on the nodes that have ingresses, so that this is a warning alone."""
    from app.api_keys import KeysUnreadable, load_keys

    absent = None
    if access.keys_file is not None and not os.path.exists(access.keys_file):
        absent = f"keys_file={access.keys_file!r}: there is no such file here"
    if access.keys_env is not None and access.keys_env not in environ:
        absent = f"keys_env={access.keys_env!r}: there is no such environment variable here"
    if absent is not None:
        typer.echo(f"warning: {where}: {absent}; every ingress will need it where it runs", err=True)
        return []
    try:
        load_keys(access, environ)
    except KeysUnreadable as error:
        return [f"{where}: {error}"]
    return []


def _unknown_keys(content: Any, file: str) -> Iterator[str]:
    """Serve's own schema passes over what it does not know, and takes its defaults: the host 0.0.0.0 for one."""
    from ray.serve import schema

    if not isinstance(content, dict):
        return
    yield from _unknown(content, schema.ServeDeploySchema.model_fields, file)
    for name, model in (("http_options", schema.HTTPOptionsSchema), ("grpc_options", schema.gRPCOptionsSchema)):
        yield from _unknown(content.get(name), model.model_fields, f"{file}: {name}")
    for index, application in enumerate(_items(content, "applications")):
        where = f"{file}: applications.{index}"
        yield from _unknown(application, schema.ServeApplicationSchema.model_fields, where)
        for number, deployment in enumerate(_items(application, "deployments")):
            known = schema.DeploymentSchema.model_fields
            yield from _unknown(deployment, known, f"{where}: deployments.{number}")


def _items(content: Any, name: str) -> list[Any]:
    """Of the list of that name, if it is one; Serve's schema says what else is wrong."""
    items = content.get(name) if isinstance(content, dict) else None
    return items if isinstance(items, list) else []


def _unknown(content: Any, known: Collection[str], where: str) -> Iterator[str]:
    for key in content if isinstance(content, dict) else ():
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
            yield f"{where}: unknown key '{key}'; {hint}"


def _tls_problems(options: HTTPOptionsSchema, where: str) -> list[str]:
    """Serve's proxy would not start, again and again."""
    certificate, key = options.ssl_certfile, options.ssl_keyfile
    if certificate is None or key is None:
        return []
    authorities = options.ssl_ca_certs or None
    for name, path in (("ssl_certfile", certificate), ("ssl_keyfile", key), ("ssl_ca_certs", authorities)):
        if path is not None and not os.access(path, os.R_OK):
            return [f"{where}: {name}={path!r}: there is no such file, or it cannot be read"]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, options.ssl_keyfile_password or "")
    except (ssl.SSLError, OSError) as error:
        return [f"{where}: ssl_certfile and ssl_keyfile are no certificate and its key ({error})"]
    try:
        if authorities is not None:
            context.load_verify_locations(authorities)
    except (ssl.SSLError, OSError) as error:
        return [f"{where}: ssl_ca_certs={authorities!r}: has no certificates ({error})"]
    return []


def _grpc_problems(options: gRPCOptionsSchema, http_port: int, file: str, *, look_at_port: bool) -> list[str]:
    """Serve starts a gRPC proxy where it is told whose methods it serves; on all interfaces, always."""
    from ray.serve.config import gRPCOptions

    if "." not in sys.path:
        sys.path.insert(0, ".")  # as `serve run` does, and Ray in the cluster's processes
    problems = []
    for name in options.grpc_servicer_functions:
        try:
            _ = gRPCOptions(grpc_servicer_functions=[name]).grpc_servicer_func_callable
        except Exception as error:  # of whichever kind: Serve imports what the file names
            reason = error.__cause__ or error
            problems.append(f"{file}: grpc_options: grpc_servicer_functions: {name!r} cannot be imported ({reason})")
    if not options.grpc_servicer_functions or problems or not look_at_port:
        return problems
    if options.port == http_port:
        return [f"{file}: grpc_options: port: {http_port} is the port of http_options; choose another"]
    host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    return _port_problems(host, options.port, file, "grpc_options", f"port {options.port} for gRPC")


def _problems(error: ValidationError, where: str) -> list[str]:
    return [": ".join(filter(None, (where, ".".join(map(str, each["loc"])), each["msg"]))) for each in error.errors()]


def _port_problems(host: str, port: int, file: str, where: str, shown: str) -> list[str]:
    """Serve's proxies would not notice a port that is taken: they share theirs with whoever has them already."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                choose = f"end what uses it, or choose another under {where}"
                return [f"{file} itself is right, but {shown} is in use; {choose}"]
            return [f"{file}: {where}: {shown} cannot be listened on ({error.strerror})"]
        except (OverflowError, UnicodeError) as error:
            return [f"{file}: {where}: {shown} cannot be listened on ({error})"]
    return []
