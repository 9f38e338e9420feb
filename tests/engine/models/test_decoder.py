"""Our models against transformers', in float32."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.engine.models.tiny import Runner, config_of, expected_logits, save_tiny

CLOSE = {"rtol": 0.0, "atol": 1e-5}
IDS = torch.randint(131, (75,), generator=torch.Generator().manual_seed(1)).tolist()

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
MODELS = {
    "llama": ("LlamaForCausalLM", {}),
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama odd sizes": ("LlamaForCausalLM", {"head_dim": 10, "intermediate_size": 77, "num_key_value_heads": 6}),
    "llama llama3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama linear": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "llama dynamic": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "qwen2 yarn": ("Qwen2ForCausalLM", {"rope_parameters": YARN}),
    "mistral window": ("MistralForCausalLM", {"sliding_window": 20}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2 window in some layers": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}),
    "qwen3 tied": ("Qwen3ForCausalLM", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
}


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    """A transformers model and the ModelConfig of its folder."""
    architecture, config = MODELS[request.param]
    folder = tmp_path_factory.mktemp("model")
    model = save_tiny(folder, architecture, **config)
    return model, config_of(folder)


@pytest.mark.parametrize("chunks", [[75], [30, 1, 17, 27], [1]], ids=["at once", "in chunks", "token by token"])
def test_logits_equal_transformers(saved, chunks):
    model, config = saved
    torch.testing.assert_close(Runner(config).logits(IDS, chunks), expected_logits(model, IDS), **CLOSE)


def test_requests_share_a_step_without_touching_each_other(saved):
    model, config = saved
    runner = Runner(config, num_requests=3)
    runner.step({0: IDS[:40], 1: IDS[5:20]})
    runner.step({0: IDS[40:44], 1: IDS[20:21], 2: IDS[30:60]})
    last = runner.step({1: IDS[21:22], 0: IDS[44:45], 2: IDS[60:61]})
    for request, ids in ((0, IDS[:45]), (1, IDS[5:22]), (2, IDS[30:61])):
        torch.testing.assert_close(last[request], expected_logits(model, ids)[-1:], **CLOSE)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_half_types_stay_close(saved, dtype, tolerance):
    model, config = saved
    logits = Runner(dataclasses.replace(config, dtype=dtype)).logits(IDS, [60, 1])
    expected = expected_logits(model, IDS)
    assert logits.dtype == getattr(torch, dtype)
    assert (logits - expected).norm() < tolerance * expected.norm()


def test_sampled_rows_alone_give_the_same_logits(saved):
    _, config = saved
    model = Runner(config).model
    with torch.inference_mode():
        hidden = torch.randn(9, config.hidden_size, generator=torch.Generator().manual_seed(0))
        every = model.compute_logits(hidden)
        torch.testing.assert_close(model.compute_logits(hidden[[7, 2]]), every[[7, 2]], **CLOSE)
        assert model.compute_logits(hidden[:0]).shape == (0, config.vocab_size)


def test_kept_tokens_alone_give_the_same_logits(saved):
    _, config = saved
    every = Runner(config, num_requests=2).flat_step({0: IDS[:40], 1: IDS[5:20]})
    for kept in ([39, 54], [3], []):
        indices = torch.tensor(kept, dtype=torch.int64)
        logits = Runner(config, num_requests=2).flat_step({0: IDS[:40], 1: IDS[5:20]}, indices)
        torch.testing.assert_close(logits, every[indices], **CLOSE)


def test_demo_model_equals_transformers(demo_folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32).eval()
    config = config_of(demo_folder, max_model_len=256)
    runner = Runner(config)
    ids = [504, 3575, 282, 4649, 314, 7042, 28, 284, 260, 3575, 282, 5560, 314] * 4
    expected = expected_logits(model, ids)
    logits = runner.logits(ids, [40, 3, 1])
    torch.testing.assert_close(logits, expected, rtol=0.0, atol=2e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
