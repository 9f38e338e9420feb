from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.hub import load_model_config
from engine.output_processor import OutputProcessor
from engine.outputs import EngineOutput, RequestOutput, RequestTiming, TokenLogprobs
from engine.processor import Processor
from engine.request import FinishReason
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer, load_tokenizer

EOS = 2


class Text:
    """A prompt's way through the text side, with outputs that a test writes itself."""

    def __init__(self, processor: Processor, tokenizer: Tokenizer, prompt: list[int], **params: object) -> None:
        self.tokenizer = tokenizer
        params.setdefault("max_tokens", None)
        self.processed = processor.process(prompt, SamplingParams(**params), request_id="r")  # type: ignore[arg-type]
        self.assembler = OutputProcessor(self.processed, tokenizer)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def stream(self, ids: list[int], finish: FinishReason | None = None, size: int = 1) -> list[RequestOutput | None]:
        """One update for each `size` tokens of the only completion."""
        parts = [tuple(ids[start : start + size]) for start in range(0, len(ids), size)]
        return [
            self.assembler.update([EngineOutput("r", part, finish_reason=finish if part is parts[-1] else None)])
            for part in parts
        ]


class Make:
    def __init__(self, folder: Path) -> None:
        model = load_model_config(EngineConfig(model=str(folder), load_format="dummy"))
        self.tokenizer = load_tokenizer(folder)
        self.processor = Processor(model, self.tokenizer, block_size=16, max_logprobs=5)

    def __call__(self, prompt: list[int] | None = None, **params: object) -> Text:
        return Text(self.processor, self.tokenizer, prompt or [5, 6, 7], **params)


@pytest.fixture(scope="module")
def make(tiny_folder: Path) -> Make:
    return Make(tiny_folder)


def joined(deltas: list[RequestOutput | None]) -> str:
    return "".join(delta.outputs[0].text for delta in deltas if delta)


def logprobs(ids: list[list[int]], values: list[list[float]], ranks: list[int]) -> TokenLogprobs:
    return TokenLogprobs(np.array(ids, np.int32), np.array(values, np.float32), np.array(ranks, np.int32))


# ---- text and ends ----


def test_deltas_join_to_the_snapshot(make: Make) -> None:
    text = make()
    ids = text.ids("The naïve \N{GRINNING FACE} café")
    deltas = text.stream(ids, FinishReason.LENGTH)
    snapshot = text.assembler.snapshot()
    assert joined(deltas) == snapshot.outputs[0].text == "The naïve \N{GRINNING FACE} café"
    assert [token for delta in deltas if delta for token in delta.outputs[0].token_ids] == ids
    assert snapshot.outputs[0].token_ids == ids
    assert snapshot.outputs[0].finish_reason == "length"
    assert text.assembler.finished
    assert snapshot.finished


def test_an_unfinished_character_is_released_at_the_end(make: Make) -> None:
    text = make()
    part = text.ids("\N{GRINNING FACE}")[:1]
    deltas = text.stream(part, FinishReason.LENGTH)
    assert joined(deltas) == "\N{REPLACEMENT CHARACTER}"


def test_end_of_sequence_is_a_token_without_text(make: Make) -> None:
    for skip in (True, False):
        text = make(skip_special_tokens=skip)
        deltas = text.stream([*text.ids("Yes."), EOS], FinishReason.STOP)
        last = text.assembler.snapshot().outputs[0]
        assert joined(deltas) == "Yes."
        assert last.token_ids[-1] == EOS
        assert (last.finish_reason, last.stop_reason) == ("stop", None)


def test_a_stop_tokens_text_is_shown_only_when_asked(make: Make) -> None:
    for include, shown in ((False, "a"), (True, "a b")):
        text = make(include_stop_str_in_output=include)
        first, last = text.ids("a b")
        text = make(include_stop_str_in_output=include, stop_token_ids=[last])
        output = text.assembler.update(
            [EngineOutput("r", (first, last), finish_reason=FinishReason.STOP, stop_reason=last)]
        )
        assert output is not None
        assert output.outputs[0].text == shown
        assert output.outputs[0].stop_reason == last


def test_an_end_without_a_stop_token_keeps_the_last_tokens_text(make: Make) -> None:
    text = make()  # a grammar that is satisfied ends a request so
    assert joined(text.stream(text.ids('{"a": 1}'), FinishReason.STOP)) == '{"a": 1}'


def test_nothing_new_gives_nothing(make: Make) -> None:
    assembler = make().assembler
    assert assembler.update([]) is None
    assert assembler.update([EngineOutput("r")]) is None


def test_aborts_and_errors_end_a_completion_with_what_it_has(make: Make) -> None:
    text = make(stop=["xyz"])
    text.stream(text.ids("x"))
    output = text.assembler.update([EngineOutput("r", finish_reason=FinishReason.ERROR, error="out of memory")])
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.error) == ("x", "error", "out of memory")
    assert text.assembler.take_aborts() == []


# ---- stop strings ----


@pytest.mark.parametrize("size", [1, 2, 50])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_several_tokens_is_never_leaked(make: Make, size: int, include: bool) -> None:
    text = make(stop=["END OF STORY"], include_stop_str_in_output=include)
    deltas = text.stream(text.ids("Once. END OF BOOK. END OF STORY and more text"), size=size)
    output = text.assembler.snapshot().outputs[0]
    assert joined(deltas) == output.text == "Once. END OF BOOK. " + ("END OF STORY" if include else "")
    assert (output.finish_reason, output.stop_reason) == ("stop", "END OF STORY")
    assert text.assembler.take_aborts() == ["r"]
    assert text.assembler.take_aborts() == []


def test_tokens_end_with_the_one_that_completed_the_match(make: Make) -> None:
    text = make(stop=["two"])
    ids = text.ids("one two three four")
    (output,) = text.stream(ids, FinishReason.LENGTH, size=50)
    assert output is not None
    assert text.tokenizer.decode(output.outputs[0].token_ids) == "one two"
    assert output.outputs[0].text == "one "
    assert output.outputs[0].finish_reason == "stop"  # and not the later length
    assert text.assembler.take_aborts() == []  # the engine has ended it as well


def test_outputs_after_a_stop_string_are_ignored(make: Make) -> None:
    text = make(stop=["two"])
    text.stream(text.ids("one two"))
    before = text.assembler.snapshot()
    late = EngineOutput("r", (7, 8), finish_reason=FinishReason.ABORT)
    assert text.assembler.update([late]) is None
    assert text.assembler.snapshot() == before


def test_held_text_is_released_when_no_stop_string_follows(make: Make) -> None:
    text = make(stop=["abcd"])
    ids = text.ids("xab")
    deltas = text.stream(ids)
    assert joined(deltas) == "x"
    end = text.assembler.update([EngineOutput("r", (EOS,), finish_reason=FinishReason.STOP)])
    assert end is not None
    assert end.outputs[0].text == "ab"
    assert end.outputs[0].stop_reason is None


def test_stop_strings_wait_for_min_tokens_but_may_begin_before(make: Make) -> None:
    ids = make().ids(" no no no no no")
    assert len(ids) == 5
    text = make(stop=["no"], min_tokens=3)
    assert joined(text.stream(ids)) == " no no no "
    assert len(text.assembler.snapshot().outputs[0].token_ids) == 4
    text = make(stop=["no no"], min_tokens=3)
    assert joined(text.stream(ids)) == " no no "
    text = make(stop=["aba"], min_tokens=3)  # the first of two that overlap does not count
    assert joined(text.stream([token for letter in "ababa" for token in text.ids(letter)])) == "ab"


def test_the_stop_string_that_is_complete_first_wins(make: Make) -> None:
    for size in (1, 50):
        text = make(stop=["bcdefg", "cd", "abcd"])
        assert joined(text.stream(text.ids("xabcdefg"), size=size)) == "x"
        assert text.assembler.snapshot().outputs[0].stop_reason == "abcd"


@given(
    pieces=st.lists(st.text("ab\n", max_size=4), max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=3),
    size=st.integers(1, 4),
)
@settings(max_examples=300, deadline=None)
def test_text_is_cut_where_the_first_stop_string_completes(
    make: Make, pieces: list[str], stops: list[str], size: int
) -> None:
    text = make(stop=stops)
    ids = [token for piece in pieces for token in text.ids(piece)]
    whole = text.tokenizer.decode(ids)
    ends = [(whole.find(stop) + len(stop), -len(stop)) for stop in stops if stop in whole]
    expected = whole[: sum(min(ends))] if ends else whole
    deltas = text.stream([*ids, EOS], FinishReason.STOP, size)
    assert joined(deltas) == text.assembler.snapshot().outputs[0].text == expected
    assert (text.assembler.snapshot().outputs[0].stop_reason is None) == (not ends)


# ---- logprobs ----


def test_logprobs_list_the_chosen_token_first(make: Make) -> None:
    text = make(logprobs=2)
    a, b, c = text.ids("a b c")
    rows = logprobs([[a, b, c], [b, b, c]], [[-3.0, -0.5, -1.0], [-0.25, -0.25, -2.0]], [7, 1])
    output = text.assembler.update([EngineOutput("r", (a, b), logprobs=rows)])
    assert output is not None
    first, second = output.outputs[0].logprobs or []
    assert list(first) == [a, b, c]
    assert first[a] == (-3.0, 7, "a")
    assert first[b] == (-0.5, 1, " b")
    assert list(second) == [b, c]
    assert output.outputs[0].cumulative_logprob == pytest.approx(-3.25)


def test_logprobs_are_cut_with_the_text(make: Make) -> None:
    text = make(logprobs=0, stop=[" b"])
    a, b, c = ids = text.ids("a b c")
    rows = logprobs([[token] for token in ids], [[-1.0], [-2.0], [-4.0]], [1, 1, 1])
    output = text.assembler.update([EngineOutput("r", (a, b, c), logprobs=rows)])
    assert output is not None
    assert [list(row) for row in output.outputs[0].logprobs or []] == [[a], [b]]
    assert output.outputs[0].cumulative_logprob == pytest.approx(-3.0)


def test_no_logprobs_where_none_were_asked_for(make: Make) -> None:
    text = make()
    (output,) = text.stream(text.ids("a"))
    assert output is not None
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


def test_prompt_logprobs_are_gathered_and_shown_once(make: Make) -> None:
    text = make([5, 6, 7], prompt_logprobs=0)
    assembler = text.assembler
    assert assembler.update([EngineOutput("r", prompt_logprobs=logprobs([[6]], [[-1.0]], [1]))]) is None
    first = assembler.update([EngineOutput("r", (8,), prompt_logprobs=logprobs([[7]], [[-2.0]], [3]))])
    second = assembler.update([EngineOutput("r", (9,))])
    assert first is not None
    assert second is not None
    assert [row and list(row) for row in first.prompt_logprobs or []] == [None, [6], [7]]
    assert second.prompt_logprobs is None
    assert assembler.snapshot().prompt_logprobs == first.prompt_logprobs


# ---- many, and resumed ----


def test_completions_end_one_by_one(make: Make) -> None:
    text = make(n=3, stop=["two"])
    one, two = text.ids("one two")
    assembler = text.assembler
    output = assembler.update([EngineOutput("r-2", (one,)), EngineOutput("r-0", (one, two))])
    assert output is not None
    assert {part.index: (part.text, part.finish_reason) for part in output.outputs} == {
        2: ("one", None),
        0: ("one ", "stop"),
    }
    assert assembler.take_aborts() == ["r-0"]
    assembler.update([EngineOutput("r-1", (one, EOS), finish_reason=FinishReason.STOP)])
    assert not assembler.finished
    assembler.update([EngineOutput("r-2", (one,), finish_reason=FinishReason.LENGTH)])
    assert assembler.finished
    assert [part.text for part in assembler.snapshot().outputs] == ["one ", "one", "oneone"]


def test_cached_tokens_and_timing_are_the_first_completions(make: Make) -> None:
    text = make(n=2)
    timing = RequestTiming(1.0, 2.0, 3.0)
    text.assembler.update([EngineOutput("r-1", (8,), num_cached_tokens=2, timing=RequestTiming(9.0))])
    text.assembler.update([EngineOutput("r-0", (8,), num_cached_tokens=1, timing=timing)])
    output = text.assembler.update([EngineOutput("r-0", (9,), num_cached_tokens=3)])  # elsewhere, after a failover
    assert output is not None
    assert (output.num_cached_tokens, output.timing) == (1, timing)


def test_a_resumed_request_shows_only_what_is_new(make: Make) -> None:
    for cut in range(8):
        text = make(stop=["END"])
        ids = text.ids("Ein \N{GRINNING FACE} E N EN END x")
        before = joined(text.stream(ids[:cut]))
        child = dataclasses.replace(text.processed.children[0], output_token_ids=tuple(ids[:cut]))
        text.assembler = OutputProcessor(dataclasses.replace(text.processed, children=(child,)), text.tokenizer)
        after = joined(text.stream(ids[cut:], FinishReason.LENGTH))
        assert before + after == text.assembler.snapshot().outputs[0].text == "Ein \N{GRINNING FACE} E N EN "
        assert text.assembler.snapshot().outputs[0].token_ids[:cut] == ids[:cut]
