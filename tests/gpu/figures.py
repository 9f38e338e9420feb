"""The engine's speed against what the machine can do, and against transformers on the same machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from engine import LLM
from engine.core import EngineCore
from tests.gpu.check import Check, Setup
from tests.gpu.floors import decode_bytes, decode_flops, prefill_flops
from tests.gpu.kernel_speed import kernel_speed
from tests.gpu.models import LLAMA_8B, QWEN3_600M, Shape, tiny, write_folder
from tests.gpu.report import Row, Value, attempt
from tests.gpu.steps import RunningBatch, dummy_core, engine_args, profiled
from tests.gpu.timing import ceiling
from tests.gpu.workload import Throughput, Work, run_engine, run_transformers

DECODE_SHARE = 0.8
DECODE_RATIO = 1.5
PREFILL_SHARE = 0.6
HOST_GAP = 0.05
NAMED_KERNELS = 12


def machine(setup: Setup) -> Iterator[Row]:
    best = ceiling(setup.device, setup.tiny)
    yield Row("copy, read + written", values={"GB/s": best.bytes_per_second / 1e9})
    yield Row("bfloat16 product", values={"TFLOP/s": best.flops_per_second / 1e12})


def llama_8b(setup: Setup) -> Iterator[Row]:
    """Decode steps by batch size, and prefill."""
    shape = tiny(LLAMA_8B) if setup.tiny else LLAMA_8B
    folder = write_folder(setup.folder / "llama_8b", shape)
    sizes = (2,) if setup.tiny else (1, 8, 32, 128, 256)
    context, prompt = (24, 20) if setup.tiny else (512, 2048)
    ceiling(setup.device, setup.tiny)  # before the engine takes the memory
    setup.release()
    started = time.perf_counter()
    with dummy_core(
        setup,
        folder,
        dtype="float32" if setup.tiny else "bfloat16",
        max_model_len=128 if setup.tiny else 4096,
        max_num_seqs=max(sizes),
        max_num_batched_tokens=64 if setup.tiny else 8192,
        num_kv_blocks=64 if setup.tiny else None,
        enable_prefix_caching=False,
    ) as core:
        yield Row("start, weights drawn", values={"seconds": time.perf_counter() - started})
        for size in sizes:
            yield from attempt(f"decode, batch {size}", _decode, setup, core, shape, size, context)
        yield from attempt("prefill", _prefill, setup, core, shape, prompt)


def _decode(setup: Setup, core: EngineCore, shape: Shape, size: int, context: int) -> Iterator[Row]:
    best = ceiling(setup.device, setup.tiny)
    count, profiled_count = (2, 1) if setup.tiny else (32, 8)
    with RunningBatch.start(core, size, context) as batch:
        batch.until_all_have(2)
        seconds = batch.time_steps(count)
        moved = decode_bytes(shape, size, batch.mean_context())
        busy = profiled(partial(batch.steps, profiled_count), profiled_count, setup.device)
    floor = moved / best.bytes_per_second
    values: dict[str, Value] = {
        "ms": seconds * 1e3,
        "floor ms": floor * 1e3,
        "products ms": decode_flops(shape, size) / best.flops_per_second * 1e3,
        "share": floor / seconds,
        "busy ms": busy.seconds * 1e3,
        "host gap": 1.0 - busy.seconds / seconds,
        "tok/s": size / seconds,
    }
    aim, met = "", None
    if size == 1:
        aim, met = f"share >= {DECODE_SHARE:.0%}", floor / seconds >= DECODE_SHARE
    elif size == 256:
        aim, met = f"ms <= {DECODE_RATIO} floors", seconds <= DECODE_RATIO * floor
    yield Row(f"decode, batch {size}", values=values, aim=aim, aim_met=met)
    yield _kernels_row(f"kernels, batch {size}", busy.kernels)


def _kernels_row(name: str, kernels: dict[str, float]) -> Row:
    """Where a step's time goes, in microseconds."""
    longest: dict[str, Value] = {kernel: round(us, 1) for kernel, us in list(kernels.items())[:NAMED_KERNELS]}
    return Row(name, values=longest | {"all others": round(sum(list(kernels.values())[NAMED_KERNELS:]), 1)})


