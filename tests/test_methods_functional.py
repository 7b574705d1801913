"""The differentiable handoff: equal to the real one, gradients to the mapper only."""

from __future__ import annotations

import pytest
import torch
from methods_pair import VOCAB, make_pair

from kvbridge_hf.cache_argument import cache_kwargs
from kvbridge_hf.calibration.driver import fit_mapper
from kvbridge_hf.calibration.traces import Batch, read_batches
from kvbridge_hf.generation_kvbridge import HandoffPolicy, KVBridge
from kvbridge_hf.guard.settings import Gates
from kvbridge_hf.mappers.config import FitConfig
from kvbridge_hf.mappers.functional import FunctionalHandoff, draw_boundary, frozen, nll_on_tokens
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


def assert_gradient(handoff, mapper, *arguments, rel: float) -> None:
    """The gradient of the KL by the values' bias is that of finite differences along it."""

    def objective():
        return handoff.continuation_kl(mapper, *arguments)[0]

    mapper.zero_grad()
    objective().sum().backward()
    gradient = mapper.value_bias.grad.clone()
    step = 1e-2 * gradient / gradient.norm()
    values = []
    with torch.no_grad():
        for sign in (1, -2, 1):
            mapper.value_bias.add_(sign * step)
            values.append(float(objective().double().sum()))
    assert (values[0] - values[1]) / (2 * 1e-2) == pytest.approx(float(gradient.norm()), rel=rel)
    mapper.zero_grad()


def test_the_gradient_is_that_of_finite_differences(pair, mapper):
    source, target = pair
    handoff, batch = FunctionalHandoff(source, target, 1, 1), batch_of([12])
    assert_gradient(handoff, mapper, batch, 7, rel=2e-2)


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


# ---- repair while training ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("boundary_tokens", [[], [7, 8, 9, 10, 11, 12]])
def test_a_repaired_handoff_is_the_real_one(pair, mapper, boundary_tokens):
    """Of a prompt whose question is what the cache does not cover; answers come after it and choose nothing."""
    source, target = pair
    batch, prompt = batch_of([30, 26], "left"), 26
    mapper.config.boundary_tokens = boundary_tokens
    policy = HandoffPolicy(
        num_sinks=2, num_native_suffix=6, native_fraction=0.3, repair="question", question_tokens=1, gates=Gates.off()
    )
    mask = batch.attention_mask.long()
    bridge = KVBridge(source, mapper, policy)
    cache = bridge.handoff(batch.input_ids[:, :prompt], mask[:, :prompt], target_model=target)
    mapper.config.boundary_tokens = []
    handoff = FunctionalHandoff(source, target, 2, 6, boundary_tokens=boundary_tokens)
    question = torch.zeros_like(batch.attention_mask)
    question[:, 20:prompt] = True
    own = handoff.read_target(batch)
    with torch.no_grad():
        entries, _ = handoff.hand_over(mapper, batch, prompt, own, question, 0.3)
    plain, _ = handoff.hand_over(mapper, batch, prompt, own)
    there = batch.attention_mask[:, None, :20, None]
    for (keys, values), layer, untouched in zip(entries, cache.layers, plain, strict=True):
        torch.testing.assert_close(keys * there, layer.keys * there, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(values * there, layer.values * there, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(values, untouched[1])


def test_gradients_pass_the_repair(pair, mapper):
    source, target = pair
    handoff, batch = FunctionalHandoff(source, target, 1, 2), batch_of([20])
    question = torch.zeros_like(batch.attention_mask)
    question[:, 12:14] = True
    arguments = (batch, 14, question, 0.4)
    with frozen(source, target):
        assert_gradient(handoff, mapper, *arguments, rel=3e-2)


def test_with_every_token_repaired_nothing_is_lost(pair, mapper):
    batch = batch_of([18, 15], "left")
    question = torch.ones_like(batch.attention_mask)
    kl, _ = FunctionalHandoff(*pair, 1, 1).continuation_kl(mapper, batch, 12, question, 1.0)
    assert float(kl.detach().abs().max()) < 1e-5


def test_the_loss_of_tokens_is_their_surprise():
    batch = batch_of([9, 7])
    logits = torch.randn(2, 4, VOCAB, generator=torch.Generator().manual_seed(1))
    found, there = nll_on_tokens(logits, batch, 5)
    for row, length in ((0, 4), (1, 2)):
        expected = -logits[row].double().log_softmax(-1)[torch.arange(4), batch.input_ids[row, 5:]]
        torch.testing.assert_close(found[row, :length].double(), expected[:length], atol=1e-5, rtol=1e-5)
        assert int(there[row].sum()) == length and float(found[row, length:].abs().sum()) == 0
