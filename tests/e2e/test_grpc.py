"""The demo over gRPC, as its own configuration has it on."""

from __future__ import annotations

import socket
import subprocess
import sys

import grpc
import pytest

from app.grpc import manta_pb2 as pb
from app.grpc.manta_pb2_grpc import MantaStub
from tests.e2e.conftest import ROOT, Service


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


def test_the_demo_shows_nobody_its_interface(service: Service) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}") as channel:
        for version in ("v1", "v1alpha"):
            ask = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
            with pytest.raises(grpc.RpcError) as refused:
                list(ask(iter([b""]), timeout=60))
            assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_the_manual_s_example_runs_as_it_is_written(service: Service) -> None:
    section = (ROOT / "docs" / "operations.md").read_text().partition("\n## gRPC\n")[2]
    example = section.partition("```python\n")[2].partition("```")[0]
    assert example.count("127.0.0.1:9000") == 1
    example = example.replace("127.0.0.1:9000", f"127.0.0.1:{service.grpc_port}")
    ran = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "Paris" in ran.stdout
