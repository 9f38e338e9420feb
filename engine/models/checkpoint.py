"""Where weights come from: each source gives (name, tensor) pairs, one after another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from engine.layers.weight import Placement, Weights
from engine.sampling_params import InvalidParameter

Tensors = Iterator[tuple[str, Tensor]]

INDEX = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A checkpoint does not fit the model that its config describes."""


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a model folder, in order: one file, or the shards that an index names.

    Raises:
        InvalidParameter: there are none; a folder of pickles (.bin, .pth) is refused, since those may run code.
        CheckpointError: the index is damaged, or a shard of it is not there.
    """
    if (folder / INDEX).is_file():
        try:
            shards = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{folder / INDEX} is damaged: {type(error).__name__}: {error}") from error
        for shard in shards:
            # A shard is a file of this folder: an index must not lead elsewhere.
            if Path(str(shard)).name != shard or not (folder / shard).is_file():
                raise CheckpointError(f"{INDEX} names {shard}, which is not in {folder}")
        return [folder / shard for shard in shards]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if files := sorted(folder.glob("*.safetensors")):
        return files
    if pickles := sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern)):
        raise InvalidParameter(
            "model", f"{folder} holds pickled weights ({pickles[0]}), which may run code; convert them to safetensors"
        )
    raise InvalidParameter("model", f"{folder} holds no weights: no *.safetensors and no .gguf file")


def read_safetensors(folder: Path) -> Tensors:
    """Tensors of a model folder; each is read from its file when its turn comes, and is valid until the next."""
    from safetensors import SafetensorError, safe_open

    for path in safetensors_files(folder):
        try:
            file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        with file:
            for name in file.keys():  # noqa: SIM118 (the file is no mapping)
                yield name, file.get_tensor(name)


def read_gguf(path: Path, dtype: torch.dtype) -> Tensors:
    """Dequantised tensors of a .gguf file, under transformers' names, which also undoes llama.cpp's permutations."""
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
    )
    tensors = model.state_dict()
    del model
    for name in list(tensors):
        yield name, tensors.pop(name)


def draw_dummy(weights: Weights, placement: Placement, seed: int) -> Tensors:
    """Small random tensors, the same for a name, seed and kind of device; norms stay near 1."""
    for name, weight in weights.items():
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator(placement.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        noise = torch.randn(weight.shape, generator=generator, device=placement.device, dtype=torch.float32)
        yield name, 1.0 + 0.1 * noise if name.endswith("norm.weight") else 0.02 * noise
