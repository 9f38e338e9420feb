"""A step's constants from those that were measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.simulation.fit import fitted_cost
from engine.sampling_params import InvalidParameter

KINDS = [(1, 128), (32, 4096), (256, 32_768), (128, 128), (2048, 10_000)]
"""Tokens, and keys that their requests see: decodes, then prompts."""


def steps(step_s: float, token_s: float, key_s: float) -> list[dict[str, float]]:
    return [
        {"tokens": tokens, "keys": keys, "seconds": step_s + token_s * tokens + key_s * keys} for tokens, keys in KINDS
    ]


def report(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "step.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_constants_are_found_again(tmp_path: Path) -> None:
    cost = fitted_cost(report(tmp_path, {"steps": steps(0.004, 3e-4, 1e-7)}))
    assert (cost.step_s, cost.token_s, cost.block_s) == pytest.approx((0.004, 3e-4, 16e-7))


def test_no_constant_is_negative(tmp_path: Path) -> None:
    cost = fitted_cost(report(tmp_path, {"steps": steps(0.004, 3e-4, -1e-8)}))
    assert cost.block_s == 0
    assert (cost.step_s, cost.token_s) == pytest.approx((0.004, 3e-4), rel=0.1)


@pytest.mark.parametrize(
    "content",
    [
        "no JSON",
        [],
        {"engine": []},
        {"steps": []},
        {"steps": [{"tokens": 1}]},
        {"steps": [{"tokens": 1, "keys": 2, "seconds": -1.0}]},
        {"steps": [{"tokens": 8, "keys": 128, "seconds": 0.1}] * 5},
    ],
)
def test_file_that_tells_too_little_is_refused(tmp_path: Path, content: Any) -> None:
    with pytest.raises(InvalidParameter, match=r"step\.json"):
        fitted_cost(report(tmp_path, content))
