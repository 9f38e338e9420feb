"""A service on a socket, for commands that are its clients."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

from app.transport import EngineClient
from tests.app.openai.conftest import AppOver, app_over, model_config, tokenizer

__all__ = ["app_over", "model_config", "tokenizer"]

Serve = Callable[[EngineClient], str]


@pytest.fixture
def serve_app() -> Iterator[Callable[[Any], str]]:
    """Serves an ASGI application from a thread; returns the address."""
    started: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(app: Any) -> str:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        started.append((server, thread))
        deadline = time.monotonic() + 180
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server, thread in started:
        server.should_exit = True
        thread.join()


@pytest.fixture
def serve(app_over: AppOver, serve_app: Callable[[Any], str]) -> Serve:
    """Serves a client of ours."""
    return lambda client: serve_app(app_over(client))
