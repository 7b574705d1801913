"""The target's own lowest layers beneath a map, and what native parts cost."""

from __future__ import annotations

import pytest
import torch
from handoff_reference import batch, pair, positions_of
from models import tiny_model

from kvbridge_hf import HandoffPolicy, KVBridge
from kvbridge_hf.cache_argument import output_cache
from kvbridge_hf.errors import GenerateArgumentError
from kvbridge_hf.evaluation.flops import PrefillCost, handoff_flops
from kvbridge_hf.native_layers import read_native_layers


def own_cache(model, ids, mask):
    with torch.no_grad():
        return output_cache(model(ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=True))


@pytest.mark.core
@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_lowest_layers_are_the_targets_own_and_the_others_mapped(num_layers):
    source, target, mapper = pair("qwen3", "llama")
    ids, mask = batch([15, 7, 11], side="left")
    own = own_cache(target, ids, mask)
    plain = KVBridge(source, mapper).handoff(ids, mask, target_model=target)
    cache = KVBridge(source, mapper, HandoffPolicy(native_layers=num_layers)).handoff(ids, mask, target_model=target)
    keep = mask[:, :14].bool()
    for index, layer in enumerate(cache.layers):
        expected = own if index < num_layers else plain
        for kind in ("keys", "values"):
            mine, theirs = (getattr(c.layers[index], kind)[:, :, :14].transpose(1, 2)[keep] for c in (cache, expected))
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
        assert bool((layer.keys.transpose(1, 2)[~keep] == 0).all())
    assert cache.report.native_layers == num_layers


def test_layer_0_runs_no_attention_and_no_mlp():
    model = tiny_model("llama", num_layers=3)
    ran = []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda *_: ran.append(1))
    read_native_layers(model, torch.tensor([[3, 4, 5]]), None, 1)
    assert ran == []
    read_native_layers(model, torch.tensor([[3, 4, 5]]), None, 2)
    assert ran == [1]


def test_number_of_layers_is_checked():
    model = tiny_model("llama", num_layers=3)
    for wrong in (0, 4):
        with pytest.raises(GenerateArgumentError, match="native_layers"):
            read_native_layers(model, torch.tensor([[3]]), None, wrong)


def test_costs_of_native_parts_by_hand():
    model = tiny_model("llama", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)  # hidden 64, mlp 128
    cost = PrefillCost.from_model(model)
    qkv = 2 * (64 * 64 + 2 * 64 * 32)
    layer = qkv + 2 * (64 * 64 + 3 * 64 * 128)
    assert cost.linear_per_token == 2 * layer and cost.qkv_per_layer == qkv
    pair_cost = 4 * 4 * 16
    # Tokens at positions 3 and 7 look at 4 and 8 tokens, in each of 2 layers.
    assert cost.flops_at([3, 7]) == 2 * (2 * layer + pair_cost * 12)
    assert cost.flops_at(range(10)) == cost.flops(10)
    assert cost.flops_at([3, 7], 1) == 2 * qkv and cost.flops_at([3, 7], 2) == cost.flops_at([3, 7])
    assert cost.flops_of_lowest_layers(10, 0) == 0
    assert cost.flops_of_lowest_layers(10, 1) == 10 * qkv
    assert cost.flops_of_lowest_layers(10, 2) == 10 * (layer + qkv) + pair_cost * 55
    parts = handoff_flops(cost, 10, map_per_token=100, num_sinks=0, num_suffix=1, native_layers=1)
    assert parts["map"] == 9 * 50
    assert parts["native"] == cost.flops(1, 9) + 9 * qkv
