"""The sampler on the device draws the tokens that the one on the host draws from the same logits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from engine import SamplingParams
from engine.outputs import TokenLogprobs
from engine.request import EngineRequest
from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.host_sampler import HostSampler
from tests.gpu.check import Setup
from tests.gpu.report import Row
from tests.gpu.timing import synchronize

STEPS = 3
LOGPROB_LIMIT = 1e-4


def sampling(setup: Setup) -> Iterator[Row]:
    """Batches of all kinds of requests over several steps, with ties, NaNs, infinities and rows of nothing else."""
    sizes = [(1, 5), (6, 131)] if setup.tiny else [(1, 5), (64, 131), (1, 151_936), (256, 151_936), (33, 128_256)]
    for seed, (count, vocab) in enumerate(sizes):
        for kind in ("mixed", "greedy"):
            yield from _sampling(setup, f"{kind}, {count} of {vocab}", count, vocab, seed, greedy=kind == "greedy")


def _sampling(setup: Setup, name: str, count: int, vocab: int, seed: int, *, greedy: bool) -> Iterator[Row]:
    numbers = np.random.default_rng(seed)
    capacity = count + 2
    device, host = DeviceSampler(capacity, vocab, setup.device), HostSampler(capacity, vocab)
    rows = numbers.permutation(capacity)[:count].astype(np.int64)
    lengths = numbers.integers(2, 9, count)
    for index, row in enumerate(rows.tolist()):
        spec = _request(numbers, index, vocab, int(lengths[index]), greedy=greedy)
        for sampler in (device, host):
            sampler.add(row, spec, spec.prompt_token_ids)
    generator = setup.generator(seed)
    wrong_tokens = wrong_broken = 0
    wrong_logprobs: list[str] = []
    for step in range(STEPS):
        logits = _logits(count, vocab, generator, setup, step)
        before = logits.clone()
        drawn = device.sample(logits, rows, lengths + step)
        synchronize(setup.device)
        found = drawn.result()
        truth = host.sample(logits.cpu(), rows, lengths + step).result()
        usable = [place for place in range(count) if place not in truth.broken]
        wrong_broken += found.broken != truth.broken
        wrong_tokens += int((np.asarray(found.token_ids)[usable] != truth.token_ids[usable]).sum())
        wrong_tokens += int((drawn.token_ids.cpu().numpy()[usable] != truth.token_ids[usable]).sum())
        if not torch.equal(logits.nan_to_num(), before.nan_to_num()):
            wrong_logprobs.append("the logits were changed")
        for place in usable:
            wrong_logprobs += _difference(found.logprobs[place], truth.logprobs[place])
    values = {"rows": count * STEPS, "wrong tokens": wrong_tokens, "wrong logprobs": len(wrong_logprobs)}
    ok = not (wrong_tokens or wrong_broken or wrong_logprobs)
    yield Row(
        name, ok, values, note="; ".join([*(["broken rows differ"] if wrong_broken else []), *wrong_logprobs[:2]])
    )


def prompt_logprobs(setup: Setup) -> Iterator[Row]:
    sizes = [(1, 5, 0), (4, 131, 3)] if setup.tiny else [(1, 131, 3), (256, 151_936, 5), (100, 128_256, 0)]
    for seed, (count, vocab, alternatives) in enumerate(sizes):
        logits = _logits(count, vocab, setup.generator(seed), setup, step=0, broken=False)
        targets = np.random.default_rng(seed).integers(vocab, size=count)
        device, host = DeviceSampler(1, vocab, setup.device), HostSampler(1, vocab)
        found = device.prompt_logprobs(logits, targets, alternatives)
        synchronize(setup.device)
        wrong = _difference(found.result(), host.prompt_logprobs(logits.cpu(), targets, alternatives).result())
        yield Row(f"{count} of {vocab}, {alternatives} best", not wrong, {"rows": count}, note="; ".join(wrong))


def _difference(found: TokenLogprobs | None, truth: TokenLogprobs | None) -> list[str]:
    if found is None or truth is None:
        return [] if found is truth else ["logprobs are there for one alone"]
    if not np.array_equal(found.token_ids, truth.token_ids):
        return [f"the best tokens are {found.token_ids[0].tolist()}, and should be {truth.token_ids[0].tolist()}"]
    if not np.array_equal(found.ranks, truth.ranks):
        return [f"ranks are {found.ranks.tolist()[:5]}, and should be {truth.ranks.tolist()[:5]}"]
    if not np.allclose(found.logprobs, truth.logprobs, rtol=0, atol=LOGPROB_LIMIT):
        return [f"logprobs are {found.logprobs[0].tolist()}, and should be {truth.logprobs[0].tolist()}"]
    return []


def _logits(
    count: int, vocab: int, generator: torch.Generator, setup: Setup, step: int, *, broken: bool = True
) -> Tensor:
    """float32 [count, vocab], in one step out of three in the model's own type; steep, flat and tied rows."""
    logits = torch.randn(count, vocab, generator=generator, device=setup.device)
    logits *= torch.tensor([0.01, 1.0, 4.0], device=setup.device).repeat(count)[:count, None]
    logits[::4] = (logits[::4] * 4).round() / 4
    if broken and count > 5:
        logits[1, 0], logits[2, vocab // 2] = float("nan"), float("inf")
        logits[3] = float("nan")
        logits[4] = float("-inf")
        logits[4, 3] = 0.0
    return logits if step != 1 else logits.bfloat16()


def _request(numbers: np.random.Generator, index: int, vocab: int, length: int, *, greedy: bool) -> EngineRequest:
    """One of many kinds."""
    pick = numbers.random
    given: dict[str, object] = {"temperature": 0.0, "max_tokens": 100}
    if not greedy:
        given["temperature"] = [0.0, 0.6, 1.0, 1e-3, 5.0][index % 5]
        if pick() < 0.4:
            given["top_k"] = int(numbers.choice([1, 5, 40, vocab]))
        if pick() < 0.4:
            given["top_p"] = float(numbers.choice([0.1, 0.9, 0.99]))
        if pick() < 0.3:
            given["min_p"] = float(numbers.choice([0.01, 0.2]))
        if pick() < 0.3:
            given |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7}
        if pick() < 0.3:
            given["logit_bias"] = {int(token): float(8 * pick()) for token in numbers.integers(vocab, size=4)}
        if pick() < 0.3:
            given |= {"min_tokens": 2, "stop_token_ids": [int(token) for token in numbers.integers(vocab, size=2)]}
        if pick() < 0.4:
            given["logprobs"] = int(numbers.integers(0, min(vocab, 6)))
    return EngineRequest(
        request_id=str(index),
        prompt_token_ids=tuple(int(token) for token in numbers.integers(vocab, size=length)),
        params=SamplingParams(**given),  # type: ignore[arg-type]
        seed=2**64 - 1 - index if index % 3 == 0 else int(numbers.integers(2**63)),
        eos_token_ids=(vocab - 1,),
    )
