"""Bootstrap intervals against explicit resampling, and the ratios they are made for."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvbridge_hf.evaluation.bootstrap import PairedBootstrap, paired_bootstrap
from kvbridge_hf.evaluation.errors import EvaluationError
from kvbridge_hf.evaluation.retention import floor_normalised_retention, gap_recovered, retention


def explicit_resamples(num_groups: int, num_resamples: int, seed: int) -> list[np.ndarray]:
    """Drawn group numbers, in the order that the class promises."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, num_groups, size=num_groups) for _ in range(num_resamples)]


def test_mean_interval_equals_explicit_resampling():
    values = np.random.default_rng(1).normal(size=37)
    interval = PairedBootstrap(37, num_resamples=300, confidence=0.9, seed=5).mean_interval(values)
    means = [values[drawn].mean() for drawn in explicit_resamples(37, 300, 5)]
    assert interval.estimate == pytest.approx(values.mean(), abs=1e-12)
    assert interval.low == pytest.approx(np.quantile(means, 0.05), abs=1e-12)
    assert interval.high == pytest.approx(np.quantile(means, 0.95), abs=1e-12)
    assert (interval.num_resamples, interval.seed, interval.num_items, interval.num_groups) == (300, 5, 37, 37)


def test_ratio_of_grouped_weighted_columns_equals_explicit_resampling():
    rng = np.random.default_rng(2)
    handoff, target, weights = rng.random(24), 1 + rng.random(24), rng.integers(1, 9, size=24)
    groups = np.repeat(np.arange(8), 3)
    interval = PairedBootstrap(24, groups.tolist(), num_resamples=200, seed=9).interval(
        lambda h, t: h / t, handoff, target, weights=weights
    )
    ratios = []
    for drawn in explicit_resamples(8, 200, 9):
        items = np.concatenate([np.flatnonzero(groups == group) for group in drawn])
        mean = [np.average(column[items], weights=weights[items]) for column in (handoff, target)]
        ratios.append(mean[0] / mean[1])
    expected = np.average(handoff, weights=weights) / np.average(target, weights=weights)
    assert interval.estimate == pytest.approx(expected, abs=1e-12)
    assert (interval.low, interval.high) == pytest.approx(tuple(np.quantile(ratios, [0.025, 0.975])), abs=1e-12)


def test_width_of_a_share_is_the_binomial_one():
    correct = np.tile([0.0, 1.0], 200)
    interval = PairedBootstrap(400, seed=3).mean_interval(correct)
    assert interval.low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.006)
    assert interval.high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.006)


def test_resamples_are_paired():
    values = np.random.default_rng(4).normal(size=50)
    sampler = PairedBootstrap(50, seed=1)
    difference = sampler.difference_interval(values + 0.25, values)
    assert difference.low == pytest.approx(0.25) and difference.high == pytest.approx(0.25)
    # The same numbers in another order are no pairs, and the difference is then uncertain.
    loose = sampler.difference_interval(values + 0.25, values[::-1])
    assert loose.high - loose.low > 0.3


def test_copies_within_a_group_add_no_certainty():
    values = np.random.default_rng(5).normal(size=30)
    alone = PairedBootstrap(30, seed=2).mean_interval(values)
    copied = PairedBootstrap(300, np.repeat(np.arange(30), 10).tolist(), seed=2).mean_interval(np.repeat(values, 10))
    assert (copied.low, copied.high) == pytest.approx((alone.low, alone.high))
    assert (copied.num_items, copied.num_groups) == (300, 30)


def test_undefined_statistics_have_no_made_up_bounds():
    # Five items of which one is right: in a third of the resamples the target scores nothing.
    target = np.array([1.0, 0, 0, 0, 0])
    interval = PairedBootstrap(5, num_resamples=500, seed=0).interval(retention, target, target)
    assert interval.estimate == 1.0
    assert interval.undefined_resamples == pytest.approx(500 * 0.8**5, abs=50)
    assert interval.low is None and interval.high is None
    with pytest.raises(EvaluationError, match="no value in"):
        PairedBootstrap(5, seed=0).interval(retention, target, target, undefined="error")
    nothing = PairedBootstrap(4).interval(retention, np.ones(4), np.zeros(4))
    assert nothing.estimate is None and nothing.low is None
    json.dumps(nothing.to_dict(), allow_nan=False)


def test_named_columns_share_their_resamples():
    rng = np.random.default_rng(6)
    columns = {"handoff": rng.random(40), "target": 1 + rng.random(40), "source": rng.random(40) - 1}
    named = paired_bootstrap(
        columns, lambda m: gap_recovered(m["handoff"], m["target"], m["source"]), num_resamples=100, seed=7
    )
    sampler = PairedBootstrap(40, num_resamples=100, seed=7)
    assert named == sampler.interval(gap_recovered, *columns.values())


@pytest.mark.parametrize(
    "make",
    [
        lambda: PairedBootstrap(0),
        lambda: PairedBootstrap(3, num_resamples=0),
        lambda: PairedBootstrap(3, confidence=95),
        lambda: PairedBootstrap(3, groups=["a", "b"]),
        lambda: PairedBootstrap(3).mean_interval([1.0, 2.0]),
        lambda: PairedBootstrap(3).mean_interval([1.0, 2.0, 3.0], weights=[1.0]),
        lambda: PairedBootstrap(3).interval(lambda: 0.0),
        lambda: paired_bootstrap({}, lambda means: 0.0),
    ],
)
def test_wrong_settings_are_refused(make):
    with pytest.raises(EvaluationError):
        make()


def test_retention_overstates_and_the_gap_tells():
    # The published pair: the source alone has 83 % of the target, the handoff 86.4 %.
    assert retention(0.864, 1.0) == pytest.approx(0.864)
    assert gap_recovered(0.864, 1.0, 0.83) == pytest.approx(0.2)
    assert floor_normalised_retention(0.864, 1.0, 0.25) == pytest.approx((0.864 - 0.25) / 0.75)


def test_gap_has_the_same_sign_for_losses():
    assert gap_recovered(2.5, 2.0, 3.0, higher_is_better=False) == pytest.approx(0.5)
    assert gap_recovered(3.5, 2.0, 3.0, higher_is_better=False) == pytest.approx(-0.5)


def test_ratios_without_a_denominator_are_none():
    assert gap_recovered(0.5, 0.5, 0.5) is None
    assert gap_recovered(0.5, 0.4, 0.5) is None
    assert gap_recovered(2.5, 3.0, 2.0, higher_is_better=False) is None
    assert retention(0.1, 0.0) is None
    assert floor_normalised_retention(0.3, 0.2, 0.2) is None
    assert retention(float("nan"), 1.0) is None
