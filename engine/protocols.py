"""The seams of the engine: what can be exchanged without its neighbours knowing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.outputs import SampledStep, SchedulerOutput

if TYPE_CHECKING:
    import numpy as np
    import torch

    from engine.request import Request


class Executor(Protocol):
    """Runs a model's steps, on one device or many. Called on the engine's thread alone."""

    def kv_blocks_that_fit(self) -> int:
        """How many KV blocks the memory has room for, once the model is loaded."""
        ...

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Reserves the KV blocks. Called once, before the first step."""
        ...

    def execute(self, work: SchedulerOutput) -> list[SampledStep]:
        """Runs one step; one result for each of work.steps, in order. Releases the GIL in its tensor work."""
        ...

    def reset(self) -> None:
        """Forgets all requests, after a step that failed."""
        ...

    def shutdown(self) -> None:
        """Gives everything back. May be called twice."""
        ...


@dataclass(slots=True)
class AttentionMetadata:
    """Which keys each token of a flat batch sees; the same for all layers of a step.

    Attributes:
        slot_mapping: int64 [tokens], the KV slot (block * block_size + offset) that each token's key goes to.
        block_tables: int32 [requests, blocks]; entries past a request's length are not read.
        query_start: int32 [requests + 1], where each request's tokens start in the flat batch.
        context_lens: int32 [requests], keys visible to a request's last token, itself included.
        max_query_len, max_context_len: over the batch.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    max_query_len: int
    max_context_len: int


class AttentionBackend(Protocol):
    """Writes keys and values into KV blocks and attends over them. One instance serves all layers."""

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one layer's cache of keys, and of values."""
        ...

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Called once a step, before the layers: whatever all layers share."""
        ...

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Stores the step's keys and values, then attends.

        Args:
            query: [tokens, heads, head_dim]; key, value: [tokens, kv_heads, head_dim].
            key_cache, value_cache: this layer's, of kv_cache_shape.
            sliding_window: keys that a token sees, itself included; None is all.

        Returns:
            [tokens, heads, head_dim].
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
