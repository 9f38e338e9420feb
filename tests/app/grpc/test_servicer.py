"""The RPCs in this process, over a client whose tokens and failures are known."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from prometheus_client import CollectorRegistry
from ray.serve.grpc_util import RayServegRPCContext

from app.api_keys import hash_key
from app.config import ApiKey
from app.grpc import answers
from app.grpc import manta_pb2 as pb
from app.grpc.exchange import MOST_WATCHERS, GrpcSide
from app.grpc.metrics import GrpcMetrics
from app.grpc.servicer import GrpcServicer
from app.openai.auth import KeyRing
from app.openai.body import MAX_TOKEN_IDS
from app.openai.intake import Intake
from app.openai.rate_limits import Client
from app.openai.tokenize import detokenized
from app.transport import EngineFailed, NoReplica, QueueFull, ReplicaDied
from engine.tokenizer import Tokenizer
from tests.app.openai.scripted_client import ScriptedClient

NOBODYS = "ipv4:10.1.2.3:4711"


@pytest.fixture
def servicer_over(app_over: Any) -> Callable[..., GrpcServicer]:
    def make(
        client: ScriptedClient, *, keys: KeyRing | None = None, local_only: bool = True, **limits: Any
    ) -> GrpcServicer:
        intake = Intake()

        async def check_ready() -> None:
            if intake.closed:
                raise NoReplica("the service is shutting down")

        servicer = GrpcServicer()
        servicer.grpc_side = GrpcSide(
            service=app_over(client, keys=keys, **limits).state.service,
            keys=keys,
            intake=intake,
            metrics=GrpcMetrics(CollectorRegistry()),
            local_only=local_only,
            check_ready=check_ready,
            everyone=Client("everyone", lambda: 0.0),
        )
        return servicer

    return make


def call(peer: str = "ipv4:127.0.0.1:4711", **metadata: str) -> RayServegRPCContext:
    """The context of a call, as Serve hands it to the ingress."""
    names = "auth_context", "code", "details", "peer_identities", "peer_identity_key"
    context = SimpleNamespace(**{name: lambda: None for name in names})
    context.peer = lambda: peer
    context.trailing_metadata = lambda: ()
    context.invocation_metadata = lambda: list(metadata.items())
    return RayServegRPCContext(context)


def steps(*tokens: tuple[int, ...]) -> ScriptedClient:
    return ScriptedClient(lambda _: tokens)


async def generate(servicer: GrpcServicer, context: RayServegRPCContext, **params: Any) -> list[pb.GenerateResponse]:
    request = pb.GenerateRequest(text="one two", params=pb.SamplingParams(**{"max_tokens": 8, **params}))
    return [pb.GenerateResponse.FromString(sent) async for sent in servicer.Generate(request, context)]


async def test_messages_joined_are_the_whole_answer(servicer_over: Any) -> None:
    client = steps((5, 6), (7,), (8,))
    joined = pb.GenerateResponse()
    for message in await generate(servicer_over(client), call(), n=2, logprobs=1, prompt_logprobs=0):
        joined.MergeFrom(message)
    for index in range(2):
        mine = [delta for delta in joined.deltas if delta.index == index]
        assert [token for delta in mine for token in delta.token_ids] == [5, 6, 7, 8]
        assert [each.token.token_id for delta in mine for each in delta.logprobs] == [5, 6, 7, 8]
        assert [delta.finish_reason for delta in mine][-1] == "length"
    assert len(joined.prompt_logprobs) == joined.usage.prompt_tokens
    assert not joined.prompt_logprobs[0].HasField("token"), "nothing is before the first token"
    assert joined.prompt_logprobs[1].token.logprob == -0.5
    assert joined.usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (QueueFull("256 requests wait", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED, {"retry-after": "3"}),
        (NoReplica("no replica is up"), grpc.StatusCode.UNAVAILABLE, {"error-code": "no_replica"}),
        (ReplicaDied("it died"), grpc.StatusCode.UNAVAILABLE, {"error-code": "replica_died"}),
        (EngineFailed("a fault"), grpc.StatusCode.INTERNAL, {"error-code": "internal_error"}),
        (KeyError("a secret"), grpc.StatusCode.INTERNAL, {"error-code": "internal_error"}),
    ],
)
@pytest.mark.parametrize("delivered", [0, 1])
async def test_a_failure_is_a_status_behind_what_was_delivered(
    servicer_over: Any, error: Exception, status: grpc.StatusCode, told: dict[str, str], delivered: int
) -> None:
    client = ScriptedClient(lambda _: [(5,), (6,), (7,)], error=error, error_after=delivered)
    context = call(**{"x-request-id": "mine"})
    *messages, last = await generate(servicer_over(client), context)
    assert [token for message in messages for delta in message.deltas for token in delta.token_ids] == [5][:delivered]
    assert last == pb.GenerateResponse()
    assert context.code() == status
    assert "secret" not in context.details()
    assert dict(context.trailing_metadata()).items() >= {"x-request-id": "mine", **told}.items()


async def test_a_call_that_takes_too_long_is_ended(servicer_over: Any) -> None:
    client = ScriptedClient(lambda _: [(5,)], pauses=[60.0])
    servicer = servicer_over(client, request_timeout=0.01)
    context = call()
    assert await generate(servicer, context) == [pb.GenerateResponse()]
    assert context.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert client.closed == 1


async def test_who_leaves_ends_the_engines_work(servicer_over: Any) -> None:
    client = ScriptedClient(lambda _: [(5,)] * 8, pauses=[0.0, 60.0])
    servicer = servicer_over(client)
    came = asyncio.Event()

    async def read() -> None:
        async for _ in servicer.Generate(pb.GenerateRequest(text="one"), call()):
            came.set()

    reader = asyncio.create_task(read())
    await came.wait()
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    async with asyncio.timeout(5):
        while not client.closed:
            await asyncio.sleep(0.001)
    assert servicer.grpc_side.intake.in_flight == 0
    assert servicer.grpc_side.metrics.disconnects._value.get() == 1
    assert servicer.grpc_side.metrics.in_flight._value.get() == 0


async def test_only_this_machine_is_answered_unless_all_are(servicer_over: Any) -> None:
    for local_only in (True, False):
        servicer = servicer_over(steps((5,)), local_only=local_only)
        contexts = [call(NOBODYS), call(NOBODYS)]
        await servicer.Models(pb.ModelsRequest(), contexts[0])
        await servicer.Check(HealthCheckRequest(), contexts[1])
        expected = grpc.StatusCode.PERMISSION_DENIED if local_only else None
        assert [context.code() for context in contexts] == [expected] * 2


async def test_a_service_that_ends_takes_no_calls_and_says_so(servicer_over: Any) -> None:
    servicer = servicer_over(steps((5,)))
    assert (await servicer.Check(HealthCheckRequest(), call())).status == HealthCheckResponse.SERVING
    servicer.grpc_side.intake.close()
    context = call()
    await servicer.Models(pb.ModelsRequest(), context)
    assert context.code() == grpc.StatusCode.UNAVAILABLE
    assert (await servicer.Check(HealthCheckRequest(), call())).status == HealthCheckResponse.NOT_SERVING


async def rest_of(watch: Any) -> list[int]:
    async with asyncio.timeout(10):
        return [answer.status async for answer in watch]


async def test_a_watcher_is_told_of_changes_until_the_service_ends(
    servicer_over: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.grpc.servicer.WATCH_POLL_S", 0.001)
    servicer = servicer_over(steps((5,)))
    intake = servicer.grpc_side.intake
    watch = servicer.Watch(HealthCheckRequest(), call())
    assert (await anext(watch)).status == HealthCheckResponse.SERVING
    unknown = servicer.Watch(HealthCheckRequest(service="other"), call())
    assert (await anext(unknown)).status == HealthCheckResponse.SERVICE_UNKNOWN
    intake.close()
    assert intake.in_flight == 2, "an end waits for those who watch"
    assert await rest_of(watch) == [HealthCheckResponse.NOT_SERVING]
    assert await rest_of(unknown) == []
    assert intake.in_flight == 0
    late = call()
    assert await rest_of(servicer.Watch(HealthCheckRequest(), late)) == [HealthCheckResponse.UNKNOWN]
    assert late.code() == grpc.StatusCode.UNAVAILABLE


async def test_so_many_may_watch_and_no_more(servicer_over: Any) -> None:
    servicer = servicer_over(steps((5,)))
    watchers = [servicer.Watch(HealthCheckRequest(), call()) for _ in range(MOST_WATCHERS)]
    for watch in watchers:
        assert (await anext(watch)).status == HealthCheckResponse.SERVING
    refused = call()
    assert await rest_of(servicer.Watch(HealthCheckRequest(), refused)) == [HealthCheckResponse.UNKNOWN]
    assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await servicer.Check(HealthCheckRequest(), call())).status == HealthCheckResponse.SERVING
    await watchers.pop().aclose()
    watchers.append(servicer.Watch(HealthCheckRequest(), call()))
    assert (await anext(watchers[-1])).status == HealthCheckResponse.SERVING
    for watch in watchers:
        await watch.aclose()


async def test_a_key_s_limits_are_those_of_http(servicer_over: Any) -> None:
    key = ApiKey(name="a", hash=hash_key(b"sk"), tokens_per_minute=20, requests_per_minute=100, priority=3)
    keys = KeyRing([key], lambda: 0.0)
    client = steps(tuple(range(5, 13)))
    servicer = servicer_over(client, keys=keys)
    mine = {"authorization": "Bearer sk"}
    first = call(**mine)
    await generate(servicer, first, max_tokens=8)
    assert first.code() is None
    assert client.requests[0].priority == 3
    second = call(**mine)
    while second.code() is None:
        second = call(**mine)
        await generate(servicer, second, max_tokens=8)
    assert second.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "tokens a minute" in second.details()
    assert dict(second.trailing_metadata())["x-ratelimit-limit-tokens"] == "20"
    spent = call(**mine)
    assert (await servicer.Check(HealthCheckRequest(), spent)).status == HealthCheckResponse.SERVING


async def test_too_many_choices_and_unknown_tokens_are_refused(servicer_over: Any) -> None:
    servicer = servicer_over(steps((5,)), max_choices=2)
    many = call()
    await generate(servicer, many, n=3)
    assert many.code() == grpc.StatusCode.INVALID_ARGUMENT
    unknown = call()
    await servicer.Detokenize(pb.DetokenizeRequest(token_ids=[10**9]), unknown)
    assert unknown.code() == grpc.StatusCode.INVALID_ARGUMENT


class Threads:
    """Wraps functions, to know where they run."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def noting(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.seen.add(threading.get_ident())
            return work(*args, **kwargs)

        return noted


