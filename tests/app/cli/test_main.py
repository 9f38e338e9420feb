from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text
from typer.main import get_command
from typer.testing import CliRunner

from app.cli.main import app
from app.version import manta_version


def test_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"manta {manta_version()}\n")


def test_fetched_folder_is_all_of_stdout(demo_folder: Path) -> None:
    done = CliRunner().invoke(app, ["models", "fetch", "demo"])
    assert (done.exit_code, done.stdout) == (0, f"{demo_folder}\n")


@pytest.mark.parametrize(
    "args",
    [
        ["models", "fetch", "/nope"],
        ["models", "fetch"],
        ["generate"],
        ["generate", "x", "--model", "/nope"],
        ["generate", "x", "--temperature", "-1"],
        ["generate", "x", "--dtype", "int3"],
        ["generate", "x", "--nonsense", "3"],
        ["generate", "x", "--num-threads", "0"],
        ["generate", "--num-threads", "1"],
        ["generate", "--file", "/nope"],
        ["nonsense"],
    ],
)
def test_user_errors_exit_with_2_and_without_a_traceback(args: list[str]) -> None:
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert isinstance(done.exception, SystemExit)
    assert done.stderr


def test_output_that_cannot_be_written_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    args = ["generate", "x", "--model", str(tmp_path), "--output", str(tmp_path / "no" / "out.jsonl")]
    done = CliRunner().invoke(app, args)
    assert (done.exit_code, "out.jsonl" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    "row", ["{", "3", "{}", '{"prompt": "a", "messages": []}', '{"prompt": 3}', '{"messages": {}}']
)
def test_wrong_row_is_named_by_its_line(tmp_path: Path, row: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a"}\n\n' + row + "\n")
    done = CliRunner().invoke(app, ["generate", "--file", str(file)])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {file}, line 3: ")


def test_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "in.txt"
    file.write_bytes(b"\xff\xfe\xff")
    done = CliRunner().invoke(app, ["generate", "--file", str(file)])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)


def texts(command: Any) -> Iterator[str | None]:
    """Everything that a command and those below it say of themselves."""
    yield command.help
    yield from (getattr(each, "help", None) for each in command.params)
    for each in getattr(command, "commands", {}).values():
        yield from texts(each)


def test_help_shows_all_that_was_written() -> None:
    written = list(filter(None, texts(get_command(app))))
    assert any("Longest prompt" in each for each in written)
    assert [Text.from_markup(each).plain for each in written] == written  # Typer's help takes it as markup


def test_help_says_where_a_default_comes_from() -> None:
    done = CliRunner().invoke(app, ["generate", "--help"])
    assert done.stdout.count("default: (the model's)") == 4


def test_help_loads_neither_model_code_nor_server() -> None:
    program = (
        "import sys, app.cli.main;"
        "heavy = {'torch', 'transformers', 'ray', 'fastapi', 'openai'} & set(sys.modules);"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
