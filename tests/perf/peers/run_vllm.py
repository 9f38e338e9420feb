"""Runs the workloads on vLLM's CPU build."""

import os

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from workloads import Generate, Prompts, measure


def load(folder: str) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(model=folder, dtype="bfloat16", max_model_len=2048, enable_prefix_caching=True)

    def generate(prompts: Prompts, tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)

    return generate


if __name__ == "__main__":
    measure(load)
