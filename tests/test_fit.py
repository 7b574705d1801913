"""From two models and tokens to a mapper: traces, fits, weights, checks of data and settings."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from models import ARCHITECTURES, tiny_model
from test_selection import features, linked_trace, target_of
from test_statistics import SIZES, collect
from transformers import DynamicCache

from kvbridge_hf.cache_argument import cache_kwargs
from kvbridge_hf.calibration.driver import collect_sensitivity, collect_statistics, fit_from_statistics, fit_mapper
from kvbridge_hf.calibration.layout import identity_blocks
from kvbridge_hf.calibration.probe import boundary_columns, sensitivities, token_sensitivity
from kvbridge_hf.calibration.statistics import CalibrationStatistics
from kvbridge_hf.calibration.traces import TracedModel, read_batches, trace
from kvbridge_hf.calibration.weighting import uniform_share
from kvbridge_hf.errors import CalibrationError, FitConfigError, PairMismatchError
from kvbridge_hf.mappers.config import FitConfig
from kvbridge_hf.modeling_kvbridge import SourceContent
from kvbridge_hf.rotary import ContentRotary

VOCAB = 96


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(rows: list[torch.Tensor], side: str, filler: int = 7) -> dict[str, torch.Tensor]:
    """A batch with padding on one side; the padded columns hold `filler`."""
    width = max(len(row) for row in rows)
    ids, mask = torch.full((len(rows), width), filler), torch.zeros(len(rows), width, dtype=torch.long)
    for place, row in enumerate(rows):
        part = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[place, part], mask[place, part] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="module")
def small():
    return tiny_model("qwen3", num_layers=2, seed=1)


@pytest.fixture(scope="module")
def large():
    return tiny_model("llama", num_layers=3, seed=2)


# ---- traces ---------------------------------------------------------------------------------------------------------


def keys_before_rotation(model, ids: torch.Tensor) -> list[torch.Tensor]:
    """Content keys `(tokens, heads, dim)` of one unpadded row, caught in the model before it rotates them."""
    caught = []
    hooks = [
        layer.self_attn.k_norm.register_forward_hook(lambda module, args, output: caught.append(output[0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids[None])
    for hook in hooks:
        hook.remove()
    return caught


@pytest.mark.parametrize("side", ["left", "right"])
def test_traces_are_the_models_own_unrotated_keys_without_padding_and_sinks(small, large, side):
    rows = [tokens(1, length, seed=length)[0] for length in (9, 14, 5)]
    found = trace(small, large, padded(rows, side), num_sinks=2, token_stride=3)
    expected_positions = [list(range(2, len(row), 3)) for row in rows]
    assert found.position_ids.tolist() == sum(expected_positions, [])
    assert found.rows.tolist() == [row for row, places in enumerate(expected_positions) for _ in places]
    for layer in range(2):
        expected = torch.cat(
            [
                keys_before_rotation(small, row)[layer][places]
                for row, places in zip(rows, expected_positions, strict=True)
            ]
        )
        torch.testing.assert_close(found.source_keys[layer], expected, atol=2e-5, rtol=1e-5)
    assert found.target_values.shape == (3, found.num_tokens, 2, 16)


def test_what_stands_in_padded_columns_reaches_nothing(small, large):
    rows = [tokens(1, length, seed=length)[0] for length in (6, 11)]
    one = trace(small, large, padded(rows, "left", filler=7))
    for filler in (80, -100, 10**6):
        other = trace(small, large, padded(rows, "left", filler=filler))
        assert torch.equal(one.source_keys, other.source_keys) and torch.equal(one.target_values, other.target_values)


def test_models_offloaded_by_accelerate_are_traced(small, large):
    offloaded = cpu_offload(tiny_model("llama", num_layers=3, seed=2), execution_device="cpu")
    ids = tokens(2, 9)
    expected, found = trace(small, large, ids), trace(small, offloaded, ids)
    assert torch.equal(found.target_keys, expected.target_keys)


def test_nan_names_model_layer_and_sequence(small, large):
    broken = tiny_model("llama", num_layers=3, seed=2)
    with torch.no_grad():
        broken.model.embed_tokens.weight[11] = float("inf")
    batches = [tokens(2, 8), tokens(2, 8, seed=1)]
    for batch in batches:
        batch[batch == 11] = 12
    batches[1][1, 5] = 11
    with pytest.raises(CalibrationError, match=r"target's keys of layer 0 .* sequence 3 at column 5"):
        fit_mapper(small, broken, batches, FitConfig(top_k=1))
    with torch.no_grad():
        broken = tiny_model("llama", num_layers=3, seed=2)
        broken.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(CalibrationError, match=r"source's values of layer 1 .* sequence 0"):
        fit_mapper(broken, small, batches, FitConfig(top_k=1))


# ---- planted maps ---------------------------------------------------------------------------------------------------


def planted_pair():
    """A Llama of 3 layers and one of 6 whose keys and values are affine images of known layers of the first.

    Layers that write nothing into the residual stream stand before or after the source's own layers. Their keys and
    values are random affine images of those of the layer whose input they share, over all heads. In the layers that do
    the work, values are mixed within each head and the output projection undoes it.
    """
    source = tiny_model("llama", num_layers=3, seed=4, attention_bias=True)
    target = tiny_model("llama", num_layers=6, seed=5, attention_bias=True)
    planted = [0, 0, 1, 2, 2, 2]
    working = {1: 0, 2: 1, 5: 2}
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        target.model.embed_tokens.weight.copy_(source.model.embed_tokens.weight)
        for place, origin in enumerate(planted):
            old, new = source.model.layers[origin], target.model.layers[place]
            new.load_state_dict(old.state_dict())
            if place in working:
                new.self_attn.v_proj.bias.copy_(old.self_attn.v_proj.bias)
                for head in range(2):
                    mix = torch.randn(16, 16, generator=generator) / 4 + torch.eye(16)
                    rows = slice(head * 16, head * 16 + 16)
                    new.self_attn.v_proj.weight[rows] = mix @ old.self_attn.v_proj.weight[rows]
                    new.self_attn.v_proj.bias[rows] = mix @ old.self_attn.v_proj.bias[rows]
                    for query in (2 * head, 2 * head + 1):
                        columns = slice(query * 16, query * 16 + 16)
                        new.self_attn.o_proj.weight[:, columns] = old.self_attn.o_proj.weight[
                            :, columns
                        ] @ torch.linalg.inv(mix)
            else:
                for name in ("k_proj", "v_proj"):
                    mix = torch.randn(32, 32, generator=generator) / 6
                    getattr(new.self_attn, name).weight.copy_(mix @ getattr(old.self_attn, name).weight)
                    getattr(new.self_attn, name).bias.copy_(torch.randn(32, generator=generator))
                new.self_attn.o_proj.weight.zero_()
                new.self_attn.o_proj.bias.zero_()
                new.mlp.down_proj.weight.zero_()
    return source, target, planted


@pytest.mark.parametrize("selection", ["r2", "r2_layer", "greedy"])
def test_a_planted_affine_map_between_models_of_different_depth_is_recovered(selection):
    source, target, planted = planted_pair()
    batches = [padded([tokens(1, n, seed=n + s)[0] for n in (24, 30, 19, 28)], "left") for s in range(0, 400, 50)]
    mapper = fit_mapper(source, target, batches, FitConfig(top_k=1, selection=selection, heldout_fraction=0.25))
    assert [row[0] for row in mapper.config.selected_layers] == planted
    for name in ("r2", "heldout_r2"):
        for kind in ("keys", "values"):
            assert len(mapper.config.fit[name][kind]) == 6
            assert min(mapper.config.fit[name][kind]) > 0.99999
    # the mapper's own output on tokens it has not seen
    fresh = trace(source, target, tokens(1, 40, seed=77))
    content = SourceContent(
        keys=[keys.transpose(0, 1)[None] for keys in fresh.source_keys],
        values=[values.transpose(0, 1)[None] for values in fresh.source_values],
        position_ids=fresh.position_ids[None],
        valid=torch.ones(1, 40, dtype=torch.bool),
    )
    with torch.no_grad():
        for layer, mapped in enumerate(mapper(content)):
            for got, expected in zip(mapped, (fresh.target_keys[layer], fresh.target_values[layer]), strict=True):
                expected = expected.transpose(0, 1)[None]
                assert (got - expected).square().sum() < 1e-5 * (expected - expected.mean(2, True)).square().sum()


@pytest.mark.parametrize("arch", ["qwen3", "llama"])
def test_a_model_fitted_on_itself_keeps_every_argmax(arch):
    model = tiny_model(arch, num_layers=3, seed=3)
    mapper = fit_mapper(model, model, [tokens(4, 40, seed=s) for s in range(6)], FitConfig(top_k=1))
    assert mapper.config.selected_layers == [[0], [1], [2]]
    rotary = ContentRotary.from_model(model)
    prompt = tokens(2, 32, seed=99)
    positions = torch.arange(31)[None].expand(2, -1)
    with torch.no_grad():
        expected = model(prompt).logits
        own = DynamicCache()
        model(prompt[:, :31], use_cache=True, **cache_kwargs(own))
        content = SourceContent.from_cache(own, rotary, positions, None)
        for start in (1, 15, 31):
            mapped = DynamicCache()
            for layer, (keys, values) in enumerate(mapper(content)):
                keys = rotary.apply(keys, positions, layer)
                mapped.update(keys[:, :, :start], values[:, :, :start], layer)
            rest = torch.arange(start, 32)[None].expand(2, -1)
            logits = model(prompt[:, start:], position_ids=rest, use_cache=True, **cache_kwargs(mapped)).logits
            assert torch.equal(logits.argmax(-1), expected[:, start:].argmax(-1))


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_every_architecture_is_traced_and_weighted(arch):
    """Fitted on itself, each layer finds itself exactly; the attention probe sees all its layers."""
    model = tiny_model(arch, num_layers=4, seed=3)
    config = FitConfig(top_k=1, weighting="sensitivity", ess_per_feature=0.5, heldout_fraction=0.0)
    mapper = fit_mapper(model, model, [padded([tokens(1, n, seed=n)[0] for n in (48, 61, 55)], "left")], config)
    assert mapper.config.selected_layers == [[0], [1], [2], [3]]
    assert min(mapper.config.fit["r2"]["keys"] + mapper.config.fit["r2"]["values"]) > 0.9999
    assert max(mapper.config.fit["sensitivity_uniform_share"]) < 0.5


# ---- the closed form ------------------------------------------------------------------------------------------------


def calibration(train, heldout=None, support="full_head", **sizes) -> CalibrationStatistics:
    sizes = {**SIZES, **sizes}
    geometry = {
        role: {
            "num_layers": sizes[f"{role}_layers"],
            "num_kv_heads": sizes[f"{role}_heads"],
            "head_dim": sizes[f"{role}_dim"],
        }
        for role in ("source", "target")
    }
    info = {f"{role}_geometry": facts for role, facts in geometry.items()}
    info |= {"source_fingerprint": {}, "target_fingerprint": {}}
    info |= {"sequences": 2, "num_sinks": 4}
    empty = train.select(torch.arange(0))
    return CalibrationStatistics(
        collect(train, support, **sizes), collect(empty if heldout is None else heldout, support, **sizes), info
    )


def parameters(mapper) -> dict[str, np.ndarray]:
    return {name: parameter.detach().double().numpy() for name, parameter in mapper.named_parameters()}


@pytest.mark.parametrize("support", ["full_head", "head_local"])
@pytest.mark.parametrize("penalty", [0.0, 0.01, 25.0])
def test_weights_equal_the_closed_form_and_least_squares_without_a_penalty(support, penalty):
    """The paper's penalty is added to the summed moments: numpy's least squares on rows extended by sqrt(lambda) I."""
    data = linked_trace(120, 0)
    statistics = calibration(data)
    mapper = fit_from_statistics(statistics, FitConfig(support=support, top_k=2, ridge_lambda=penalty))
    found = parameters(mapper)
    for kind, name in enumerate(("key", "value")):
        for target in range(2):
            for head in range(2):
                heads = range(2) if support == "full_head" else [head]
                x = features(data, kind, mapper.config.selected_layers[target], heads)
                y = target_of(data, kind, target, head)
                xc, yc = x - x.mean(0), y - y.mean(0)
                rows = np.concatenate([xc, np.sqrt(penalty) * np.eye(x.shape[1])])
                expected = np.linalg.lstsq(rows, np.concatenate([yc, np.zeros((x.shape[1], 5))]), rcond=None)[0]
                bias = y.mean(0) - x.mean(0) @ expected
                np.testing.assert_allclose(found[f"{name}_weight"][target, head], expected, rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(found[f"{name}_bias"][target, head], bias, rtol=1e-5, atol=1e-5)


def test_least_squares_limit_with_fewer_tokens_than_features_and_dead_channels():
    data = linked_trace(12, 0)
    data.source_keys[0, :, 1, 3] = 2.0
    mapper = fit_from_statistics(calibration(data), FitConfig(top_k=3, ridge_lambda=0.0))
    found = parameters(mapper)
    for target in range(2):
        x = features(data, 0, mapper.config.selected_layers[target], range(2))
        y = target_of(data, 0, target, 1)
        expected = np.linalg.lstsq(x - x.mean(0), y - y.mean(0), rcond=1e-10)[0]
        np.testing.assert_allclose(found["key_weight"][target, 1], expected, rtol=1e-4, atol=1e-5)
    assert all(np.isfinite(value).all() for value in found.values())


def test_relative_penalty_is_a_multiple_of_the_mean_diagonal():
    data = linked_trace(60, 0)
    statistics = calibration(data)
    mapper = fit_from_statistics(statistics, FitConfig(top_k=3, ridge_lambda=0.1, ridge_relative=True))
    x = features(data, 0, mapper.config.selected_layers[0], range(2))
    xc = x - x.mean(0)
    gram = xc.T @ xc
    yc = target_of(data, 0, 0, 0) - target_of(data, 0, 0, 0).mean(0)
    expected = np.linalg.solve(gram + 0.1 * np.diag(gram).mean() * np.eye(24), xc.T @ yc)
    np.testing.assert_allclose(parameters(mapper)["key_weight"][0, 0], expected, rtol=1e-5, atol=1e-6)


def test_recorded_r2_equals_numpy_on_train_and_heldout():
    train, heldout = linked_trace(80, 0), linked_trace(30, 1)
    mapper = fit_from_statistics(calibration(train, heldout), FitConfig(top_k=2))
    found = parameters(mapper)
    for name, data in (("r2", train), ("heldout_r2", heldout)):
        for kind, label in enumerate(("key", "value")):
            for target in range(2):
                r2 = []
                for head in range(2):
                    x = features(data, kind, mapper.config.selected_layers[target], range(2))
                    y = target_of(data, kind, target, head)
                    error = y - x @ found[f"{label}_weight"][target, head] - found[f"{label}_bias"][target, head]
                    r2.append(1 - (error**2).sum() / ((y - y.mean(0)) ** 2).sum())
                assert mapper.config.fit[name][f"{label}s"][target] == pytest.approx(np.mean(r2), abs=1e-6)


def test_head_local_has_a_share_of_the_weights_and_statistics():
    sizes = {"source_heads": 4, "target_heads": 4}
    data = linked_trace(80, 0, **sizes)
    full = fit_from_statistics(calibration(data, **sizes), FitConfig(top_k=2))
    local_statistics = calibration(data, support="head_local", **sizes)
    local = fit_from_statistics(local_statistics, FitConfig(top_k=2, support="head_local"))
    for name in ("key_weight", "value_weight"):
        assert getattr(full, name).numel() == 4 * getattr(local, name).numel()
    assert local.config.head_assignment == [[identity_blocks(4, 4)] * 2] * 2
    # the smaller statistics give the same head-local fit as the full ones
    again = fit_from_statistics(calibration(data, **sizes), FitConfig(top_k=2, support="head_local"))
    for name, parameter in local.named_parameters():
        torch.testing.assert_close(parameter, again.get_parameter(name), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("source_heads", "target_heads"), [(2, 6), (6, 2), (3, 2)])
@pytest.mark.parametrize("assignment", ["identity", "fitted"])
def test_unequal_heads_fit_what_the_mapper_reads(source_heads, target_heads, assignment):
    """R^2 recorded by the fit equals that of the mapper's own forward: feature and head order agree."""
    sizes = {"source_heads": source_heads, "target_heads": target_heads}
    data = linked_trace(150, 0, **sizes)
    config = FitConfig(support="head_local", top_k=2, head_assignment=assignment)
    mapper = fit_from_statistics(calibration(data, **sizes), config)
    content = SourceContent(
        keys=[keys.transpose(0, 1)[None] for keys in data.source_keys],
        values=[values.transpose(0, 1)[None] for values in data.source_values],
        position_ids=torch.arange(150)[None],
        valid=torch.ones(1, 150, dtype=torch.bool),
    )
    with torch.no_grad():
        for layer, mapped in enumerate(mapper(content)):
            for kind, got in zip(("keys", "values"), mapped, strict=True):
                expected = getattr(data, f"target_{kind}")[layer].transpose(0, 1)  # heads, tokens, dim
                error = (got[0] - expected).square().sum(dim=(1, 2))
                power = (expected - expected.mean(1, True)).square().sum(dim=(1, 2))
                r2 = (1 - error / power).mean().item()
                assert mapper.config.fit["r2"][kind][layer] == pytest.approx(r2, abs=1e-4)


