"""Repair: tokens of a handed-over cache that the target recomputes, against the target's own forward."""

from __future__ import annotations

import copy

import pytest
import torch
from handoff_reference import batch, pair, positions_of
from models import tiny_model
from transformers import DynamicCache

from kvbridge_hf import HandoffPolicy, KVBridge
from kvbridge_hf.cache_argument import cache_kwargs, output_cache
from kvbridge_hf.errors import CacheMismatchError, GenerateArgumentError, UnsupportedModelError
from kvbridge_hf.repair import repair
from kvbridge_hf.repair_choice import (
    CHOICES,
    choose,
    neighbourhood,
    question_scores,
    segment_question_scores,
    segments_of,
    surprise_scores,
)
from kvbridge_hf.repair_drift import RepairDrift
from kvbridge_hf.segment_boundaries import boundary_tokens

CLOSE = {"rtol": 0, "atol": 1e-5}
ARCHITECTURES = ("llama", "qwen3", "ministral3", "olmo2", "smollm3", "glm")


def own_cache(model, ids, mask):
    with torch.no_grad():
        return output_cache(model(ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=True))


def assert_layers_close(cache, expected, mask, columns=None):
    keep = mask.bool() if columns is None else mask.bool() & columns
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        for kind in ("keys", "values"):
            mine, theirs = (getattr(part, kind).transpose(1, 2)[keep] for part in (layer, other))
            torch.testing.assert_close(mine, theirs, **CLOSE)


@pytest.mark.core
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("side", ["left", "right", "mixed"])
def test_with_every_token_chosen_it_is_the_prefill(arch, side):
    source, target, mapper = pair("qwen3", arch)
    ids, mask = batch([15, 7, 2, 11], side=side)
    for repaired in ("question", "random"):
        policy = HandoffPolicy(num_sinks=0, native_fraction=1.0, repair=repaired)
        cache = KVBridge(source, mapper, policy).handoff(ids, mask, target_model=target)
        assert_layers_close(cache, own_cache(target, ids[:, :14], mask[:, :14]), mask[:, :14])
        assert cache.report.tokens_mapped == 0
        assert cache.report.tokens_repaired == int(mask[:, :14].sum())


@pytest.mark.core
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_chosen_tokens_see_mapped_and_repaired_ones(implementation):
    """Token by token with plain forwards: mapped columns are kept, chosen ones read on top of what stands before."""
    target = tiny_model("llama", num_layers=4, seed=1)
    target.set_attn_implementation(implementation)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 96, (2, 9), generator=generator)
    chosen = torch.zeros(2, 9, dtype=torch.bool)
    chosen[0, [1, 2, 5, 8]] = True
    chosen[1, [4]] = True
    mapped = [tuple(torch.randn(2, 2, 9, 16, generator=generator) for _ in range(2)) for _ in range(4)]
    cache = DynamicCache()
    for index, states in enumerate(mapped):
        cache.update(*states, index)
    assert repair(target, cache, ids, None, chosen) == 5

    for row in range(2):
        expected = DynamicCache()
        for column in range(9):
            if chosen[row, column]:
                with torch.no_grad():
                    place = torch.tensor([[column]])
                    target(ids[row : row + 1, column : column + 1], position_ids=place, **cache_kwargs(expected))
            else:
                for index, (keys, values) in enumerate(mapped):
                    one = slice(row, row + 1), slice(None), slice(column, column + 1)
                    expected.update(keys[one], values[one], index)
        for layer, other in zip(cache.layers, expected.layers, strict=True):
            torch.testing.assert_close(layer.keys[row], other.keys[0], **CLOSE)
            torch.testing.assert_close(layer.values[row], other.values[0], **CLOSE)


