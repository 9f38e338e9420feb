from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.detokenizer import Detokenizer
from engine.tokenizer import Tokenizer, load_tokenizer
from tests.engine.small_tokenizers import sentencepiece_like

STREAMABLE = ["llama2", "gguf", "unstripped", "metaspace", "metaspace with bytes", "stripped twice", "none"]


@pytest.fixture(scope="module")
def demo(demo_folder: Path) -> Tokenizer:
    return load_tokenizer(demo_folder)


@pytest.fixture(scope="module", params=STREAMABLE)
def small(request: pytest.FixtureRequest) -> Tokenizer:
    return sentencepiece_like(request.param)


def pieces_of(tokenizer: Tokenizer, ids: list[int], skip: bool, size: int = 1) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    pieces = [detokenizer.add(ids[start : start + size]) for start in range(0, len(ids), size)]
    return [*pieces, detokenizer.flush()]


@given(ids=st.lists(st.integers(0, 50_000), max_size=40), skip=st.booleans(), size=st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_byte_level_pieces_join_to_the_text_of_all(demo: Tokenizer, ids: list[int], skip: bool, size: int) -> None:
    assert "".join(pieces_of(demo, ids, skip, size)) == demo.decode(ids, skip)


@given(data=st.binary(max_size=40), skip=st.booleans())
@example(data=b"\xf0\x9f\x98\xf0\x9f\x98\x80\xe2\x82\xed\xa0\x80\xc0\xaf\xff", skip=True)
@settings(max_examples=300, deadline=None)
def test_bytes_that_are_not_utf8_become_what_decode_makes_of_them(demo: Tokenizer, data: bytes, skip: bool) -> None:
    of_byte = {demo.token_bytes(token): token for token in range(demo.vocab_size) if len(demo.token_bytes(token)) == 1}
    ids = [of_byte[bytes([byte])] for byte in data if bytes([byte]) in of_byte]
    assert "".join(pieces_of(demo, ids, skip)) == demo.decode(ids, skip)


@given(text=st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_byte_level_pieces_never_cut_a_character(demo: Tokenizer, text: str) -> None:
    text = text.replace("\N{REPLACEMENT CHARACTER}", "")
    ids = demo.encode(text)
    pieces = pieces_of(demo, ids, skip=False)
    if "\N{REPLACEMENT CHARACTER}" not in demo.decode(ids, skip_special_tokens=False):  # the demo lacks a few bytes
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, 280), max_size=12), skip=st.booleans(), size=st.integers(1, 4))
@example(ids=[0xE2 + 14, 0x82 + 14, 0xAC + 14, 0xFF + 14], skip=True, size=1)  # one bad byte spoils the run
@example(ids=[0xE2 + 14, 271, 0x82 + 14, 0xAC + 14], skip=True, size=1)  # a special token inside of a run
@example(ids=[0xE2 + 14, 275, 0x82 + 14, 0xAC + 14], skip=False, size=1)  # an id that is no token
@example(ids=[12, 0, 0, 1], skip=True, size=1)  # an empty token in front
@settings(max_examples=300, deadline=None)
def test_sentencepiece_pieces_join_to_the_text_of_all(small: Tokenizer, ids: list[int], skip: bool, size: int) -> None:
    assert "".join(pieces_of(small, ids, skip, size)) == small.decode(ids, skip)


@given(ids=st.lists(st.integers(0, 16) | st.integers(0, 280), max_size=12), skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_sentencepiece_words_are_mixed_with_bytes_without_loss(small: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(pieces_of(small, ids, skip)) == small.decode(ids, skip)


def test_text_comes_with_the_token_that_makes_it_certain() -> None:
    tokenizer = sentencepiece_like("llama2")
    euro = [token + 14 for token in "€".encode()]
    assert pieces_of(tokenizer, [1, *euro, 2], skip=True) == ["the", "", "", "", "€ a", ""]
    assert pieces_of(tokenizer, [1, *euro[:2]], skip=True) == ["the", "", "", "\N{REPLACEMENT CHARACTER}" * 2]


def test_a_resumed_sequence_goes_on_within_a_character(demo: Tokenizer) -> None:
    ids = demo.encode("naïve \N{GRINNING FACE} 日本 café")
    for cut in range(len(ids)):
        resumed = Detokenizer(demo)
        delivered = resumed.add(ids[:cut])
        assert delivered + resumed.add(ids[cut:]) + resumed.flush() == demo.decode(ids)
