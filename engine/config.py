"""What an engine is told, and what it learned of its model: frozen, validated values.

This is the only module of the engine that reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from engine.sampling_params import InvalidParameter

DType = Literal["float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
CpuKernels = Literal["auto", "avx512_bf16", "avx512", "avx2", "portable", "torch"]
GpuKernels = Literal["auto", "triton", "torch"]
KVCacheDType = Literal["auto", "fp8"]
Quantization = Literal["int8", "int8_w8a8"]
SchedulingPolicy = Literal["fcfs", "priority"]

GIB = 1 << 30
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
FP8_SCALE_BYTES = 4
"""Of the scale that a token's key, or value, has in each head."""
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


def cache_folder() -> Path:
    """Where models and built artefacts are kept: MANTA_CACHE, else manta/ in the user's cache folder."""
    if chosen := os.environ.get("MANTA_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manta"


def available_threads() -> int:
    """Cores that this process may run on, bounded by OMP_NUM_THREADS where it is set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(limit)) if limit.isdigit() and int(limit) > 0 else cores


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The arguments of an engine; names that vLLM users know mean what they know.

    Attributes:
        model: `demo`, a folder, a `.gguf` file or a hub id.
        revision: branch, tag or commit of a hub model.
        load_format: where weights come from; `dummy` draws small random ones.
        dtype: of weights and activations; `auto` is the checkpoint's, float32 where it names none.
        device: `auto` takes a GPU where there is one.
        max_model_len: longest prompt plus output, in tokens; None is the model's own limit.
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: most tokens in one step.
        block_size: tokens in a KV block.
        kv_cache_memory_bytes: memory for KV blocks; None is 1 GiB on a CPU, and on a GPU follows from
            gpu_memory_utilization.
        gpu_memory_utilization: share of a GPU's memory that the engine may fill.
        num_kv_blocks: this many blocks, whatever the memory.
        kv_cache_dtype: of keys and values; `auto` is the model's, `fp8` (e4m3 with a scale for each token and head)
            holds nearly twice as many in the same memory, on GPUs of compute capability 8.9 or newer.
        enable_prefix_caching: reuse the blocks of equal prefixes.
        scheduling_policy: `fcfs`, or `priority` (a lower number runs first, then arrival).
        async_scheduling: schedule a step while the one before it runs; None does so on a GPU alone.
        max_logprobs: most alternatives a request may ask for.
        refuse_excess_max_tokens: refuse a max_tokens that the context cannot hold, where otherwise it is cut to it.
        seed: of dummy weights.
        num_threads: CPU threads of a step; None is what the process may use.
        cpu_kernels: instruction set of the C++ kernels on a CPU; `auto` is the best that the processor has, `torch`
            does without them.
        gpu_kernels: `auto` takes the Triton kernels on a GPU, `torch` does without them; `triton` on a CPU runs them in
            Triton's interpreter, which is for tests and needs TRITON_INTERPRET=1 in the environment.
        enforce_eager: do without CUDA graphs on a GPU; slower steps, but a quicker start and less memory.
        quantization: of dense weights, at load, on a CPU: `int8` is of weights alone, `int8_w8a8` of activations too.
        debug_integrity: check all bookkeeping whenever the engine is idle.
    """

    model: str
    revision: str | None = None
    load_format: LoadFormat = "auto"
    dtype: DType | Literal["auto"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    num_kv_blocks: int | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    enable_prefix_caching: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    async_scheduling: bool | None = None
    max_logprobs: int = 20
    refuse_excess_max_tokens: bool = False
    seed: int = 0
    num_threads: int | None = None
    cpu_kernels: CpuKernels = "auto"
    gpu_kernels: GpuKernels = "auto"
    enforce_eager: bool = False
    quantization: Quantization | None = None
    debug_integrity: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise InvalidParameter.of("model", self.model, "must be 'demo', a folder, a .gguf file or a hub id")
        _choice("load_format", self.load_format, get_args(LoadFormat))
        _choice("dtype", self.dtype, ("auto", *get_args(DType)))
        _choice("device", self.device, ("auto", "cpu", "cuda"))
        _choice("cpu_kernels", self.cpu_kernels, get_args(CpuKernels))
        _choice("gpu_kernels", self.gpu_kernels, get_args(GpuKernels))
        _choice("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheDType))
        if self.quantization is not None:
            _choice("quantization", self.quantization, get_args(Quantization))
            for name, value in (
                ("device", "cuda"),
                ("cpu_kernels", "torch"),
                ("gpu_kernels", "triton"),
                ("dtype", "float16"),
                ("kv_cache_dtype", "fp8"),
            ):
                if getattr(self, name) == value:
                    rule = f"needs the C++ kernels of a CPU, which {name}={value!r} rules out"
                    raise InvalidParameter.of("quantization", self.quantization, rule)
        if self.kv_cache_dtype == "fp8" and self.gpu_kernels != "triton":
            for name, value in (("gpu_kernels", "torch"), ("device", "cpu")):
                if getattr(self, name) == value:
                    rule = f"needs the Triton kernels of a GPU, which {name}={value!r} rules out"
                    raise InvalidParameter.of("kv_cache_dtype", self.kv_cache_dtype, rule)
        _choice("scheduling_policy", self.scheduling_policy, get_args(SchedulingPolicy))
        if self.revision is not None and not isinstance(self.revision, str):
            raise InvalidParameter.of("revision", self.revision, "must be a branch, tag or commit, as text")
        for name in ("enable_prefix_caching", "refuse_excess_max_tokens", "enforce_eager", "debug_integrity"):
            _true_or_false(name, getattr(self, name))
        if self.async_scheduling is not None:
            _true_or_false("async_scheduling", self.async_scheduling)
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_model_len", "kv_cache_memory_bytes", "num_kv_blocks", "num_threads"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        _at_least("max_logprobs", self.max_logprobs, 0)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidParameter.of("seed", self.seed, "must be a whole number")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise InvalidParameter.of("gpu_memory_utilization", share, "must be a number above 0 and at most 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidParameter.of(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"must be at least max_num_seqs, which is {self.max_num_seqs}, so that every request can decode",
            )

    @classmethod
    def from_args(cls, model: str, engine_args: Mapping[str, Any]) -> EngineConfig:
        """The config of keyword arguments.

        Raises:
            InvalidParameter: an argument is unknown or out of range.
        """
        known = [f.name for f in fields(cls)]
        for name in engine_args:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise InvalidParameter(name, f"unknown engine argument {name!r}; {hint}")
        return cls(model=model, **engine_args)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding of a model.

    Attributes:
        theta: base of the frequencies.
        rope_type: one of ROPE_TYPES.
        scaling: the scaling's own numbers as the checkpoint names them (factor, low_freq_factor, …).
    """

    theta: float = 10_000.0
    rope_type: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the engine has to know of a model; made by `engine.hub.load_model_config`.

    Attributes:
        name: as the user named it; with revision, dtypes, quantization and block size the root of block hashes.
        path: the folder (or the .gguf file) that holds it.
        architecture: transformers' class name, `LlamaForCausalLM`.
        max_model_len: longest prompt plus output in tokens that this engine serves.
        quantization: of dense weights; keys and values follow from it.
        kv_cache_dtype: of keys and values; `auto` is dtype.
        head_dim: of queries, keys and values.
        sliding_window: keys that a token sees in a layer, itself included; None sees all. One entry a layer.
        qk_norm: queries and keys are RMS-normed per head before the rotation.
        eos_token_ids: the union of what generation_config, config and tokenizer name.
        generation_defaults: of sampling, from generation_config.json, under SamplingParams' names.
    """

    name: str
    path: Path
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    dtype: DType
    quantization: Quantization | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    revision: str | None = None
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: tuple[int | None, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block over all layers."""
        vector = self.head_dim * DTYPE_BYTES[self.dtype]
        if self.kv_cache_dtype == "fp8":
            vector = self.head_dim + FP8_SCALE_BYTES
        return 2 * self.num_layers * self.num_kv_heads * vector * block_size


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidParameter.of(name, value, f"must be one of {', '.join(allowed)}")


def _true_or_false(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidParameter.of(name, value, "must be true or false")


def _at_least(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InvalidParameter.of(name, value, f"must be a whole number, {low} or more")
