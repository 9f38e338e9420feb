"""One rank: a device, its share of the model and of the KV blocks."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from engine.attention import select_backend
from engine.attention.cpu_attention import CpuAttention
from engine.config import GIB, EngineConfig, ModelConfig, available_threads, cache_folder
from engine.models import KVCache, load_model
from engine.outputs import SampledStep, SchedulerOutput
from engine.sampling_params import InvalidParameter
from engine.worker.cpu_kernels import PACKINGS, load_cpu_kernels
from engine.worker.model_runner import PROMPT_LOGPROB_ROWS, CausalLM, ModelRunner
from engine.worker.step_plan import StepPlan

logger = logging.getLogger(__name__)

CPU_KV_CACHE_BYTES = GIB


class Worker:
    """Loads the model onto a device and runs steps there. Touched on one thread alone.

    Raises:
        InvalidParameter: the device that was asked for is not there.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        self._config = config
        self._model_config = model_config
        self.device = _select_device(config.device)
        if config.quantization is not None and self.device.type != "cpu":
            rule = f"needs the C++ kernels of a CPU; the device is {self.device}"
            raise InvalidParameter.of("quantization", config.quantization, rule)
        num_threads = config.num_threads or available_threads()
        torch.set_num_threads(num_threads)
        self._kernels = (
            load_cpu_kernels(
                config.cpu_kernels,
                model_config,
                block_size=config.block_size,
                num_threads=num_threads,
                cache_folder=cache_folder() / "kernels",
                quantization=config.quantization,
            )
            if self.device.type == "cpu"
            else None
        )
        self._attention = CpuAttention(self._kernels) if self._kernels else select_backend(self.device)
        with torch.inference_mode():
            self._model = load_model(
                model_config,
                load_format=config.load_format,
                device=self.device,
                attention=self._attention,
                seed=config.seed,
                packing=PACKINGS[config.quantization] if self._kernels else None,
            )
        self._runner = ModelRunner(
            self._attention,
            vocab_size=model_config.vocab_size,
            max_model_len=model_config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            device=self.device,
            kernels=self._kernels,
        )

    def kv_blocks_that_fit(self) -> int:
        """Blocks that kv_cache_memory_bytes holds; on a GPU without it, what gpu_memory_utilization leaves.

        Raises:
            InvalidParameter: the machine has not as much memory free as kv_cache_memory_bytes says.
        """
        block_bytes = self._model_config.kv_block_bytes(self._config.block_size)
        chosen = self._config.kv_cache_memory_bytes
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            room = int(total * self._config.gpu_memory_utilization) - (total - free)
            return max(chosen if chosen is not None else room, 0) // block_bytes
        memory = CPU_KV_CACHE_BYTES if chosen is None else chosen
        available = _available_memory()
        if available is not None and memory > available:
            raise InvalidParameter.of(
                "kv_cache_memory_bytes", memory, f"must be less than the memory that is free, {available:,} bytes"
            )
        return memory // block_bytes

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Reserves the blocks; on a CPU the pages are touched only when they are first written."""
        shape = self._attention.kv_cache_shape(
            num_blocks, self._config.block_size, self._model_config.num_kv_heads, self._model_config.head_dim
        )
        dtype = getattr(torch, self._model_config.dtype)
        kv_caches = [
            (torch.empty(shape, dtype=dtype, device=self.device), torch.empty(shape, dtype=dtype, device=self.device))
            for _ in range(self._model_config.num_layers)
        ]
        self._runner.bind(self._planned(kv_caches), kv_caches)
        logger.info(
            "kv_cache blocks=%d tokens=%d bytes=%d device=%s",
            num_blocks,
            num_blocks * self._config.block_size,
            num_blocks * self._model_config.kv_block_bytes(self._config.block_size),
            self.device,
        )

    def _planned(self, kv_caches: list[KVCache]) -> CausalLM:
        """The model itself, or the plan of its step where the C++ kernels run it."""
        if not isinstance(self._attention, CpuAttention):
            return self._model
        # Their threads have the cores; torch's own would wait for work in the way of them.
        torch.set_num_threads(1)
        return StepPlan(
            self._model,
            kv_caches,
            self._attention,
            dtype=getattr(torch, self._model_config.dtype),
            max_tokens=self._config.max_num_batched_tokens,
            max_rows=max(self._config.max_num_seqs, PROMPT_LOGPROB_ROWS),
        )

    def execute(self, work: SchedulerOutput) -> list[SampledStep]:
        return self._runner.execute(work)

    def reset(self) -> None:
        self._runner.reset()


def _available_memory() -> int | None:
    """Bytes that Linux can give without swapping; None on other systems."""
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.is_file() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _select_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidParameter.of("device", name, "there is no CUDA device; use 'cpu' or 'auto'")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
