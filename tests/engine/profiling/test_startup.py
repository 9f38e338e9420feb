from __future__ import annotations

import time
from pathlib import Path

from engine.profiling.startup import STARTUP_PHASES, measure_startup


def test_time_before_the_call_is_the_interpreter_s(tiny_folder: Path) -> None:
    args = {"load_format": "dummy", "num_threads": 1, "kv_cache_memory_bytes": 4_000_000}
    phases = measure_startup(str(tiny_folder), args, launched=time.time() - 1e6)
    assert tuple(phases) == STARTUP_PHASES
    assert phases["interpreter"] >= 1e6
    assert sum(phases.values()) - phases["interpreter"] < 1e6