@pytest.mark.core
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 9])
def test_in_the_lowest_layers_alone_it_is_the_same_there_and_the_others_stay_mapped(depth):
    source, target, mapper = pair("qwen3", "llama")
    ids, mask = batch([15, 7, 11], side="left")
    caches = {}
    for layers in (None, depth):
        policy = HandoffPolicy(native_fraction=0.4, repair="question", repair_layers=layers)
        caches[layers] = KVBridge(source, mapper, policy).handoff(ids, mask, target_model=target)
    mapped = KVBridge(source, mapper, HandoffPolicy(native_fraction=0.0)).handoff(ids, mask, target_model=target)
    assert caches[depth].report.repair_layers == depth and caches[depth].report.tokens_repaired > 0
    repaired = caches[depth].repaired
    for index, layer in enumerate(caches[depth].layers):
        expected = caches[None] if index < depth else mapped
        torch.testing.assert_close(layer.keys, expected.layers[index].keys, **CLOSE)
        torch.testing.assert_close(layer.values, expected.layers[index].values, **CLOSE)
        moved = (layer.values - mapped.layers[index].values).transpose(1, 2)[repaired].abs().amax((-1, -2))
        assert bool((moved > 1e-3).all()) == (index < depth)
    # What stands in the layers that were not recomputed does not thin out how far the others have moved.
    if depth == 1:
        first, whole = (RepairDrift(mapped, repaired, layers).measure(caches[1]) for layers in (1, None))
        torch.testing.assert_close(first, whole * len(mapped.layers))


def test_the_lowest_layers_of_all_tokens_are_the_targets_own():
    source, target, mapper = pair("qwen3", "llama")
    ids, mask = batch([15, 7, 11], side="left")
    policy = HandoffPolicy(num_sinks=0, native_fraction=1.0, repair_layers=2)
    cache = KVBridge(source, mapper, policy).handoff(ids, mask, target_model=target)
    own = own_cache(target, ids[:, :14], mask[:, :14])
    for index in (0, 1):
        for kind in ("keys", "values"):
            mine, theirs = (getattr(c.layers[index], kind).transpose(1, 2)[mask[:, :14].bool()] for c in (cache, own))
            torch.testing.assert_close(mine, theirs, **CLOSE)


def test_repairs_after_columns_that_stand_in_another_cache():
    target = tiny_model("qwen3", num_layers=3)
    ids, mask = batch([12, 5], side="left")
    own = own_cache(target, ids, mask)
    front = own_cache(target, ids[:, :7], mask[:, :7])
    cache = DynamicCache()
    for index, layer in enumerate(own.layers):
        cache.update(torch.zeros_like(layer.keys[:, :, 7:]), torch.zeros_like(layer.values[:, :, 7:]), index)
    repair(target, cache, ids, mask, torch.ones(2, 5, dtype=torch.bool), before=front)
    for layer, other in zip(cache.layers, own.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys[:, :, 7:], **CLOSE)
    assert front.get_seq_length() == 7


