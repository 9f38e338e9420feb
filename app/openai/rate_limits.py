"""How much a client may ask for: requests and tokens per minute, and requests at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.openai.errors import ApiError
from engine.request import Clock

if TYPE_CHECKING:
    from app.config import ApiKey

CONCURRENCY_RETRY_S = 1.0
"""When to come again if too many requests run: nobody knows when one ends."""

ROUNDING = 0.001
"""What a bucket's level may lack through the rounding of an epoch clock."""


class TokenBucket:
    """Holds a minute's worth at most, and fills evenly. What is only known afterwards may overdraw it.

    Args:
        per_minute: above 0; the bucket holds one at least, however little that is.
        clock: in seconds; one that is set back does not empty the bucket.
    """

    def __init__(self, per_minute: float, clock: Clock) -> None:
        self.capacity = max(1.0, per_minute)
        self._per_second = per_minute / 60
        self._clock = clock
        self._level = self.capacity
        self._filled_at = clock()

    @property
    def level(self) -> float:
        """What is there now; negative where it is overdrawn."""
        now = self._clock()
        gained = max(0.0, now - self._filled_at) * self._per_second
        self._level = min(self.capacity, self._level + gained)
        self._filled_at = now
        return self._level

    def take(self, amount: float) -> None:
        """Takes, or gives back what is negative."""
        self._level = self.level - amount

    def seconds_until(self, amount: float) -> float:
        """How long it takes to hold `amount`; 0 where it does."""
        missing = amount - self.level
        return missing / self._per_second if missing > ROUNDING else 0.0


@dataclass(slots=True)
class Admission:
    """One request that a client's limits let in.

    Attributes:
        choices: how many of concurrent_requests it holds until its answer ends.
    """

    choices: int = 1


class Client:
    """Who makes requests, and what is left of its limits in this process. Touched on one event loop.

    Limits that are None do not hold. A process has a fixed share of each: a limit for all of `shares` processes
    together, divided by their number, but one request at a time at least.

    Args:
        name: of its key.
        priority: the best that its requests may have; None leaves it to them.
        requests_per_minute, tokens_per_minute: above 0. Prompts are paid for when they are admitted, output as it
            comes, so that a long one may overdraw its minute; later requests wait until that is made up for.
        concurrent_requests: how many may run at a time, each choice of a request being one.
        isolated: it shares cached prefixes with nobody.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        *,
        priority: int | None = None,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        concurrent_requests: int | None = None,
        shares: int = 1,
        isolated: bool = False,
    ) -> None:
        self.name = name
        self._isolated = isolated
        self._priority = priority
        self._requests = None if requests_per_minute is None else TokenBucket(requests_per_minute / shares, clock)
        self._tokens = None if tokens_per_minute is None else TokenBucket(tokens_per_minute / shares, clock)
        self._most_running = None if concurrent_requests is None else max(1, concurrent_requests // shares)
        self.running = 0

    @classmethod
    def of(cls, key: ApiKey, clock: Clock, shares: int, isolated: bool = False) -> Client:
        return cls(
            key.name,
            clock,
            priority=key.priority,
            requests_per_minute=key.requests_per_minute,
            tokens_per_minute=key.tokens_per_minute,
            concurrent_requests=key.concurrent_requests,
            shares=shares,
            isolated=isolated,
        )

    @contextmanager
    def request(self) -> Iterator[Admission]:
        """Around one request, from before its body is read to the end of its answer.

        Raises:
            ApiError: 429, a limit is reached; nothing has been taken from the others then.
        """
        if self._most_running is not None and self.running >= self._most_running:
            raise self._refusal(f"{self._most_running:,} requests at a time", CONCURRENCY_RETRY_S)
        if self._tokens is not None:
            self._wait_for(self._tokens, 1, "tokens")
        if self._requests is not None:
            self._wait_for(self._requests, 1, "requests")
            self._requests.take(1)
        admission = Admission()
        self.running += 1
        try:
            yield admission
        finally:
            self.running -= admission.choices

    def admit(self, admission: Admission, *, choices: int, prompt_tokens: int) -> None:
        """Admits the work that a request turns out to be, once; one that is refused here does not count.

        Args:
            choices: completions that it asks for, those of all prompts together.
            prompt_tokens: of all prompts together.

        Raises:
            ApiError: 429, so much is not left; 400, it is more than there ever is.
        """
        try:
            if self._most_running is not None:
                self._wait_for_place(choices, choices - admission.choices, self._most_running)
            if self._tokens is not None:
                self._take_prompt(self._tokens, prompt_tokens)
        except ApiError:
            if self._requests is not None:
                self._requests.take(-1)
            raise
        self.running += choices - admission.choices
        admission.choices = choices

    def give_back(self, tokens: int) -> None:
        """Of a prompt that was admitted and that no engine took."""
        if self._tokens is not None:
            self._tokens.take(-tokens)

    def charge_output(self, tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.take(tokens)

    def priority(self, asked: int | None) -> int:
        """What a request gets that asks for a priority: a lower number runs first, and a key's own is the lowest."""
        if self._priority is None:
            return asked or 0
        return self._priority if asked is None else max(self._priority, asked)

    def cache_salt(self, asked: str | None) -> str | None:
        """What sets a request's cached prefixes apart, if it asks for that salt; an empty one stays what it is."""
        if not self._isolated or asked == "":
            return asked
        return f"{self.name}:{asked or ''}"

    def headers(self) -> dict[str, str]:
        """OpenAI's rate-limit headers, as things stand; none for what has no limit."""
        headers: dict[str, str] = {}
        for kind, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{kind}"] = str(int(bucket.capacity))
                headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(bucket.level + ROUNDING)))
                headers[f"x-ratelimit-reset-{kind}"] = f"{bucket.seconds_until(bucket.capacity):.3f}s"
        return headers

    def _wait_for_place(self, choices: int, more: int, most: int) -> None:
        if choices > most:
            text = f"{choices:,} choices are asked for; key {self.name!r} has {most:,} at a time here"
            raise ApiError.bad_request(text, code="choices_above_rate_limit")
        if self.running + more > most:
            raise self._refusal(f"{most:,} requests at a time, each choice being one", CONCURRENCY_RETRY_S)

    def _take_prompt(self, bucket: TokenBucket, tokens: int) -> None:
        if tokens > bucket.capacity:
            limit = f"key {self.name!r} has {int(bucket.capacity):,} a minute here"
            raise ApiError.bad_request(f"the prompt has {tokens:,} tokens; {limit}", code="prompt_above_rate_limit")
        self._wait_for(bucket, tokens, "tokens")
        bucket.take(tokens)

    def _wait_for(self, bucket: TokenBucket, amount: int, kind: str) -> None:
        if seconds := bucket.seconds_until(amount):
            raise self._refusal(f"{int(bucket.capacity):,} {kind} a minute", seconds)

    def _refusal(self, limit: str, retry_after_s: float) -> ApiError:
        seconds = max(1, math.ceil(retry_after_s))
        return ApiError(
            429,
            f"key {self.name!r} has {limit} here; come again in {seconds} s",
            code="rate_limit_exceeded",
            headers={"retry-after": str(seconds)},
        )
