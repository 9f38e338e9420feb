"""The whole engine: against transformers with the same weights, and its paths against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from engine import LLM, RequestOutput, SamplingParams
from engine.processor import TokensPrompt
from engine.worker.graph_runner import GraphRunner
from tests.gpu.check import Check, Setup
from tests.gpu.models import LLAMA_1B, QWEN3_600M, Shape, save_model, tiny, write_folder
from tests.gpu.report import Row, attempt
from tests.gpu.steps import engine_args, random_prompts

TIE = 1e-4
"""A difference from the reference counts as none where its two best logits are as near as this."""


@contextmanager
def engine(setup: Setup, folder: Path, **args: Any) -> Iterator[LLM]:
    with LLM(str(folder), **engine_args(setup, **({"max_num_seqs": 4 if setup.tiny else 8} | args))) as llm:
        yield llm
    setup.release()


def generate(llm: LLM, prompts: list[list[int]], params: Any) -> list[RequestOutput]:
    outputs = llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params, use_tqdm=False)
    if errors := [output.error for output in outputs if output.error]:
        raise RuntimeError(errors[0])
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# ---- against transformers ----


def llama(setup: Setup) -> Iterator[Row]:
    yield from _against_transformers(setup, LLAMA_1B, layers=4)


def qwen3(setup: Setup) -> Iterator[Row]:
    yield from _against_transformers(setup, QWEN3_600M, layers=6)


def _against_transformers(setup: Setup, shape: Shape, *, layers: int) -> Iterator[Row]:
    """float32 greedy tokens and prompt log-probabilities; then, in 16 bits, errors no larger than transformers'."""
    # Triton's interpreter cannot multiply bfloat16.
    low = torch.float16 if setup.tiny else torch.bfloat16
    shape = tiny(shape) if setup.tiny else replace(shape, num_hidden_layers=layers)
    folder = setup.folder / shape.architecture
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = save_model(folder, shape, setup.device)
    yield Row("weights written", values={"layers": shape.num_hidden_layers, "TF32": "off"})

    lengths = (1, 17) if setup.tiny else (1, 5, 17, 64, 100, 300, 33, 16)
    prompts = random_prompts(lengths, shape.vocab_size, seed=7)
    sizes = {"max_model_len": 64 if setup.tiny else 1024, "num_kv_blocks": 16 if setup.tiny else 512}
    sizes["max_num_batched_tokens"] = 32 if setup.tiny else 2048
    params = SamplingParams(temperature=0.0, max_tokens=3 if setup.tiny else 48, ignore_eos=True, logprobs=0)

    with engine(setup, folder, dtype="float32", **sizes) as llm:
        for output in generate(llm, prompts, params):
            yield _greedy_row(reference, output)
        asking = replace(params, max_tokens=1, prompt_logprobs=0)
        for output in generate(llm, prompts[1:3], asking):
            found, truth = _prompt_logprobs(output), _truth(reference, output.prompt_token_ids)
            error = float((found - truth).abs().max())
            yield Row(f"float32 prompt logprobs, {len(found) + 1} tokens", error < 1e-4, {"max error": error})

    with engine(setup, folder, dtype=str(low).removeprefix("torch."), **sizes) as llm:
        outputs = generate(llm, prompts, params)
    theirs = _load(folder, low, setup.device)
    errors = []
    for output in outputs:
        prompt, generated = output.prompt_token_ids, output.outputs[0].token_ids
        truth = _truth(reference, prompt + generated)[len(prompt) - 1 :]
        assert output.outputs[0].logprobs is not None
        pairs = zip(generated, output.outputs[0].logprobs, strict=True)
        found = torch.tensor([entry[token].logprob for token, entry in pairs])
        peer = _truth(theirs, prompt + generated)[len(prompt) - 1 :]
        errors.append(torch.stack([(found - truth).abs(), (peer - truth).abs()]))
    ours_off, theirs_off = (float(error) for error in torch.cat(errors, dim=1).mean(dim=1))
    values = {"mean error": ours_off, "transformers' own": theirs_off}
    yield Row(f"{low} logprobs".removeprefix("torch."), ours_off <= 1.5 * theirs_off + 2e-3, values)


