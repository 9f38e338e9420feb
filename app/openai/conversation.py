"""Messages, tools and what else makes a prompt of a conversation, as chats and /tokenize take them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from app.openai.body import RequestModel, refuse_many_values
from engine.sampling_params import InvalidParameter

MAX_MESSAGES = 2048
MAX_VARIABLES = 64
MANY_STRUCTURES = 64
LONG_STRUCTURES = 1 << 16
_TEMPLATE_FIELDS = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})


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


def _arguments(text: str) -> Any:
    """A call's arguments as an object; the text itself where a model wrote something else."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text