# ---- any split, any k -----------------------------------------------------------------------------------------------


def relative_distance(left, right) -> float:
    assert left.config.selected_layers == right.config.selected_layers
    pairs = [(one, right.get_parameter(name)) for name, one in left.named_parameters()]
    return max(((one - other).norm() / one.norm()).item() for one, other in pairs)


def test_any_split_and_order_of_batches_gives_the_same_mapper(small, large):
    small64, large64 = tiny_model("qwen3", num_layers=2, seed=1), tiny_model("llama", num_layers=3, seed=2)
    small64, large64 = small64.double(), large64.double()
    rows = tokens(24, 30)
    config = FitConfig(top_k=2, heldout_fraction=0.3)
    whole = fit_mapper(small64, large64, [rows], config)
    backwards = fit_mapper(small64, large64, list(rows.flip(0).split(5)), config)
    parts = [collect_statistics(small64, large64, part.split(1), config) for part in rows.split([3, 1, 20])]
    merged = fit_from_statistics(parts[2].merge(parts[0]).merge(parts[1]), config)
    for other in (backwards, merged):
        assert relative_distance(whole, other) < 1e-6
        assert other.config.fit["tokens"] == whole.config.fit["tokens"]
        assert other.config.fit["heldout_tokens"] == whole.config.fit["heldout_tokens"] > 0
    # the statistics themselves add nothing to what float32 models differ by from batch to batch
    found = trace(small, large, rows, num_sinks=4)
    one, many = (calibration(found, **PAIR_SIZES) for _ in range(2))
    many.train = collect(found, "full_head", list(torch.randperm(found.num_tokens).split(13)), **PAIR_SIZES)
    fits = [fit_from_statistics(statistics, FitConfig(top_k=2)) for statistics in (one, many)]
    assert relative_distance(*fits) < 1e-6


