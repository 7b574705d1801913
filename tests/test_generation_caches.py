"""generate(bridge=...) with caches of all kinds on both sides, other dtypes and devices, and wrapped models."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from generate_by_hand import (
    MODES,
    NEW,
    PAIRS,
    EightBitLayer,
    assistant,
    by_hand,
    forward_lengths,
    read,
    run,
)
from handoff_reference import batch, fail_at_layer, pair, random_mapper, reference_cache
from transformers import Cache, DynamicCache, QuantizedCache

from kvbridge_hf import HandoffFallbackWarning, HandoffPolicy, KVBridge
from kvbridge_hf.cache_argument import cache_kwargs, output_cache
from kvbridge_hf.errors import FingerprintError, UnsupportedModelError

pytestmark = pytest.mark.core


@pytest.fixture(scope="module", params=PAIRS, ids="->".join)
def models(request):
    return pair(*request.param)


@pytest.fixture
def bridge(models):
    return KVBridge(*models[::2], HandoffPolicy(num_sinks=0))


# --- source caches and caches of the target


@pytest.mark.parametrize("mode", ["greedy", "sampling", "returned beams"])
def test_source_cache_handed_in(models, bridge, mode):
    source, target, _ = models
    ids, mask = batch([14, 6, 10])
    expected = by_hand(models, ids, mask, **MODES[mode])
    calls = []
    handle = source.register_forward_pre_hook(lambda *_: calls.append(1))
    for columns in (14, 13):
        cache = read(source, ids[:, :columns], mask[:, :columns])
        calls.clear()
        assert torch.equal(run(target, ids, mask, bridge=bridge, source_cache=cache, **MODES[mode]), expected)
        assert not calls and cache.get_seq_length() == columns
    handle.remove()


def test_prompt_longer_than_the_source_cache(models, bridge):
    source, target, _ = models
    ids, mask = batch([14, 9])
    cache = read(source, ids[:, :8], mask[:, :8])
    assert torch.equal(run(target, ids, mask, bridge=bridge, source_cache=cache), by_hand(models, ids, mask, suffix=6))
    assert bridge.last_report.tokens_native == 12 and bridge.last_report.tokens_mapped == 11


def test_the_source_has_gone_on_after_the_prompt(models, bridge):
    """A router's case: the small model has answered, and the large one answers again from the prompt."""
    source, target, _ = models
    ids, mask = batch([14, 9])
    answered = run(source, ids, mask, return_dict_in_generate=True)
    got = run(target, ids, mask, bridge=bridge, source_cache=output_cache(answered))
    assert torch.equal(got, by_hand(models, ids, mask))
    assert "not used" in bridge.last_report.notes[0]


@pytest.mark.parametrize("longer", [0, 3])
def test_source_cache_of_a_right_padded_batch(models, bridge, longer):
    source, target, _ = models
    left_ids, left_mask = batch([14, 6, 10])
    ids, mask = batch([14, 6, 10], side="right")
    source_ids = torch.cat([ids, torch.full((3, longer), 7)], 1)
    cache = read(source, source_ids, torch.cat([mask, mask.new_ones(3, longer)], 1))
    expected = by_hand(models, left_ids, left_mask)
    for given in (mask, None):
        got = run(target, ids, given, bridge=bridge, source_cache=cache)
        assert torch.equal(got[:, 14:], expected[:, 14:])
    explicit = {"source_cache": read(source, ids, mask), "source_attention_mask": mask}
    assert torch.equal(run(target, left_ids, left_mask, bridge=bridge, **explicit), expected)


@pytest.mark.parametrize("filled", [0, 8])
def test_a_cache_of_the_target_is_filled_in_place(models, bridge, filled):
    """Target-native tokens in front (0: an empty cache that the caller keeps)."""
    source, target, mapper = models
    ids, mask = batch([14, 9])
    own = DynamicCache() if filled == 0 else read(target, ids[:, :filled], mask[:, :filled])
    by_parts = copy.deepcopy(own)
    rest = reference_cache(source, target, mapper, ids, mask, 13)
    for layer in range(4):
        rest_layer = rest.layers[layer]
        by_parts.update(rest_layer.keys[:, :, filled:], rest_layer.values[:, :, filled:], layer)
    expected = run(target, ids, mask, **cache_kwargs(by_parts))
    got = run(target, ids, mask, bridge=bridge, **cache_kwargs(own))
    assert torch.equal(got, expected) and own.get_seq_length() == 14 + NEW - 1


