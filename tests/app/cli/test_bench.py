from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from app.cli.bench import report, roofline, startup
from app.cli.bench.options import positive_numbers
from app.cli.bench.steps import reached_at_median
from app.cli.bench.workload import file_items, fitted, random_items, trace_items
from app.cli.main import app
from engine import EngineConfig, InvalidParameter, StepRecord
from engine.config import Quantization
from engine.hub import load_model_config
from engine.tokenizer import load_tokenizer
from kernels.cpu.library import pack_int8
from tests.engine.models.tiny import config_of, save_tiny

VOCAB = 1000


def common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---- workloads ----


def test_random_prompts_share_their_prefix_and_nothing_else() -> None:
    a, b = random_items(2, 50, 7, shared_prefix=20, vocab_size=VOCAB, seed=3)
    assert common_prefix(a.prompt_token_ids, b.prompt_token_ids) == 20
    assert (len(a.prompt_token_ids), a.output_len) == (70, 7)


def test_random_prompts_follow_from_the_seed() -> None:
    first, again, other = (random_items(3, 9, 1, vocab_size=VOCAB, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def mooncake(input_length: int, *hash_ids: int, timestamp: int = 0) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": input_length, "output_length": 5, "hash_ids": hash_ids}


def test_mooncake_blocks_are_shared_where_their_ids_are(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "trace.jsonl",
        mooncake(1600, 0, 1, 2, 3),
        mooncake(1024, 0, 1, timestamp=2500),
        mooncake(1024, 0, 9),
    )
    a, b, c = trace_items(path, None, vocab_size=VOCAB, seed=0)
    assert [len(item.prompt_token_ids) for item in (a, b, c)] == [50, 32, 32]
    assert common_prefix(a.prompt_token_ids, b.prompt_token_ids) == 32
    assert common_prefix(a.prompt_token_ids, c.prompt_token_ids) == 16
    assert [item.arrival for item in (a, b, c)] == [0, 2.5, 0]
    assert a.output_len == 5


def test_azure_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,37,44\n"
        "2023-11-16 18:15:48.1805900,6,109\n"
        "2023-11-16 18:15:49.1805900,8,1\n"
    )
    a, b = trace_items(path, 2, vocab_size=VOCAB, seed=0)
    assert [(len(item.prompt_token_ids), item.output_len, item.arrival) for item in (a, b)] == [
        (37, 44, 0),
        (6, 109, 1.5),
    ]


def test_first_turn_goes_through_the_chat_template_and_a_prompt_does_not(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    path = write_lines(tmp_path / "in.jsonl", {"turns": ["Hello", "Again"]}, {"prompt": "Hello"}, {"prompt": "third"})
    turn, prompt = file_items(path, 2, 4, tokenizer)
    assert tokenizer.decode(prompt.prompt_token_ids, skip_special_tokens=False) == "Hello"
    assert "<|im_start|>user\nHello<|im_end|>" in tokenizer.decode(turn.prompt_token_ids, skip_special_tokens=False)


def test_request_beyond_the_context_is_cut(tiny_folder: Path) -> None:
    items = random_items(1, 30, 10, vocab_size=VOCAB, seed=0) + random_items(1, 5, 10, vocab_size=VOCAB, seed=0)
    cut, number = fitted(items, 20)
    assert [(len(item.prompt_token_ids), item.output_len) for item in cut] == [(19, 1), (5, 10)]
    assert number == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", "{"),
        ("a.jsonl", "[]"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": []}'),
        ("a.jsonl", '{"timestamp": 0, "input_length": "many", "output_length": 1, "hash_ids": [1]}'),
        ("a.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.68,3"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,3,3"),
        ("a.csv", ""),
    ],
)
def test_trace_of_another_format_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text + "\n")
    with pytest.raises(InvalidParameter, match=name):
        trace_items(tmp_path / name, None, vocab_size=VOCAB, seed=0)


# ---- options ----


@pytest.mark.parametrize("text", ["", "1,", "0", "a", "1,-2"])
def test_numbers_with_commas(text: str) -> None:
    assert positive_numbers("running", "1, 32") == [1, 32]
    with pytest.raises(InvalidParameter, match="running"):
        positive_numbers("running", text)


@pytest.mark.parametrize(
    "args",
    [
        ["throughput", "--nonsense", "3"],
        ["throughput", "--trace", "/nope"],
        ["throughput", "--json", "/no/such/folder.json"],
        ["throughput", "--num-prompts", "0"],
        ["latency", "--dtype", "int3"],
        ["throughput", "more"],
        ["startup", "--model", "/nope"],
        ["step", "--running", "none"],
        ["throughput", "--plot", "figure.txt"],
    ],
)
def test_user_errors_exit_with_2_and_without_a_traceback(
    args: list[str], tiny_folder: Path, tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where figure.txt would be
    done = bench(tiny_folder, *args) if "--model" not in args else CliRunner().invoke(app, ["bench", *args])
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit)
    assert done.stderr


def test_run_that_fails_leaves_no_files_and_changes_none(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{}")
    for name in ("old.json", "new.json"):
        files = ["--json", str(tmp_path / name), "--plot", str(tmp_path / "new.svg")]
        assert bench(tiny_folder, "throughput", "--trace", "/nope", *files).exit_code == 2
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old.json", "{}")]


def test_plot_without_matplotlib_says_what_to_install(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = bench(tiny_folder, "throughput", "--plot", str(tmp_path / "a.png"))
    assert (done.exit_code, "matplotlib" in done.stderr) == (2, True)


# ---- roofline ----


def record(*, tokens: int, sampled: int, keys: int, pairs: int) -> StepRecord:
    return StepRecord(0.0, 1.0, {}, 1, tokens, sampled, keys, pairs)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_arithmetic_of_a_step_is_that_of_the_model(tmp_path: Path, architecture: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    theirs = save_tiny(tmp_path, architecture)
    theirs.set_attn_implementation("eager")
    tokens = 40
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        theirs(torch.arange(tokens)[None])
    # All tokens get logits there, and all are multiplied with all keys, masked ones too.
    cost = roofline.step_cost(config_of(tmp_path), record(tokens=tokens, sampled=tokens, keys=0, pairs=tokens**2))
    assert cost.flops == pytest.approx(counter.get_total_flops(), rel=0.005)  # they count the rotary angles


def test_last_layer_multiplies_sampled_tokens_alone_behind_its_attention(tmp_path: Path) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    theirs = save_tiny(tmp_path, "LlamaForCausalLM")
    tokens, sampled = 40, 3
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        theirs(torch.arange(tokens)[None])
    counts = counter.get_flop_counts()
    spared = ("LlamaForCausalLM.model.layers.2.self_attn.o_proj", "LlamaForCausalLM.model.layers.2.mlp")
    of_all_tokens = sum(sum(counts[name].values()) for name in (*spared, "LlamaForCausalLM.lm_head"))
    config = config_of(tmp_path)
    all_sampled, few_sampled = (
        roofline.step_cost(config, record(tokens=tokens, sampled=number, keys=0, pairs=0)).flops
        for number in (tokens, sampled)
    )
    assert all_sampled - few_sampled == of_all_tokens * (tokens - sampled) / tokens


@pytest.mark.parametrize("quantization", ["int8", "int8_w8a8"])
def test_bytes_of_a_quantised_step_are_those_of_the_packed_weights(tmp_path: Path, quantization: Quantization) -> None:
    import torch

    # Sizes that fill groups and panels.
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 128}
    theirs = save_tiny(tmp_path, "LlamaForCausalLM", **sizes)
    config = config_of(tmp_path, quantization=quantization)
    weights = [module.weight.detach() for module in theirs.modules() if isinstance(module, torch.nn.Linear)]
    cost = roofline.step_cost(config, record(tokens=9, sampled=1, keys=16, pairs=0))
    assert cost.num_bytes == sum(pack_int8(each, step=1).nbytes for each in weights) + config.kv_block_bytes(16)


def test_bytes_of_a_step_are_weights_and_visible_keys(tmp_path: Path) -> None:
    theirs = save_tiny(tmp_path, "LlamaForCausalLM", tie_word_embeddings=False)
    config = config_of(tmp_path)
    weights = {name: each.numel() * 4 for name, each in theirs.named_parameters() if "norm" not in name}
    del weights["model.embed_tokens.weight"]
    all_read = roofline.step_cost(config, record(tokens=9, sampled=1, keys=32, pairs=0)).num_bytes
    assert all_read == sum(weights.values()) + 2 * config.kv_block_bytes(16)
    for_sampled = [name for name in weights if "lm_head" in name or "layers.2.self_attn.o" in name or "2.mlp" in name]
    assert len(for_sampled) == 5
    unread = sum(weights[name] for name in for_sampled)
    none_sampled = roofline.step_cost(config, record(tokens=9, sampled=0, keys=32, pairs=0)).num_bytes
    assert none_sampled == all_read - unread


def test_roofline_is_the_later_of_memory_and_cores() -> None:
    machine = roofline.Machine("cpu", 1, "float32", gb_per_s=10, gflop_per_s=100, load_average=0)
    assert roofline.Cost(num_bytes=20e9, flops=100e9).seconds(machine) == 2
    assert roofline.Cost(num_bytes=20e9, flops=300e9).seconds(machine) == 3


def test_machine_is_the_better_of_two_measurements() -> None:
    first = roofline.Machine("cpu", 1, "float32", gb_per_s=10, gflop_per_s=100, load_average=0.5)
    second = roofline.Machine("cpu", 1, "float32", gb_per_s=9, gflop_per_s=120, load_average=2)
    best = first.or_better(second)
    assert (best.gb_per_s, best.gflop_per_s, best.load_average) == (10, 120, 0.5)


def test_stall_leaves_the_share_of_like_steps_as_it_is(tiny_folder: Path) -> None:
    model = load_model_config(EngineConfig(model=str(tiny_folder), load_format="dummy"))
    machine = roofline.Machine("cpu", 1, "float32", gb_per_s=10, gflop_per_s=100, load_average=0)
    like = [record(tokens=1, sampled=1, keys=16, pairs=16)] * 4
    stalled = [*like, replace(like[0], seconds=60.0)]
    even, uneven = (reached_at_median(model, machine, steps) for steps in (like, stalled))
    assert (even.pop("steps"), uneven.pop("steps")) == (4, 5)
    assert (even.pop("seconds"), uneven.pop("seconds")) == (4, 5)
    assert uneven == pytest.approx(even)


# ---- tables ----


def test_tables_keep_their_numbers_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    numbers = [f"{index + 1000}.0001" for index in range(12)]
    report.show("Latency", ("", *(f"p{index}" for index in range(12))), [["time per output token, s", *numbers]])
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert any(all(each in line for each in numbers) for line in shown.splitlines())


@pytest.mark.parametrize(("percent", "is_told"), [(99.0, False), (101.0, True)])
def test_share_above_the_machine_is_explained(
    percent: float, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = roofline.Machine("cpu", 1, "float32", gb_per_s=10, gflop_per_s=100, load_average=0)
    names = ("steps", "gb_per_s", "gflop_per_s", "gflop_per_s_percent", "roofline_percent")
    report.show_efficiency(machine, {"decode": {**dict.fromkeys(names, 1.0), "gb_per_s_percent": percent}})
    assert (report.FASTER in capsys.readouterr().out) is is_told


# ---- the commands, on a tiny model ----


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures the machine with so little that its figures mean nothing."""
    monkeypatch.setattr(roofline, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(roofline, "GEMM_SIZE", 64)


def bench(folder: Path, command: str, *args: str) -> Result:
    shared = [
        "--model",
        str(folder),
        "--load-format",
        "dummy",
        "--num-threads",
        "1",
        "--kv-cache-memory-bytes",
        "4000000",
    ]
    return CliRunner().invoke(app, ["bench", command, *shared, *args])


def figures(folder: Path, path: Path, command: str, *args: str) -> dict[str, Any]:
    done = bench(folder, command, "--json", str(path), *args)
    assert done.exit_code == 0, done.output
    assert "Roofline" in done.stdout
    content: dict[str, Any] = json.loads(path.read_text())
    assert content["command"] == command
    assert content["settings"]["engine"]["num_threads"] == 1
    assert {"gb_per_s", "gflop_per_s"} <= content["roofline"].keys()
    return content


def test_throughput_counts_what_ran(tiny_folder: Path, tmp_path: Path, small: None) -> None:
    args = ["--num-prompts", "3", "--input-len", "20", "--output-len", "4", "--shared-prefix", "32", "--warmup", "0"]
    content = figures(tiny_folder, tmp_path / "out.json", "throughput", *args, "--num-iters", "2")
    assert len(content["rounds"]) == 2
    for each in content["rounds"]:  # the second starts as cold as the first
        assert (each["requests"], each["prompt_tokens"], each["output_tokens"]) == (3, 156, 12)
        assert each["cached_tokens"] == 2 * 32
        assert each["total_tokens_per_s"] == pytest.approx(168 / each["seconds"])
    near = content["efficiency"]
    assert near["decode"]["steps"] + near["prefill"]["steps"] == sum(each["steps"] for each in content["rounds"])


def test_latency_has_percentiles_of_each_time(tiny_folder: Path, tmp_path: Path, small: None) -> None:
    args = ["--batch-size", "2", "--input-len", "5", "--output-len", "6", "--num-iters", "2", "--warmup", "0"]
    content = figures(tiny_folder, tmp_path / "out.json", "latency", *args)
    for name in ("e2e_s", "ttft_s", "tpot_s", "batch_s"):
        assert set(content[name]) == {"mean", "p10", "p25", "p50", "p75", "p90", "p99"}
        assert 0 < content[name]["p10"] <= content[name]["p99"]
    mean = {name: content[name]["mean"] for name in ("e2e_s", "ttft_s", "tpot_s")}
    assert mean["e2e_s"] == pytest.approx(mean["ttft_s"] + 5 * mean["tpot_s"])


def test_step_splits_bookkeeping_and_model(tiny_folder: Path, tmp_path: Path, small: None) -> None:
    trace = tmp_path / "trace.json"
    args = ["--running", "1,3", "--context", "20", "--waiting", "2,5", "--blocks", "16,40", "--num-iters", "4"]
    content = figures(tiny_folder, tmp_path / "out.json", "step", *args, "--warmup", "1", "--profile", str(trace))
    kinds = [(each["running"], each["waiting"], each["blocks"]) for each in content["bookkeeping"]]
    assert kinds == [(running, waiting, blocks) for running in (1, 3) for waiting in (2, 5) for blocks in (16, 40)]
    assert [each["running"] for each in content["engine"]] == [1, 3]
    for each in content["bookkeeping"] + content["engine"]:
        phases = {name: value["mean"] for name, value in each["phases_ms"].items()}
        total, bookkeeping = phases.pop("total"), phases.pop("bookkeeping")
        assert sum(phases.values()) == pytest.approx(total)
        assert bookkeeping == pytest.approx(phases["schedule"] + phases["inputs"] + phases["update"])
    requests = [
        each["args"]["requests"] for each in json.loads(trace.read_text())["traceEvents"] if each["name"] == "step"
    ]
    assert set(requests) == {1, 3}
    assert requests.count(3) >= 4
    # Those with prompts, of 20 tokens or a few less, are among them: `manta bench routing --fit` needs both.
    assert {1, 3, 20} < {each["tokens"] for each in content["steps"]}
    assert all(each["keys"] >= each["tokens"] and each["seconds"] > 0 for each in content["steps"])
    assert len(content["steps"]) == len(requests)


def test_startup_is_split_into_phases(tiny_folder: Path, tmp_path: Path, small: None) -> None:
    content = figures(tiny_folder, tmp_path / "out.json", "startup", "--num-iters", "1", "--warmup", "0")
    phases = content["median"]
    total = phases.pop("total")
    assert sum(phases.values()) == pytest.approx(total)
    assert set(phases) == {
        "interpreter", "imports", "config", "kernels", "weights", "kv_cache", "tokenizer", "first_token", "rest",
    }  # fmt: skip
    assert all(seconds > 0 for seconds in phases.values())


def test_start_takes_what_the_new_process_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not what passes until that has ended, which includes the engine's shutdown."""
    monkeypatch.setattr(startup, "CHILD", 'print(\'{"interpreter": 0.25, "rest": 0.5}\')')
    assert startup._start(EngineConfig(model="none")) == {"interpreter": 0.25, "rest": 0.5, "total": 0.75}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_a_new_process_refuses_is_told_in_one_line(
    tiny_folder: Path, small: None, capfd: pytest.CaptureFixture[str]
) -> None:
    done = bench(tiny_folder, "startup", "--device", "cuda", "--warmup", "0")
    assert done.exit_code == 2
    assert done.stderr == "error: device='cuda': there is no CUDA device; use 'cpu' or 'auto'\n"
    assert "Traceback" not in capfd.readouterr().err  # of the process itself


@pytest.mark.parametrize("command", ["throughput", "latency", "step"])
def test_figures_are_drawn(tiny_folder: Path, tmp_path: Path, small: None, command: str) -> None:
    pytest.importorskip("matplotlib")
    short = {
        "throughput": ["--num-prompts", "2", "--output-len", "3", "--warmup", "0"],
        "latency": ["--output-len", "3", "--num-iters", "1", "--warmup", "0"],
        "step": ["--running", "2", "--waiting", "1", "--blocks", "64", "--num-iters", "2", "--warmup", "0"],
    }[command]
    path = tmp_path / "figure.svg"
    done = bench(tiny_folder, command, *short, "--plot", str(path))
    assert done.exit_code == 0, done.output
    assert "<svg" in path.read_text()