def _greedy_row(reference: Any, output: RequestOutput) -> Row:
    """One pass over prompt and output gives the reference's choice at every place, given the same tokens before it."""
    prompt, generated = output.prompt_token_ids, output.outputs[0].token_ids
    best = _logits(reference, prompt + generated)[len(prompt) - 1 : -1].topk(2)
    ties, note = 0, ""
    for place, token in enumerate(generated):
        if token != int(best.indices[place, 0]):
            gap = float(best.values[place, 0] - best.values[place, 1])
            if gap >= TIE or token != int(best.indices[place, 1]):
                note = f"token {place} is {token}, and should be {int(best.indices[place, 0])} (gap {gap:.2g})"
                break
            ties += 1
    values = {"tokens": len(generated), "ties": ties}
    return Row(f"float32 greedy, prompt of {len(prompt)}", not note, values, note=note)


def _load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval().to(device)


@torch.inference_mode()
def _logits(model: Any, token_ids: list[int]) -> Tensor:
    """float32 [tokens, vocab]."""
    return model(torch.tensor([token_ids], device=model.device)).logits[0].float()


def _truth(model: Any, token_ids: list[int]) -> Tensor:
    """The log-probability of each token but the first, given those before it; on the host."""
    logprobs = _logits(model, token_ids)[:-1].log_softmax(-1)
    chosen = torch.tensor(token_ids[1:], device=logprobs.device)
    return logprobs.gather(1, chosen[:, None])[:, 0].cpu()


def _prompt_logprobs(output: RequestOutput) -> Tensor:
    assert output.prompt_logprobs is not None
    entries = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([entry[token].logprob for token, entry in entries if entry is not None])


# ---- one path against another ----


Evidence = Callable[[LLM, list[RequestOutput]], bool]


@dataclass(frozen=True, slots=True)
class Way:
    """A way through the engine that must give the same tokens. That graphs were used, or not, is seen in any case.

    Attributes:
        args: of the engine.
        rounds: times that the prompts are run; the last one counts.
        evidence: what must have happened, as seen from the engine and its last outputs.
    """

    name: str
    args: dict[str, Any]
    evidence: tuple[Evidence, ...] = ()
    rounds: int = 1


def metric(llm: LLM, name: str) -> float:
    return sum(
        sample.value
        for family in llm.core.metrics.registry.collect()
        for sample in family.samples
        if sample.name == name
    )


def _all_paths(few_blocks: int, rounds: int) -> list[Way]:
    def chunks(llm: LLM, outputs: list[RequestOutput]) -> bool:
        return metric(llm, "manta_engine_steps_total") > sum(len(output.prompt_token_ids) for output in outputs) / 16

    def preemptions(llm: LLM, outputs: list[RequestOutput]) -> bool:
        return metric(llm, "manta_preemptions_total") > 0

    def hits(llm: LLM, outputs: list[RequestOutput]) -> bool:
        return all(output.num_cached_tokens >= len(output.prompt_token_ids) - 16 for output in outputs)

    def overlaps(llm: LLM, outputs: list[RequestOutput]) -> bool:
        return metric(llm, "manta_engine_overlapped_steps_total") > 0

    plain = {"enforce_eager": True, "async_scheduling": False, "enable_prefix_caching": False}
    graphs = {**plain, "enforce_eager": False}
    small_steps = {"max_num_batched_tokens": 16}
    return [
        Way("batched, eager", plain),
        Way("graphs", graphs),
        Way("overlapped, eager", {**plain, "async_scheduling": True}, (overlaps,)),
        Way("overlapped, graphs", {**graphs, "async_scheduling": True}, (overlaps,)),
        Way("chunked", {**graphs, **small_steps}, (chunks,)),
        Way("preempted", {**graphs, "num_kv_blocks": few_blocks}, (preemptions,)),
        Way("warm prefix cache", {**graphs, "enable_prefix_caching": True}, (hits,), rounds=2),
        Way(
            "all at once",
            {**small_steps, "async_scheduling": True, "num_kv_blocks": few_blocks},
            (preemptions, overlaps),
            rounds,
        ),
    ]