def test_several_turns_in_a_batch_of_unequal_rows(models, bridge):
    """A returned cache goes on with plain generate, which runs the new columns only (transformers 34232, 38727)."""
    source, target, mapper = models
    ids, mask = batch([14, 6, 10])
    first = run(target, ids, mask, bridge=bridge, return_dict_in_generate=True)
    by_hand_first = by_hand(models, ids, mask, return_dict_in_generate=True)
    follow, _ = batch([5, 5, 5], seed=3)
    turn = torch.cat([first.sequences, follow], 1)
    turn_mask = torch.cat([mask, mask.new_ones(3, NEW + 5)], 1)
    lengths, handle = forward_lengths(target)
    held = copy.deepcopy(output_cache(first))
    second = run(target, turn, turn_mask, **cache_kwargs(output_cache(first)))
    handle.remove()
    assert lengths == [6] + [1] * (NEW - 1)
    assert torch.equal(second, run(target, turn, turn_mask, **cache_kwargs(output_cache(by_hand_first))))
    # And with the bridge again, what the source has read meanwhile is appended behind what the target holds.
    third_ids = torch.cat([turn, batch([7, 7, 7], seed=4)[0]], 1)
    third_mask = torch.cat([turn_mask, turn_mask.new_ones(3, 7)], 1)
    run(target, third_ids, third_mask, bridge=bridge, **cache_kwargs(held))
    assert bridge.last_report.tokens_mapped == 3 * (third_ids.shape[1] - 1 - (14 + NEW - 1))


def test_quantised_cache(models, bridge):
    ids, mask = batch([14, 9])
    if "fp8" not in (inspect.getdoc(QuantizedCache) or ""):
        pytest.skip("this Transformers has no quantised cache without further packages")
    config = {"backend": "fp8"}
    source, target, mapper = models
    rest = reference_cache(source, target, mapper, ids, mask, 13)
    quantised = QuantizedCache(backend="fp8", config=target.config)
    for layer in range(4):
        quantised.update(rest.layers[layer].keys, rest.layers[layer].values, layer)
    expected = run(target, ids, mask, **cache_kwargs(quantised))
    got = run(target, ids, mask, bridge=bridge, cache_implementation="quantized", cache_config=config)
    assert torch.equal(got, expected)


def eight_bit(num_layers):
    return Cache(layers=[EightBitLayer(residual_length=4) for _ in range(num_layers)])


def fill(cache, columns, num_layers):
    for layer in range(num_layers):
        cache.update(columns.layers[layer].keys, columns.layers[layer].values, layer)
    return cache


@pytest.mark.parametrize("mode", ["greedy", "sampling"])
def test_a_quantised_cache_of_the_caller_is_filled(models, bridge, mode):
    source, target, mapper = models
    ids, mask = batch([14, 9])
    quantised = fill(eight_bit(4), reference_cache(source, target, mapper, ids, mask, 13), 4)
    expected = run(target, ids, mask, **cache_kwargs(quantised), **MODES[mode])
    own = eight_bit(4)
    assert torch.equal(run(target, ids, mask, bridge=bridge, **cache_kwargs(own), **MODES[mode]), expected)
    assert own.get_seq_length() == 14 + NEW - 1 and own.layers[0]._quantized_keys is not None


def test_a_map_that_fails_leaves_a_quantised_cache_as_it_was(models, bridge, monkeypatch):
    target, mapper = models[1:]
    ids, mask = batch([14, 9])
    own = fill(eight_bit(4), read(target, ids[:, :8], mask[:, :8]), 4)
    before = [(layer._quantized_keys, layer.keys, layer.get_seq_length()) for layer in own.layers]
    fail_at_layer(monkeypatch, mapper, 2)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(target, ids, mask, bridge=bridge, **cache_kwargs(own))
    for layer, (quantized, recent, length) in zip(own.layers, before, strict=True):
        assert layer._quantized_keys is quantized and layer.keys is recent and layer.get_seq_length() == length


