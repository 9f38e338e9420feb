"""Sampling as its documentation says it, with full sorts and float64 probabilities; and the tests' statistics."""

from __future__ import annotations

import math

import numpy as np

from engine.request import EngineRequest
from engine.sampling.noise import gumbel
from engine.sampling_params import SamplingParams

TOLERANCE = 1e-4
"""What float32 may make of a score or a probability."""


def request(params: SamplingParams, *, seed: int = 0, prompt=(0,), output=(), eos=()) -> EngineRequest:
    return EngineRequest(
        request_id="r",
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(output),
        params=params,
        seed=seed,
        eos_token_ids=tuple(eos),
    )


def processed(logits: np.ndarray, spec: EngineRequest, token_ids: list[int]) -> np.ndarray:
    """Logits after min_tokens, logit_bias and penalties: float32 numbers."""
    params, output = spec.params, token_ids[len(spec.prompt_token_ids) :]
    repetition, number = np.float32(params.repetition_penalty), np.float32
    logits = logits.copy()
    if len(output) < params.min_tokens:
        for token in {*spec.eos_token_ids, *params.stop_token_ids}:
            logits[token] = -np.inf
    for token, bias in params.logit_bias.items():
        logits[token] += number(bias)
    for token in set(token_ids):
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token in set(output):
        logits[token] -= number(params.frequency_penalty) * number(output.count(token))
        logits[token] -= number(params.presence_penalty)
    return logits.astype(np.float64)


def kept_tokens(logits: np.ndarray, params: SamplingParams, slack: float = 0.0) -> list[int]:
    """Tokens that min_p, top_k and top_p leave, best first; a positive slack leaves the doubtful ones, too."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    weights = {token: math.exp((logits[token] - logits[order[0]]) / np.float32(params.temperature)) for token in order}
    kept = [token for token in order if weights[token] >= min(1, params.min_p * (1 - slack))]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total, reached, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        nucleus.append(token)
        reached += weights[token]
        if params.top_p < 1 and reached >= params.top_p * total * (1 + slack):
            break
    return nucleus


def likely_tokens(logits: np.ndarray, params: SamplingParams, seed: int, position: int) -> set[int]:
    """The token to draw; more than one where float32 may tip the balance."""
    if params.temperature == 0:
        return {int(token) for token in np.flatnonzero(logits >= logits.max() - TOLERANCE)}
    noise = gumbel(seed, position, np.arange(len(logits))).astype(np.float64)
    scores = (logits - logits.max()) / np.float32(params.temperature) + noise
    result = set()
    for slack in (-TOLERANCE, TOLERANCE):
        kept = kept_tokens(logits, params, slack)
        best = max(scores[token] for token in kept)
        result |= {token for token in kept if scores[token] >= best - TOLERANCE}
    return result


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


def chi_square_limit(degrees: int) -> float:
    """What one chi-square in ten thousand exceeds (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.719 * spread**0.5) ** 3
