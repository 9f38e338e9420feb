"""The requests of OpenAI's interface, with the fields that vLLM's clients add.

An absent field and null mean the same. Ranges of sampling fields are checked by SamplingParams alone, so that they are
the same over HTTP and offline; here their types are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from app.openai.body import refuse_many_values
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


class RequestModel(BaseModel):
    """A request body: strict types, no unknown fields, null for absent."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, content: Any) -> Any:
        if isinstance(content, dict):
            return {name: value for name, value in content.items() if value is not None}
        return content


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


class TextPart(RequestModel):
    type: Annotated[str, WithJsonSchema({"type": "string", "const": "text"})]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _text_alone(cls, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is None:
            raise ValueError("must be an object with a type")
        if kind != "text":
            raise ValueError(f"content parts of type {str(kind)[:40]!r} are not supported; only 'text' is")
        if not isinstance(part.get("text"), str):
            raise ValueError("text must be a text")
        return {"type": kind, "text": part["text"]}


def _text_parts(content: object) -> object:
    """A plain text as one part, so that a wrong part is named by its place and not by a union's branches."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ValueError("must be a text or a list of text parts")
    return content


_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/components/schemas/TextPart"}}]}
Content = Annotated[list[TextPart], BeforeValidator(_text_parts), WithJsonSchema(_CONTENT)]


class FunctionCall(RequestModel):
    name: str
    arguments: str = "{}"


class ToolCall(RequestModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


_SAYS_SOMETHING: list[Any] = [
    {"required": ["content"], "properties": {"content": _CONTENT}},
    {
        "required": ["role", "tool_calls"],
        "properties": {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}},
    },
]


class Message(RequestModel):
    model_config = ConfigDict(strict=True, extra="forbid", json_schema_extra={"anyOf": _SAYS_SOMETHING})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: Any = None
    audio: Any = None
    annotations: Any = None
    function_call: None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is required, as a text or a list of text parts")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: content is one text, a call's arguments are an object."""
        message: dict[str, Any] = {"role": self.role, "content": None}
        if self.content is not None:
            message["content"] = "\n".join(part.text for part in self.content)
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        return message


class FunctionDefinition(RequestModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


class ResponseFormat(RequestModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: str


MAX_MESSAGES = 2048
MAX_VARIABLES = 64
MANY_STRUCTURES = 64
LONG_STRUCTURES = 1 << 16
_TEMPLATE_FIELDS = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})


class TemplateFields(RequestModel):
    """How messages become a prompt."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = Field(
        None, description="Let the prompt open an assistant's turn; true unless continue_final_message is."
    )
    continue_final_message: bool = Field(False, description="Leave the last message open and go on with it.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")

    @property
    def opens_a_turn(self) -> bool:
        """add_generation_prompt, decided."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    def template_messages(self) -> list[dict[str, Any]]:
        """
        Raises:
            ApiError: 400, the calls' arguments have more values than a body may.
        """
        calls = [call for message in self.messages for call in message.tool_calls or ()]
        refuse_many_values(*(call.function.arguments.encode() for call in calls))
        return [message.for_template() for message in self.messages]

    def template_args(self) -> dict[str, Any]:
        """What Processor.process_chat is told beside the messages."""
        return {
            "tools": [tool.for_template() for tool in self.tools] if self.tools else None,
            "add_generation_prompt": self.opens_a_turn,
            "continue_final_message": self.continue_final_message,
            "chat_template_kwargs": self.chat_template_kwargs,
        }

    def characters(self) -> int:
        """How long it is, as JSON, tools and calls included; where there are many of them it is taken to be long."""
        calls = sum(len(message.tool_calls or ()) for message in self.messages)
        if calls + len(self.messages) + len(self.tools or ()) > MANY_STRUCTURES:
            return LONG_STRUCTURES
        return len(self.model_dump_json(include={"messages", "tools", "chat_template_kwargs"}, exclude_none=True))

    @model_validator(mode="after")
    def _no_fields_among_variables(self) -> Self:
        if len(self.chat_template_kwargs or ()) > MAX_VARIABLES:
            raise InvalidParameter(
                "chat_template_kwargs", f"chat_template_kwargs: at most {MAX_VARIABLES} variables are allowed"
            )
        for name in _TEMPLATE_FIELDS & (self.chat_template_kwargs or {}).keys():
            raise InvalidParameter("chat_template_kwargs", f"chat_template_kwargs: {name!r} cannot be set there")
        return self

    @model_validator(mode="after")
    def _one_way_to_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidParameter(
                "add_generation_prompt", "add_generation_prompt: cannot be true together with continue_final_message"
            )
        return self


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


def _arguments(text: str) -> Any:
    """A call's arguments as an object; the text itself where a model wrote something else."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text
