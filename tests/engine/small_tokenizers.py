"""Tokenizers of other kinds than the demo's, small enough to be built in a test."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, decoders, models
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from engine.tokenizer import Tokenizer

SPECIAL = "</s>"
ADDED = "<tool>"
WORDS = ["▁", "▁the", "▁a", "he", "▁é", "é", "x", "▁▁", "a▁b", "日本", "\N{GRINNING FACE}", "!", "", "<0xZZ>"]

DECODERS = {
    "llama2": lambda: decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gguf": lambda: decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]
    ),
    "unstripped": lambda: decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": lambda: decoders.Metaspace("▁", "always"),
    "metaspace with bytes": lambda: decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "first")]),
    "stripped twice": lambda: decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    ),
    "none": lambda: None,
    # Not supported, since text depends on more than a token and its place:
    "regex": lambda: decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("a+"), "a")]),
    "stripped end": lambda: decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    "ctc": lambda: decoders.CTC(),
}


def sentencepiece_like(decoder: str) -> Tokenizer:
    """Words, all 256 byte tokens and two added tokens, one of them special, under one of DECODERS."""
    texts = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(models.BPE({text: index for index, text in enumerate(texts)}, [], byte_fallback=True))
    backend.add_tokens([ADDED])
    backend.add_special_tokens([AddedToken(SPECIAL, special=True)])
    if (made := DECODERS[decoder]()) is not None:
        backend.decoder = made
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL)
    return Tokenizer(hf.backend_tokenizer, lambda: hf)
