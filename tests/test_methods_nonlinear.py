"""Networks on top of the linear map, and a shared space for several models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from methods_pair import VOCAB, assert_same_maps, assert_saved_and_loaded, content, make_pair, token_batches
from models import tiny_model

from kvbridge_hf.calibration.driver import collect_samples, fit_from_statistics, fit_mapper
from kvbridge_hf.calibration.samples import Samples
from kvbridge_hf.calibration.traces import read_batches, trace
from kvbridge_hf.errors import FitConfigError
from kvbridge_hf.mappers.config import FitConfig
from kvbridge_hf.mappers.shared_space import fit_shared_space
from kvbridge_hf.modeling_kvbridge import SourceContent

BATCHES = token_batches(8, 40)


@pytest.fixture(scope="module")
def pair():
    return make_pair()


def settings(**overrides) -> FitConfig:
    values = {"method": "mlp", "top_k": 2, "num_sinks": 1, "heldout_fraction": 0.3, "mlp_hidden": (24,)}
    return FitConfig(**{**values, "mlp_epochs": 4, "mlp_batch_size": 128, "mlp_learning_rate": 3e-3, **overrides})


def squared_errors(mapper, pair, batches, heldout: bool) -> torch.Tensor:
    """Summed squared error and variance of each target layer, kind and head, by the mapper's own forward."""
    config = settings()
    found, wanted = [[], []], [[], []]
    for batch in read_batches(batches, VOCAB):
        part = trace(*pair, batch, 1)
        held = torch.tensor([value < config.heldout_fraction for value in batch.sequence_hashes(0)])[part.rows]
        part = part.select(held == heldout)
        source = SourceContent(
            part.source_keys.transpose(1, 2).unsqueeze(1), part.source_values.transpose(1, 2).unsqueeze(1)
        )
        with torch.no_grad():
            mapped = mapper(source)
        for kind, goal in enumerate((part.target_keys, part.target_values)):
            found[kind].append(torch.stack([layer[kind][0] for layer in mapped]))  # L, H, N, d
            wanted[kind].append(goal.transpose(1, 2))
    errors = []
    for kind in (0, 1):
        one, goal = torch.cat(found[kind], 2).double(), torch.cat(wanted[kind], 2).double()
        spread = (goal - goal.mean(2, keepdim=True)).square().sum((2, 3))
        errors.append((one - goal).square().sum((2, 3)) / spread)
    return torch.stack(errors)


@pytest.mark.parametrize("support", ["full_head", "head_local"])
def test_a_residual_network_never_loses_to_the_linear_map_on_held_out_tokens(pair, support):
    linear = fit_mapper(*pair, BATCHES, settings(method="ridge", support=support), progress=False)
    network = fit_mapper(*pair, BATCHES, settings(support=support), progress=False)
    before, after = (squared_errors(mapper, pair, BATCHES, heldout=True) for mapper in (linear, network))
    assert (after <= before * (1 + 1e-5)).all()
    assert after.mean() < 0.999 * before.mean(), "on random models there is something left to learn"
    for kind, name in enumerate(("keys", "values")):
        expected = (1 - after[kind]).mean(dim=1)
        np.testing.assert_allclose(network.config.fit["heldout_r2"][name], expected.numpy(), atol=1e-4)


def test_a_network_that_learned_nothing_is_the_linear_map(pair):
    linear = fit_mapper(*pair, BATCHES, settings(method="ridge"), progress=False)
    network = fit_mapper(*pair, BATCHES, settings(mlp_learning_rate=1e3, mlp_epochs=1), progress=False)
    assert {epoch for row in network.config.fit["best_epochs"] for epoch in row} == {0}
    assert_same_maps(network, linear, content(), atol=1e-4, rtol=1e-4)


def test_a_plain_network_is_computed_as_its_tensors_say(pair, tmp_path):
    config = settings(mlp_residual=False, mlp_hidden=(12, 10), mlp_epochs=15, mlp_learning_rate=1e-2)
    mapper = fit_mapper(*pair, BATCHES, config, progress=False)
    assert not hasattr(mapper, "key_weight")
    source = content()
    keys, values = (states.detach() for states in mapper.map_layer(1, source))
    for head in range(2):
        for found, kind, read in ((keys, "key", source.keys), (values, "value", source.values)):
            layers = mapper.config.selected_layers[1]
            states = np.concatenate([read(layer)[0].transpose(0, 1).flatten(1).numpy() for layer in layers], 1)
            for stage in ("hidden_0", "hidden_1", "out"):
                weight = getattr(mapper, f"{kind}_{stage}")[1, head].detach().numpy()
                states = states @ weight + getattr(mapper, f"{kind}_{stage}_bias")[1, head].detach().numpy()
                states = np.maximum(states, 0) if stage != "out" else states
            np.testing.assert_allclose(found[0, head].numpy(), states, atol=1e-4)
    assert (squared_errors(mapper, pair, BATCHES, heldout=False) < 1).all()
    assert_saved_and_loaded(mapper, tmp_path)
    weights = sum(p.numel() for name, p in mapper.named_parameters() if "bias" not in name)
    assert mapper.method.flops_per_token(mapper) == 2 * weights


