"""Linear methods: ridge in a metric, penalties from held-out moments, budgets of layers, low rank, head blocks."""

from __future__ import annotations

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

from kvbridge_hf.calibration.driver import (
    collect_metrics,
    collect_statistics,
    fit_from_statistics,
    fit_mapper,
)
from kvbridge_hf.calibration.layout import identity_blocks
from kvbridge_hf.calibration.metrics import OutputMetrics, draw_keys, normalised, value_metrics
from kvbridge_hf.calibration.traces import TracedModel, read_batches, trace
from kvbridge_hf.errors import FitConfigError
from kvbridge_hf.mappers.budget import spend
from kvbridge_hf.mappers.config import FitConfig
from kvbridge_hf.mappers.spectral import OutputBasis

BATCHES = token_batches(6, 30)


@pytest.fixture(scope="module")
def pair():
    return make_pair(3)


@pytest.fixture(scope="module")
def statistics(pair):
    return collect_statistics(*pair, BATCHES, FitConfig(top_k=2, num_sinks=2, heldout_fraction=0.3), progress=False)


@pytest.fixture(scope="module")
def all_tokens(pair):
    """Float64 features and outputs of the fitted and of the held-out tokens, layer by layer."""
    config = FitConfig(num_sinks=2, heldout_fraction=0.3)
    parts: dict[bool, list] = {True: [], False: []}
    for batch in read_batches(BATCHES, VOCAB):
        found = trace(*pair, batch, 2)
        held = torch.tensor([value < config.heldout_fraction for value in batch.sequence_hashes(0)])[found.rows]
        for which in (True, False):
            part = found.select(held == which)
            parts[which].append(
                tuple(getattr(part, name).double() for name in ("source_keys", "target_keys", "source_values"))
            )
    return {which: [torch.cat(tensors, dim=1) for tensors in zip(*rows, strict=True)] for which, rows in parts.items()}


def key_problem(all_tokens, layers: list[int], target: int, heldout: bool = False) -> tuple[np.ndarray, np.ndarray]:
    source, goal, _ = all_tokens[heldout]
    x = torch.cat([source[layer].flatten(1) for layer in layers], dim=1).numpy()
    return x, goal[target].flatten(1).numpy()


def settings(**overrides) -> FitConfig:
    return FitConfig(**{"top_k": 2, "num_sinks": 2, "heldout_fraction": 0.3, "dtype": "float32", **overrides})


def a_metric(layers: int, heads: int, dim: int, seed: int = 0) -> OutputMetrics:
    generator = torch.Generator().manual_seed(seed)

    def one() -> torch.Tensor:
        root = torch.randn(layers, heads, dim, dim, generator=generator, dtype=torch.float64)
        return normalised(root @ root.mT)

    return OutputMetrics(one(), one())


# ---- ridge ----------------------------------------------------------------------------------------------------------


def test_a_vanishing_penalty_gives_least_squares(statistics, all_tokens):
    mapper = fit_from_statistics(statistics, settings(ridge_lambda=1e-9))
    for target in range(3):
        x, y = key_problem(all_tokens, mapper.config.selected_layers[target], target)
        design = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        expected = np.linalg.lstsq(design, y, rcond=None)[0]
        weight = mapper.key_weight[target].double().permute(1, 0, 2).flatten(1).detach().numpy()
        np.testing.assert_allclose(weight, expected[:-1], atol=2e-4)
        np.testing.assert_allclose(mapper.key_bias[target].detach().flatten().numpy(), expected[-1], atol=2e-4)


def test_in_a_metric_every_direction_has_a_penalty_of_its_own(statistics, all_tokens):
    metrics, penalty = a_metric(3, 2, 16), 40.0
    mapper = fit_from_statistics(statistics, settings(metric="query", ridge_lambda=penalty), metrics=metrics)
    target = 1
    x, y = key_problem(all_tokens, mapper.config.selected_layers[target], target)
    x, y = x - x.mean(0), y - y.mean(0)
    for head in range(2):
        metric = metrics.keys[target, head].numpy()
        # The normal equations of sum (y - W'x)' M (y - W'x) + penalty |W|^2, written out with a Kronecker product.
        width = x.shape[1]
        system = np.kron(x.T @ x, metric) + penalty * np.eye(width * 16)
        right = (x.T @ y[:, head * 16 : (head + 1) * 16] @ metric).reshape(-1)
        expected = np.linalg.solve(system, right).reshape(width, 16)
        np.testing.assert_allclose(mapper.key_weight[target, head].detach().numpy(), expected, atol=1e-5)