@pytest.mark.parametrize("choice", [*(way for way in CHOICES if way != "learned"), "question+source_attention"])
def test_every_choice_keeps_its_budget_whatever_the_padding(choice):
    source, target, mapper = pair("qwen3", "llama")
    chosen = {}
    for side in ("left", "right"):
        ids, mask = batch([21, 12], side=side)
        source_cache = own_cache(source, ids[:, :17], mask[:, :17]) if side == "left" else None
        policy = HandoffPolicy(num_sinks=2, num_native_suffix=4, native_fraction=0.3, repair=choice)
        cache = KVBridge(source, mapper, policy).handoff(ids, mask, source_cache, target)
        eligible = mask[:, :17].bool() & (positions_of(mask[:, :17]) >= 2)
        assert bool((cache.repaired <= eligible).all())
        assert cache.repaired.sum(1).tolist() == [-(-int(n) * 3 // 10) for n in eligible.sum(1)]
        assert cache.report.tokens_repaired == int(cache.repaired.sum())
        assert cache.report.tokens_mapped + cache.report.tokens_native == int(mask.sum())
        chosen[side] = cache.repaired[0]  # the row without padding
    assert torch.equal(chosen["left"], chosen["right"])


def test_a_row_chooses_by_its_own_question_whatever_stands_beside_it():
    """The question of one row is 11 tokens long and fills the suffix, that of the other 3."""
    source, target, mapper = pair("qwen3", "llama")
    ids, mask = batch([32, 24], side="left")
    # The short row's suffix is padding but for its last three columns; its context ends before.
    whole = torch.cat([ids[1, 8:29], torch.zeros(8, dtype=torch.long), ids[1, 29:32]])
    keep = torch.cat([torch.ones(21), torch.zeros(8), torch.ones(3)]).long()
    policy = HandoffPolicy(
        num_sinks=0, num_native_suffix=11, native_fraction=0.3, repair="question", question_tokens=2
    )
    both = KVBridge(source, mapper, policy).handoff(
        torch.stack([ids[0], whole]), torch.stack([mask[0], keep]), target_model=target
    )
    alone = KVBridge(
        source, mapper, HandoffPolicy(num_sinks=0, num_native_suffix=3, native_fraction=0.3, question_tokens=2)
    )
    single = alone.handoff(whole[keep.bool()][None], None, target_model=target)
    assert torch.equal(both.repaired[1], single.repaired[0])


def test_repaired_columns_change_and_no_others():
    source, target, mapper = pair("qwen3", "llama")
    ids, mask = batch([15, 9], side="left")
    plain = KVBridge(source, mapper, HandoffPolicy(num_sinks=2)).handoff(ids, mask, target_model=target)
    policy = HandoffPolicy(num_sinks=2, native_fraction=0.4, repair="recency")
    mended = KVBridge(source, mapper, policy).handoff(ids, mask, target_model=target)
    for layer, other in zip(mended.layers, plain.layers, strict=True):
        same = (layer.keys == other.keys).all(-1).all(1)
        assert torch.equal(~same, mended.repaired)


def test_generates_as_the_target_alone_when_all_is_repaired():
    source, target, mapper = pair("qwen3", "llama")
    ids, mask = batch([15, 9], side="left")
    alone = target.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    bridge = KVBridge(source, mapper, HandoffPolicy(native_fraction=1.0))
    handed = target.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, bridge=bridge)
    assert torch.equal(alone, handed)


# --- choices


def test_question_scores_prefer_rare_words_and_their_neighbours():
    ids = torch.tensor([[5, 5, 5, 9, 5, 5, 8, 7, 5, 5]])
    valid = torch.ones_like(ids, dtype=torch.bool)
    scores = question_scores(
        ids, valid, torch.tensor([[9, 5, 1]]), torch.tensor([[True, True, False]]), before=1, after=1
    )
    assert int(scores[0].argmax()) == 3
    assert scores[0, 2] > scores[0, 1] and scores[0, 4] > scores[0, 5]
    masked = question_scores(ids, valid, torch.tensor([[9]]), torch.tensor([[False]]))
    assert float(masked.abs().max()) == 0.0


def test_segments_are_taken_whole_and_follow_the_second_hop():
    stop = 1
    #   "10 of 11 is 12 ." "13 has 14 ." "12 lives 20 ." "13 lives 21 ."
    ids = torch.tensor([[10, 30, 11, 31, 12, stop, 13, 32, 14, stop, 12, 33, 20, stop, 13, 33, 21, stop]])
    valid = torch.ones_like(ids, dtype=torch.bool)
    segments = segments_of(ids, valid, torch.tensor([stop]))
    assert segments[0].tolist() == [0] * 6 + [1] * 4 + [2] * 4 + [3] * 4
    question = torch.tensor([[10, 11]]), torch.ones(1, 2, dtype=torch.bool)
    one = segment_question_scores(ids, valid, *question, segments, carry=0.0)
    assert bool((one[0, :6] > 0).all()) and float(one[0, 6:].max()) == 0.0
    two = segment_question_scores(ids, valid, *question, segments, carry=0.0, hops=2)
    assert two[0, 10] > two[0, 6] and two[0, 10] > two[0, 14]
    carried = segment_question_scores(ids, valid, *question, segments, carry=0.5)
    torch.testing.assert_close(carried[0, 6], 0.5 * carried[0, 0])


def test_neighbourhood_is_a_convolution():
    scores = torch.rand(2, 12, dtype=torch.float64)
    kernel = [1 - d / 3 for d in (2, 1)] + [1.0] + [1 - d / 4 for d in (1, 2, 3)]  # from 2 back to 3 ahead
    expected = torch.zeros_like(scores)
    for place in range(12):
        for offset, weight in zip(range(-2, 4), kernel, strict=True):
            if 0 <= place + offset < 12:
                expected[:, place + offset] += weight * scores[:, place]
    torch.testing.assert_close(neighbourhood(scores, 2, 3), expected)


def test_choose_rounds_up_and_ends_in_all_or_none():
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.7]])
    eligible = torch.tensor([[True, True, True, False]])
    assert choose(scores, eligible, 0.0).sum() == 0
    assert choose(scores, eligible, 0.01)[0].tolist() == [False, True, False, False]
    assert choose(scores, eligible, 0.5)[0].tolist() == [False, True, True, False]
    assert torch.equal(choose(scores, eligible, 1.0), eligible)


