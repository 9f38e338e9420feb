"""The service through Serve's gRPC proxy, by a real client, beside its HTTP interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from app.api_keys import hash_key
from app.config import CONTROL_CALLS, ServiceConfig
from app.grpc import manta_pb2 as pb
from app.grpc.exchange import MOST_WATCHERS
from app.grpc.manta_pb2_grpc import MantaStub
from app.main import build

KEY = "sk-manta-a-test"
AUTHORIZED = [("authorization", f"Bearer {KEY}")]
WAITING = 3
"""For an ingress that is full, in either proxy."""

LIMITED = [("authorization", "Bearer sk-manta-limited")]


@pytest.fixture(scope="module")
def service(serve_url: str, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its URL."""
    from ray import serve

    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(
        f'- {{name: alice, hash: "{hash_key(KEY.encode())}"}}\n'
        f'- {{name: bob, hash: "{hash_key(b"sk-manta-limited")}", requests_per_minute: 1}}\n'
    )
    config = ServiceConfig.model_validate(
        {
            "models": [
                {
                    "name": "tiny",
                    "model": str(tiny_folder),
                    "engine": {
                        "load_format": "dummy",
                        "dtype": "float32",
                        "num_threads": 1,
                        "num_kv_blocks": 64,
                        "max_num_seqs": 1,
                        "max_num_batched_tokens": 256,
                    },
                    "health_check_period_s": 1,
                    "graceful_shutdown_timeout_s": 5,
                }
            ],
            "access": {"keys_file": str(keys)},
            "ingress": {
                "num_cpus": 0.1,
                "graceful_shutdown_timeout_s": 5,
                "max_body_bytes": 20_000,
                "max_ongoing_requests": 1,  # and the room for control calls beside it
                "max_queued_requests": WAITING,
                "metrics_timeout_s": 20,
                "metrics_max_age_s": 0,
            },
            "log_level": "WARNING",
        }
    )
    serve.run(build(config), name="grpc", route_prefix="/")
    yield serve_url
    serve.delete("grpc")


@pytest.fixture
async def channel(service: str, grpc_port: int) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        yield channel


@pytest.fixture
def manta(channel: grpc.aio.Channel) -> Any:
    return MantaStub(channel)


@pytest.fixture
async def http(service: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=service, timeout=60, headers={"authorization": f"Bearer {KEY}"}) as client:
        yield client


async def whole(stream: Any) -> Any:
    """A stream's messages as one."""
    merged = None
    async for message in stream:
        merged = message if merged is None else merged
        if merged is not message:
            merged.MergeFrom(message)
    return merged


def text(answer: Message, index: int = 0) -> str:
    return "".join(delta.text for delta in answer.deltas if delta.index == index)


def tokens(answer: Message) -> list[int]:
    return [token for delta in answer.deltas for token in delta.token_ids]


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (whole(call) if hasattr(call, "__aiter__") else call)
    return caught.value


def trailing(error: grpc.aio.AioRpcError) -> dict[str, str]:
    return dict(error.trailing_metadata())


async def deadline_met(call: Callable[[float], Any]) -> None:
    """Has a stream end by its deadline when it has begun, however long that takes on this machine."""
    for seconds in (1.0, 2.0, 4.0, 8.0, 16.0):
        stream = call(seconds)
        began = False
        with suppress(grpc.aio.AioRpcError):
            async for _ in stream:
                began = True
        assert await stream.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        if began:
            return
    pytest.fail("no message came")


async def sample(http: httpx.AsyncClient, name: str, **labels: str) -> float:
    page = (await http.get("/metrics")).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def until(condition: Any, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("choice", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7, "top_k": 50}])