PAIR_SIZES = {
    "source_layers": 2,
    "source_heads": 2,
    "source_dim": 16,
    "target_layers": 3,
    "target_heads": 2,
    "target_dim": 16,
}


def test_saved_statistics_serve_every_k_and_penalty(small, large, tmp_path):
    batches = [tokens(4, 24, seed=s) for s in range(4)]
    collect_statistics(small, large, batches, FitConfig(top_k=1)).save(tmp_path)
    loaded = CalibrationStatistics.load(tmp_path)
    for config in (
        FitConfig(top_k=1),
        FitConfig(top_k=2, ridge_lambda=5.0),
        FitConfig(top_k=2, support="head_local", head_assignment="fitted", selection="greedy"),
    ):
        direct = fit_mapper(small, large, batches, config)
        assert relative_distance(direct, fit_from_statistics(loaded, config)) < 1e-6
    with pytest.raises(FitConfigError, match="num_sinks=4"):
        fit_from_statistics(loaded, FitConfig(top_k=1, num_sinks=0))


# ---- sensitivity weights --------------------------------------------------------------------------------------------


def brute_force_sensitivity(q, k, v, scaling, valid, queries):
    """`(q_heads, T, d)` numpy arrays of one row; loops over everything."""
    groups = len(q) // len(k)
    w_k, w_v = np.zeros(k.shape[:2]), np.zeros(k.shape[:2])
    for head in range(len(q)):
        for m in queries:
            seen = [n for n in range(m + 1) if valid[n]]
            logits = np.array([scaling * q[head, m] @ k[head // groups, n] for n in seen])
            a = np.exp(logits - logits.max())
            a /= a.sum()
            o = sum(weight * v[head // groups, n] for weight, n in zip(a, seen, strict=True))
            for weight, n in zip(a, seen, strict=True):
                if n < m:
                    w_v[head // groups, n] += weight**2
                    distance = ((v[head // groups, n] - o) ** 2).sum()
                    w_k[head // groups, n] += weight**2 * distance * (q[head, m] ** 2).sum() * scaling**2
    return w_k, w_v


def test_token_sensitivity_equals_loops():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 12, 8, generator=generator) for heads in (6, 2, 2))
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :5] = False  # left
    mask[1, 10:] = False  # right
    columns, present = boundary_columns(mask, num_sinks=1, count=4)
    w_k, w_v = token_sensitivity(q, k, v, 0.3, mask, columns, present)
    for row in range(2):
        queries = columns[row][present[row]].tolist()
        expected = brute_force_sensitivity(
            *(t[row].double().numpy() for t in (q, k, v)), 0.3, mask[row].numpy(), queries
        )
        np.testing.assert_allclose(w_k[row].numpy(), expected[0], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(w_v[row].numpy(), expected[1], rtol=1e-4, atol=1e-6)
        assert (w_k[row][:, ~mask[row]] == 0).all()


def test_boundaries_are_log_spaced_and_follow_the_mask():
    mask = torch.ones(3, 200, dtype=torch.bool)
    mask[1, :100] = False
    mask[2, 1:] = False  # one token: nothing follows any prefix
    columns, present = boundary_columns(mask, num_sinks=4, count=32)
    long = columns[0][present[0]].double()
    assert long[0] == 5 and long[-1] == 199 and len(long) >= 28
    assert (long[1:] > long[:-1]).all()
    late = long[long > 20]
    assert (late[1:] / late[:-1]).max() < 1.2 and (late[1:] / late[:-1]).min() > 1.05
    assert (columns[1][present[1]] >= 105).all() and columns[1].max() == 199
    assert not present[2].any()
    # repeated boundaries of a short row count once
    assert len(set(columns[1][present[1]].tolist())) == int(present[1].sum())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_sensitivities_of_a_model_come_from_its_own_attention(implementation):
    model = tiny_model("qwen3", num_layers=2, seed=1)
    batch = next(read_batches([padded([tokens(1, n, seed=n)[0] for n in (10, 16)], "left")], VOCAB))
    columns, present = boundary_columns(batch.attention_mask, 0, 5)
    with torch.no_grad():
        attentions = model(
            batch.input_ids,
            attention_mask=batch.attention_mask.long(),
            position_ids=(batch.attention_mask.long().cumsum(-1) - 1).clamp(min=0),
            output_attentions=True,
        ).attentions
        model.set_attn_implementation(implementation)
        _, w_v = sensitivities(TracedModel(model, "target"), batch, 0, boundaries=5)
    assert model.config._attn_implementation == implementation
    for layer in range(2):
        for row in range(2):
            expected = torch.zeros(2, 16)
            for column in columns[row][present[row]].tolist():
                squared = attentions[layer][row, :, column, :column].square()  # query heads, tokens
                expected[:, :column] += squared.view(2, 2, -1).sum(1)
            torch.testing.assert_close(w_v[layer, row], expected, atol=1e-5, rtol=1e-4)


def test_uniform_share_is_the_least_that_keeps_the_effective_sample_size():
    generator = np.random.default_rng(0)
    w = generator.exponential(size=(2, 400)) ** 3
    sums = (torch.tensor(w.sum(1)), torch.tensor((w**2).sum(1)), torch.full((2,), 400.0, dtype=torch.float64))
    for floor in (300.0, 390.0, 400.0, 5000.0, 1.0, 0.0):
        share = uniform_share(*sums, floor).numpy()
        for row in range(2):
            mixed = (1 - share[row]) * w[row] / w[row].mean() + share[row]
            effective = mixed.sum() ** 2 / (mixed**2).sum()
            assert effective >= min(floor, 400) * (1 - 1e-9)
            assert share[row] == 0 or effective == pytest.approx(min(floor, 400))
    zero = torch.zeros(1, dtype=torch.float64)
    assert uniform_share(zero, zero, torch.tensor([5.0], dtype=torch.float64), 1.0).item() == 1.0


def test_weighting_changes_coefficients_only_and_equals_numpy(small, large):
    batches = [padded([tokens(1, n, seed=n + s)[0] for n in (20, 26, 31)], "left") for s in range(0, 300, 50)]
    config = FitConfig(top_k=2, heldout_fraction=0.2, ess_per_feature=1.0)
    weighted_config = config.replace(weighting="sensitivity")
    uniform = fit_mapper(small, large, batches, config)
    weighted = fit_mapper(small, large, batches, weighted_config)
    assert weighted.config.selected_layers == uniform.config.selected_layers
    assert weighted.config.head_assignment == uniform.config.head_assignment
    assert {n: p.shape for n, p in weighted.named_parameters()} == {n: p.shape for n, p in uniform.named_parameters()}
    assert relative_distance(uniform, weighted) > 0.01
    assert weighted.config.fit["tokens"] == uniform.config.fit["tokens"]

    # the same fit from all tokens at once, with weights normalised and shrunk by hand
    target = TracedModel(large, "target")
    traces, raw = [], []
    for batch in read_batches(batches, VOCAB):
        train = torch.tensor([value >= 0.2 for value in batch.sequence_hashes(0)])
        batch = batch.select(train)
        keep = batch.attention_mask & (batch.attention_mask.long().cumsum(-1) > 4)
        traces.append(trace(small, large, batch, num_sinks=4))
        with torch.no_grad():
            raw.append([kind.transpose(2, 3)[:, keep] for kind in sensitivities(target, batch, 4)])
    found = parameters(weighted)
    for kind, name in enumerate(("key", "value")):
        for layer in range(3):
            for head in range(2):
                x = np.concatenate([features(t, kind, weighted.config.selected_layers[layer], [0, 1]) for t in traces])
                y = np.concatenate([target_of(t, kind, layer, head) for t in traces])
                w = torch.cat([r[kind][layer, :, head] for r in raw]).double().numpy()
                w, floor = w / w.mean(), 1.0 * x.shape[1]
                variation = (w**2).mean() - 1
                keep_share = min(1.0, np.sqrt((len(w) / floor - 1) / variation))
                w = keep_share * w + 1 - keep_share
                x_mean, y_mean = (w[:, None] * x).sum(0) / w.sum(), (w[:, None] * y).sum(0) / w.sum()
                xc, yc = x - x_mean, y - y_mean
                gram = xc.T @ (w[:, None] * xc) + 0.01 * np.eye(x.shape[1])
                expected = np.linalg.solve(gram, xc.T @ (w[:, None] * yc))
                np.testing.assert_allclose(found[f"{name}_weight"][layer, head], expected, rtol=1e-3, atol=2e-4)


def test_weights_are_all_that_head_local_sensitivity_changes(small, large):
    batches = [tokens(4, 40, seed=s) for s in range(4)]
    config = FitConfig(support="head_local", top_k=2, weighting="sensitivity", head_assignment="fitted")
    statistics = collect_statistics(small, large, batches, config)
    sensitivity = collect_sensitivity(small, large, batches, statistics, config)
    weighted = fit_from_statistics(statistics, config, sensitivity=sensitivity)
    uniform = fit_from_statistics(statistics, config.replace(weighting="uniform"))
    assert weighted.config.head_assignment == uniform.config.head_assignment
    assert relative_distance(uniform, weighted) > 1e-3
    # an unreachable floor leaves the weights uniform, and so the fit
    flat = fit_from_statistics(statistics, config.replace(ess_per_feature=1e9), sensitivity=sensitivity)
    assert relative_distance(uniform, flat) < 1e-6
    with pytest.raises(FitConfigError, match="other source layers"):
        fit_from_statistics(statistics, config.replace(top_k=1), sensitivity=sensitivity)
    with pytest.raises(FitConfigError, match="second pass"):
        fit_from_statistics(statistics, config)
    with pytest.raises(FitConfigError, match="iterator"):
        fit_mapper(small, large, iter(batches), config)


# ---- settings, data, provenance -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"ridge_lambda": -0.01},
        {"ridge_lambda": float("nan")},
        {"ridge_lambda": "0.1"},
        {"top_k": 0},
        {"top_k": True},
        {"top_k": 2.0},
        {"support": "diagonal"},
        {"num_sinks": -1},
        {"token_stride": 0},
        {"heldout_fraction": 1.0},
        {"selection": "best"},
        {"weighting": None},
        {"dtype": "int8"},
        {"seed": -1},
    ],
)
def test_settings_out_of_range(settings):
    with pytest.raises(FitConfigError, match=next(iter(settings))):
        FitConfig(**settings)


def test_presets():
    paper = FitConfig.preset("paper")
    assert (paper.support, paper.top_k, paper.ridge_lambda, paper.weighting) == ("full_head", 8, 0.01, "uniform")
    assert not paper.ridge_relative
    bridge = FitConfig.preset("cachebridge", top_k=4)
    assert (bridge.support, bridge.top_k, bridge.weighting) == ("head_local", 4, "sensitivity")
    assert FitConfig.preset("default").resolve_top_k(3).top_k == 3
    assert FitConfig.from_dict(paper.to_dict()) == paper
    relay = FitConfig.preset("kvlrelay")
    assert (relay.support, relay.top_k, relay.distillation.steps) == ("head_local", 1, 100)
    assert FitConfig.from_dict(relay.to_dict()) == relay
    with pytest.raises(FitConfigError, match="cachebridge"):
        FitConfig.preset("best")
    with pytest.raises(FitConfigError, match="lambda_"):
        FitConfig.preset("paper", lambda_=1)


def test_more_layers_than_the_source_has(small, large):
    with pytest.raises(FitConfigError, match="top_k=3 .* has 2"):
        fit_mapper(small, large, [tokens(2, 10)], FitConfig(top_k=3))
    assert fit_mapper(small, large, [tokens(2, 10)], FitConfig(top_k=None)).config.top_k == 2


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "gave 0 tokens"),
        ([torch.zeros(0, 5, dtype=torch.long)], "gave 0 tokens"),
        ([tokens(2, 4)], "Sequence 0 has 4 tokens"),
        ([tokens(2, 9), padded([tokens(1, 12)[0], tokens(1, 3)[0]], "right")], "Sequence 3 has 3 tokens"),
        ([tokens(2, 9), tokens(2, 9) + VOCAB], "Sequence 2 holds token"),
        ([-tokens(1, 9)], "Sequence 0 holds token -"),
        ([torch.rand(2, 9)], "pass integers"),
        ([{"ids": tokens(2, 9)}], "no 'input_ids'"),
        ([{"input_ids": tokens(2, 9), "attention_mask": torch.ones(2, 8)}], "must agree"),
        ([[[5, 6, 7], [5, 6]]], "no rectangle"),
    ],
)
def test_bad_data_is_named(small, large, batches, message):
    with pytest.raises(CalibrationError, match=message):
        fit_mapper(small, large, batches, FitConfig(top_k=1))


def test_everything_held_out_and_everything_too_short(small, large):
    with pytest.raises(CalibrationError, match="held-out part"):
        fit_mapper(small, large, [tokens(2, 9)], FitConfig(top_k=1, heldout_fraction=0.999999))
    with pytest.raises(CalibrationError, match="All 2 sequences were too short"):
        fit_mapper(small, large, [tokens(2, 3)], FitConfig(top_k=1, short_sequences="skip"))


def test_a_pair_that_does_not_fit_is_refused(small):
    other = tiny_model("mistral", num_layers=2, sliding_window=8)
    with pytest.raises(PairMismatchError, match="[Ss]liding"):
        fit_mapper(other, small, [tokens(2, 9)], FitConfig(top_k=1))


def test_provenance_and_what_is_skipped(small, large, caplog):
    batches = [padded([tokens(1, n, seed=n)[0] for n in (20, 3)], "left"), tokens(5, 22, seed=2)]
    config = FitConfig(top_k=1, short_sequences="skip", heldout_fraction=0.0, seed=3, num_native_suffix=5)
    with caplog.at_level(logging.WARNING):
        mapper = fit_mapper(small, large, batches, config, dataset={"name": "made up"})
    assert "1 sequences were too short" in caplog.text
    fit = mapper.config.fit
    assert fit["tokens"] == 16 + 5 * 18 and fit["heldout_tokens"] == 0
    assert (fit["sequences"], fit["skipped_sequences"], fit["input_tokens"]) == (6, 1, 20 + 5 * 22)
    assert fit["dataset"] == {"name": "made up"} and fit["seed"] == 3 and fit["heldout_r2"] is None
    assert fit["selection_scored_on"] == "train"
    assert set(fit["libraries"]) == {"python", "torch", "transformers", "kvbridge_hf"}
    assert FitConfig(**{k: v for k, v in fit.items() if k in config.to_dict()}) == config
    assert mapper.config.num_native_suffix == 5 and mapper.config.num_sinks == 4
    assert mapper.config.max_calibrated_positions == 22
    assert mapper.config.source_geometry["num_layers"] == 2 and mapper.config.source_fingerprint
    assert mapper.config.target_fingerprint != mapper.config.source_fingerprint


def test_without_heldout_sequences_it_says_so(small, large, caplog):
    batch = tokens(1, 30)
    heldout = next(read_batches([batch], VOCAB)).sequence_hashes(0)[0] < 0.1
    assert not heldout
    with caplog.at_level(logging.WARNING):
        mapper = fit_mapper(small, large, [batch], FitConfig(top_k=1))
    assert "None of the 1 sequences was held out" in caplog.text
    assert mapper.config.fit["heldout_r2"] is None


def test_heldout_sequences_are_kept_out_of_the_fit(small, large):
    """The mapper equals one fitted on the other sequences alone."""
    rows = tokens(20, 25)
    hashes = torch.tensor(next(read_batches([rows], VOCAB)).sequence_hashes(0))
    held = hashes < 0.4
    assert 0 < held.sum() < 20
    config = FitConfig(top_k=1, heldout_fraction=0.4, selection_data="train")
    both = fit_mapper(small, large, [rows], config)
    alone = fit_mapper(small, large, [rows[~held]], config.replace(heldout_fraction=0.0))
    assert relative_distance(both, alone) < 1e-3
    assert both.config.fit["sequences"] == int((~held).sum())
    assert both.config.fit["heldout_sequences"] == int(held.sum())
    # and their score is that of the mapper on them
    assert both.config.fit["heldout_r2"]["keys"] != both.config.fit["r2"]["keys"]


def test_models_are_left_as_they_were(capsys):
    source, target = tiny_model("qwen3", num_layers=2), tiny_model("llama", num_layers=2)
    source.train()
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    fit_mapper(source, target, [tokens(2, 30)], FitConfig(top_k=1, weighting="sensitivity"))
    assert source.training and not target.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in source.state_dict().items())
    assert all(parameter.grad is None for parameter in source.parameters())
    assert target.config._attn_implementation == "eager"
    assert capsys.readouterr().err == ""  # no bar outside a terminal


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_mapper_is_stored_in_the_dtype_asked_for(small, large, dtype):
    mapper = fit_mapper(small, large, [tokens(4, 20)], FitConfig(top_k=1, dtype=dtype))
    assert {parameter.dtype for parameter in mapper.parameters()} == {getattr(torch, dtype)}
    assert mapper.selected_layers.dtype == torch.long and not mapper.training