@pytest.mark.parametrize("steps", [0, 3, 6])
def test_a_quantised_source_cache_is_read_as_the_source_itself_reads_it(models, bridge, steps):
    """With nothing, with some and with all recent tokens requantised."""
    source, target, mapper = models
    ids, mask = batch([14, 9])
    quantised = eight_bit(3)
    held = 14 - steps
    with torch.no_grad():
        source(ids[:, :held], attention_mask=mask[:, :held], **positions(mask, 0, held), **cache_kwargs(quantised))
        for column in range(held, 14):
            kwargs = positions(mask, column, column + 1)
            source(
                ids[:, column : column + 1], attention_mask=mask[:, : column + 1], **kwargs, **cache_kwargs(quantised)
            )
    plain = DynamicCache()
    for layer in quantised.layers:
        keys, values = (
            torch.cat([layer._dequantize(states), recent], 2) if recent.dim() == 4 else layer._dequantize(states)
            for states, recent in ((layer._quantized_keys, layer.keys), (layer._quantized_values, layer.values))
        )
        plain.update(keys, values, len(plain.layers))
    expected = bridge.handoff(ids, mask, plain, target).map_all()
    cache = bridge.handoff(ids, mask, quantised, target)
    with torch.no_grad():  # a snapshot: what is appended afterwards does not reach it
        source(torch.tensor([[5], [6]]), **cache_kwargs(quantised))
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys, rtol=0, atol=0)
        torch.testing.assert_close(layer.values, other.values, rtol=0, atol=0)
    exact = reference_cache(source, target, mapper, ids, mask, 13)
    assert not torch.equal(cache.layers[3].keys, exact.layers[3].keys)
    torch.testing.assert_close(cache.layers[3].keys, exact.layers[3].keys, rtol=0, atol=0.2)


def positions(mask, start, stop):
    return {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, start:stop]}


# --- known traps


@pytest.mark.parametrize("kind", ["prompt lookup", "assistant"])
def test_assisted_decoding_given_a_cache(models, bridge, kind):
    """transformers 31644: a cache that holds part of the prompt already, and drafts from an assistant."""
    source, target, mapper = models
    ids, mask = batch([16])
    ids[0, 8:] = ids[0, :8].clone()
    own = read(target, ids[:, :5], mask[:, :5])
    by_parts = copy.deepcopy(own)
    rest = reference_cache(source, target, mapper, ids, mask, 15)
    for layer in range(4):
        by_parts.update(rest.layers[layer].keys[:, :, 5:], rest.layers[layer].values[:, :, 5:], layer)
    expected = run(target, ids, mask, do_sample=False, **cache_kwargs(by_parts))
    settings = {"prompt_lookup_num_tokens": 3} if kind == "prompt lookup" else {"assistant_model": assistant(target)}
    lengths, handle = forward_lengths(target)
    got = run(target, ids, mask, bridge=bridge, do_sample=False, **cache_kwargs(own), **settings)
    handle.remove()
    assert torch.equal(got, expected) and max(lengths) < 10


def test_a_static_cache_with_assisted_decoding(models, bridge):
    """transformers 30312: where plain generate refuses it, or fails at the end of the cache, nothing else happens."""
    target = models[1]
    ids, mask = batch([16])
    settings = {"cache_implementation": "static", "prompt_lookup_num_tokens": 3, "do_sample": False}
    plain, ours = (outcome(target, ids, mask, **extra, **settings) for extra in ({}, {"bridge": bridge}))
    if isinstance(plain, type):
        assert ours is plain
    else:
        assert torch.equal(ours, by_hand(models, ids, mask, do_sample=False))


def outcome(target, ids, mask, **kwargs):
    """The tokens, or the class of what was raised."""
    try:
        return run(target, ids, mask, **kwargs)
    except Exception as error:
        return type(error)


