"""Calibration statistics: exact merging, independence of the split, saving and loading, solves."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from kvbridge_hf.calibration.layout import StatisticsLayout, identity_blocks
from kvbridge_hf.calibration.moments import Moments, exact_matmul
from kvbridge_hf.calibration.solve import solve_ridge
from kvbridge_hf.calibration.statistics import CalibrationStatistics, Statistics
from kvbridge_hf.calibration.traces import Trace
from kvbridge_hf.errors import ArtifactError, CalibrationError, FitConfigError

SIZES = {
    "source_layers": 3,
    "source_heads": 2,
    "source_dim": 4,
    "target_layers": 2,
    "target_heads": 2,
    "target_dim": 5,
}


def random_trace(tokens: int, seed: int = 0, offset: float = 0.0, **sizes: int) -> Trace:
    sizes = {**SIZES, **sizes}
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        scale = torch.rand(shape[0], 1, *shape[2:], generator=generator) * 3 + 0.1
        return torch.randn(shape, generator=generator) * scale + offset

    source = (sizes["source_layers"], tokens, sizes["source_heads"], sizes["source_dim"])
    target = (sizes["target_layers"], tokens, sizes["target_heads"], sizes["target_dim"])
    return Trace(
        draw(*source), draw(*source), draw(*target), draw(*target), torch.zeros(tokens).long(), torch.arange(tokens)
    )


def collect(trace: Trace, support: str, parts: list[torch.Tensor] | None = None, **sizes: int) -> Statistics:
    statistics = Statistics.zeros(StatisticsLayout(support, **{**SIZES, **sizes}))
    for tokens in [torch.arange(trace.num_tokens)] if parts is None else parts:
        statistics.update(trace.select(tokens))
    return statistics


def assert_same(left: Moments, right: Moments, tolerance: float) -> None:
    for name, tensor in left.tensors().items():
        other = getattr(right, name)
        assert (tensor - other).norm() <= tolerance * tensor.norm(), name


def numpy_moments(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> dict[str, np.ndarray]:
    """Weighted centred moments written down once more, in float64."""
    x_mean, y_mean = (w[:, None] * x).sum(0) / w.sum(), (w[:, None] * y).sum(0) / w.sum()
    xc, yc = x - x_mean, y - y_mean
    return {
        "x_mean": x_mean,
        "y_mean": y_mean,
        "gram": xc.T @ (w[:, None] * xc),
        "cross": xc.T @ (w[:, None] * yc),
        "power": (w[:, None] * yc**2).sum(0),
    }


def test_statistics_equal_numpy_and_layout_order():
    trace = random_trace(57, offset=2.0)
    moments = collect(trace, "full_head").systems(1, [2, 0], "full_head")
    for kind, (source, target) in enumerate(
        ((trace.source_keys, trace.target_keys), (trace.source_values, trace.target_values))
    ):
        # features: layer 2 then layer 0, in each the heads, in each head its channels
        x = np.concatenate([source[layer].reshape(57, -1).double().numpy() for layer in (2, 0)], axis=1)
        y = target[1].reshape(57, -1).double().numpy()
        for name, expected in numpy_moments(x, y, np.ones(57)).items():
            np.testing.assert_allclose(getattr(moments, name)[kind].numpy(), expected, rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("from_layout", ["full_head", "head_local"])
def test_head_local_systems_equal_numpy(from_layout):
    # six target heads over three source heads: two target heads share a source head
    sizes = {"source_heads": 3, "target_heads": 6}
    trace = random_trace(40, **sizes)
    blocks = identity_blocks(3, 6)
    assert blocks == [[0], [0], [1], [1], [2], [2]]
    moments = collect(trace, from_layout, **sizes).systems(0, [1, 2], "head_local", [blocks, blocks])
    per_system = 12 // len(moments.weight)  # target heads served by one system
    for head in range(6):
        x = np.concatenate([trace.source_keys[layer][:, blocks[head][0]].double().numpy() for layer in (1, 2)], axis=1)
        y = trace.target_keys[0][:, head].double().numpy()
        expected = numpy_moments(x, y, np.ones(40))
        system, place = divmod(head, per_system)
        np.testing.assert_allclose(moments.gram[system].numpy(), expected["gram"], rtol=1e-11, atol=1e-10)
        columns = slice(place * 5, place * 5 + 5)
        np.testing.assert_allclose(moments.cross[system][:, columns].numpy(), expected["cross"], rtol=1e-10, atol=1e-9)


def test_memory_is_known_beforehand_and_does_not_grow_with_the_tokens():
    for support in ("full_head", "head_local"):
        few, many = collect(random_trace(10), support), collect(random_trace(500), support)
        assert few.layout.num_bytes == few.moments.num_bytes == many.moments.num_bytes
    sizes = {**SIZES, "source_heads": 8, "target_heads": 8}
    full, local = (StatisticsLayout(support, **sizes).num_bytes for support in ("full_head", "head_local"))
    assert 7 < full / local < 9


@pytest.mark.parametrize(
    ("source_heads", "target_heads", "expected"),
    [
        (4, 4, [[0], [1], [2], [3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (4, 2, [[0, 1], [2, 3]]),
        (3, 2, [[0, 1], [1, 2]]),
        (2, 3, [[0], [0], [1]]),
        (8, 3, [[0, 1, 2], [2, 3, 4], [5, 6, 7]]),
    ],
)
def test_identity_blocks(source_heads, target_heads, expected):
    assert identity_blocks(source_heads, target_heads) == expected


@pytest.mark.parametrize("support", ["full_head", "head_local"])
def test_any_split_order_and_merge_give_the_same_statistics(support):
    trace = random_trace(301, offset=5.0)
    whole = collect(trace, support)
    shuffled = torch.randperm(301, generator=torch.Generator().manual_seed(1))
    one_by_one = collect(trace, support, list(torch.arange(301).split(1)))
    in_parts = collect(trace, support, list(shuffled.split([0, 1, 100, 7, 193, 0])))
    merged = collect(trace, support, [shuffled[200:]])
    merged.merge(collect(trace, support, [shuffled[:3]])).merge(collect(trace, support, []))
    empty_first = collect(trace, support, []).merge(collect(trace, support, [shuffled[3:200]])).merge(merged)
    for other in (one_by_one, in_parts, empty_first):
        assert other.tokens == whole.tokens == 301
        assert_same(whole.moments, other.moments, 1e-11)


def test_updates_in_chunks_equal_one_update(monkeypatch):
    trace = random_trace(100, offset=-3.0)
    whole = collect(trace, "full_head")
    monkeypatch.setattr("kvbridge_hf.calibration.moments.CHUNK_BYTES", 4096)
    assert_same(whole.moments, collect(trace, "full_head").moments, 1e-12)


@pytest.mark.parametrize("products", [torch.float64, torch.float32])
def test_half_of_a_gram_is_computed_and_all_of_it_is_right(monkeypatch, products):
    monkeypatch.setattr("kvbridge_hf.calibration.moments.GRAM_ROWS", 3)
    monkeypatch.setattr("kvbridge_hf.calibration.moments.CHUNK_BYTES", 2000)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 50, 8, generator=generator) + 2, torch.randn(2, 50, 4, generator=generator)
    moments = Moments.zeros(2, 8, 4)
    for part in (slice(0, 20), slice(20, 50)):
        moments.update(x[:, part], y[:, part], products=products)
    for system in range(2):
        expected = numpy_moments(x[system].double().numpy(), y[system].double().numpy(), np.ones(50))
        tolerance = 1e-11 if products == torch.float64 else 1e-5
        for name, value in expected.items():
            np.testing.assert_allclose(
                getattr(moments, name)[system].numpy(), value, rtol=tolerance, atol=10 * tolerance
            )


def test_float32_products_are_close_and_float64_sums(monkeypatch):
    trace = random_trace(500, offset=10.0)
    exact = collect(trace, "full_head")
    monkeypatch.setattr("kvbridge_hf.calibration.moments.CHUNK_BYTES", 40_000)
    low = Statistics.zeros(exact.layout, products=torch.float32)
    for tokens in torch.arange(500).split(50):
        low.update(trace.select(tokens))
    assert low.moments.gram.dtype == torch.float64
    assert_same(exact.moments, low.moments, 1e-6)
    assert (exact.moments.gram - low.moments.gram).abs().max() > 0


def test_weighted_moments_equal_numpy_and_scale():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 90, 6, generator=generator) + 1, torch.randn(2, 90, 3, generator=generator)
    w = torch.rand(2, 90, generator=generator)
    w[0, :20] = 0  # a whole chunk of nothing
    moments = Moments.zeros(2, 6, 3)
    for part in torch.arange(90).split(20):
        moments.update(x[:, part], y[:, part], w[:, part])
    for system in range(2):
        w_np = w[system].double().numpy()
        expected = numpy_moments(x[system].double().numpy(), y[system].double().numpy(), w_np)
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(moments, name)[system].numpy(), value, rtol=1e-10, atol=1e-10)
        assert moments.effective_samples[system].item() == pytest.approx(w_np.sum() ** 2 / (w_np**2).sum())
    twice = Moments.zeros(2, 6, 3)
    twice.update(x, y, 2 * w)
    assert_same(twice, moments.scaled(2.0), 1e-12)


def test_a_weight_of_two_is_a_token_seen_twice():
    trace = random_trace(40)
    weights = torch.ones(40)
    weights[10:15] = 2
    weighted = Statistics.zeros(StatisticsLayout("full_head", **SIZES))
    weighted.update(trace, weights)
    twice = collect(trace, "full_head", [torch.arange(40), torch.arange(10, 15)])
    for name in ("weight", "x_mean", "y_mean", "gram", "cross", "power"):
        torch.testing.assert_close(getattr(weighted.moments, name), getattr(twice.moments, name))


def test_products_are_exact_whatever_tf32_and_autocast_say():
    settings = torch.backends.cuda.matmul
    name, reduced = ("fp32_precision", "tf32") if hasattr(settings, "fp32_precision") else ("allow_tf32", True)
    before = getattr(settings, name)
    x, y = torch.randn(1, 50, 8), torch.randn(1, 50, 3)
    plain, inside = Moments.zeros(1, 8, 3), Moments.zeros(1, 8, 3)
    plain.update(x, y, products=torch.float32)
    try:
        setattr(settings, name, reduced)
        with torch.autocast("cpu", dtype=torch.bfloat16), exact_matmul():
            assert getattr(settings, name) != reduced
        assert getattr(settings, name) == reduced
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside.update(x, y, products=torch.float32)
    finally:
        setattr(settings, name, before)
    assert torch.equal(plain.gram, inside.gram) and torch.equal(plain.cross, inside.cross)


def test_residual_expands_into_heldout_moments():
    """The squared error of any map on other data, from their moments, equals the error computed token by token."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(1, 60, 5, generator=generator), torch.randn(1, 60, 4, generator=generator)
    fitted, held = Moments.zeros(1, 5, 4), Moments.zeros(1, 5, 4)
    fitted.update(x[:, :40], y[:, :40])
    held.update(x[:, 40:] + 0.7, y[:, 40:] - 0.2)
    solution = solve_ridge(fitted.gram, fitted.cross, 0.1)
    bias = fitted.y_mean - (fitted.x_mean.unsqueeze(1) @ solution).squeeze(1)
    error = (y[:, 40:] - 0.2).double() - (x[:, 40:] + 0.7).double() @ solution - bias
    expected = error.square().sum(dim=1)
    torch.testing.assert_close(held.about(fitted.x_mean, fitted.y_mean).residual(solution), expected)


