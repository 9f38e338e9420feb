"""Builds a model and fills it from a checkpoint, strictly."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from engine.config import LoadFormat, ModelConfig
from engine.layers.linear import packing_for
from engine.layers.operations import Kernels, operations_of
from engine.layers.weight import Packing, Placement, Weights
from engine.models.checkpoint import CheckpointError, Tensors, draw_dummy, read_gguf, read_safetensors
from engine.models.decoder import DecoderForCausalLM
from engine.models.registry import model_class
from engine.protocols import AttentionBackend
from engine.sampling_params import InvalidParameter

NAMED = 5
"""Tensors that an error names; it counts the rest."""

_REDUNDANT = re.compile(r"rotary_emb\.inv_freq$")
"""Tensors that old checkpoints hold and that follow from the config."""


def load_model(
    model_config: ModelConfig,
    *,
    load_format: LoadFormat,
    device: torch.device | str,
    attention: AttentionBackend,
    seed: int = 0,
    packing: Packing | None = None,
    kernels: Kernels = "torch",
) -> DecoderForCausalLM:
    """A model with its weights on the device. Call it, and the model, under torch.inference_mode.

    Tensors are read one by one: the peak is the model and its largest tensor, except for GGUF, which transformers
    dequantises as a whole. Every weight is held once, except that a quantised head, or one in oneDNN's layout, is a
    copy of the table that it is tied to.

    Args:
        load_format: `auto` takes GGUF for a .gguf file and safetensors for a folder; `dummy` reads nothing.
        seed: of dummy weights.
        packing: of the dense projections; None takes what is best for the layers' own calls.
        kernels: what the layers compute with.

    Raises:
        InvalidParameter: the architecture or the rotary scaling is not supported; there are no weights, or pickles.
        CheckpointError: a tensor is missing, not expected, or has another shape than the config says.
    """
    dtype, place = getattr(torch, model_config.dtype), torch.device(device)
    placement = Placement(dtype, place, packing or packing_for(dtype, place), operations_of(kernels))
    model = model_class(model_config.architecture)(model_config, attention, placement)
    weights = model.weights()
    tensors = _open(model_config, load_format, weights, placement, seed)
    redundant = {"lm_head.weight"} if model_config.tie_word_embeddings else set()
    _fill(weights, tensors, placement, redundant, source=str(model_config.path))
    return model


def _open(config: ModelConfig, load_format: LoadFormat, weights: Weights, placement: Placement, seed: int) -> Tensors:
    if load_format == "dummy":
        return draw_dummy(weights, placement, seed)
    is_gguf = config.path.suffix == ".gguf"
    if load_format == "gguf" and not is_gguf:
        raise InvalidParameter.of("model", str(config.path), "must be a .gguf file")
    if load_format == "safetensors" and is_gguf:
        raise InvalidParameter.of("model", str(config.path), "must be a folder that holds safetensors")
    return read_gguf(config.path, placement.dtype) if is_gguf else read_safetensors(config.path)


def _fill(weights: Weights, tensors: Tensors, placement: Placement, redundant: set[str], source: str) -> None:
    """Loads every weight exactly once."""
    left = dict(weights)
    unexpected = []
    for name, tensor in tensors:
        weight = left.pop(name, None)
        if weight is None:
            if name in weights:
                raise CheckpointError(f"{source} has the tensor {name} twice")
            if name not in redundant and not _REDUNDANT.search(name):
                unexpected.append(f"{name} {list(tensor.shape)}")
            continue
        if tuple(tensor.shape) != weight.shape:
            raise CheckpointError(
                f"tensor {name} of {source} has shape {list(tensor.shape)}; the config says {list(weight.shape)}"
            )
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise CheckpointError(f"tensor {name} of {source} is {tensor.dtype}; quantised weights are not supported")
        # A copy: the source's tensor may be a mapped file's.
        weight.load(tensor.to(device=placement.device, dtype=placement.dtype, copy=True))
    if left:
        missing = [f"{name} {list(weight.shape)}" for name, weight in left.items()]
        raise CheckpointError(f"{source} lacks {_some(missing)}")
    if unexpected:
        raise CheckpointError(f"{source} has tensors that the config does not account for: {_some(unexpected)}")


def _some(names: Sequence[str]) -> str:
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
