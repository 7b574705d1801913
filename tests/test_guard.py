"""Gates, shadow runs, events and thresholds, against forwards of the models by themselves."""

from __future__ import annotations

import copy
import functools
import json
import logging
import math
import warnings

import numpy as np
import pytest
import torch
from handoff_reference import batch, pair, positions_of, reference_cache
from models import tiny_model
from transformers import DynamicCache

from kvbridge_hf import HandoffFallbackWarning, HandoffPolicy, KVBridge, KVBridgeMapper
from kvbridge_hf.cache_argument import cache_kwargs
from kvbridge_hf.cache_kvbridge import BridgedCache
from kvbridge_hf.errors import ArtifactError, CalibrationError, GenerateArgumentError, HandoffRejected
from kvbridge_hf.guard import Gates, Shadow, calibrate_gates, tune_gate
from kvbridge_hf.guard.defaults import GateDefaults
from kvbridge_hf.guard.tuning import auroc, binomial_upper, miss_rate_at, read_events

SUFFIX = 6


@functools.cache
def calibrated(seed=0):
    """A model, the exact mapper to itself with calibrated gates: whatever a gate says is about the damage."""
    model = tiny_model("qwen3", seed=seed)
    mapper = KVBridgeMapper.identity(model)
    mapper.config.num_native_suffix = SUFFIX
    data = []
    for number in range(30):
        ids, mask = batch([24 + number % 9, 40 + number % 5], side="mixed", seed=number)
        data.append({"input_ids": ids, "attention_mask": mask})
    calibrate_gates(model, model, mapper, data, quantile=0.95)
    mapper.config.max_calibrated_positions = 64
    return model, mapper


def damaged(mapper, noise, kinds=("key", "value")):
    other = copy.deepcopy(mapper)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for kind in kinds:
            weight = getattr(other, f"{kind}_weight")
            weight.add_(noise * torch.randn(weight.shape, generator=generator))
    return other


def prompt(lengths=(34, 27), seed=50, side="left"):
    return batch(list(lengths), side=side, seed=seed)


@torch.no_grad()
def log_probs(model, ids, mask, cache=None, start=0):
    kwargs = {} if cache is None else cache_kwargs(cache)
    logits = model(ids[:, start:], attention_mask=mask, position_ids=positions_of(mask)[:, start:], **kwargs).logits
    return logits.double().log_softmax(-1)


