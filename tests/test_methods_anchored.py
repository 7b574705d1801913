"""What anchors add is computed once for each different token, and counted so."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from methods_pair import content, make_pair, token_batches

from kvbridge_hf.calibration.driver import fit_mapper
from kvbridge_hf.evaluation import BridgeHandoff, Document, Judge
from kvbridge_hf.evaluation.flops import PrefillCost
from kvbridge_hf.generation_kvbridge import HandoffPolicy, KVBridge
from kvbridge_hf.guard.settings import Gates
from kvbridge_hf.mappers import anchored
from kvbridge_hf.mappers.config import FitConfig
from kvbridge_hf.modeling_kvbridge import KVBridgeMapper, SourceContent
from kvbridge_hf.rotary import ContentRotary
from kvbridge_hf.target_extras import read_extras

# Tokens that stand twice in a row, tokens that two rows share, and padding on either side.
IDS = torch.tensor([[9, 5, 9, 9, 7, 0, 0], [5, 5, 5, 5, 5, 5, 5], [40, 41, 7, 8, 9, 7, 40]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]], dtype=torch.bool)
# Different ones, with the 0 that stands for padding.
DIFFERENT = [0, 5, 7, 8, 9, 40]
BOTH = ("layer0", "embedding")
# Of the pair: layers, heads, head dimension and hidden size of the target, heads of the source.
LAYERS, HEADS, DIM, HIDDEN = 3, 2, 16, 64


@pytest.fixture(scope="module")
def pair():
    source, target = make_pair(LAYERS)
    assert target.config.hidden_size == HIDDEN
    return source, target


@pytest.fixture(scope="module")
def mappers(pair):
    """With random weights: what was fitted has nothing to do with how it is computed."""
    made: dict[tuple[str, tuple[str, ...]], KVBridgeMapper] = {}

    def make(support: str = "full_head", anchors: tuple[str, ...] = BOTH) -> KVBridgeMapper:
        if (support, anchors) not in made:
            settings = {"method": "anchored", "top_k": 2, "num_sinks": 1, "num_native_suffix": 2}
            config = FitConfig(**settings, support=support, anchors=anchors, heldout_fraction=0.3)
            mapper = fit_mapper(*pair, token_batches(4, 20, 2), config, progress=False)
            generator = torch.Generator().manual_seed(5)
            with torch.no_grad():
                for parameter in mapper.parameters():
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            made[support, anchors] = mapper
        return copy.deepcopy(made[support, anchors])

    return make


def anchors_by_column(target, anchors: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Of each column of `IDS`, `(B, T, features)` in float64, from the model's weights."""
    weights = {name: tensor.double().numpy() for name, tensor in target.state_dict().items()}
    embedded = weights["model.embed_tokens.weight"][IDS.numpy()]
    scale = 1 / np.sqrt((embedded**2).mean(-1, keepdims=True) + target.config.rms_norm_eps)
    normed = embedded * scale * weights["model.layers.0.input_layernorm.weight"]
    found = {}
    for kind in ("key", "value"):
        own = normed @ weights[f"model.layers.0.self_attn.{kind[0]}_proj.weight"].T
        found[kind] = np.concatenate([{"layer0": own, "embedding": embedded}[anchor] for anchor in anchors], -1)
    return found


def read(target, mapper, ids=IDS, mask=MASK):
    return read_extras(mapper.method.requires, target, ContentRotary.from_model(target), ids, mask)


@pytest.mark.parametrize("anchors", [("layer0",), ("embedding",), BOTH])
@pytest.mark.parametrize("support", ["full_head", "head_local"])
def test_maps_and_gradients_are_those_of_anchors_written_out_column_by_column(pair, mappers, support, anchors):
    mapper = mappers(support, anchors).double()
    plain = content(batch=3)
    states = {kind: [getattr(plain, f"{kind}s")(layer).double() for layer in range(2)] for kind in ("key", "value")}
    source = SourceContent(states["key"], states["value"], valid=MASK, extras=read(pair[1], mapper))
    beside = anchors_by_column(pair[1], anchors)
    layer, valid = 1, MASK.numpy()
    mapped = mapper.map_layer(layer, source)
    pulls = [torch.randn(3, HEADS, 7, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(8))] * 2
    sum((states * pull * MASK[:, None, :, None]).sum() for states, pull in zip(mapped, pulls, strict=True)).backward()
    for kind, found, pull in zip(("key", "value"), mapped, pulls, strict=True):
        weight, bias = getattr(mapper, f"{kind}_weight"), getattr(mapper, f"{kind}_bias")
        for head in range(HEADS):
            parts = []
            for place, at in enumerate(mapper.config.selected_layers[layer]):
                heads = range(2) if support == "full_head" else mapper.config.head_assignment[layer][place][head]
                parts += [states[kind][at][:, one].numpy() for one in heads]
            x = np.concatenate([*parts, beside[kind]], axis=-1)[valid]
            expected = x @ weight[layer, head].detach().numpy() + bias[layer, head].detach().numpy()
            np.testing.assert_allclose(found[:, head].detach().numpy()[valid], expected, atol=1e-5)
            slope = x.T @ pull[:, head].numpy()[valid]
            np.testing.assert_allclose(weight.grad[layer, head].numpy(), slope, atol=1e-5)


