"""Which class runs which architecture."""

from __future__ import annotations

from engine.models.decoder import DecoderForCausalLM
from engine.sampling_params import InvalidParameter

MODELS: dict[str, type[DecoderForCausalLM]] = {
    "LlamaForCausalLM": DecoderForCausalLM,
    "MistralForCausalLM": DecoderForCausalLM,
    "Qwen2ForCausalLM": DecoderForCausalLM,
    "Qwen3ForCausalLM": DecoderForCausalLM,
}
"""By transformers' class name, as config.json names it."""


def model_class(architecture: str) -> type[DecoderForCausalLM]:
    """
    Raises:
        InvalidParameter: no class runs it.
    """
    if architecture not in MODELS:
        raise InvalidParameter(
            "model", f"the architecture {architecture} is not supported; supported: {', '.join(MODELS)}"
        )
    return MODELS[architecture]
