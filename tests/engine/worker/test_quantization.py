"""Models with weights in int8, with and without int8 activations."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine import LLM, EngineConfig, ModelConfig, SamplingParams
from engine.config import Quantization, cache_folder
from engine.hub import load_model_config
from engine.layers.linear import Linear
from engine.layers.weight import Placement
from engine.sampling_params import InvalidParameter
from engine.tokenizer import load_tokenizer
from engine.worker.cpu_kernels import PACKINGS, load_cpu_kernels
from kernels.cpu.build import build, supported_levels
from kernels.cpu.library import GROUP, CpuKernels
from tests.engine.models.tiny import Runner, config_of, expected_logits, save_tiny
from tests.engine.questions import questions
from tests.perf.quantization_quality import measure_quality, weight_bytes, windows_of

IDS = [(7 * i * i + 3 * i + 1) % 131 for i in range(75)]
QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "int8_w8a8")
# Sizes that fill neither a group nor a panel, biases, and a head that shares the table.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"hidden_size": 54, "intermediate_size": 90, "head_dim": 16}),
    "tied": (
        "LlamaForCausalLM",
        {
            "hidden_size": 192,
            "head_dim": 32,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}


@pytest.fixture(scope="module", params=supported_levels())
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(build(request.param, cache_folder() / "kernels"), num_threads=2)


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelConfig]:
    architecture, config = MODELS[request.param]
    folder: Path = tmp_path_factory.mktemp("model")
    return save_tiny(folder, architecture, **config), config_of(folder)


def rounded(values: torch.Tensor) -> torch.Tensor:
    """[..., columns] with each group of columns rounded to 127 steps on either side of zero."""
    padded = F.pad(values, (0, -values.shape[-1] % GROUP))
    groups = padded.view(*values.shape[:-1], -1, GROUP)
    scales = (groups.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return ((groups / scales).round() * scales).view(padded.shape)[..., : values.shape[-1]]


def with_rounded_weights(model: Any, dtype: torch.dtype) -> Any:
    """A transformers model in float32 whose projections' weights are rounded after they were brought to dtype."""
    model = copy.deepcopy(model)
    for module in projections(model):
        weight = module.weight.detach().to(dtype).float()
        module.weight = torch.nn.Parameter(rounded(weight))  # a new one: the table that the head shares stays
    return model


def projections(model: Any) -> list[torch.nn.Linear]:
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


