"""The seams of the engine: what can be exchanged without its neighbours knowing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.outputs import SampledStep, SchedulerOutput

if TYPE_CHECKING:
    import numpy as np
    import torch

    from engine.request import Request


class StepHandle(Protocol):
    """A step in flight; a concurrent.futures.Future is one."""

    def result(self) -> list[SampledStep]:
        """Waits for the step; one result for each of its work.steps, in order. Raises what the step raised."""
        ...


class Executor(Protocol):
    """Runs a model's steps, on one device or many. Called on the engine's thread alone.

    Steps run in the order in which they were submitted, each after the one before it: whatever a step writes, the next
    one sees, sampled tokens included.
    """

    @property
    def overlaps(self) -> bool:
        """Whether a step is to be submitted while the one before it runs, not only when its result was taken in."""
        ...

    def kv_blocks_that_fit(self) -> int:
        """How many KV blocks the memory has room for, once the model is loaded."""
        ...

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Reserves the KV blocks. Called once, before the first step."""
        ...

    def submit(self, work: SchedulerOutput) -> StepHandle:
        """Starts a step, whose work.steps are not empty; at most two are in flight at a time.

        Releases the GIL in its tensor work.
        """
        ...

    def reset(self) -> None:
        """Waits for what is in flight, whatever comes of it, then forgets all requests: after a step that failed."""
        ...

    def shutdown(self) -> None:
        """Waits for what is in flight, then gives everything back. May be called twice."""
        ...


@dataclass(slots=True)
class AttentionMetadata:
    """Which keys each token of a flat batch sees; the same for all layers of a step.

    Attributes:
        slot_mapping: integers [tokens], the KV slot (block * block_size + offset) that each token's key goes to.
        block_tables: int32 [requests, blocks]; entries past a request's length are not read. Where there are
            table_rows, the block tables of all rows.
        query_start: int32 [requests + 1], where each request's tokens start in the flat batch.
        context_lens: int32 [requests], keys visible to a request's last token, itself included.
        query_lens: int64 [requests], on the host: how many tokens of each are in the batch.
        max_context_len: over the batch, or a bound of it.
        table_rows: int32 [requests], each request's row in block_tables; None where they are in the batch's order.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    query_lens: np.ndarray
    max_context_len: int
    table_rows: torch.Tensor | None = None

    @property
    def max_query_len(self) -> int:
        return int(self.query_lens.max())


@dataclass(frozen=True, slots=True)
class Heads:
    """How a projection's columns are divided: queries, then keys, then values."""

    queries: int
    keys: int
    dim: int


class HeadNorm(NamedTuple):
    """RMS norms of each head of queries and of keys: their weights, [head_dim] each, and epsilon."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class KVCache(NamedTuple):
    """Keys and values of one layer, in a layout of the attention backend's own.

    Attributes:
        key_scales, value_scales: where they are quantised, float32, one for each token and head.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None


class AttentionBackend(Protocol):
    """Writes keys and values into KV blocks and attends over them. One instance serves all layers."""

    def new_kv_cache(
        self, num_blocks: int, block_size: int, heads: Heads, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """An empty cache of one layer.

        Args:
            dtype: of the model; a backend that quantises keys and values knows to what.
        """
        ...

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Called once a step, before the layers: whatever all layers share."""
        ...

    def forward(
        self,
        qkv: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        kv_cache: KVCache,
        *,
        heads: Heads,
        norm: HeadNorm | None,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Norms and turns queries and keys, stores keys and values, then attends.

        Args:
            qkv: [tokens, (queries + 2 * keys) * head_dim], as projected; may be overwritten.
            angles: cos and sin of the rotary embedding, float32 [tokens, head_dim / 2] each, the same object for all
                layers of a step.
            kv_cache: this layer's.
            sliding_window: keys that a token sees, itself included; None is all.

        Returns:
            [tokens, queries, head_dim].
        """
        ...


class Proposer(Protocol):
    """Guesses tokens that the model then verifies (speculative decoding)."""

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """Drafts for each request, possibly none."""
        ...


class Grammar(Protocol):
    """The state of one request's structured output."""

    def fill_bitmask(self, row: np.ndarray) -> None:
        """Writes the allowed tokens: int32 [ceil(vocab / 32)], bit t % 32 of word t // 32 set where t is allowed."""
        ...

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advances over tokens; False, and unchanged, where they are not allowed."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens."""
        ...

    def is_terminated(self) -> bool:
        """Whether nothing but the end of the sequence may follow."""
        ...


class KVConnector(Protocol):
    """Moves KV blocks between engines or tiers (disaggregated prefill, offloading)."""

    def num_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens beyond num_computed_tokens whose blocks can be loaded from elsewhere."""
        ...

    def start_load(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Begins to fill blocks; finished_loading names the request when they are whole."""
        ...

    def start_save(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Begins to send blocks away; finished_saving names the request when they may be freed."""
        ...

    def finished_loading(self) -> Sequence[str]: ...

    def finished_saving(self) -> Sequence[str]: ...