def test_suffix_likelihood_is_the_models_own_over_the_same_tokens():
    """Two models of other sizes; both likelihoods recomputed over a cache built by hand."""
    source, target, mapper = pair(num_sinks=2, num_native_suffix=SUFFIX)
    ids, mask = prompt((30, 22))
    bridge = KVBridge(source, mapper, HandoffPolicy(gates=Gates(max_nll=1e6)))
    cache = bridge.handoff(ids, mask, target_model=target)
    start = ids.shape[1] - SUFFIX
    columns = slice(start, ids.shape[1] - 1)
    by_hand = reference_cache(source, target, mapper, ids, mask, start, num_sinks=2)
    theirs = log_probs(target, ids, mask, by_hand, start)[:, :-1]
    sources = log_probs(source, ids, mask)[:, columns]
    labels = ids[:, start + 1 :, None]
    nll = -theirs.gather(-1, labels)[..., 0].mean(1)
    source_nll = -sources.gather(-1, labels)[..., 0].mean(1)
    divergence = (sources.exp() * (sources - theirs)).sum(-1).mean(1)
    seen = bridge.last_report.gates["suffix_likelihood"]
    assert seen["status"] == "passed" and seen["tokens"] == 2 * (SUFFIX - 1)
    assert seen["nll"] == pytest.approx(float(nll.max()), rel=1e-3)
    assert seen["excess"] == pytest.approx(float((nll - source_nll).max()), rel=1e-3, abs=1e-3)
    assert seen["divergence"] == pytest.approx(float(divergence.max()), rel=1e-3)
    # The target has read the suffix but for the last column, and goes on as from the cache built by hand.
    assert cache.get_seq_length() == ids.shape[1] - 1
    last = log_probs(target, ids, mask, cache, ids.shape[1] - 1)
    by_hand.crop(-(by_hand.get_seq_length() - start))
    expected = log_probs(target, ids, mask, by_hand, start)[:, -1:]
    torch.testing.assert_close(last, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("side", ["left", "right", "mixed"])
def test_padding_takes_no_part_in_a_score(side):
    model, mapper = calibrated()
    bridge = KVBridge(model, damaged(mapper, 0.05), HandoffPolicy(gates=Gates(magnitude=False, max_suffix_score=1e9)))
    ids, mask = prompt((34, 27, 30), side=side)
    scores = []
    for row in range(3):
        alone = ids[row : row + 1, mask[row].bool()]
        bridge.handoff(alone, target_model=model)
        scores.append(bridge.last_report.gates["suffix_likelihood"]["nll"])
    bridge.handoff(ids, mask, target_model=model)
    seen = bridge.last_report.gates["suffix_likelihood"]["nll"]
    if side == "left":
        assert seen == pytest.approx(max(scores), rel=1e-4)
    else:  # of a row that ends in padding less of the suffix is seen, of none more than there is
        assert math.isfinite(seen)
    poisoned = ids.masked_fill(~mask.bool(), 7)
    bridge.handoff(poisoned, mask, target_model=model)
    assert bridge.last_report.gates["suffix_likelihood"]["nll"] == pytest.approx(seen, rel=1e-5)


@pytest.mark.parametrize("through", ["handoff", "generate"])
def test_a_rejection_is_the_targets_own_prefill_before_any_token(through):
    model, mapper = calibrated()
    events = []
    policy = HandoffPolicy(gates=Gates(magnitude=False), on_event=events.append)
    bridge = KVBridge(model, damaged(mapper, 1.0), policy)
    ids, mask = prompt()
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    own = model.generate(ids, attention_mask=mask, **settings)
    shown = []

    class Streamer:
        def put(self, value):
            shown.append((value, len(events)))

        def end(self):
            pass

    with pytest.warns(HandoffFallbackWarning, match="suffix_likelihood"):
        if through == "generate":
            out = model.generate(ids[:1], bridge=bridge, streamer=Streamer(), **settings)
            assert torch.equal(out, model.generate(ids[:1], **settings))
            # The decision was out before the first token that is not the prompt.
            assert [count for value, count in shown[1:]] == [1] * 6
        else:
            cache = bridge.handoff(ids, mask, target_model=model)
            out = model.generate(ids, attention_mask=mask, **cache_kwargs(cache), **settings)
            assert torch.equal(out, own)
            entries = DynamicCache()
            held = ids.shape[1] - SUFFIX
            model(
                ids[:, :held],
                attention_mask=mask[:, :held],
                position_ids=positions_of(mask)[:, :held],
                **cache_kwargs(entries),
            )
            fresh = bridge.handoff(ids, mask, target_model=model)
            assert fresh.get_seq_length() == held
            for one, two in zip(fresh.layers, entries.layers, strict=True):
                torch.testing.assert_close(one.keys, two.keys, rtol=1e-5, atol=1e-5)
    report = bridge.last_report
    assert (report.status, report.gate, report.tokens_mapped) == ("fallback", "suffix_likelihood", 0)
    assert "surprising" in report.reason and report.gates["suffix_likelihood"]["status"] == "rejected"
    event = events[0]
    assert (event["status"], event["gate"], event["error"]) == ("fallback", "suffix_likelihood", "HandoffRejected")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the second time it is only in the report
        model.generate(ids, attention_mask=mask, bridge=bridge, **settings)
    assert bridge.last_report.status == "fallback"


def test_a_rejection_may_be_an_error_and_is_one_where_nothing_can_be_read():
    model, mapper = calibrated()
    bridge = KVBridge(model, damaged(mapper, 1.0), HandoffPolicy(on_rejection="error", gates=Gates(magnitude=False)))
    ids, mask = prompt()
    with pytest.raises(HandoffRejected, match="suffix_likelihood") as caught:
        bridge.handoff(ids, mask, target_model=model)
    assert caught.value.report.gate == "suffix_likelihood"
    source_cache = DynamicCache()
    model(ids[:1], **cache_kwargs(source_cache))
    prefill = HandoffPolicy(num_sinks=0, gates=Gates(magnitude=True, suffix_likelihood=False))
    with pytest.raises(HandoffRejected, match="magnitude"):
        bridge.handoff(source_cache=source_cache, target_model=model, policy=prefill)


def test_good_handoffs_pass_in_every_way_of_calling():
    model, mapper = calibrated()
    bridge = KVBridge(model, mapper)
    ids, mask = prompt()
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    own = model.generate(ids, attention_mask=mask, **settings)
    for extra in ({}, {"cache_implementation": "static"}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}):
        rows = slice(0, 1) if "prompt_lookup_num_tokens" in extra else slice(None)
        inputs = {"inputs": ids[rows], "attention_mask": mask[rows]}
        if extra:
            own = model.generate(**inputs, **settings, **extra)
        out = model.generate(**inputs, **settings, **extra, bridge=bridge)
        assert torch.equal(out, own), extra
        assert bridge.last_report.status == "ok"
        assert bridge.last_report.gates["suffix_likelihood"]["status"] == "passed"
    # On top of what the target holds already: judged too, and only the lacking columns are appended.
    held = DynamicCache()
    model(ids[:, :10], attention_mask=mask[:, :10], position_ids=positions_of(mask)[:, :10], **cache_kwargs(held))
    cache = bridge.handoff(ids, mask, target_model=model, target_cache=held)
    assert cache is held and held.get_seq_length() == ids.shape[1] - SUFFIX
    assert bridge.last_report.gates["suffix_likelihood"]["tokens"] == 2 * (SUFFIX - 1)
    torch.testing.assert_close(
        log_probs(model, ids, mask, held, held.get_seq_length())[:, -1],
        log_probs(model, ids, mask)[:, -1],
        rtol=1e-4,
        atol=1e-4,
    )


