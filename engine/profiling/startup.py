"""What the time from nothing to the first token is made of."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from engine.profiling.spans import SpanRecorder

STARTUP_PHASES = (
    "interpreter", "imports", "config", "kernels", "weights", "kv_cache", "tokenizer", "first_token", "rest",
)  # fmt: skip


def measure_startup(model: str, engine_args: Mapping[str, Any], launched: float) -> dict[str, float]:
    """Seconds of each of STARTUP_PHASES for this process, which must not have used the engine before.

    The interpreter's part is what came before this call. The parts of config and tokenizer include transformers'
    imports, for models that need them. The engine's shutdown is in none.

    Args:
        launched: when the process was started, in seconds since the epoch.

    Raises:
        InvalidParameter: as LLM does.
    """
    interpreter = time.time() - launched
    recorder = SpanRecorder()
    started = time.perf_counter()
    import engine.core
    import engine.executor.uniproc
    import engine.llm
    import engine.worker.worker
    from engine.sampling_params import SamplingParams

    phases = dict.fromkeys(STARTUP_PHASES, 0.0)
    phases["imports"] = time.perf_counter() - started
    recorder.watch(engine.core, "load_model_config", "config")
    recorder.watch(engine.worker.worker, "load_cpu_kernels", "kernels")
    recorder.watch(engine.worker.worker, "load_model", "weights")
    recorder.watch(engine.executor.uniproc.UniProcExecutor, "allocate_kv_cache", "kv_cache")
    recorder.watch(engine.core, "KVCacheManager", "kv_cache")
    recorder.watch(engine.llm, "load_tokenizer", "tokenizer")
    recorder.watch(engine.llm.LLM, "generate", "first_token")
    try:
        with engine.llm.LLM(model, **engine_args) as llm:
            llm.generate("The", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
            total = time.perf_counter() - started
    finally:
        recorder.close()
    for span in recorder.spans:
        phases[span.phase] += span.own_seconds
    phases["rest"] = total - sum(phases.values())
    phases["interpreter"] = interpreter
    return phases