def test_solve_equals_numpy_lstsq_also_without_full_rank():
    generator = np.random.default_rng(0)
    full = generator.normal(size=(50, 8))
    repeated = np.concatenate([full, full[:, :3], np.zeros((50, 2))], axis=1)  # copies and dead channels
    few = generator.normal(size=(5, 12))  # fewer samples than features
    for x in (full, repeated, few):
        y = generator.normal(size=(len(x), 3))
        expected = np.linalg.lstsq(x, y, rcond=None)[0]
        got = solve_ridge(torch.tensor(x.T @ x)[None], torch.tensor(x.T @ y)[None], 0.0)[0].numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-7, atol=1e-8)


def test_solve_treats_each_system_by_itself():
    generator = np.random.default_rng(1)
    x = generator.normal(size=(2, 30, 6))
    x[1, :, 2] = 0
    gram, cross = torch.tensor(x).mT @ torch.tensor(x), torch.tensor(x).mT @ torch.tensor(x[:, :, :1] + x[:, :, 1:2])
    got = solve_ridge(gram, cross, 0.0)
    expected = torch.zeros(2, 6, 1, dtype=torch.float64)
    expected[:, :2] = 1
    torch.testing.assert_close(got, expected)


def calibration_statistics(**info) -> CalibrationStatistics:
    return CalibrationStatistics(
        collect(random_trace(30, 0), "full_head"), collect(random_trace(10, 1), "full_head"), {"num_sinks": 4, **info}
    )


