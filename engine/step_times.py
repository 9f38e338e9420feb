"""How long an engine's steps take, as it measured lately."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

MEMORY_STEPS = 256
"""A step counts e times less after so many others. Counted in steps: an idle engine forgets nothing."""

RELATIVE_VARIANCE = 0.01
"""Of the tokens in a step, over their mean square: with less, a token's time cannot be told from the step's own."""


class StepTimes(NamedTuple):
    """Sums over steps, the last of which counts in full: all that a line through their times needs.

    Values of this type are added up by `pooled`, so that what one replica has not seen is known from the others.

    Attributes:
        steps: how many, with their weights.
        tokens, seconds, tokens_squared, tokens_seconds: sums of the steps' tokens, times, and products of these.
    """

    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    tokens_seconds: float = 0.0

    def after(self, tokens: int, seconds: float) -> StepTimes:
        """With one more step."""
        kept = 1.0 - 1.0 / MEMORY_STEPS
        return StepTimes(
            self.steps * kept + 1.0,
            self.tokens * kept + tokens,
            self.seconds * kept + seconds,
            self.tokens_squared * kept + tokens * tokens,
            self.tokens_seconds * kept + tokens * seconds,
        )

    def fit(self) -> tuple[float, float]:
        """Seconds of a step, and of each token in it: the least-squares line a + b * tokens, neither of them below 0.

        Steps that all had about as many tokens tell only their mean: it is given to the step, and none to the tokens.
        (0, 0) of nothing.
        """
        if not self.steps:
            return 0.0, 0.0
        mean = self.seconds / self.steps
        variance = self.tokens_squared * self.steps - self.tokens**2
        if variance <= RELATIVE_VARIANCE * self.tokens_squared * self.steps:
            return mean, 0.0
        per_token = max(0.0, (self.tokens_seconds * self.steps - self.tokens * self.seconds) / variance)
        overhead = mean - per_token * self.tokens / self.steps
        if overhead < 0.0:
            return 0.0, self.tokens_seconds / self.tokens_squared
        return overhead, per_token


NO_STEPS = StepTimes()


def pooled(times: Iterable[StepTimes]) -> StepTimes:
    """The sums over several engines."""
    columns = zip(*times, strict=True)
    return StepTimes(*(sum(column) for column in columns))
