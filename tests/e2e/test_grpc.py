"""The demo over gRPC, as its own configuration has it on."""

from __future__ import annotations

import socket

import grpc
import pytest

from app.grpc import manta_pb2 as pb
from app.grpc.manta_pb2_grpc import MantaStub
from tests.e2e.conftest import Service


def test_the_demo_answers_a_chat(service: Service) -> None:
    question = pb.Message(role="user", content="What is the capital of France?")
    request = pb.ChatRequest(
        conversation=pb.Conversation(messages=[question]), params=pb.SamplingParams(temperature=0, max_tokens=12)
    )
    with grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}") as channel:
        answer = list(MantaStub(channel).Chat(request, timeout=120))
    assert "Paris" in "".join(delta.text for message in answer for delta in message.deltas)
    assert answer[-1].usage.completion_tokens > 0


def test_the_demo_answers_no_other_machine(service: Service) -> None:
    """A client that comes over another interface than the loopback one could be on any machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # finds the interface; nothing is sent
        except OSError:
            pytest.skip("this machine has no other interface")
        address = probe.getsockname()[0]
    channel = grpc.insecure_channel(f"{address}:{service.grpc_port}")
    with channel, pytest.raises(grpc.RpcError) as refused:
        MantaStub(channel).Models(pb.ModelsRequest(), timeout=60)
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
