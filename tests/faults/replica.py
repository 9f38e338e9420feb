"""A replica with a real engine whose steps fail on demand."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from app.replica import LLMReplica
from app.transport import CallEnd
from engine.config import EngineConfig
from engine.outputs import SchedulerOutput
from engine.protocols import StepHandle
from engine.request import EngineRequest

POISON = "poison"
"""A request whose client's id begins so kills each replica on which it runs."""

PACE_S = 0.004
"""Each step waits so long, so that there is time to break something in the middle of a stream."""


@dataclass(frozen=True, slots=True)
class StepFault:
    """What breaks a step.

    Attributes:
        kind: `exception`, `out_of_memory`, `hang` or `kill` (of the process).
        follows: clients' ids of requests; every step that has one of them breaks. Empty: the next step breaks, once.
        from_token: a request is followed from so many tokens of output on.
    """

    kind: str
    follows: frozenset[str] = frozenset()
    from_token: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What a replica holds.

    Attributes:
        tokens: output tokens of each request that the engine or an open call has, by the client's id.
        ingresses: where the open calls come from, by the client's id.
        load: requests running, requests waiting, KV blocks used.
        sessions: ingresses whose streams are open.
        calls: prompts whose calls are open.
        unfinished: requests that it counts.
        requests: those that the engine knows.
        is_armed: whether a fault is still to come.
    """

    pid: int
    tokens: dict[str, int]
    ingresses: dict[str, str]
    load: tuple[int, int, int]
    sessions: frozenset[str]
    calls: int
    unfinished: int
    requests: int
    is_armed: bool


class FaultyExecutor:
    """An executor whose steps are slowed down and broken before they reach it. Used on the engine's thread."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._specs: dict[str, EngineRequest] = {}
        self.fault: StepFault | None = None
        self.tokens: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, work: SchedulerOutput) -> StepHandle:
        time.sleep(PACE_S)
        for request_id in work.released:
            self._specs.pop(request_id, None)
        self._specs |= {start.spec.request_id: start.spec for start in work.starts}
        for step in work.steps:
            spec = self._specs[step.request_id]
            done = step.num_computed_tokens + step.num_tokens - len(spec.prompt_token_ids)
            self.tokens[spec.client_request_id or ""] = max(0, done)
            if (spec.client_request_id or "").startswith(POISON):
                self._break("kill", work)
        fault = self.fault
        if fault is not None and self._is_hit(fault, work):
            if not fault.follows:
                self.fault = None
            self._break(fault.kind, work)
        return self._inner.submit(work)

    def _is_hit(self, fault: StepFault, work: SchedulerOutput) -> bool:
        if not fault.follows:
            return True
        names = {self._specs[step.request_id].client_request_id for step in work.steps}
        return any(name in names and self.tokens[name] >= fault.from_token for name in fault.follows)

    def _break(self, kind: str, work: SchedulerOutput) -> None:
        match kind:
            case "exception":
                # As late as can be: keys, values and rows are written, and the result is lost.
                self._inner.submit(work).result()
                raise RuntimeError("a fault was injected")
            case "out_of_memory":
                raise torch.OutOfMemoryError("a fault was injected")
            case "hang":
                threading.Event().wait()
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)


class FaultyReplica(LLMReplica):
    """An LLMReplica that tells what it holds and takes faults."""

    def _load_engine(self, config: EngineConfig, stall_timeout_s: float | None) -> Any:
        engine = super()._load_engine(config, stall_timeout_s)
        engine._core._executor = self._executor = FaultyExecutor(engine._core._executor)
        self._placed: dict[str, str] = {}
        return engine

    async def generate(self, requests: tuple[EngineRequest, ...], ingress_id: str, on_trial: bool = False) -> CallEnd:
        name = requests[0].client_request_id or ""
        self._executor.tokens.pop(name, None)
        self._placed[name] = ingress_id
        try:
            return await super().generate(requests, ingress_id, on_trial)
        finally:
            self._placed.pop(name, None)

    async def set_fault(self, fault: StepFault | None, pinned_to: str) -> None:
        self._check_pin(pinned_to)
        self._executor.fault = fault

    async def state(self, pinned_to: str) -> ReplicaState:
        self._check_pin(pinned_to)
        load = self._core.load()
        in_engine = list(self._core._core._scheduler.requests.values())
        names = self._placed.keys() | {request.spec.client_request_id or "" for request in in_engine}
        return ReplicaState(
            pid=os.getpid(),
            tokens={name: self._executor.tokens.get(name, 0) for name in names},
            ingresses=dict(self._placed),
            load=(load.running, load.waiting, load.kv_blocks_used),
            sessions=frozenset(self._sessions),
            calls=sum(len(session.calls) for session in self._sessions.values()),
            unfinished=self._num_unfinished,
            requests=len(in_engine),
            is_armed=self._executor.fault is not None,
        )
