"""`manta generate`: completions without a service."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from app.cli.engine_args import engine_args
from app.cli.errors import fail, user_errors
from app.cli.sampling import MODELS, Seed, Stop, Temperature, TopK, TopP

if TYPE_CHECKING:
    from engine import LLM, RequestOutput, SamplingParams

Row = dict[str, Any]


def generate(
    ctx: typer.Context,
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts, beside those of --file.")] = None,
    model: Annotated[str, typer.Option(help="demo, a folder, a .gguf file or a hub id.")] = "demo",
    file: Annotated[
        Path | None,
        typer.Option(help='One prompt a line, or .jsonl with rows of {"prompt": …} or {"messages": […]}; - is stdin.'),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the rows with their completions here, as JSONL.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a completion.")] = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    n: Annotated[int, typer.Option(help="Completions for each prompt.")] = 1,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt plus output.", show_default=MODELS)] = None,
) -> None:
    """Complete prompts on this machine, all of them in one batch.

    Options not named here are arguments of the engine, such as --device cpu, --num-threads 4 or
    --no-enable-prefix-caching.
    """
    with user_errors():
        # The parser takes options that it does not know for prompts.
        arguments, texts = engine_args(ctx, prompts or ())
        rows: list[Row] = [{"prompt": text} for text in texts]
        if file is not None:
            rows += _read(file)
        if not rows:
            raise fail("there are no prompts; give them as arguments or by --file")

        from engine import LLM, SamplingParams

        sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed, "stop": stop, "n": n}
        SamplingParams.with_defaults({"max_tokens": max_tokens}, **sampling)  # refused before the model is loaded
        if output is not None:
            output.open("a").close()  # as is a file that cannot be written
        with LLM(model, dtype=dtype, max_model_len=max_model_len, **arguments) as llm:
            defaults = {**llm.model_config.generation_defaults, "max_tokens": max_tokens}
            results = _complete(llm, rows, SamplingParams.with_defaults(defaults, **sampling))
        if output is None:
            _show(results)
        else:
            with output.open("w", encoding="utf-8") as sink:
                _write(sink, rows, results)


def _read(path: Path) -> list[Row]:
    text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if path.suffix != ".jsonl":
        return [{"prompt": line} for _, line in lines]
    return [_row(path, number, line) for number, line in lines]


def _row(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise fail(f"{path}, line {number}: not JSON: {error}") from None
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise fail(f"{path}, line {number}: must be an object with either prompt or messages")
    if not isinstance(row.get("prompt", ""), str | list) or not isinstance(row.get("messages", []), list):
        raise fail(f"{path}, line {number}: prompt must be a text or token ids, messages a list")
    return row


def _complete(llm: LLM, rows: list[Row], params: SamplingParams) -> list[RequestOutput]:
    show_progress = sys.stderr.isatty()
    results: dict[int, RequestOutput] = {}
    for kind, run in (("prompt", llm.generate), ("messages", llm.chat)):
        chosen = [index for index, row in enumerate(rows) if kind in row]
        if chosen:
            outputs = run([rows[index][kind] for index in chosen], params, use_tqdm=show_progress)
            results.update(zip(chosen, outputs, strict=True))
    return [results[index] for index in range(len(rows))]


def _show(results: list[RequestOutput]) -> None:
    """The texts; with a line of its own before each where there are several."""
    several = len(results) > 1 or len(results[0].outputs) > 1
    for number, result in enumerate(results, 1):
        for completion in result.outputs:
            if several:
                which = f"{number}" if len(result.outputs) == 1 else f"{number}.{completion.index + 1}"
                typer.secho(f"── {which}", dim=True)
            typer.echo(completion.text)


def _write(sink: TextIO, rows: list[Row], results: list[RequestOutput]) -> None:
    for row, result in zip(rows, results, strict=True):
        completions = [
            {"text": each.text, "finish_reason": each.finish_reason, "num_tokens": len(each.token_ids)}
            for each in result.outputs
        ]
        sink.write(json.dumps({**row, "completions": completions}, ensure_ascii=False) + "\n")
