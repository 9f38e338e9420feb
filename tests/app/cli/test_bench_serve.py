from __future__ import annotations

import asyncio
import csv
import json
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from typer.testing import CliRunner, Result

from app.cli.bench.calls import Form, words_of
from app.cli.bench.client import Answer, Call, StreamReader
from app.cli.bench.goodput import figures, is_good, latencies, parse_slo, samples
from app.cli.bench.load import poisson_arrivals, run_load
from app.cli.main import app
from app.cli.service import service_url
from engine import InvalidParameter
from engine.request import EngineRequest
from engine.tokenizer import Tokenizer
from tests.app.cli.conftest import Serve
from tests.app.openai.scripted_client import ScriptedClient

MODELS = {"data": [{"id": "small"}]}
ANSWER = (
    b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n',
    b'data: {"choices": [{"text": "b", "finish_reason": "length"}]}\n\n',
    b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}\n\ndata: [DONE]\n\n',
)


def read(*pieces: bytes) -> StreamReader:
    """Each piece arrives a second after the one before."""
    reader = StreamReader()
    for now, piece in enumerate(pieces):
        reader.feed(piece, float(now))
    return reader


def event(**content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def delta(finish_reason: str | None = None, **content: Any) -> bytes:
    return event(choices=[{"delta": content, "finish_reason": finish_reason}])


# ---- reading a stream ----


def test_stream_is_read_wherever_it_is_cut() -> None:
    stream = b"".join(ANSWER).replace(b"\n", b"\r\n")
    reader = read(*(stream[index : index + 1] for index in range(len(stream))))
    answer = reader.answer(-1.0, 500.0)
    assert answer.failure is None
    assert answer.token_times == (float(stream.index(b"\n")), float(stream.index(b'"length"}]}') + 12))
    assert (answer.prompt_tokens, answer.output_tokens) == (5, 2)


def test_first_token_of_a_chat_is_not_its_role_nor_a_comment() -> None:
    reader = read(
        delta(role="assistant", content=""), b": wait\n\n", delta(content="Hi"), delta("stop"), b"data: [DONE]\n\n"
    )
    assert reader.token_times == [2.0]


def test_token_without_a_text_of_its_own_is_one() -> None:
    half = event(choices=[{"text": "", "finish_reason": None}])
    last = event(choices=[{"text": "", "finish_reason": "length"}])
    assert read(half, half, last).token_times == [0.0, 1.0]


def test_answer_that_has_no_text_at_all_is_timed_by_its_end() -> None:
    assert read(delta(role="assistant"), delta("stop")).answer(0, 2).token_times == (1.0,)


def test_events_are_counted_where_a_service_does_not_tell_usage() -> None:
    answer = read(*ANSWER[:2]).answer(0, 2)
    assert (answer.failure, answer.output_tokens) == (None, 2)


@pytest.mark.parametrize(("details", "cached"), [({"cached_tokens": 4}, 4), ({}, 0), (None, 0)])
def test_cached_tokens_are_those_that_a_service_tells(details: dict[str, int] | None, cached: int) -> None:
    usage = event(choices=[], usage={"prompt_tokens": 5, "prompt_tokens_details": details})
    assert read(*ANSWER[:2], usage).answer(0, 2).cached_tokens == cached


@pytest.mark.parametrize(
    ("pieces", "failure"),
    [
        (ANSWER[:1], "the stream broke off"),
        ((ANSWER[0], b"data: [DONE]\n\n"), "the stream broke off"),
        ((*ANSWER, event(error={"message": "the engine died"})), "the engine died"),
        ((b"data: {\n\n", *ANSWER), "not an event of OpenAI's interface: {"),
        ((b"data: 7\n\n", *ANSWER), "not an event of OpenAI's interface: 7"),
    ],
)
def test_stream_that_is_not_a_whole_answer_is_a_failure(pieces: Sequence[bytes], failure: str) -> None:
    assert read(*pieces).answer(0, 9).failure == failure


# ---- figures ----


def answer(*token_ms: float, sent_ms: float = 0, tokens: int | None = None, failure: str | None = None) -> Answer:
    times = tuple(each / 1000 for each in token_ms)
    return Answer(sent_ms / 1000, 9.0, times, 7, len(times) if tokens is None else tokens, failure)


def test_times_of_an_answer() -> None:
    assert latencies(answer(150, 170, 250, sent_ms=100, tokens=6)) == pytest.approx(
        {"ttft": 50, "tpot": 20, "e2e": 150}
    )
    assert samples([answer(150, 170, 250)])["itl_ms"] == pytest.approx([20, 80])


def test_single_token_has_no_time_per_output_token() -> None:
    assert latencies(answer(50)).keys() == {"ttft", "e2e"}
    assert is_good(answer(50), {"tpot": 0.001})


def test_figures_leave_failures_out_and_count_them() -> None:
    answers = [answer(*range(10 * first, 10 * first + 2), tokens=4) for first in range(1, 101)]
    result = figures([*answers, answer(1, 2, failure="first"), answer(failure="second")], 2.0, {})
    assert (result["completed"], result["failed"], result["failure"]) == (100, 2, "first")
    assert (result["output_tok_s"], result["total_tok_s"], result["requests_per_s"]) == (200, 550, 50)
    assert {name: result["ttft_ms"][name] for name in ("p50", "p90", "p99")} == pytest.approx(
        {"p50": 505, "p90": 901, "p99": 990.1}
    )
    assert result["tpot_ms"]["p50"] == pytest.approx(1 / 3)
    assert "goodput" not in result


def test_goodput_counts_requests_that_keep_every_promise() -> None:
    answers = [answer(10, 30), answer(20, 90), answer(40, 50), answer(failure="none")]
    goodput = figures(answers, 0.5, {"ttft": 20, "tpot": 20})["goodput"]
    assert goodput == {"slo_ms": {"ttft": 20, "tpot": 20}, "requests": 1, "requests_per_s": 2, "percent": 25}


def test_slo_is_read() -> None:
    assert parse_slo(["ttft:200", "e2e:1e3"]) == {"ttft": 200, "e2e": 1000}


@pytest.mark.parametrize("texts", [["ttft"], ["ttft:"], ["itl:3"], ["tpot:0"], ["tpot:inf"], ["e2e:1", "e2e:2"]])
def test_wrong_slo_is_refused(texts: list[str]) -> None:
    with pytest.raises(InvalidParameter, match="slo="):
        parse_slo(texts)


# ---- load ----


def test_poisson_arrivals_have_their_rate_and_follow_from_the_seed() -> None:
    arrivals = poisson_arrivals(4001, 50.0, seed=1)
    gaps = [after - before for before, after in pairwise(arrivals)]
    assert arrivals[0] == 0
    assert min(gaps) >= 0
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 50, rel=0.1)
    # Of an exponential distribution, 1 / e is above the mean.
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.04)
    assert arrivals == poisson_arrivals(4001, 50.0, seed=1) != poisson_arrivals(4001, 50.0, seed=2)


