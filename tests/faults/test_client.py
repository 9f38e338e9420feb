"""What the matrix says that a client saw."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.client import Answer

ERROR = {"message": "", "type": "server_error", "param": None, "code": "internal_error"}


def answer(tokens: list[str], **fields: Any) -> Answer:
    ended = {0: "length"} if tokens == ["a", "b", "c"] else {}
    return Answer(
        **{"status": 200, "text": {0: "".join(tokens)}, "tokens": {0: tokens}, "finish_reasons": ended} | fields
    )


@pytest.mark.parametrize(
    ("got", "seen"),
    [
        (answer(["a", "b", "c"]), "all tokens, no error"),
        (answer(["a", "b"]), "wrong tokens"),
        (answer(["a", "b", "b"]), "wrong tokens"),
        (answer(["a", "b", "c"], finish_reasons={0: "stop"}), "wrong tokens"),
        (answer(["a", "b"], error=ERROR, done=True), "error event internal_error"),
        (answer(["b"], error=ERROR, done=True), "internal_error, and wrong tokens"),
        (answer([], status=500, error=ERROR), "500 internal_error"),
        (answer([], status=500, error="Internal Server Error"), "500 text/plain"),
        (answer(["a"], broken="ReadError"), "broken off (ReadError)"),
        (answer(["a", "a"], broken="ReadError"), "broken off, and wrong tokens"),
        (answer(["a"], left=True), "left"),
    ],
)
def test_an_answer_is_told_apart_from_the_undisturbed_one(got: Answer, seen: str) -> None:
    assert got.seen(answer(["a", "b", "c"])) == seen


def test_a_stream_that_ends_without_its_mark_is_told_apart() -> None:
    whole = answer(["a", "b", "c"], done=True)
    assert whole.seen(whole) == "all tokens, no error"
    assert answer(["a", "b", "c"]).seen(whole) == "all tokens, without [DONE]"


def test_pauses_before_the_fault_do_not_count() -> None:
    got = Answer(arrivals=[0.0, 5.0, 6.0, 8.0])
    assert got.longest_pause(5.5) == 2.0