# --- wrapped models and devices


def lora(target, modules, seed=0):
    """A PEFT model around a copy of the target, with an adapter that changes what it says."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(copy.deepcopy(target), config).eval()


@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams", "returned samples"])
def test_a_target_wrapped_by_peft(models, mode):
    """The mapper is fitted for the adapted model; called as a PEFT user calls it."""
    source, plain, _ = models
    target = lora(plain, ["q_proj", "v_proj", "down_proj"])
    mapper = random_mapper(source, target)
    ids, mask = batch([14, 6, 10])
    bridge = KVBridge(source, mapper, HandoffPolicy(num_sinks=2))
    base = target.get_base_model()  # plain generate; on the same adapted weights
    expected = by_hand((source, base, mapper), ids, mask, num_sinks=2, **MODES[mode])
    torch.manual_seed(11)
    got = target.generate(
        input_ids=ids, attention_mask=mask, bridge=bridge, pad_token_id=0, max_new_tokens=NEW, **MODES[mode]
    )
    assert torch.equal(got, expected) and bridge.last_report.status == "ok"
    cache = bridge.handoff(ids, mask, target_model=target)
    assert cache.get_seq_length() == 13
    assert not torch.equal(got, by_hand((source, plain, random_mapper(source, plain)), ids, mask, num_sinks=2))


def test_a_source_wrapped_by_peft_and_an_adapter_that_the_mapper_does_not_know(models):
    plain_source, target, _ = models
    source = lora(plain_source, ["k_proj", "o_proj"])
    mapper = random_mapper(source, target)
    ids, mask = batch([14, 6])
    bridge = KVBridge(source, mapper, HandoffPolicy(num_sinks=0))
    expected = by_hand((source.get_base_model(), target, mapper), ids, mask)
    assert torch.equal(run(target, ids, mask, bridge=bridge), expected)
    with pytest.raises(FingerprintError, match="weights differ"):
        KVBridge(lora(plain_source, ["k_proj", "o_proj"], seed=1), mapper)
    adapted = lora(target, ["up_proj"])
    with pytest.raises(FingerprintError, match="weights differ"):
        adapted.generate(input_ids=ids, attention_mask=mask, bridge=bridge, max_new_tokens=3)


def test_learned_prompts_are_refused(models, bridge):
    """Virtual tokens in front are columns that no source has read."""
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    target = peft.get_peft_model(copy.deepcopy(models[1]), config).eval()
    ids, mask = batch([14, 6])
    settings = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 3, "pad_token_id": 0}
    bridge.check_target(models[1])  # the model inside, which is fine by itself
    with pytest.raises(UnsupportedModelError, match="learned prompt"):
        target.generate(bridge=bridge, **settings)
    with pytest.raises(UnsupportedModelError, match="learned prompt"):
        bridge.handoff(ids, mask, target_model=target)
    lenient = KVBridge(*models[::2], HandoffPolicy(on_failure="prefill"))
    with pytest.warns(HandoffFallbackWarning, match="learned prompt"):
        got = target.generate(bridge=lenient, **settings)
    assert torch.equal(got, target.generate(**settings)) and lenient.last_report.status == "fallback"


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_source_and_target_of_different_dtypes(models, dtypes):
    source, target, mapper = (copy.deepcopy(model) for model in models)
    source, target = source.to(dtypes[0]), target.to(dtypes[1])
    ids, mask = batch([12, 7])
    bridge = KVBridge(source, mapper, HandoffPolicy(num_sinks=2))
    out = run(target, ids, mask, bridge=bridge, return_dict_in_generate=True)
    assert output_cache(out).layers[0].keys.dtype == dtypes[1]
    # The first mapped entry depends on the source's rounding alone.
    exact = KVBridge(models[0], models[2], HandoffPolicy(num_sinks=2)).handoff(ids, mask, target_model=models[1])
    torch.testing.assert_close(
        output_cache(out).layers[0].keys[:, :, :11].float(), exact.layers[0].keys, rtol=0.1, atol=0.1
    )
