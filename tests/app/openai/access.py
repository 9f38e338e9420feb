"""Alice and Bob, their keys, and what they ask of an engine that says three tokens."""

from __future__ import annotations

from typing import Any

import httpx

from app.api_keys import hash_key
from app.config import ApiKey
from app.openai.auth import KeyRing
from app.openai.responses import ErrorResponse
from tests.app.openai.scripted_client import ScriptedClient

ALICE = "sk-manta-alice"
BOB = "sk-manta-bob"
PROMPT = [5, 6, 7, 8]
"""As token ids, so that its length is known."""

BODY: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 3}


class Now:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 1_700_000_000.0

    def __call__(self) -> float:
        return self.seconds


def ring(now: Now, shares: int = 1, **alices: Any) -> KeyRing:
    """Of Alice, whose limits are given, and Bob, who has none."""
    keys = [
        ApiKey(name="alice", hash=hash_key(ALICE.encode()), **alices),
        ApiKey(name="bob", hash=hash_key(BOB.encode())),
    ]
    return KeyRing(keys, now, shares=shares)


def of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def three_tokens() -> ScriptedClient:
    return ScriptedClient(lambda request: [(9,), (9,), (9,)])


def error(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, ErrorResponse.model_validate(answer.json()).error.code
