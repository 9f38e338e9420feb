"""What a GPU's worker does once its model is loaded: it measures memory, and captures decode steps as graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from engine.models import DecoderForCausalLM
from engine.protocols import AttentionBackend, KVCache
from engine.request import EngineRequest
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling_params import SamplingParams
from engine.worker.device_buffers import DeviceBuffers
from engine.worker.gpu_memory import (
    MemoryProfile,
    estimate_graph_bytes,
    free_bytes,
    out_of_memory_explained,
    profile_memory,
)
from engine.worker.graph_runner import CallAgain, Capture, CudaCapture, GraphRunner, capture_sizes
from engine.worker.model_input import ModelInput
from engine.worker.model_runner import PROMPT_LOGPROB_ROWS
from kernels.gpu.logits import UNIT, row_units

logger = logging.getLogger(__name__)

THROW_AWAY_BLOCKS = 1
"""KV blocks of a layer while memory is measured: padding neither reads nor writes any."""


class GpuSetup:
    """Prepares one engine on one device, a GPU or, in Triton's interpreter, a CPU. Used on the worker's thread."""

    def __init__(
        self,
        model: DecoderForCausalLM,
        attention: AttentionBackend,
        buffers: DeviceBuffers,
        sampler: DeviceSampler,
        new_kv_caches: Callable[[int], list[KVCache]],
        *,
        vocab_size: int,
        dtype: torch.dtype,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_logprobs: int,
        enforce_eager: bool,
        device: torch.device,
    ) -> None:
        """
        Args:
            new_kv_caches: makes the layers' caches, of so many blocks.
        """
        self._model = model
        self._attention = attention
        self._buffers = buffers
        self._sampler = sampler
        self._new_kv_caches = new_kv_caches
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_logprobs = max_logprobs
        self._sizes = [] if enforce_eager else capture_sizes(max_num_seqs)
        self._device = device
        # Rows that start where the sampler wants them.
        rows = torch.empty(max_num_seqs if self._sizes else 0, row_units(vocab_size) * UNIT, dtype=dtype, device=device)
        self._logits = rows[:, :vocab_size]

    def profile(self) -> MemoryProfile:
        """Measures what the engine takes of the GPU beside KV blocks; see gpu_memory."""
        return profile_memory(self._device, self.largest_step, self._estimate_graphs)

    def capture(self, kv_caches: list[KVCache]) -> GraphRunner | None:
        """Decode steps of all sizes over these caches; None where there are to be none."""
        if not self._sizes:
            return None
        on_gpu = self._device.type == "cuda"
        before = free_bytes(self._device) if on_gpu else 0
        with out_of_memory_explained("graphs", self._device):
            graphs = self._new_graphs(kv_caches)
            graphs.capture(self._sizes)
        if on_gpu:
            logger.info("graphs count=%d bytes=%d", len(self._sizes), before - free_bytes(self._device))
        return graphs

    @torch.inference_mode()
    def largest_step(self) -> None:
        """Runs a step of as many tokens, and as many requests that sample in every way, as there can be."""
        count = self._max_num_seqs
        spec = EngineRequest(
            request_id="",
            prompt_token_ids=(0,),
            params=SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=self._max_logprobs),
            seed=0,
        )
        for row in range(count):
            self._sampler.add(row, spec, spec.prompt_token_ids)
        step = self._buffers.dummy_step(self._max_num_batched_tokens, count)
        hidden = self._forward(step, self._new_kv_caches(THROW_AWAY_BLOCKS), step.kept)
        self._sampler.sample(self._model.compute_logits(hidden), np.arange(count), np.ones(count, np.int64))
        chunk = hidden.new_zeros(PROMPT_LOGPROB_ROWS, hidden.shape[1])
        targets = np.zeros(PROMPT_LOGPROB_ROWS, np.int64)
        self._sampler.prompt_logprobs(self._model.compute_logits(chunk), targets, self._max_logprobs)
        for row in range(count):
            self._sampler.remove(row)

    @torch.inference_mode()
    def lone_decode(self) -> None:
        """Runs the step whose attention is split most: one token that could have the longest context."""
        self._forward(self._buffers.dummy_step(1, 1), self._new_kv_caches(THROW_AWAY_BLOCKS), None)

    def _estimate_graphs(self) -> int:
        if not self._sizes:
            return 0
        graphs = self._new_graphs(self._new_kv_caches(THROW_AWAY_BLOCKS))
        return estimate_graph_bytes(self._device, self._sizes, graphs.capture_one)

    def _new_graphs(self, kv_caches: list[KVCache]) -> GraphRunner:
        capture: Capture = CudaCapture(self._device) if self._device.type == "cuda" else CallAgain()

        def compute_logits(step: ModelInput) -> torch.Tensor:
            return self._model.compute_logits(self._forward(step, kv_caches, None))

        return GraphRunner(compute_logits, self._buffers, self._logits, capture)

    def _forward(self, step: ModelInput, kv_caches: list[KVCache], kept: torch.Tensor | None) -> torch.Tensor:
        self._attention.prepare(step.attention)
        return self._model.forward(step.token_ids, step.positions, kv_caches, kept)
