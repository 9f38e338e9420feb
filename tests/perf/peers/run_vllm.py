"""Runs the workloads on vLLM's CPU build, with the settings that were fastest for it.

One process: engine core and worker in processes of their own take a share of the cores from the model (they cost a
tenth of the throughput of many requests and a quarter to a half of one request's on two cores). No ahead-of-time
artefacts: vLLM 0.32 fails to load its own on a CPU and compiles anew at every start, whereas inductor's cache works.
"""

import os
import sys
from pathlib import Path

os.environ |= {
    "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),  # vLLM goes down to one thread otherwise
    "TORCHINDUCTOR_CACHE_DIR": str(Path(sys.prefix) / "cache" / "inductor"),
    "VLLM_CACHE_ROOT": str(Path(sys.prefix) / "cache"),
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_AOT_COMPILE": "0",
}

from workloads import Generate, Prompts, measure


def load(folder: str) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(model=folder, dtype="bfloat16", max_model_len=2048, enable_prefix_caching=True)

    def generate(prompts: Prompts, tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)

    return generate


measure(load)
