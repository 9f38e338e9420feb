"""What the answers of a service come to: tokens per second, percentiles, and how many kept a promise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from app.cli.bench.client import Answer
from app.cli.bench.report import percentiles
from engine.sampling_params import InvalidParameter

LABELS = {
    "ttft_ms": "time to first token, ms",
    "tpot_ms": "time per output token, ms",
    "itl_ms": "inter-token, ms",
    "e2e_ms": "end to end, ms",
}
PROMISES = ("ttft", "tpot", "e2e")


def parse_slo(texts: Sequence[str]) -> dict[str, float]:
    """Figure to the most milliseconds that it may take, from `ttft:200` and the like.

    Raises:
        InvalidParameter: one is something else, or comes twice.
    """
    slo: dict[str, float] = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            value = float(limit)
        except ValueError:
            value = math.nan
        if name not in PROMISES or not 0 < value < math.inf:
            raise InvalidParameter.of("slo", text, f"must be one of {', '.join(PROMISES)}, a colon and milliseconds")
        if name in slo:
            raise InvalidParameter.of("slo", text, f"{name} has been given already")
        slo[name] = value
    return slo


def latencies(answer: Answer) -> dict[str, float]:
    """ttft, e2e and, of two tokens or more, tpot, in milliseconds.

    As `vllm bench serve` has them: to the first token, to the last one, and what lies between over the tokens but one.
    """
    first, last = answer.token_times[0], answer.token_times[-1]
    times = {"ttft": 1000 * (first - answer.sent_at), "e2e": 1000 * (last - answer.sent_at)}
    if answer.output_tokens > 1:
        times["tpot"] = 1000 * (last - first) / (answer.output_tokens - 1)
    return times


def is_good(answer: Answer, slo: Mapping[str, float]) -> bool:
    """Whether an answer came, and within all limits that concern it."""
    return answer.failure is None and all(value <= slo.get(name, math.inf) for name, value in latencies(answer).items())


def samples(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Each of LABELS to its values, of the answers that completed."""
    values: dict[str, list[float]] = {name: [] for name in LABELS}
    for answer in answers:
        if answer.failure is None:
            for name, value in latencies(answer).items():
                values[f"{name}_ms"].append(value)
            values["itl_ms"] += (1000 * (after - before) for before, after in pairwise(answer.token_times))
    return values


def figures(answers: Sequence[Answer], seconds: float, slo: Mapping[str, float]) -> dict[str, Any]:
    """The object that `--json` writes; see `manta bench serve`."""
    completed = [answer for answer in answers if answer.failure is None]
    prompt_tokens = sum(answer.prompt_tokens for answer in completed)
    output_tokens = sum(answer.output_tokens for answer in completed)
    good = sum(is_good(answer, slo) for answer in answers)
    return {
        "completed": len(completed),
        "failed": len(answers) - len(completed),
        "failure": next((answer.failure for answer in answers if answer.failure is not None), None),
        "seconds": seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": len(completed) / seconds,
        "output_tok_s": output_tokens / seconds,
        "total_tok_s": (prompt_tokens + output_tokens) / seconds,
        **({"goodput": _goodput(slo, good, len(answers), seconds)} if slo else {}),
        **{name: percentiles(values) for name, values in samples(answers).items()},
    }


def _goodput(slo: Mapping[str, float], good: int, requests: int, seconds: float) -> dict[str, Any]:
    return {"slo_ms": dict(slo), "requests": good, "requests_per_s": good / seconds, "percent": 100 * good / requests}
