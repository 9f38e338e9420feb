"""What becomes of messages on either side, without a service."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.grpc import manta_pb2 as pb
from app.grpc import requests
from app.grpc.exchange import is_local
from app.grpc.requests import chat_request, completion_request, tokenize_chat_request
from app.openai.body import MAX_TOKEN_IDS, MAX_VALUES
from app.openai.errors import ApiError
from engine.sampling_params import SamplingParams

ROOT = Path(__file__).parents[3]


def test_generated_modules_are_those_of_the_proto_file(tmp_path: Path) -> None:
    made = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", *made, "app/grpc/manta.proto"], cwd=ROOT, check=True
    )
    for name in ("manta_pb2.py", "manta_pb2.pyi", "manta_pb2_grpc.py"):
        assert (tmp_path / "app" / "grpc" / name).read_text() == (ROOT / "app" / "grpc" / name).read_text(), name


def test_all_sampling_parameters_are_offered() -> None:
    assert {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} == set(SamplingParams.__dataclass_fields__)


def test_values_arrive_and_absent_ones_stay_absent() -> None:
    params = pb.SamplingParams(
        n=2,
        temperature=0.0,
        seed=-(2**63),
        logit_bias={5: -1.5},
        stop=["a", "b"],
        stop_token_ids=[7],
        ignore_eos=False,
        prompt_logprobs=0,
    )
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3, 4]), params=params, cache_salt="s", priority=-1)
    read = completion_request(message, "demo")
    assert read.model_dump(exclude_unset=True) == {
        "model": "demo",
        "prompt": [3, 4],
        "n": 2,
        "temperature": 0.0,
        "seed": -(2**63),
        "logit_bias": {"5": -1.5},
        "stop": ["a", "b"],
        "stop_token_ids": [7],
        "ignore_eos": False,
        "prompt_logprobs": 0,
        "cache_salt": "s",
        "priority": -1,
    }


def test_a_conversation_arrives_with_its_tools() -> None:
    call = pb.ToolCall(id="1", name="look", arguments='{"at": 1}')
    conversation = pb.Conversation(
        messages=[
            pb.Message(role="user", content=""),
            pb.Message(role="assistant", tool_calls=[call]),
            pb.Message(role="tool", content="found", tool_call_id="1"),
        ],
        tools=[pb.Tool(name="look", parameters='{"type": "object"}', strict=True)],
        chat_template_kwargs='{"thinking": false}',
    )
    chat = chat_request(pb.ChatRequest(conversation=conversation, params=pb.SamplingParams(logprobs=3)), "demo")
    assert chat.template_messages() == [
        {"role": "user", "content": ""},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}],
        },
        {"role": "tool", "content": "found", "tool_call_id": "1"},
    ]
    function = {"name": "look", "parameters": {"type": "object"}, "strict": True}
    assert chat.template_args() == {
        "tools": [{"type": "function", "function": function}],
        "add_generation_prompt": True,
        "continue_final_message": False,
        "chat_template_kwargs": {"thinking": False},
    }
    assert (chat.logprobs, chat.top_logprobs) == (True, 3)
    tokenized = tokenize_chat_request(pb.TokenizeRequest(conversation=conversation))
    assert tokenized.template_messages() == chat.template_messages()


@pytest.mark.parametrize(
    ("message", "param", "problem"),
    [
        (pb.GenerateRequest(), "prompt", "prompt: is required"),
        (pb.GenerateRequest(text="a", params=pb.SamplingParams(temperature=float("nan"))), "temperature", "finite"),
        (pb.ChatRequest(), "messages", "at least 1"),
        (
            pb.ChatRequest(conversation=pb.Conversation(messages=[pb.Message(role="king", content="a")])),
            "messages[0].role",
            "'system'",
        ),
        (
            pb.ChatRequest(
                conversation=pb.Conversation(
                    messages=[pb.Message(role="user", content="a")], tools=[pb.Tool(name="a", parameters="{")]
                )
            ),
            "tools[0].parameters",
            "is not JSON",
        ),
        (pb.GenerateRequest(text="a", params=pb.SamplingParams(stop=["a"] * 70_000)), None, "too many values"),
    ],
)
def test_a_wrong_message_is_refused_by_the_field(message: Any, param: str | None, problem: str) -> None:
    read = chat_request if isinstance(message, pb.ChatRequest) else completion_request
    with pytest.raises(ApiError, match=problem) as caught:
        read(message, "demo")
    assert (caught.value.status, caught.value.param) == (400, param)


MANY = pb.Tool(parameters='{"a": [' + "{}," * 33_000 + "{}]}")
"""More than half of the values that there may be."""


def conversation(*messages: pb.Message, **more: Any) -> pb.ChatRequest:
    return pb.ChatRequest(conversation=pb.Conversation(messages=messages or [pb.Message(role="user")], **more))


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * (MAX_TOKEN_IDS + 1))),
        pb.GenerateRequest(text="a", params=pb.SamplingParams(stop_token_ids=[1] * (MAX_VALUES + 1))),
        conversation(*[pb.Message()] * (MAX_VALUES + 1)),
        conversation(pb.Message(tool_calls=[pb.ToolCall()] * (MAX_VALUES + 1))),
        conversation(tools=[pb.Tool()] * (MAX_VALUES + 1)),
        conversation(tools=[MANY] * 2),
        conversation(tools=[MANY], chat_template_kwargs="[" * 33_000),
    ],
    ids=["token ids", "stop tokens", "messages", "calls", "tools", "schemas", "variables"],
)
def test_many_values_are_refused_before_any_is_converted(message: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(*_: Any) -> None:
        pytest.fail("converted already")

    for name in ("parse_json", "refuse_much_or_deep", "validate"):
        monkeypatch.setattr(requests, name, too_late)
    read = chat_request if isinstance(message, pb.ChatRequest) else completion_request
    with pytest.raises(ApiError, match="too many values") as caught:
        read(message, "demo")
    assert caught.value.status == 400


def test_as_many_token_ids_pass_as_a_body_may_have() -> None:
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * MAX_TOKEN_IDS))
    assert len(completion_request(message, "demo").prompts()[0]) == MAX_TOKEN_IDS


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:4711", True),
        ("ipv4:127.8.0.1:4711", True),
        ("ipv6:[::1]:4711", True),
        ("ipv6:%5B::1%5D:4711", True),
        ("ipv6:[::ffff:127.0.0.1]:4711", True),
        ("unix:/tmp/socket", True),
        ("ipv4:10.0.0.1:4711", False),
        ("ipv6:[fe80::1%eth0]:4711", False),
        ("ipv6:[::ffff:10.0.0.1]:4711", False),
        ("ipv4:127.0.0.1.example.org:1", False),
        ("", False),
    ],
)
def test_local_clients_are_told_from_others(peer: str, local: bool) -> None:
    assert is_local(peer) is local