def test_what_the_target_held_before_is_judged_and_left_alone_by_a_rejection():
    model, mapper = calibrated()
    bridge = KVBridge(model, mapper, HandoffPolicy(on_rejection="error"))
    ids, mask = prompt((36,))
    held = DynamicCache()
    model((ids[:, :20] * 7 + 1) % 90, **cache_kwargs(held))  # the cache of another text
    with pytest.raises(HandoffRejected, match="suffix_likelihood"):
        bridge.handoff(ids, mask, target_model=model, target_cache=held)
    assert held.get_seq_length() == 20


def test_without_calibration_mapping_stays_lazy_and_calibrated_gates_are_not_guessed():
    source, target, mapper = pair()
    ids, mask = prompt()
    cache = KVBridge(source, mapper).handoff(ids, mask, target_model=target)
    assert isinstance(cache, BridgedCache) and cache.num_mapped_layers == 0
    assert "suffix_likelihood" not in cache.report.gates
    for asked in ({"magnitude": True}, {"suffix_likelihood": True}, {"max_outside": 0.1}, {"max_suffix_score": 2.0}):
        bridge = KVBridge(source, mapper, HandoffPolicy(gates=Gates(**asked)))
        with pytest.raises(GenerateArgumentError, match="calibrate_gates"):
            bridge.handoff(ids, mask, target_model=target)


@pytest.mark.parametrize(
    ("gates", "name"),
    [
        (Gates(max_batch_size=1), "max_batch_size"),
        (Gates(min_tokens=35), "min_tokens"),
        (Gates(max_tokens=33), "max_tokens"),
        (Gates(position_range="refuse"), "position_range"),
        (Gates(latency_budget=0.0), "latency_budget"),
        (Gates(accept=lambda cache, report: False), "accept"),
        (Gates(accept=lambda cache, report: "not today"), "accept"),
        (Gates(max_nll=0.01), "suffix_likelihood"),
        (Gates(max_excess=-9.0), "suffix_likelihood"),
    ],
)
def test_each_gate_rejects_what_it_is_for_and_nothing_below(gates, name):
    model, mapper = calibrated()
    mapper = copy.deepcopy(mapper)
    mapper.config.max_calibrated_positions = 33
    ids, mask = prompt()
    bridge = KVBridge(model, mapper, HandoffPolicy(on_rejection="error", gates=gates))
    with pytest.raises(HandoffRejected, match=name), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bridge.handoff(ids, mask, target_model=model)
    assert bridge.last_report.gate == name
    loose = Gates(
        max_batch_size=2,
        min_tokens=34,
        max_tokens=34,
        position_range="refuse",
        latency_budget=1e6,
        max_nll=1e6,
        max_excess=1e6,
        accept=lambda cache, report: cache.get_seq_length() == 33 and report.tokens_mapped > 0,
    )
    mapper.config.max_calibrated_positions = 34
    cache = bridge.handoff(ids, mask, target_model=model, policy=HandoffPolicy(on_rejection="error", gates=loose))
    assert cache.report.status == "ok"
    assert {entry["status"] for entry in cache.report.gates.values()} == {"passed"}


