"""`manta keys`."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from app.api_keys import hash_key, load_keys
from app.cli.main import app
from app.config import Access


def test_new_key_and_its_line_are_what_is_printed() -> None:
    result = CliRunner().invoke(app, ["keys", "new", "alice"])
    assert result.exit_code == 0
    key, line = result.stdout.splitlines()
    loaded = load_keys(Access(keys_env="KEYS"), {"KEYS": line})
    assert loaded is not None
    assert [(each.name, each.hash) for each in loaded] == [("alice", hash_key(key.encode()))]


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "a\n"])
def test_name_that_would_not_fit_the_file_is_refused(name: str) -> None:
    result = CliRunner().invoke(app, ["keys", "new", name])
    assert result.exit_code == 2
    assert result.stdout == ""
