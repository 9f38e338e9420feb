"""The work that the engine and every service are given."""

from __future__ import annotations

import random

MANY, OUTPUT_LEN = 32, 128
SINGLES, SINGLE_OUTPUT_LEN = 20, 8
PROMPT_LEN = 128


def prompts(count: int, seed: int) -> list[list[int]]:
    """Random tokens, others for each seed, so that nobody finds a prompt in a cache."""
    draw = random.Random(seed)
    return [[draw.randrange(100, 40_000) for _ in range(PROMPT_LEN)] for _ in range(count)]
