"""A client's prompt and parameters to requests for an engine: text becomes tokens, and everything is validated."""

from __future__ import annotations

import dataclasses
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from engine.config import ModelConfig
from engine.kv_cache.block_hash import hash_blocks, root_hash
from engine.request import Clock, EngineRequest, ExtraKey, child_seed
from engine.sampling_params import InvalidParameter, SamplingParams
from engine.tokenizer import Tokenizer


class TokensPrompt(TypedDict):
    """A prompt that is tokens already."""

    prompt_token_ids: list[int]


class AboutRequest(TypedDict, total=False):
    """What a request carries besides prompt and params.

    Attributes:
        request_id: ours, unique over the whole service; one is drawn where it is absent.
        client_request_id: the client's name for it; for logs alone.
        model: the name under which it was asked for.
        priority: a lower number runs first under the `priority` policy.
        deadline: when it is no longer wanted, by the Processor's clock.
        cache_salt: requests share the prefix cache only where it is equal.
    """

    request_id: str | None
    client_request_id: str | None
    model: str
    priority: int
    deadline: float | None
    cache_salt: str | None


Prompt = str | TokensPrompt | list[int]


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """One prompt, ready for an engine.

    Attributes:
        prompt: its text, where it came as text or as a chat.
        params: what holds for it, with n and with the limits that the context leaves.
        children: one for each of the n completions; the i-th is named `{request_id}-{i}` where n is above 1.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    children: tuple[EngineRequest, ...]


class Processor:
    """Makes requests for engines that run one model. Keeps nothing of them: threads may share it."""

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer,
        *,
        block_size: int,
        max_logprobs: int,
        refuse_excess_max_tokens: bool = False,
        clock: Clock = time.time,
    ) -> None:
        self._model = model_config
        self._tokenizer = tokenizer
        self._block_size = block_size
        self._max_logprobs = max_logprobs
        self._refuse_excess = refuse_excess_max_tokens
        self._clock = clock
        self._root = root_hash(model_config, block_size)

    def process(
        self, prompt: Prompt, params: SamplingParams | None = None, **about: Unpack[AboutRequest]
    ) -> ProcessedRequest:
        """A prompt of text or of tokens.

        Args:
            params: None is the model's own defaults.
            about: what else there is to say of the request.

        Raises:
            InvalidParameter: something is not allowed, or not possible with this model.
        """
        text, token_ids = self._tokens_of(prompt)
        return self._request("prompt", text, token_ids, params, **about)

    def process_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **about: Unpack[AboutRequest],
    ) -> ProcessedRequest:
        """A conversation, by the model's chat template; otherwise as `process`."""
        text = self._tokenizer.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=chat_template_kwargs,
        )
        token_ids = self._encode("messages", text, add_special_tokens=False)
        return self._request("messages", text, token_ids, params, **about)

    def _request(
        self,
        param: str,
        text: str | None,
        token_ids: tuple[int, ...],
        params: SamplingParams | None,
        *,
        request_id: str | None = None,
        client_request_id: str | None = None,
        model: str = "",
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
    ) -> ProcessedRequest:
        self._check_length(param, len(token_ids))
        if not isinstance(priority, int):
            raise InvalidParameter.of("priority", priority, "must be a whole number; a lower one runs first")
        if params is None:
            params = SamplingParams.with_defaults(self._model.generation_defaults)
        elif not isinstance(params, SamplingParams):
            raise InvalidParameter.of("sampling_params", params, "must be SamplingParams or None")
        self._check_params(params)
        params = self._limit(params, self._model.max_model_len - len(token_ids))
        request_id = request_id or uuid.uuid4().hex
        extra_keys = _extra_keys(cache_salt)
        template = EngineRequest(
            request_id=request_id,
            client_request_id=client_request_id,
            model=model,
            prompt_token_ids=token_ids,
            params=dataclasses.replace(params, n=1),
            seed=secrets.randbits(64) if params.seed is None else params.seed % 2**64,
            eos_token_ids=() if params.ignore_eos else self._model.eos_token_ids,
            priority=priority,
            arrival_time=self._clock(),
            deadline=deadline,
            block_hashes=tuple(hash_blocks(token_ids, self._block_size, self._root, extra_keys)),
            extra_keys=extra_keys,
        )
        return ProcessedRequest(request_id, text, token_ids, params, _children(template, params.n))

    # ---- prompt ----

    def _tokens_of(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, str):
            return prompt, self._encode("prompt", prompt, add_special_tokens=True)
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" not in prompt:
                raise InvalidParameter("prompt", "prompt: an object must have prompt_token_ids")
            prompt = prompt["prompt_token_ids"]
        if not isinstance(prompt, list | tuple):
            raise InvalidParameter.of("prompt", prompt, "must be a text or a list of token ids")
        token_ids = tuple(prompt)
        self._check_length("prompt", len(token_ids))  # first: what is too long costs nothing more
        if not {int}.issuperset(map(type, token_ids)):
            wrong = next(token for token in token_ids if type(token) is not int)
            raise InvalidParameter.of("prompt", wrong, "its token ids must be whole numbers")
        self._check_vocabulary("prompt", token_ids)
        return None, token_ids

    def _encode(self, param: str, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        context = self._model.max_model_len
        if len(text) > context * self._tokenizer.longest_token:
            raise InvalidParameter(
                param, f"prompt has {len(text):,} characters; the model's context is {context:,} tokens"
            )
        token_ids = tuple(self._tokenizer.encode(text, add_special_tokens, param=param))
        self._check_vocabulary(param, token_ids)
        return token_ids

    def _check_length(self, param: str, length: int) -> None:
        context = self._model.max_model_len
        if length == 0:
            raise InvalidParameter(param, "prompt is empty; it must have one token or more")
        if length >= context:
            room = ", of which the output needs one" if length == context else ""
            raise InvalidParameter(param, f"prompt has {length:,} tokens; the model's context is {context:,}{room}")

    def _check_vocabulary(self, param: str, token_ids: Sequence[int]) -> None:
        size = self._model.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
            wrong = next(token for token in token_ids if not 0 <= token < size)
            raise InvalidParameter(param, f"{param} has the token id {wrong}; the model's are 0 to {size - 1:,}")

    # ---- params ----

    def _check_params(self, params: SamplingParams) -> None:
        self._check_vocabulary("logit_bias", list(params.logit_bias))
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and asked > self._max_logprobs:
                raise InvalidParameter.of(name, asked, f"must be at most {self._max_logprobs}")
        for stop in params.stop:
            if not _is_unicode(stop):
                raise InvalidParameter.of("stop", stop, "must be valid Unicode")

    def _limit(self, params: SamplingParams, room: int) -> SamplingParams:
        """The params with the max_tokens and min_tokens that the context has room for."""
        if self._refuse_excess:
            for name in ("max_tokens", "min_tokens"):
                asked = getattr(params, name)
                if asked is not None and asked > room:
                    context = self._model.max_model_len
                    rule = f"the prompt leaves {room:,} of the model's context of {context:,} tokens"
                    raise InvalidParameter.of(name, asked, rule)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return dataclasses.replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))


def _children(template: EngineRequest, n: int) -> tuple[EngineRequest, ...]:
    if n == 1:
        return (template,)
    later = dataclasses.replace(template.params, prompt_logprobs=None)  # the prompt is the same for all
    return tuple(
        dataclasses.replace(
            template,
            request_id=f"{template.request_id}-{index}",
            params=later if index else template.params,
            seed=child_seed(template.seed, index),
        )
        for index in range(n)
    )


def _extra_keys(cache_salt: str | None) -> tuple[ExtraKey, ...]:
    if cache_salt is None:
        return ()
    if not isinstance(cache_salt, str) or not cache_salt or not _is_unicode(cache_salt):
        raise InvalidParameter.of("cache_salt", cache_salt, "must be a text, not empty")
    return (ExtraKey("salt", cache_salt),)


def _is_unicode(text: str) -> bool:
    """Whether it has no lone surrogates, which JSON can carry but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
