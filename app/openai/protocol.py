"""The requests of OpenAI's interface, with the fields that vLLM's clients add.

An absent field and null mean the same. Ranges of sampling fields are checked by SamplingParams alone, so that they are
the same over HTTP and offline; here their types are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from app.openai.body import RequestModel
from app.openai.conversation import TemplateFields
from engine.sampling_params import InvalidParameter, SamplingParams

COMPLETION_MAX_TOKENS = 16

Int64 = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
Float = Annotated[float, Field(allow_inf_nan=False)]


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


Texts = Annotated[
    list[str],
    BeforeValidator(_one_or_many),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT = {"anyOf": [{"type": "string"}, _TOKEN_IDS]}
PromptField = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "string"}, _TOKEN_IDS, {"type": "array", "items": _PROMPT}]})
]


class StreamOptions(RequestModel):
    include_usage: bool = False
    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is ever padded.")


class SamplingFields(RequestModel):
    """What completions and chat completions share."""

    model: str
    n: Int64 | None = None
    temperature: Float | None = None
    top_k: Int64 | None = None
    top_p: Float | None = None
    min_p: Float | None = None
    repetition_penalty: Float | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    logit_bias: dict[str, Float] | None = Field(None, description="Token id to a number in [-100, 100].")
    seed: Int64 | None = None
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    stop: Texts | None = None
    stop_token_ids: list[Int64] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Int64 | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, description="Prefixes are shared only with requests of the same salt.")
    priority: Int64 | None = Field(
        None,
        description=(
            "A lower number runs first, where the engine's policy is `priority`. No lower than the API key's, which "
            "holds where it is absent."
        ),
    )

    user: Any = Field(None, description="Accepted and ignored, as are the fields below.")
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    spaces_between_special_tokens: Any = None

    def sampling_params(self, defaults: Mapping[str, Any], **decided: Any) -> SamplingParams:
        """The given fields over the model's defaults; `decided` is what the endpoint itself works out.

        Raises:
            InvalidParameter: a value is out of range.
        """
        given = {
            "n": self.n,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": None if self.logit_bias is None else _by_token_id(self.logit_bias),
            "seed": self.seed,
            "min_tokens": self.min_tokens,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "skip_special_tokens": self.skip_special_tokens,
            "prompt_logprobs": self.prompt_logprobs,
        }
        return SamplingParams.with_defaults({**defaults, **decided}, **given)

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter("stream_options", "stream_options: is only allowed when stream is true")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidParameter("prompt_logprobs", "prompt_logprobs: is not available when stream is true")
        return self


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: PromptField
    echo: bool = False
    logprobs: Int64 | None = None
    best_of: Int64 | None = None
    suffix: str | None = None
    add_special_tokens: bool = True
    use_beam_search: Literal[False] | None = None

    @model_validator(mode="after")
    def _refuse_what_is_not_served(self) -> Self:
        if self.suffix is not None:
            raise InvalidParameter("suffix", "suffix: insertion is not supported; leave it out")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidParameter.of("best_of", self.best_of, f"must be equal to n, which is {self.n or 1}")
        return self

    def prompts(self) -> list[str | list[int]]:
        """One or many, each a text or token ids.

        Raises:
            InvalidParameter: it is none of those, or empty.
        """
        prompt = self.prompt
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _are_integers(prompt)):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise InvalidParameter(
                "prompt", "prompt: must be a text, a list of token ids, or a list of either, not empty"
            )
        for index, one in enumerate(prompt):
            if not isinstance(one, str) and not (isinstance(one, list) and _are_integers(one)):
                raise InvalidParameter("prompt", f"prompt[{index}]: must be a text or a list of token ids")
        return prompt


class ResponseFormat(RequestModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: str


class ChatCompletionRequest(SamplingFields, TemplateFields):
    """POST /v1/chat/completions."""

    max_completion_tokens: Annotated[int, Field(ge=1, le=2**64 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    tool_choice: Any = Field(None, description="`none` or `auto`.")
    parallel_tool_calls: Any = Field(None, description="Accepted and ignored, as are the three below.")
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    response_format: ResponseFormat | None = Field(None, description="Only `text` so far.")
    modalities: list[Literal["text"]] | None = None
    add_special_tokens: Literal[False] | None = None

    @model_validator(mode="after")
    def _refuse_what_is_not_served(self) -> Self:
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidParameter.of("tool_choice", self.tool_choice, "only 'none' and 'auto' are supported so far")
        if self.response_format is not None and self.response_format.type != "text":
            raise InvalidParameter.of("response_format", self.response_format.type, "only 'text' is supported yet")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameter("top_logprobs", "top_logprobs: needs logprobs to be true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidParameter("max_completion_tokens", "max_completion_tokens: differs from max_tokens; give one")
        return self

    def template_args(self) -> dict[str, Any]:
        args = super().template_args()
        return {**args, "tools": None} if self.tool_choice == "none" else args


class TokenizeTextRequest(RequestModel):
    """POST /tokenize, of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(TemplateFields):
    """POST /tokenize, of messages."""

    model: str | None = None
    add_special_tokens: Literal[False] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(RequestModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Int64]


def _are_integers(values: list[Any]) -> bool:
    return {int}.issuperset(map(type, values))


def _by_token_id(logit_bias: Mapping[str, float]) -> dict[int, float]:
    for key in logit_bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 20):
            raise InvalidParameter.of("logit_bias", key, "its keys must be token ids, 0 or more")
    return {int(key): value for key, value in logit_bias.items()}
