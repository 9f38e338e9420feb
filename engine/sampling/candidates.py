"""Which tokens may be drawn: the best of a row of logits, and what top_k, top_p and min_p leave of them.

Tokens are ordered by logit, best first, equal ones by lower id. A filter keeps a prefix of that order:

- min_p keeps the tokens whose probability is at least min_p times the best one's;
- top_k keeps k tokens of those;
- top_p keeps the fewest of those that together reach top_p of their probability, one at least.

This is vLLM's order too. Probabilities are softmax((logit - best logit) / temperature).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

HEAD = 256
"""Tokens looked at before all are sorted."""

UNFILTERED_HEAD = 64
"""Tokens looked at first where no filter is set: enough for a good score to beat."""

_SORTED_HEAD = 8192
_GROUP = 64


class Filters(NamedTuple):
    """What one request leaves of the vocabulary.

    Attributes:
        temperature: above 0.
        top_k: the vocabulary's size where it is off.
        top_p: 1 where it is off. min_p: 0 where it is off.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The best tokens that may be drawn, in order.

    Attributes:
        token_ids: int64 [candidates], one at least; all of them may be drawn.
        scaled: float32 [candidates], (logit - best logit) / temperature.
        complete: whether no other token may be drawn.
    """

    token_ids: np.ndarray
    scaled: np.ndarray
    complete: bool


def best_tokens(logits: np.ndarray, k: int) -> np.ndarray:
    """The k best tokens, best first, equal ones by lower id.

    Args:
        logits: float32 [vocab], without NaN.

    Returns:
        int64 [min(k, vocab)].
    """
    vocab = logits.size
    k = min(k, vocab)
    if k == 0:
        return np.empty(0, np.int64)
    groups = vocab // _GROUP
    if groups > 2 * k:
        # The k-th best of the groups' maxima is reached by k tokens at least, so it is a lower bound of the k-th best.
        split = groups * _GROUP
        sieve = np.concatenate((logits[:split].reshape(_GROUP, groups).max(axis=0), logits[split:]))
    else:
        sieve = logits
    bound = np.partition(sieve, sieve.size - k)[sieve.size - k]
    if bound == -np.inf:  # few tokens are left, and sorting the others would cost much
        ids = np.concatenate((np.flatnonzero(logits > bound), np.flatnonzero(logits == bound)[:k]))
    else:
        ids = np.flatnonzero(logits >= bound)
    return ids[np.argsort(-logits[ids], kind="stable")[:k]]


def select(logits: np.ndarray, best: float, filters: Filters) -> Candidates:
    """The candidates of a row, or the first of them where they are many.

    Args:
        logits: float32 [vocab], without NaN or +inf.
        best: the best logit, finite.
    """
    size = HEAD if is_filtered(filters, logits.size) else UNFILTERED_HEAD
    if filters.top_p < 1 and filters.top_k < logits.size:  # top_p asks how much the top_k best weigh together
        size = filters.top_k
    ids = best_tokens(logits, size)
    scaled = (logits[ids] - best) / filters.temperature
    kept = _num_kept(scaled, filters, logits.size, _mass(logits, best, filters))
    if kept is None:
        return Candidates(ids, scaled, complete=False)
    return Candidates(ids[:kept], scaled[:kept], complete=True)


def scaled_logits(logits: np.ndarray, best: float, filters: Filters) -> np.ndarray:
    """(logit - best logit) / temperature of the tokens that may be drawn, -inf of the others.

    Args as for `select`. Where a filter is set, it costs a sort of the logits.

    Returns:
        float32 [vocab].
    """
    scaled = (logits - best) / filters.temperature
    if not is_filtered(filters, logits.size):
        return scaled
    ordered, mass = np.sort(logits)[::-1], _mass(logits, best, filters)
    kept = _num_kept((ordered[:_SORTED_HEAD] - best) / filters.temperature, filters, logits.size, mass)
    if kept is None:
        kept = _num_kept((ordered - best) / filters.temperature, filters, logits.size, mass) or logits.size
    last = ordered[kept - 1]
    scaled[logits < last] = -np.inf
    ties = np.flatnonzero(logits == last)
    scaled[ties[kept - np.count_nonzero(logits > last) :]] = -np.inf
    return scaled


def _num_kept(scaled: np.ndarray, filters: Filters, vocab: int, mass: float | None) -> int | None:
    """How many of the best tokens the filters keep.

    Args:
        scaled: float32, scaled logits of some of the best tokens, or of all, in order.
        mass: weight of all that min_p leaves; None where top_p is off or top_k of the tokens are given.

    Returns:
        None where they keep all that are given and perhaps more.
    """
    limit = min(filters.top_k, vocab)
    weights = np.exp(scaled[:limit], dtype=np.float64)
    kept = int(np.count_nonzero(weights >= filters.min_p))
    complete = kept < weights.size or weights.size == limit
    if filters.top_p < 1:
        if complete:
            mass = float(weights[:kept].sum())
        if mass is not None:
            reached = int(np.searchsorted(np.cumsum(weights[:kept]), filters.top_p * mass)) + 1
            if reached <= kept:
                return reached
    return kept if complete else None


def is_filtered(filters: Filters, vocab: int) -> bool:
    """Whether any filter is on."""
    return filters.top_k < vocab or filters.top_p < 1 or filters.min_p > 0


def _mass(logits: np.ndarray, best: float, filters: Filters) -> float | None:
    """Weight of all tokens that min_p leaves, where top_p asks for it and top_k does not change it.

    Its exponentials are float32: the sum is right to about 1e-7.
    """
    if filters.top_p == 1 or filters.top_k < logits.size:
        return None
    weights = np.exp((logits - best) / filters.temperature)
    if filters.min_p > 0:
        weights = weights[weights >= filters.min_p]
    return float(weights.sum(dtype=np.float64))
