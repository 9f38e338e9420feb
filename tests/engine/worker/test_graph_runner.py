"""A replayed decode step gives what an eager one gives, and its padding leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest
import torch

from engine.attention.triton_attention import TritonAttention
from engine.models import load_model
from engine.outputs import ScheduledStart, ScheduledStep, SchedulerOutput
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.worker.device_buffers import DeviceBuffers
from engine.worker.graph_runner import CallAgain, GraphRunner, capture_sizes
from engine.worker.model_input import ModelInput
from tests.engine.models.tiny import BLOCK_SIZE, config_of, new_kv_caches, save_tiny

NUM_BLOCKS = 20
MAX_NUM_SEQS = 6
MAX_MODEL_LEN = 3 * BLOCK_SIZE


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (256, [1, 2, 4, *range(8, 257, 8)]),
        (300, [1, 2, 4, *range(8, 257, 8), 272, 288, 300]),
    ],
)
def test_captured_sizes_end_with_the_largest_batch(max_num_seqs: int, sizes: list[int]) -> None:
    assert capture_sizes(max_num_seqs) == sizes


class Model(Protocol):
    vocab_size: int
    caches: list[torch.Tensor]
    """NaN where nothing was written."""

    def compute_logits(self, step: ModelInput) -> torch.Tensor: ...


class SumOfKeys:
    """Attention without weights: the sum over a request's keys, which are what was written into its blocks.

    It reads the device's tensors alone, as kernels do.
    """

    vocab_size = 11

    def __init__(self) -> None:
        self.keys = torch.full((NUM_BLOCKS * BLOCK_SIZE,), float("nan"))
        self.caches = [self.keys]
        self.calls = 0

    @torch.inference_mode()
    def compute_logits(self, step: ModelInput) -> torch.Tensor:
        self.calls += 1
        attention = step.attention
        assert attention.table_rows is not None
        written = attention.slot_mapping >= 0
        values = torch.sin(step.token_ids * 3.0 + step.positions)
        self.keys[attention.slot_mapping[written].long()] = values[written]
        positions = torch.arange(MAX_MODEL_LEN)
        tables = attention.block_tables.index_select(0, attention.table_rows)
        slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        lengths = attention.query_start.diff().long()
        requests = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        seen = (positions <= step.positions[:, None]) & (attention.context_lens[requests] > 0)[:, None]
        context = torch.where(seen, self.keys[slots.long()][requests], 0.0).sum(1)
        return torch.cos(context[:, None] + torch.arange(self.vocab_size))


class TinyModel:
    """A real model on the Triton kernels."""

    def __init__(self, folder: Path) -> None:
        config = config_of(folder)
        self.vocab_size = config.vocab_size
        self._attention = TritonAttention(num_sms=4)
        with torch.inference_mode():
            self._model = load_model(
                config, load_format="auto", device="cpu", attention=self._attention, kernels="triton"
            )
        self._kv_caches = new_kv_caches(self._attention, config, NUM_BLOCKS)
        self.caches = [tensor for cache in self._kv_caches for tensor in (cache.keys, cache.values)]

    @torch.inference_mode()
    def compute_logits(self, step: ModelInput) -> torch.Tensor:
        self._attention.prepare(step.attention)
        hidden = self._model.forward(step.token_ids, step.positions, self._kv_caches)
        return self._model.compute_logits(hidden)


class Engine:
    """Buffers, a model and greedy sampling, with graphs of some sizes."""

    def __init__(self, model: Model, sizes: list[int]) -> None:
        self.model = model
        self.buffers = DeviceBuffers(
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=64,
            block_size=BLOCK_SIZE,
            device=torch.device("cpu"),
        )
        logits = torch.empty(MAX_NUM_SEQS, model.vocab_size)
        self.graphs = GraphRunner(model.compute_logits, self.buffers, logits, CallAgain())
        self.graphs.capture(sizes)
        self.replayed: list[int] = []

    @torch.inference_mode()
    def step(self, *steps: ScheduledStep, starts: tuple[ScheduledStart, ...] = ()) -> torch.Tensor:
        """Logits of the requests' last tokens; each goes on with its best."""
        for each in starts:
            self.buffers.add(each)
        decodes = all(step.num_tokens == 1 for step in steps)
        padded = self.graphs.padded_size(len(steps)) if decodes else None
        prepared = self.buffers.prepare(SchedulerOutput(steps, starts), padded)
        if padded is None:
            logits = self.model.compute_logits(prepared)[prepared.kept]
        else:
            self.replayed.append(padded)
            logits = self.graphs.replay(padded)[: len(steps)].clone()
        self.buffers.append_tokens(prepared.rows, logits.argmax(1).to(torch.int32))
        return logits


