"""How a request's tokens are chosen, and the error that every refused value raises."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096
"""Of all stop strings together: each completion looks for all of them."""
MAX_TOKEN_ENTRIES = 4096
"""Of stop_token_ids, and of logit_bias."""
MIN_REPETITION_PENALTY = 0.01
SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1


class InvalidParameter(ValueError):
    """A value that a caller or a client may correct.

    Attributes:
        param: the field's name, as the caller wrote it.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param

    @classmethod
    def of(cls, param: str, value: object, rule: str) -> InvalidParameter:
        """The usual message: `temperature=-0.5: must be 0 or more`."""
        shown = repr(value)
        return cls(param, f"{param}={shown if len(shown) <= 80 else shown[:77] + '...'}: {rule}")

    def __reduce__(self) -> tuple[type[InvalidParameter], tuple[str, str]]:
        return type(self), (self.param, str(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Attributes:
        n: completions for the prompt, 1 to 128.
        temperature: 0 takes the best token; otherwise logits are divided by it.
        top_k: keep the k best tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of best tokens whose probability reaches it, in (0, 1].
        min_p: drop tokens less probable than this times the best one's, in [0, 1].
        repetition_penalty: divides (positive) or multiplies (negative) the logits of tokens in prompt or output, in
            [0.01, 100].
        presence_penalty: taken from the logits of tokens that are in the output, in [-2, 2].
        frequency_penalty: taken once for each time that a token is in the output, in [-2, 2].
        logit_bias: token id to a number in [-100, 100] that is added to its logit.
        seed: 64 bits; the same seed gives the same tokens. None draws one.
        max_tokens: most tokens to generate; None is whatever the context leaves.
        min_tokens: neither end-of-sequence nor stop_token_ids end the request before as many tokens.
        stop: texts that end the output when they appear in it.
        stop_token_ids: tokens that end the output.
        ignore_eos: go on after the model's end-of-sequence tokens.
        include_stop_str_in_output: keep the stop string that ended the text.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: how many best alternatives to report beside each token; 0 is the token alone, None is nothing.
        prompt_logprobs: the same for the prompt's tokens.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, -1)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidParameter.of("top_p", self.top_p, "must be above 0 and at most 1")
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _integer("seed", self.seed, SEED_MIN, SEED_MAX)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter.of(
                "min_tokens", self.min_tokens, f"must be at most max_tokens, which is {self.max_tokens}"
            )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter.of(name, getattr(self, name), "must be true or false")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))

    @classmethod
    def with_defaults(cls, defaults: Mapping[str, Any], **given: Any) -> SamplingParams:
        """The model's own defaults (its generation_config), overridden by what was given and is not None."""
        names = {f.name for f in fields(cls)}
        merged = {name: value for name, value in defaults.items() if name in names}
        merged.update({name: value for name, value in given.items() if value is not None})
        return cls(**merged)

    @property
    def needs_penalties(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _integer(name: str, value: object, low: int, high: int | None = None) -> None:
    allowed = f"must be a whole number, {low} or more" if high is None else f"must be a whole number in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise InvalidParameter.of(name, value, allowed)


def _number(name: str, value: object, low: float, high: float) -> None:
    rule = f"must be a number in [{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidParameter.of(name, value, rule)
    if not low <= value <= high:
        raise InvalidParameter.of(name, value, "must be 0 or more" if value < 0 == low else rule)


def _stop_strings(stop: object) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
        raise InvalidParameter.of("stop", stop, "must be a text, or a list of texts, none of them empty")
    if len(texts) > MAX_STOP_STRINGS:
        raise InvalidParameter("stop", f"stop: has {len(texts)} texts; at most {MAX_STOP_STRINGS} are allowed")
    if (length := sum(map(len, texts))) > MAX_STOP_CHARACTERS:
        raise InvalidParameter(
            "stop", f"stop: has {length:,} characters in all; at most {MAX_STOP_CHARACTERS:,} are allowed"
        )
    return tuple(texts)


def _token_ids(ids: object) -> tuple[int, ...]:
    if not isinstance(ids, Sequence) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise InvalidParameter.of("stop_token_ids", ids, "must be a list of token ids, 0 or more")
    _check_count("stop_token_ids", len(ids))
    return tuple(ids)


def _logit_bias(bias: object) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise InvalidParameter.of("logit_bias", bias, "must map token ids to numbers in [-100, 100]")
    _check_count("logit_bias", len(bias))
    for token, value in bias.items():
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InvalidParameter.of("logit_bias", token, "its keys must be token ids, 0 or more")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise InvalidParameter("logit_bias", f"logit_bias[{token}]={value!r}: must be a number in [-100, 100]")
    return {token: float(value) for token, value in bias.items()}


def _check_count(name: str, count: int) -> None:
    if count > MAX_TOKEN_ENTRIES:
        raise InvalidParameter(name, f"{name}: has {count:,} entries; at most {MAX_TOKEN_ENTRIES:,} are allowed")