async def test_tokens_are_those_of_http(manta: Any, http: httpx.AsyncClient, choice: dict[str, Any]) -> None:
    sampling = {"max_tokens": 12, "ignore_eos": True, "logprobs": 2, **choice}
    answer = await whole(
        manta.Generate(
            pb.GenerateRequest(text="one two three", params=pb.SamplingParams(**sampling)), metadata=AUTHORIZED
        )
    )
    body = {"model": "tiny", "prompt": "one two three", **sampling}
    expected = (await http.post("/v1/completions", json=body)).json()
    choice = expected["choices"][0]
    assert text(answer) == choice["text"]
    assert [each.token.logprob for delta in answer.deltas for each in delta.logprobs] == pytest.approx(
        choice["logprobs"]["token_logprobs"]
    )
    assert all(len(each.top) == 2 for delta in answer.deltas for each in delta.logprobs)
    assert [delta.finish_reason for delta in answer.deltas if delta.HasField("finish_reason")] == ["length"]
    assert answer.usage.prompt_tokens == expected["usage"]["prompt_tokens"]
    assert answer.usage.completion_tokens == len(tokens(answer)) == 12


async def test_a_chat_answers_as_over_http(manta: Any, http: httpx.AsyncClient) -> None:
    message = pb.Message(role="user", content="Hello!")
    request = pb.ChatRequest(
        conversation=pb.Conversation(messages=[message]), params=pb.SamplingParams(temperature=0, max_tokens=10, n=2)
    )
    answer = await whole(manta.Chat(request, metadata=AUTHORIZED))
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello!"}],
        "temperature": 0,
        "max_tokens": 10,
        "n": 2,
    }
    expected = (await http.post("/v1/chat/completions", json=body)).json()
    assert [text(answer, index) for index in range(2)] == [
        choice["message"]["content"] for choice in expected["choices"]
    ]
    assert answer.usage.prompt_tokens == expected["usage"]["prompt_tokens"]


async def test_text_becomes_tokens_and_text_again(manta: Any) -> None:
    tokenized = await manta.Tokenize(pb.TokenizeRequest(text="one two three", with_texts=True), metadata=AUTHORIZED)
    assert "".join(tokenized.texts).strip() == "one two three"
    again = await manta.Detokenize(pb.DetokenizeRequest(token_ids=tokenized.token_ids), metadata=AUTHORIZED)
    assert again.text.endswith("one two three")


async def test_models_are_listed(manta: Any) -> None:
    answer = await manta.Models(pb.ModelsRequest(), metadata=AUTHORIZED)
    assert [(model.name, model.max_model_len) for model in answer.models] == [("tiny", 512)]


