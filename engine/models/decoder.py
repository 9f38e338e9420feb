"""The dense decoder: Llama, Mistral, Qwen2 and Qwen3 differ in what ModelConfig says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from engine.config import ModelConfig
from engine.layers.activation import SiluAndMul
from engine.layers.attention import Angles, Attention
from engine.layers.embedding import Embedding, TiedEmbedding
from engine.layers.linear import Linear
from engine.layers.norm import QueryKeyNorm, RMSNorm
from engine.layers.recorder import StepRecorder
from engine.layers.rotary import RotaryEmbedding
from engine.layers.weight import Placement, Weight, Weights
from engine.protocols import AttentionBackend, Heads, KVCache

Keep = Callable[[Any], Any]
"""Takes rows of all tokens to those that are still needed."""


class SelfAttention:
    """Grouped-query attention with rotary positions."""

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        sliding_window: int | None,
        placement: Placement,
    ) -> None:
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._qkv_proj = Linear(
            config.hidden_size,
            {"q_proj": queries, "k_proj": keys, "v_proj": keys},
            bias=config.attention_bias,
            placement=placement,
        )
        self._o_proj = Linear(
            queries, {"o_proj": config.hidden_size}, bias=config.attention_output_bias, placement=placement
        )
        self._norm = QueryKeyNorm(config.head_dim, config.rms_norm_eps, placement=placement) if config.qk_norm else None
        self._attention = Attention(
            backend,
            Heads(config.num_heads, config.num_kv_heads, config.head_dim),
            norm=self._norm,
            sliding_window=sliding_window,
        )

    def weights(self, prefix: str) -> Weights:
        norm = self._norm.weights(prefix) if self._norm else {}
        return self._qkv_proj.weights(prefix) | self._o_proj.weights(prefix) | norm

    def __call__(self, x: Any, angles: Angles | None, kv_cache: KVCache, keep: Keep) -> Any:
        return self._o_proj(keep(self._attention(self._qkv_proj(x), angles, kv_cache)))


class GatedMLP:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self._gate_up_proj = Linear(
            hidden, {"gate_proj": inner, "up_proj": inner}, bias=bias, placement=placement, gated=True
        )
        self._silu_and_mul = SiluAndMul(placement.operations)
        self._down_proj = Linear(inner, {"down_proj": hidden}, bias=bias, placement=placement)

    def weights(self, prefix: str) -> Weights:
        return self._gate_up_proj.weights(prefix) | self._down_proj.weights(prefix)

    def __call__(self, x: Any) -> Any:
        return self._down_proj(self._silu_and_mul(self._gate_up_proj(x)))


class DecoderLayer:
    """Attention and MLP, each behind a norm that adds what came before it to the residual."""

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        sliding_window: int | None,
        placement: Placement,
    ) -> None:
        self._input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement=placement)
        self._attention = SelfAttention(config, backend, sliding_window, placement)
        self._post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement=placement)
        self._mlp = GatedMLP(config, placement)

    def weights(self, prefix: str) -> Weights:
        return (
            self._input_norm.weights(f"{prefix}input_layernorm.weight")
            | self._attention.weights(f"{prefix}self_attn.")
            | self._post_norm.weights(f"{prefix}post_attention_layernorm.weight")
            | self._mlp.weights(f"{prefix}mlp.")
        )

    def __call__(self, x: Any, residual: Any, angles: Angles | None, kv_cache: KVCache, keep: Keep) -> tuple[Any, Any]:
        x, residual = self._input_norm(x, residual)
        residual = keep(residual)
        x = self._attention(x, angles, kv_cache, keep)
        x, residual = self._post_norm(x, residual)
        return self._mlp(x), residual


class DecoderForCausalLM:
    """Token ids to hidden states to logits. Its weights are empty until all of `weights()` are loaded."""

    def __init__(self, config: ModelConfig, attention: AttentionBackend, placement: Placement) -> None:
        self._tied = config.tie_word_embeddings
        self._lm_head = Linear(config.hidden_size, {"lm_head": config.vocab_size}, bias=False, placement=placement)
        self._embedding: Embedding | TiedEmbedding = (
            TiedEmbedding(self._lm_head, config.hidden_size)
            if self._tied and placement.packing == "panels"
            else Embedding(config.vocab_size, config.hidden_size, placement.operations)
        )
        self._rotary = RotaryEmbedding(
            config.rope,
            head_dim=config.head_dim,
            max_model_len=config.max_model_len,
            device=placement.device,
        )
        windows = config.sliding_window or (None,) * config.num_layers
        self._layers = [
            DecoderLayer(config, attention, windows[index], placement) for index in range(config.num_layers)
        ]
        self._norm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement=placement)

    def weights(self) -> Weights:
        """The tensors of a checkpoint that the model is made of."""
        weights = self._embedding.weights("model.embed_tokens.weight")
        head = self._lm_head.weights("")
        if isinstance(self._embedding, TiedEmbedding):
            head = {}
        elif self._tied:
            # The head shares the table, unless it packs a copy in which rows cannot be looked up.
            ((name, table),) = weights.items()
            loads = (table.load, head["lm_head.weight"].load)
            weights = {name: Weight(table.shape, lambda tensor: [load(tensor) for load in loads])}
            head = {}
        weights |= head
        for index, layer in enumerate(self._layers):
            weights |= layer.weights(f"model.layers.{index}.")
        return weights | self._norm.weights("model.norm.weight")

    def forward(
        self, token_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], kept: Tensor | None = None
    ) -> Tensor:
        """Hidden states of a flat batch for which the attention backend was prepared.

        Args:
            token_ids, positions: integers [tokens].
            kv_caches: one entry a layer; the tokens' keys and values are written into it.
            kept: integers, ascending; the tokens whose hidden states are asked for. None is all of them. What the last
                layer does behind its attention is done for these alone.

        Returns:
            [kept tokens, hidden], normed.
        """
        keep: Keep = _identity if kept is None else lambda rows: rows.index_select(0, kept)
        return self._decode(token_ids, self._rotary.angles(positions), kv_caches, keep)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab], in the model's type."""
        logits: Tensor = self._lm_head(hidden)
        return logits

    def record(self, recorder: StepRecorder, kv_caches: list[KVCache]) -> Tensor:
        """Puts what `forward` does into a step plan; the buffer that will hold its result."""
        return self._decode(recorder.token_ids(), None, kv_caches, recorder.gather).rows

    def record_logits(self, recorder: StepRecorder, hidden: Tensor) -> Tensor:
        """Puts what `compute_logits` does into a plan; the buffer that will hold its result, in float32."""
        return self._lm_head(recorder.input(hidden)).float().rows

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What a recorded step needs beside the batch: see RotaryEmbedding."""
        return self._rotary.angles(positions)

    def _decode(self, token_ids: Any, angles: Angles | None, kv_caches: list[KVCache], keep: Keep) -> Any:
        x, residual = self._embedding(token_ids), None
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            x, residual = layer(x, residual, angles, kv_cache, keep if layer is self._layers[-1] else _identity)
        return self._norm(x, residual)[0]


def _identity(rows: Any) -> Any:
    return rows
