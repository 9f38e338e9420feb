"""Runs the workloads on Manta."""

from workloads import Generate, Prompts, measure


def load(folder: str) -> Generate:
    from engine import LLM, SamplingParams

    llm = LLM(folder, dtype="bfloat16", max_model_len=2048)

    def generate(prompts: Prompts, tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)

    return generate


measure(load)