def test_networks_of_one_seed_are_the_same_and_need_the_data(pair):
    one, two = (fit_mapper(*pair, BATCHES, settings(mlp_epochs=1), progress=False) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    from kvbridge_hf.calibration.driver import collect_statistics

    statistics = collect_statistics(*pair, BATCHES, settings(), progress=False)
    with pytest.raises(FitConfigError, match="FitData"):
        fit_from_statistics(statistics, settings())
    with pytest.raises(FitConfigError, match="hidden"):
        fit_mapper(*pair, BATCHES, settings(mlp_hidden=()), progress=False)


def test_samples_are_a_uniform_draw_that_does_not_depend_on_the_batches(pair):
    training, heldout = collect_samples(*pair, BATCHES, settings(max_samples=300), progress=False)
    assert training.num_tokens == 300 and 0 < heldout.num_tokens <= 300
    config = settings(max_samples=300)
    rows = [row[None] for batch in BATCHES for row in batch]
    again, _ = collect_samples(*pair, rows, config, progress=False)
    torch.testing.assert_close(training.tensors["target_keys"], again.tensors["target_keys"], atol=1e-5, rtol=1e-4)
    # Positions are drawn alike: the mean priority of those kept is that of the highest 300.
    everything = Samples.empty(10**6, 0)
    for batch in read_batches(BATCHES, VOCAB):
        everything.update(trace(*pair, batch, 1))
    assert everything.num_tokens == 4 * 8 * 39


# ---- a shared space -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fleet():
    return {
        "one": tiny_model("qwen3", num_layers=2, seed=1),
        "two": tiny_model("llama", num_layers=3, seed=2),
        "three": tiny_model("qwen2", num_layers=2, num_kv_heads=4, head_dim=8, num_heads=4, seed=3),
    }


def features_of(model, batches) -> torch.Tensor:
    """Keys and values `(2, N, features)` of all layers, float64."""
    parts = []
    for batch in read_batches(batches, VOCAB):
        found = trace(model, model, batch, 1)
        parts.append(
            torch.stack([states.transpose(0, 1).flatten(1) for states in (found.source_keys, found.source_values)])
        )
    return torch.cat(parts, dim=1).double()


def test_two_models_and_a_wide_space_are_the_direct_map(fleet):
    two = {name: fleet[name] for name in ("one", "two")}
    space = fit_shared_space(two, BATCHES, 64, num_sinks=1, ridge_lambda=1e-9, rounds=3)
    direct = fit_mapper(
        fleet["one"], fleet["two"], BATCHES, FitConfig(top_k=2, num_sinks=1, heldout_fraction=0.0), progress=False
    )
    assert_same_maps(space.mapper("one", "two"), direct, content(), atol=2e-2, rtol=1e-2)


def test_the_rounds_never_raise_the_error_and_it_is_what_the_mappers_leave(fleet, tmp_path):
    space = fit_shared_space(fleet, BATCHES, 12, num_sinks=1, rounds=6)
    assert space.num_maps == 6 and len(space.objective) == 7
    assert all(later <= earlier + 1e-9 for earlier, later in zip(space.objective, space.objective[1:], strict=False))
    assert space.objective[-1] < 0.995 * space.objective[0]
    xs = {name: features_of(model, BATCHES) for name, model in fleet.items()}
    errors = []
    for source in fleet:
        for target in fleet:
            if source == target:
                continue
            mapper = space.mapper(source, target)
            geometry = mapper.config.source_geometry
            shape = (geometry["num_layers"], geometry["num_kv_heads"], geometry["head_dim"])
            states = [x.unflatten(-1, shape).permute(1, 2, 0, 3).unsqueeze(1).float() for x in xs[source]]
            with torch.no_grad():
                mapped = mapper(SourceContent(*states))
            for kind in (0, 1):
                found = torch.stack([layer[kind][0] for layer in mapped])  # L, H, N, d
                goal = xs[target][kind].unflatten(-1, (found.shape[0], found.shape[1], -1)).permute(1, 2, 0, 3)
                left = (found - goal).square().sum((2, 3)) / (goal - goal.mean(2, keepdim=True)).square().sum((2, 3))
                errors.append(left.mean())
    assert float(torch.stack(errors).mean()) == pytest.approx(space.objective[-1], rel=1e-3)
    assert_saved_and_loaded(space.mapper("three", "one"), tmp_path)


def test_a_wider_space_leaves_less_and_no_space_leaves_less_than_direct_maps(fleet):
    narrow, wide = (fit_shared_space(fleet, BATCHES, width, num_sinks=1, rounds=4).objective[-1] for width in (6, 24))
    assert wide < narrow
    xs = {name: features_of(model, BATCHES) for name, model in fleet.items()}
    dims = {"one": 16, "two": 16, "three": 8}
    direct = []
    for source, x in xs.items():
        for target, y in xs.items():
            if source != target:
                for kind in (0, 1):
                    design = torch.cat([x[kind], torch.ones(len(x[kind]), 1)], 1).numpy()
                    left = y[kind].numpy() - design @ np.linalg.lstsq(design, y[kind].numpy(), rcond=None)[0]
                    spread = (y[kind] - y[kind].mean(0)).square().sum(0).numpy()
                    shape = (-1, dims[target])
                    ratio = (left**2).sum(0).reshape(shape).sum(1) / spread.reshape(shape).sum(1)
                    direct.append(float(ratio.mean()))
    assert wide > np.mean(direct)


def test_a_space_that_cannot_be(fleet):
    with pytest.raises(FitConfigError, match="two models"):
        fit_shared_space({"one": fleet["one"]}, BATCHES, 4)
    with pytest.raises(FitConfigError, match="width=999"):
        fit_shared_space(fleet, BATCHES[:1], 999)
    space = fit_shared_space(fleet, BATCHES[:1], 4, rounds=0)
    with pytest.raises(FitConfigError, match="no model 'four'"):
        space.mapper("one", "four")