def test_long_prompts_warn_and_go_on():
    model, mapper = calibrated()
    ids, mask = prompt((70, 30))
    bridge = KVBridge(model, mapper)
    with pytest.warns(UserWarning, match="longer than the 64 tokens"):
        report = bridge.handoff(ids, mask, target_model=model).report
    assert report.status == "ok" and report.gates["position_range"]["status"] == "warned" and report.notes


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_source_cache_with_holes_is_refused_but_padding_may_hold_anything(value):
    model, mapper = calibrated()
    ids, mask = prompt()
    source_cache = DynamicCache()
    model(ids, attention_mask=mask, position_ids=positions_of(mask), **cache_kwargs(source_cache))
    bridge = KVBridge(model, mapper, HandoffPolicy(on_rejection="error"))
    pad = (~mask.bool())[:, None, :, None]
    for layer in source_cache.layers:
        layer.keys, layer.values = layer.keys.masked_fill(pad, value), layer.values.masked_fill(pad, value)
    assert bridge.handoff(ids, mask, source_cache, model).report.status == "ok"
    source_cache.layers[1].values[1, 0, 20, 3] = value
    with pytest.raises(HandoffRejected, match="layer 1 values"):
        bridge.handoff(ids, mask, source_cache, model)


def test_a_mapper_that_overflows_is_caught_after_mapping():
    model, mapper = calibrated()
    broken = copy.deepcopy(mapper)
    with torch.no_grad():
        broken.key_bias[2, 0, 0] = math.inf
    bridge = KVBridge(model, broken, HandoffPolicy(on_rejection="error"))
    ids, mask = prompt()
    with pytest.raises(HandoffRejected, match=r"mapped_finite.*\[2\]"):
        bridge.handoff(ids, mask, target_model=model)


def test_magnitude_compares_each_layer_with_its_own_range():
    """A bias that is ordinary in one layer is far out in another; the shares are counted by numpy."""
    model, mapper = calibrated()
    gates = Gates(suffix_likelihood=False)
    ids, mask = prompt()
    louder = copy.deepcopy(mapper)
    with torch.no_grad():
        louder.value_weight[1] *= 3.0
    bridge = KVBridge(model, louder, HandoffPolicy(on_rejection="error", gates=gates))
    with pytest.raises(HandoffRejected, match="magnitude.*layer 1"):
        bridge.handoff(ids, mask, target_model=model)
    low, high = mapper.config.gates["magnitude"]["values"][1]
    cache = DynamicCache()
    model(ids, attention_mask=mask, position_ids=positions_of(mask), **cache_kwargs(cache))
    norms = np.linalg.norm(
        3.0 * cache.layers[1].values.detach().numpy().transpose(0, 2, 1, 3).reshape(2, 34, -1), axis=-1
    )
    shares = []
    for row in range(2):
        real = norms[row][mask[row].bool().numpy() & (np.arange(34) < 34 - SUFFIX)]
        shares.append(((real < low) | (real > high)).mean())
    assert bridge.last_report.gates["magnitude"]["value"] == pytest.approx(max(shares), abs=1e-6)


