"""BridgedCache: mapped when touched, an ordinary dynamic cache afterwards; compared with caches built by hand."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from handoff_reference import batch, fail_at_layer, pair, positions_of, random_mapper, reference_cache
from models import tiny_model
from transformers import DynamicCache, StaticCache

from kvbridge_hf import BridgedCache, HandoffFallbackWarning, HandoffPolicy, HandoffReport, KVBridge
from kvbridge_hf.cache_argument import CACHE_ARG, cache_kwargs, get_cache, output_cache, pop_cache
from kvbridge_hf.errors import CacheMismatchError, GenerateArgumentError, KVBridgeError, PairMismatchError
from kvbridge_hf.prompt_layout import layout, left_aligned

pytestmark = pytest.mark.core

CLOSE = {"rtol": 0, "atol": 2e-5}


@pytest.fixture(scope="module")
def models():
    return pair("qwen3", "llama")


@pytest.fixture
def bridge(models):
    source, _, mapper = models
    return KVBridge(source, mapper, HandoffPolicy(num_sinks=0, num_native_suffix=0))


def source_cache(model, ids, mask=None):
    mask = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad():
        return output_cache(model(ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=True))


def assert_same(cache, expected, **tolerance):
    tolerance = tolerance or CLOSE
    assert cache.get_seq_length() == expected.get_seq_length()
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys, **tolerance)
        torch.testing.assert_close(layer.values, other.values, **tolerance)


# --- the numbers


@pytest.mark.parametrize(
    ("source_arch", "target_arch"), [("qwen3", "llama"), ("llama", "mistral"), ("olmo2", "qwen2")]
)
@pytest.mark.parametrize("num_sinks", [0, 4])
@pytest.mark.parametrize("side", ["left", "right", "mixed"])
def test_equals_the_cache_built_by_hand(source_arch, target_arch, num_sinks, side):
    source, target, mapper = pair(source_arch, target_arch)
    ids, mask = batch([15, 7, 2, 11], side=side)
    for suffix in (0, 3):
        policy = HandoffPolicy(num_sinks=num_sinks, num_native_suffix=suffix)
        cache = KVBridge(source, mapper, policy).handoff(ids, mask, target_model=target)
        expected = reference_cache(source, target, mapper, ids, mask, 15 - suffix, num_sinks)
        assert_same(cache, expected)
        covered = mask[:, : 15 - suffix]
        sinks = (positions_of(covered) < num_sinks) & covered.bool()
        assert cache.report.tokens_mapped == int(covered.sum() - sinks.sum())
        assert cache.report.tokens_mapped + cache.report.tokens_native == int(mask.sum())
        assert all(bool((layer.keys.transpose(1, 2)[covered == 0] == 0).all()) for layer in cache.layers)


@pytest.mark.parametrize("num_sinks", [0, 3])
@pytest.mark.parametrize("side", ["left", "right", "mixed"])
def test_padded_rows_equal_single_rows(models, side, num_sinks):
    source, target, mapper = models
    bridge = KVBridge(source, mapper, HandoffPolicy(num_sinks=num_sinks, num_native_suffix=0))
    lengths = [21, 6, 13, 1]
    ids, mask = batch(lengths, side=side)
    follow = torch.randint(3, 96, (4, 5), generator=torch.Generator().manual_seed(7))
    mask_after = torch.cat([mask, torch.ones_like(follow)], dim=1)
    cache = bridge.handoff(ids, mask, target_model=target)
    with torch.no_grad():
        together = target(
            follow,
            attention_mask=mask_after,
            position_ids=positions_of(mask_after)[:, -5:],
            **cache_kwargs(cache),
        ).logits
        for row, length in enumerate(lengths):
            single = bridge.handoff(ids[row, mask[row].bool()][None], target_model=target)
            logits = target(follow[row][None], **cache_kwargs(single)).logits
            torch.testing.assert_close(together[row], logits[0], rtol=1e-5, atol=1e-5)
            assert single.get_seq_length() == length + 5


@pytest.mark.parametrize("num_sinks", [0, 2])
def test_what_stands_in_padded_columns_reaches_nothing(models, num_sinks):
    source, target, mapper = models
    ids, mask = batch([9, 5], side="left")
    bridge = KVBridge(source, mapper, HandoffPolicy(num_sinks=num_sinks, num_native_suffix=2))
    clean = bridge.handoff(ids, mask, source_cache(source, ids, mask), target).map_all()
    read = source_cache(source, ids, mask)
    for layer in read.layers:
        layer.keys[1, :, :4] = float("nan")
        layer.values[1, :, :4] = float("inf")
    ids = torch.where(mask.bool(), ids, 95)
    dirty = bridge.handoff(ids, mask, read, target)
    assert_same(dirty, clean, rtol=0, atol=0)


# --- laziness


def test_nothing_is_mapped_before_it_is_touched(bridge, models):
    _, target, _ = models
    ids, mask = batch([12, 8])
    cache = bridge.handoff(ids, mask, target_model=target)
    assert cache.get_seq_length() == 12
    assert cache.get_mask_sizes(3, 0) == (15, 0)
    assert len(cache) == 4 and cache.get_max_length() == -1 and not cache.is_compileable
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([1, 0, 3, 2]))
    cache.crop(-1)
    assert cache.num_mapped_layers == 0 and "map" not in cache.report.times
    assert cache.layers[2].keys.shape == (4, 3, 11, 8)
    assert [layer.is_mapped for layer in cache.layers] == [False, False, True, False]
    assert cache.report.times["map"] > 0
    assert cache.map_all().num_mapped_layers == 4


def test_a_forward_maps_layer_by_layer_and_grows_the_cache(bridge, models):
    source, target, mapper = models
    ids, _ = batch([10])
    expected = reference_cache(source, target, mapper, ids, torch.ones_like(ids), 10)
    cache, mapped = bridge.handoff(ids, target_model=target), []
    handles = [
        layer.self_attn.register_forward_hook(lambda *_: mapped.append(cache.num_mapped_layers))
        for layer in target.model.layers
    ]
    follow = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        logits = target(follow, **cache_kwargs(cache)).logits
        for handle in handles:
            handle.remove()
        expected_logits = target(follow, **cache_kwargs(expected)).logits
    assert mapped == [1, 2, 3, 4]
    torch.testing.assert_close(logits, expected_logits, **CLOSE)
    assert_same(cache, expected)


OPERATIONS = {
    "crop": lambda cache: cache.crop(-4),
    "crop to nothing": lambda cache: cache.crop(-9),
    "crop none": lambda cache: cache.crop(0),
    "repeat": lambda cache: cache.batch_repeat_interleave(3),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
    "select mask": lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])),
    "several": lambda cache: (
        cache.batch_repeat_interleave(2),
        cache.crop(-2),
        cache.reorder_cache(torch.tensor([5, 0, 1, 2, 3, 4])),
        cache.batch_select_indices(torch.tensor([1, 4])),
        cache.crop(-1),
    ),
}


@pytest.mark.parametrize("touched", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_equal_those_of_a_dynamic_cache(bridge, models, name, touched):
    source, target, mapper = models
    ids, mask = batch([9, 5, 7])
    cache = bridge.handoff(ids, mask, target_model=target)
    if touched:
        cache.map_all()
    expected = reference_cache(source, target, mapper, ids, mask, 9)
    OPERATIONS[name](cache)
    OPERATIONS[name](expected)
    assert cache.num_mapped_layers == (4 if touched else 0)
    assert_same(cache, expected)
    states = torch.randn(expected.layers[0].keys.shape[0], 3, 2, 8)
    for layer in range(4):
        ours, theirs = cache.update(states, -states, layer), expected.update(states, -states, layer)
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("touched", [False, True])
def test_reset_leaves_an_empty_growing_cache(bridge, models, touched):
    _, target, _ = models
    cache = bridge.handoff(batch([6])[0], target_model=target)
    if touched:
        cache.map_all()
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.layers[0].keys is None
    states = torch.randn(1, 3, 2, 8)
    assert cache.update(states, states, 0)[0].shape == (1, 3, 2, 8)
    assert cache.get_seq_length() == 2


def test_offload_and_prefetch(bridge, models):
    _, target, _ = models
    cache = bridge.handoff(batch([6])[0], target_model=target)
    layer = cache.layers[1]
    layer.offload()
    assert not layer.is_mapped  # nothing stood on the device
    layer.prefetch()
    assert layer.is_mapped and layer.keys.device == layer.device
    layer.offload()
    assert layer.keys.device.type == "cpu"
    layer.prefetch()
    assert layer.get_seq_length() == 6


@pytest.mark.parametrize("touched", [False, True])
def test_copies_are_independent_and_share_no_model(bridge, models, touched):
    source, target, mapper = models
    ids, mask = batch([9, 5])
    cache = bridge.handoff(ids, mask, target_model=target)
    if touched:
        cache.map_all()
    other = copy.deepcopy(cache)
    assert touched or other.layers[0]._prefix is cache.layers[0]._prefix
    states = torch.randn(2, 3, 1, 8)
    for layer in range(4):
        cache.update(states, states, layer)
    assert other.get_seq_length() == 9
    assert_same(other, reference_cache(source, target, mapper, ids, mask, 9))


def test_threads_may_map_one_cache(bridge, models):
    source, target, mapper = models
    ids, mask = batch([30, 12])
    cache = bridge.handoff(ids, mask, target_model=target)
    barrier = threading.Barrier(6)

    def work():
        barrier.wait()
        cache.map_all()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same(cache, reference_cache(source, target, mapper, ids, mask, 30))


def test_the_source_is_let_go_when_all_layers_are_mapped(bridge, models):
    source, target, _ = models
    ids, _ = batch([8])
    read = source_cache(source, ids)
    alive = weakref.ref(read.layers[0].keys)
    cache = bridge.handoff(ids, None, read, target)
    del read
    gc.collect()
    assert alive() is not None
    cache.map_all()
    gc.collect()
    assert alive() is None


def test_dtype_and_autograd(models):
    source, target, mapper = models
    half = copy.deepcopy(target).to(torch.bfloat16)
    bridge = KVBridge(source, mapper, HandoffPolicy(num_sinks=2, num_native_suffix=0))
    ids, _ = batch([8])
    cache = bridge.handoff(ids, target_model=half)
    assert cache.layers[0].keys.dtype == torch.bfloat16 and not cache.layers[0].keys.requires_grad
    expected = bridge.handoff(ids, target_model=target)
    # Mapped columns are rounded once, at the end.
    torch.testing.assert_close(cache.layers[3].keys[:, :, 2:], expected.layers[3].keys[:, :, 2:].to(torch.bfloat16))
    out = target(torch.tensor([[5]]), **cache_kwargs(bridge.handoff(ids, target_model=target)))
    assert out.logits.requires_grad  # with gradients on, the target is differentiable and the map is not


def test_autocast_and_inference_mode(bridge, models):
    source, target, mapper = models
    ids, _ = batch([8])
    expected = reference_cache(source, target, mapper, ids, torch.ones_like(ids), 8)
    with torch.inference_mode():
        cache = bridge.handoff(ids, target_model=target)
        target(torch.tensor([[5]]), **cache_kwargs(cache))
    cache.crop(-1)
    assert_same(cache, expected)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        cache = bridge.handoff(ids, None, source_cache(source, ids), target)
        assert cache.layers[0].keys.dtype == torch.float32  # touched before a forward says that it computes in another
        logits = target(torch.tensor([[5]]), **cache_kwargs(cache)).logits
        plain = copy.deepcopy(expected)
        for layer in plain.layers:
            layer.keys, layer.values = layer.keys.bfloat16(), layer.values.bfloat16()
        expected_logits = target(torch.tensor([[5]]), **cache_kwargs(plain)).logits
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=0.15)


# --- other caches


@pytest.mark.parametrize("repeats", [1, 3])
def test_write_into_a_static_cache(bridge, models, repeats):
    source, target, mapper = models
    ids, mask = batch([9, 5])
    static = StaticCache(config=target.config, max_cache_len=16)
    bridge.handoff(ids, mask, target_model=target).write_into(static, repeats=repeats)
    expected = reference_cache(source, target, mapper, ids, mask, 9)
    expected.batch_repeat_interleave(repeats)
    assert int(static.get_seq_length()) == 9
    for layer, other in zip(static.layers, expected.layers, strict=True):
        torch.testing.assert_close(layer.keys[:, :, :9], other.keys, **CLOSE)
        assert bool((layer.keys[:, :, 9:] == 0).all())


def test_append_to_a_cache_that_holds_native_tokens(bridge, models):
    source, target, mapper = models
    ids, mask = batch([14, 9])
    with torch.no_grad():
        own = output_cache(
            target(ids[:, :8], attention_mask=mask[:, :8], position_ids=positions_of(mask)[:, :8], use_cache=True)
        )
        native = copy.deepcopy(own)
    returned = bridge.handoff(ids, mask, target_model=target, target_cache=own)
    assert returned is own and own.get_seq_length() == 14
    expected = reference_cache(source, target, mapper, ids, mask, 14)
    for layer, before, other in zip(own.layers, native.layers, expected.layers, strict=True):
        assert torch.equal(layer.keys[:, :, :8], before.keys)
        torch.testing.assert_close(layer.values[:, :, 8:], other.values[:, :, 8:], **CLOSE)
    assert bridge.last_report.tokens_mapped == 12 and bridge.last_report.tokens_native == 11


def test_a_failed_append_leaves_the_cache_as_it_was(bridge, models, monkeypatch):
    _, target, mapper = models
    ids, _ = batch([14])
    own = source_cache(target, ids[:, :8])
    native = copy.deepcopy(own)
    fail_at_layer(monkeypatch, mapper, 2)
    with pytest.raises(RuntimeError, match="out of memory"):
        bridge.handoff(ids, target_model=target, target_cache=own)
    assert_same(own, native, rtol=0, atol=0)


# --- the source's cache


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_source_cache_is_read_and_left_alone(bridge, models, kind):
    source, target, mapper = models
    ids, mask = batch([9, 5])
    read = DynamicCache() if kind == "dynamic" else StaticCache(config=source.config, max_cache_len=20)
    with torch.no_grad():
        source(ids, attention_mask=mask, position_ids=positions_of(mask), **cache_kwargs(read))
    before = [layer.keys.clone() for layer in read.layers]
    cache = bridge.handoff(ids, mask, read, target)
    with torch.no_grad():  # the source goes on before anything is mapped
        source(
            torch.tensor([[4], [5]]),
            attention_mask=torch.cat([mask, mask.new_ones(2, 1)], 1),
            position_ids=positions_of(mask)[:, -1:] + 1,
            **cache_kwargs(read),
        )
    assert_same(cache, reference_cache(source, target, mapper, ids, mask, 9))
    assert all(
        torch.equal(layer.keys[:, :, :9], keys[:, :, :9]) for layer, keys in zip(read.layers, before, strict=True)
    )
    assert "source_prefill" not in cache.report.times


def test_a_source_cache_written_in_place_is_noticed(bridge, models):
    source, target, _ = models
    ids, _ = batch([9])
    read = source_cache(source, ids)
    cache = bridge.handoff(ids, None, read, target)
    for layer in read.layers:
        layer.keys.zero_()
    with pytest.raises(CacheMismatchError, match="written in place"):
        cache.map_all()


def test_shorter_and_longer_source_caches(bridge, models):
    source, target, mapper = models
    ids, mask = batch([12, 7])
    expected = reference_cache(source, target, mapper, ids, mask, 8)
    short = bridge.handoff(ids, mask, source_cache(source, ids[:, :8], mask[:, :8]), target)
    assert_same(short, expected)  # the target runs the other four columns
    assert short.report.tokens_native == 8 and not short.report.notes
    long = bridge.handoff(ids[:, :8], mask[:, :8], source_cache(source, ids, mask), target)
    assert_same(long, expected)
    assert "4 columns after the prompt" in long.report.notes[0]


def test_source_that_read_under_another_padding(bridge, models):
    source, target, mapper = models
    rows = [torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(length)) for length in (10, 6, 8)]
    read = torch.tensor([7, 6, 3])  # how much of each row the source has read
    source_ids, source_mask = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.long)
    ids, mask = torch.zeros(3, 10, dtype=torch.long), torch.zeros(3, 10, dtype=torch.long)
    for row, tokens in enumerate(rows):
        source_ids[row, : read[row]], source_mask[row, : read[row]] = tokens[: read[row]], 1
        ids[row, 10 - len(tokens) :], mask[row, 10 - len(tokens) :] = tokens, 1
    cache = bridge.handoff(
        ids, mask, source_cache(source, source_ids, source_mask), target, source_attention_mask=source_mask
    )
    # The third row's fourth token stands in column 5, and the source has not read it.
    assert cache.get_seq_length() == 5
    assert_same(cache, reference_cache(source, target, mapper, ids, mask, 5))


def test_without_tokens(bridge, models):
    source, target, mapper = models
    ids, mask = batch([9, 5])
    cache = bridge.handoff(source_cache=source_cache(source, ids, mask), attention_mask=mask, target_model=target)
    assert_same(cache, reference_cache(source, target, mapper, ids, mask, 9))
    with pytest.raises(GenerateArgumentError, match="num_sinks=0"):
        bridge.handoff(
            source_cache=source_cache(source, ids, mask), target_model=target, policy=HandoffPolicy(num_sinks=4)
        )
    with pytest.raises(GenerateArgumentError, match="input_ids, source_cache or both"):
        bridge.handoff(target_model=target)
    with pytest.raises(GenerateArgumentError, match="target_model"):
        bridge.handoff(ids)


def test_more_than_one_hop(models):
    source, target, mapper = models
    ids, _ = batch([9])
    first = KVBridge(source, mapper, HandoffPolicy(num_sinks=0, num_native_suffix=0)).handoff(ids, target_model=target)
    eager = DynamicCache()
    for layer in range(4):
        eager.update(first.layers[layer].keys, first.layers[layer].values, layer)
    back = random_mapper(target, source)
    second = KVBridge(target, back, HandoffPolicy(num_sinks=0, num_native_suffix=0))
    lazily = second.handoff(ids, None, copy.deepcopy(first), source)
    assert_same(lazily, second.handoff(ids, None, eager, source), rtol=0, atol=0)


def broken_caches(models):
    source, target, _ = models
    ids, _ = batch([9])
    other_heads = tiny_model("qwen3", num_layers=3, num_heads=4, num_kv_heads=4, head_dim=16)
    ragged = source_cache(source, ids)
    ragged.layers[1].crop(-3)
    return {
        "another model": (source_cache(target, ids), "4 layers"),
        "other heads": (source_cache(other_heads, ids), "shape"),
        "empty": (DynamicCache(config=source.config), "is empty"),
        "no cache": ("a cache", "must be a Transformers Cache"),
        "two rows": (source_cache(source, batch([9, 9])[0]), "2 rows"),
        "ragged": (ragged, "Layer 1 of the source cache"),
    }


@pytest.mark.parametrize("name", ["another model", "other heads", "empty", "no cache", "two rows", "ragged"])
def test_a_source_cache_that_does_not_fit(bridge, models, name):
    _, target, _ = models
    ids, _ = batch([9])
    cache, message = broken_caches(models)[name]
    with pytest.raises(CacheMismatchError, match=message):
        bridge.handoff(ids, None, cache, target)
    policy = HandoffPolicy(on_failure="prefill", num_native_suffix=2)
    bridge._warned.clear()
    with pytest.warns(HandoffFallbackWarning, match=message):
        own = bridge.handoff(ids, None, cache, target, policy=policy)
    assert own.report.status == "fallback" and message in own.report.reason
    assert own.report.tokens_mapped == 0 and own.report.tokens_native == 9
    assert_same(own, source_cache(target, ids[:, :7]), rtol=0, atol=1e-6)


def test_mask_of_another_shape(bridge, models):
    source, target, _ = models
    ids, mask = batch([9, 5])
    with pytest.raises(GenerateArgumentError, match="attention_mask"):
        bridge.handoff(ids, mask[:, :4], target_model=target)
    with pytest.raises(CacheMismatchError, match="mask has shape"):
        bridge.handoff(ids, mask, source_cache(source, ids), target, source_attention_mask=mask[:, :4])
    with pytest.raises(GenerateArgumentError, match="source_attention_mask"):
        bridge.handoff(ids, mask, target_model=target, source_attention_mask=mask)


# --- policy, report, layout, names


@pytest.mark.parametrize("setting", [{"on_failure": "ignore"}, {"num_sinks": -1}, {"num_native_suffix": 1.5}])
def test_a_policy_checks_its_settings(setting):
    with pytest.raises(GenerateArgumentError, match=next(iter(setting))):
        HandoffPolicy(**setting)


def test_a_report_is_plain_data():
    report = HandoffReport(tokens_mapped=3)
    report.add_time("map", 0.5)
    report.add_time("map", 0.25)
    assert report.to_dict()["times"] == {"map": 0.75}
    other = copy.deepcopy(report)
    other.add_time("map", 1.0)
    assert report.times == {"map": 0.75} and other.tokens_mapped == 3


def test_prompt_too_short_for_a_map(models):
    source, target, mapper = models
    bridge = KVBridge(source, mapper, HandoffPolicy(num_sinks=4, num_native_suffix=1))
    for length in (1, 2, 5):  # nothing but first and last tokens
        ids, _ = batch([length])
        cache = bridge.handoff(ids, target_model=target)
        assert isinstance(cache, BridgedCache) and cache.report.status == "ok"
        assert cache.report.tokens_native == length and "source_prefill" not in cache.report.times
        assert cache.get_seq_length() == length - 1
        if length > 1:
            assert_same(cache, source_cache(target, ids[:, :-1]), rtol=0, atol=1e-6)
    assert bridge.handoff(batch([6])[0], target_model=target).report.tokens_mapped == 1


def test_layout_by_hand():
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    plan = layout(mask, None, 2)
    assert plan.num_columns == 4 and plan.source_columns is None and plan.covered_tokens == 6
    assert plan.position_ids.tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    right = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    plan = layout(mask, right, 1)
    assert plan.num_columns == 5 and plan.source_columns[:, 2:].tolist() == [[0, 1, 2], [2, 3, 4]]
    assert left_aligned(mask) is None
    assert left_aligned(right).tolist() == [[4, 5, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]


def test_cache_argument_takes_both_spellings(models):
    _, target, _ = models
    cache = DynamicCache()
    assert CACHE_ARG in ("cache", "past_key_values")
    for name in ("cache", "past_key_values"):
        kwargs = {name: cache, "use_cache": True}
        assert get_cache(kwargs) is cache and pop_cache(kwargs) is cache and kwargs == {"use_cache": True}
    assert pop_cache({"cache": None}) is None
    with torch.no_grad():
        output = target(torch.tensor([[5, 6]]), **cache_kwargs(cache), use_cache=True)
    assert output_cache(output) is cache
    with pytest.raises(ValueError, match="use_cache"):
        output_cache(target(torch.tensor([[5]]), use_cache=False))


def test_pair_errors_are_library_errors(models):
    source, target, mapper = models
    with pytest.raises(PairMismatchError, match="num_layers=3") as caught:
        KVBridge(target, mapper)
    assert isinstance(caught.value, KVBridgeError)
    bridge = KVBridge(source, mapper)
    errors = []
    for _ in range(2):  # the answer is remembered, the exception is not: it would keep every caller's frames
        with pytest.raises(PairMismatchError, match="target has num_layers=4") as caught:
            bridge.handoff(batch([9])[0], target_model=source)
        errors.append(caught.value)
    assert errors[0] is not errors[1]
