"""OpenAI's HTTP interface as an ASGI application over any EngineClient."""

from app.openai.application import create_app
from app.openai.metrics import IngressMetrics
from app.openai.served_model import Limits, ServedModel

__all__ = ["IngressMetrics", "Limits", "ServedModel", "create_app"]
