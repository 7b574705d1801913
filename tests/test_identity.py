"""A model bridged to itself must not notice: with the identity mapper, and with one that was fitted on itself."""

from __future__ import annotations

import pytest
import torch
from handoff_reference import batch, positions_of
from models import ARCHITECTURES, tiny_model

from kvbridge_hf import FitConfig, HandoffPolicy, KVBridge, KVBridgeMapper, fit_mapper
from kvbridge_hf.cache_argument import cache_kwargs

pytestmark = pytest.mark.core

ROPES = {"llama": "llama3", "qwen2": "linear", "qwen3": "yarn"}
CASES = [(arch, None) for arch in ARCHITECTURES] + list(ROPES.items())


def continued_logits(model, cache, ids, mask):
    """Logits of the columns that `cache` does not hold."""
    start = cache.get_seq_length()
    with torch.no_grad():
        return model(
            ids[:, start:], attention_mask=mask, position_ids=positions_of(mask)[:, start:], **cache_kwargs(cache)
        ).logits


def own_logits(model, ids, mask):
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=positions_of(mask)).logits


@pytest.mark.parametrize("num_sinks", [0, 3])
@pytest.mark.parametrize("support", ["full_head", "head_local"])
@pytest.mark.parametrize(("arch", "rope"), CASES)
def test_identity_mapper_gives_the_logits_of_the_own_prefill(arch, rope, support, num_sinks):
    model = tiny_model(arch, rope=rope)
    bridge = KVBridge(model, KVBridgeMapper.identity(model, support=support))
    ids, mask = batch([23, 9, 16, 23], side="mixed")
    mask[3, 4:7] = 0  # padding in the middle, as between two padded blocks
    own = own_logits(model, ids, mask)
    for suffix in (1, 5, 14):
        policy = HandoffPolicy(num_sinks=num_sinks, num_native_suffix=suffix)
        cache = bridge.handoff(ids, mask, target_model=model, policy=policy)
        assert cache.get_seq_length() == ids.shape[1] - suffix
        logits = continued_logits(model, cache, ids, mask)
        real = mask[:, -suffix:].bool()
        torch.testing.assert_close(logits[real], own[:, -suffix:][real], rtol=0, atol=1e-4)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_identity_mapper_generates_the_same_text(arch):
    model = tiny_model(arch)
    bridge = KVBridge(model, KVBridgeMapper.identity(model))
    ids, mask = batch([17, 8, 12])
    own = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    handed_over = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, bridge=bridge)
    assert torch.equal(own, handed_over)
    assert bridge.last_report.tokens_mapped == (17 + 8 + 12) - 3


def test_identity_beyond_4096_positions():
    model = tiny_model("qwen3", num_layers=2, num_heads=1, num_kv_heads=1)
    model.set_attn_implementation("sdpa")
    bridge = KVBridge(model, KVBridgeMapper.identity(model))
    ids, mask = batch([4200])
    cache = bridge.handoff(ids, mask, target_model=model, policy=HandoffPolicy(num_native_suffix=3))
    logits = continued_logits(model, cache, ids, mask)
    torch.testing.assert_close(logits, own_logits(model, ids, mask)[:, -3:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "mistral", "glm", "smollm3"])
def test_fit_on_itself_gives_the_same_argmax_everywhere(arch):
    model = tiny_model(arch, num_layers=2)
    batches = [
        dict(zip(("input_ids", "attention_mask"), batch([48] * 8, seed=seed), strict=True)) for seed in range(8)
    ]
    mapper = fit_mapper(model, model, batches, FitConfig(top_k=1, num_sinks=0), progress=False)
    assert mapper.config.selected_layers == [[0], [1]]
    bridge = KVBridge(model, mapper, HandoffPolicy(num_sinks=0))
    ids, mask = batch([40, 25, 33], side="left", seed=99)
    own = own_logits(model, ids, mask).argmax(-1)
    for suffix in (1, 20, 39):
        cache = bridge.handoff(
            ids, mask, target_model=model, policy=HandoffPolicy(num_sinks=0, num_native_suffix=suffix)
        )
        real = mask[:, -suffix:].bool()
        assert torch.equal(continued_logits(model, cache, ids, mask).argmax(-1)[real], own[:, -suffix:][real])
