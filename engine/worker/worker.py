"""One rank: a device, its share of the model and of the KV blocks."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from engine.attention.cpu_attention import CpuAttention
from engine.attention.torch_attention import TorchAttention
from engine.config import GIB, EngineConfig, ModelConfig, available_threads, cache_folder
from engine.layers.operations import Kernels
from engine.layers.weight import Packing
from engine.models import DecoderForCausalLM, load_model
from engine.outputs import SampledStep, SchedulerOutput
from engine.protocols import AttentionBackend, Heads, KVCache
from engine.sampling.host_sampler import HostSampler
from engine.sampling_params import InvalidParameter
from engine.worker.cpu_kernels import PACKINGS, load_cpu_kernels
from engine.worker.gpu_kernels import num_multiprocessors, use_gpu_kernels
from engine.worker.gpu_memory import check_room, out_of_memory_explained
from engine.worker.model_input import HostBuffers
from engine.worker.model_runner import PROMPT_LOGPROB_ROWS, ModelRunner, StepInFlight
from engine.worker.step_plan import StepPlan
from engine.worker.warm_up import warm_up_steps

if TYPE_CHECKING:
    from engine.worker.gpu_setup import GpuSetup

logger = logging.getLogger(__name__)

CPU_KV_CACHE_BYTES = GIB


class Worker:
    """Loads the model onto a device and runs steps there. Touched on one thread alone.

    Raises:
        InvalidParameter: the device that was asked for is not there, lacks what was asked of it, or is too small.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        self._config = config
        self._model_config = model_config
        self.device = _select_device(config.device)
        if config.quantization is not None and self.device.type != "cpu":
            rule = f"needs the C++ kernels of a CPU; the device is {self.device}"
            raise InvalidParameter.of("quantization", config.quantization, rule)
        torch.set_num_threads(config.num_threads or available_threads())
        self._setup: GpuSetup | None = None
        if use_gpu_kernels(
            config.gpu_kernels,
            model_config,
            block_size=config.block_size,
            kv_cache_dtype=config.kv_cache_dtype,
            device=self.device,
        ):
            self._load_on_gpu()
        else:
            self._load_on_host()

    def _load_on_host(self) -> None:
        """With the C++ kernels where they can be had, else with torch's, which run on any device."""
        config, model_config = self._config, self._model_config
        kernels = None
        if self.device.type == "cpu":
            kernels = load_cpu_kernels(
                config.cpu_kernels,
                model_config,
                block_size=config.block_size,
                num_threads=config.num_threads or available_threads(),
                cache_folder=cache_folder() / "kernels",
                quantization=config.quantization,
            )
        self._attention: AttentionBackend = CpuAttention(kernels) if kernels else TorchAttention()
        self._model = self._load(self._attention, packing=PACKINGS[config.quantization] if kernels else None)
        buffers = HostBuffers(**self._sizes, device=self.device)
        sampler = HostSampler(config.max_num_seqs, model_config.vocab_size, kernels)
        self._runner = ModelRunner(self._attention, buffers, sampler, device=self.device)

    def _load_on_gpu(self) -> None:
        # They import Triton, which only a GPU's worker needs.
        from engine.attention.triton_attention import TritonAttention
        from engine.sampling.device_sampler import DeviceSampler
        from engine.worker.device_buffers import DeviceBuffers
        from engine.worker.gpu_setup import GpuSetup

        config, model_config = self._config, self._model_config
        if self._fills_gpu:
            check_room(self.device, config.gpu_memory_utilization)
        self._attention = TritonAttention(
            num_sms=num_multiprocessors(self.device), fp8=model_config.kv_cache_dtype == "fp8"
        )
        with out_of_memory_explained("load", self.device):
            self._model = self._load(self._attention, kernels="triton")
            buffers = DeviceBuffers(**self._sizes, device=self.device)
            sampler = DeviceSampler(config.max_num_seqs, model_config.vocab_size, self.device)
        self._runner = ModelRunner(self._attention, buffers, sampler, device=self.device)
        self._setup = GpuSetup(
            self._model,
            self._attention,
            buffers,
            sampler,
            self._new_kv_caches,
            vocab_size=model_config.vocab_size,
            dtype=getattr(torch, model_config.dtype),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_logprobs=config.max_logprobs,
            enforce_eager=config.enforce_eager,
            device=self.device,
        )

    @property
    def _sizes(self) -> dict[str, int]:
        return {
            "max_num_seqs": self._config.max_num_seqs,
            "max_model_len": self._model_config.max_model_len,
            "max_num_batched_tokens": self._config.max_num_batched_tokens,
            "block_size": self._config.block_size,
        }

    @property
    def _fills_gpu(self) -> bool:
        """Whether the number of KV blocks follows from what a GPU has left."""
        chosen = self._config.num_kv_blocks or self._config.kv_cache_memory_bytes
        return self.device.type == "cuda" and chosen is None

    def _load(
        self, attention: AttentionBackend, *, packing: Packing | None = None, kernels: Kernels = "torch"
    ) -> DecoderForCausalLM:
        with torch.inference_mode():
            return load_model(
                self._model_config,
                load_format=self._config.load_format,
                device=self.device,
                attention=attention,
                seed=self._config.seed,
                packing=packing,
                kernels=kernels,
            )

    def kv_blocks_that_fit(self) -> int:
        """Blocks that kv_cache_memory_bytes holds; on a GPU without it, what gpu_memory_utilization leaves.

        Raises:
            InvalidParameter: the machine has not as much memory free as kv_cache_memory_bytes says, or the GPU has none
                left.
        """
        block_bytes = self._model_config.kv_block_bytes(self._config.block_size)
        if self._fills_gpu:
            return self._gpu_memory_left() // block_bytes
        chosen = self._config.kv_cache_memory_bytes
        memory = CPU_KV_CACHE_BYTES if chosen is None else chosen
        available = _available_memory(self.device)
        if available is not None and memory > available:
            raise InvalidParameter.of(
                "kv_cache_memory_bytes", memory, f"must be less than the memory that is free, {available:,} bytes"
            )
        return memory // block_bytes

    def _gpu_memory_left(self) -> int:
        if self._setup is not None:
            return self._setup.profile().kv_bytes(self._config.gpu_memory_utilization)
        free, total = torch.cuda.mem_get_info(self.device)
        return max(int(total * self._config.gpu_memory_utilization) - (total - free), 0)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Reserves the blocks; on a CPU the pages are touched only when they are first written."""
        with out_of_memory_explained("kv_cache", self.device):
            kv_caches = self._new_kv_caches(num_blocks)
        if self._setup is not None:
            self._runner.bind(self._model, kv_caches, self._setup.capture(kv_caches))
            if self.device.type == "cuda":
                self._warm_up(self._setup, num_blocks)
        elif isinstance(self._attention, CpuAttention):
            self._runner.bind(self._plan(self._attention, kv_caches), kv_caches)
        else:
            self._runner.bind(self._model, kv_caches)
        logger.info(
            "kv_cache blocks=%d tokens=%d bytes=%d device=%s",
            num_blocks,
            num_blocks * self._config.block_size,
            num_blocks * self._model_config.kv_block_bytes(self._config.block_size),
            self.device,
        )

    def submit(self, work: SchedulerOutput) -> StepInFlight:
        """Begins a step. On a CPU it is done when this returns; on a GPU the next one may begin meanwhile."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # which is the calling thread's own matter
        return self._runner.submit(work)

    def execute(self, work: SchedulerOutput) -> list[SampledStep]:
        """Runs a step to its end."""
        return self.submit(work).result()

    def reset(self) -> None:
        self._runner.reset()

    def shutdown(self) -> None:
        """Gives the memory back; the worker is of no use then."""
        del self._runner, self._model, self._attention
        self._setup = None
        if self.device.type == "cuda":
            gc.collect()  # graphs and what they were captured from hold each other
            torch.cuda.empty_cache()

    def _warm_up(self, setup: GpuSetup, num_blocks: int) -> None:
        """Has all kernels compiled; Triton keeps them from one start to the next."""
        block_size = self._config.block_size
        room = min(self._model_config.max_model_len, self._config.max_num_batched_tokens, num_blocks * block_size)
        with out_of_memory_explained("kv_cache", self.device):
            for work in tqdm(list(warm_up_steps(block_size, room)), desc="Compiling kernels", unit="step"):
                self.execute(work)
            setup.lone_decode()
        self.reset()

    def _new_kv_caches(self, num_blocks: int) -> list[KVCache]:
        model = self._model_config
        heads = Heads(model.num_heads, model.num_kv_heads, model.head_dim)
        dtype = getattr(torch, model.dtype)
        return [
            self._attention.new_kv_cache(num_blocks, self._config.block_size, heads, dtype, self.device)
            for _ in range(model.num_layers)
        ]

    def _plan(self, attention: CpuAttention, kv_caches: list[KVCache]) -> StepPlan:
        # The kernels' threads have the cores; torch's own would wait for work in the way of them.
        torch.set_num_threads(1)
        return StepPlan(
            self._model,
            kv_caches,
            attention,
            dtype=getattr(torch, self._model_config.dtype),
            max_tokens=self._config.max_num_batched_tokens,
            max_rows=max(self._config.max_num_seqs, PROMPT_LOGPROB_ROWS),
        )


def _available_memory(device: torch.device) -> int | None:
    """Bytes that a GPU can give, or Linux without swapping; None on other systems."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
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
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)
