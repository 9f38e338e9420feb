"""What a benchmark asks of an engine: prompts of tokens, and how long each answer is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from app.simulation.requests import BLOCK_SIZE, SCALE
from app.traces import TraceRequest, json_lines, read_trace
from engine.sampling_params import InvalidParameter
from engine.tokenizer import Tokenizer

T = TypeVar("T")

RANDOM_COUNT = 32
OUTPUT_LEN = 128
"""What is run where nothing says how much."""


@dataclass(frozen=True, slots=True)
class Item:
    """One request.

    Attributes:
        output_len: tokens to generate, whatever the model would like.
        arrival: seconds after the first one; for those who replay in time.
    """

    prompt_token_ids: tuple[int, ...]
    output_len: int
    arrival: float = 0.0


def random_items(
    count: int, input_len: int, output_len: int, *, shared_prefix: int = 0, vocab_size: int, seed: int
) -> list[Item]:
    """Prompts of shared_prefix + input_len random tokens, of which the first shared_prefix are the same in all."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, vocab_size, shared_prefix).tolist()
    return [Item((*prefix, *rng.integers(0, vocab_size, input_len).tolist()), output_len) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """A row of a file of prompts.

    Attributes:
        is_turn: it opens a conversation.
    """

    text: str
    is_turn: bool


def file_prompts(path: Path, count: int | None) -> list[FilePrompt]:
    """The first prompts of a JSONL file.

    Raises:
        InvalidParameter: a row is neither {"prompt": text} nor {"turns": [text, …]}, or there are none.
    """
    prompts = []
    for number, row in islice(json_lines(path), count):
        turns = row.get("turns")
        text = turns[0] if isinstance(turns, list) and turns else row.get("prompt")
        if not isinstance(text, str):
            raise InvalidParameter("input", f'{path}, line {number}: must have "prompt" or "turns"')
        prompts.append(FilePrompt(text, bool(turns)))
    return _some(prompts, "input", path)


def file_items(path: Path, count: int | None, output_len: int, tokenizer: Tokenizer) -> list[Item]:
    """The first prompts of a JSONL file; a conversation's first turn goes through the chat template.

    Raises:
        InvalidParameter: see `file_prompts`.
    """
    items = []
    for prompt in file_prompts(path, count):
        if prompt.is_turn and tokenizer.hf.chat_template:
            token_ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}])
        else:
            token_ids = tokenizer.encode(prompt.text)
        items.append(Item(tuple(token_ids), output_len))
    return items


def trace_requests(path: Path, count: int | None) -> list[TraceRequest]:
    """The first requests of a trace.

    Raises:
        InvalidParameter: see `read_trace`; or there are none.
        OSError: the file cannot be read.
    """
    return _some(list(islice(read_trace(path), count)), "trace", path)


def trace_items(path: Path, count: int | None, *, vocab_size: int, seed: int) -> list[Item]:
    """The first requests of a trace, with random tokens.

    So that a small model can replay it, each block that has a hash id becomes one of BLOCK_SIZE tokens, as in the
    simulation. These follow from the id, so that prompts share a prefix exactly where the trace's do; the outputs are
    as long as in the trace.

    Raises:
        InvalidParameter, OSError: see `trace_requests`.
    """
    rng = np.random.default_rng(seed)

    def item(request: TraceRequest) -> Item:
        if request.hash_ids is not None:
            return _mooncake(request, request.hash_ids, vocab_size, seed)
        tokens = rng.integers(0, vocab_size, request.prompt_len).tolist()
        return Item(tuple(tokens), request.output_len, request.arrival_s)

    return [item(request) for request in trace_requests(path, count)]


def made_up_items(
    trace: Path | None,
    *,
    count: int | None,
    input_len: int,
    output_len: int | None,
    shared_prefix: int,
    vocab_size: int,
    seed: int,
) -> list[Item]:
    """A trace's requests, or random ones where there is none.

    Args:
        count: most requests; None is all of a trace, and RANDOM_COUNT random ones.
        output_len: None is what a trace says, and OUTPUT_LEN otherwise.

    Raises:
        InvalidParameter, OSError: see `trace_items`.
    """
    if trace is None:
        number, length = count or RANDOM_COUNT, output_len or OUTPUT_LEN
        return random_items(number, input_len, length, shared_prefix=shared_prefix, vocab_size=vocab_size, seed=seed)
    items = trace_items(trace, count, vocab_size=vocab_size, seed=seed)
    return items if output_len is None else [replace(item, output_len=output_len) for item in items]


def fitted(items: Sequence[Item], max_model_len: int) -> tuple[list[Item], int]:
    """Items that an engine can run, and how many of them had to be shortened: the output first, then the prompt."""
    result = []
    for item in items:
        prompt = item.prompt_token_ids[: max_model_len - 1]
        result.append(
            replace(item, prompt_token_ids=prompt, output_len=min(item.output_len, max_model_len - len(prompt)))
        )
    return result, sum(before != after for before, after in zip(items, result, strict=True))


def _mooncake(request: TraceRequest, hash_ids: Sequence[int], vocab_size: int, seed: int) -> Item:
    blocks = [np.random.default_rng((seed, each)).integers(0, vocab_size, BLOCK_SIZE) for each in hash_ids]
    length = max(round(request.prompt_len / SCALE), 1)
    tokens = np.concatenate(blocks)[:length].tolist()
    return Item(tuple(tokens), request.output_len, request.arrival_s)


def _some(items: list[T], name: str, path: Path) -> list[T]:
    if not items:
        raise InvalidParameter(name, f"{path} has no requests")
    return items