def test_the_metric_without_a_penalty_changes_nothing(statistics):
    plain = fit_from_statistics(statistics, settings(ridge_lambda=1e-10))
    metric = fit_from_statistics(statistics, settings(ridge_lambda=1e-10, metric="query"), metrics=a_metric(3, 2, 16))
    torch.testing.assert_close(plain.key_weight, metric.key_weight, atol=2e-4, rtol=1e-3)


def test_the_penalty_is_the_best_on_held_out_tokens(statistics, all_tokens):
    mapper = fit_from_statistics(statistics, settings(lambda_search=True, ridge_lambda=0.1))
    penalties = mapper.config.fit["penalties"]  # per target layer: keys of both heads, then values
    for target in range(3):
        x, y = key_problem(all_tokens, mapper.config.selected_layers[target], target)
        held_x, held_y = key_problem(all_tokens, mapper.config.selected_layers[target], target, heldout=True)
        gram = (x - x.mean(0)).T @ (x - x.mean(0))
        cross = (x - x.mean(0)).T @ (y - y.mean(0))
        largest = np.trace(gram) / len(gram)
        grid = [min(0.1 * 10**power, largest) for power in range(int(np.ceil(np.log10(largest / 0.1))) + 1)]
        errors = []
        for penalty in grid:
            weight = np.linalg.solve(gram + penalty * np.eye(len(gram)), cross)
            left = held_y - y.mean(0) - (held_x - x.mean(0)) @ weight
            errors.append((left**2).sum(0).reshape(2, 16).sum(1))
        for head in range(2):
            best = grid[int(np.argmin([error[head] for error in errors]))]
            assert penalties[target][head] == pytest.approx(best)
    plain = fit_from_statistics(statistics, settings(ridge_lambda=0.1))
    for kind in ("keys", "values"):
        assert np.mean(mapper.config.fit["heldout_r2"][kind]) >= np.mean(plain.config.fit["heldout_r2"][kind])


# ---- metrics --------------------------------------------------------------------------------------------------------


def test_value_metric_is_what_the_output_projection_makes_of_an_error(pair):
    target = pair[1]
    metric = value_metrics(TracedModel(target, "target"))
    error = torch.randn(16, generator=torch.Generator().manual_seed(3))
    for layer, block in enumerate(target.model.layers):
        for head in range(2):
            cost = 0.0
            for query_head in (2 * head, 2 * head + 1):
                read = torch.zeros(4, 16)
                read[query_head] = error
                cost += float(block.self_attn.o_proj(read.flatten()).detach().square().sum())
            found = float(error.double() @ metric[layer, head] @ error.double())
            assert found == pytest.approx(cost, rel=1e-4)


def test_drawn_keys_follow_the_sensitivity():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 6, 8, generator=generator) for heads in (2, 1, 1))
    mask = torch.ones(1, 6, dtype=torch.bool)
    columns = torch.full((1, 400), 5)
    draws, weights, picked = draw_keys(query, key, value, 0.3, mask, mask, columns, columns > 0, [generator])
    for head in range(2):
        a = torch.softmax(query[0, head, 5] @ key[0, 0].T * 0.3, -1)
        out = a @ value[0, 0]
        expected = (a**2 * (value[0, 0] - out).square().sum(-1))[:5] * 0.3**2
        mine = slice(head * 1600, (head + 1) * 1600)
        counts = torch.bincount(draws[0, 0, mine], minlength=6)[:5].float()
        torch.testing.assert_close(counts / 1600, expected / expected.sum(), atol=0.05, rtol=0)
        assert float(weights[0, 0, mine].sum() / 400) == pytest.approx(float(expected.sum()), rel=1e-4)
        torch.testing.assert_close(picked[0, 0, mine][0], query[0, head, 5])