def start(name: str, length: int, first_block: int) -> ScheduledStart:
    token_ids = tuple(range(first_block, first_block + length))
    spec = EngineRequest(request_id=name, prompt_token_ids=token_ids, params=SamplingParams(), seed=0)
    return ScheduledStart(spec, token_ids, (first_block + 2, first_block, first_block + 1), 0)


def decode(name: str, computed: int) -> ScheduledStep:
    return ScheduledStep(name, computed, 1, (), samples=True)


@pytest.fixture(params=["sum of keys", "tiny"])
def new_model(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Model]:
    if request.param == "sum of keys":
        return SumOfKeys
    save_tiny(tmp_path, "Qwen3ForCausalLM", head_dim=16, num_hidden_layers=2)
    return lambda: TinyModel(tmp_path)


def test_replays_equal_eager_steps(new_model: Callable[[], Model]) -> None:
    models = [new_model(), new_model()]
    graphs, eager = Engine(models[0], [1, 4, 6]), Engine(models[1], [])

    def assert_equal_steps(*steps: ScheduledStep, starts: tuple[ScheduledStart, ...] = ()) -> None:
        expected = eager.step(*steps, starts=starts)
        assert expected.isfinite().all()
        torch.testing.assert_close(graphs.step(*steps, starts=starts), expected, rtol=1e-5, atol=1e-5)

    lengths = {"a": 15, "b": 3, "c": 19, "d": 1, "e": 4}
    starts = tuple(start(name, length, 3 * at + 1) for at, (name, length) in enumerate(lengths.items()))
    prompts = tuple(ScheduledStep(name, 0, length, (), samples=True) for name, length in lengths.items())
    assert_equal_steps(*prompts, starts=starts)
    # Batches of other sizes, orders and members, each after the ones before.
    for batch in ("abcde", "edc", "b", "ca"):
        assert_equal_steps(*(decode(name, lengths[name]) for name in batch))
        for name in batch:
            lengths[name] += 1
    assert graphs.replayed == [6, 4, 1, 4]
    assert eager.replayed == []
    for found, expected in zip(models[0].caches, models[1].caches, strict=True):
        assert expected.isnan().any()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_captures_and_dummy_steps_leave_nothing_in_the_cache(new_model: Callable[[], Model]) -> None:
    model = new_model()
    engine = Engine(model, [2])
    model.compute_logits(engine.buffers.dummy_step(20, 3))
    assert all(cache.isnan().all() for cache in model.caches)
    assert len(engine.buffers) == 0


def test_each_size_is_captured_once() -> None:
    model = SumOfKeys()
    Engine(model, capture_sizes(MAX_NUM_SEQS))
    assert model.calls == len(capture_sizes(MAX_NUM_SEQS))


def test_a_batch_is_padded_to_the_next_size() -> None:
    graphs = Engine(SumOfKeys(), [1, 2, 4, 6]).graphs
    assert [graphs.padded_size(n) for n in range(1, MAX_NUM_SEQS + 2)] == [1, 2, 4, 4, 6, 6, None]


def test_only_captured_sizes_are_used() -> None:
    graphs = Engine(SumOfKeys(), []).graphs
    assert graphs.padded_size(1) is None
    graphs.capture_one(4)
    graphs.capture_one(2)
    assert [graphs.padded_size(n) for n in (1, 2, 3, 4, 5)] == [2, 2, 4, 4, None]


def test_all_sizes_leave_their_logits_in_one_place() -> None:
    engine = Engine(SumOfKeys(), [1, 6])
    engine.step(ScheduledStep("a", 0, 2, (), samples=True), starts=(start("a", 2, 1),))
    logits = []
    for size in (1, 6):
        engine.buffers.prepare(SchedulerOutput((decode("a", 2),)), size)
        logits.append(engine.graphs.replay(size))
    assert logits[0].data_ptr() == logits[1].data_ptr()
    assert [len(rows) for rows in logits] == [1, 6]
