"""Models of well-known shapes with random weights, as folders that both transformers and the engine load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

END = "</s>"


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder's sizes, under transformers' names.

    Attributes:
        architecture: transformers' class of the model.
        rope: its rope_parameters.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    rope: tuple[tuple[str, Any], ...]
    max_position_embeddings: int = 8192

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of all layers: what a token's products go through."""
        heads = self.num_attention_heads + self.num_key_value_heads
        attention = 2 * self.hidden_size * heads * self.head_dim
        return self.num_hidden_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_parameters(self) -> int:
        """Of the output's matrix, whether or not it is also the table of embeddings."""
        return self.vocab_size * self.hidden_size

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that keys and values of one token are, over all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    def hf_config(self) -> Any:
        """transformers' config; no token ends a sequence."""
        import transformers

        sizes = {name: getattr(self, name) for name in self.__slots__ if name not in ("architecture", "rope")}
        config_class = getattr(transformers, self.architecture).config_class
        return config_class(
            **sizes,
            rope_parameters=dict(self.rope),
            architectures=[self.architecture],
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            dtype="bfloat16",
        )


LLAMA_1B = Shape(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    tie_word_embeddings=True,
    rope=(
        ("rope_type", "llama3"),
        ("rope_theta", 500_000.0),
        ("factor", 32.0),
        ("low_freq_factor", 1.0),
        ("high_freq_factor", 4.0),
        ("original_max_position_embeddings", 8192),
    ),
    max_position_embeddings=131_072,
)
"""Llama-3.2-1B."""

LLAMA_8B = replace(
    LLAMA_1B,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    head_dim=128,
    tie_word_embeddings=False,
    rope=(("rope_type", "default"), ("rope_theta", 500_000.0)),
    max_position_embeddings=8192,
)
"""Llama-3-8B."""

QWEN3_600M = Shape(
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
    rope=(("rope_type", "default"), ("rope_theta", 1_000_000.0)),
    max_position_embeddings=40_960,
)
"""Qwen3-0.6B."""


def tiny(shape: Shape) -> Shape:
    """The same architecture, small enough for an interpreter."""
    return replace(
        shape,
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope=tuple((name, 64 if name.startswith("original") else value) for name, value in shape.rope),
    )


def write_folder(folder: Path, shape: Shape) -> Path:
    """A folder with config and tokenizer, for `load_format="dummy"`."""
    folder.mkdir(parents=True, exist_ok=True)
    shape.hf_config().save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def save_model(folder: Path, shape: Shape, device: torch.device, seed: int = 0) -> Any:
    """transformers' model in float32 on the device, with the random weights that folder then holds.

    The weights are large enough for attention to tell tokens apart, so that what a model says depends on all of them.
    Its attention is plain products, which float32 computes as such.
    """
    import transformers

    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            shape.hf_config(), dtype=torch.float32, attn_implementation="eager"
        ).eval()
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=device)
            parameter.copy_(1.0 + 0.2 * noise if "norm" in name else 1.5 * noise * shape.hidden_size**-0.5)
    write_folder(folder, shape)
    model.save_pretrained(folder)
    return model


def _write_tokenizer(folder: Path) -> None:
    """One token for each byte and an end of sequence; ids beyond them have no text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: index for index, character in enumerate(characters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True)])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END).save_pretrained(folder)
