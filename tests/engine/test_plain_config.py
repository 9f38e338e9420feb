"""Configs that the engine reads itself come out as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import engine.hub
from engine.config import ModelConfig
from engine.sampling_params import InvalidParameter
from tests.engine.test_hub import LLAMA, MISTRAL, QWEN2, QWEN3, load


@pytest.mark.parametrize(
    "raw", [LLAMA | {"rope_theta": 5e5}, QWEN2, QWEN3, MISTRAL, MISTRAL | {"sliding_window": None}]
)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "float64"},
        {"dtype": ["bfloat16"]},
        {"torch_dtype": "float16"},
        {"head_dim": 24},
        {"head_dim": None},
        {"num_key_value_heads": None},
        {"num_attention_heads": 6},
        {"hidden_act": "gelu"},
        {"vocab_size": "100"},
        {"vocab_size": 100.0},
        {"rms_norm_eps": 1},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"attention_bias": "no"},
        {"mlp_bias": True},
        {"sliding_window": 64},
        {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
        {"rope_theta": 7e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300}},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 3e5}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5, "partial_rotary_factor": 1.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 3e5, "factor": 2.0}},
        {"rope_parameters": None},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": None},
        {"partial_rotary_factor": 1.0},
        {"eos_token_id": [3, 4]},
        {"model_type": None},
        {"architectures": None},
    ],
    ids=str,
)
def test_configs_are_read_as_transformers_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: dict[str, Any], change: dict[str, Any]
) -> None:
    """Of configs as transformers writes them, whole and with each field left out in turn."""
    AutoConfig.for_model(**raw).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text()) | {"architectures": raw["architectures"]} | change

    def outcome(config: dict[str, Any]) -> ModelConfig | str:
        try:
            return load(tmp_path, config)
        except InvalidParameter as error:
            return str(error)

    fields = ["nothing", *saved] if change == {} else ["nothing"]
    configs = [{name: value for name, value in saved.items() if name != field} for field in fields]
    ours = [outcome(config) for config in configs]
    monkeypatch.setattr(engine.hub, "_plain_config", lambda raw: None)
    assert ours == [outcome(config) for config in configs]
