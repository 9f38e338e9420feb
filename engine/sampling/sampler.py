"""Draws the next token of each request of a batch.

A row of logits goes through min_tokens, logit_bias, the penalties, the temperature and the filters (see `candidates`);
the next token is then

    argmax over the candidates of (logit - best logit) / temperature + gumbel(seed, position, token id)

in float32, equal scores by lower id, and the plain argmax at temperature 0. A row's token depends on nothing but its
own logits, parameters, seed, position and history. Log-probabilities are of the raw logits.

kernels/cpu/sample.cpp does all of it in one call; what follows is the same for logits on other devices and where there
are no such kernels.

Whatever is done to a whole vocabulary costs: a row is first searched for its best tokens, and those get noise. The
others are looked at only where one of them may still win, which the noise's known range tells exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from engine.outputs import TokenLogprobs
from engine.sampling.candidates import Candidates, Filters, scaled_logits, select
from engine.sampling.logprobs import repaired, token_logprobs
from engine.sampling.noise import GUMBEL_MAX, TOKENS_PER_BLOCK, gumbel, gumbel_of_bits, random_blocks
from engine.sampling.state import NO_LOGPROBS, SamplingState
from kernels.cpu.library import CpuKernels
from kernels.cpu.sampling_library import SamplingBatch

_SLACK = 1e-4
"""Far above the rounding errors of a score, far below what would let many tokens through."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleResult:
    """What a step drew.

    Attributes:
        token_ids: int64 [n].
        logprobs: one for each row; None where the request did not ask.
        broken: indexes of rows without a single usable logit (all NaN or -inf); their token ids mean nothing.
    """

    token_ids: np.ndarray
    logprobs: list[TokenLogprobs | None]
    broken: tuple[int, ...] = ()


class _Draw(NamedTuple):
    """A row that needs noise, and its place in the batch."""

    place: int
    logits: np.ndarray
    best: float
    filters: Filters
    candidates: Candidates


def sample(logits: torch.Tensor, state: SamplingState, rows: np.ndarray, num_tokens: np.ndarray) -> SampleResult:
    """The next token of each row.

    Args:
        logits: float [n, vocab], raw, on any device; not changed. NaN counts as -inf, +inf as the largest number.
        rows: integers [n], each logits row's place in `state`; may repeat.
        num_tokens: integers [n], tokens that the sequence has, which is the position of the next one.
    """
    logits = logits.detach().float()
    if state.kernels is not None:
        return _sample_in_one_call(state.kernels, logits, state, rows, num_tokens)
    token_ids, best = _argmax(logits)
    adjusted = state.always_adjusted[rows] | (num_tokens < state.min_length[rows])
    temperature = state.temperature[rows]
    busy = np.flatnonzero(adjusted | (temperature > 0) | ~np.isfinite(best))
    draws: list[_Draw] = []
    broken: list[int] = []
    with np.errstate(over="ignore"):  # a low temperature takes unlikely tokens to -inf
        for i, row_logits in zip(busy.tolist(), _host_rows(logits, busy), strict=True):
            row = int(rows[i])
            if adjusted[i]:
                row_logits = state.adjusted(row, int(num_tokens[i]), row_logits)
                token_ids[i] = row_logits.argmax()
            if not np.isfinite(row_logits[token_ids[i]]):
                row_logits = repaired(row_logits)
                token_ids[i] = row_logits.argmax()
            row_best = row_logits[token_ids[i]]
            if row_best == -np.inf:
                broken.append(i)
            elif temperature[i] > 0:
                filters = Filters(
                    float(temperature[i]), int(state.top_k[row]), float(state.top_p[row]), float(state.min_p[row])
                )
                draws.append(_Draw(i, row_logits, row_best, filters, select(row_logits, row_best, filters)))
        if draws:
            drawn = np.array([draw.place for draw in draws])
            token_ids[drawn] = _draw(draws, state.seed[rows[drawn]], num_tokens[drawn])
    return SampleResult(token_ids, _logprobs(logits, token_ids, state.logprobs[rows]), tuple(broken))


def _sample_in_one_call(
    kernels: CpuKernels, logits: torch.Tensor, state: SamplingState, rows: np.ndarray, num_tokens: np.ndarray
) -> SampleResult:
    n, vocab = logits.shape
    logits = logits.contiguous()
    rows, num_tokens = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(num_tokens, np.int64)
    token_ids, broken = np.empty(n, np.int64), np.empty(n, np.bool_)
    wanted = state.logprobs[rows]
    columns = 1 + min(int(wanted.max(initial=NO_LOGPROBS)), vocab)
    found = TokenLogprobs(np.empty((n, columns), np.int32), np.empty((n, columns), np.float32), np.empty(n, np.int32))
    kernels.sample(
        SamplingBatch(
            rows=n,
            vocab=vocab,
            logits=logits.data_ptr(),
            params=state.table.ctypes.data,
            places=rows.ctypes.data,
            num_tokens=num_tokens.ctypes.data,
            token_ids=token_ids.ctypes.data,
            broken=broken.ctypes.data,
            columns=columns,
            logprob_ids=found.token_ids.ctypes.data,
            logprobs=found.logprobs.ctypes.data,
            ranks=found.ranks.ctypes.data,
        )
    )
    logprobs = [
        None if alternatives == NO_LOGPROBS else _one_row(found, i, alternatives)
        for i, alternatives in enumerate(wanted.tolist())
    ]
    return SampleResult(token_ids, logprobs, tuple(np.flatnonzero(broken).tolist()))


