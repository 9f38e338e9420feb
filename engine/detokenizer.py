"""Tokens to text as they come: the pieces joined are exactly the text of all tokens decoded at once."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from engine.tokenizer import Tokenizer


class Detokenizer:
    """The text of one sequence of tokens, in pieces.

    A piece never ends within a character, and costs no more than its own tokens, however long the sequence is.
    A sequence that is resumed begins with its old tokens once more; their text was delivered and is dropped.

    Byte-level tokens are pieces of UTF-8, which the incremental decoder of Python joins; what is not valid becomes
    the same replacement characters as in one go. In other tokenizers a token is a text of its own, except that a run
    of byte tokens (`<0xE2>`) is decoded as a whole, and the first text loses its leading space. A run is held until
    it ends, because one byte that does not fit makes all of it replacement characters.
    """

    __slots__ = ("_head", "_run", "_skip_special", "_tokenizer", "_utf8")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run: list[int] = []  # byte tokens that have not ended
        self._head: list[int] | None = []  # tokens so far, while their text is empty; then None

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that became certain with further tokens."""
        tokenizer = self._tokenizer
        if self._skip_special:
            token_ids = [token for token in token_ids if not tokenizer.is_special(token)]
        if tokenizer.is_byte_level:
            return self._utf8.decode(b"".join(map(tokenizer.token_bytes, token_ids)))
        pieces: list[str] = []
        for token in token_ids:
            if tokenizer.is_byte(token):
                self._run.append(token)
            elif tokenizer.knows(token):
                if self._run:
                    pieces.append(self._end_run())
                pieces.append(tokenizer.token_text(token) if self._head is None else self._begin([token]))
        return "".join(pieces)

    def flush(self) -> str:
        """The text of what is left when no more tokens come: an unfinished character or run of bytes."""
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(b"", final=True)
        return self._end_run() if self._run else ""

    def _end_run(self) -> str:
        run, self._run = self._run, []
        return self._tokenizer.text_after(run) if self._head is None else self._begin(run)

    def _begin(self, token_ids: list[int]) -> str:
        """The text of the first tokens that have one: decoders strip its front."""
        assert self._head is not None
        self._head += token_ids
        text = self._tokenizer.decode(self._head, skip_special_tokens=False)
        if text:
            self._head = None
        return text
