"""What a router is told about the blocks that an engine's prefix cache holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that can be matched from now on.

    Attributes:
        block_hashes: of consecutive blocks of one sequence.
        parent_hash: of the block before them; None at the start of a sequence.
    """

    block_hashes: tuple[bytes, ...]
    parent_hash: bytes | None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that were evicted."""

    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache was emptied."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
