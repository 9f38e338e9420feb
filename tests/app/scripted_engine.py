"""An engine whose tokens are known: a request's output i is its first prompt token + i. For tests of the transport."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter

from app.replica import LLMReplica
from engine.config import EngineConfig
from engine.kv_cache.events import BlockStored, KVEvent
from engine.outputs import EngineLoad, EngineOutput
from engine.request import EngineRequest, FinishReason
from engine.sampling_params import InvalidParameter, SamplingParams

HANG = 999_999
"""A prompt that starts with this token never gets one."""


class Step(NamedTuple):
    """What listeners read of a CoreStep."""

    outputs: list[EngineOutput]
    kv_events: list[KVEvent]
    load: EngineLoad


class ScriptedCore:
    """AsyncEngineCore's interface; a step is a turn of the event loop every step_s seconds."""

    def __init__(self, config: EngineConfig, step_s: float, stall_timeout_s: float | None) -> None:
        self.config = config
        self.has_ended = False
        self.registry = CollectorRegistry()
        self.steps = Counter("scripted_steps", "Steps", registry=self.registry)
        self.aborted: list[str] = []
        self._step_s = step_s
        self._running: dict[str, tuple[EngineRequest, Callable[[EngineOutput], None], int]] = {}
        self._listeners: list[Callable[[Step], None]] = []
        self._received = 0
        self._blocks: list[bytes] = []
        self._events: list[KVEvent] = []
        self._outputs: list[EngineOutput] = []
        self._task: asyncio.Task[None] | None = None
        self._stall_timeout_s = stall_timeout_s
        self._hangs_since: float | None = None

    def load(self) -> EngineLoad:
        running = min(len(self._running), self.config.max_num_seqs)
        return EngineLoad(running, len(self._running) - running, 0, running, 100, self._received)

    def submit(self, request: EngineRequest, sink: Callable[[EngineOutput], None]) -> None:
        self.check_health()
        if request.prompt_token_ids == (0,):
            raise InvalidParameter("prompt", "prompt: token 0 is refused")
        self._received += 1
        self._running[request.request_id] = (request, sink, len(request.output_token_ids))
        block = request.request_id.encode()
        self._blocks.append(block)
        self._events.append(BlockStored((block,), None))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in list(request_ids):
            if request_id in self._running:
                self.aborted.append(request_id)
                _, sink, _ = self._running.pop(request_id)
                sink(EngineOutput(request_id, finish_reason=FinishReason.ABORT))

    def add_step_listener(self, listener: Callable[[Step], None]) -> None:
        self._listeners.append(listener)

    async def kv_snapshot(self) -> Sequence[BlockStored]:
        return [BlockStored(tuple(self._blocks), None)] if self._blocks else []

    def check_health(self) -> None:
        if self.has_ended:
            raise RuntimeError("the engine ended")
        hangs_since, timeout_s = self._hangs_since, self._stall_timeout_s
        if hangs_since is not None and timeout_s is not None and time.monotonic() - hangs_since >= timeout_s:
            raise RuntimeError("the engine makes no steps")

    def die(self) -> None:
        self.has_ended = True
        for request_id, (_, sink, _) in list(self._running.items()):
            sink(EngineOutput(request_id, finish_reason=FinishReason.ERROR, error="dead"))
        self._running.clear()

    def hang(self) -> None:
        """The step that runs now never ends."""
        self._hangs_since = time.monotonic()

    def fail(self, request_id: str) -> None:
        """A fault of one request alone, such as logits that are no numbers."""
        _, sink, _ = self._running.pop(request_id)
        sink(EngineOutput(request_id, finish_reason=FinishReason.ERROR, error="its step failed"))

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        if self._hangs_since is not None:
            await asyncio.Event().wait()
        self.abort(list(self._running))

    async def _run(self) -> None:
        while self._running:
            await asyncio.sleep(self._step_s)
            if self._hangs_since is not None:
                await asyncio.Event().wait()
            self.steps.inc()
            for request_id, (request, sink, done) in list(self._running.items()):
                if request.prompt_token_ids[0] == HANG:
                    continue
                last = done + 1 == request.params.max_tokens
                token = request.prompt_token_ids[0] + done
                self._running[request_id] = (request, sink, done + 1)
                if last:
                    del self._running[request_id]
                sink(EngineOutput(request_id, (token,), finish_reason=FinishReason.LENGTH if last else None))
            events, self._events = self._events, []
            for listener in self._listeners:
                listener(Step([], events, self.load()))


class ScriptedReplica(LLMReplica):
    """An LLMReplica with a ScriptedCore, and questions for tests to ask."""

    STEP_S = 0.002

    def _load_engine(self, config: EngineConfig, stall_timeout_s: float | None) -> ScriptedCore:  # type: ignore[override]
        return ScriptedCore(config, self.STEP_S, stall_timeout_s)

    async def state(self, pinned_to: str) -> dict[str, object]:
        core = self._core
        return {
            "pid": __import__("os").getpid(),
            "running": sorted(core._running),
            "aborted": list(core.aborted),
            "blocks": list(core._blocks),
            "sessions": sorted(self._sessions),
        }

    async def end_sessions(self, pinned_to: str) -> None:
        """Breaks every stream as if the connection was lost."""
        for session in list(self._sessions.values()):
            session.close("broken by a test")

    async def kill_engine(self, pinned_to: str) -> None:
        self._core.die()

    async def hang_engine(self, pinned_to: str) -> None:
        self._core.hang()

    async def hang_loop(self, pinned_to: str) -> None:
        """As a step would that never gives the interpreter's lock back."""
        asyncio.get_running_loop().call_later(0.1, threading.Event().wait)


class LoneReplica(ScriptedReplica):
    """A replica without Ray, in the test's own process, which it leaves alone.

    Attributes:
        gave_up: set where it would have ended the process.
    """

    def __init__(self) -> None:
        super().__init__(EngineConfig(model="scripted", max_num_seqs=4), 3, 10.0)
        self.gave_up = asyncio.Event()

    def _exit_process(self) -> None:
        self.gave_up.set()
        self._engine_watch.cancel()

    def __del__(self) -> None:  # type: ignore[override]
        """Serve awaits the replica's; the garbage collector cannot."""


def request(request_id: str, first_token: int = 1, max_tokens: int = 5) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=(first_token, 7, 8),
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
    )
