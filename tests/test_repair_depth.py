"""In how many lowest layers repair has to recompute: measured where the answer is known."""

from __future__ import annotations

import copy

import pytest
import torch
from models import tiny_model

from kvbridge_hf import FitConfig, HandoffPolicy, KVBridge, KVBridgeMapper, fit_mapper
from kvbridge_hf.calibration.repair_depth import choose_repair_layers
from kvbridge_hf.errors import ArtifactError, CalibrationError, FitConfigError
from kvbridge_hf.evaluation import BridgeHandoff, Document, judge_handoff

GENERATOR = torch.Generator().manual_seed(0)
BATCHES = [torch.randint(3, 96, (4, 40), generator=GENERATOR) for _ in range(6)]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", num_layers=4, seed=1)


@pytest.fixture(scope="module")
def exact(model):
    """From a model to itself, so that the map of every layer is as good as exact."""
    return fit_mapper(model, model, BATCHES, FitConfig(top_k=1, num_sinks=1, num_native_suffix=2), progress=False)


@pytest.mark.core
@pytest.mark.parametrize("broken", [1, 2, 3])
def test_it_is_as_deep_as_the_lowest_layers_are_wrong(model, exact, broken):
    mapper = copy.deepcopy(exact)
    with torch.no_grad():
        for kind in ("key", "value"):
            getattr(mapper, f"{kind}_weight")[:broken] = 0
    number, measured = choose_repair_layers(mapper, model, model, BATCHES, kept_kl=0.01)
    assert number == broken and len(measured) == broken + 1
    assert measured[-1] < 1e-3 * measured[0]


def test_where_nothing_but_all_layers_helps_it_is_all(model, exact):
    mapper = copy.deepcopy(exact)
    with torch.no_grad():
        mapper.value_weight[-1] = 0
    assert choose_repair_layers(mapper, model, model, BATCHES, kept_kl=0.01)[0] == 4
    with pytest.raises(CalibrationError, match="two tokens"):
        choose_repair_layers(mapper, model, model, [torch.tensor([[3]])])


def test_a_fit_measures_it_and_the_mapper_keeps_it(model, tmp_path):
    config = FitConfig(top_k=1, num_sinks=1, native_fraction=0.3, repair_layers="auto")
    mapper = fit_mapper(model, model, BATCHES, config, progress=False)
    measured = mapper.config.fit["repair_layers_kl"]
    assert mapper.config.repair_layers == len(measured) - 1 or mapper.config.repair_layers == 4
    mapper.save_pretrained(tmp_path)
    loaded = KVBridgeMapper.from_pretrained(tmp_path)
    assert loaded.config.repair_layers == mapper.config.repair_layers
    report = KVBridge(model, loaded).handoff(BATCHES[0], target_model=model).report
    assert report.repair_layers == mapper.config.repair_layers and report.tokens_repaired > 0


def test_a_judgement_counts_the_layers_that_run(model, exact):
    rows = torch.randint(3, 96, (4, 60), generator=torch.Generator().manual_seed(1)).tolist()
    documents = [Document(tuple(row[:44]), tuple(row[44:])) for row in rows]
    costs = {}
    for layers in (None, 2, 4):
        policy = HandoffPolicy(native_fraction=0.5, repair="recency", repair_layers=layers)
        handoff = BridgeHandoff(KVBridge(model, exact, policy), model)
        costs[layers] = judge_handoff(model, model, handoff, documents=documents)["cost"]["repair_share"]
    assert costs[4] == costs[None]
    # One whole layer and the projections of another, of four layers.
    assert costs[None] / 4 < costs[2] < costs[None] / 2


def test_settings_that_are_none_are_refused(model, exact):
    for wrong in (0, "deep", 1.5):
        with pytest.raises(FitConfigError, match="repair_layers"):
            FitConfig(repair_layers=wrong)
    with pytest.raises(FitConfigError, match="reads the data twice"):
        fit_mapper(model, model, iter(BATCHES), FitConfig(top_k=1, repair_layers="auto"), progress=False)
    config = copy.deepcopy(exact.config)
    config.repair_layers = 0
    with pytest.raises(ArtifactError, match="repair_layers"):
        config.check()
