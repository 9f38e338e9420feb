"""The constants of a step, from steps that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from app.simulation.requests import BLOCK_SIZE
from app.simulation.step_cost import StepCost
from engine.sampling_params import InvalidParameter


def fitted_cost(path: Path) -> StepCost:
    """The constants that fit the steps in a file of `manta bench step --json` best.

    Least squares of the relative errors; a constant that would be negative is 0.

    Raises:
        InvalidParameter: the file is none of those, or its steps are too much alike to tell.
        OSError: it cannot be read.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        samples = np.array([[each["tokens"], each["keys"], each["seconds"]] for each in report["steps"]], dtype=float)
        is_sound = samples.shape[1] == 3 and bool(np.isfinite(samples).all()) and bool((samples > 0).all())
    except (ValueError, TypeError, KeyError, IndexError):
        is_sound = False
    if not is_sound:
        raise InvalidParameter("fit", f"{path} has no steps; `manta bench step --json FILE` writes them")
    tokens, keys, seconds = samples.T
    terms = np.stack([np.ones_like(tokens), tokens, keys / BLOCK_SIZE], axis=1) / seconds[:, None]
    if np.linalg.matrix_rank(terms) < terms.shape[1]:
        raise InvalidParameter("fit", f"{path}: its steps are too much alike; measure other --running and --context")
    constants = _non_negative(terms, np.ones_like(seconds))
    if not constants[:2].any():
        raise InvalidParameter("fit", f"{path}: no step and no token would take any time")
    return StepCost(*constants.tolist())


def _non_negative(terms: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares, without the term whose factor is the most negative, for as long as there is one."""
    kept = list(range(terms.shape[1]))
    factors = np.zeros(terms.shape[1])
    while kept:
        found = np.linalg.lstsq(terms[:, kept], wanted, rcond=None)[0]
        if (found >= 0).all():
            factors[kept] = found
            break
        kept.pop(int(found.argmin()))
    return factors
