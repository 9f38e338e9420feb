"""The engine for a script: prompts in, completions out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, cast

from tqdm import tqdm

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.output_processor import OutputProcessor
from engine.outputs import RequestOutput
from engine.processor import ProcessedRequest, Processor, Prompt
from engine.request import Clock
from engine.sampling_params import InvalidParameter, SamplingParams
from engine.tokenizer import Tokenizer, load_tokenizer

Message = Mapping[str, Any]


class LLM:
    """Runs batches of prompts to their end. Used from one thread at a time.

    Example:
        llm = LLM("demo")
        print(llm.generate(["The capital of France is"], SamplingParams(temperature=0))[0].outputs[0].text)
    """

    def __init__(self, model: str, *, clock: Clock = time.time, **engine_args: Any) -> None:
        """Finds and loads the model. Arguments: see EngineConfig.

        Raises:
            InvalidParameter: an argument is unknown or out of range, or the model cannot be used with it.
        """
        config = EngineConfig.from_args(model, engine_args)
        self.core = EngineCore.from_config(config, clock=clock)
        self.model_config = self.core.model_config
        self._tokenizer = load_tokenizer(self.model_config.path)
        self._processor = Processor(
            self.model_config,
            self._tokenizer,
            block_size=config.block_size,
            max_logprobs=config.max_logprobs,
            refuse_excess_max_tokens=config.refuse_excess_max_tokens,
            clock=clock,
        )

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts, all of them batched; the outputs are in the order of the prompts.

        Args:
            prompts: a text, `{"prompt_token_ids": [...]}`, or a list of them.
            sampling_params: for all prompts, or one each; None takes the model's own defaults.
            use_tqdm: show a progress bar with tokens per second.
            priority: one a prompt, for the `priority` policy; a lower number runs first.
            cache_salt: prompts with another salt do not share cached blocks with these.

        Raises:
            InvalidParameter: a prompt or parameter is refused; nothing has run then.
        """
        items = _prompts(prompts)
        params = _one_each("sampling_params", sampling_params, len(items))
        priorities = [0] * len(items) if priority is None else _one_each("priority", priority, len(items))
        processed = [
            self._processor.process(item, each, priority=rank, cache_salt=cache_salt)
            for item, each, rank in zip(items, params, priorities, strict=True)
        ]
        return self._run(processed, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or a list of them, each rendered by the model's chat template."""
        if not messages:
            raise InvalidParameter("messages", "messages: must have at least one message")
        conversations: Sequence[Any] = [messages] if isinstance(messages[0], Mapping) else messages
        params = _one_each("sampling_params", sampling_params, len(conversations))
        processed = [
            self._processor.process_chat(
                conversation,
                each,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation, each in zip(conversations, params, strict=True)
        ]
        return self._run(processed, use_tqdm)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks, for a measurement that starts cold."""
        return self.core.reset_prefix_cache()

    def shutdown(self) -> None:
        """Gives the model's memory back. May be called twice."""
        self.core.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _run(self, processed: list[ProcessedRequest], use_tqdm: bool) -> list[RequestOutput]:
        assemblers = [OutputProcessor(each, self._tokenizer) for each in processed]
        owner = {
            child.request_id: assembler
            for each, assembler in zip(processed, assemblers, strict=True)
            for child in each.children
        }
        try:
            for each in processed:
                for child in each.children:
                    self.core.add_request(child)
            with _Progress(len(processed), disable=not use_tqdm) as progress:
                self._step_until_done(owner, progress)
        finally:
            # Where something was raised (Ctrl-C above all), the engine must not keep what nobody waits for.
            self.core.abort(request_id for request_id, assembler in owner.items() if not assembler.finished)
            while self.core.has_work():
                self.core.step()
        return [assembler.snapshot() for assembler in assemblers]

    def _step_until_done(self, owner: dict[str, OutputProcessor], progress: _Progress) -> None:
        while self.core.has_work():
            for output in self.core.step().outputs:
                assembler = owner.get(output.request_id)
                if assembler is None:
                    continue  # of an earlier call that was interrupted
                was_finished = assembler.finished
                assembler.update((output,))
                # Before the next step, so that a text that has ended costs no further token (one, where steps overlap).
                self.core.abort(assembler.take_aborts())
                progress.tokens += len(output.new_token_ids)
                if assembler.finished and not was_finished:
                    progress.finish_one(len(assembler.snapshot().prompt_token_ids))


class _Progress:
    """A bar over prompts that shows prompt and output tokens per second."""

    def __init__(self, total: int, *, disable: bool) -> None:
        self._bar = tqdm(total=total, desc="Prompts", unit="prompt", disable=disable, dynamic_ncols=True)
        self._started = time.perf_counter()
        self._prompt_tokens = 0
        self.tokens = 0

    def finish_one(self, num_prompt_tokens: int) -> None:
        self._prompt_tokens += num_prompt_tokens
        seconds = max(time.perf_counter() - self._started, 1e-9)
        self._bar.set_postfix_str(
            f"in {self._prompt_tokens / seconds:,.0f} tok/s, out {self.tokens / seconds:,.0f} tok/s", refresh=False
        )
        self._bar.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one or many; a list of token ids is one."""
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _one_each(name: str, values: Any, count: int) -> list[Any]:
    """One value a prompt, from one for all or a list of them."""
    if values is None or isinstance(values, SamplingParams):
        return [values] * count
    values = list(values)
    if len(values) != count:
        raise InvalidParameter(
            name, f"{name}: there are {count} prompts and {len(values)} values; there must be one for each prompt"
        )
    return values