def test_query_metric_is_that_of_queries_in_the_keys_own_frame(pair):
    """With one key to look at the draw is certain, and the metric is a sum over queries that can be written out."""
    target = pair[1]
    ids = tokens(5, 3, seed=9)
    metrics = collect_metrics(*pair, [ids], settings(num_sinks=1, heldout_fraction=0.0), progress=False)
    found = torch.zeros(2, 16, 16, dtype=torch.float64)
    for row in ids:
        states = {}
        attention = target.model.layers[0].self_attn
        hooks = [
            getattr(attention, name).register_forward_hook(
                lambda m, i, o, name=name, states=states: states.update({name: o})
            )
            for name in ("q_proj", "k_proj", "v_proj")
        ]
        with torch.no_grad():
            target(row[None])
        for hook in hooks:
            hook.remove()
        cos, sin = target.model.rotary_emb(states["q_proj"], torch.arange(3)[None])

        def rotated(states: torch.Tensor, position: int, sign: float = 1.0, cos=cos, sin=sin) -> torch.Tensor:
            half = torch.cat([-states[8:], states[:8]])
            return states * cos[0, position] + sign * half * sin[0, position]

        for query_head in range(4):
            head = query_head // 2
            query = rotated(states["q_proj"][0, 2].view(4, 16)[query_head], 2)
            keys = torch.stack([rotated(states["k_proj"][0, n].view(2, 16)[head], n) for n in range(3)])
            values = states["v_proj"][0].view(3, 2, 16)[:, head]
            a = torch.softmax(keys @ query / 4, 0)
            weight = a[1] ** 2 * (values[1] - a @ values).square().sum() / 16
            framed = rotated(query, 1, -1.0).double()
            found[head] += weight.double() * torch.outer(framed, framed)
    torch.testing.assert_close(metrics.keys[0], normalised(found), atol=1e-4, rtol=1e-3)


# ---- budgets --------------------------------------------------------------------------------------------------------


def test_a_budget_goes_where_it_lowers_the_error_most():
    errors = [[0.9, 0.5, 0.4, 0.39], [0.3, 0.29, 0.28, 0.27], [0.8, 0.6, 0.7, 0.1]]
    assert spend(errors, 3) == [1, 1, 1]
    assert spend(errors, 6) == [3, 1, 2]
    # The third row stops where its error would rise, whatever is left of the budget.
    assert spend(errors, 100) == [4, 4, 2]