def _argmax(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Best token (the lowest of equals) and its logit of each row; NaN counts as the best."""
    if logits.device.type == "cpu":  # numpy's is ten times as fast as torch's
        values = logits.numpy()
        token_ids = values.argmax(axis=1)
        return token_ids, values[np.arange(len(values)), token_ids]
    ids = logits.argmax(dim=1, keepdim=True)
    return ids[:, 0].cpu().numpy(), logits.gather(1, ids)[:, 0].cpu().numpy()


def _host_rows(logits: torch.Tensor, indexes: np.ndarray) -> list[np.ndarray]:
    """Some rows in host memory: views where they are there already."""
    if logits.device.type == "cpu":
        values = logits.numpy()
        return [values[i] for i in indexes]
    return list(logits[torch.from_numpy(indexes).to(logits.device)].cpu().numpy())


def _draw(draws: list[_Draw], seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Gumbel-max over each row's candidates; int64 [draws]."""
    sizes = [draw.candidates.token_ids.size for draw in draws]
    starts = np.cumsum([0, *sizes[:-1]])
    ids = np.concatenate([draw.candidates.token_ids for draw in draws])
    scores = np.concatenate([draw.candidates.scaled for draw in draws])
    scores += gumbel(np.repeat(seeds, sizes), np.repeat(positions, sizes), ids)
    best = np.maximum.reduceat(scores, starts)
    winners = np.where(scores == np.repeat(best, sizes), ids, np.iinfo(np.int64).max)
    token_ids = np.minimum.reduceat(winners, starts)
    for i, (_, logits, best_logit, filters, candidates) in enumerate(draws):
        # Whatever is not among the candidates is no better than the last of them.
        if not candidates.complete and candidates.scaled[-1] + GUMBEL_MAX + _SLACK >= best[i]:
            scaled = scaled_logits(logits, best_logit, filters)
            token_ids[i] = _draw_from_all(scaled, int(token_ids[i]), best[i], int(seeds[i]), int(positions[i]))
    return token_ids


def _draw_from_all(scaled: np.ndarray, token_id: int, score: np.float32, seed: int, position: int) -> int:
    """Gumbel-max over a whole vocabulary, when one good score is already known.

    Bits are computed only for tokens that the greatest noise would lift to that score, logarithms only for those that
    pass a cheaper test: -log u >= 1 - u, so that scaled - log(-log u) >= score needs 1 - u <= exp(scaled - score).

    Args:
        scaled: float32 [vocab], -inf where a token may not be drawn.
        token_id, score: of the best of the tokens that were tried.
    """
    padded = np.full(-(-scaled.size // TOKENS_PER_BLOCK) * TOKENS_PER_BLOCK, -np.inf, np.float32)
    padded[: scaled.size] = scaled
    within_reach = padded >= score - np.float32(GUMBEL_MAX + _SLACK)
    blocks = np.flatnonzero(within_reach.view(np.uint32))  # the four bytes of a block at once
    reach = np.exp(padded.reshape(-1, TOKENS_PER_BLOCK).take(blocks, axis=0) - score) * np.float32(1 + _SLACK)
    rivals, rival_scores = [np.array([token_id])], [np.array([score])]
    for lane, bits in enumerate(random_blocks(seed, position, blocks)):
        one_minus_u = (2.0**23 - 0.5 - bits) * 2.0**-23
        passed = np.flatnonzero(one_minus_u <= reach[:, lane])
        ids = blocks[passed] * TOKENS_PER_BLOCK + lane
        rivals.append(ids)
        rival_scores.append(padded[ids] + gumbel_of_bits(bits[passed]))
    ids, scores = np.concatenate(rivals), np.concatenate(rival_scores)
    return int(ids[scores == scores.max()].min())


def _logprobs(logits: torch.Tensor, token_ids: np.ndarray, wanted: np.ndarray) -> list[TokenLogprobs | None]:
    """Of the raw logits, for the rows that ask; `wanted` is each row's number of alternatives."""
    result: list[TokenLogprobs | None] = [None] * len(token_ids)
    asking = np.flatnonzero(wanted != NO_LOGPROBS)
    if asking.size:
        chosen = logits if asking.size == len(token_ids) else logits[torch.from_numpy(asking).to(logits.device)]
        found = token_logprobs(chosen, token_ids[asking], int(wanted.max()))
        for i, index in enumerate(asking.tolist()):
            result[index] = _one_row(found, i, int(wanted[index]))
    return result


def _one_row(found: TokenLogprobs, i: int, alternatives: int) -> TokenLogprobs:
    columns = 1 + alternatives
    return TokenLogprobs(
        found.token_ids[i : i + 1, :columns], found.logprobs[i : i + 1, :columns], found.ranks[i : i + 1]
    )
