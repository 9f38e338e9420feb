"""Which of Serve's lines are kept."""

import logging

import pytest

from app.logs import is_worth_a_line


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        ("CALL own_metrics OK 1.2ms", False),
        ("CALL own_metrics ERROR 1.2ms", True),
        ("POST /v1/chat/completions 200 31.0ms", True),
    ],
)
def test_that_metrics_were_gathered_is_not_said_at_each_scrape(message: str, kept: bool) -> None:
    assert is_worth_a_line(logging.makeLogRecord({"msg": message})) == kept
