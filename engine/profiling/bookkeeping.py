"""An engine that does everything of a step but the computing."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.config import EngineConfig, ModelConfig
from engine.core import EngineCore
from engine.outputs import SchedulerOutput
from engine.protocols import AttentionMetadata, KVCache, StepHandle
from engine.sampling.host_sampler import HostSampler
from engine.worker.model_input import HostBuffers
from engine.worker.model_runner import ModelRunner

VOCAB_SIZE = 64


def bookkeeping_core(config: EngineConfig, *, max_model_len: int) -> EngineCore:
    """An EngineCore whose steps cost what they cost beside their tensors.

    Scheduler, KV blocks, rows, inputs and sampling are the real ones, the latter over 64 tokens; the model gives the
    same logits for everything, at no cost.
    """
    model_config = bookkeeping_model(vocab_size=VOCAB_SIZE, max_model_len=max_model_len)
    return EngineCore(config, model_config, _Executor(config, model_config))


def bookkeeping_model(*, vocab_size: int, max_model_len: int) -> ModelConfig:
    """What an engine has to know of a model that computes nothing."""
    return ModelConfig(
        name="bookkeeping",
        path=Path(),
        architecture="",
        vocab_size=vocab_size,
        hidden_size=1,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        max_model_len=max_model_len,
        dtype="float32",
    )


class _Executor:
    """See `protocols.Executor`. Steps do not overlap: what they cost together is what is asked."""

    overlaps = False

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        model = _NoModel(model_config.vocab_size, config.max_num_batched_tokens, config.max_num_seqs)
        cpu = torch.device("cpu")
        self._blocks_of_one = -(-model_config.max_model_len // config.block_size)
        self._runner = ModelRunner(
            model,  # type: ignore[arg-type]
            HostBuffers(
                max_num_seqs=config.max_num_seqs,
                max_model_len=model_config.max_model_len,
                max_num_batched_tokens=config.max_num_batched_tokens,
                block_size=config.block_size,
                device=cpu,
            ),
            HostSampler(config.max_num_seqs, model_config.vocab_size),
            device=cpu,
        )
        self._runner.bind(model, [])

    def kv_blocks_that_fit(self) -> int:
        """As one request of the longest kind needs: no memory is a limit."""
        return self._blocks_of_one

    def allocate_kv_cache(self, num_blocks: int) -> None:
        pass

    def submit(self, work: SchedulerOutput) -> StepHandle:
        return self._runner.submit(work)

    def reset(self) -> None:
        self._runner.reset()

    def shutdown(self) -> None:
        pass


class _NoModel:
    """Stands where a runner has its model and its attention backend."""

    def __init__(self, vocab_size: int, max_tokens: int, max_rows: int) -> None:
        self._hidden = torch.zeros(max_tokens, 1)
        self._logits = torch.zeros(max_rows, vocab_size)

    def prepare(self, metadata: AttentionMetadata) -> None:
        pass

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[KVCache],
        kept: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._hidden[: len(token_ids if kept is None else kept)]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden)]
