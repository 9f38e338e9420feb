"""Writes down what a model does to a batch, instead of doing it: the CPU's step plan.

A model is called once with `Recorded` values in place of tensors. Each layer then adds its operation here; what can be
done while a product's sums are still in registers (adding to the residual, the gated activation) is folded into the
product's epilogue. The plan is run by one call of kernels/cpu for every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.protocols import HeadNorm, Heads, KVCache
from kernels.cpu.library import Epilogue, Format, Kind, Operation, quantized_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """A value of a plan in the making: the rows that an operation writes, or the batch's own token ids.

    Attributes:
        buffer: [max_tokens, width], where the rows will be.
        producer: the operation that writes them.
        on_kept: the rows are of the tokens that the batch keeps, and not of all.
    """

    recorder: StepRecorder
    buffer: Tensor | None = None
    producer: Operation | None = None
    on_kept: bool = False

    @property
    def rows(self) -> Tensor:
        """The buffer, which everything but the batch's token ids has."""
        assert self.buffer is not None
        return self.buffer

    def float(self) -> Recorded:
        """The value of a product in float32."""
        return self.recorder.to_float(self)


class StepRecorder:
    """Collects operations and the buffers between them.

    The residual is float32 and has one buffer; of the rest, each kind of operation has one of its own, which the next
    of its kind overwrites. That suits a decoder, where each result is used up before the next one like it is made.

    Attributes:
        operations: in order.
        kept: tensors whose addresses the operations hold.
    """

    def __init__(self, max_tokens: int, dtype: torch.dtype) -> None:
        self._max_tokens = max_tokens
        self._dtype = dtype
        self._buffers: dict[str, Tensor] = {}
        self.operations: list[Operation] = []
        self.kept: list[Tensor] = []

    def token_ids(self) -> Recorded:
        """What the model is called with."""
        return Recorded(self)

    def input(self, rows: Tensor) -> Recorded:
        """Rows that are written before the plan runs."""
        return Recorded(self, rows)

    def embed(self, table: Tensor) -> Recorded:
        """Rows of a table, [vocab, size], as the first residual."""
        residual = self._buffer("residual", table.shape[1], torch.float32)
        operation = Operation(kind=Kind.EMBED, weight=self._address(table), out_features=table.shape[1])
        return self._add(operation, residual, False)

    def embed_from_panels(self, panels: Tensor, size: int) -> Recorded:
        """The same of a table that is packed as the weight of a product."""
        residual = self._buffer("residual", size, torch.float32)
        operation = Operation(kind=Kind.EMBED_FROM_PANELS, weight=self._address(panels), out_features=size)
        return self._add(operation, residual, False)

    def rms_norm(self, x: Recorded, residual: Recorded | None, weight: Tensor, eps: float) -> tuple[Recorded, Recorded]:
        """Norm of x + residual, and that sum. Without a residual x is it."""
        if residual is None:
            residual = x
        else:
            assert x.producer is not None
            x.producer.epilogue = Epilogue.ADD_TO_RESIDUAL
            x.producer.output = residual.rows.data_ptr()
        size = weight.numel()
        operation = Operation(
            kind=Kind.RMS_NORM,
            input=residual.rows.data_ptr(),
            weight=self._address(weight.float()),
            in_features=size,
            out_features=size,
            eps=eps,
        )
        return self._add(operation, self._buffer("norm", size), x.on_kept), residual

    def linear(
        self, x: Recorded, weight: Tensor, bias: Tensor | None, in_features: int, out_features: int, format: Format
    ) -> Recorded:
        """A product with packed panels.

        Args:
            bias: float32, as long as the panels are wide together.
            format: of the panels.
        """
        if format is Format.INT8_ACTIVATIONS:
            quantize = Operation(kind=Kind.QUANTIZE, input=x.rows.data_ptr(), in_features=in_features)
            x = self._add(quantize, self._buffer("quantized", quantized_bytes(in_features), torch.int8), x.on_kept)
        operation = Operation(
            kind=Kind.LINEAR,
            format=format,
            input=x.rows.data_ptr(),
            weight=self._address(weight),
            bias=None if bias is None else self._address(bias),
            in_features=in_features,
            out_features=out_features,
            epilogue=Epilogue.STORE,
        )
        return self._add(operation, self._buffer("linear", out_features), x.on_kept)

    def silu_and_mul(self, x: Recorded) -> Recorded:
        """Of a product whose panels hold gate and up in turn."""
        producer = x.producer
        assert producer is not None
        producer.out_features //= 2
        producer.epilogue = Epilogue.SILU_AND_MULTIPLY
        buffer = self._buffer("gated", producer.out_features)
        producer.output = buffer.data_ptr()
        return Recorded(self, buffer, producer, x.on_kept)

    def to_float(self, x: Recorded) -> Recorded:
        """Of a product, whose sums are float32 before they are stored."""
        assert x.producer is not None
        x.producer.epilogue = Epilogue.STORE_FLOAT
        buffer = self._buffer("float", x.producer.out_features, torch.float32)
        x.producer.output = buffer.data_ptr()
        return Recorded(self, buffer, x.producer, x.on_kept)

    def attention(
        self,
        x: Recorded,
        heads: Heads,
        kv_cache: KVCache,
        *,
        norm: HeadNorm | None,
        scale: float,
        sliding_window: int | None,
    ) -> Recorded:
        """Norms queries and keys and turns them by their positions, stores keys and values, attends."""
        query_norm, key_norm, eps = norm if norm is not None else (None, None, 0.0)
        fields = {
            "key_cache": kv_cache.keys.data_ptr(),
            "value_cache": kv_cache.values.data_ptr(),
            "heads": heads.queries,
            "kv_heads": heads.keys,
            "head_dim": heads.dim,
        }
        self.kept.extend((kv_cache.keys, kv_cache.values))
        rotate = Operation(
            kind=Kind.ROTATE_AND_STORE,
            query_norm=None if query_norm is None else self._address(query_norm.float()),
            key_norm=None if key_norm is None else self._address(key_norm.float()),
            eps=eps,
            **fields,
        )
        rotated = self._add(rotate, x.rows, x.on_kept)
        attend = Operation(
            kind=Kind.ATTEND, input=rotated.rows.data_ptr(), scale=scale, window=sliding_window or 0, **fields
        )
        return self._add(attend, self._buffer("attended", heads.queries * heads.dim), x.on_kept)

    def gather(self, x: Recorded) -> Recorded:
        """The rows of the tokens that the batch keeps."""
        rows = x.rows
        operation = Operation(kind=Kind.GATHER, input=rows.data_ptr(), in_features=rows.shape[1] * rows.dtype.itemsize)
        return self._add(operation, self._buffer(f"kept {len(self.operations)}", rows.shape[1], rows.dtype), True)

    def _add(self, operation: Operation, output: Tensor, on_kept: bool) -> Recorded:
        operation.output = output.data_ptr()
        operation.on_kept = on_kept
        self.operations.append(operation)
        return Recorded(self, output, operation, on_kept)

    def _buffer(self, name: str, width: int, dtype: torch.dtype | None = None) -> Tensor:
        key = f"{name}/{width}"
        if key not in self._buffers:
            self._buffers[key] = torch.empty(self._max_tokens, width, dtype=dtype or self._dtype)
        return self._buffers[key]

    def _address(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self.kept.append(tensor)
        return tensor.data_ptr()
