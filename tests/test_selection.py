"""Layer and head selection from statistics: planted supports, and independent computations of every score."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_statistics import collect, random_trace

from kvbridge_hf.calibration.layout import identity_blocks
from kvbridge_hf.calibration.selection import greedy_layers, head_r2, select, single_layer_r2
from kvbridge_hf.calibration.statistics import CalibrationStatistics
from kvbridge_hf.calibration.traces import Trace
from kvbridge_hf.errors import FitConfigError
from kvbridge_hf.mappers.config import FitConfig


def linked_trace(tokens: int, seed: int = 0, noise: float = 1.0, **sizes: int) -> Trace:
    """A trace whose targets are random mixtures of all source features plus noise."""
    trace = random_trace(tokens, seed, offset=1.0, **sizes)
    generator = torch.Generator().manual_seed(99)  # the same maps for every seed of the data
    for source, target in ((trace.source_keys, trace.target_keys), (trace.source_values, trace.target_values)):
        x = source.transpose(0, 1).flatten(1)
        for layer in range(len(target)):
            mix = torch.randn(x.shape[1], target[layer][0].numel(), generator=generator)
            mix *= torch.rand(x.shape[1], 1, generator=generator) ** 3
            target[layer] = (x @ mix).view_as(target[layer]) + noise * target[layer]
    return trace


def statistics_of(train: Trace, heldout: Trace | None, support: str = "full_head", **sizes: int):
    empty = train.select(torch.arange(0))
    return CalibrationStatistics(
        collect(train, support, **sizes), collect(heldout if heldout is not None else empty, support, **sizes)
    )


def ridge_r2(x, y, x_eval, y_eval, penalty):
    """R^2 of a ridge fit of one head, written down once more with numpy; the head's channels are summed over."""
    x_mean, y_mean = x.mean(0), y.mean(0)
    xc, yc = x - x_mean, y - y_mean
    w = np.linalg.solve(xc.T @ xc + penalty * np.eye(x.shape[1]), xc.T @ yc)
    error = y_eval - y_mean - (x_eval - x_mean) @ w
    return 1 - (error**2).sum() / ((y_eval - y_eval.mean(0)) ** 2).sum()


def features(trace: Trace, kind: int, layers, heads) -> np.ndarray:
    source = (trace.source_keys, trace.source_values)[kind]
    return np.concatenate([source[layer][:, head].double().numpy() for layer in layers for head in heads], axis=1)


def target_of(trace: Trace, kind: int, layer: int, head: int) -> np.ndarray:
    return (trace.target_keys, trace.target_values)[kind][layer][:, head].double().numpy()


@pytest.mark.parametrize("scored_on", ["train", "heldout"])
@pytest.mark.parametrize("blocks", ["matched", "layer", "single"])
def test_single_layer_r2_equals_numpy(blocks, scored_on):
    sizes = {"source_heads": 4, "target_heads": 2}
    train, heldout = linked_trace(80, 0, **sizes), linked_trace(50, 1, **sizes)
    statistics = statistics_of(train, heldout, **sizes)
    scored, scored_trace = (statistics.train, train) if scored_on == "train" else (statistics.heldout, heldout)
    table = single_layer_r2(statistics.train, scored, blocks, 0.5)
    matched = identity_blocks(4, 2)
    for kind in range(2):
        for target in range(2):
            for source in range(3):
                for head in range(2):
                    choices = {"matched": [matched[head]], "layer": [range(4)], "single": [[0], [1], [2], [3]]}[blocks]
                    for place, heads in enumerate(choices):
                        expected = ridge_r2(
                            features(train, kind, [source], heads),
                            target_of(train, kind, target, head),
                            features(scored_trace, kind, [source], heads),
                            target_of(scored_trace, kind, target, head),
                            0.5,
                        )
                        got = table[kind, target, source, head]
                        assert float(got[place] if blocks == "single" else got) == pytest.approx(expected, abs=1e-9)