def test_calibration_is_what_the_models_say_by_themselves():
    """The exact mapper of a model to itself: its norms and likelihoods are the model's own."""
    model, mapper = calibrated()
    gates = mapper.config.gates
    norms = [[] for _ in range(6)]
    for number in range(30):
        ids, mask = batch([24 + number % 9, 40 + number % 5], side="mixed", seed=number)
        for row in range(2):
            cache = DynamicCache()
            model(ids[row : row + 1, mask[row].bool()], **cache_kwargs(cache))
            for index, layer in enumerate(cache.layers):
                for kind, states in enumerate((layer.keys, layer.values)):
                    norms[2 * index + kind] += states[0].transpose(0, 1).flatten(1).norm(dim=1).tolist()
    for index in range(3):
        for kind, name in enumerate(("keys", "values")):
            low, high = gates["magnitude"][name][index]
            everything = np.array(norms[2 * index + kind])
            # The range holds nearly all tokens that were mapped, and these are a part of everything.
            assert np.mean((everything < low) | (everything > high)) < 0.02
            assert everything.min() <= low < np.median(everything) < high <= everything.max() + 1e-4
    # Source and target expect the same; nothing is repaired, so that there is no drift.
    assert gates["suffix_likelihood"]["statistics"].keys() == {"reverse_divergence"}
    median, distance = gates["suffix_likelihood"]["statistics"]["reverse_divergence"]
    assert median == pytest.approx(0.0, abs=1e-5) and distance == pytest.approx(1e-3)
    assert gates["kl"]["p99"] < 1e-4 and gates["suffix_likelihood"]["num_tokens"] == SUFFIX - 1
    assert GateDefaults.from_config(mapper.config).to_dict() == gates


def mended(mapper_of, fraction):
    """A pair of other sizes whose mapper asks for repair."""
    source, target, mapper = pair(num_sinks=2, num_native_suffix=SUFFIX)
    mapper = copy.deepcopy(mapper)
    mapper.config.native_fraction, mapper.config.repair = fraction, mapper_of
    return source, target, mapper


def drift_by_hand(source, target, mapper, ids, mask):
    """Per row, from the caches with and without repair."""
    own = HandoffPolicy(gates=Gates.off())
    cache = KVBridge(source, mapper, own).handoff(ids, mask, target_model=target)
    plain = KVBridge(source, mapper, HandoffPolicy(gates=Gates.off(), native_fraction=0.0))
    plain = plain.handoff(ids, mask, target_model=target)
    ratios = np.zeros((len(cache.layers), len(ids)))
    for index, (after, before) in enumerate(zip(cache.layers, plain.layers, strict=True)):
        for row in range(len(ids)):
            columns = cache.repaired[row].nonzero()[:, 0]
            new, old = (layer.values[row, :, columns].double().numpy() for layer in (after, before))
            ratios[index, row] = np.linalg.norm(new - old) / np.linalg.norm(new) if len(columns) else np.nan
    return ratios.mean(0)


@pytest.mark.parametrize("choice", ["recency", "random"])
def test_drift_is_what_repair_changes(choice):
    source, target, mapper = mended(choice, 0.3)
    ids, mask = prompt((30, 22, 3))
    bridge = KVBridge(source, mapper, HandoffPolicy(gates=Gates(max_nll=1e6)))
    cache = bridge.handoff(ids, mask, target_model=target)
    expected = drift_by_hand(source, target, mapper, ids, mask)
    assert np.isnan(expected[2]) and expected[0] > 0.1  # a row of nothing but sinks and suffix
    np.testing.assert_allclose(cache.drift.numpy(), expected, rtol=1e-3)


