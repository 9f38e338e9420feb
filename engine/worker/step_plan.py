"""A model on a CPU: its step recorded once, then run by one call a step."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.cpu_attention import CpuAttention
from engine.layers.recorder import StepRecorder
from engine.models import DecoderForCausalLM
from engine.protocols import KVCache
from kernels.cpu.library import Batch, array_of


class StepPlan:
    """Stands in for the model that it was recorded from. What its calls return is overwritten by the next ones."""

    def __init__(
        self,
        model: DecoderForCausalLM,
        kv_caches: list[KVCache],
        attention: CpuAttention,
        *,
        dtype: torch.dtype,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        """
        Args:
            max_tokens: most tokens of a step.
            max_rows: most rows of hidden states that logits are computed for at once.
        """
        self._model = model
        self._attention = attention
        self._dtype = dtype
        body, head = StepRecorder(max_tokens, dtype), StepRecorder(max_rows, dtype)
        self._hidden = model.record(body, kv_caches)
        self._logits = model.record_logits(head, self._hidden)
        self._body, self._head = array_of(body.operations), array_of(head.operations)
        self._every_token = torch.arange(max_tokens)
        # The operations hold addresses alone.
        self._recorders = (body, head)

    @property
    def kept(self) -> list[Tensor]:
        """What the operations read beside their buffers: weights and KV caches, some of them several times."""
        return [each for recorder in self._recorders for each in recorder.kept]

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        kept: Tensor | None = None,
    ) -> Tensor:
        """See DecoderForCausalLM.forward; the caches are those of the recording."""
        cosines, sines = self._model.angles(positions)
        batch = self._attention.batch(len(token_ids), cosines, sines)
        batch.token_ids = token_ids.data_ptr()
        if kept is None:
            kept = self._every_token[: len(token_ids)]
        batch.kept, batch.kept_tokens = len(kept), kept.data_ptr()
        self._attention.kernels.run(self._dtype, self._body, batch)
        return self._hidden[: len(kept)]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See DecoderForCausalLM.compute_logits."""
        rows = hidden.shape[0]
        hidden = hidden.contiguous()
        self._head[0].input = hidden.data_ptr()
        self._attention.kernels.run(self._dtype, self._head, Batch(tokens=rows))
        return self._logits[:rows]
