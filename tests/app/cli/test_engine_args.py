"""Arguments of the engine among a command's options."""

from __future__ import annotations

import pytest
import typer
from typer.main import get_command

from app.cli.engine_args import engine_args
from app.cli.main import app
from engine import InvalidParameter


@pytest.fixture
def ctx() -> typer.Context:
    """Of a command that has a --temperature of its own."""
    command = get_command(app).commands["generate"]
    return typer.Context(command)


def test_they_have_the_types_of_the_config(ctx: typer.Context) -> None:
    words = "--max-num-seqs 64 --gpu-memory-utilization=0.5 --no-enable-prefix-caching --cpu-kernels torch"
    assert engine_args(ctx, [*words.split(), "--debug-integrity", "--num-threads", "1", "--revision=a = b"]) == (
        {
            "max_num_seqs": 64,
            "gpu_memory_utilization": 0.5,
            "enable_prefix_caching": False,
            "cpu_kernels": "torch",
            "debug_integrity": True,
            "num_threads": 1,
            "revision": "a = b",
        },
        [],
    )


def test_words_that_are_no_options_are_left_in_order(ctx: typer.Context) -> None:
    words = ["- an item", "--num-threads", "2", "64", "--- a heading", "-5 degrees", "--async-scheduling", ""]
    args, others = engine_args(ctx, words)
    assert args == {"num_threads": 2, "async_scheduling": True}
    assert others == ["- an item", "64", "--- a heading", "-5 degrees", ""]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-num-seq", "3"], "unknown option --max-num-seq; did you mean --max-num-seqs?"),
        (["--temprature=0"], "unknown option --temprature; did you mean --temperature?"),
        (["-n", "2"], "unknown option -n; did you mean --n?"),
        (["--zzz"], "unknown option --zzz; those of the engine are --model, --revision, "),
        (["--max-num-seqs"], "--max-num-seqs: its value is missing"),
        (["--max-num-seqs", "many"], "max_num_seqs='many': must be a number"),
        (["--enable-prefix-caching=no"], "takes no value; write --enable-prefix-caching or --no-enable-prefix-caching"),
    ],
)
def test_what_is_wrong_is_named(words: list[str], message: str, ctx: typer.Context) -> None:
    with pytest.raises(InvalidParameter) as refused:
        engine_args(ctx, words)
    assert message in str(refused.value)