async def test_detokenizing_leaves_the_event_loop_alone(servicer_over: Any) -> None:
    servicer = servicer_over(steps((5,)))
    threads = Threads()

    class Ids(list[int]):
        __iter__ = threads.noting(list.__iter__)

    text = await detokenized(servicer.grpc_side.service.model(None), Ids([300] * 5_000))
    assert text
    assert threads.seen
    assert threading.get_ident() not in threads.seen
    many = call()
    await servicer.Detokenize(pb.DetokenizeRequest(token_ids=[300] * (MAX_TOKEN_IDS + 1)), many)
    assert many.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "too many values" in many.details()


async def test_texts_of_tokens_are_made_where_asked_for_and_on_a_thread(
    servicer_over: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = Threads()
    monkeypatch.setattr(Tokenizer, "token_text", threads.noting(Tokenizer.token_text))
    servicer = servicer_over(steps((5,)))
    text = "one two " * 1_000
    without = await servicer.Tokenize(pb.TokenizeRequest(text=text), call())
    assert not without.texts
    assert not threads.seen
    answer = await servicer.Tokenize(pb.TokenizeRequest(text=text, with_texts=True), call())
    assert "".join(answer.texts).strip() == text.strip()
    assert answer.token_ids == without.token_ids
    assert threading.get_ident() not in threads.seen


async def test_log_probabilities_of_a_long_prompt_leave_the_event_loop_alone(
    servicer_over: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = Threads()
    monkeypatch.setattr(answers, "_prompt_logprobs", threads.noting(answers._prompt_logprobs))
    params = pb.SamplingParams(max_tokens=3, prompt_logprobs=20)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[300] * 400), params=params)
    servicer = servicer_over(steps((5,), (6,), (7,)))
    sent = [pb.GenerateResponse.FromString(each) async for each in servicer.Generate(request, call())]
    assert [len(each.prompt_logprobs) for each in sent if each.prompt_logprobs] == [400]
    assert threads.seen
    assert threading.get_ident() not in threads.seen
