"""The name of a KV block's content: a hash of everything that its keys and values depend on.

Text side, router and engine all use these functions, so that equal names mean equal blocks in every process.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Sequence

from engine.config import ModelConfig
from engine.request import ExtraKey

TOKEN_BYTES = 4


def root_hash(model_config: ModelConfig, block_size: int) -> bytes:
    """The parent of a sequence's first block: model id, revision, dtypes, quantization and block size."""
    identity = [
        model_config.name,
        model_config.revision,
        model_config.dtype,
        model_config.quantization,
        model_config.kv_cache_dtype,
        block_size,
    ]
    return hashlib.sha256(_json(identity)).digest()


def hash_block(parent: bytes, token_ids: Sequence[int], extra_keys: Sequence[ExtraKey] = ()) -> bytes:
    """Hash of one full block.

    Args:
        parent: hash of the block before it, or the root; 32 bytes.
        token_ids: its tokens, block_size of them. The root fixes how many: tokens and keys cannot be confused.
        extra_keys: whatever else its content depends on.

    Returns:
        SHA-256 of parent, tokens as little-endian int32, and keys; 32 bytes.

    Raises:
        OverflowError: a token id does not fit int32.
    """
    return hashlib.sha256(parent + _token_bytes(token_ids) + _key_bytes(extra_keys)).digest()


def hash_blocks(
    token_ids: Sequence[int],
    block_size: int,
    root: bytes,
    extra_keys: Sequence[ExtraKey] = (),
    *,
    known: Sequence[bytes] = (),
) -> list[bytes]:
    """Hashes of all full blocks of a sequence, in order; the last, partial block has none.

    Args:
        token_ids: the whole sequence.
        known: hashes of its first blocks, which are taken over and not computed again.
    """
    hashes = list(known)
    start, end = len(hashes) * block_size, len(token_ids) // block_size * block_size
    if start >= end:
        return hashes
    data, keys = _token_bytes(token_ids[start:end]), _key_bytes(extra_keys)
    parent, sha256, width = hashes[-1] if hashes else root, hashlib.sha256, block_size * TOKEN_BYTES
    for offset in range(0, len(data), width):
        parent = sha256(parent + data[offset : offset + width] + keys).digest()
        hashes.append(parent)
    return hashes


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    values = array("i", token_ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _key_bytes(extra_keys: Sequence[ExtraKey]) -> bytes:
    # JSON quotes its strings: no two lists of keys have the same text.
    return _json([list(key) for key in extra_keys]) if extra_keys else b""


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")
