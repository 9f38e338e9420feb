"""Offline use: prompts in, completions out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine import LLM, InvalidParameter, SamplingParams
from engine.processor import Prompt


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(str(tiny_folder), load_format="dummy", dtype="float32", num_kv_blocks=256, debug_integrity=True) as llm:
        yield llm


def blocks_in_use(llm: LLM) -> int:
    return llm.core.load().kv_blocks_used


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"Number {number} of many" for number in range(20)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True, seed=1), use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert all(len(output.outputs[0].token_ids) == 3 for output in outputs)
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    assert blocks_in_use(llm) == 0


def test_token_prompts_equal_text_prompts(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    ids = llm.get_tokenizer().encode("The sea is")
    as_text, as_tokens = llm.generate(["The sea is", {"prompt_token_ids": ids}], params, use_tqdm=False)
    assert as_text.prompt_token_ids == as_tokens.prompt_token_ids == ids
    assert as_text.outputs[0].token_ids == as_tokens.outputs[0].token_ids


def test_one_prompt_needs_no_list(llm: LLM) -> None:
    assert len(llm.generate("Hello", SamplingParams(max_tokens=1), use_tqdm=False)) == 1


def test_n_completions_differ_and_the_first_is_that_of_one(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    many = llm.generate(["Once upon a time"], params, use_tqdm=False)[0]
    one = llm.generate(
        ["Once upon a time"],
        SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True),
        use_tqdm=False,
    )[0]
    assert [output.index for output in many.outputs] == [0, 1, 2, 3]
    assert len({tuple(output.token_ids) for output in many.outputs}) == 4
    assert many.outputs[0].token_ids == one.outputs[0].token_ids


def test_seeds_reproduce_under_any_batching(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=99, max_tokens=12, ignore_eos=True)
    alone = llm.generate(["A quiet village"], params, use_tqdm=False)[0].outputs[0].token_ids
    others = [f"Another prompt, number {number}" for number in range(7)]
    noise = SamplingParams(temperature=1.3, max_tokens=12, ignore_eos=True)
    batched = llm.generate([*others, "A quiet village"], [noise] * 7 + [params], use_tqdm=False)
    assert batched[-1].outputs[0].token_ids == alone


def test_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    text = llm.generate(["Once"], params, use_tqdm=False)[0].outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 5]
    stopped = llm.generate(
        ["Once"], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=[stop]), use_tqdm=False
    )[0].outputs[0]
    assert stopped.text == text[: text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert len(stopped.token_ids) < 40
    assert blocks_in_use(llm) == 0


def test_stop_token_ends_the_output(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    ids = llm.generate(["Once"], params, use_tqdm=False)[0].outputs[0].token_ids
    stop = ids[7]
    stopped = llm.generate(
        ["Once"],
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop]),
        use_tqdm=False,
    )[0].outputs[0]
    assert stopped.token_ids == ids[: ids.index(stop) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)


def test_max_tokens_is_cut_to_what_the_context_leaves(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [5] * 500}
    output = llm.generate([prompt], SamplingParams(max_tokens=1000, ignore_eos=True), use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) == 512 - 500
    assert output.finish_reason == "length"


def test_a_switch_refuses_max_tokens_beyond_the_context(tiny_folder: Path) -> None:
    with (
        LLM(str(tiny_folder), load_format="dummy", num_kv_blocks=64, refuse_excess_max_tokens=True) as strict,
        pytest.raises(InvalidParameter, match="max_tokens"),
    ):
        strict.generate(["Hello"], SamplingParams(max_tokens=1000), use_tqdm=False)


def test_a_refused_prompt_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match=r"prompt has 600 tokens; the model's context is 512"):
        llm.generate(["fine", {"prompt_token_ids": [1] * 600}], use_tqdm=False)
    with pytest.raises(InvalidParameter, match=r"token id 49152; the model.s are 0 to 49,151"):
        llm.generate([{"prompt_token_ids": [49152]}], use_tqdm=False)
    assert not llm.core.has_work()
    assert llm.generate(["fine"], SamplingParams(max_tokens=1), use_tqdm=False)[0].finished


def test_an_interrupted_batch_leaves_nothing_behind(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with LLM(str(tiny_folder), load_format="dummy", num_kv_blocks=64, max_num_seqs=1, debug_integrity=True) as llm:
        expected = llm.generate(["Hello"], params, use_tqdm=False)[0].outputs[0].token_ids
        with monkeypatch.context() as patch:
            # Before the worker heard that the first request's row is free.
            patch.setattr(llm.core._executor, "submit", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["Hello"] * 3, params, use_tqdm=False)
        assert not llm.core.has_work()
        assert blocks_in_use(llm) == 0
        assert llm.generate(["Hello"], params, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_lists_of_another_length_than_the_prompts_are_named(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="sampling_params: there are 2 prompts and 1 values"):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)
    with pytest.raises(InvalidParameter, match="priority: there are 1 prompts and 2 values"):
        llm.generate(["a"], priority=[1, 2], use_tqdm=False)


def test_none_takes_the_models_own_defaults(llm: LLM) -> None:
    assert llm.generate(["Hello"], None, use_tqdm=False)[0].finished


def test_timing_and_cached_tokens_are_reported(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(100, 164))}
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    llm.generate([prompt], params, use_tqdm=False)
    again = llm.generate([prompt], params, use_tqdm=False)[0]
    # One token must remain to be computed, so that the last of the four full blocks cannot be a hit.
    assert again.num_cached_tokens == 48
    timing = again.timing
    assert timing is not None
    assert timing.scheduled_at is not None
    assert timing.first_token_at is not None
    assert timing.finished_at is not None
    assert timing.queued_at <= timing.scheduled_at <= timing.first_token_at <= timing.finished_at


def test_cache_salt_separates_prefixes(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(300, 364))}
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    llm.generate([prompt], params, use_tqdm=False, cache_salt="mine")
    assert llm.generate([prompt], params, use_tqdm=False, cache_salt="yours")[0].num_cached_tokens == 0
    assert llm.generate([prompt], params, use_tqdm=False, cache_salt="mine")[0].num_cached_tokens == 48


def test_logprobs_are_reported_and_add_up(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=5, ignore_eos=True, logprobs=3)
    output = llm.generate(["Hello there"], params, use_tqdm=False)[0].outputs[0]
    assert output.logprobs is not None
    chosen = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(chosen))
    assert all(next(iter(entry)) == token for entry, token in zip(output.logprobs, output.token_ids, strict=True))
    assert all(len(entry) in (3, 4) for entry in output.logprobs)


def test_prompt_logprobs_are_the_same_chunked_cached_or_not(tiny_folder: Path, llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(1000, 1090))}
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    first = llm.generate([prompt], params, use_tqdm=False)[0].prompt_logprobs
    again = llm.generate([prompt], params, use_tqdm=False)[0].prompt_logprobs
    with LLM(
        str(tiny_folder),
        load_format="dummy",
        dtype="float32",
        num_kv_blocks=64,
        max_num_seqs=8,
        max_num_batched_tokens=16,
    ) as small:
        chunked = small.generate([prompt], params, use_tqdm=False)[0].prompt_logprobs
    assert first is not None
    assert again is not None
    assert chunked is not None
    assert len(first) == len(again) == len(chunked) == 90
    for left, middle, right in zip(first[1:], again[1:], chunked[1:], strict=True):
        assert left is not None
        assert middle is not None
        assert right is not None
        assert list(left) == list(middle) == list(right)
        for token, logprob in left.items():
            assert middle[token].logprob == pytest.approx(logprob.logprob, abs=1e-5)
            assert right[token].logprob == pytest.approx(logprob.logprob, abs=1e-5)


def test_unknown_arguments_are_named() -> None:
    with pytest.raises(InvalidParameter, match=r"unknown engine argument 'max_num_seq'; did you mean 'max_num_seqs'"):
        LLM("demo", max_num_seq=3)


def test_a_context_that_does_not_fit_says_what_to_change(tiny_folder: Path) -> None:
    with pytest.raises(InvalidParameter, match=r"max_model_len=512: .*needs 32 KV blocks .*room for 20; .*320 or less"):
        LLM(str(tiny_folder), load_format="dummy", num_kv_blocks=20)


def test_progress_bar_shows_tokens_per_second(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["Hello"] * 3, SamplingParams(max_tokens=2, ignore_eos=True))
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "tok/s" in shown


@pytest.fixture
def damaged_folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A model whose embedding of the token 777 is NaN, so that only prompts with that token compute NaN."""
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(tiny_folder, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[777] = float("nan")
    model.save_pretrained(tmp_path)
    return tmp_path


def test_unusable_logits_cost_one_request_and_not_its_neighbours(damaged_folder: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompt: Prompt = {"prompt_token_ids": [777] * 20}
    with LLM(str(damaged_folder), num_kv_blocks=33, debug_integrity=True) as llm:
        good = llm.generate(["Fine"], params, use_tqdm=False)[0].outputs[0].token_ids
        for _ in range(20):
            # Again and again, so that every block comes to be used by both.
            bad, fine = llm.generate([prompt, "Fine"], params, use_tqdm=False)
            assert bad.outputs[0].finish_reason == "error"
            assert bad.error is not None
            assert "NaN" in bad.error
            assert bad.num_cached_tokens == 0
            assert fine.outputs[0].token_ids == good
