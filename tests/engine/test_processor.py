from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig, ModelConfig
from engine.hub import load_model_config
from engine.kv_cache.block_hash import hash_blocks, root_hash
from engine.processor import Processor
from engine.request import ExtraKey, child_seed
from engine.sampling_params import InvalidParameter, SamplingParams
from engine.tokenizer import Tokenizer, load_tokenizer

CONTEXT = 64


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> ModelConfig:
    return load_model_config(EngineConfig(model=str(tiny_folder), load_format="dummy", max_model_len=CONTEXT))


@pytest.fixture(scope="module")
def tokenizer(model: ModelConfig) -> Tokenizer:
    return load_tokenizer(model.path)


@pytest.fixture(scope="module")
def processor(model: ModelConfig, tokenizer: Tokenizer) -> Processor:
    return Processor(model, tokenizer, block_size=4, max_logprobs=5, clock=lambda: 12.5)


def refused(processor: Processor, prompt: object, **params: object) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        processor.process(prompt, SamplingParams(**params))  # type: ignore[arg-type]
    return caught.value


def test_text_tokens_and_lists_of_tokens_are_the_same_prompt(processor: Processor, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The capital of France")
    from_text = processor.process("The capital of France")
    assert from_text.prompt == "The capital of France"
    assert from_text.prompt_token_ids == tuple(ids)
    for prompt in (ids, {"prompt_token_ids": ids}):
        processed = processor.process(prompt)  # type: ignore[arg-type]
        assert processed.prompt is None
        assert processed.prompt_token_ids == tuple(ids)


def test_what_a_request_carries_reaches_the_engine(processor: Processor) -> None:
    processed = processor.process(
        [5, 6],
        SamplingParams(seed=7),
        request_id="a",
        client_request_id="b",
        model="m",
        priority=3,
        deadline=99.0,
    )
    (request,) = processed.children
    assert (request.request_id, request.client_request_id, request.model) == ("a", "b", "m")
    assert (request.priority, request.deadline, request.arrival_time, request.seed) == (3, 99.0, 12.5, 7)
    assert request.eos_token_ids == (2,)
    assert processor.process([5], SamplingParams(ignore_eos=True)).children[0].eos_token_ids == ()


def test_chat_becomes_the_templates_tokens(processor: Processor, tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    processed = processor.process_chat(messages)
    assert processed.prompt_token_ids == tuple(tokenizer.apply_chat_template(messages))
    assert processed.prompt == tokenizer.render_chat(messages)


def test_a_chat_that_is_too_long_is_named_as_messages(processor: Processor) -> None:
    with pytest.raises(InvalidParameter, match="the model's context is 64") as caught:
        processor.process_chat([{"role": "user", "content": "word " * 100}])
    assert caught.value.param == "messages"


def test_prompts_that_fill_the_context_are_refused_with_both_numbers(processor: Processor) -> None:
    assert str(refused(processor, [7] * 9120)) == "prompt has 9,120 tokens; the model's context is 64"
    assert "prompt has 64 tokens; the model's context is 64" in str(refused(processor, [7] * CONTEXT))
    assert processor.process([7] * (CONTEXT - 1)).params.max_tokens == 1


def test_a_huge_text_is_refused_without_being_tokenized(processor: Processor) -> None:
    assert "characters" in str(refused(processor, "x " * 5_000_000))


@pytest.mark.parametrize("prompt", ["", [], {"prompt_token_ids": []}, {"text": "x"}, None, 5, [1, "2"], [1.0], [True]])
def test_prompts_of_no_or_wrong_content_are_refused(processor: Processor, prompt: object) -> None:
    assert refused(processor, prompt).param == "prompt"


def test_a_lone_surrogate_is_refused_wherever_it_stands(processor: Processor) -> None:
    assert "surrogate at character 2" in str(refused(processor, "ab\ud800"))
    assert refused(processor, "ab", stop=["\udfff"]).param == "stop"
    with pytest.raises(InvalidParameter) as caught:
        processor.process_chat([{"role": "user", "content": "\ud800"}])
    assert caught.value.param == "messages"
    with pytest.raises(InvalidParameter) as caught:
        processor.process("ab", cache_salt="\ud800")
    assert caught.value.param == "cache_salt"


@pytest.mark.parametrize(
    ("field", "prompt", "params"),
    [
        ("prompt", [5, 49_152], {}),
        ("prompt", [5, -1], {}),
        ("prompt", [2**70], {}),
        ("logit_bias", [5], {"logit_bias": {49_152: 1.0}}),
        ("stop_token_ids", [5], {"stop_token_ids": [49_152]}),
    ],
)
def test_token_ids_outside_of_the_vocabulary_are_refused(
    processor: Processor, field: str, prompt: list[int], params: dict[str, object]
) -> None:
    error = refused(processor, prompt, **params)
    assert error.param == field
    assert "0 to 49,151" in str(error)


def test_more_logprobs_than_the_engine_gives_are_refused(processor: Processor) -> None:
    assert refused(processor, [5], logprobs=6).param == "logprobs"
    assert refused(processor, [5], prompt_logprobs=6).param == "prompt_logprobs"
    assert processor.process([5], SamplingParams(logprobs=5)).params.logprobs == 5


def test_limits_are_cut_to_what_the_context_leaves(processor: Processor) -> None:
    prompt = [7] * (CONTEXT - 10)
    assert processor.process(prompt, SamplingParams(max_tokens=None)).params.max_tokens == 10
    assert processor.process(prompt, SamplingParams(max_tokens=3)).params.max_tokens == 3
    cut = processor.process(prompt, SamplingParams(max_tokens=100, min_tokens=50))
    assert (cut.params.max_tokens, cut.params.min_tokens) == (10, 10)
    assert cut.children[0].params == cut.params


def test_limits_beyond_the_context_are_refused_where_that_is_asked_for(
    model: ModelConfig, tokenizer: Tokenizer
) -> None:
    strict = Processor(model, tokenizer, block_size=4, max_logprobs=5, refuse_excess_max_tokens=True)
    error = refused(strict, [7] * 60, max_tokens=5)
    assert (error.param, "leaves 4 of" in str(error)) == ("max_tokens", True)
    assert refused(strict, [7] * 60, max_tokens=None, min_tokens=5).param == "min_tokens"
    assert strict.process([7] * 60, SamplingParams(max_tokens=None)).params.max_tokens == 4


def test_seeds_are_drawn_anew_or_mapped_to_64_bits(processor: Processor) -> None:
    seeds = {processor.process([5]).children[0].seed for _ in range(20)}
    assert len(seeds) == 20
    assert max(seeds) >= 2**32
    assert processor.process([5], SamplingParams(seed=-1)).children[0].seed == 2**64 - 1


def test_n_completions_are_children_with_own_seeds_and_one_prompt(processor: Processor) -> None:
    processed = processor.process([5, 6], SamplingParams(n=3, seed=9, prompt_logprobs=1), request_id="r")
    assert [child.request_id for child in processed.children] == ["r-0", "r-1", "r-2"]
    assert [child.seed for child in processed.children] == [child_seed(9, index) for index in range(3)]
    assert [child.params.prompt_logprobs for child in processed.children] == [1, None, None]
    assert {child.params.n for child in processed.children} == {1}
    assert processed.params.n == 3
    assert [child.request_id for child in processor.process([5], request_id="r").children] == ["r"]


def test_block_hashes_are_those_that_the_engine_computes(processor: Processor, model: ModelConfig) -> None:
    prompt = list(range(10, 21))
    plain = processor.process(prompt).children[0]
    salted = processor.process(prompt, cache_salt="mine").children[0]
    root = root_hash(model, 4)
    assert plain.block_hashes == tuple(hash_blocks(prompt, 4, root))
    assert len(plain.block_hashes) == 2
    assert salted.extra_keys == (ExtraKey("salt", "mine"),)
    assert salted.block_hashes == tuple(hash_blocks(prompt, 4, root, salted.extra_keys))
    assert not set(salted.block_hashes) & set(plain.block_hashes)


@pytest.mark.parametrize("salt", ["", 5])
def test_a_salt_that_is_no_text_is_refused(processor: Processor, salt: object) -> None:
    with pytest.raises(InvalidParameter) as caught:
        processor.process([5], cache_salt=salt)  # type: ignore[typeddict-item]
    assert caught.value.param == "cache_salt"


def test_the_models_own_defaults_hold_where_no_params_are_given(model: ModelConfig, tokenizer: Tokenizer) -> None:
    model = dataclasses.replace(model, generation_defaults={"temperature": 0.25, "top_k": 7})
    params = Processor(model, tokenizer, block_size=4, max_logprobs=5).process([5]).params
    assert (params.temperature, params.top_k, params.top_p) == (0.25, 7, 1.0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
TEXT = st.text(st.characters(codec=None, categories=None), max_size=30)  # surrogates included
MESSAGE = st.fixed_dictionaries({"role": TEXT | JSON, "content": TEXT | JSON})


def blamed(call: Callable[[], object]) -> str | None:
    """The field that a refusal names."""
    try:
        call()
    except InvalidParameter as error:
        return error.param
    return None


@given(prompt=JSON | TEXT | st.lists(st.integers()))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_prompt_crashes_it(processor: Processor, prompt: object) -> None:
    assert blamed(lambda: processor.process(prompt)) in (None, "prompt")  # type: ignore[arg-type]


@given(messages=JSON | st.lists(MESSAGE, max_size=3), tools=st.none() | st.lists(JSON, max_size=2), variables=JSON)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_chat_crashes_it(processor: Processor, messages: object, tools: object, variables: object) -> None:
    blame = blamed(lambda: processor.process_chat(messages, tools=tools, chat_template_kwargs=variables))  # type: ignore[arg-type]
    assert blame in (None, "messages", "chat_template_kwargs")