def test_limits_are_order_statistics_of_sums_recomputed_here():
    """Rows so short that none is cut; the threshold is the ceil((n + 1) q)-th of them, with and without drift."""
    source, target, mapper = mended("recency", 0.5)
    rows = [batch([2 + SUFFIX + 2], seed=number)[0] for number in range(25)]
    gates = calibrate_gates(source, target, mapper, rows, quantile=0.8)
    suffix = gates["suffix_likelihood"]
    stats = {"reverse_divergence": [], "drift": []}
    for ids in rows:
        mask = torch.ones_like(ids)
        start = ids.shape[1] - SUFFIX
        by_hand = KVBridge(source, mapper, HandoffPolicy(gates=Gates.off())).handoff(ids, mask, target_model=target)
        theirs = log_probs(target, ids, mask, by_hand, start)[:, :-1]
        sources = log_probs(source, ids, mask)[:, start:-1]
        stats["reverse_divergence"].append(float((theirs.exp() * (theirs - sources)).sum(-1).mean()))
        stats["drift"].append(float(drift_by_hand(source, target, mapper, ids, mask)[0]))
    scaled = {}
    for name, values in stats.items():
        # torch's median of an odd count is the middle one, its quantile interpolates as numpy's
        median, high = np.median(values), np.quantile(values, 0.95)
        assert suffix["statistics"][name] == pytest.approx((median, high - median), rel=1e-2)
        scaled[name] = (np.array(values) - median) / (high - median)
    place = math.ceil(26 * 0.8) - 1
    assert suffix["limit"] == pytest.approx(np.sort(sum(scaled.values()))[place], rel=2e-2)
    assert suffix["limit_without_drift"] == pytest.approx(np.sort(scaled["reverse_divergence"])[place], rel=2e-2)
    # A handoff without repair is held against the limit without drift.
    for fraction, limit, total in ((None, "limit", sum(scaled.values())[3]), (0.0, "limit_without_drift", None)):
        policy = HandoffPolicy(native_fraction=fraction, gates=Gates(max_suffix_score=1e6, magnitude=False))
        seen = KVBridge(source, mapper, policy).handoff(rows[3], target_model=target).report.gates["suffix_likelihood"]
        if total is None:
            median, distance = suffix["statistics"]["reverse_divergence"]
            total = (seen["reverse_divergence"] - median) / distance
            assert "drift" not in seen
        assert seen["score"] == pytest.approx(total / suffix[limit], rel=2e-2, abs=1e-2)


def test_conformal_quantile_by_counting():
    from kvbridge_hf.guard.calibrate import conformal_quantile

    values = torch.arange(1, 100).double()[torch.randperm(99, generator=torch.Generator().manual_seed(0))]
    assert conformal_quantile(values, 0.99) == 99 and conformal_quantile(values, 0.9) == 90
    assert conformal_quantile(values[:10], 0.99) == float(values[:10].max())


def test_defaults_travel_with_the_artifact_and_damage_is_named(tmp_path):
    model, mapper = calibrated()
    mapper.save_pretrained(tmp_path / "m")
    loaded = KVBridgeMapper.from_pretrained(tmp_path / "m")
    assert GateDefaults.from_config(loaded.config) == GateDefaults.from_config(mapper.config)
    ids, mask = prompt()
    for spoil in (
        {"version": 9},
        {"magnitude": None},
        {"magnitude": {"keys": [[0, 1]], "values": [[0, 1]], "max_outside": 1}},
    ):
        broken = copy.deepcopy(mapper)
        broken.config.gates = {**mapper.config.gates, **spoil}
        with pytest.raises(ArtifactError, match="config.gates"):
            KVBridge(model, broken).handoff(ids, mask, target_model=model)


def test_calibration_refuses_too_little():
    model, mapper = calibrated()
    with pytest.raises(CalibrationError, match="rows"):
        calibrate_gates(model, model, copy.deepcopy(mapper), [torch.randint(3, 90, (2, 30))])
    with pytest.raises(CalibrationError, match="quantile"):
        calibrate_gates(model, model, copy.deepcopy(mapper), [], quantile=1.5)


def test_shadow_choice_is_a_share_of_the_ids_and_the_same_on_every_retry():
    shadow = Shadow(0.2, salt="a")
    chosen = [shadow.selects(f"request-{index}") for index in range(4000)]
    assert chosen == [shadow.selects(f"request-{index}") for index in range(4000)]
    assert abs(np.mean(chosen) - 0.2) < 4 * math.sqrt(0.2 * 0.8 / 4000)
    other = [Shadow(0.2, salt="b").selects(f"request-{index}") for index in range(4000)]
    assert abs(np.mean(np.array(chosen) & np.array(other)) - 0.04) < 0.015
    # A larger share keeps what a smaller one chose.
    more = [Shadow(0.5, salt="a").selects(f"request-{index}") for index in range(4000)]
    assert all(b for a, b in zip(chosen, more, strict=True) if a)
    assert not Shadow(0.0).selects("x") and Shadow(1.0).selects("x")


