"""A workload as requests of OpenAI's interface, and the same workload as text where a service takes no tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from app.cli.bench.client import Call, Endpoint
from app.cli.bench.workload import OUTPUT_LEN, file_items, file_prompts, fitted, made_up_items
from engine.hub import resolve_model
from engine.sampling_params import InvalidParameter
from engine.tokenizer import Tokenizer, load_tokenizer

MOST_WORDS = 4096


@dataclass(frozen=True, slots=True)
class Form:
    """How prompts are put.

    Attributes:
        as_text: as text, and not as token ids; a chat is always text.
        ignore_eos: ask for all the tokens of an output, which not every service understands.
    """

    endpoint: Endpoint
    model: str
    as_text: bool
    ignore_eos: bool

    def call(self, prompt: str | Sequence[int], output_len: int, arrival: float = 0.0) -> Call:
        """A greedy, streamed request."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        return Call(json.dumps(body).encode(), arrival)


@dataclass(frozen=True, slots=True)
class Workload:
    """What the options of the command ask for; see `app.cli.bench.options`.

    Attributes:
        source: `random`, or a file of prompts; a trace goes before it.
        count: most requests; None is all of a file or trace, and RANDOM_COUNT random ones.
        output_len: None is what a trace says, and OUTPUT_LEN otherwise.
    """

    source: str
    trace: Path | None
    count: int | None
    input_len: int
    output_len: int | None
    shared_prefix: int
    seed: int


def calls_of(
    workload: Workload, form: Form, *, tokenizer_name: str, max_model_len: int | None
) -> tuple[list[Call], int]:
    """The requests of a workload, and how many of them were cut to the model's context.

    Args:
        tokenizer_name: what `manta generate` would take as a model; loaded only where it is needed.
        max_model_len: None where the service does not tell.

    Raises:
        InvalidParameter: the tokenizer cannot be loaded; or a file or trace is not what it should be.
        FetchError: the tokenizer cannot be fetched.
        OSError: a file cannot be read.
    """
    length = workload.output_len or OUTPUT_LEN
    is_file = workload.trace is None and workload.source != "random"
    if is_file and form.as_text:
        prompts = file_prompts(Path(workload.source), workload.count)
        return [form.call(prompt.text, length) for prompt in prompts], 0
    tokenizer = load_tokenizer(_tokenizer_path(tokenizer_name))
    words = words_of(tokenizer) if form.as_text else []
    if is_file:
        items = file_items(Path(workload.source), workload.count, length, tokenizer)
    else:
        items = made_up_items(
            workload.trace,
            count=workload.count,
            input_len=workload.input_len,
            output_len=workload.output_len,
            shared_prefix=workload.shared_prefix,
            vocab_size=len(words) if form.as_text else tokenizer.vocab_size,
            seed=workload.seed,
        )
    items, shortened = (items, 0) if max_model_len is None else fitted(items, max_model_len)
    return [
        form.call(
            "".join(words[index] for index in item.prompt_token_ids) if form.as_text else item.prompt_token_ids,
            item.output_len,
            item.arrival,
        )
        for item in items
    ], shortened


def words_of(tokenizer: Tokenizer) -> list[str]:
    """Words, each with the space before it, of which a text of n has n tokens (some tokenizers put one in front).

    Raises:
        InvalidParameter: there are none.
    """
    texts = (tokenizer.token_text(token) for token in range(tokenizer.vocab_size))
    words = (
        text
        for token, text in enumerate(texts)
        if text[:1] == " "
        and text[1:].isascii()
        and text[1:].isalpha()
        and tokenizer.encode(text + text, add_special_tokens=False)[-1:] == [token]
    )
    found = list(islice(words, MOST_WORDS))
    if not found:
        raise InvalidParameter("tokenizer", "it has no words of one token to make prompts of; send token ids")
    return found


def _tokenizer_path(name: str) -> Path:
    try:
        return resolve_model(name, weights=False)
    except InvalidParameter as error:
        raise InvalidParameter("tokenizer", f"{error}; --tokenizer says where the model's tokenizer is") from None