class Timeline:
    """A clock that moves when everyone who waits for it does: seconds are virtual."""

    def __init__(self) -> None:
        self.now = 0.0
        self.wakes: list[tuple[float, asyncio.Event]] = []
        self.sent: list[tuple[bytes, float]] = []
        self.running = self.most_running = 0

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self.wakes.append((self.now + seconds, woken))
        await woken.wait()

    async def send(self, call: Call) -> Answer:
        """Takes as many seconds as the body says."""
        self.sent.append((call.body, self.now))
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        sent_at = self.now
        await self.sleep(float(call.body))
        self.running -= 1
        return Answer(sent_at, self.now)

    async def run(self, calls: Sequence[Call], concurrency: int | None) -> tuple[list[Answer], float]:
        load = asyncio.create_task(
            run_load(calls, self.send, concurrency=concurrency, clock=lambda: self.now, sleep=self.sleep)
        )
        while not load.done():
            for _ in range(10):  # until nobody has anything to do at this time
                await asyncio.sleep(0)
            if self.wakes:
                due = min(self.wakes, key=lambda each: each[0])
                self.wakes.remove(due)
                self.now = due[0]
                due[1].set()
        return await load


async def test_closed_loop_sends_as_one_ends() -> None:
    time = Timeline()
    answers, seconds = await time.run([Call(each) for each in (b"5", b"1", b"2", b"4")], 2)
    assert time.sent == [(b"5", 0), (b"1", 0), (b"2", 1), (b"4", 3)]
    assert time.most_running == 2
    assert [each.ended_at for each in answers] == [5, 1, 3, 7]
    assert seconds == 7


async def test_open_loop_sends_whatever_became_of_those_before() -> None:
    time = Timeline()
    _, seconds = await time.run([Call(b"10", 0), Call(b"9", 1), Call(b"1", 1.5)], None)
    assert [at for _, at in time.sent] == [0, 1, 1.5]
    assert seconds == 10


