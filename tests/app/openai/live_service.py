"""The HTTP application over a real engine on a tiny model, behind a real server, in this process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from engine import AsyncEngineCore, EngineConfig
from engine.tokenizer import Tokenizer
from tests.app.openai.conftest import app_over_engine

MODEL = "tiny"
ANSWER_S = 30.0
"""More than any request of these tests takes; one that is not answered then is not going to be."""


@dataclass
class LiveService:
    """A server on a thread of its own, with the event loop of which the engine is used."""

    url: str
    app: FastAPI
    core: AsyncEngineCore
    loop: asyncio.AbstractEventLoop

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """On the server's loop."""
        asyncio.run_coroutine_threadsafe(work, self.loop).result(ANSWER_S)

    def check_idle(self) -> None:
        """Nothing runs or waits any more, no block is held, and the bookkeeping agrees with itself."""
        give_up = time.monotonic() + ANSWER_S
        while True:
            load = self.core.load()
            if load.running == load.waiting == load.kv_blocks_used == load.queued_prefill_tokens == 0:
                break
            assert time.monotonic() < give_up, load
            time.sleep(0.01)
        self.run(self.core.check_integrity())
        assert self.core._sinks == {}


@contextmanager
def live_service(tiny_folder: Path, tokenizer: Tokenizer) -> Iterator[LiveService]:
    """Short contexts and few choices: what clients ask for at random shall not take long."""
    config = EngineConfig(
        model=str(tiny_folder),
        load_format="dummy",
        dtype="float32",
        max_model_len=256,
        num_kv_blocks=128,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        num_threads=1,
        debug_integrity=True,
    )
    core = AsyncEngineCore.from_config(config)
    app = app_over_engine(core, tokenizer, max_body_bytes=1 << 20, max_choices=4)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    loop = asyncio.new_event_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve([listener])), daemon=True)
    thread.start()
    try:
        yield LiveService(f"http://127.0.0.1:{listener.getsockname()[1]}", app, core, loop)
    finally:
        server.should_exit = True
        thread.join(ANSWER_S)
        asyncio.run(core.shutdown())
        loop.close()