def test_save_and_load(tmp_path):
    statistics = calibration_statistics(sequences=3)
    statistics.save(tmp_path)
    loaded = CalibrationStatistics.load(tmp_path)
    assert loaded.info == statistics.info and loaded.layout == statistics.layout
    for name in ("train", "heldout"):
        part, again = getattr(statistics, name), getattr(loaded, name)
        assert part.tokens == again.tokens
        for key, tensor in part.moments.tensors().items():
            assert torch.equal(tensor, getattr(again.moments, key))
    # saving again leaves no old files behind
    statistics.train.update(random_trace(5, 9))
    statistics.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    assert CalibrationStatistics.load(tmp_path).train.tokens == 35


def test_a_save_cut_short_leaves_the_old_statistics(tmp_path, monkeypatch):
    calibration_statistics().save(tmp_path)
    other = calibration_statistics()
    other.train.update(random_trace(5, 9))

    def full_disk(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("kvbridge_hf.calibration.storage.os.fdopen", full_disk)
    with pytest.raises(OSError, match="No space"):
        other.save(tmp_path)
    assert CalibrationStatistics.load(tmp_path).train.tokens == 30
    assert not list(tmp_path.glob(".*.tmp"))


def test_damage_is_named(tmp_path):
    with pytest.raises(ArtifactError, match="statistics.json"):
        CalibrationStatistics.load(tmp_path)
    calibration_statistics().save(tmp_path)
    file = next(tmp_path.glob("train-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(ArtifactError, match=file.name):
        CalibrationStatistics.load(tmp_path)
    file.unlink()
    with pytest.raises(ArtifactError, match="missing"):
        CalibrationStatistics.load(tmp_path)
    (tmp_path / "statistics.json").write_text(json.dumps({"files": {}, "format": 99}))
    with pytest.raises(ArtifactError, match="format 99"):
        CalibrationStatistics.load(tmp_path)
    (tmp_path / "statistics.json").write_text("{")
    with pytest.raises(ArtifactError, match="damaged"):
        CalibrationStatistics.load(tmp_path)


def test_saved_nan_is_refused(tmp_path):
    statistics = calibration_statistics()
    statistics.heldout.moments.cross[0, 0, 0] = float("nan")
    statistics.save(tmp_path)
    with pytest.raises(ArtifactError, match="heldout.cross"):
        CalibrationStatistics.load(tmp_path)


def test_merging_calibrations_checks_that_they_belong_together():
    left, right = calibration_statistics(sequences=3), calibration_statistics(sequences=2)
    assert left.merge(right).info["sequences"] == 5
    assert left.train.tokens == 60
    with pytest.raises(CalibrationError, match="num_sinks"):
        left.merge(calibration_statistics(num_sinks=0))
    with pytest.raises(CalibrationError, match="layouts"):
        left.train.merge(collect(random_trace(3), "head_local"))


def test_head_local_statistics_refuse_what_they_cannot_give():
    statistics = collect(random_trace(20), "head_local")
    with pytest.raises(FitConfigError, match="full-head fit"):
        statistics.systems(0, [0], "full_head")
    with pytest.raises(FitConfigError, match="other than the identity"):
        statistics.systems(0, [0], "head_local", [[[1], [0]]])
