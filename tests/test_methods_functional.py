"""The differentiable handoff: equal to the real one, gradients to the mapper only."""

from __future__ import annotations

import pytest
import torch
from methods_pair import VOCAB, make_pair

from kvbridge_hf.cache_argument import cache_kwargs
from kvbridge_hf.calibration.driver import fit_mapper
from kvbridge_hf.calibration.traces import Batch, read_batches
from kvbridge_hf.generation_kvbridge import HandoffPolicy, KVBridge
from kvbridge_hf.mappers.config import FitConfig
from kvbridge_hf.mappers.functional import FunctionalHandoff, draw_boundary, frozen
from kvbridge_hf.modeling_kvbridge import KVBridgeMapper


def batch_of(lengths: list[int], side: str = "right", seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        part = slice(0, length) if side == "right" else slice(width - length, width)
        ids[row, part] = torch.randint(3, VOCAB, (length,), generator=generator)
        mask[row, part] = 1
    return next(read_batches([{"input_ids": ids, "attention_mask": mask}], VOCAB))


@pytest.fixture(scope="module")
def pair():
    return make_pair(3)


@pytest.fixture(scope="module")
def mapper(pair):
    batches = [batch_of([24, 24, 24], seed=seed).input_ids for seed in range(4)]
    return fit_mapper(*pair, batches, FitConfig(top_k=2, num_sinks=2, heldout_fraction=0.0), progress=False)


@pytest.mark.parametrize("side, native_layers", [("left", 0), ("right", 0), ("left", 2)])
def test_equals_the_targets_forward_on_a_handed_over_cache(pair, mapper, side, native_layers):
    source, target = pair
    batch = batch_of([14, 11], side)
    boundary = 9
    found, there = FunctionalHandoff(source, target, 2, 3, native_layers).continuation_kl(mapper, batch, boundary)
    bridge = KVBridge(source, mapper, HandoffPolicy(num_sinks=2, num_native_suffix=3, native_layers=native_layers))
    mask = batch.attention_mask.long()
    cache = bridge.handoff(batch.input_ids[:, :boundary], mask[:, :boundary], target_model=target)
    held = cache.get_seq_length()
    assert held == boundary - 3
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        handed = target(
            batch.input_ids[:, held:], attention_mask=mask, position_ids=positions[:, held:], **cache_kwargs(cache)
        ).logits[:, boundary - 1 - held : -1]
        own = target(batch.input_ids, attention_mask=mask, position_ids=positions).logits[:, boundary - 1 : -1]
    p, q = own.double().softmax(-1), handed.double().softmax(-1)
    expected = (p * (p.log() - q.log())).sum(-1) * mask[:, boundary:]
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-4)
    assert torch.equal(there, mask[:, boundary:].bool())


def test_the_identity_map_of_a_model_to_itself_costs_nothing(pair):
    target = pair[1]
    kl, _ = FunctionalHandoff(target, target).continuation_kl(KVBridgeMapper.identity(target), batch_of([12, 12]), 7)
    assert float(kl.detach().abs().max()) < 1e-5


def test_gradients_reach_the_mapper_and_nothing_else(pair, mapper):
    source, target = pair
    mapper.zero_grad()
    wanted = {name: p.requires_grad for name, p in target.named_parameters()}
    with frozen(source, target):
        kl, _ = FunctionalHandoff(source, target, 2, 2).continuation_kl(mapper, batch_of([12, 10]), 7)
        kl.sum().backward()
    for name in ("key_weight", "value_weight", "key_bias", "value_bias"):
        gradient = getattr(mapper, name).grad
        assert torch.isfinite(gradient).all() and (gradient.flatten(1).norm(dim=1) > 0).all()
    assert all(p.grad is None for model in pair for p in model.parameters())
    assert {name: p.requires_grad for name, p in target.named_parameters()} == wanted
    mapper.zero_grad()


def test_the_gradient_is_that_of_finite_differences(pair, mapper):
    source, target = pair
    handoff, batch = FunctionalHandoff(source, target, 1, 1), batch_of([12])
    mapper.zero_grad()
    handoff.continuation_kl(mapper, batch, 7)[0].sum().backward()
    gradient = mapper.value_bias.grad.clone()
    step = 1e-2 * gradient / gradient.norm()
    values = []
    with torch.no_grad():
        for sign in (1, -2, 1):
            mapper.value_bias.add_(sign * step)
            values.append(float(handoff.continuation_kl(mapper, batch, 7)[0].double().sum()))
    assert (values[0] - values[1]) / (2 * 1e-2) == pytest.approx(float(gradient.norm()), rel=2e-2)
    mapper.zero_grad()


def test_boundaries_are_drawn_from_the_seed_alone_and_leave_both_sides():
    batch = batch_of([30, 22])
    draws = [
        draw_boundary(batch, (5, step), min_prefix=6, min_continuation=4, max_continuation=7) for step in range(50)
    ]
    again = [
        draw_boundary(batch, (5, step), min_prefix=6, min_continuation=4, max_continuation=7) for step in range(50)
    ]
    assert [(boundary, cut.input_ids.shape) for cut, boundary in draws] == [
        (boundary, cut.input_ids.shape) for cut, boundary in again
    ]
    boundaries = {boundary for _, boundary in draws}
    assert min(boundaries) >= 6 and max(boundaries) <= 18 and len(boundaries) > 8
    assert all(4 <= cut.input_ids.shape[1] - boundary <= 7 for cut, boundary in draws)
