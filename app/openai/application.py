"""The ASGI application: which path is served by which function, and its OpenAPI document."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from app.openai import conversation, protocol, responses
from app.openai.auth import AccessControl, KeyRing
from app.openai.body import BodyDeadline
from app.openai.chat import create_chat_completion
from app.openai.completions import create_completion
from app.openai.envelope import Envelope
from app.openai.errors import ApiError, json_response
from app.openai.intake import Gate, Intake
from app.openai.metrics import IngressMetrics
from app.openai.models import list_models, show_model
from app.openai.served_model import Limits, ServedModel
from app.openai.service import Service
from app.openai.sse import Pace
from app.openai.tokenize import detokenize, tokenize
from app.transport import TransportError
from app.version import manta_version
from engine.request import Clock

Endpoint = Callable[[Service, Request], Awaitable[Response]]

_ERRORS: dict[int, str] = {
    400: "The request is wrong; `param` names the field.",
    401: "There is no API key.",
    403: "The API key is not known.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too long.",
    429: "Too many requests wait, or a limit of the key is reached; see Retry-After.",
    500: "A fault of the server.",
    503: "No replica can serve the request, or the service is shutting down.",
    504: "The request took too long.",
}


def create_app(
    models: Mapping[str, ServedModel],
    limits: Limits,
    metrics: IngressMetrics,
    health: Callable[[], Awaitable[None]],
    gather_metrics: Callable[[], Awaitable[bytes]],
    *,
    ready: Callable[[], Awaitable[None]] | None = None,
    keys: KeyRing | None = None,
    intake: Intake | None = None,
    shows_request_id: bool = True,
    clock: Clock = time.time,
) -> FastAPI:
    """The service's HTTP interface.

    Args:
        models: by the names that clients use; the first one is shown first. A live mapping may change.
        health: returns when requests can be served, raises otherwise (GET /health answers 503).
        gather_metrics: everything that GET /metrics answers, in Prometheus' text format; this ingress's own
            `metrics.registry` is the callee's to include.
        ready: the same for GET /ready; raises as well once this process is about to end. None is `health`.
        keys: who may use it, but for auth.OPEN_PATHS; None is everyone.
        intake: what refuses requests once this process is about to end; None never does.
        shows_request_id: answers bear `x-request-id`; False where the server in front of it puts it there.
        clock: seconds since the epoch.
    """
    service = Service(models=models, limits=limits, metrics=metrics, clock=clock, pace=Pace(limits.coalesce))
    app = FastAPI(title="Manta", version=manta_version(), docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service  # for who serves it in other ways too
    refusals = () if keys is None else (401, 403, 429)

    def serve(method: str, path: str, endpoint: Endpoint, answer: type[BaseModel], **documented: Any) -> None:
        async def handler(request: Request) -> Response:
            return await endpoint(service, request)

        app.add_api_route(
            path,
            handler,
            methods=[method],
            name=endpoint.__name__,
            response_model=answer,
            responses=_documented_errors(400, 404, *refusals, *documented.pop("errors", ())),
            openapi_extra=documented,
        )

    generates = (408, 413, 429, 500, 503, 504)
    serve(
        "POST",
        "/v1/chat/completions",
        create_chat_completion,
        responses.ChatCompletionResponse,
        errors=generates,
        requestBody=_json(protocol.ChatCompletionRequest),
    )
    serve(
        "POST",
        "/v1/completions",
        create_completion,
        responses.CompletionResponse,
        errors=generates,
        requestBody=_json(protocol.CompletionRequest),
    )
    serve("GET", "/v1/models", list_models, responses.ModelList)
    serve("GET", "/v1/models/{model_id:path}", show_model, responses.ModelCard, parameters=[_MODEL_ID])
    serve(
        "POST",
        "/tokenize",
        tokenize,
        responses.TokenizeResponse,
        errors=(408, 413),
        requestBody=_json(protocol.TokenizeTextRequest, protocol.TokenizeChatRequest),
    )
    serve(
        "POST",
        "/detokenize",
        detokenize,
        responses.DetokenizeResponse,
        errors=(408, 413),
        requestBody=_json(protocol.DetokenizeRequest),
    )

    @app.get("/health", response_model=responses.HealthResponse, responses=_documented_errors(503))
    async def show_health() -> Response:
        return await _answer_check(health, code="unhealthy")

    @app.get("/ready", response_model=responses.HealthResponse, responses=_documented_errors(503))
    async def show_ready() -> Response:
        return await _answer_check(ready or health, code="not_ready")

    @app.get("/version", response_model=responses.VersionResponse)
    async def show_version() -> Response:
        return json_response({"version": manta_version()})

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def show_metrics() -> Response:
        return Response(await gather_metrics(), headers={"content-type": CONTENT_TYPE_LATEST})

    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_middleware(BodyDeadline, seconds=limits.body_timeout)
    app.add_middleware(AccessControl, keys=keys, clock=clock)
    app.add_middleware(Gate, intake=intake or Intake())
    app.add_middleware(Envelope, metrics=metrics, clock=clock, shows_id=shows_request_id)
    if limits.cors_origins:
        # Before everything else: refusals need the headers too, and a browser's question brings no key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=limits.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=_HEADERS_FOR_SCRIPTS,
        )
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


async def _answer_check(check: Callable[[], Awaitable[None]], *, code: str) -> Response:
    try:
        await check()
    except Exception as error:
        reason = str(error) if isinstance(error, TransportError) else "requests cannot be served"
        raise ApiError(503, reason, code=code) from error
    return json_response({"status": "ok"})


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no {request.method} {request.url.path[:200]}"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed here; use {(error.headers or {}).get('Allow', 'another')}"
    return ApiError(error.status_code, message, headers=error.headers).response()


_HEADERS_FOR_SCRIPTS = (
    "retry-after",
    "x-request-id",
    *(f"x-ratelimit-{value}-{kind}" for kind in ("requests", "tokens") for value in ("limit", "remaining", "reset")),
)
_MODEL_ID = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
_REQUESTS: tuple[type[BaseModel], ...] = (
    protocol.CompletionRequest,
    protocol.ChatCompletionRequest,
    protocol.TokenizeTextRequest,
    protocol.TokenizeChatRequest,
    protocol.DetokenizeRequest,
    conversation.TextPart,
)
_STREAMS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": responses.ChatCompletionChunk,
    "/v1/completions": responses.CompletionResponse,
}
_REF = "#/components/schemas/{model}"


def _json(*models: type[BaseModel]) -> dict[str, Any]:
    """A request body's entry in the document."""
    refs = [{"$ref": _REF.format(model=model.__name__)} for model in models]
    return {
        "required": True,
        "content": {"application/json": {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}},
    }


def _event(model: type[BaseModel]) -> dict[str, Any]:
    """The entry of one event of a stream, as OpenAPI 3.2 describes them; the last one's data is `[DONE]`."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": _REF.format(model=model.__name__)},
    }
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _documented_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": responses.ErrorResponse, "description": _ERRORS[status]} for status in statuses}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with the bodies that the endpoints read themselves."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        groups: tuple[tuple[type[BaseModel], ...], ...] = (_REQUESTS, tuple(_STREAMS.values()))
        for models in groups:
            _, described = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
            schemas.update(described["$defs"])
        for path, model in _STREAMS.items():
            content = document["paths"][path]["post"]["responses"]["200"]["content"]
            content["text/event-stream"] = {"schema": _event(model)}
        app.openapi_schema = document
    return app.openapi_schema