async def test_call_that_is_due_waits_for_its_turn() -> None:
    time = Timeline()
    await time.run([Call(b"10", 0), Call(b"1", 2), Call(b"1", 20)], 1)
    assert [at for _, at in time.sent] == [0, 10, 20]


# ---- requests ----


def test_text_of_words_has_as_many_tokens_as_words(tokenizer: Tokenizer) -> None:
    words = words_of(tokenizer)
    text = "".join(words[index * 37 % len(words)] for index in range(500))
    assert len(tokenizer.encode(text, add_special_tokens=False)) == 500
    assert len(set(words)) > 1000


def test_bodies_are_those_of_their_endpoint() -> None:
    chat = json.loads(Form("chat", "m", as_text=True, ignore_eos=False).call("Hi", 3).body)
    assert (chat["messages"], chat["max_tokens"]) == ([{"role": "user", "content": "Hi"}], 3)
    assert chat["stream"]
    assert "ignore_eos" not in chat
    completion = json.loads(Form("completions", "m", as_text=False, ignore_eos=True).call((1, 2), 3).body)
    assert (completion["prompt"], completion["ignore_eos"]) == ([1, 2], True)


@pytest.mark.parametrize("url", ["127.0.0.1:80", "http://127.0.0.1:80/", "http://127.0.0.1:80/v1/"])
def test_address_may_be_written_in_several_ways(url: str) -> None:
    assert service_url(url) == "http://127.0.0.1:80"


@pytest.mark.parametrize("url", ["http://", "ftp://host", "http://host:port", "https://user:a-secret@host"])
def test_address_that_is_none_is_refused_without_a_secret(url: str) -> None:
    with pytest.raises(InvalidParameter, match="base_url") as refused:
        service_url(url, "base_url")
    assert "a-secret" not in str(refused.value)


# ---- the command ----


def bench(*args: object) -> Result:
    return CliRunner().invoke(app, ["bench", "serve", *map(str, args)])


def in_order(request: EngineRequest) -> list[tuple[int, ...]]:
    return [(100 + index,) for index in range(request.params.max_tokens or 1)]


def test_our_service_gets_the_tokens_that_were_asked_for(serve: Serve, demo_folder: Path, tmp_path: Path) -> None:
    client = ScriptedClient(in_order)
    out, plot = tmp_path / "out.json", tmp_path / "plot.svg"
    sizes = ("--num-prompts", 5, "--input-len", 10, "--shared-prefix", 16, "--output-len", 4, "--concurrency", 2)
    promises = ("--slo", "e2e:600000", "--slo", "ttft:0.0001")
    key = ("--api-key", "a-secret")
    url = serve(client)
    result = bench(
        "--base-url", url, "--tokenizer", demo_folder, *sizes, *promises, *key, "--json", out, "--plot", plot
    )
    assert result.exit_code == 0, result.stderr
    assert f"demo at {url}" in result.stdout
    assert "time per output token, ms" in result.stdout
    content = json.loads(out.read_text())
    assert (content["completed"], content["failed"], content["failure"]) == (5, 0, None)
    assert (content["prompt_tokens"], content["output_tokens"]) == (130, 20)
    assert content["output_tok_s"] == pytest.approx(20 / content["seconds"])
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert 0 <= content[name]["p50"] <= content[name]["p90"] <= content[name]["p99"]
    assert content["goodput"]["requests"] == 0
    assert content["settings"]["concurrency"] == 2
    assert "a-secret" not in out.read_text() + result.output
    assert plot.stat().st_size
    warmup, *measured = client.requests
    assert warmup.params.max_tokens == 16
    assert len({request.prompt_token_ids[:16] for request in measured}) == 1
    assert all(request.params.ignore_eos and request.params.temperature == 0 for request in measured)


def test_chat_gets_text_of_the_length_asked_for(serve: Serve, demo_folder: Path, tokenizer: Tokenizer) -> None:
    client = ScriptedClient(in_order)
    options = ("--endpoint", "chat", "--tokenizer", demo_folder, "--input-len", 40, "--num-prompts", 2, "--warmup", 0)
    result = bench("--base-url", serve(client), *options)
    assert result.exit_code == 0, result.stderr
    empty = len(tokenizer.apply_chat_template([{"role": "user", "content": ""}]))
    assert [len(request.prompt_token_ids) for request in client.requests] == [empty + 40] * 2