@pytest.mark.parametrize("support", ["full_head", "head_local"])
def test_anchors_are_held_and_multiplied_once_for_each_different_token(pair, mappers, support, monkeypatch):
    mapper, places, rows = mappers(support), [], []
    extras = read(pair[1], mapper)
    shapes = {name: tuple(tensor.shape) for name, tensor in extras.items()}
    one = (len(DIFFERENT), HEADS, DIM)
    assert shapes == {
        "anchor_keys": one,
        "anchor_values": one,
        "anchor_embeddings": (len(DIFFERENT), HIDDEN),
        "anchor_places": (3, 7),
    }
    assert torch.equal(torch.tensor(DIFFERENT)[extras["anchor_places"]], IDS * MASK)

    def recorded(x, weight, bias):
        rows.append((x.shape[-1], x.shape[:-1].numel()))
        return product(x, weight, bias)

    product = anchored.map_full_head
    monkeypatch.setattr(anchored, "map_full_head", recorded)
    bridge = KVBridge(pair[0], mapper, HandoffPolicy(num_sinks=0, num_native_suffix=1, gates=Gates.off()))
    bridge.check_target(pair[1])  # lets the target read two tokens, once
    hook = pair[1].get_input_embeddings().register_forward_hook(lambda m, i, o: places.append(i[0].numel()))
    bridge.handoff(IDS, MASK, target_model=pair[1]).map_all()
    hook.remove()
    # The last column is the target's own; what stands before it has one token less.
    different = len((IDS * MASK)[:, :-1].unique())
    assert places == [different, different]  # layer 0's keys and values, and the embeddings
    width = HEADS * DIM + HIDDEN
    assert [count for features, count in rows if features == width] == [different] * 2 * LAYERS
    if support == "full_head":
        assert [count for features, count in rows if features != width] == [3 * 6] * 2 * LAYERS


def test_a_prompt_mapped_in_pieces_is_the_prompt_mapped_at_once(pair, mappers):
    bridge = KVBridge(pair[0], mappers(), HandoffPolicy(num_sinks=0, num_native_suffix=1, gates=Gates.off()))
    ids = IDS.flatten().remainder(9).view(1, -1) + 3
    whole = bridge.handoff(ids, target_model=pair[1]).map_all()
    grown = bridge.handoff(ids[:, :12], target_model=pair[1]).map_all()
    bridge.handoff(ids, target_model=pair[1], target_cache=grown)
    for one, two in zip(whole.layers, grown.layers, strict=True):
        torch.testing.assert_close(one.keys, two.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(one.values, two.values, atol=1e-4, rtol=1e-4)


# ---- costs ----------------------------------------------------------------------------------------------------------

OUTPUTS = 2 * LAYERS * HEADS * DIM  # keys and values of all layers
OF_SOURCE = 2 * (2 * 2 * 16) * OUTPUTS  # two source layers of two heads of 16 each
OF_ANCHORS = 2 * (HEADS * DIM + HIDDEN) * OUTPUTS


def projections(target) -> int:
    attention = target.model.layers[0].self_attn
    return 2 * sum(getattr(attention, f"{name}_proj").weight.numel() for name in "qkv")


def test_the_cost_of_anchors_is_that_of_different_tokens(pair, mappers):
    mapper, layer0 = mappers(), projections(pair[1])
    assert OF_SOURCE + OF_ANCHORS == 2 * (mapper.key_weight.numel() + mapper.value_weight.numel())
    handoff = BridgeHandoff(KVBridge(pair[0], mapper), pair[1])
    known = handoff.flops(50, num_suffix=10, num_distinct=7)
    assert known["map"] == 39 * OF_SOURCE + 7 * (OF_ANCHORS + layer0)  # 1 of the 40 tokens is a sink
    assert known["total"] == known["map"] + known["native"]
    # Where the tokens are not known all may be different; more different ones than tokens there are not.
    unknown, too_many = handoff.flops(50, num_suffix=10), handoff.flops(50, num_suffix=10, num_distinct=60)
    assert unknown["map"] == too_many["map"] == 39 * (OF_SOURCE + OF_ANCHORS + layer0)
    # A layer that the target computes itself is not mapped; as an anchor, layer 0's projections are needed anyway.
    native = BridgeHandoff(KVBridge(pair[0], mapper, HandoffPolicy(native_layers=1)), pair[1])
    expected = (39 * OF_SOURCE + 7 * OF_ANCHORS) * 2 / 3 + 7 * layer0
    assert native.flops(50, num_suffix=10, num_distinct=7)["map"] == pytest.approx(expected)
    embedded = BridgeHandoff(KVBridge(pair[0], mappers(anchors=("embedding",))), pair[1])
    assert embedded.flops(50, 10, 7)["map"] == 39 * OF_SOURCE + 7 * 2 * HIDDEN * OUTPUTS


@pytest.mark.parametrize("native_fraction", [0.0, 0.5])
def test_a_judgement_counts_the_different_tokens_of_each_prompt(pair, mappers, native_fraction):
    documents = [
        Document((5, 6, 5, 5, 7, 6, 9, 8), (7, 3)),  # sink 5; mapped 6 5 5 7 6, three different ones; 9 8 native
        Document((6, 5, 5, 20, 20), (4, 4)),  # mapped 5 5: the other row has a 5 too, and this one pays for its own
        Document((10, 11, 12, 13, 14, 15), (3, 9)),  # mapped 11 12 13
    ]
    policy = HandoffPolicy(native_fraction=native_fraction, repair="recency", gates=Gates.off())
    handoff = BridgeHandoff(KVBridge(pair[0], mappers(), policy), pair[1])
    judgement = Judge(*pair, documents=documents, batch_size=3, attention=False).judge(handoff, controls=[])
    prefill = sum(PrefillCost.from_model(pair[1]).flops(length) for length in (8, 5, 6))
    mapped = (5 + 2 + 3) * OF_SOURCE + (3 + 1 + 3) * (OF_ANCHORS + projections(pair[1]))
    assert judgement.cost["map"] == pytest.approx(mapped / prefill)
    assert (judgement.cost["repair"] > 0) == (native_fraction > 0)
