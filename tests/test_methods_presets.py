"""Every preset has the defining property of the system it is named for."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from methods_pair import make_pair, token_batches

from kvbridge_hf.calibration.driver import fit_mapper
from kvbridge_hf.mappers.config import FitConfig

BATCHES = token_batches(6, 24)


@pytest.fixture(scope="module")
def pair():
    return make_pair()


def fitted(pair, name: str, **overrides):
    config = FitConfig.preset(name, heldout_fraction=0.3, **overrides)
    if config.distillation is not None:
        short = dataclasses.replace(
            config.distillation, steps=2, learning_rate=1e-3, min_prefix=6, min_continuation=4, evaluations=1
        )
        config = config.replace(distillation=short.to_dict())
    return fit_mapper(*pair, BATCHES, config.replace(top_k=min(config.top_k or 2, 2)), progress=False)


@pytest.fixture(scope="module")
def mappers(pair):
    return {name: fitted(pair, name) for name in ("paper", "cachebridge", "kvlrelay", "fast", "default", "quality")}


def test_the_papers_map_reads_all_heads_and_nothing_is_native(mappers):
    paper = mappers["paper"].config
    assert (paper.method, paper.support, paper.num_sinks, paper.num_native_suffix) == ("ridge", "full_head", 0, 1)


def test_head_local_presets_have_one_head_s_share_of_the_weights(mappers):
    paper, bridge, relay = mappers["paper"], mappers["cachebridge"], mappers["kvlrelay"]
    assert bridge.key_weight.numel() * 2 == paper.key_weight.numel()
    assert relay.key_weight.numel() * 4 == paper.key_weight.numel(), "one head of one layer of two"
    assert relay.config.top_k == 1


def test_sensitivity_weights_change_coefficients_only(pair, mappers):
    bridge = mappers["cachebridge"]
    plain = fitted(pair, "cachebridge", weighting="uniform")
    assert bridge.config.selected_layers == plain.config.selected_layers
    assert bridge.config.head_assignment == plain.config.head_assignment
    assert {name: p.shape for name, p in bridge.named_parameters()} == {
        n: p.shape for n, p in plain.named_parameters()
    }
    assert not torch.allclose(bridge.key_weight, plain.key_weight)


def test_the_relay_ends_no_higher_than_its_closed_form(mappers):
    facts = mappers["kvlrelay"].config.fit["distillation"]
    assert facts["kl"] <= facts["start_kl"] and facts["settings"]["kl_weight"] == 1.0
    assert facts["settings"]["reconstruction_weight"] == facts["settings"]["attention_weight"] == 0.0


def test_ours_are_no_larger_than_the_papers(mappers):
    size = {name: sum(p.numel() for p in mapper.parameters()) for name, mapper in mappers.items()}
    assert size["fast"] <= size["paper"] and size["default"] <= size["paper"]
    for name in ("fast", "default", "quality"):
        assert mappers[name].config.num_sinks > 0 and mappers[name].config.num_native_suffix > 1
    assert mappers["fast"].config.fit["distillation"] is None
