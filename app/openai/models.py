"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from app.openai.errors import json_response
from app.openai.served_model import ServedModel
from app.openai.service import Service


async def list_models(service: Service, request: Request) -> Response:
    return json_response({"object": "list", "data": [_card(model) for model in service.models.values()]})


async def show_model(service: Service, request: Request) -> Response:
    return json_response(_card(service.model(request.path_params["model_id"])))


def _card(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "manta",
        "root": model.model_config.name,
        "parent": None,
        "max_model_len": model.model_config.max_model_len,
    }