def test_shadow_records_what_the_target_alone_would_have_said():
    source, target, mapper = pair(num_sinks=2, num_native_suffix=SUFFIX)
    events = []
    policy = HandoffPolicy(shadow=Shadow(1.0), on_event=events.append)
    ids, mask = prompt((30, 22))
    bridge = KVBridge(source, mapper, policy)
    cache = bridge.handoff(ids, mask, target_model=target, request_id="r-1")
    start = ids.shape[1] - SUFFIX
    assert cache.get_seq_length() == start  # watching changes nothing
    own = log_probs(target, ids, mask)[:, start:]
    other = log_probs(target, ids, mask, reference_cache(source, target, mapper, ids, mask, start, 2), start)
    kl = (own.exp() * (own - other)).sum(-1)
    agreement = (own.argmax(-1) == other.argmax(-1)).double().mean(1)
    shadow, handoff = events
    assert (shadow["event"], handoff["event"]) == ("shadow", "handoff") and shadow["request_id"] == "r-1"
    for row, entry in enumerate(shadow["rows"]):
        assert entry["kl"] == pytest.approx(float(kl[row].mean()), rel=1e-3)
        assert entry["kl_last"] == pytest.approx(float(kl[row, -1]), rel=1e-3)
        assert entry["top1"] == pytest.approx(float(agreement[row])) and entry["columns"] == SUFFIX
        assert entry["score"] is None and entry["nll"] > 0
    out = target.generate(ids, attention_mask=mask, bridge=bridge, request_id="r-2", max_new_tokens=2, pad_token_id=0)
    assert out.shape[1] == ids.shape[1] + 2 and events[2]["rows"] == shadow["rows"]


def test_shadow_compares_rejected_handoffs_too():
    model, mapper = calibrated()
    events = []
    for gates in (Gates(), Gates(magnitude=False)):
        policy = HandoffPolicy(shadow=Shadow(1.0), on_event=events.append, gates=gates)
        bridge = KVBridge(model, damaged(mapper, 1.0), policy)
        with pytest.warns(HandoffFallbackWarning):
            bridge.handoff(*prompt(), target_model=model)
    shadows = [event for event in events if event["event"] == "shadow"]
    assert [event["rejected"] for event in shadows] == [True, True]
    assert all(row["kl"] > 0.1 and row["score"] > 1 for event in shadows for row in event["rows"])


def test_events_are_json_without_prompt_and_a_broken_listener_changes_nothing(caplog):
    model, mapper = calibrated()
    ids, mask = prompt()
    events = []

    def listen(event):
        events.append(event)
        raise OSError("the listener is broken")

    secret = "tokens 17 and 4"

    def refuse(cache, report):
        raise RuntimeError(secret)

    def answer(cache, report):
        return secret

    with caplog.at_level(logging.INFO, logger="kvbridge_hf.events"):
        KVBridge(model, mapper, HandoffPolicy(on_event=listen)).handoff(ids, mask, target_model=model, request_id="a")
        policy = HandoffPolicy(on_failure="prefill", on_event=listen, gates=Gates(accept=refuse))
        with pytest.warns(HandoffFallbackWarning):
            KVBridge(model, mapper, policy).handoff(ids, mask, target_model=model)
        with pytest.raises(RuntimeError):
            KVBridge(model, mapper, HandoffPolicy(on_event=listen, gates=Gates(accept=refuse))).handoff(
                ids, mask, target_model=model
            )
        with pytest.warns(HandoffFallbackWarning, match=secret):
            policy = HandoffPolicy(on_event=listen, gates=Gates(accept=answer))
            KVBridge(model, mapper, policy).handoff(ids, mask, target_model=model)
    assert [event["status"] for event in events] == ["ok", "fallback", "error", "fallback"]
    logged = [json.loads(record.message) for record in caplog.records if record.name == "kvbridge_hf.events"]
    assert logged == events
    fields = {"schema", "version", "event", "time", "request_id", "status", "gate", "error", "reason"}
    fields |= {"batch_size", "tokens_mapped", "tokens_native", "times", "gates"}
    for event in events:
        assert set(event) == fields and event["version"] == 1 and secret not in json.dumps(event)
    assert events[1]["error"] == "RuntimeError" and events[1]["reason"] is None and events[0]["request_id"] == "a"