def test_matched_scores_are_the_same_from_head_local_statistics():
    sizes = {"source_heads": 2, "target_heads": 4}
    train = linked_trace(70, 0, **sizes)
    full, local = collect(train, "full_head", **sizes), collect(train, "head_local", **sizes)
    torch.testing.assert_close(
        single_layer_r2(full, full, "matched", 0.1), single_layer_r2(local, local, "matched", 0.1)
    )


@pytest.mark.parametrize("scored_on", ["train", "heldout"])
@pytest.mark.parametrize("support", ["full_head", "head_local"])
def test_greedy_equals_brute_force(support, scored_on):
    sizes = {"source_layers": 5}
    train, heldout = linked_trace(120, 3, **sizes), linked_trace(60, 4, **sizes)
    statistics = statistics_of(train, heldout, **sizes)
    scored, scored_trace = (statistics.train, train) if scored_on == "train" else (statistics.heldout, heldout)
    config = FitConfig(support=support, top_k=4, ridge_lambda=3.0)
    for target in range(2):
        chosen: list[int] = []
        while len(chosen) < 4:
            scores = {}
            for layer in set(range(5)) - set(chosen):
                r2 = []
                for kind in range(2):
                    for head in range(2):
                        heads = range(2) if support == "full_head" else [head]
                        r2.append(
                            ridge_r2(
                                features(train, kind, [*chosen, layer], heads),
                                target_of(train, kind, target, head),
                                features(scored_trace, kind, [*chosen, layer], heads),
                                target_of(scored_trace, kind, target, head),
                                3.0,
                            )
                        )
                scores[layer] = np.mean(r2)
            chosen.append(max(scores, key=scores.get))
        candidates = [3, 1, 4, 0, 2]
        heads = [identity_blocks(2, 2)] * 5 if support == "head_local" else None
        assert greedy_layers(statistics.train, scored, target, candidates, heads, config) == chosen


def test_planted_layers_are_ranked_first():
    """Target layer t is a map of source layer `planted[t]`, plus a little noise."""
    sizes = {"source_layers": 6, "target_layers": 4}
    planted = [5, 0, 3, 3]
    generator = torch.Generator().manual_seed(5)

    def draw(seed):
        trace = random_trace(200, seed, **sizes)
        maps = torch.Generator().manual_seed(7)
        for source, target in ((trace.source_keys, trace.target_keys), (trace.source_values, trace.target_values)):
            for layer, origin in enumerate(planted):
                mix = torch.randn(2, 4, 5, generator=maps)
                noise = 0.1 * torch.randn(target[layer].shape, generator=generator)
                target[layer] = torch.einsum("nhd,hde->nhe", source[origin], mix) + noise
        return trace

    statistics = statistics_of(draw(0), draw(1), **sizes)
    for selection in ("r2", "r2_layer", "greedy"):
        found = select(statistics, FitConfig(selection=selection, top_k=2))
        assert [row[0] for row in found.layers] == planted, selection
        assert found.scored_on == "heldout" and found.heads is None
        assert found.scores.shape == (4, 6)


def test_greedy_takes_the_layer_that_adds_most_where_ranking_repeats_itself():
    """Source layer 1 is a noisy copy of layer 0; the target needs layers 0 and 2. Ranking takes the copy."""
    trace = random_trace(400, 0)
    generator = torch.Generator().manual_seed(1)
    for source, target in ((trace.source_keys, trace.target_keys), (trace.source_values, trace.target_values)):
        source[1] = source[0] + 0.3 * torch.randn(source[0].shape, generator=generator)
        mix = torch.randn(2, 2, 4, 5, generator=generator)
        one, other = (torch.einsum("nhd,hde->nhe", source[layer], mix[place]) for place, layer in enumerate((0, 2)))
        target[:] = one / one.std() + 0.5 * other / other.std()
    statistics = statistics_of(trace, None)
    assert select(statistics, FitConfig(selection="r2", top_k=2)).layers == [[0, 1]] * 2
    assert select(statistics, FitConfig(selection="greedy", top_k=2)).layers == [[0, 2]] * 2


