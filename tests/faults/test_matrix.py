"""The fault matrix, played once in a process of its own, which has its own Ray cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.matrix import FAULTS

ROOT = Path(__file__).parent.parent.parent
PLAY_SECONDS = 540


@pytest.fixture(scope="module")
def rows(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("faults")
    file, log = folder / "rows.json", folder / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults", "--json", str(file)],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        process.wait(PLAY_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the matrix takes too long:\n{log.read_text()[-4000:]}")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # Ray's daemons are in the group; its workers end with them
            process.wait()
    assert file.exists(), log.read_text()[-4000:]
    return {(row["fault"], row["streaming"]): row for row in json.loads(file.read_text())}


@pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize("fault", [fault.name for fault in FAULTS])
def test_clients_and_neighbours_see_what_they_should_and_nothing_is_left_behind(
    rows: dict[tuple[str, bool], dict[str, Any]], fault: str, streaming: bool
) -> None:
    assert rows[fault, streaming]["problems"] == []
