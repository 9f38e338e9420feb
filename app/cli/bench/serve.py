"""`manta bench serve`: what clients of a running service get."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.bench.options import Input, InputLen, Json, OutputLen, Plot, SharedPrefix, Trace, checked
from app.cli.errors import fail
from app.cli.service import ApiKey, service_url
from engine.sampling_params import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.cli.bench.client import Answer, Call, ServiceClient

SERVICE_ERROR = 1
WARMUP_TOKENS = 16


def serve(
    ctx: typer.Context,
    base_url: Annotated[str, typer.Option(help="Where the service is.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Which of its models; the first one if not given.")] = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    tokenizer: Annotated[
        str | None,
        typer.Option(help="demo, a folder, a .gguf file or a hub id; for prompts made here.", show_default="--model"),
    ] = None,
    input: Input = "random",
    trace: Trace = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests.", show_default="32 random ones, or all of a file")
    ] = None,
    input_len: InputLen = 128,
    output_len: OutputLen = None,
    shared_prefix: SharedPrefix = 0,
    text: Annotated[
        bool, typer.Option("--text", help="Prompts as text also where the service could take their tokens.")
    ] = False,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for outputs that do not end before their length.")] = True,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", "--max-concurrency", min=1, help="Most requests at once.", show_default="all"),
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(help="Requests a second, at the times of a Poisson process.", show_default="all at once"),
    ] = None,
    trace_speed: Annotated[
        float | None, typer.Option(help="Send a trace's requests at its own times, so many times as fast.")
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(help="ttft:MS, tpot:MS or e2e:MS; goodput counts the requests that keep all those given."),
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Short requests, all at once, before those that count.")] = 1,
    timeout: Annotated[float, typer.Option(min=0.001, help="Most seconds of a request; it has failed then.")] = 600,
    api_key: ApiKey = None,
    seed: Annotated[int, typer.Option(help="Of the random prompts and of a rate's times.")] = 0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Send requests to a running service of OpenAI's interface; what its clients wait for, and tokens per second.

    Closed loop with --concurrency, open loop with --request-rate or --trace-speed; with both a rate and a limit, a
    request that is due waits for its turn. Requests are streamed and greedy. Times are the client's, from a request's
    sending: to its first token, to its last one (end to end), between the events that bring tokens (inter-token), and
    between first and last over the tokens but one (time per output token). Exit code 1 if no request completed.

    --json: an object with command, version, machine, settings; completed, failed, failure (the first reason), seconds,
    prompt_tokens, output_tokens, requests_per_s, output_tok_s, total_tok_s; ttft_ms, tpot_ms, itl_ms, e2e_ms, each with
    mean, p10, p25, p50, p75, p90, p99; and, with --slo, goodput: slo_ms, requests, requests_per_s, percent.
    """
    with checked((json,), plot):
        from app.cli.bench.calls import Form, Workload, calls_of
        from app.cli.bench.client import PATHS, ServiceClient, served_models
        from app.cli.bench.goodput import figures, parse_slo
        from app.cli.bench.load import at_times, poisson_arrivals
        from app.cli.bench.report import write_report

        if endpoint not in PATHS:
            raise InvalidParameter.of("endpoint", endpoint, f"must be one of {', '.join(PATHS)}")
        _check_pace(request_rate, trace_speed, has_trace=trace is not None)
        promises = parse_slo(slo or [])
        url = service_url(base_url, "base_url")
        served = served_models(url, api_key)
        if not served or (model is not None and model not in served):
            raise InvalidParameter("model", f"the service at {url} has {', '.join(served) or 'no models'}")
        name = model or next(iter(served))
        form = Form(endpoint, name, as_text=text or endpoint == "chat", ignore_eos=ignore_eos)
        workload = Workload(input, trace, num_prompts, input_len, output_len, shared_prefix, seed)
        calls, shortened = calls_of(workload, form, tokenizer_name=tokenizer or name, max_model_len=served[name])
        if shortened:
            typer.echo(f"{shortened} of {len(calls)} requests were cut to the context, {served[name]:,}")
        if request_rate is not None:
            arrivals = poisson_arrivals(len(calls), request_rate, seed)
        elif trace_speed is not None:
            arrivals = [(call.arrival - calls[0].arrival) / trace_speed for call in calls]
        else:
            arrivals = [0.0] * len(calls)
        client = ServiceClient(url, endpoint, api_key=api_key, timeout=timeout)
        first_calls = [form.call("Hello", WARMUP_TOKENS)] * warmup
        answers, seconds = asyncio.run(_measure(client, first_calls, at_times(calls, arrivals), concurrency))
        result = figures(answers, seconds, promises)
        settings = {key: value for key, value in ctx.params.items() if key != "api_key"} | {"model": name}
        _show(result, name, url)
        write_report(json, "serve", settings, result)
        if plot is not None and result["completed"]:
            _draw(plot, answers)
    if not result["completed"]:
        raise typer.Exit(SERVICE_ERROR)


def _check_pace(request_rate: float | None, trace_speed: float | None, *, has_trace: bool) -> None:
    for name, value in (("request_rate", request_rate), ("trace_speed", trace_speed)):
        if value is not None and not 0 < value < float("inf"):
            raise InvalidParameter.of(name, value, "must be above 0")
    if trace_speed is not None and not has_trace:
        raise InvalidParameter("trace_speed", "--trace-speed needs a --trace")
    if trace_speed is not None and request_rate is not None:
        raise InvalidParameter("trace_speed", "--trace-speed and --request-rate cannot both say when requests are sent")


async def _measure(
    client: ServiceClient, warmup: Sequence[Call], calls: Sequence[Call], concurrency: int | None
) -> tuple[list[Answer], float]:
    from tqdm import tqdm

    from app.cli.bench.load import run_load

    async with client:
        answers, _ = await run_load(warmup, client.send, concurrency=None)
        for answer in answers:
            if answer.failure is not None:
                raise fail(f"the first request failed: {answer.failure}", SERVICE_ERROR)
        with tqdm(total=len(calls), desc="requests", disable=not sys.stderr.isatty()) as bar:
            return await run_load(calls, client.send, concurrency=concurrency, on_answer=lambda answer: bar.update())


def _show(result: dict[str, Any], model: str, url: str) -> None:
    from app.cli.bench.goodput import LABELS
    from app.cli.bench.report import PERCENTILES, show

    typer.echo(f"{model} at {url}")
    counts = (
        "completed",
        "failed",
        "seconds",
        "prompt_tokens",
        "output_tokens",
        "requests_per_s",
        "output_tok_s",
        "total_tok_s",
    )
    rows: list[list[object]] = [[name.replace("_", " "), result[name]] for name in counts]
    if "goodput" in result:
        goodput = result["goodput"]
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput["slo_ms"].items())
        rows.append([f"good requests per s ({limits})", goodput["requests_per_s"]])
        rows.append(["good requests, %", goodput["percent"]])
    show("Serve", ("", "total"), rows)
    columns = ["mean", *(f"p{p}" for p in PERCENTILES)]
    if times := [[label, *(result[name][c] for c in columns)] for name, label in LABELS.items() if result[name]]:
        show("What clients wait for", ("", *columns), times)
    if result["failed"]:
        typer.echo(f"the first failure: {result['failure']}", err=True)


def _draw(path: Any, answers: Sequence[Answer]) -> None:
    from app.cli.bench.goodput import LABELS, PROMISES, samples
    from app.cli.bench.plot import plot_distributions

    values = samples(answers)
    figures = (f"{name}_ms" for name in PROMISES)
    plot_distributions(path, "Serve", {LABELS[name]: values[name] for name in figures if values[name]})
