"""One HTTP request's prompts on their way through the engines, and back to text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import cast

from app.openai.errors import ApiError
from app.transport import EngineClient, EngineFailed, NoReplica, QueueFull
from engine.output_processor import OutputProcessor
from engine.outputs import EngineOutput, RequestOutput
from engine.processor import ProcessedRequest
from engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Delta = tuple[int, RequestOutput]
"""A prompt's index, and what is new of it."""

Arrival = tuple[int, list[EngineOutput]]


class Generation:
    """Runs the prompts of one HTTP request, each of them as one call of the client.

    Used by one task. `steps` may be iterated once; whoever stops early closes it, which aborts what still runs.

    Args:
        idle_timeout: seconds that may pass without anything new; None is any number.
        pause: seconds that it waits after anything new but the end, so that what comes meanwhile comes together.
        on_first_token: called when it comes.
        on_tokens: called with the number of tokens that came and are part of the answer.
        on_refused: called with the index of a prompt that no replica took.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        processed: Sequence[ProcessedRequest],
        *,
        idle_timeout: float | None = None,
        pause: Callable[[], float] = lambda: 0.0,
        on_first_token: Callable[[], None] = lambda: None,
        on_tokens: Callable[[int], None] = lambda _: None,
        on_refused: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._processed = processed
        self._assemblers = [OutputProcessor(each, tokenizer) for each in processed]
        self._idle_timeout = idle_timeout
        self._pause = pause
        self._on_first_token = on_first_token
        self._on_tokens = on_tokens
        self._on_refused = on_refused
        self._started = False
        self._offered = 0  # prompts that replicas have, or are asked to take
        self._ended = asyncio.Semaphore(0)  # lets one that was refused try again for each that ends
        self._waiting: set[int] = set()  # those that were refused
        self._held = {index for index, each in enumerate(processed) if each.params.prompt_logprobs is not None}

    async def steps(self) -> AsyncGenerator[list[Delta], None]:
        """What is new, as it comes; all that is pending in one item. Ends when every completion has ended.

        Where a prompt's logprobs were asked for they come first: of n completions, a later one may run ahead of the
        first, which computes them.

        Raises:
            ApiError, TransportError: a completion could not be finished; a 504 where nothing new came for too long.
        """
        async with aclosing(self._outputs()) as arrivals:
            while (arrived := await self._next(arrivals)) is not None:
                deltas = []
                for index, outputs in arrived:
                    if not self._started and any(output.new_token_ids for output in outputs):
                        self._started = True
                        self._on_first_token()
                    assembler = self._assemblers[index]
                    if any(output.prompt_logprobs is not None for output in outputs):
                        # Of as many tokens as a step has: some 100 ms.
                        delta = await asyncio.to_thread(assembler.update, outputs)
                    else:
                        delta = assembler.update(outputs)
                    if aborts := assembler.take_aborts():
                        self._client.abort(aborts)
                    if delta is None:
                        continue
                    _raise_for_failure(delta)
                    if tokens := sum(len(completion.token_ids) for completion in delta.outputs):
                        self._on_tokens(tokens)
                    if index in self._held:
                        delta = assembler.snapshot()
                        if delta.prompt_logprobs is None and not assembler.finished:
                            continue
                        self._held.discard(index)
                    deltas.append((index, delta))
                if deltas:
                    yield deltas
                if all(assembler.finished for assembler in self._assemblers):
                    return
                if pause := self._pause():
                    await asyncio.sleep(pause)

    async def _next(self, arrivals: AsyncGenerator[list[Arrival], None]) -> list[Arrival] | None:
        """What comes next; None is the end."""
        limit = asyncio.timeout(self._idle_timeout)
        try:
            async with limit:
                return await anext(arrivals, None)
        except TimeoutError:
            if not limit.expired():
                raise
        raise ApiError(504, f"no token came for {self._idle_timeout:g} seconds", code="idle_timeout")

    async def results(self) -> list[RequestOutput]:
        """Runs to the end; one output a prompt."""
        async with aclosing(self.steps()) as steps:
            async for _ in steps:
                pass
        return self.outputs()

    def outputs(self) -> list[RequestOutput]:
        """All there is so far."""
        return [assembler.snapshot() for assembler in self._assemblers]

    async def _outputs(self) -> AsyncGenerator[list[Arrival], None]:
        streams = [self._of_prompt(index) for index in range(len(self._processed))]
        if len(streams) == 1:
            async with aclosing(streams[0]) as steps:
                async for outputs in steps:
                    yield [(0, outputs)]
            return
        async with aclosing(_merged(streams)) as merged:
            async for arrived in merged:
                yield arrived

    async def _of_prompt(self, index: int) -> AsyncGenerator[list[EngineOutput], None]:
        """The outputs of one prompt. Where only those beside it fill the replicas, it is offered again as they end."""
        while True:
            self._offered += 1
            try:
                async with _closing(self._client.generate(self._processed[index].children)) as steps:
                    async for outputs in steps:
                        yield outputs
                self._ended.release()
                return
            except (NoReplica, QueueFull) as refusal:  # only ever before the first output
                self._waiting.add(index)
                if isinstance(refusal, NoReplica) or self._offered == 1:
                    for refused in self._waiting:
                        self._on_refused(refused)
                    raise
            finally:
                self._offered -= 1
            await self._ended.acquire()
            self._waiting.discard(index)


async def _merged(streams: Sequence[AsyncGenerator[list[EngineOutput], None]]) -> AsyncGenerator[list[Arrival], None]:
    """The items of several streams with their stream's index; all that are there in one item."""
    arrived: list[Arrival] = []
    news = asyncio.Event()

    async def pump(index: int, stream: AsyncGenerator[list[EngineOutput], None]) -> None:
        async with aclosing(stream):
            async for outputs in stream:
                arrived.append((index, outputs))
                news.set()

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(lambda _: news.set())
    try:
        running = True
        while running:
            await news.wait()
            news.clear()
            ended = [task for task in tasks if task.done()]
            for task in ended:
                task.result()
            running = len(ended) < len(tasks)
            taken, arrived = arrived, []
            if taken:
                yield taken
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _closing(stream: AsyncIterator[list[EngineOutput]]) -> aclosing[AsyncGenerator[list[EngineOutput], None]]:
    """A client's iterators are generators, which is what closing them is about."""
    return aclosing(cast(AsyncGenerator[list[EngineOutput], None], stream))


def _raise_for_failure(output: RequestOutput) -> None:
    for completion in output.outputs:
        if completion.finish_reason == "error":
            # What the engine says is for those who run it.
            logger.error("engine_failed request_id=%s error=%s", output.request_id, output.error)
            raise EngineFailed("the engine met a fault of its own while it served the request")
        if completion.finish_reason == "abort":
            # Not ours: a client that went away reads nothing, and a stop string ends as `stop`.
            raise ApiError(503, "the request was ended before it was done; try again", code="aborted")