def _prefill(setup: Setup, core: EngineCore, shape: Shape, length: int) -> Iterator[Row]:
    best = ceiling(setup.device, setup.tiny)
    count = 1 if setup.tiny else 16

    def run() -> float:
        batch = RunningBatch.start(core, count, length, max_tokens=1)
        started = time.perf_counter()
        batch.run_to_end()
        return time.perf_counter() - started

    run()  # warms up
    seconds = min(run(), run())
    busy = profiled(run, 1, setup.device)
    share = count * prefill_flops(shape, length) / seconds / best.flops_per_second
    values: dict[str, Value] = {
        "tok/s": count * length / seconds,
        "TFLOP/s": count * prefill_flops(shape, length) / seconds / 1e12,
        "share": share,
        "host gap": 1.0 - busy.seconds / seconds,
    }
    aim = f"share >= {PREFILL_SHARE:.0%}"
    yield Row(f"prefill, {count} prompts of {length}", values=values, aim=aim, aim_met=share >= PREFILL_SHARE)
    yield _kernels_row("kernels, prefill", busy.kernels)


def qwen3_600m(setup: Setup) -> Iterator[Row]:
    """The workload of nano-vllm with overlapped steps and without, beside transformers, and the gaps between steps."""
    shape = tiny(QWEN3_600M) if setup.tiny else QWEN3_600M
    folder = write_folder(setup.folder / "qwen3_600m", shape)
    work = Work.draw(3, 2, 5, 256) if setup.tiny else Work.draw(256, 100, 1024, 10_000)
    few = work.first(2 if setup.tiny else 64)
    ours: Throughput | None = None
    for overlap in (True, False):
        with LLM(
            str(folder),
            load_format="dummy",
            **engine_args(
                setup,
                dtype="float32" if setup.tiny else "bfloat16",
                async_scheduling=overlap,
                max_model_len=64 if setup.tiny else 4096,
                max_num_seqs=len(work.prompts),
                max_num_batched_tokens=64 if setup.tiny else 16_384,
                num_kv_blocks=64 if setup.tiny else None,
            ),
        ) as llm:
            how = "overlapped" if overlap else "one after another"
            run_engine(llm, few.first(2))
            done = run_engine(llm, work)
            yield Row(f"{len(work.prompts)} requests, {how}", values=_throughput(done))
            if overlap:
                ours = run_engine(llm, few)
                yield Row(f"the first {len(few.prompts)} of them", values=_throughput(ours))
            for size in (2,) if setup.tiny else (32, 256):
                yield from attempt(f"gap, batch {size}, {how}", _gap, setup, llm.core, size, how, overlap)
        setup.release()
    yield from attempt("transformers", _transformers, setup, shape, few, ours)


def _throughput(done: Throughput) -> dict[str, Value]:
    return {"output tok/s": done.tokens_per_second, "seconds": done.seconds, "tokens": done.tokens}


def _gap(setup: Setup, core: EngineCore, size: int, how: str, overlap: bool) -> Iterator[Row]:
    count, profiled_count = (2, 1) if setup.tiny else (64, 16)
    with RunningBatch.start(core, size, 24 if setup.tiny else 256) as batch:
        batch.until_all_have(2)
        seconds = batch.time_steps(count)
        busy = profiled(partial(batch.steps, profiled_count), profiled_count, setup.device)
    gap = 1.0 - busy.seconds / seconds
    values: dict[str, Value] = {"ms": seconds * 1e3, "busy ms": busy.seconds * 1e3, "host gap": gap}
    aim, met = (f"host gap < {HOST_GAP:.0%}", gap < HOST_GAP) if overlap else ("", None)
    yield Row(f"decode, batch {size}, {how}", values=values, aim=aim, aim_met=met)
    if overlap:
        yield _kernels_row(f"kernels, batch {size}", busy.kernels)


def _transformers(setup: Setup, shape: Shape, work: Work, ours: Throughput | None) -> Iterator[Row]:
    limit = min(60.0, setup.seconds_left() / 2)
    blocks, batch_tokens = (8, 64) if setup.tiny else (8 * len(work.prompts), 4096)
    theirs = run_transformers(shape, work, setup.device, seconds=limit, blocks=blocks, batch_tokens=batch_tokens)
    values = _throughput(theirs) | {"finished": theirs.finished}
    if ours is not None:
        values["ours / theirs"] = ours.tokens_per_second / theirs.tokens_per_second
    note = (
        "" if theirs.finished == len(work.prompts) else f"stopped after {limit:.0f} s; unfinished requests do not count"
    )
    yield Row(f"transformers, the first {len(work.prompts)}", values=values, note=note)


CHECKS: dict[str, Check] = {
    "machine": machine,
    "kernel speed": kernel_speed,
    "llama 8b": llama_8b,
    "qwen3 0.6b": qwen3_600m,
}
