"""Models, and how their weights are found and loaded."""

from engine.models.checkpoint import CheckpointError
from engine.models.decoder import DecoderForCausalLM
from engine.models.loader import load_model

__all__ = ["CheckpointError", "DecoderForCausalLM", "load_model"]
