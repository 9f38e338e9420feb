"""Tiny random models, saved by transformers, and a way to run ours on them step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.attention.cpu_attention import CpuAttention
from engine.attention.torch_attention import TorchAttention
from engine.config import EngineConfig, ModelConfig
from engine.hub import load_model_config
from engine.layers.weight import Packing
from engine.models import load_model
from engine.protocols import AttentionBackend, AttentionMetadata, Heads, KVCache
from engine.worker.step_plan import StepPlan
from kernels.cpu.library import CpuKernels

BLOCK_SIZE = 16
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}


def save_tiny(folder: Path, architecture: str, *, max_shard_size: str = "1GB", **config: Any) -> Any:
    """The transformers model that was saved into folder: float32, random, biases and norms included."""
    import transformers

    model_class = getattr(transformers, architecture)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**(SIZES | config))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.2 * noise if "norm" in name else 0.2 * noise)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def config_of(folder: Path, **changes: Any) -> ModelConfig:
    """What the engine makes of the saved model's config, in float32."""
    return replace(load_model_config(EngineConfig(model=str(folder), dtype="float32")), **changes)


def new_kv_caches(attention: AttentionBackend, config: ModelConfig, num_blocks: int) -> list[KVCache]:
    """One for each layer, all NaN."""
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
    caches = [
        attention.new_kv_cache(num_blocks, BLOCK_SIZE, heads, getattr(torch, config.dtype), torch.device("cpu"))
        for _ in range(config.num_layers)
    ]
    for cache in caches:
        cache.keys.fill_(float("nan"))
        cache.values.fill_(float("nan"))
    return caches


class Runner:
    """Our model with a small KV cache of NaNs, in which request r owns every n-th block."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_requests: int = 1,
        load_format: str = "auto",
        seed: int = 0,
        kernels: CpuKernels | None = None,
        packing: Packing = "panels",
    ) -> None:
        """With kernels the model's step plan runs on them, its weights packed as said; without it runs on torch."""
        self._attention = CpuAttention(kernels) if kernels else TorchAttention()
        self.config = config
        self._blocks = -(-config.max_model_len // BLOCK_SIZE)
        self._num_requests = num_requests
        with torch.inference_mode():
            self.model: Any = load_model(
                config,
                load_format=load_format,
                device="cpu",
                attention=self._attention,
                seed=seed,
                packing=packing if kernels else None,
            )
            dtype = getattr(torch, config.dtype)
            self._caches = new_kv_caches(self._attention, config, self._blocks * num_requests)
            if isinstance(self._attention, CpuAttention):
                self.model = StepPlan(
                    self.model, self._caches, self._attention, dtype=dtype, max_tokens=256, max_rows=256
                )
        self._done = [0] * num_requests

    def step(self, tokens: dict[int, Sequence[int]]) -> dict[int, Tensor]:
        """Logits [tokens, vocab] for each request's next tokens."""
        logits = self.flat_step(tokens)
        return dict(zip(tokens, logits.split([len(ids) for ids in tokens.values()]), strict=True))

    @torch.inference_mode()
    def flat_step(self, tokens: dict[int, Sequence[int]], kept: Tensor | None = None) -> Tensor:
        """Logits [kept tokens, vocab] of the requests' next tokens, one request behind the other."""
        slots, positions, tables = [], [], []
        for request, ids in tokens.items():
            table = torch.arange(self._blocks) * self._num_requests + request
            own = torch.arange(self._done[request], self._done[request] + len(ids))
            positions.append(own)
            slots.append(table[own // BLOCK_SIZE] * BLOCK_SIZE + own % BLOCK_SIZE)
            tables.append(table)
            self._done[request] += len(ids)
        lengths = torch.tensor([len(ids) for ids in tokens.values()])
        contexts = torch.tensor([self._done[request] for request in tokens])
        self._attention.prepare(
            AttentionMetadata(
                slot_mapping=torch.cat(slots),
                block_tables=torch.stack(tables).int(),
                query_start=torch.cat((torch.zeros(1), lengths.cumsum(0))).int(),
                context_lens=contexts.int(),
                query_lens=lengths.numpy(),
                max_context_len=int(contexts.max()),
            )
        )
        flat = torch.tensor([token for ids in tokens.values() for token in ids])
        hidden = self.model.forward(flat, torch.cat(positions), self._caches, kept)
        # A plan overwrites what it gave with what it gives next.
        return self.model.compute_logits(hidden).clone()

    def logits(self, ids: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """Of all tokens of request 0, computed in chunks of these sizes, the last one repeated."""
        parts, start, index = [], 0, 0
        while start < len(ids):
            size = chunks[min(index, len(chunks) - 1)]
            parts.append(self.step({0: ids[start : start + size]})[0])
            start, index = start + size, index + 1
        return torch.cat(parts)


@torch.inference_mode()
def expected_logits(model: Any, ids: Sequence[int]) -> Tensor:
    return model(torch.tensor([ids])).logits[0].float()