def paths(setup: Setup) -> Iterator[Row]:
    """Greedy and seeded tokens in float32, against each request alone and eagerly."""
    shape = tiny(LLAMA_1B) if setup.tiny else replace(LLAMA_1B, num_hidden_layers=2)
    folder = write_folder(setup.folder / "paths", shape)
    torch.backends.cuda.matmul.allow_tf32 = False
    own = (12, 14, 11) if setup.tiny else (5, 40, 97, 1, 64, 16, 73, 90)
    shared = random_prompts([16 if setup.tiny else 48], shape.vocab_size, seed=1)[0]
    prompts = [shared + rest for rest in random_prompts(own, shape.vocab_size, seed=2)]
    params = _mixed_params(len(prompts), 6 if setup.tiny else 40)
    base = {
        "load_format": "dummy",
        "dtype": "float32",
        "max_model_len": 64 if setup.tiny else 256,
        "max_num_batched_tokens": 64 if setup.tiny else 1024,
        "num_kv_blocks": 32 if setup.tiny else 256,
        "debug_integrity": True,
    }
    ways = _all_paths(*((4, 1) if setup.tiny else (40, 2)))
    with engine(setup, folder, **(base | ways[0].args)) as llm:
        alone = [generate(llm, [prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    for way in ways[-1:] if setup.tiny else ways:
        yield from attempt(way.name, _path_row, setup, folder, base | way.args, way, prompts, params, alone)


def _path_row(
    setup: Setup,
    folder: Path,
    args: dict[str, Any],
    way: Way,
    prompts: list[list[int]],
    params: list[SamplingParams],
    alone: list[RequestOutput],
) -> Iterator[Row]:
    with (
        engine(setup, folder, **args) as llm,
        patch.object(GraphRunner, "replay", autospec=True, side_effect=GraphRunner.replay) as replay,
    ):
        for _ in range(way.rounds):
            outputs = generate(llm, prompts, params)
        notes = [f"there were no {each.__name__}" for each in way.evidence if not each(llm, outputs)]
    if bool(replay.call_count) == args.get("enforce_eager", False):
        notes.append(f"graphs were replayed {replay.call_count} times")
    ties = 0
    for index, (one, other) in enumerate(zip(alone, outputs, strict=True)):
        found, expected = other.outputs[0].token_ids, one.outputs[0].token_ids
        if found == expected:
            continue
        place = next((at for at, pair in enumerate(zip(found, expected, strict=False)) if len(set(pair)) > 1), -1)
        if params[index].temperature == 0.0 and len(found) == len(expected) and _gap(one, place) < TIE:
            ties += 1
        else:
            notes.append(f"request {index} differs from token {place} on")
    yield Row(
        way.name,
        not notes,
        {"requests": len(prompts), "replays": replay.call_count, "ties": ties},
        note="; ".join(notes),
    )


def _gap(output: RequestOutput, place: int) -> float:
    """Between the two best logits at a place of an output with logprobs=2."""
    assert output.outputs[0].logprobs is not None
    best = sorted((entry.logprob for entry in output.outputs[0].logprobs[place].values()), reverse=True)
    return best[0] - best[1]


def _mixed_params(count: int, max_tokens: int) -> list[SamplingParams]:
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
    seeded = [
        replace(greedy, temperature=1.0, seed=11),
        replace(greedy, temperature=0.8, top_k=40, seed=12),
        replace(greedy, temperature=0.9, top_p=0.9, seed=13, repetition_penalty=1.2),
        replace(greedy, temperature=1.2, min_p=0.05, seed=14, presence_penalty=0.5),
    ]
    return [greedy if index % 2 == 0 else seeded[index // 2 % len(seeded)] for index in range(count)]


def fp8_cache(setup: Setup) -> Iterator[Row]:
    """An FP8 cache runs, is really one, and stays near."""
    if setup.device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        return
    shape = tiny(QWEN3_600M) if setup.tiny else replace(QWEN3_600M, num_hidden_layers=4)
    folder = write_folder(setup.folder / "fp8", shape)
    prompts = random_prompts((20,) if setup.tiny else (200, 77, 333), shape.vocab_size, seed=3)
    params = SamplingParams(temperature=0.0, max_tokens=3 if setup.tiny else 20, ignore_eos=True, prompt_logprobs=0)
    found = []
    for kind in ("auto", "fp8"):
        with engine(
            setup,
            folder,
            load_format="dummy",
            kv_cache_dtype=kind,
            dtype="float16" if setup.tiny else "bfloat16",
            max_model_len=64 if setup.tiny else 512,
            max_num_batched_tokens=16 if setup.tiny else 64,
            num_kv_blocks=16 if setup.tiny else 128,
        ) as llm:
            outputs = generate(llm, prompts, params)
            found.append(torch.cat([_prompt_logprobs(output) for output in outputs]))
            complete = all(len(each) == params.max_tokens for each in tokens(outputs))
            yield Row(f"cache of type {kind}, tokens", complete, {"requests": len(prompts)})
    difference = (found[1] - found[0]).abs()
    values = {"mean difference": float(difference.mean()), "max difference": float(difference.max())}
    yield Row("logprobs, fp8 beside the model's type", 0 < values["mean difference"] < 0.1, values)


CHECKS: dict[str, Check] = {
    "paths": paths,
    "llama against transformers": llama,
    "qwen3 against transformers": qwen3,
    "fp8 cache": fp8_cache,
}
"""The slowest first: they run side by side."""
