import hashlib
import struct
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from engine.config import EngineConfig, ModelConfig, Quantization
from engine.hub import load_model_config
from engine.kv_cache.block_hash import hash_block, hash_blocks, root_hash
from engine.request import ExtraKey

ROOT = bytes(32)
MODEL = ModelConfig(
    name="demo",
    path=Path("/somewhere"),
    architecture="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_model_len=64,
    dtype="bfloat16",
)


def test_hash_is_sha256_of_parent_and_little_endian_tokens():
    tokens = [1, 2, 49_151, 2**31 - 1]
    assert hash_block(ROOT, tokens) == hashlib.sha256(ROOT + struct.pack("<4i", *tokens)).digest()


def test_hashes_stay_the_same_from_one_process_and_version_to_the_next():
    assert root_hash(MODEL, 16).hex() == "a4c9dd95f8ed67a0690ddc57258b74457b499d685ba37ecf25d79a3c6b9dba03"
    hashes = hash_blocks(range(8), 4, root_hash(MODEL, 4), [ExtraKey("salt", "tenant")])
    assert hashes[-1].hex() == "4c29a8708ab3ba893387cad9168a491b6f596257603992b60f2c3af96c089f37"


@pytest.mark.parametrize(
    "change", [{"name": "other"}, {"revision": "main"}, {"dtype": "float32"}, {"quantization": "int8"}]
)
def test_root_differs_with_every_part_of_the_models_identity(change):
    assert root_hash(replace(MODEL, **change), 16) != root_hash(MODEL, 16)


def test_root_of_an_engine_with_quantized_weights_is_one_of_its_own(tiny_folder: Path):
    engines = [
        EngineConfig(model=str(tiny_folder), load_format="dummy", quantization=each)
        for each in (None, *get_args(Quantization))
    ]
    assert len({root_hash(load_model_config(each), 16) for each in engines}) == len(engines)


def test_root_differs_with_block_size_and_not_with_the_folder():
    assert root_hash(MODEL, 32) != root_hash(MODEL, 16)
    assert root_hash(replace(MODEL, path=Path("/elsewhere")), 16) == root_hash(MODEL, 16)


def test_no_revision_differs_from_an_empty_one():
    assert root_hash(replace(MODEL, revision=""), 16) != root_hash(MODEL, 16)


def test_blocks_chain_and_the_partial_one_has_no_hash():
    first = hash_block(ROOT, [0, 1, 2, 3])
    second = hash_block(first, [4, 5, 6, 7])
    assert hash_blocks(range(11), 4, ROOT) == [first, second]
    assert hash_blocks(range(3), 4, ROOT) == []


def test_equal_blocks_after_different_parents_differ():
    assert hash_blocks([1, 1, 9, 9], 2, ROOT)[1] != hash_blocks([2, 2, 9, 9], 2, ROOT)[1]


def test_known_hashes_are_taken_over_and_continued():
    whole = hash_blocks(range(12), 4, ROOT)
    assert hash_blocks(range(12), 4, ROOT, known=whole[:2]) == whole
    assert hash_blocks(range(12), 4, ROOT, known=whole) == whole
    assert hash_blocks(range(8), 4, ROOT, known=[b"x" * 32]) == [b"x" * 32, hash_block(b"x" * 32, range(4, 8))]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([ExtraKey("a", "bc")], [ExtraKey("ab", "c")]),
        ([ExtraKey("salt", 'x"],["lora","y')], [ExtraKey("salt", "x"), ExtraKey("lora", "y")]),
        ([ExtraKey("salt", "x")], [ExtraKey("lora", "x")]),
        ([ExtraKey("salt", "")], []),
    ],
)
def test_different_extra_keys_never_share_a_hash(left, right):
    assert hash_block(ROOT, [1, 2], left) != hash_block(ROOT, [1, 2], right)


def test_extra_keys_are_part_of_every_block():
    plain, salted = hash_blocks(range(8), 4, ROOT), hash_blocks(range(8), 4, ROOT, [ExtraKey("salt", "s")])
    assert salted[0] == hash_block(ROOT, range(4), [ExtraKey("salt", "s")])
    assert salted[1] == hash_block(salted[0], range(4, 8), [ExtraKey("salt", "s")])
    assert set(plain).isdisjoint(salted)


def test_any_text_can_be_a_key():
    assert len(hash_block(ROOT, [1], [ExtraKey("salt", "\ud800 ü 🦙")])) == 32
