"""How weights are found, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.attention.torch_attention import TorchAttention
from engine.hub import SUPPORTED_ARCHITECTURES
from engine.models import CheckpointError, load_model
from engine.models.registry import MODELS
from engine.sampling_params import InvalidParameter
from tests.engine.models.tiny import Runner, config_of, expected_logits, save_tiny

IDS = list(range(3, 60, 2))


@pytest.fixture
def saved(tmp_path):
    model = save_tiny(tmp_path, "LlamaForCausalLM")
    return model, config_of(tmp_path)


def load(config, load_format="auto", seed=0):
    with torch.inference_mode():
        return load_model(
            config, load_format=load_format, device=torch.device("cpu"), attention=TorchAttention(), seed=seed
        )


def change(config, edit):
    """Rewrites the checkpoint after edit(tensors)."""
    path = config.path / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_sharded_checkpoint(tmp_path):
    model = save_tiny(tmp_path, "LlamaForCausalLM", max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    logits = Runner(config_of(tmp_path)).logits(IDS, [len(IDS)])
    torch.testing.assert_close(logits, expected_logits(model, IDS), rtol=0.0, atol=1e-5)


def test_missing_shard_is_named(tmp_path):
    save_tiny(tmp_path, "LlamaForCausalLM", max_shard_size="40KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"names {shard.name}"):
        load(config_of(tmp_path))


@pytest.mark.parametrize("index", ["", "{", "[]", "null", '{"weight_map": 5}', '{"weight_map": {"a": 5}}'])
def test_a_damaged_index_is_named(saved, index):
    _, config = saved
    (config.path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        load(config)


@pytest.mark.parametrize("length", [0, 5, 1000])
def test_a_damaged_file_is_named(saved, length):
    _, config = saved
    path = config.path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load(config)


def test_index_may_not_lead_out_of_the_folder(saved):
    _, config = saved
    (config.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"names \.\./model\.safetensors"):
        load(config)


def test_missing_tensors_are_named_with_their_shapes(saved):
    _, config = saved
    change(config, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.weight \[16, 48\]$"):
        load(config)


def test_unexpected_tensors_are_named(saved):
    _, config = saved
    change(config, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}))
    with pytest.raises(
        CheckpointError, match=r"does not account for: model\.layers\.0\.self_attn\.q_proj\.bias \[48\]"
    ):
        load(config)


def test_wrong_shape_is_named(saved):
    _, config = saved
    with pytest.raises(CheckpointError, match=r"down_proj.* has shape \[48, 80\]; the config says \[48, 96\]"):
        load(dataclasses.replace(config, intermediate_size=96))


def test_quantised_tensors_are_refused(saved):
    _, config = saved
    name = "model.layers.0.mlp.up_proj.weight"
    change(config, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(CheckpointError, match="quantised weights are not supported"):
        load(config)


def test_redundant_tensors_are_passed_over(tmp_path):
    model = save_tiny(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True)
    config = config_of(tmp_path)
    redundant = {
        "lm_head.weight": model.lm_head.weight.detach().clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    change(config, lambda tensors: tensors.update(redundant))
    logits = Runner(config).logits(IDS, [len(IDS)])
    torch.testing.assert_close(logits, expected_logits(model, IDS), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickles_are_refused(saved, name):
    _, config = saved
    (config.path / "model.safetensors").rename(config.path / name)
    with pytest.raises(InvalidParameter, match=f"pickled weights .{name}., which may run code"):
        load(config)


def test_folder_without_weights(saved):
    _, config = saved
    (config.path / "model.safetensors").unlink()
    with pytest.raises(InvalidParameter, match="holds no weights"):
        load(config)


def test_unsupported_architecture_lists_the_supported(saved):
    _, config = saved
    with pytest.raises(
        InvalidParameter, match="GPT2LMHeadModel is not supported; supported: LlamaForCausalLM, Mistral"
    ):
        load(dataclasses.replace(config, architecture="GPT2LMHeadModel"))


def test_half_precision_checkpoint_runs_in_float32(saved):
    model, config = saved
    change(config, lambda tensors: [tensors.update({n: t.bfloat16()}) for n, t in list(tensors.items())])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    logits = Runner(config).logits(IDS, [len(IDS)])
    torch.testing.assert_close(logits, expected_logits(model, IDS), rtol=0.0, atol=1e-5)


def test_loaded_model_does_not_need_its_files(saved):
    model, config = saved
    runner = Runner(config)
    path = config.path / "model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    torch.testing.assert_close(runner.logits(IDS, [len(IDS)]), expected_logits(model, IDS), rtol=0.0, atol=1e-5)


def test_dummy_weights_follow_from_the_seed_alone(saved):
    _, config = saved
    config = dataclasses.replace(config, path=config.path / "nowhere", qk_norm=True, attention_bias=True)
    state = torch.get_rng_state()
    first, again, other = (Runner(config, load_format="dummy", seed=seed).logits(IDS, [len(IDS)]) for seed in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert first.std() > 0.01


def test_gguf_file(tmp_path):
    model = save_tiny(tmp_path, "LlamaForCausalLM", hidden_size=64, intermediate_size=96, num_attention_heads=4)
    path = tmp_path / "gguf" / "tiny.gguf"
    path.parent.mkdir()
    _write_gguf(path, model)
    logits = Runner(config_of(path)).logits(IDS, [len(IDS)])
    torch.testing.assert_close(logits, expected_logits(model, IDS), rtol=0.0, atol=1e-5)


def _write_gguf(path, model):
    """A float32 GGUF of a Llama, with queries and keys permuted as llama.cpp stores them."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        for kind, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if kind in name:
                array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_hub_knows_the_architectures_that_there_are_classes_for() -> None:
    assert set(SUPPORTED_ARCHITECTURES) == set(MODELS)