def shadow_event(rows):
    return {"event": "shadow", "rows": [dict(zip(("kl", "score"), row, strict=True)) for row in rows]}


def test_tuned_threshold_lets_the_wanted_share_pass():
    generator = np.random.default_rng(0)
    bad, good = generator.normal(2, 1, 200), generator.normal(0, 1, 500)
    events = [shadow_event([(1.0, value) for value in bad]), shadow_event([(0.1, value) for value in good])]
    result = tune_gate([*events, {"event": "handoff"}, shadow_event([(1.0, None)])], max_kl=0.5, miss_rate=0.05)
    assert result["setting"] == "max_suffix_score" and (result["bad"], result["good"], result["left_out"]) == (
        200,
        500,
        1,
    )
    assert np.mean(bad <= result["threshold"]) == result["miss_rate"] == pytest.approx(0.05)
    assert np.mean(good > result["threshold"]) == result["false_alarm_rate"]
    above = np.mean(bad[:, None] > good[None, :]) + 0.5 * np.mean(bad[:, None] == good[None, :])
    assert result["auroc"] == pytest.approx(above)
    # The next higher threshold that changes anything would miss more.
    higher = np.sort(bad[bad > result["threshold"]])[0]
    assert np.mean(bad <= higher) > 0.05
    Gates(**{result["setting"]: result["threshold"]})
    with pytest.raises(CalibrationError, match="both kinds"):
        tune_gate(events, max_kl=5.0)


def test_rates_and_bounds_agree_with_counting():
    assert auroc([1, 2, 2, 3], [2, 3, 4]) == pytest.approx(
        np.mean([(b > g) + 0.5 * (b == g) for b in (2, 3, 4) for g in (1, 2, 2, 3)])
    )
    good, bad = list(range(100)), [95.5, 98.5, 99.5, 200]
    # One false alarm in a hundred is allowed: what lies above 98 is rejected.
    assert miss_rate_at(good, bad, 0.01) == 0.25
    assert miss_rate_at(good, bad, 0.0) == 0.5
    # With no hit in n trials the bound solves (1 - p)^n = 0.05.
    assert binomial_upper(0, 59) == pytest.approx(1 - 0.05 ** (1 / 59))
    assert binomial_upper(3, 3) == 1.0


def test_tuning_from_a_log_on_the_command_line(tmp_path, capsys):
    from kvbridge_hf.cli import main

    path = tmp_path / "events.jsonl"
    rows = [(1.0, 3.0 + index) for index in range(10)] + [(0.1, index / 10) for index in range(20)]
    path.write_text(
        "INFO kvbridge: " + json.dumps(shadow_event(rows)) + "\n\n" + json.dumps({"event": "handoff"}) + "\n"
    )
    assert len(read_events(path)) == 2
    assert main(["tune-gate", str(path), "--max-kl", "0.5", "--miss-rate", "0.1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert 3.0 <= result["threshold"] < 4.0 and result["miss_rate"] == pytest.approx(0.1) and result["auroc"] == 1.0
    assert main(["tune-gate", str(path), "--max-kl", "0.5"]) == 0
    assert "Gates(max_suffix_score=" in capsys.readouterr().out
    assert main(["tune-gate", str(path), "--max-kl", "50"]) == 2
    _, mapper = calibrated()
    mapper.save_pretrained(tmp_path / "mapper")
    arguments = ["--max-kl", "0.5", "--mapper", str(tmp_path / "mapper"), "--output", str(tmp_path / "tuned")]
    assert main(["tune-gate", str(path), *arguments]) == 0
    tuned = KVBridgeMapper.from_pretrained(tmp_path / "tuned")
    assert tuned.config.gates["suffix_likelihood"]["max_score"] == pytest.approx(result["threshold"], abs=1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Gates(position_range="maybe"),
        lambda: Gates(max_batch_size=0),
        lambda: Gates(latency_budget=math.nan),
        lambda: Gates(accept=3),
        lambda: Shadow(1.5),
        lambda: HandoffPolicy(gates="off"),
        lambda: HandoffPolicy(on_rejection="ignore"),
    ],
)
def test_settings_out_of_range_are_named(wrong):
    with pytest.raises(GenerateArgumentError):
        wrong()
