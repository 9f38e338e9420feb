"""Log-probabilities of chosen and of best tokens."""

from __future__ import annotations

import numpy as np
import torch

from engine.outputs import TokenLogprobs
from engine.sampling.candidates import best_tokens

_CHUNK = 64


def token_logprobs(logits: torch.Tensor, token_ids: np.ndarray, k: int) -> TokenLogprobs:
    """Log-probabilities of one token a row and of the row's k best tokens.

    Only the wanted values are computed, a row at a time: a row's result does not depend on its neighbours, and memory
    stays small with many rows (logits on a device come over in chunks).

    Args:
        logits: float [n, vocab], raw; NaN counts as -inf.
        token_ids: integers [n].
        k: alternatives, 0 or more; cut to the vocabulary.
    """
    n, vocab = logits.shape
    k = min(k, vocab)
    ids = np.empty((n, 1 + k), np.int32)
    values = np.empty((n, 1 + k), np.float32)
    ranks = np.empty(n, np.int32)
    ids[:, 0] = token_ids
    for start in range(0, n, _CHUNK):
        chunk = logits[start : start + _CHUNK].detach().float().cpu().numpy()
        for i, row in enumerate(chunk, start):
            values[i], ranks[i] = _row_logprobs(row, ids[i])
    return TokenLogprobs(ids, values, ranks)


def _row_logprobs(row: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, int]:
    """Fills ids[1:] with the row's best tokens; gives the log-probabilities of ids and the rank of ids[0]."""
    best = row.max()
    if not np.isfinite(best):
        row = repaired(row)
        best = row.max()
    ids[1:] = best_tokens(row, ids.size - 1)
    rank = 1 + int(np.count_nonzero(row > row[ids[0]]))
    if best == -np.inf:
        return np.full(ids.size, -np.inf, np.float32), rank
    return row[ids] - best - np.log(np.exp(row - best).sum()), rank


def repaired(logits: np.ndarray) -> np.ndarray:
    """A copy in which NaN is -inf and +inf is the largest number."""
    return np.nan_to_num(logits, nan=-np.inf, posinf=float(np.finfo(np.float32).max), neginf=-np.inf)