def test_a_mapper_with_a_budget_is_the_ridge_map_of_as_many_layers(statistics):
    mapper = fit_from_statistics(statistics, settings(layer_budget=1.4))
    counts = mapper.config.method_config["layer_counts"]
    assert sum(counts) <= round(1.4 * 3) and mapper.config.method == "ragged"
    source = content()
    for target, count in enumerate(counts):
        whole = fit_from_statistics(statistics, settings(top_k=count))
        for found, expected in zip(mapper.map_layer(target, source), whole.map_layer(target, source), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert mapper.key_weight.numel() == sum(counts) * 32 * 32


def test_a_ragged_mapper_is_saved_and_loaded(statistics, tmp_path):
    mapper = fit_from_statistics(statistics, settings(layer_budget=1.4))
    assert_saved_and_loaded(mapper, tmp_path)


# ---- low rank -------------------------------------------------------------------------------------------------------


def test_a_map_of_rank_r_is_the_singular_value_solution_in_the_metric(statistics, all_tokens):
    metrics, rank, penalty = a_metric(3, 2, 16), 5, 0.01
    config = settings(method="low_rank", rank=rank, metric="query", ridge_lambda=penalty)
    mapper = fit_from_statistics(statistics, config, metrics=metrics)
    assert mapper.key_down.shape == (64, 15) and mapper.key_up.shape == (15, 32)
    target = 2
    x, y = key_problem(all_tokens, mapper.config.selected_layers[target], target)
    x, y = x - x.mean(0), y - y.mean(0)
    features = x.T @ x + penalty * np.eye(x.shape[1])
    metric = np.zeros((32, 32))
    full = np.zeros((x.shape[1], 32))
    for head in range(2):
        part = slice(head * 16, (head + 1) * 16)
        metric[part, part] = metrics.keys[target, head].numpy()
        size, vectors = np.linalg.eigh(metric[part, part])
        for direction in range(16):
            weighed = x.T @ x + penalty / size[direction] * np.eye(x.shape[1])
            column = np.linalg.solve(weighed, x.T @ y[:, part] @ vectors[:, direction])
            full[:, part] += np.outer(column, vectors[:, direction])
    left, right = np.linalg.cholesky(features).T, np.linalg.cholesky(metric)
    u, s, v = np.linalg.svd(left @ full @ right)
    expected = np.linalg.solve(left, (u[:, :rank] * s[:rank]) @ v[:rank]) @ np.linalg.inv(right)
    found = (mapper.key_down[:, 10:15] @ mapper.key_up[10:15]).detach().double().numpy()
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_at_full_rank_nothing_is_lost_and_a_lower_one_is_smaller(statistics):
    for support in ("full_head", "head_local"):
        ridge = fit_from_statistics(statistics, settings(support=support))
        full = fit_from_statistics(statistics, settings(support=support, method="low_rank", rank_energy=1.0))
        assert_same_maps(full, ridge, content(), atol=1e-4, rtol=1e-3)
        most = fit_from_statistics(statistics, settings(support=support, method="low_rank", rank_energy=0.9))
        ranks = [rank for kind in most.config.method_config["ranks"].values() for row in kind for rank in row]
        assert 1 <= min(ranks) and max(ranks) < (32 if support == "full_head" else 16)


def test_a_budget_of_ranks_is_kept(statistics):
    full = fit_from_statistics(statistics, settings())
    size = full.key_weight.numel() + full.value_weight.numel()
    errors = []
    for budget in (0.3, 0.6):
        mapper = fit_from_statistics(statistics, settings(method="low_rank", rank_budget=budget))
        factors = sum(p.numel() for name, p in mapper.named_parameters() if "bias" not in name)
        assert 0.9 * budget * size < factors <= budget * size
        assert mapper.method.flops_per_token(mapper) == 2 * factors
        errors.append(1 - np.mean(mapper.config.fit["r2"]["keys"]))
    assert errors[1] < errors[0]


def test_low_rank_maps_are_saved_and_loaded(statistics, tmp_path):
    mapper = fit_from_statistics(statistics, settings(method="low_rank", rank=3))
    assert_saved_and_loaded(mapper, tmp_path)


def test_weighted_low_rank_maps_share_their_features_over_heads(pair):
    config = settings(method="low_rank", rank_energy=1.0, weighting="sensitivity", metric="query")
    full = fit_mapper(*pair, BATCHES, settings(weighting="sensitivity", metric="query"), progress=False)
    mapper = fit_mapper(*pair, BATCHES, config, progress=False)
    assert mapper.key_up.shape[1] == 32
    assert_same_maps(mapper, full, content(), atol=1e-3, rtol=1e-3)


def test_settings_that_cannot_work_are_refused(statistics):
    with pytest.raises(FitConfigError, match="rank_energy"):
        settings(method="low_rank", rank_energy=1.5)
    with pytest.raises(FitConfigError, match="one of rank"):
        settings(method="low_rank", rank=2, rank_budget=0.5)
    with pytest.raises(FitConfigError, match="needs rank"):
        fit_from_statistics(statistics, settings(method="low_rank"))
    with pytest.raises(FitConfigError, match="collect_metrics"):
        fit_from_statistics(statistics, settings(metric="query"))
    with pytest.raises(FitConfigError, match="head_local"):
        settings(head_block=2)


# ---- blocks of heads ------------------------------------------------------------------------------------------------


def test_blocks_of_any_width_keep_their_middle():
    assert identity_blocks(4, 4) == [[0], [1], [2], [3]]
    assert identity_blocks(4, 4, 3) == [[0, 1, 2], [0, 1, 2], [1, 2, 3], [1, 2, 3]]
    assert identity_blocks(4, 2, 4) == [[0, 1, 2, 3]] * 2
    assert identity_blocks(4, 8, 2)[6:] == [[2, 3]] * 2


@pytest.mark.parametrize("assignment", ["identity", "fitted"])
def test_the_widest_block_is_full_head(statistics, assignment):
    full = fit_from_statistics(statistics, settings())
    wide = fit_from_statistics(
        statistics, settings(support="head_local", head_block=2, head_assignment=assignment, selection="r2")
    )
    assert_same_maps(wide, full, content(), atol=1e-4, rtol=1e-3)
    narrow = fit_from_statistics(statistics, settings(support="head_local"))
    assert narrow.key_weight.numel() * 2 == full.key_weight.numel()


def test_basis_roots_are_inverse_and_square_to_the_metric():
    metric = a_metric(1, 2, 8).keys[0]
    basis = OutputBasis(metric, 1)
    x = torch.randn(1, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(basis.unroot(basis.root(x)), x)
    gram = torch.block_diag(metric[0], metric[1])
    torch.testing.assert_close(basis.root(x).square().sum(), (x[0] @ gram * x[0]).sum())