async def test_health_needs_no_key(channel: grpc.aio.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    for name in ("", "manta.v1.Manta"):
        assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == serving
    unknown = await refusal(health.Check(health_pb2.HealthCheckRequest(service="nobody")))
    assert unknown.code() == grpc.StatusCode.NOT_FOUND
    watch = health.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == serving
    watch.cancel()


async def test_a_key_is_asked_for(manta: Any) -> None:
    assert (await refusal(manta.Models(pb.ModelsRequest()))).code() == grpc.StatusCode.UNAUTHENTICATED
    unknown = [("authorization", "Bearer sk-manta-another")]
    stream = manta.Generate(pb.GenerateRequest(text="a"), metadata=unknown)
    assert (await refusal(stream)).code() == grpc.StatusCode.PERMISSION_DENIED


async def test_a_limit_says_when_to_come_again(manta: Any) -> None:
    request = pb.GenerateRequest(text="a", params=pb.SamplingParams(max_tokens=1))
    await whole(manta.Generate(request, metadata=LIMITED))
    error = await refusal(manta.Generate(request, metadata=LIMITED))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(trailing(error)["retry-after"]) > 1
    assert trailing(error)["x-ratelimit-remaining-requests"] == "0"


async def test_a_wrong_request_is_told_its_field_and_bears_its_id(manta: Any) -> None:
    request = pb.GenerateRequest(text="a", params=pb.SamplingParams(temperature=-0.5))
    error = await refusal(manta.Generate(request, metadata=[*AUTHORIZED, ("x-request-id", "mine-7")]))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "temperature=-0.5: must be 0 or more"
    assert trailing(error)["error-param"] == "temperature"
    assert trailing(error)["x-request-id"] == "mine-7"
    missing = await refusal(manta.Generate(pb.GenerateRequest(text="a", model="none"), metadata=AUTHORIZED))
    assert missing.code() == grpc.StatusCode.NOT_FOUND
    long = await refusal(manta.Tokenize(pb.TokenizeRequest(text="a" * 20_001), metadata=AUTHORIZED))
    assert long.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("way", ["cancelled", "deadline"])
async def test_a_call_that_ends_early_gives_its_blocks_back(manta: Any, http: httpx.AsyncClient, way: str) -> None:
    # One after the other: the last ones are far away when the call ends.
    params = pb.SamplingParams(max_tokens=480, n=128, ignore_eos=True, temperature=0)
    request = pb.GenerateRequest(text="one two three", params=params)
    aborted = await sample(http, "manta_requests_finished_total", reason="abort")
    if way == "cancelled":
        stream = manta.Generate(request, metadata=AUTHORIZED)
        assert await stream.read() is not grpc.aio.EOF
        stream.cancel()
    else:
        await deadline_met(lambda seconds: manta.Generate(request, metadata=AUTHORIZED, timeout=seconds))

    async def are_aborted() -> bool:
        return await sample(http, "manta_requests_finished_total", reason="abort") > aborted

    async def is_idle() -> bool:
        gauges = ("requests_running", "requests_waiting", "kv_cache_usage_ratio", "grpc_requests_in_flight")
        return not any([await sample(http, f"manta_{name}") for name in gauges])

    await until(are_aborted)
    await until(is_idle)


async def test_calls_are_counted(manta: Any, http: httpx.AsyncClient) -> None:
    counted = {"method": "Models", "status": "OK"}
    before = await sample(http, "manta_grpc_requests_total", **counted)
    await manta.Models(pb.ModelsRequest(), metadata=AUTHORIZED)
    assert await sample(http, "manta_grpc_requests_total", **counted) == before + 1
    assert await sample(http, "manta_grpc_request_duration_seconds_count", method="Models") >= 1


async def test_watchers_leave_room_for_requests(channel: grpc.aio.Channel, manta: Any, http: httpx.AsyncClient) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(1 + CONTROL_CALLS)]
    try:
        answers = await asyncio.gather(*(watch.read() for watch in watches), return_exceptions=True)
        serving = [answer for answer in answers if isinstance(answer, Message) and answer.status == 1]
        refused = [await watch.code() for watch, answer in zip(watches, answers, strict=True) if answer not in serving]
        assert len(serving) == MOST_WATCHERS
        assert set(refused) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert (await http.get("/health")).status_code == 200
        assert (await manta.Models(pb.ModelsRequest(), metadata=AUTHORIZED)).models
    finally:
        for watch in watches:
            watch.cancel()


@asynccontextmanager
async def half_a_request(url: str) -> AsyncIterator[None]:
    """A request whose body is never sent: it holds a place of the ingress, or of those who wait for one."""
    address = httpx.URL(url)
    _, writer = await asyncio.open_connection(address.host, address.port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address.host}\r\nauthorization: Bearer {KEY}\r\n"
    writer.write((head + "content-type: application/json\r\ncontent-length: 100\r\n\r\n").encode())
    await writer.drain()
    try:
        yield
    finally:
        writer.close()


async def test_a_full_ingress_lets_so_many_wait_and_refuses_others(
    service: str, manta: Any, http: httpx.AsyncClient
) -> None:
    async with AsyncExitStack() as held:
        answer = httpx.Response(200)

        async def is_full() -> bool:
            nonlocal answer
            await held.enter_async_context(half_a_request(service))
            try:
                answer = await http.get("/version", timeout=0.2)
            except httpx.TimeoutException:  # it waits for a place
                return False
            return answer.status_code == 503

        # One after the other: of those that come at the same moment some would be refused before it is full.
        async with asyncio.timeout(60):
            while not await is_full():
                pass
        assert answer.headers["retry-after"] == "1"
        # Those who wait over gRPC are counted apart.
        calls = [manta.Models(pb.ModelsRequest(), metadata=AUTHORIZED) for _ in range(WAITING + 1)]
        try:
            async with asyncio.timeout(20):
                ended, _ = await asyncio.wait(
                    [asyncio.ensure_future(each.code()) for each in calls], return_when=asyncio.FIRST_COMPLETED
                )
            assert {each.result() for each in ended} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        finally:
            for each in calls:
                each.cancel()

    async def is_served() -> bool:
        return (await http.get("/health")).status_code == 200

    await until(is_served)