def test_surprise_is_the_models_loss():
    model = tiny_model("llama")
    ids, mask = batch([9, 4], side="left")
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions_of(mask)).logits
        alone = model(ids[1:, 5:]).logits
    scores = surprise_scores(logits, ids, mask.bool())
    expected = -alone[0, :-1].log_softmax(-1)[torch.arange(3), ids[1, 6:]]
    torch.testing.assert_close(scores[1, 6:], expected, rtol=1e-4, atol=1e-4)
    assert float(scores[1, :6].abs().max()) == 0.0


class _Tokenizer:
    tokens = ["<|pad|>", "<|end|>", ".", "Mr.", "Ġ?", '."', "a", '"', "<0x0A>", "▁.", "3."]
    all_special_ids = [0, 1]
    eos_token_id = 1

    def __len__(self):
        return len(self.tokens)

    def convert_ids_to_tokens(self, ids):
        return [self.tokens[index] for index in ids]


def test_boundaries_are_punctuation_that_stands_alone():
    assert boundary_tokens(_Tokenizer()) == [1, 2, 4, 5, 8, 9]


# --- what cannot work


def test_refusals():
    source, target, mapper = pair("qwen3", "llama")
    ids, mask = batch([8, 8], side="left")
    cache = own_cache(target, ids, mask)
    with pytest.raises(CacheMismatchError, match="chosen has shape"):
        repair(target, cache, ids, mask, torch.ones(2, 5, dtype=torch.bool))
    other = tiny_model("llama")
    other.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match="flash_attention_2"):
        repair(other, cache, ids, mask, torch.ones(2, 8, dtype=torch.bool))
    mapper_wish = copy.deepcopy(mapper)
    mapper_wish.config.native_fraction = 0.5
    flash = tiny_model("llama", num_layers=4, num_heads=6, num_kv_heads=3, head_dim=8, seed=1)
    bridge = KVBridge(source, mapper_wish, HandoffPolicy(num_sinks=0))
    bridge.check_target(flash)  # while it can still run here
    flash.config._attn_implementation = "flash_attention_2"
    report = bridge.handoff(ids, mask, target_model=flash).report
    assert report.tokens_repaired == 0 and "flash_attention_2" in report.notes[0]
    for wrong in ({"native_fraction": 1.5}, {"repair": "magic"}, {"native_layers": -1}, {"repair_layers": 0}):
        with pytest.raises(GenerateArgumentError):
            HandoffPolicy(**wrong)
    bridge = KVBridge(source, mapper, HandoffPolicy(num_sinks=0, native_fraction=0.5))
    with pytest.raises(GenerateArgumentError, match="need input_ids"):
        bridge.handoff(source_cache=own_cache(source, ids, mask), target_model=target)
    bridge = KVBridge(
        source, mapper, HandoffPolicy(num_native_suffix=0, native_fraction=0.5, repair="target_attention")
    )
    with pytest.raises(GenerateArgumentError, match="question"):
        bridge.handoff(ids, mask, target_model=target)