def distances(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of each row, relative to what is expected."""
    return (found - expected).norm(dim=1) / expected.norm(dim=1)


def test_int8_weights_equal_transformers_with_rounded_ones(saved: tuple[Any, ModelConfig], kernels: CpuKernels) -> None:
    model, config = saved
    logits = Runner(config, kernels=kernels, packing="panels_int8").logits(IDS, [60, 1])
    expected = expected_logits(with_rounded_weights(model, torch.float32), IDS)
    assert distances(logits, expected).max() < 1e-4
    assert distances(logits, expected_logits(model, IDS)).min() > 1e-3


def test_int8_weights_add_nothing_to_the_rounding_of_bfloat16(
    saved: tuple[Any, ModelConfig], kernels: CpuKernels
) -> None:
    model, config = saved
    config = replace(config, dtype="bfloat16")
    logits = Runner(config, kernels=kernels, packing="panels_int8").logits(IDS, [60, 1])
    off = distances(logits, expected_logits(with_rounded_weights(model, torch.bfloat16), IDS)).mean()
    plain = Runner(config, kernels=kernels).logits(IDS, [60, 1])
    assert off < 1.3 * distances(plain, expected_logits(model, IDS)).mean()


def test_int8_activations_equal_transformers_with_rounded_ones(
    saved: tuple[Any, ModelConfig], kernels: CpuKernels
) -> None:
    model, config = saved
    logits = Runner(config, kernels=kernels, packing="panels_int8_w8a8").logits(IDS, [60, 1])
    reference = with_rounded_weights(model, torch.float32)
    weights_alone = expected_logits(reference, IDS)
    for module in projections(reference):
        module.register_forward_pre_hook(lambda module, inputs: (rounded(inputs[0]),))
    off = distances(logits, expected_logits(reference, IDS))
    # An input between two steps may fall on the other side here; that moves its own row, and later ones a little.
    assert off.median() < 1e-5
    assert off.max() < 0.05
    assert distances(logits, weights_alone).min() > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_row_does_not_depend_on_its_batch(
    saved: tuple[Any, ModelConfig], kernels: CpuKernels, quantization: Quantization, dtype: Any
) -> None:
    _, config = saved
    config, packing = replace(config, dtype=dtype), PACKINGS[quantization]
    alone = Runner(config, kernels=kernels, packing=packing).logits(IDS, [75])
    for chunks in ([30, 1, 17, 27], [1]):
        assert torch.equal(Runner(config, kernels=kernels, packing=packing).logits(IDS, chunks), alone)
    runner = Runner(config, num_requests=3, kernels=kernels, packing=packing)
    runner.step({0: IDS[:40], 1: IDS[5:20]})
    runner.step({0: IDS[40:44], 1: IDS[20:21], 2: IDS[30:60]})
    assert torch.equal(runner.step({1: IDS[21:22], 0: IDS[44:45], 2: IDS[60:61]})[0][0], alone[44])


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_tokens_are_the_same_alone_batched_and_chunked(demo_folder: Path, quantization: Quantization) -> None:
    prompts = questions(4)
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)

    def tokens(batches: Sequence[list[str]], **changed: Any) -> list[list[int]]:
        with LLM(
            str(demo_folder),
            dtype="bfloat16",
            quantization=quantization,
            max_model_len=512,
            num_kv_blocks=256,
            enable_prefix_caching=False,
            **changed,
        ) as llm:
            outputs = [output for batch in batches for output in llm.generate(batch, greedy, use_tqdm=False)]
        return [output.outputs[0].token_ids for output in outputs]

    alone = tokens([[prompt] for prompt in prompts])
    assert tokens([prompts]) == alone
    assert tokens([prompts], max_num_seqs=4, max_num_batched_tokens=16) == alone


def test_the_demo_model_stays_close_to_float32(demo_folder: Path) -> None:
    """Measured: 0.0020 nats and 97.0%, 0.0076 and 93.2%; tests/perf/quantization_quality.py measures on more text."""
    config = load_model_config(EngineConfig(model=str(demo_folder)))
    windows = windows_of(load_tokenizer(demo_folder).encode("\n\n".join(questions(20))))[:3]
    library = build(supported_levels()[0], cache_folder() / "kernels")
    quality = measure_quality(config, CpuKernels(library, num_threads=2), windows, (None, *QUANTIZATIONS))
    assert quality[None].divergence < quality["int8"].divergence < 0.003
    assert quality["int8"].divergence < quality["int8_w8a8"].divergence < 0.011
    assert quality["int8"].agreement > 0.955
    assert quality["int8_w8a8"].agreement > 0.915


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_the_int8_weight_replaces_the_plain_one(quantization: Quantization) -> None:
    with torch.inference_mode():
        placement = Placement(torch.bfloat16, torch.device("cpu"), PACKINGS[quantization])
        linear = Linear(576, {"proj": 192}, bias=False, placement=placement)
        tensor = torch.randn(192, 576).bfloat16()
        gone, size = weakref.ref(tensor), tensor.nbytes
        linear.weights("")["proj.weight"].load(tensor)
        del tensor
        assert gone() is None
        assert linear.packed_weight.nbytes == size // 2 + 192 * 576 // 64 * 4


def test_bytes_of_a_plan_s_weights(kernels: CpuKernels, tmp_path: Path) -> None:
    # Sizes that fill groups and panels.
    model = save_tiny(
        tmp_path,
        "LlamaForCausalLM",
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        head_dim=16,
        vocab_size=128,
    )
    dense = sum(module.weight.numel() for module in projections(model))
    norms = sum(each.numel() for name, each in model.named_parameters() if "norm" in name)
    others = 2 * model.model.embed_tokens.weight.numel() + 4 * norms
    config = config_of(tmp_path)
    assert weight_bytes(config, kernels, None) == 2 * dense + others
    for quantization in QUANTIZATIONS:
        assert weight_bytes(config, kernels, quantization) == dense + 4 * dense // GROUP + others


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"quantization": "int4"}, "must be one of int8, int8_w8a8"),
        ({"quantization": "int8", "device": "cuda"}, "device='cuda'"),
        ({"quantization": "int8", "cpu_kernels": "torch"}, "cpu_kernels='torch'"),
        ({"quantization": "int8_w8a8", "dtype": "float16"}, "dtype='float16'"),
    ],
)
def test_what_cannot_be_quantised_is_refused_by_the_config(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidParameter, match=reason) as caught:
        EngineConfig(model="demo", **changed)
    assert caught.value.param == "quantization"


@pytest.mark.parametrize(
    ("changed", "block_size", "reason"),
    [({"dtype": "float16"}, 16, "not in float16"), ({}, 8, "not of 8"), ({"head_dim": 24}, 16, "not of 24")],
)
def test_a_model_without_its_kernels_is_refused(
    tmp_path: Path, changed: dict[str, Any], block_size: int, reason: str
) -> None:
    save_tiny(tmp_path, "LlamaForCausalLM")
    config = replace(config_of(tmp_path), **({"head_dim": 16} | changed))

    def load(quantization: Quantization | None) -> object:
        return load_cpu_kernels(
            "auto",
            config,
            block_size=block_size,
            num_threads=1,
            cache_folder=cache_folder() / "kernels",
            quantization=quantization,
        )

    assert load(None) is None  # torch's run it
    with pytest.raises(InvalidParameter, match=reason) as caught:
        load("int8")
    assert caught.value.param == "quantization"
