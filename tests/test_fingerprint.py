"""Fingerprints tell checkpoints apart and nothing else."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from models import ARCHITECTURES, tiny_model
from test_geometry import WORDS, word_tokenizer
from transformers import AutoModelForCausalLM

from kvbridge_hf.errors import FingerprintError, KVBridgeError
from kvbridge_hf.fingerprint import (
    check_fingerprint,
    check_tokenizer,
    model_fingerprint,
    tokenizer_fingerprint,
)

# Computed with Transformers 5.17.0 and 5.24.0. A change means that mappers in use are refused: change them on purpose.
GOLDEN = {
    "llama": "e80f8fda3306f6435375fb0e",
    "qwen2": "5d15458378ecd272bf94e543",
    "qwen3": "a1969e679026d9baf14176dc",
    "mistral": "27ba0dc23306f6435375fb0e",
    "ministral3": "6b35052d3306f6435375fb0e",
    "olmo2": "28cf811a088e50beb1b3fe5c",
    "smollm3": "7248b4bb3306f6435375fb0e",
    "phi3": "90fa3c8aa5bc7642121de7f0",
    "glm": "7fb7b51c7d6a503023e681b1",
    "cohere": "07b346288b06281cf51724b5",
}


def digests(model):
    fingerprint = model_fingerprint(model)
    return fingerprint["config"], fingerprint["kv_projections"], fingerprint["weights_sample"]


@pytest.mark.core
@pytest.mark.parametrize("arch", list(ARCHITECTURES))
def test_digests_are_the_same_in_all_releases(arch):
    """Digests stand in published mappers, so no release of Transformers may change them."""
    model = tiny_model(arch, num_layers=2)
    with torch.no_grad():  # numbers that do not hang on a random generator
        for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
            values = torch.arange(parameter.numel()) % 251 - 125
            parameter.copy_((values / 64 + number / 8).view(parameter.shape))
    assert "".join(digest[:8] for digest in digests(model)) == GOLDEN[arch]


def test_load_dtype_does_not_matter(tmp_path):
    model = tiny_model("qwen3").to(torch.bfloat16)
    with torch.no_grad():  # among them numbers that float16 cannot hold
        model.model.layers[0].self_attn.k_proj.weight[0] *= torch.logspace(-9, 0, 64).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    wanted = digests(model)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert digests(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)) == wanted
    model = tiny_model("qwen3")
    wanted = digests(copy.deepcopy(model).to(torch.bfloat16))
    assert digests(model) == wanted  # a float32 checkpoint


@pytest.mark.parametrize("name", ["k_proj", "v_proj", "k_norm"])
def test_one_changed_weight_of_keys_or_values(name):
    model, other = tiny_model("qwen3"), tiny_model("qwen3")
    expected = model_fingerprint(model)
    module = getattr(other.model.layers[2].self_attn, name)
    with torch.no_grad():
        module.weight.view(-1)[5] *= 1.05
    with pytest.raises(FingerprintError, match="The source model is not.*K and V projection weights differ"):
        check_fingerprint(expected, other, "source")
    check_fingerprint(expected, model, "source")


def test_fused_projections_count():
    model, other = tiny_model("phi3"), tiny_model("phi3")
    with torch.no_grad():
        other.model.layers[0].self_attn.qkv_proj.weight[-1, -1] += 1.0  # a value channel
    assert model_fingerprint(model)["kv_projections"] != model_fingerprint(other)["kv_projections"]


def test_a_model_that_was_trained_further_elsewhere():
    """Fine-tuning of the MLPs changes the keys of all layers above, and no key projection."""
    model, other = tiny_model("llama"), tiny_model("llama")
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.mul_(1.02)
    expected = model_fingerprint(model)
    assert model_fingerprint(other)["kv_projections"] == expected["kv_projections"]
    with pytest.raises(FingerprintError, match="its weights differ"):
        check_fingerprint(expected, other, "target")


@pytest.mark.parametrize(
    "change",
    [{"rope": "linear"}, {"rms_norm_eps": 1e-3}, {"num_layers": 4}, {"num_kv_heads": 4}, {"hidden_act": "gelu"}],
)
def test_another_config_is_named(change):
    expected = model_fingerprint(tiny_model("llama"))
    with pytest.raises(FingerprintError, match="The target model is not.*config differs"):
        check_fingerprint(expected, tiny_model("llama", **change), "target")


def test_what_users_change_without_making_another_model():
    model = tiny_model("llama")
    expected = model_fingerprint(model)
    model.resize_token_embeddings(128)
    model.config.use_cache = False
    model.config.pad_token_id = 3
    model.config.max_position_embeddings = 16384
    model.set_attn_implementation("sdpa")
    check_fingerprint(expected, model, "source")


def test_message_names_both_checkpoints_and_revisions():
    model = tiny_model("llama")
    model.config._name_or_path, model.config._commit_hash = "org/fitted", "abc123"
    expected = model_fingerprint(model)
    assert (expected["name_or_path"], expected["revision"], expected["architecture"]) == (
        "org/fitted",
        "abc123",
        "llama",
    )
    other = tiny_model("llama", seed=1)
    other.config._name_or_path, other.config._commit_hash = "org/loaded", "def456"
    with pytest.raises(
        FingerprintError, match="'org/fitted' at revision abc123.*'org/loaded' at revision def456"
    ) as error:
        check_fingerprint(expected, other, "source")
    assert isinstance(error.value, KVBridgeError) and "fit a mapper" in str(error.value)
    with pytest.raises(FingerprintError, match="loaded in float16 is rounded twice"):
        check_fingerprint(expected, other.to(torch.float16), "source")


def test_quantized_weights_are_said_to_be_unchecked(caplog):
    model = tiny_model("llama")
    expected = model_fingerprint(model)
    quantized = copy.deepcopy(model)
    quantized.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert digests(quantized)[1:] == (None, None)
    with caplog.at_level(logging.WARNING, logger="kvbridge_hf"):
        check_fingerprint(expected, quantized, "target")
    assert "quantized" in caplog.text and "target" in caplog.text
    packed = copy.deepcopy(model)
    packed.model.layers[0].self_attn.k_proj.weight = torch.nn.Parameter(
        torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False
    )
    assert digests(packed)[1:] == (None, None)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="kvbridge_hf"):
        check_fingerprint({}, model, "source")
    assert "no fingerprint" in caplog.text


def test_offloaded_weights_are_brought_in(tmp_path):
    from accelerate import cpu_offload, disk_offload

    model = tiny_model("llama")
    expected = model_fingerprint(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[0].self_attn.k_proj.weight.device.type == "meta"
    found = model_fingerprint(model)
    assert found["kv_projections"] == expected["kv_projections"] and found["weights_sample"] is None
    check_fingerprint(expected, model, "source")
    on_disk = tiny_model("llama", seed=1)
    disk_offload(on_disk, str(tmp_path), execution_device=torch.device("cpu"))
    with pytest.raises(FingerprintError, match="K and V projection"):
        check_fingerprint(expected, on_disk, "source")


def test_tokenizer_fingerprint():
    fingerprint = tokenizer_fingerprint(word_tokenizer())
    assert fingerprint == tokenizer_fingerprint(word_tokenizer())
    assert fingerprint == tokenizer_fingerprint(word_tokenizer(eos_token="<pad>"))  # a role, not an id
    padded = word_tokenizer()
    padded.padding_side, padded.model_max_length = "left", 7
    assert fingerprint == tokenizer_fingerprint(padded)
    check_tokenizer(fingerprint, padded)
    check_tokenizer(None, padded)
    more = word_tokenizer()
    more.add_tokens(["<new>"])
    for other in (more, word_tokenizer([*WORDS[:4], WORDS[5], WORDS[4], *WORDS[6:]]), word_tokenizer(bos=True)):
        with pytest.raises(FingerprintError, match="gives other token ids"):
            check_tokenizer(fingerprint, other)


def test_tokenizer_fingerprint_survives_saving(tmp_path):
    from transformers import AutoTokenizer

    word_tokenizer(bos=True).save_pretrained(tmp_path)
    assert tokenizer_fingerprint(AutoTokenizer.from_pretrained(tmp_path)) == tokenizer_fingerprint(
        word_tokenizer(bos=True)
    )
