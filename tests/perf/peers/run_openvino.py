"""Runs the workloads on OpenVINO GenAI's continuous batching, which computes in bfloat16 by itself."""

from pathlib import Path

import numpy as np
from workloads import Generate, Prompts, measure


def load(folder: str) -> Generate:
    import openvino as ov
    import openvino_genai as genai

    exported = Path(folder)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 4
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = 256
    scheduler.enable_prefix_caching = True
    pipeline = genai.ContinuousBatchingPipeline(str(exported), scheduler, "CPU", {})

    def generate(prompts: Prompts, tokens: int) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.min_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        inputs = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = pipeline.generate(inputs, [config] * len(prompts))
        assert all(len(result.m_generation_ids[0]) == tokens for result in results)

    return generate


measure(load)
