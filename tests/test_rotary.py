"""Content space against the models' own forward: what a model's key projection gives before it rotates."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from models import ARCHITECTURES, randomize_, tiny_config, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from kvbridge_hf.cache_argument import output_cache
from kvbridge_hf.config_facts import decoder_layers
from kvbridge_hf.errors import CacheMismatchError, UnsupportedModelError
from kvbridge_hf.geometry import KVGeometry
from kvbridge_hf.rotary import ContentRotary, positions_from_mask

pytestmark = pytest.mark.core

SCALINGS = ("default", "linear", "llama3", "yarn")
# Phi-3's config takes no other fixed scaling than the default.
CASES = [(arch, rope) for arch in ARCHITECTURES for rope in SCALINGS if arch != "phi3" or rope == "default"]
HEADS, HEAD_DIM = 2, 16
# Near zero, around and beyond the original lengths of the scalings, and beyond 4,096, in another order in each row.
POSITIONS = torch.tensor([[0, 1, 2, 130, 511, 1025, 4095, 4096, 4097, 6000, 8191], [3, 5, 7, 11, 600, 601, 2048, 4500]
                          + [5000, 7000, 8000]])  # fmt: skip


def forward_with_content_keys(model, position_ids):
    """One forward; the cache, and each layer's keys as they were before the rotation, (batch, heads, tokens, dim)."""
    seen, handles = {}, []
    for index, layer in enumerate(decoder_layers(model)):
        attention = layer.self_attn
        last = getattr(attention, "k_norm", None) or getattr(attention, "k_proj", None) or attention.qkv_proj

        def keep(module, args, output, index=index):
            if output.ndim == 3:  # (batch, tokens, all heads' channels)
                width = HEADS * HEAD_DIM
                start = output.shape[-1] - 2 * width if output.shape[-1] > width else 0  # Phi-3: queries, keys, values
                output = output[..., start : start + width].unflatten(-1, (HEADS, HEAD_DIM))
            heads_first = output if output.shape[1] == HEADS else output.transpose(1, 2)
            seen[index] = heads_first.detach().clone()

        handles.append(last.register_forward_hook(keep))
    ids = torch.arange(3, 3 + position_ids.shape[1]).repeat(position_ids.shape[0], 1)
    with torch.no_grad():
        cache = output_cache(model(input_ids=ids, position_ids=position_ids, use_cache=True))
    for handle in handles:
        handle.remove()
    return cache, seen


def relative_error(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("arch", "rope"), CASES)
def test_strip_and_apply_agree_with_the_models_own_forward(arch, rope, dtype):
    model = tiny_model(arch, rope=rope, dtype=dtype, num_layers=2)
    rotary = ContentRotary.from_model(model)
    cache, content = forward_with_content_keys(model, POSITIONS)
    # bfloat16: one rounding of cos, sin and of each product in the model, 2^-9 each, and one of ours.
    bound = 1e-5 if dtype == torch.float32 else 8e-3
    for layer_idx, layer in enumerate(cache.layers):
        stripped = rotary.strip(layer.keys, POSITIONS, layer_idx)
        assert stripped.dtype == dtype and stripped.shape == layer.keys.shape
        assert relative_error(stripped, content[layer_idx]) < bound
        assert relative_error(rotary.apply(content[layer_idx], POSITIONS, layer_idx), layer.keys) < bound
        if rotary.geometry.rotary_layers[layer_idx]:
            # The comparison can tell a position from its neighbour.
            assert relative_error(rotary.strip(layer.keys, POSITIONS + 1, layer_idx), content[layer_idx]) > 0.02
    rotary.verify(model)


def test_layers_without_rotation_keep_their_keys():
    model = tiny_model("smollm3", num_layers=4)
    rotary = ContentRotary.from_model(model)
    assert rotary.geometry.rotary_layers == (True, False, True, False)
    cache, content = forward_with_content_keys(model, POSITIONS)
    for layer_idx in (1, 3):
        assert torch.equal(cache.layers[layer_idx].keys, content[layer_idx])
        assert torch.equal(rotary.strip(cache.layers[layer_idx].keys, POSITIONS, layer_idx), content[layer_idx])
        assert rotary.cos_sin(POSITIONS, layer_idx) is None


