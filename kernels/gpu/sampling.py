"""Draws the next tokens of rows of logits, by the rule that engine/sampling/sampler.py states, without a full sort.

Every row is cut into chunks, which its programs share. What is added up over a row are whole numbers, so that a row's
token is the same in any batch.

1. `find_maxima`: the maximum of each tile of 256 tokens. Greedy rows then need `pick_best_tokens` alone.
2. `weigh_levels`, for rows whose top_p or large top_k asks how the whole row is spread: how many tokens lie above each
   of 16 levels, and what they weigh.
3. `set_bounds`: the level below which no token can be drawn. Nothing is drawn from below the k-th best tile maximum
   (top_k), the first level at which the weight suffices (top_p), min_p's floor, and what the largest noise cannot lift
   to the score that the best token has for certain.
4. `draw_chunks`: where filters leave few tokens, they are gathered; otherwise each chunk draws its best.
5. `finish_draws`: gathered tokens are filtered and drawn from. Otherwise the best of the chunks' is taken; the few
   times that it lies between the levels where a filter ends, its rank and the weight before it tell whether it is kept.
   If not, neither is anything after it, and the best of what comes before it is tried.

Weights are exp((logit - best) / temperature), whole multiples of 2^-44: the float32 exponential makes top_p's
boundaries right to about 1e-6.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.gpu.best_tokens import find_maxima, pick_best_tokens
from kernels.gpu.logits import CHUNK, LOGITS_TYPES, NUM_WARPS, UNIT
from kernels.gpu.sampling_bounds import set_bounds, weigh_levels
from kernels.gpu.sampling_draws import draw_chunks, finish_draws
from kernels.gpu.sampling_row import FIELDS
from kernels.gpu.sampling_scale import LEVELS, MARKS
from kernels.gpu.variants import Variant

TILE = 256
LISTED = 2048
"""Most tokens of a row that are gathered."""
_BLOCK = 1024


def is_weighed(top_k: int, top_p: float, vocab: int) -> bool:
    """Whether a row's filters need the weights of its whole vocabulary: a row's WEIGHED."""
    if vocab <= LISTED:
        return False
    return top_p < 1 if top_k >= vocab else top_k > vocab // TILE // 2


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """What the kernels of a step leave for each other, for up to so many rows."""

    tile_maxima: Tensor
    counts: Tensor
    weights: Tensor
    levels: Tensor
    marks: Tensor
    totals: Tensor
    gathered: Tensor
    scores: Tensor
    winners: Tensor

    @classmethod
    def allocate(cls, rows: int, vocab: int, device: torch.device) -> Workspace:
        chunks = triton.cdiv(vocab, CHUNK)

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(rows, *shape, dtype=dtype, device=device)

        return cls(
            tile_maxima=empty(torch.float32, chunks * (CHUNK // TILE)),
            counts=empty(torch.int32, chunks, LEVELS.value),
            weights=empty(torch.int64, chunks, LEVELS.value),
            levels=empty(torch.float32, MARKS.value),
            marks=empty(torch.int32, MARKS.value),
            totals=empty(torch.int64),
            gathered=empty(torch.int64, LISTED),
            scores=empty(torch.float32, chunks),
            winners=empty(torch.int32, chunks),
        )

    @property
    def rows(self) -> int:
        return len(self.totals)


_TILES: dict[Any, dict[str, int]] = {
    find_maxima: {"CHUNK": CHUNK, "TILE": TILE},
    pick_best_tokens: {"TILE": TILE, "BLOCK": _BLOCK},
    weigh_levels: {"CHUNK": CHUNK, "BLOCK": _BLOCK},
    set_bounds: {"CHUNK": CHUNK, "TILE": TILE, "LISTED": LISTED, "BLOCK": _BLOCK},
    draw_chunks: {"CHUNK": CHUNK, "TILE": TILE, "LISTED": LISTED},
    finish_draws: {"CHUNK": CHUNK, "LISTED": LISTED, "BLOCK": _BLOCK},
}


def _constants(kernel: Any) -> dict[str, int]:
    return _TILES[kernel] | {"FIELDS": FIELDS.value, "UNIT": UNIT}


def _num_warps(kernel: Any) -> int:
    return 4 if kernel in (pick_best_tokens, set_bounds) else NUM_WARPS


def _options(kernel: Any) -> dict[str, int]:
    """Of a launch."""
    return _constants(kernel) | {"num_warps": _num_warps(kernel), "num_stages": 1, "enable_fp_fusion": True}


def pick_best(
    logits: Tensor,
    workspace: Workspace,
    token_ids: Tensor,
    broken: Tensor,
    adjusted: Tensor | None = None,
    params: Tensor | None = None,
    counts: Tensor | None = None,
) -> None:
    """The best token of each row, the lowest of equals, in two launches. Arguments as for `draw_tokens`.

    adjusted, params and counts are all given, or none.
    """
    n, vocab = logits.shape
    chunks, units = triton.cdiv(vocab, CHUNK), logits.stride(0) // UNIT
    maxima = workspace.tile_maxima
    numbers = (vocab, units, maxima.shape[1])
    find_maxima[(chunks, n)](logits, adjusted, params, maxima, *numbers, **_options(find_maxima))
    pick_best_tokens[(n,)](
        logits, adjusted, params, maxima, token_ids, broken, counts, *numbers, **_options(pick_best_tokens)
    )


def draw_tokens(
    logits: Tensor,
    workspace: Workspace,
    token_ids: Tensor,
    broken: Tensor,
    adjusted: Tensor,
    params: Tensor,
    counts: Tensor,
    *,
    any_weighed: bool,
) -> None:
    """The next token of each row, in four launches, or five where a row is weighed.

    Args:
        logits: [n, vocab], aligned; bfloat16, float16 or float32.
        workspace: for n rows or more.
        token_ids: int32 [n], written.
        broken: int32 [n], written: 1 where a row has no usable logit, and its token is 0.
        adjusted: float32 [any, whole units of the vocabulary], the rows that have a SOURCE.
        params: int64 [n, FIELDS], see `sampling_row`.
        counts: int32 [rows, whole units of the vocabulary]; the tokens of rows with a TABLE_ROW are added.
        any_weighed: whether a row is WEIGHED.
    """
    n, vocab = logits.shape
    w = workspace
    chunks, num_tiles = triton.cdiv(vocab, CHUNK), w.tile_maxima.shape[1]
    row = (logits, adjusted, params)
    result = (token_ids, broken, counts)
    sizes = (vocab, logits.stride(0) // UNIT)
    find_maxima[(chunks, n)](*row, w.tile_maxima, *sizes, num_tiles, **_options(find_maxima))
    if any_weighed:
        weigh_levels[(chunks, n)](*row, w.tile_maxima, w.counts, w.weights, *sizes, num_tiles, **_options(weigh_levels))
    state = (w.levels, w.marks)
    weighed = (w.counts, w.weights)
    set_bounds[(n,)](
        *row, w.tile_maxima, *weighed, *state, w.totals, *result, *sizes, num_tiles, **_options(set_bounds)
    )
    drawn = (w.gathered, w.scores, w.winners)
    draw_chunks[(chunks, n)](*row, w.tile_maxima, *state, *drawn, *sizes, num_tiles, **_options(draw_chunks))
    finish_draws[(n,)](*row, *state, w.totals, *drawn, *result, *sizes, chunks, **_options(finish_draws))


_POINTERS = {
    "adjusted": "*fp32",
    "fields": "*i64",
    "tile_maxima": "*fp32",
    "level_counts": "*i32",
    "level_weights": "*i64",
    "levels": "*fp32",
    "marks": "*i32",
    "totals": "*i64",
    "gathered": "*i64",
    "scores": "*fp32",
    "winners": "*i32",
    "token_ids": "*i32",
    "broken": "*i32",
    "counts": "*i32",
}


def variants() -> Iterator[Variant]:
    for kernel in _TILES:
        for dtype in LOGITS_TYPES:
            for plain in (False, True) if kernel in (find_maxima, pick_best_tokens) else (False,):
                absent = {"adjusted", "fields", "counts"} & set(kernel.arg_names) if plain else set()
                types = {"logits": f"*{dtype}"} | _POINTERS
                constants = _constants(kernel)
                names = [name for name in kernel.arg_names if name not in constants and name not in absent]
                yield Variant(
                    name=dtype + (" plain" if plain else ""),
                    kernel=kernel,
                    signature={name: types.get(name, "i32") for name in names},
                    constants=constants | dict.fromkeys(absent),
                    num_warps=_num_warps(kernel),
                    num_stages=1,
                )
