"""Methods that see more than a token of the source: anchors of the target, a causal layer, a fuser."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from methods_pair import (
    VOCAB,
    assert_same_maps,
    assert_saved_and_loaded,
    content,
    make_pair,
    token_batches,
    tokens,
)

from kvbridge_hf.calibration.driver import fit_mapper
from kvbridge_hf.calibration.traces import read_batches, trace
from kvbridge_hf.errors import ArtifactError, CacheMismatchError, FitConfigError, GenerateArgumentError
from kvbridge_hf.evaluation import BridgeHandoff
from kvbridge_hf.evaluation.flops import PrefillCost
from kvbridge_hf.generation_kvbridge import HandoffPolicy, KVBridge
from kvbridge_hf.guard.settings import Gates
from kvbridge_hf.mappers.config import FitConfig
from kvbridge_hf.modeling_kvbridge import KVBridgeMapper, SourceContent

BATCHES = token_batches(8, 40)


@pytest.fixture(scope="module")
def pair():
    return make_pair(3)


def fitted(pair, method: str, **overrides) -> KVBridgeMapper:
    config = FitConfig(
        **{"method": method, "top_k": 2, "num_sinks": 1, "num_native_suffix": 2, "heldout_fraction": 0.3, **overrides}
    )
    return fit_mapper(*pair, BATCHES, config, progress=False)


def handed(pair, mapper, ids, mask=None, **arguments):
    bridge = KVBridge(pair[0], mapper, HandoffPolicy(gates=Gates.off()))
    return bridge.handoff(ids, mask, target_model=pair[1], **arguments)


def own_cache(model, ids, mask=None):
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        output = model(ids, attention_mask=mask, position_ids=positions, use_cache=True)
    return next(value for name, value in output.items() if name in ("cache", "past_key_values"))


def layer0_of(model, ids) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values before rotation `(B, T, heads * dim)` from the projections themselves, and embeddings."""
    attention, found = model.model.layers[0].self_attn, {}
    hooks = [
        getattr(attention, name).register_forward_hook(lambda m, i, o, name=name: found.update({name: o}))
        for name in ("k_proj", "v_proj")
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return found["k_proj"], found["v_proj"], model.model.embed_tokens.weight[ids].detach()


# ---- anchors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("anchors, support", [(["layer0"], "full_head"), (["embedding"], "head_local")])
def test_anchors_are_regressors_of_a_least_squares_fit(pair, anchors, support):
    mapper = fitted(pair, "anchored", anchors=anchors, support=support, ridge_lambda=1e-9)
    train, config = [], FitConfig(heldout_fraction=0.3)
    for batch in read_batches(BATCHES, VOCAB):
        found = trace(*pair, batch, 1)
        keys, values, embedded = layer0_of(pair[1], batch.input_ids)
        held = torch.tensor([value < config.heldout_fraction for value in batch.sequence_hashes(0)])
        beside = {"key": [keys], "value": [values]}
        if anchors == ["embedding"]:
            beside = {"key": [embedded], "value": [embedded]}
        for row in (~held).nonzero()[:, 0]:
            mine = found.select(found.rows == row)
            added = {kind: torch.cat([part[row, 1:] for part in parts], -1) for kind, parts in beside.items()}
            train.append((mine, added))
    target = 2
    for kind in ("key", "value"):
        head = 1
        xs, ys = [], []
        for mine, added in train:
            states = getattr(mine, f"source_{kind}s")[mapper.config.selected_layers[target]]
            states = states if support == "full_head" else states[:, :, head : head + 1]
            xs.append(torch.cat([*(layer.flatten(1) for layer in states), added[kind]], -1).double())
            ys.append(getattr(mine, f"target_{kind}s")[target][:, head].double())
        x, y = torch.cat(xs).numpy(), torch.cat(ys).numpy()
        design = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        expected = np.linalg.lstsq(design, y, rcond=None)[0]
        weight, bias = (
            getattr(mapper, f"{kind}_{name}")[target, head].detach().double() for name in ("weight", "bias")
        )
        np.testing.assert_allclose(x @ weight.numpy() + bias.numpy(), design @ expected, atol=2e-3)


def test_layer_0_is_exact_wherever_padding_stands_and_the_rest_is_no_worse(pair):
    ridge, mapper = fitted(pair, "ridge"), fitted(pair, "anchored")
    for kind in ("keys", "values"):
        assert mapper.config.fit["heldout_r2"][kind][0] > 1 - 1e-6
        assert np.mean(mapper.config.fit["r2"][kind][1:]) > np.mean(ridge.config.fit["r2"][kind][1:]) + 0.01
    ids, mask = tokens(2, 14, seed=9), torch.ones(2, 14, dtype=torch.long)
    mask[0, :3], mask[1, 12:] = 0, 0
    cache, own = handed(pair, mapper, ids, mask), own_cache(pair[1], ids, mask)
    for row, columns in ((0, slice(3, 12)), (1, slice(0, 12))):
        for name in ("keys", "values"):
            found, expected = (getattr(one.layers[0], name)[row, :, columns] for one in (cache, own))
            torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
    assert cache.report.times["target_extras"] >= 0


def test_the_anchors_of_a_cache_padded_elsewhere_are_those_of_its_tokens(pair):
    mapper = fitted(pair, "anchored", anchors=["layer0", "embedding"])
    ids, mask = tokens(2, 12, seed=3), torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    right = ids.clone()
    right[1, :8], right[1, 8:] = ids[1, 4:], 0
    source_mask = torch.ones(2, 12, dtype=torch.long)
    source_mask[1, 8:] = 0
    plain = handed(pair, mapper, ids, mask).map_all()
    other = handed(
        pair,
        mapper,
        ids,
        mask,
        source_cache=own_cache(pair[0], right, source_mask),
        source_attention_mask=source_mask,
    ).map_all()
    for one, two in zip(plain.layers, other.layers, strict=True):
        torch.testing.assert_close(one.keys, two.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(one.values, two.values, atol=1e-4, rtol=1e-4)


def test_anchors_need_tokens_and_say_so(pair, tmp_path):
    mapper = assert_saved_and_loaded(fitted(pair, "anchored", anchors=["layer0", "embedding"], num_sinks=0), tmp_path)
    cache = own_cache(pair[0], tokens(1, 9))
    with pytest.raises(GenerateArgumentError, match="anchor_keys, anchor_values, anchor_embeddings.*input_ids"):
        KVBridge(pair[0], mapper).handoff(source_cache=cache, target_model=pair[1])
    with pytest.raises(CacheMismatchError, match="anchor_keys"):
        mapper(content())
    with pytest.raises(FitConfigError, match="anchors must be"):
        FitConfig(anchors=("embedding", "layer0"))
    with pytest.raises(FitConfigError, match="lambda_search"):
        fitted(pair, "anchored", lambda_search=True)


def test_weights_of_anchored_maps_are_those_of_the_plain_ones(pair):
    """With weights, too, an anchor that is always 0 changes nothing: the fit is then the weighted ridge fit."""
    source, target = pair
    silent = copy.deepcopy(target)
    with torch.no_grad():
        silent.model.layers[0].self_attn.k_proj.weight.zero_()
        silent.model.layers[0].self_attn.v_proj.weight.zero_()
    settings = {"weighting": "sensitivity", "ridge_lambda": 1.0}
    plain, anchored = (fitted((source, silent), method, **settings) for method in ("ridge", "anchored"))
    uniform = fitted((source, silent), "ridge", ridge_lambda=1.0)
    for name in ("key_weight", "value_weight"):
        # Features of the effective sample size's floor differ in number, so the shares of uniform weights do.
        found, expected = getattr(anchored, name)[1:, :, :64], getattr(plain, name)[1:]
        assert (found - expected).norm() < 0.5 * (getattr(uniform, name)[1:] - expected).norm()
        assert float(getattr(anchored, name)[:, :, 64:].detach().abs().max()) == 0


# ---- a causal layer -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def causal(pair):
    """With a layer that does something."""
    mapper = fitted(pair, "causal", causal_width=16, causal_heads=2)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name in ("key_out", "value_out"):
            getattr(mapper, name).copy_(0.3 * torch.randn(getattr(mapper, name).shape, generator=generator))
    return mapper


def test_a_causal_map_starts_as_the_linear_map(pair, tmp_path):
    mapper = fitted(pair, "causal", causal_width=16, causal_heads=2)
    assert_same_maps(mapper, fitted(pair, "ridge"), content(), atol=1e-6, rtol=1e-6)
    assert_saved_and_loaded(mapper, tmp_path)
    broken = mapper.config.to_dict()
    broken["method_config"] = {"width": 10, "heads": 3}
    with pytest.raises(ArtifactError, match="width"):
        KVBridgeMapper(type(mapper.config)(**broken))


def test_a_causal_layer_is_computed_as_written_down(causal):
    """Token by token in float64: norm, rotary attention to earlier tokens, gated sum, MLP."""
    length, width, heads = 6, 16, 2
    source = content(length=length)
    positions = torch.arange(3, 3 + length).unsqueeze(0)
    source = SourceContent([source.keys(0), source.keys(1)], [source.values(0), source.values(1)], positions)
    tensors = {name: p.detach().double().numpy() for name, p in causal.named_parameters()}

    def norm(x):
        return x / np.sqrt((x**2).mean() + 1e-6)

    def turn(x, position):
        half = len(x) // 2
        z = (x[:half] + 1j * x[half:]) * np.exp(1j * position * 10000.0 ** (-np.arange(half) / half))
        return np.concatenate([z.real, z.imag])

    def silu(x):
        return x / (1 + np.exp(-x))

    rows = [
        np.concatenate(
            [
                read(layer)[0, :, n].double().numpy().ravel()
                for read in (source.keys, source.values)
                for layer in (0, 1)
            ]
        )
        for n in range(length)
    ]
    states = [row @ tensors["trunk_in"] + tensors["trunk_in_bias"] for row in rows]
    qkv = [(norm(h) @ tensors["trunk_qkv"]).reshape(3, heads, width // heads) for h in states]
    added = []
    for n in range(length):
        read = []
        for head in range(heads):
            query = turn(qkv[n][0, head], n + 3)
            scores = np.array([query @ turn(qkv[m][1, head], m + 3) for m in range(n + 1)]) / np.sqrt(width // heads)
            weights = np.exp(scores - scores.max())
            read.append(sum(w * qkv[m][2, head] for m, w in enumerate(weights / weights.sum())))
        h = states[n] + np.concatenate(read) @ tensors["trunk_o"]
        h = h + silu(norm(h) @ tensors["trunk_up"]) @ tensors["trunk_down"]
        added.append(norm(h))
    with torch.no_grad():
        for layer in (0, 2):
            for kind, found in zip(("key", "value"), causal.map_layer(layer, source), strict=True):
                x = np.stack(
                    [
                        np.concatenate(
                            [
                                getattr(source, f"{kind}s")(at)[0, :, n].double().numpy().ravel()
                                for at in causal.config.selected_layers[layer]
                            ]
                        )
                        for n in range(length)
                    ]
                )
                for head in range(2):
                    linear = x @ tensors[f"{kind}_weight"][layer, head] + tensors[f"{kind}_bias"][layer, head]
                    out = tensors[f"{kind}_out"][layer][:, head * 16 : (head + 1) * 16]
                    np.testing.assert_allclose(found[0, head].numpy(), linear + np.stack(added) @ out, atol=1e-4)


def test_a_causal_map_sees_earlier_tokens_only_and_no_padding(causal, pair):
    ids = tokens(1, 14, seed=5)
    changed, earlier = ids.clone(), ids.clone()
    changed[0, 11] = (ids[0, 11] + 1) % VOCAB
    earlier[0, 3] = (ids[0, 3] + 1) % VOCAB
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 4, dtype=torch.long), torch.ones_like(ids)], dim=1)
    plain, later, other = (handed(pair, causal, one).map_all() for one in (ids, changed, earlier))
    left = handed(pair, causal, padded, mask).map_all()
    for layer in range(3):
        torch.testing.assert_close(later.layers[layer].values[:, :, :11], plain.layers[layer].values[:, :, :11])
        assert not torch.allclose(other.layers[layer].values[:, :, 8], plain.layers[layer].values[:, :, 8])
        torch.testing.assert_close(left.layers[layer].keys[:, :, 4:], plain.layers[layer].keys, atol=1e-4, rtol=1e-4)


def test_a_conversation_that_grows_is_mapped_with_all_that_stands_before(causal, pair):
    ids = tokens(2, 20, seed=6)
    whole = handed(pair, causal, ids).map_all()
    grown = own_cache(pair[1], ids[:, :9])
    handed(pair, causal, ids, target_cache=grown)
    assert grown.get_seq_length() == whole.get_seq_length() == 18
    for layer in range(3):
        torch.testing.assert_close(
            grown.layers[layer].values[:, :, 9:], whole.layers[layer].values[:, :, 9:], atol=1e-5, rtol=1e-4
        )


def test_what_target_layers_share_follows_the_weights(causal):
    source = content()
    with torch.no_grad():
        before = causal.map_layer(1, source)[1]
        assert torch.equal(before, causal.map_layer(1, source)[1])
        causal.trunk_o.add_(0.5)
        after = causal.map_layer(1, source)[1]
        causal.trunk_o.sub_(0.5)
    assert not torch.allclose(before, after)
    causal.map_layer(1, source)[1].sum().backward()
    assert causal.trunk_qkv.grad.norm() > 0
    causal.zero_grad(set_to_none=True)


def test_the_cost_of_a_causal_map_counts_its_attention(causal, pair):
    weights = sum(p.numel() for name, p in causal.named_parameters() if not name.endswith("_bias"))
    cost = BridgeHandoff(KVBridge(pair[0], causal), pair[1]).flops(50, num_suffix=10)
    pairs = sum(range(1, 41))
    assert cost["map"] == pytest.approx(2 * weights * (40 - 1) + 4 * 16 * pairs)


# ---- a fuser --------------------------------------------------------------------------------------------------------


def test_a_fuser_starts_as_the_targets_own_cache_and_costs_its_prefill(pair, tmp_path):
    mapper = assert_saved_and_loaded(fitted(pair, "fuser", fuser_width=8), tmp_path)
    ids, mask = tokens(2, 12, seed=7), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    cache, own = handed(pair, mapper, ids, mask).map_all(), own_cache(pair[1], ids, mask)
    for layer in range(3):
        for name in ("keys", "values"):
            found, expected = (getattr(one.layers[layer], name)[:, :, :10] for one in (cache, own))
            torch.testing.assert_close(found[0, :, 5:], expected[0, :, 5:], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=1e-4)
    cost = BridgeHandoff(KVBridge(pair[0], mapper), pair[1]).flops(50, num_suffix=10)
    assert cost["map"] > PrefillCost.from_model(pair[1]).flops(40)


def test_a_fuser_adds_a_gated_mix_of_both_caches(pair):
    mapper = fitted(pair, "fuser", fuser_width=8)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in mapper.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    plain = content()
    own = torch.randn(2, 3, 1, 2, 7, 16, generator=generator)
    extras = {"own_keys": own[0], "own_values": own[1]}
    source = SourceContent([plain.keys(0), plain.keys(1)], [plain.values(0), plain.values(1)], extras=extras)
    tensors = {name: p.detach().double().numpy() for name, p in mapper.named_parameters()}
    layer, token = 1, 4
    with torch.no_grad():
        mapped = mapper.map_layer(layer, source)
    for place, kind in enumerate(("key", "value")):
        reads = getattr(source, f"{kind}s")
        mine = own[place, layer, 0, :, token].double().numpy()
        parts = [reads(at)[0, :, token].double().numpy().ravel() for at in mapper.config.selected_layers[layer]]
        x = np.concatenate([*parts, mine.ravel()])
        t = {
            name: tensors[f"{kind}_{name}"][layer]
            for name in ("project", "project_bias", "mix", "out", "head", "gate")
        }

        def silu(z):
            return z / (1 + np.exp(-z))

        h = silu(x @ t["project"] + t["project_bias"])
        h = h + silu(h @ t["mix"])
        gate = t["gate"] / (1 + np.exp(-(h @ t["head"])))
        expected = mine + gate[:, None] * (h @ t["out"]).reshape(2, 16)
        np.testing.assert_allclose(mapped[place][0, :, token].numpy(), expected, atol=1e-4)
