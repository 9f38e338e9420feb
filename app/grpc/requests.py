"""Messages of `manta.proto` as the bodies that the HTTP endpoints read, so that one code checks both.

Whatever a client decides the number of is counted before it becomes Python's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import Message

from app.grpc import manta_pb2 as pb
from app.openai.body import LONG_BODY, parse_json, refuse_many, refuse_many_values, refuse_much_or_deep, validate
from app.openai.errors import ApiError
from app.openai.protocol import ChatCompletionRequest, CompletionRequest, TokenizeChatRequest
from app.openai.service import on_cpu

T = TypeVar("T")


async def read(message: Message, work: Callable[[], T]) -> T:
    """Runs the work of reading a message; on a thread where that is long."""
    size = message.ByteSize()
    return await on_cpu(size if size >= LONG_BODY else 0, work)


def completion_request(message: pb.GenerateRequest, model: str) -> CompletionRequest:
    """
    Raises:
        ApiError: 400.
    """
    refuse_many(0, len(message.token_ids.ids))
    content = {"model": model, **_sampling(message.params), **_present(message, "cache_salt", "priority")}
    match message.WhichOneof("prompt"):
        case "text":
            content["prompt"] = message.text
        case "token_ids":
            content["prompt"] = list(message.token_ids.ids)
    content |= _present(message, "add_special_tokens")
    refuse_much_or_deep(content)
    return validate(content, CompletionRequest)


def chat_request(message: pb.ChatRequest, model: str) -> ChatCompletionRequest:
    """
    Raises:
        ApiError: 400.
    """
    content = {"model": model, **_sampling(message.params), **_present(message, "cache_salt", "priority")}
    if "logprobs" in content:
        content |= {"logprobs": True, "top_logprobs": content["logprobs"]}
    content |= _conversation(message.conversation)
    refuse_much_or_deep(content)
    return validate(content, ChatCompletionRequest)


def tokenize_chat_request(message: pb.TokenizeRequest) -> TokenizeChatRequest:
    """
    Raises:
        ApiError: 400.
    """
    content = _conversation(message.conversation)
    refuse_much_or_deep(content)
    return validate(content, TokenizeChatRequest)


def _present(message: Message, *names: str) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _sampling(params: pb.SamplingParams) -> dict[str, Any]:
    refuse_many(len(params.logit_bias) + len(params.stop) + len(params.stop_token_ids))
    content: dict[str, Any] = {}
    for field, value in params.ListFields():
        match field.name:
            case "logit_bias":
                content["logit_bias"] = {str(token): bias for token, bias in value.items()}
            case "stop" | "stop_token_ids":
                content[field.name] = list(value)
            case name:
                content[name] = value
    return content


def _conversation(conversation: pb.Conversation) -> dict[str, Any]:
    refuse_many(len(conversation.messages) + len(conversation.tools))
    refuse_many(sum(len(message.tool_calls) for message in conversation.messages))
    schemas = (tool.parameters.encode() for tool in conversation.tools)
    refuse_many_values(*schemas, conversation.chat_template_kwargs.encode())
    content: dict[str, Any] = {
        "messages": [_message(each) for each in conversation.messages],
        **_present(conversation, "add_generation_prompt"),
        "continue_final_message": conversation.continue_final_message,
    }
    if conversation.tools:
        content["tools"] = [_tool(index, each) for index, each in enumerate(conversation.tools)]
    if conversation.HasField("chat_template_kwargs"):
        content["chat_template_kwargs"] = _json("chat_template_kwargs", conversation.chat_template_kwargs)
    return content


def _message(message: pb.Message) -> dict[str, Any]:
    content: dict[str, Any] = {
        "role": message.role,
        **_present(message, "content", "name", "tool_call_id", "reasoning_content"),
    }
    if message.tool_calls:
        content["tool_calls"] = [
            {**_present(call, "id"), "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return content


def _tool(index: int, tool: pb.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, **_present(tool, "description", "strict")}
    if tool.HasField("parameters"):
        function["parameters"] = _json(f"tools[{index}].parameters", tool.parameters)
    return {"type": "function", "function": function}


def _json(name: str, text: str) -> dict[str, Any]:
    try:
        return parse_json(text.encode())
    except ApiError as error:
        raise ApiError.bad_request(f"{name}: {str(error).removeprefix('the body ')}", name) from None