def test_trace_is_replayed_in_its_order_and_lengths(serve: Serve, demo_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    with path.open("w") as file:
        rows = [("2023-11-16 18:15:46.0", 12, 3), ("2023-11-16 18:15:47.0", 9, 1)]
        csv.writer(file).writerows([("TIMESTAMP", "ContextTokens", "GeneratedTokens"), *rows])
    client = ScriptedClient(in_order)
    options = ("--trace", path, "--trace-speed", 100, "--concurrency", 1, "--tokenizer", demo_folder, "--warmup", 0)
    result = bench("--base-url", serve(client), *options)
    assert result.exit_code == 0, result.stderr
    assert [(len(each.prompt_token_ids), each.params.max_tokens) for each in client.requests] == [(12, 3), (9, 1)]


# A service of nobody's: it answers a prompt that is text with what a test says.
Answering = Callable[[dict[str, Any]], Response]


def service(answering: Answering) -> Starlette:
    async def complete(request: Request) -> Response:
        return answering(await request.json())

    async def models(request: Request) -> Response:
        return JSONResponse(MODELS)

    return Starlette(
        routes=[Route("/v1/models", models), Route("/v1/completions", complete, methods=["POST"])],
    )


def stream(*pieces: bytes, then_hang: bool = False) -> Response:
    async def body() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
        if then_hang:
            await asyncio.sleep(3600)

    return StreamingResponse(body(), media_type="text/event-stream")


def prompts(folder: Path, *texts: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def test_failures_are_counted_and_the_first_is_told(serve_app: Callable[[Any], str], tmp_path: Path) -> None:
    def answering(body: dict[str, Any]) -> Response:
        match body["prompt"]:
            case "refuse":
                return JSONResponse({"error": {"message": "too busy"}}, 429)
            case "break":
                return stream(ANSWER[0])
        return stream(*ANSWER)

    path, out = prompts(tmp_path, "fine", "refuse", "break", "fine"), tmp_path / "out.json"
    url = serve_app(service(answering))
    result = bench("--base-url", url, "--text", "--input", path, "--concurrency", 1, "--json", out)
    assert result.exit_code == 0, result.stderr
    content = json.loads(out.read_text())
    assert (content["completed"], content["failed"], content["output_tokens"]) == (2, 2, 4)
    assert content["failure"] == "status 429: too busy"
    assert "the first failure: status 429: too busy" in result.stderr


def test_run_of_failures_alone_exits_with_1(serve_app: Callable[[Any], str], tmp_path: Path) -> None:
    path, out = prompts(tmp_path, "hang"), tmp_path / "out.json"
    url = serve_app(service(lambda body: stream(then_hang=True)))
    result = bench("--base-url", url, "--text", "--input", path, "--timeout", 0.2, "--warmup", 0, "--json", out)
    assert result.exit_code == 1
    content = json.loads(out.read_text())
    assert (content["completed"], content["failure"], content["ttft_ms"]) == (0, "no end within 0.2 s", {})


def test_warmup_that_fails_ends_the_run(serve_app: Callable[[Any], str], tmp_path: Path) -> None:
    url = serve_app(service(lambda body: JSONResponse({"error": {"message": "no key"}}, 401)))
    result = bench("--base-url", url, "--text", "--input", prompts(tmp_path, "fine"))
    assert (result.exit_code, result.stderr) == (1, "error: the first request failed: status 401: no key\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--base-url", "http://127.0.0.1:9"), "no service answers at http://127.0.0.1:9"),
        (("--base-url", "ftp://127.0.0.1"), "base_url='ftp://127.0.0.1': must be http:// or https:// and a host"),
        (("--endpoint", "embeddings"), "endpoint='embeddings': must be one of completions, chat"),
        (("--request-rate", "0"), "request_rate=0.0: must be above 0"),
        (("--trace-speed", "2"), "--trace-speed needs a --trace"),
        (("--slo", "fast"), "slo='fast': must be one of ttft, tpot, e2e"),
    ],
)
def test_wrong_option_is_told_in_one_line(args: Sequence[str], message: str) -> None:
    result = bench(*args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_unknown_model_is_told_with_those_there_are(serve_app: Callable[[Any], str]) -> None:
    result = bench("--base-url", serve_app(service(lambda body: stream(*ANSWER))), "--model", "big")
    assert result.exit_code == 2
    assert "has small" in result.stderr
