"""A device's tables give the same steps as the host's, from deltas alone and without seeing what was sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from engine.outputs import ScheduledStart, ScheduledStep, SchedulerOutput
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.worker.device_buffers import DeviceBuffers, _Staging
from engine.worker.model_input import HostBuffers, ModelInput

BLOCK_SIZE = 4
MAX_NUM_SEQS = 5
MAX_MODEL_LEN = 30
SIZES = {
    "max_num_seqs": MAX_NUM_SEQS,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": 24,
    "block_size": BLOCK_SIZE,
    "device": torch.device("cpu"),
}


def start(name: str, token_ids: list[int], block_ids: list[int], computed: int = 0) -> ScheduledStart:
    spec = EngineRequest(request_id=name, prompt_token_ids=tuple(token_ids), params=SamplingParams(), seed=0)
    return ScheduledStart(spec, tuple(token_ids), tuple(block_ids), computed)


def apply_deltas(buffers: DeviceBuffers | HostBuffers, work: SchedulerOutput) -> None:
    for name in work.released:
        buffers.remove(name)
    for each in work.starts:
        buffers.add(each)
    for step in work.steps:
        buffers.append_blocks(buffers.row_of(step.request_id), step.new_block_ids)


def prepare(
    buffers: DeviceBuffers | HostBuffers,
    *steps: ScheduledStep,
    starts: tuple[ScheduledStart, ...] = (),
    padded: int | None = None,
) -> ModelInput:
    work = SchedulerOutput(steps, starts)
    apply_deltas(buffers, work)
    return buffers.prepare(work, padded)


def decode(name: str, computed: int, *new_blocks: int) -> ScheduledStep:
    return ScheduledStep(name, computed, 1, new_blocks, samples=True)


def tensors_of(step: ModelInput) -> list[torch.Tensor]:
    attention = step.attention
    assert attention.table_rows is not None
    return [
        *(step.token_ids, step.positions, step.kept),
        *(attention.slot_mapping, attention.query_start, attention.context_lens, attention.table_rows),
    ]


def assert_same_step(device: ModelInput, host: ModelInput) -> None:
    for name in ("rows", "query_start", "num_tokens", "sampling"):
        np.testing.assert_array_equal(getattr(device, name), getattr(host, name), err_msg=name)
    for name in ("token_ids", "positions", "kept"):
        assert getattr(device, name).tolist() == getattr(host, name).tolist(), name
    for name in ("slot_mapping", "query_start", "context_lens"):
        assert getattr(device.attention, name).tolist() == getattr(host.attention, name).tolist(), name
    np.testing.assert_array_equal(device.attention.query_lens, host.attention.query_lens)
    assert device.attention.max_context_len == host.attention.max_context_len
    assert device.attention.table_rows is not None
    own = device.attention.block_tables[device.attention.table_rows]
    for i, context in enumerate(host.attention.context_lens.tolist()):
        used = -(-context // BLOCK_SIZE)
        assert own[i, :used].tolist() == host.attention.block_tables[i, :used].tolist()


@dataclass
class Traffic:
    """A made-up scheduler: random prompts in chunks, decodes, preemptions, prefix hits, ends."""

    rng: np.random.Generator
    running: dict[str, dict[str, int]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    next_block: int = 1

    def step(self) -> SchedulerOutput:
        rng = self.rng
        released = [name for name in self.running if rng.random() < 0.1 or len(self.tokens[name]) > MAX_MODEL_LEN]
        for name in released:
            del self.running[name]
            if len(self.tokens[name]) < MAX_MODEL_LEN:
                self.preempted.append(name)
        starts, steps, budget = [], [], SIZES["max_num_batched_tokens"] - MAX_NUM_SEQS
        while len(self.running) < MAX_NUM_SEQS and (not self.running or rng.random() < 0.5):
            name = self.preempted.pop() if self.preempted else f"r{len(self.tokens)}"
            ids = self.tokens.setdefault(name, rng.integers(1, 1000, rng.integers(1, MAX_MODEL_LEN)).tolist())
            computed = int(rng.integers(0, len(ids)))
            blocks = self._blocks(-(-len(ids) // BLOCK_SIZE))
            starts.append(start(name, ids, blocks, computed))
            self.running[name] = {"computed": computed, "blocks": len(blocks)}
        for name, state in self.running.items():
            missing = len(self.tokens[name]) - state["computed"]
            count = min(missing, 1 + int(rng.integers(0, budget + 1)))
            budget -= count - 1
            new = self._blocks(max(-(-(state["computed"] + count) // BLOCK_SIZE) - state["blocks"], 0))
            steps.append(ScheduledStep(name, state["computed"], count, tuple(new), samples=count == missing))
            state["computed"] += count
            state["blocks"] += len(new)
        return SchedulerOutput(tuple(steps), tuple(starts), tuple(released))

    def _blocks(self, count: int) -> list[int]:
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))


@pytest.mark.parametrize("seed", range(4))
def test_random_steps_equal_those_of_the_host(seed: int) -> None:
    traffic = Traffic(np.random.default_rng(seed))
    host, device = HostBuffers(**SIZES), DeviceBuffers(**SIZES)
    seen = {"resumed": 0, "sampled": 0, "unsampled": 0}
    for _ in range(25):
        resumed = set(traffic.preempted)
        work = traffic.step()
        for buffers in (host, device):
            apply_deltas(buffers, work)
        step = host.prepare(work)
        assert_same_step(device.prepare(work), step)
        sampled = traffic.rng.integers(1, 1000, len(step.sampling))
        host.append_tokens(step.rows[step.sampling], sampled)
        device.append_tokens(step.rows[step.sampling], torch.from_numpy(sampled.astype(np.int32)))
        for place, token in zip(step.sampling.tolist(), sampled.tolist(), strict=True):
            traffic.tokens[work.steps[place].request_id].append(token)
        seen["resumed"] += sum(each.spec.request_id in resumed for each in work.starts)
        seen["sampled"] += len(step.sampling)
        seen["unsampled"] += len(work.steps) - len(step.sampling)
    assert all(seen.values()), seen


def test_padding_writes_and_sees_nothing() -> None:
    buffers = DeviceBuffers(**SIZES)
    # A step before leaves its own numbers where the padding will be.
    starts = tuple(start(name, [7, 8, 9], [at]) for at, name in enumerate("abcde", start=1))
    prepare(buffers, *(ScheduledStep(name, 0, 3, (), samples=True) for name in "abcde"), starts=starts)
    buffers.append_tokens(np.arange(5), torch.tensor([11, 12, 13, 14, 15], dtype=torch.int32))

    step = prepare(buffers, decode("d", 3), decode("b", 3), padded=4)
    attention = step.attention
    assert attention.table_rows is not None
    assert step.token_ids.tolist() == [14, 12, 0, 0]
    assert step.positions.tolist() == [3, 3, 0, 0]
    assert attention.slot_mapping.tolist() == [4 * BLOCK_SIZE + 3, 2 * BLOCK_SIZE + 3, -1, -1]
    assert attention.context_lens.tolist() == [4, 4, 0, 0]
    assert attention.query_start.tolist() == [0, 1, 2, 3, 4]
    assert attention.query_lens.tolist() == [1, 1, 1, 1]
    assert attention.table_rows.tolist() == [3, 1, 0, 0]
    # On the host there are the requests alone.
    assert step.rows.tolist() == [3, 1]
    assert step.num_tokens.tolist() == [4, 4]
    assert step.query_start.tolist() == [0, 1, 2]
    assert step.kept.tolist() == [0, 1]


def test_every_step_lies_in_the_same_aligned_memory() -> None:
    buffers = DeviceBuffers(**SIZES)
    long = list(range(1, 29))
    starts = tuple(start(name, long, [1, 2, 3, 4, 5, 6, 7], computed=27) for name in "abcd")
    # More deltas than there is room for beside a header.
    first = prepare(buffers, *(ScheduledStep(name, 27, 1, (), samples=True) for name in "abcd"), starts=starts)
    assert first.token_ids.tolist() == [28] * 4
    assert first.attention.slot_mapping.tolist() == [7 * BLOCK_SIZE + 3] * 4
    second = prepare(buffers, decode("a", 28, 9), decode("c", 28, 8), padded=4)
    third = buffers.dummy_step(4, 4)
    addresses = [[tensor.data_ptr() for tensor in tensors_of(step)] for step in (first, second, third)]
    assert addresses[0] == addresses[1] == addresses[2]
    assert all(address % 16 == 0 for address in addresses[0])


def test_a_token_beyond_the_context_is_left_out() -> None:
    buffers = DeviceBuffers(**SIZES)
    full, other = list(range(1, MAX_MODEL_LEN + 1)), [5, 6]
    prepare(
        buffers,
        ScheduledStep("b", 1, 1, (), samples=True),
        ScheduledStep("a", 29, 1, (), samples=True),
        starts=(start("a", full, [1, 2, 3, 4, 5, 6, 7, 8], computed=29), start("b", other, [9], computed=1)),
    )
    buffers.append_tokens(np.array([1, 0]), torch.tensor([77, 78], dtype=torch.int32))
    step = prepare(buffers, ScheduledStep("b", 0, 3, (), samples=True), ScheduledStep("a", 26, 4, (), samples=True))
    assert step.token_ids.tolist() == [5, 6, 77, 27, 28, 29, 30]


def test_a_released_row_serves_the_next_request() -> None:
    buffers = DeviceBuffers(**SIZES)
    prepare(buffers, ScheduledStep("a", 0, 9, (), samples=True), starts=(start("a", list(range(9)), [1, 2, 3]),))
    assert buffers.remove("a") == 0
    assert "a" not in buffers
    step = prepare(buffers, ScheduledStep("b", 0, 2, (), samples=True), starts=(start("b", [4, 5], [6]),))
    assert step.rows.tolist() == [0]
    assert step.token_ids.tolist() == [4, 5]
    step = prepare(buffers, ScheduledStep("b", 2, 3, (8,), samples=True))
    assert step.attention.slot_mapping.tolist() == [6 * BLOCK_SIZE + 2, 6 * BLOCK_SIZE + 3, 8 * BLOCK_SIZE]


def test_a_reset_drops_what_was_not_sent() -> None:
    buffers = DeviceBuffers(**SIZES)
    buffers.add(start("a", list(range(12)), [1, 2, 3]))
    buffers.add(start("b", [1], [4]))
    assert sorted(buffers.clear()) == [0, 1]
    assert len(buffers) == 0
    step = prepare(buffers, ScheduledStep("c", 0, 2, (), samples=True), starts=(start("c", [4, 5], [6]),))
    assert step.token_ids.tolist() == [4, 5]
    tables = step.attention.block_tables
    assert tables[step.rows[0], 0] == 6
    assert tables.count_nonzero() == 1


def test_a_dummy_step_is_a_batch_of_padding() -> None:
    buffers = DeviceBuffers(**SIZES)
    prepare(buffers, ScheduledStep("a", 0, 9, (), samples=True), starts=(start("a", list(range(9)), [1, 2, 3]),))
    step = buffers.dummy_step(24, 5)
    assert step.attention.query_lens.tolist() == [5, 5, 5, 5, 4]
    assert step.attention.query_start.tolist() == [0, 5, 10, 15, 20, 24]
    assert step.attention.slot_mapping.tolist() == [-1] * 24
    assert step.attention.context_lens.tolist() == [0] * 5
    assert step.attention.max_context_len == MAX_MODEL_LEN
    assert not step.token_ids.any()
    assert not step.positions.any()
    assert step.kept.tolist() == [4, 9, 14, 19, 23]
    assert step.sampling.tolist() == [0, 1, 2, 3, 4]


def test_host_memory_is_not_written_while_a_copy_may_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        """Of a copy that goes on until somebody waits for it."""

        def __init__(self) -> None:
            self.name = f"copy{len(events)}"
            events.append(self)

        def record(self) -> None:
            log.append(f"{self.name} begins")

        def synchronize(self) -> None:
            log.append(f"{self.name} waited for")

    events: list[Event] = []
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **rest: empty(*shape, **rest))
    buffers = DeviceBuffers(**SIZES)
    buffers._staging = tuple(_Staging(64, torch.device("cuda")) for _ in range(2))
    for at in range(3):
        prepare(buffers, decode("a", at), starts=(start("a", [1, 2, 3, 4], [1]),) if at == 0 else ())
    assert log == [f"copy{turn} {what}" for turn in (0, 1, 0) for what in ("waited for", "begins")]
