"""A service on a socket, for commands that are its clients."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import uvicorn

from app.transport import EngineClient
from tests.app.openai.conftest import AppOver, app_over, model_config, tokenizer

__all__ = ["app_over", "model_config", "tokenizer"]

Serve = Callable[[EngineClient], str]


@pytest.fixture
def serve(app_over: AppOver) -> Iterator[Serve]:
    """Serves a client of ours from a thread; returns the address."""
    started: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(client: EngineClient) -> str:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app_over(client), log_level="error", lifespan="off"))
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
