"""Manta's inference engine: tokens in, tokens out.

What others use is exported here and imported when it is first named, so that the text side of a service, which needs
a few values only, loads neither the model code nor the device code.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine
    from engine.async_engine_core import AsyncEngineCore, EngineDeadError, EngineStalled
    from engine.config import EngineConfig, ModelConfig
    from engine.core import CoreStep, EngineCore
    from engine.kv_cache.block_hash import hash_block, hash_blocks, root_hash
    from engine.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
    from engine.llm import LLM
    from engine.outputs import CompletionOutput, EngineLoad, EngineOutput, Logprob, RequestOutput
    from engine.profiling.bookkeeping import bookkeeping_core
    from engine.profiling.startup import measure_startup
    from engine.profiling.step_profiler import StepProfiler, StepRecord
    from engine.request import EngineRequest, FinishReason
    from engine.sampling_params import InvalidParameter, SamplingParams

_HOME = {
    "LLM": "engine.llm",
    "AllBlocksCleared": "engine.kv_cache.events",
    "AsyncEngine": "engine.async_engine",
    "AsyncEngineCore": "engine.async_engine_core",
    "BlockRemoved": "engine.kv_cache.events",
    "BlockStored": "engine.kv_cache.events",
    "CompletionOutput": "engine.outputs",
    "CoreStep": "engine.core",
    "EngineConfig": "engine.config",
    "EngineCore": "engine.core",
    "EngineDeadError": "engine.async_engine_core",
    "EngineLoad": "engine.outputs",
    "EngineOutput": "engine.outputs",
    "EngineRequest": "engine.request",
    "EngineStalled": "engine.async_engine_core",
    "FinishReason": "engine.request",
    "InvalidParameter": "engine.sampling_params",
    "KVEvent": "engine.kv_cache.events",
    "Logprob": "engine.outputs",
    "ModelConfig": "engine.config",
    "RequestOutput": "engine.outputs",
    "SamplingParams": "engine.sampling_params",
    "StepProfiler": "engine.profiling.step_profiler",
    "StepRecord": "engine.profiling.step_profiler",
    "bookkeeping_core": "engine.profiling.bookkeeping",
    "hash_block": "engine.kv_cache.block_hash",
    "hash_blocks": "engine.kv_cache.block_hash",
    "measure_startup": "engine.profiling.startup",
    "root_hash": "engine.kv_cache.block_hash",
}

__all__ = [
    "LLM",
    "AllBlocksCleared",
    "AsyncEngine",
    "AsyncEngineCore",
    "BlockRemoved",
    "BlockStored",
    "CompletionOutput",
    "CoreStep",
    "EngineConfig",
    "EngineCore",
    "EngineDeadError",
    "EngineLoad",
    "EngineOutput",
    "EngineRequest",
    "EngineStalled",
    "FinishReason",
    "InvalidParameter",
    "KVEvent",
    "Logprob",
    "ModelConfig",
    "RequestOutput",
    "SamplingParams",
    "StepProfiler",
    "StepRecord",
    "bookkeeping_core",
    "hash_block",
    "hash_blocks",
    "measure_startup",
    "root_hash",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(home), name)
