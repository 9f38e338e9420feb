"""An EngineClient whose tokens a test decides, for what no model shows on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.outputs import EngineOutput, TokenLogprobs
from engine.request import EngineRequest, FinishReason

Script = Callable[[EngineRequest], Sequence[tuple[int, ...]]]
"""What each step gives a request: its new tokens."""


@dataclass
class ScriptedClient:
    """Runs the script of each request, one step of all of them at a time.

    Attributes:
        pauses: before a call's first, second, … step, in seconds or until an event; none after the last of them.
        error: raised after `error_after` steps.
        prompt_logprobs_at: the step that gives them.
        requests: all that came.
        aborted: ids that it was told to abort.
        closed: calls that ended, in whichever way.
    """

    script: Script
    pauses: Sequence[float | asyncio.Event] = ()
    error: Exception | None = None
    error_after: int = 0
    prompt_logprobs_at: int = 0
    requests: list[EngineRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    closed: int = 0

    async def generate(self, requests: Sequence[EngineRequest]) -> AsyncIterator[list[EngineOutput]]:
        self.requests += requests
        scripts = {request.request_id: list(self.script(request)) for request in requests}
        step = 0
        try:
            while True:
                if self.error is not None and step == self.error_after:
                    raise self.error
                if step < len(self.pauses):
                    await self._pause(self.pauses[step])
                await asyncio.sleep(0)
                outputs = [
                    self._output(request, scripts[request.request_id], step)
                    for request in requests
                    if request.request_id not in self.aborted and step < len(scripts[request.request_id])
                ]
                if not outputs:
                    return
                yield outputs
                step += 1
        finally:
            self.closed += 1

    def abort(self, request_ids: Iterable[str]) -> None:
        self.aborted += request_ids

    async def _pause(self, pause: float | asyncio.Event) -> None:
        if isinstance(pause, asyncio.Event):
            await pause.wait()
        else:
            await asyncio.sleep(pause)

    def _output(self, request: EngineRequest, script: list[tuple[int, ...]], step: int) -> EngineOutput:
        tokens = script[step]
        last = step + 1 == len(script)
        reason = FinishReason.STOP if tokens and tokens[-1] in request.eos_token_ids else FinishReason.LENGTH
        params = request.params
        return EngineOutput(
            request.request_id,
            tokens,
            logprobs=None if params.logprobs is None else _logprobs(tokens, params.logprobs),
            prompt_logprobs=_logprobs(request.prompt_token_ids[1:], params.prompt_logprobs)
            if params.prompt_logprobs is not None and step == self.prompt_logprobs_at
            else None,
            finish_reason=reason if last else None,
            num_cached_tokens=1,
        )


def _logprobs(tokens: Sequence[int], k: int) -> TokenLogprobs:
    """The token at -0.5, the k after it in the vocabulary at -1, -2, …"""
    ids = np.array([[token, *range(token + 1, token + 1 + k)] for token in tokens], np.int32).reshape(-1, 1 + k)
    values = np.tile(np.array([-0.5, *(-1.0 - i for i in range(k))], np.float32), (len(tokens), 1))
    return TokenLogprobs(ids, values, np.ones(len(tokens), np.int32))
