"""Runs the workloads on OpenVINO GenAI's continuous batching, which computes in bfloat16 by itself."""

import numpy as np
from workloads import Generate, Prompts, measure


def load(folder: str) -> Generate:
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = 256
    scheduler.enable_prefix_caching = True
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", {})

    def complete(prompts: Prompts, tokens: int) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        inputs = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = pipeline.generate(inputs, [config] * len(prompts))
        assert all(len(result.m_generation_ids[0]) == tokens for result in results)

    def generate(prompts: Prompts, tokens: int) -> None:
        # Requests that come at once find nothing of each other's in its prefix cache: one goes ahead for all.
        if len(prompts) > 1 and prompts[0][:64] == prompts[1][:64]:
            complete(prompts[:1], 1)
        complete(prompts, tokens)

    return generate


measure(load)
