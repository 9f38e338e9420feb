"""The engine against transformers, with the demo model's real weights in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine import LLM, SamplingParams
from tests.engine.questions import questions

MAX_TOKENS = 64
TIE = 1e-4


@pytest.fixture(scope="module")
def reference(demo_folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(demo_folder: Path) -> Iterator[LLM]:
    with LLM(str(demo_folder), dtype="float32", max_model_len=1024) as llm:
        yield llm


def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocab] in float32."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def test_greedy_tokens_equal_the_reference(llm: LLM, reference: PreTrainedModel) -> None:
    chats = [[{"role": "user", "content": question}] for question in questions(20)]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    outputs = llm.chat(chats, params, use_tqdm=False)
    ends = set(llm.model_config.eos_token_ids)
    for output in outputs:
        prompt, generated = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(generated) == MAX_TOKENS or generated[-1] in ends
        # One pass over prompt and output gives the reference's choice at every place, given the same tokens before it.
        logits = reference_logits(reference, prompt + generated)[len(prompt) - 1 : -1]
        best = logits.topk(2)
        for place, token in enumerate(generated):
            if token != int(best.indices[place, 0]):
                gap = float(best.values[place, 0] - best.values[place, 1])
                assert gap < TIE, f"token {place} of {output.prompt!r}"
                assert token == int(best.indices[place, 1])


def test_prompt_logprobs_equal_the_reference(llm: LLM, reference: PreTrainedModel) -> None:
    for question in questions(20)[:6]:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2, logprobs=2)
        output = llm.generate([question], params, use_tqdm=False)[0]
        expected = reference_logits(reference, output.prompt_token_ids).log_softmax(-1)
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        for place, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry is not None
            assert output.prompt_token_ids[place + 1] in entry
            for token, logprob in entry.items():
                assert logprob.logprob == pytest.approx(float(expected[place, token]), abs=1e-4)
        assert output.outputs[0].logprobs is not None
        for token, logprob in output.outputs[0].logprobs[0].items():
            assert logprob.logprob == pytest.approx(float(expected[-1, token]), abs=1e-4)


def test_answers_as_the_real_model_does(llm: LLM) -> None:
    output = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        SamplingParams(temperature=0.0, max_tokens=32),
        use_tqdm=False,
    )[0]
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
