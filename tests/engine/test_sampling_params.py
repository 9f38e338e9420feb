"""What SamplingParams takes, and how it refuses the rest."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from engine.sampling_params import MAX_STOP_CHARACTERS, InvalidParameter, SamplingParams

ALLOWED: dict[str, tuple[Any, ...]] = {
    "n": (1, 128),
    "temperature": (0, 0.0, 1, 100.0),
    "top_k": (-1, 0, 1, 10**9),
    "top_p": (1e-9, 1.0, 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 1.0, 100.0),
    "presence_penalty": (-2.0, 2),
    "frequency_penalty": (-2, 2.0),
    "seed": (0, -1, 2**64 - 1, -(2**63)),
    "max_tokens": (1, None, 10**9),
    "min_tokens": (0, 16),
    "stop": ("x", ["x", "y"], (), ["a" * MAX_STOP_CHARACTERS]),
    "stop_token_ids": ([], [0, 5], (7,)),
    "logit_bias": ({}, {5: -100, 6: 100.0}),
    "logprobs": (None, 0, 20),
    "prompt_logprobs": (None, 0, 20),
    "ignore_eos": (True, False),
}

REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (0, 129, 1.0, True, "1", None),
    "temperature": (-0.5, 101, math.nan, math.inf, "1", True, None),
    "top_k": (-2, 1.5, True),
    "top_p": (0, 0.0, 1.01, -1, math.nan),
    "min_p": (-0.1, 1.1, math.nan),
    "repetition_penalty": (0, 0.0, -1, 1e-300, math.inf),
    "presence_penalty": (-2.1, 2.1, math.nan),
    "frequency_penalty": (-2.1, 2.1, "0"),
    "seed": (2**64, -(2**63) - 1, 1.0, True),
    "max_tokens": (0, -1, 1.0, True),
    "min_tokens": (-1, 17, 1.0),
    "stop": ("", ["x", ""], [1], 5, ["x"] * 65, ["a" * MAX_STOP_CHARACTERS, "b"]),
    "stop_token_ids": ([-1], [1.0], [True], 5, [1] * 4097),
    "logit_bias": ({-1: 0}, {1: 101}, {1: math.nan}, {"1": 0}, [1], {True: 1}, dict.fromkeys(range(4097), 1.0)),
    "logprobs": (-1, 1.0, True),
    "prompt_logprobs": (-1, "1"),
    "ignore_eos": (1, None, "true"),
}


def cases(table: dict[str, tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}={str(value)[:20]}") for name, each in table.items() for value in each]


@pytest.mark.parametrize(("name", "value"), cases(ALLOWED))
def test_values_in_range_are_taken(name: str, value: Any) -> None:
    kept = getattr(SamplingParams(**{name: value}), name)
    assert kept == value or tuple(kept) == tuple([value] if isinstance(value, str) else value)


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name
    assert str(refused.value).startswith(name)
    assert len(str(refused.value)) < 300


def test_messages_give_field_value_and_limit() -> None:
    with pytest.raises(InvalidParameter, match=r"^temperature=-0.5: must be 0 or more$"):
        SamplingParams(temperature=-0.5)
    with pytest.raises(InvalidParameter, match=r"^n=129: must be a whole number in \[1, 128\]$"):
        SamplingParams(n=129)


def test_sequences_are_kept_as_tuples_and_a_lone_stop_is_one() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[1, 2])
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)


def test_defaults_of_the_model_are_overridden_by_what_is_given() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "unknown_field": 3}
    params = SamplingParams.with_defaults(defaults, temperature=0.0, top_k=None, max_tokens=5)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.0, 0.9, 0, 5)


def test_params_and_errors_travel_between_processes() -> None:
    params = SamplingParams(stop=["x"], logit_bias={1: 2.0})
    assert pickle.loads(pickle.dumps(params)) == params
    error = InvalidParameter.of("top_k", -2, "must be more")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.param, str(copy)) == (error.param, str(error))