def test_yarn_factor_leaves_unrotated_channels_alone():
    """Cos and sin are scaled, the channels that partial rotary passes through are not."""
    model = tiny_model("glm", rope="yarn")
    rotary = ContentRotary.from_model(model)
    cos, _ = rotary.cos_sin(torch.zeros(1, 1, dtype=torch.long))
    assert float(cos[0, 0, 0]) > 1.2
    keys = torch.randn(1, 2, 3, HEAD_DIM)
    rotated = rotary.apply(keys, torch.tensor([[0, 9, 99]]), 0)
    assert torch.equal(rotated[..., HEAD_DIM // 2 :], keys[..., HEAD_DIM // 2 :])
    torch.testing.assert_close(rotated[:, :, 0, : HEAD_DIM // 2], keys[:, :, 0, : HEAD_DIM // 2] * cos[0, 0, 0])


def test_rotation_of_llama3_scaling_in_float64():
    """Independent of any modelling file: angles by the Llama 3.1 rule, channels paired half a head apart."""
    parameters = tiny_config("llama", rope="llama3").rope_parameters
    frequency = 500000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    turns = 1024 * frequency / (2 * torch.pi)  # of each channel over the original length
    blend = ((turns - 1.0) / (4.0 - 1.0)).clamp(0, 1)
    frequency = frequency * (blend + (1 - blend) / parameters["factor"])
    position = 4500
    keys = torch.randn(1, 2, 1, HEAD_DIM, dtype=torch.float64)
    pairs = torch.complex(keys[..., : HEAD_DIM // 2], keys[..., HEAD_DIM // 2 :])
    turned = pairs * torch.polar(torch.ones_like(frequency), position * frequency)
    wanted = torch.cat((turned.real, turned.imag), dim=-1)
    rotary = ContentRotary.from_config(tiny_config("llama", rope="llama3"))
    found = rotary.apply(keys.float(), torch.tensor([[position]]), 0)
    assert relative_error(found, wanted) < 5e-4  # float32 angles: 4500 * 2^-24
    assert relative_error(rotary.strip(wanted.float(), torch.tensor([[position]]), 0), keys) < 5e-4


def test_rows_share_positions_or_have_their_own():
    rotary = ContentRotary.from_config(tiny_config("qwen3"))
    keys = torch.randn(2, 2, 5, HEAD_DIM)
    shared = torch.arange(5)[None] + 4096
    torch.testing.assert_close(rotary.apply(keys, shared, 0), rotary.apply(keys, shared.repeat(2, 1), 0))
    own = torch.stack((shared[0], torch.arange(5)))
    torch.testing.assert_close(rotary.apply(keys, own, 0)[1:], rotary.apply(keys[1:], torch.arange(5)[None], 0))


def test_cos_and_sin_are_shared_over_layers():
    rotary = ContentRotary.from_config(tiny_config("smollm3", num_layers=4))
    assert [rotary.rotation_of(layer_idx) for layer_idx in range(4)] == ["all", None, "all", None]
    keys, cos_sin = torch.randn(2, 2, POSITIONS.shape[1], HEAD_DIM), rotary.cos_sin(POSITIONS, 0)
    assert torch.equal(rotary.apply_with(keys, cos_sin, 2), rotary.apply(keys, POSITIONS, 2))
    assert torch.equal(rotary.strip_with(keys, cos_sin, 2), rotary.strip(keys, POSITIONS, 2))
    assert torch.equal(rotary.strip_with(keys, None, 1), keys)


def test_from_model_follows_frequencies_that_a_cast_rounded():
    """`model.to(bfloat16)` rounds the frequencies, `from_pretrained(dtype=...)` does not; a model's own count."""
    model = tiny_model("llama", dtype=torch.float32)
    exact = ContentRotary.from_config(model.config).cos_sin(POSITIONS)
    torch.testing.assert_close(ContentRotary.from_model(model).cos_sin(POSITIONS), exact, rtol=0, atol=0)
    model.to(torch.bfloat16)
    if model.get_decoder().rotary_emb.inv_freq.dtype == torch.float32:
        pytest.skip("this release keeps the frequencies in float32")
    rounded = ContentRotary.from_model(model).cos_sin(POSITIONS)
    assert float((rounded[0] - exact[0]).abs().max()) > 0.1
    own, _ = model.get_decoder().rotary_emb(torch.zeros(1), POSITIONS)
    assert torch.equal(rounded[0], own)


def test_autocast_does_not_reach_the_rotation():
    rotary = ContentRotary.from_config(tiny_config("qwen3", rope="yarn"))
    keys = torch.randn(2, 2, POSITIONS.shape[1], HEAD_DIM)
    wanted = rotary.strip(keys, POSITIONS, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rotary.strip(keys, POSITIONS, 0), wanted)


def test_query_temperature_does_not_touch_keys():
    """Ministral 3 scales queries by position; its cached keys are the same with and without."""
    with_scale = tiny_model("ministral3", rope="yarn", num_layers=2)
    without = copy.deepcopy(with_scale)
    without.config.rope_parameters["llama_4_scaling_beta"] = 0.0
    for layer in decoder_layers(without):
        layer.self_attn.config = without.config
    (cache, content), (other, _) = (forward_with_content_keys(m, POSITIONS) for m in (with_scale, without))
    assert torch.equal(cache.layers[0].keys, other.layers[0].keys)
    assert relative_error(other.layers[1].keys, cache.layers[1].keys) > 1e-4  # the scale does something to queries
    rotary = ContentRotary.from_model(with_scale)
    assert relative_error(rotary.strip(cache.layers[1].keys, POSITIONS, 1), content[1]) < 1e-5


def gemma3_text(**overrides):
    fields = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM}
    fields |= {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 96, "max_position_embeddings": 8192}
    fields["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    return AutoConfig.for_model("gemma3_text", **fields | {"sliding_window": 8192} | overrides)


def test_one_rotation_for_each_layer_type():
    config = gemma3_text(layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    model = randomize_(AutoModelForCausalLM.from_config(config, dtype=torch.float32)).eval()
    rotary = ContentRotary.from_model(model)
    assert rotary.rotation_of(0) == rotary.rotation_of(2) != rotary.rotation_of(1)
    cache, content = forward_with_content_keys(model, POSITIONS)
    for layer_idx, layer in enumerate(cache.layers):
        assert relative_error(rotary.strip(layer.keys, POSITIONS, layer_idx), content[layer_idx]) < 1e-5
    assert relative_error(rotary.strip(cache.layers[1].keys, POSITIONS, 0), content[1]) > 0.1
    torch.testing.assert_close(ContentRotary.from_config(config).cos_sin(POSITIONS, 1), rotary.cos_sin(POSITIONS, 1))


@pytest.mark.parametrize("wrapper", ["mistral3", "qwen3_vl"])
def test_text_part_of_a_multimodal_wrapper(wrapper):
    text = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM}
    text |= {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 96, "max_position_embeddings": 8192}
    text["pad_token_id"] = 0
    vision = {"hidden_size": 32, "intermediate_size": 32}
    if wrapper == "mistral3":
        text |= {"model_type": "ministral3", "sliding_window": None}
        vision |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    else:
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        vision |= {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
    config = AutoConfig.for_model(wrapper, text_config=text, vision_config=vision)
    model = randomize_(AutoModelForImageTextToText.from_config(config, dtype=torch.float32)).eval()
    rotary = ContentRotary.from_model(model)
    assert rotary.geometry.num_layers == 2 and rotary.geometry.kv_width == HEADS * HEAD_DIM
    cache, content = forward_with_content_keys(model, POSITIONS)
    for layer_idx, layer in enumerate(cache.layers):
        assert relative_error(rotary.strip(layer.keys, POSITIONS, layer_idx), content[layer_idx]) < 1e-5
    rotary.verify(model)


def test_partial_rotation_that_the_attention_module_cuts_out():
    """StableLM hands only the rotated channels to its rotary function."""
    fields = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": HEADS, "hidden_size": 64}
    fields |= {"intermediate_size": 64, "vocab_size": 96, "max_position_embeddings": 8192}
    config = AutoConfig.for_model("stablelm", **fields)
    model = randomize_(AutoModelForCausalLM.from_config(config, dtype=torch.float32)).eval()
    rotary = ContentRotary.from_model(model)
    assert rotary.geometry.rotary["partial_rotary_factor"] == 0.25
    cache, content = forward_with_content_keys(model, POSITIONS)
    assert relative_error(rotary.strip(cache.layers[1].keys, POSITIONS, 1), content[1]) < 1e-5


def test_models_with_learned_positions_have_nothing_to_strip():
    config = AutoConfig.for_model("gpt2", n_layer=2, n_head=2, n_embd=32, vocab_size=96)
    model = AutoModelForCausalLM.from_config(config).eval()
    rotary = ContentRotary.from_model(model)
    keys = torch.randn(1, 2, 3, 16)
    assert torch.equal(rotary.strip(keys, torch.arange(3)[None], 0), keys)
    rotary.verify(model)


def test_rotation_that_depends_on_length_is_refused():
    for build in (ContentRotary.from_config, lambda config: ContentRotary.from_model(_model(config))):
        with pytest.raises(UnsupportedModelError, match="'dynamic' depends on the length of the whole sequence"):
            build(tiny_config("llama", rope="dynamic"))
        half = HEAD_DIM // 4
        longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * half}
        longrope |= {"long_factor": [4.0] * half, "original_max_position_embeddings": 4096}
        with pytest.raises(UnsupportedModelError, match="'longrope' depends on the length"):
            build(tiny_config("phi3", rope=longrope, original_max_position_embeddings=4096))


def _model(config):
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def test_latent_attention_is_refused():
    with pytest.raises(UnsupportedModelError, match="latent attention"):
        ContentRotary.from_config(AutoConfig.for_model("deepseek_v3"))


def test_rotary_code_without_rope_parameters_is_refused():
    with pytest.raises(UnsupportedModelError, match="'gptj'"):
        ContentRotary.from_config(AutoConfig.for_model("gptj"))


def test_verify_finds_keys_that_are_changed_after_the_rotation():
    """HunYuan normalises keys after rotating them, so no rotation takes them back."""
    config = AutoConfig.for_model(
        "hunyuan_v1_dense", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        hidden_size=64, intermediate_size=64, vocab_size=96, max_position_embeddings=8192,
    )  # fmt: skip
    model = randomize_(_model(config))
    with pytest.raises(UnsupportedModelError, match="Layer 0 of HunYuanDenseV1ForCausalLM does not rotate its keys"):
        ContentRotary.from_model(model).verify(model)


def test_verify_finds_wrong_geometry():
    model = tiny_model("smollm3", num_layers=4)
    rotary = ContentRotary.from_model(model)
    wrong = dataclasses.replace(rotary.geometry, rotary_layers=(True, True, True, False))
    with pytest.raises(UnsupportedModelError, match="Layer 1 of SmolLM3ForCausalLM does not rotate"):
        ContentRotary(wrong, model.model.rotary_emb, rotary._function).verify(model)
    heads = dataclasses.replace(rotary.geometry, num_kv_heads=4)
    with pytest.raises(UnsupportedModelError, match=r"\(2, 2, 1, 16\).*its config says \(2, 4, 1, 16\)"):
        ContentRotary(heads, model.model.rotary_emb, rotary._function).verify(model)


def test_a_function_that_is_no_rotation_is_refused():
    model = tiny_model("llama")
    geometry = KVGeometry.from_model(model)

    def forgets_sin(q, k, cos, sin, unsqueeze_dim=1):
        return q, k * cos.unsqueeze(1)

    with pytest.raises(UnsupportedModelError, match="do not act as a rotation"):
        ContentRotary(geometry, model.model.rotary_emb, forgets_sin)
    with pytest.raises(UnsupportedModelError, match="not \\(q, k, cos, sin\\)"):
        ContentRotary(geometry, model.model.rotary_emb, lambda x, frequencies: x)


def test_shapes_are_checked():
    rotary = ContentRotary.from_config(tiny_config("llama"))
    with pytest.raises(CacheMismatchError, match=r"\(batch, kv_heads, tokens, 16\)"):
        rotary.strip(torch.zeros(1, 2, 3, 8), torch.arange(3)[None], 0)
    with pytest.raises(CacheMismatchError, match=r"positions must be \(2, 3\) or \(1, 3\)"):
        rotary.strip(torch.zeros(2, 2, 3, 16), torch.arange(4)[None], 0)


def test_positions_count_tokens_and_not_columns():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    wanted = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 2, 2], [0, 1, 2, 3, 4]])
    assert torch.equal(positions_from_mask(mask), wanted)
    assert torch.equal(positions_from_mask(mask.bool()), wanted)
    assert torch.equal(positions_from_mask(mask.float()), wanted)
