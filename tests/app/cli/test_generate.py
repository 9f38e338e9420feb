from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from app.cli.main import app


def test_demo_knows_the_capital(demo_folder: Path) -> None:
    done = CliRunner().invoke(app, ["generate", "The capital of France is", "--temperature", "0", "--max-tokens", "4"])
    assert done.exit_code == 0, done.output
    assert "Paris" in done.stdout


def test_rows_come_back_in_order_with_completions(tiny_folder: Path, demo_folder: Path, tmp_path: Path) -> None:
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"prompt": "one", "id": 7},
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"prompt": [10, 11]},
    ]
    source.write_text("\n".join(map(json.dumps, rows)))
    args = ["generate", "--num-threads=1", "zero", "--model", str(demo_folder), "--file", str(source)]
    args += ["--output", str(sink), "--max-num-seqs", "2", "--no-enable-prefix-caching"]
    done = CliRunner().invoke(app, [*args, "--max-tokens", "3", "--n", "2", "--seed", "1"])
    assert done.exit_code == 0, done.output
    written = [json.loads(line) for line in sink.read_text().splitlines()]
    assert [{name: row[name] for name in row if name != "completions"} for row in written] == [
        {"prompt": "zero"},
        *rows,
    ]
    for row in written:
        assert [0 < each["num_tokens"] <= 3 for each in row["completions"]] == [True, True]
