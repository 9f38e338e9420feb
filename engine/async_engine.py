"""The engine with text on both sides, for an asyncio program."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from engine.async_engine_core import AsyncEngineCore
from engine.config import EngineConfig
from engine.output_processor import OutputProcessor
from engine.outputs import RequestOutput
from engine.processor import ProcessedRequest, Processor, Prompt
from engine.request import Clock
from engine.sampling_params import InvalidParameter, SamplingParams
from engine.tokenizer import Tokenizer, load_tokenizer


class AsyncEngine:
    """Streams completions of prompts and chats. Used on one asyncio loop.

    Example:
        engine = AsyncEngine("demo")
        async for delta in engine.generate("The capital of France is", SamplingParams(temperature=0)):
            print(delta.outputs[0].text, end="")
        await engine.shutdown()
    """

    def __init__(self, model: str, *, clock: Clock = time.time, **engine_args: Any) -> None:
        """Loads the model; blocks for as long as that takes. Arguments: see EngineConfig."""
        config = EngineConfig.from_args(model, engine_args)
        self.core = AsyncEngineCore.from_config(config, clock=clock)
        self.tokenizer: Tokenizer = load_tokenizer(self.core.model_config.path)
        self.tokenizer.prepare_chats()
        self._processor = Processor(
            self.core.model_config,
            self.tokenizer,
            block_size=config.block_size,
            max_logprobs=config.max_logprobs,
            refuse_excess_max_tokens=config.refuse_excess_max_tokens,
            clock=clock,
        )
        self._running: dict[str, list[str]] = {}

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Streams a prompt's completions as deltas: each item holds only what is new.

        Closing the iterator early aborts the request.

        Raises:
            InvalidParameter: at once, where the prompt or a parameter is refused.
        """
        return self._stream(
            self._processor.process(
                prompt, sampling_params, request_id=request_id, priority=priority, cache_salt=cache_salt
            )
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The same for a conversation, rendered by the model's chat template."""
        return self._stream(
            self._processor.process_chat(
                messages,
                sampling_params,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                request_id=request_id,
                priority=priority,
                cache_salt=cache_salt,
            )
        )

    def abort(self, request_id: str) -> None:
        """Ends a request; its stream ends with the finish_reason `abort`. An unknown id is ignored."""
        self.core.abort(self._running.get(request_id, ()))

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Refuses new requests, lets running ones go on for drain_timeout seconds, aborts the rest and ends."""
        await self.core.shutdown(drain_timeout)

    def _stream(self, processed: ProcessedRequest) -> AsyncIterator[RequestOutput]:
        self._check_unused(processed.request_id)
        self.core.check_health()
        return self._deltas(processed)

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._running:
            raise InvalidParameter.of("request_id", request_id, "is in use by a running request")

    async def _deltas(self, processed: ProcessedRequest) -> AsyncIterator[RequestOutput]:
        self._check_unused(processed.request_id)  # again: another stream may have been begun since this one was made
        assembler = OutputProcessor(processed, self.tokenizer)
        self._running[processed.request_id] = [child.request_id for child in processed.children]
        steps = self.core.generate(processed.children)
        try:
            async for outputs in steps:
                delta = assembler.update(outputs)
                self.core.abort(assembler.take_aborts())
                if delta is not None:
                    yield delta
                if assembler.finished:
                    break
        finally:
            await steps.aclose()
            del self._running[processed.request_id]