def test_heldout_scores_do_not_reward_overfitting():
    """A wide source layer of pure noise explains few training tokens almost fully, and held-out ones not at all."""
    sizes = {"source_dim": 10}
    train, heldout = random_trace(24, 0, **sizes), random_trace(200, 1, **sizes)
    statistics = statistics_of(train, heldout, **sizes)
    in_sample = select(statistics, FitConfig(selection="r2_layer", top_k=1, selection_data="train"))
    honest = select(statistics, FitConfig(selection="r2_layer", top_k=1))
    assert (in_sample.scores > 0.6).all() and (honest.scores < 0).all()
    assert select(statistics_of(train, None, **sizes), FitConfig(top_k=1)).scored_on == "train"


def test_fitted_head_assignment_finds_permuted_heads():
    """Target head h copies source head `permuted[layer][h]`, another one in each source layer."""
    sizes = {"source_heads": 4, "target_heads": 4}
    permuted = [[2, 0, 3, 1], [1, 1, 0, 2], [3, 2, 1, 0]]
    trace = random_trace(300, 0, **sizes)
    maps = torch.Generator().manual_seed(2)
    for source, target in ((trace.source_keys, trace.target_keys), (trace.source_values, trace.target_values)):
        target *= 0.01
        for layer, heads in enumerate(permuted):
            target += torch.einsum("nhd,hde->nhe", source[layer][:, heads], torch.randn(4, 4, 5, generator=maps))
    statistics = statistics_of(trace, None, **sizes)
    config = FitConfig(support="head_local", top_k=3, head_assignment="fitted")
    found = select(statistics, config)
    for layers, heads in zip(found.layers, found.heads, strict=True):
        assert [[block[0] for block in row] for row in heads] == [permuted[layer] for layer in layers]
    by_number = select(statistics, config.replace(head_assignment="identity"))
    assert by_number.heads == [[[[0], [1], [2], [3]]] * 3] * 2
    assert (found.scores > by_number.scores + 0.1).all()
    with pytest.raises(FitConfigError, match="fitted head assignment"):
        select(
            CalibrationStatistics(collect(trace, "head_local", **sizes), collect(trace, "head_local", **sizes)), config
        )


def test_fitted_blocks_with_more_source_heads():
    """Target head 0 needs source heads 1 and 2, head 1 needs 0 and 3: not the groups of the identity."""
    sizes = {"source_heads": 4, "target_heads": 2, "source_layers": 1}
    trace = random_trace(300, 0, **sizes)
    maps = torch.Generator().manual_seed(2)
    for source, target in ((trace.source_keys, trace.target_keys), (trace.source_values, trace.target_values)):
        for head, (first, second) in enumerate(((1, 2), (0, 3))):
            mix = torch.randn(2, 4, 5, generator=maps)
            target[:, :, head] = source[0][:, first] @ mix[0] + source[0][:, second] @ mix[1]
    found = select(
        statistics_of(trace, None, **sizes), FitConfig(support="head_local", top_k=1, head_assignment="fitted")
    )
    assert found.heads == [[[[1, 2], [0, 3]]]] * 2


def test_dead_channels_do_not_break_a_selection():
    train, heldout = linked_trace(60, 0), linked_trace(40, 1)
    for trace in (train, heldout):
        trace.source_keys[1, :, 0, 2] = 3.0  # constant
        trace.source_values[2] = 0.0  # a whole dead layer
        trace.target_keys[0, :, 1] = -1.0  # a constant target head
    statistics = statistics_of(train, heldout)
    for penalty in (0.0, 0.01):
        for selection in ("r2", "greedy"):
            found = select(statistics, FitConfig(selection=selection, top_k=3, ridge_lambda=penalty))
            assert torch.isfinite(found.scores).all()
            assert all(sorted(row) == [0, 1, 2] for row in found.layers)


def test_r2_of_a_head_that_does_not_vary():
    zero, some = torch.zeros(1, 3), torch.ones(1, 3)
    assert head_r2(zero, zero).item() == 1.0
    assert head_r2(some, zero).item() == 0.0
    assert head_r2(some, 4 * some).item() == 0.75
