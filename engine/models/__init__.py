"""Models, and how their weights are found and loaded."""

from engine.models.decoder import DecoderForCausalLM
from engine.models.loader import CheckpointError, load_model

__all__ = ["CheckpointError", "DecoderForCausalLM", "load_model"]
