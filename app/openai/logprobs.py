"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.outputs import Logprob, TokenLogprobDict

LOWEST = -9999.0
"""Stands for minus infinity, which JSON has no word for."""


def completion_logprobs(
    entries: Sequence[TokenLogprobDict | None],
    token_ids: Sequence[int],
    text_offset: int,
    token_text: Callable[[int], str],
) -> tuple[dict[str, Any], int]:
    """The `logprobs` of a completion's choice.

    `top_logprobs` has the token itself beside the best ones, as OpenAI's has.

    Args:
        entries: one a token; None where nothing is known, which a prompt's first token is.
        text_offset: where the first token's text starts.
        token_text: what a token adds to the text.

    Returns:
        The object, and where the text after its last token starts.
    """
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for entry, token_id in zip(entries, token_ids, strict=True):
        text = token_text(token_id)
        tokens.append(text)
        offsets.append(text_offset)
        text_offset += len(text)
        token_logprobs.append(_finite(entry[token_id].logprob) if entry else None)
        top: dict[str, float] | None = None
        if entry:
            top = {}
            for candidate in entry.values():
                top.setdefault(candidate.decoded_token, _finite(candidate.logprob))
        top_logprobs.append(top)
    logprobs = {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": offsets,
    }
    return logprobs, text_offset


def chat_logprobs(
    entries: Sequence[TokenLogprobDict], token_ids: Sequence[int], top: int, token_bytes: Callable[[int], bytes]
) -> dict[str, Any]:
    """The `logprobs` of a chat choice; `top` alternatives beside each token, best first.

    Args:
        token_bytes: what a token adds to the bytes of the text.
    """

    def token(token_id: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": logprob.decoded_token,
            "logprob": _finite(logprob.logprob),
            "bytes": list(token_bytes(token_id)),
        }

    content = []
    for entry, token_id in zip(entries, token_ids, strict=True):
        if not entry:  # as above: nothing is known of it
            continue
        ranked = sorted(entry.items(), key=lambda item: item[1].rank)[:top]
        content.append({**token(token_id, entry[token_id]), "top_logprobs": [token(*item) for item in ranked]})
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Sequence[TokenLogprobDict | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: token id to logprob, rank and text."""
    return [
        None
        if entry is None
        else {
            str(token_id): {
                "logprob": _finite(each.logprob),
                "rank": each.rank,
                "decoded_token": each.decoded_token,
            }
            for token_id, each in entry.items()
        }
        for entry in entries
    ]


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST
