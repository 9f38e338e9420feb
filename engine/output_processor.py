"""What engines put out for one prompt to what its client gets: text, stop strings, log-probabilities, usage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.detokenizer import Detokenizer
from engine.outputs import (
    CompletionOutput,
    EngineOutput,
    Logprob,
    RequestOutput,
    RequestTiming,
    TokenLogprobDict,
    TokenLogprobs,
)
from engine.processor import ProcessedRequest
from engine.request import EngineRequest, FinishReason
from engine.tokenizer import Tokenizer


class OutputProcessor:
    """Assembles the n completions of one prompt. Owned by whoever reads the engine's outputs, on one thread.

    A completion ends by its engine or, earlier, by a stop string: then its text, tokens and log-probabilities end
    with the token that completed the match, and what the engine made beyond that is ignored.
    """

    def __init__(self, processed: ProcessedRequest, tokenizer: Tokenizer) -> None:
        stops = tuple(_StopString(text) for text in processed.params.stop)
        self._processed = processed
        self._tokenizer = tokenizer
        self._prompt_token_ids = list(processed.prompt_token_ids)
        self._children = {
            request.request_id: _Completion(index, request, tokenizer, stops)
            for index, request in enumerate(processed.children)
        }
        self._first = next(iter(self._children.values()))
        self._unfinished = len(self._children)
        self._aborts: list[str] = []
        self._prompt_logprobs: list[TokenLogprobDict | None] | None = (
            None if processed.params.prompt_logprobs is None else [None]
        )
        self._prompt_logprobs_shown = False
        self._num_cached_tokens = 0
        self._timing: RequestTiming | None = None
        self._error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return self._unfinished == 0

    def update(self, outputs: Iterable[EngineOutput]) -> RequestOutput | None:
        """Takes in what a step gave; returns only what is new, or None where nothing is.

        A token is new at once, its text where it is certain: when no character is cut and no stop string can begin
        in it. prompt_logprobs come once, when they are complete.
        """
        changed: dict[int, _Completion] = {}
        for output in outputs:
            completion = self._children[output.request_id]
            if completion.finish_reason is not None:
                continue
            if completion is self._first:
                self._take_prompt(output)
            if completion.take(output):
                changed[completion.index] = completion
            if completion.finish_reason is not None:
                self._unfinished -= 1
                self._error = self._error or output.error
                if output.finish_reason is None:
                    self._aborts.append(output.request_id)
        if not changed:
            return None
        prompt_logprobs = None if self._prompt_logprobs_shown else self._complete_prompt_logprobs()
        self._prompt_logprobs_shown = self._prompt_logprobs_shown or prompt_logprobs is not None
        return self._request_output([completion.news() for completion in changed.values()], prompt_logprobs)

    def take_aborts(self) -> list[str]:
        """Requests that a stop string ended since the last call: their engine is to be told."""
        aborts, self._aborts = self._aborts, []
        return aborts

    def snapshot(self) -> RequestOutput:
        """All so far."""
        completions = [completion.so_far() for completion in self._children.values()]
        return self._request_output(completions, self._complete_prompt_logprobs())

    def _take_prompt(self, output: EngineOutput) -> None:
        if not self._first.token_ids:  # an engine that resumes it finds other blocks, which are no news
            self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        if output.timing is not None:
            self._timing = output.timing
        if self._prompt_logprobs is not None and output.prompt_logprobs is not None:
            self._prompt_logprobs += _rows(output.prompt_logprobs, self._tokenizer)

    def _complete_prompt_logprobs(self) -> list[TokenLogprobDict | None] | None:
        rows = self._prompt_logprobs
        return rows if rows is not None and len(rows) >= len(self._prompt_token_ids) else None

    def _request_output(
        self, completions: list[CompletionOutput], prompt_logprobs: list[TokenLogprobDict | None] | None
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self._processed.request_id,
            prompt=self._processed.prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=completions,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
            timing=self._timing,
            error=self._error,
        )


class _Completion:
    """One of the n, growing."""

    def __init__(
        self, index: int, request: EngineRequest, tokenizer: Tokenizer, stops: tuple[_StopString, ...]
    ) -> None:
        params = request.params
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._stop_search = _StopSearch(stops, params.include_stop_str_in_output) if stops else None
        self._min_tokens = params.min_tokens
        # A token that ended it is no part of its text, unless stop strings are to be.
        self._silent_ends = (
            frozenset() if params.include_stop_str_in_output else {*request.eos_token_ids, *params.stop_token_ids}
        )
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobDict] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._tokens_shown = self._texts_shown = 0
        if request.output_token_ids:  # resumed: they were delivered elsewhere
            self._extend(request.output_token_ids, len(request.output_token_ids), None)
            self.news()

    def take(self, output: EngineOutput) -> bool:
        """Whether there is anything new."""
        token_ids = output.new_token_ids
        with_text = len(token_ids)
        if output.finish_reason is FinishReason.STOP and token_ids and token_ids[-1] in self._silent_ends:
            with_text -= 1
        stop = self._extend(token_ids, with_text, output.logprobs)
        if stop is None and output.finish_reason is not None:
            stop = self._end_text()
        if stop is not None:
            self.finish_reason, self._stop_reason = FinishReason.STOP.value, stop
        elif output.finish_reason is not None:
            self.finish_reason, self._stop_reason = output.finish_reason.value, output.stop_reason
        return bool(token_ids) or self.finish_reason is not None

    def news(self) -> CompletionOutput:
        """What was not shown before, which is shown now."""
        tokens, texts = self._tokens_shown, self._texts_shown
        self._tokens_shown, self._texts_shown = len(self.token_ids), len(self._texts)
        return self._output(tokens, texts)

    def so_far(self) -> CompletionOutput:
        return self._output(0, 0)

    def _output(self, tokens: int, texts: int) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text="".join(self._texts[texts:]),
            token_ids=self.token_ids[tokens:],
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[tokens:],
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )

    def _extend(self, token_ids: Sequence[int], with_text: int, logprobs: TokenLogprobs | None) -> str | None:
        """Takes in tokens, of which the first `with_text` have one, up to a stop string, which is returned."""
        stop = None
        if self._stop_search is None:
            self._texts.append(self._detokenizer.add(token_ids[:with_text]))
        else:
            for position in range(with_text):
                text = self._detokenizer.add(token_ids[position : position + 1])
                armed = len(self.token_ids) + position + 1 > self._min_tokens
                certain, stop = self._stop_search.feed(text, armed)
                self._texts.append(certain)
                if stop is not None:
                    token_ids = token_ids[: position + 1]
                    break
        self.token_ids += token_ids
        if self._logprobs is not None:
            rows = [{} for _ in token_ids] if logprobs is None else _rows(logprobs, self._tokenizer, len(token_ids))
            self._logprobs += rows
            if logprobs is not None:
                self._cumulative_logprob += float(logprobs.logprobs[: len(token_ids), 0].sum(dtype="float64"))
        return stop

    def _end_text(self) -> str | None:
        """Releases what was held back; the last of it may still complete a stop string."""
        text = self._detokenizer.flush()
        if self._stop_search is None:
            self._texts.append(text)
            return None
        certain, stop = self._stop_search.feed(text, len(self.token_ids) > self._min_tokens)
        self._texts.append(certain)
        if stop is None:
            self._texts.append(self._stop_search.release())
        return stop


def _rows(logprobs: TokenLogprobs, tokenizer: Tokenizer, count: int | None = None) -> list[TokenLogprobDict]:
    """One dictionary a token, its own entry first; the token's rank stands where it is also among the best."""
    rows: list[TokenLogprobDict] = []
    ids, values, ranks = logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), logprobs.ranks.tolist()
    for row_ids, row_values, own_rank in zip(ids[:count], values, ranks, strict=False):
        row = {row_ids[0]: Logprob(row_values[0], own_rank, tokenizer.token_text(row_ids[0]))}
        for rank in range(1, len(row_ids)):
            token = row_ids[rank]
            if token not in row:
                row[token] = Logprob(row_values[rank], rank, tokenizer.token_text(token))
        rows.append(row)
    return rows


class _StopString:
    """A stop string, prepared to be looked for.

    borders[k] is the length of the longest proper prefix of its first k characters that they also end with.

    Source: Knuth, Morris, Pratt 1977.
    """

    __slots__ = ("borders", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.borders = [0, 0]
        border = 0
        for character in text[1:]:
            while border and text[border] != character:
                border = self.borders[border]
            border += text[border] == character
            self.borders.append(border)

    def advance(self, matched: int, character: str) -> int:
        """How much of it the text ends with, after one more character."""
        text = self.text
        while matched and (matched == len(text) or text[matched] != character):
            matched = self.borders[matched]
        return matched + (text[matched] == character)


class _StopSearch:
    """Finds the stop string that is complete first, in a text that comes in pieces, of whatever size.

    Holds back the end of the text while a stop string may begin in it. A character costs O(1) for each stop string.
    """

    __slots__ = ("_held", "_include", "_matched", "_stops")

    def __init__(self, stops: tuple[_StopString, ...], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._matched = [0] * len(stops)
        self._held = ""

    def feed(self, text: str, armed: bool) -> tuple[str, str | None]:
        """The text that is certain, and the stop string that ended it.

        Args:
            armed: whether a stop string that ends in this piece counts; it may have begun before.
        """
        if not text:
            return "", None
        found: tuple[int, int, str] | None = None  # its end in `whole`, minus its length, the string
        whole = self._held + text
        for index, stop in enumerate(self._stops):
            matched, length = self._matched[index], len(stop.text)
            if matched == 0 and stop.text[0] not in text:
                continue
            for end, character in enumerate(text, len(self._held) + 1):
                matched = stop.advance(matched, character)
                if matched == length:
                    if armed:
                        match = (end, -length, stop.text)
                        found = match if found is None else min(found, match)
                        break
                    matched = stop.borders[matched]
            self._matched[index] = matched
        if found is not None:
            end, minus_length, stop_text = found
            self._held = ""
            return whole[: end if self._include else end + minus_length], stop_text
        certain = len(whole) - max(self._matched)
        self._held = whole[certain:]
        return whole[:certain], None

    def release(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held
