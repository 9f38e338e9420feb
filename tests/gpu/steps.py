"""Drives an engine's core step by step, for what is measured per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from engine import EngineConfig, SamplingParams
from engine.core import EngineCore
from engine.request import EngineRequest
from tests.gpu.check import Setup
from tests.gpu.timing import synchronize

NAME_LENGTH = 60
"""Kernels whose names begin alike for as long are counted as one."""


def engine_args(setup: Setup, **changed: Any) -> dict[str, Any]:
    """Arguments of an engine on the device, on our Triton kernels."""
    return {"device": setup.device.type, "gpu_kernels": "triton", **changed}


@contextmanager
def dummy_core(setup: Setup, folder: Path, **args: Any) -> Iterator[EngineCore]:
    """An engine's core with drawn weights."""
    core = EngineCore.from_config(EngineConfig(model=str(folder), load_format="dummy", **engine_args(setup, **args)))
    try:
        yield core
    finally:
        core.shutdown()
        setup.release()


def random_prompts(lengths: Sequence[int], vocab: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]


@dataclass(slots=True)
class RunningBatch:
    """Requests of equal length that go on generating until they are left.

    Attributes:
        generated: each request's tokens so far, by id.
    """

    core: EngineCore
    length: int
    generated: dict[str, int] = field(default_factory=dict)

    @classmethod
    def start(cls, core: EngineCore, size: int, length: int, *, max_tokens: int | None = None) -> RunningBatch:
        """Adds requests of random tokens; greedy, without an end unless max_tokens is given."""
        batch = cls(core, length)
        limit = max_tokens or core.model_config.max_model_len - length
        params = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True)
        for index, prompt in enumerate(random_prompts([length] * size, core.model_config.vocab_size, seed=size)):
            name = f"{size}-{length}-{index}"
            batch.generated[name] = 0
            core.add_request(EngineRequest(request_id=name, prompt_token_ids=tuple(prompt), params=params, seed=index))
        return batch

    def step(self) -> None:
        for output in self.core.step().outputs:
            if output.error:
                raise RuntimeError(output.error)
            self.generated[output.request_id] += len(output.new_token_ids)

    def until_all_have(self, tokens: int) -> None:
        while min(self.generated.values()) < tokens:
            self.step()

    def time_steps(self, count: int) -> float:
        """Seconds of a step, over `count` steps that each give every request a token.

        Raises:
            RuntimeError: they did not.
        """
        before = sum(self.generated.values())
        started = time.perf_counter()
        self.steps(count)
        seconds = (time.perf_counter() - started) / count
        given = sum(self.generated.values()) - before
        if given != count * len(self.generated):
            raise RuntimeError(f"{count} steps gave {given} tokens to {len(self.generated)} requests")
        return seconds

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def mean_context(self) -> float:
        """Keys that a request's next token sees."""
        return self.length + sum(self.generated.values()) / len(self.generated)

    def run_to_end(self) -> None:
        while self.core.has_work():
            self.step()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened, the next batch has the core for itself."""
        self.core.abort(list(self.generated))
        self.run_to_end()


@dataclass(frozen=True, slots=True)
class Busy:
    """What a device did during some steps.

    Attributes:
        seconds: of a step, in which anything ran on it.
        kernels: microseconds of a step by kernel, the longest first.
    """

    seconds: float
    kernels: dict[str, float]


def profiled(run: Callable[[], object], steps: int, device: torch.device) -> Busy:
    """Profiles some steps. The profiler slows the host down, so that only the device's own times mean something."""
    synchronize(device)
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        run()
        synchronize(device)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in profiler.events() if event.device_type == kind]
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    busy = end = 0.0
    kernels: dict[str, float] = {}
    for start, stop, name in spans:
        busy += max(stop - max(start, end), 0.0)
        end = max(end, stop)
        kernels[name[:NAME_LENGTH]] = kernels.get(name[:NAME_LENGTH], 0.0) + (stop - start) / steps
    return Busy(busy * 1e-6 / steps, dict(sorted(kernels.items(), key=lambda item: -item[1])))
