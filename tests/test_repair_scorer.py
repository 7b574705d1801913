"""The learned choice of what to repair: its heads by hand, its fit on planted lookups, and a handoff by it."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from handoff_reference import batch, pair, positions_of, rotate
from transformers import DynamicCache

from kvbridge_hf import FitConfig, HandoffPolicy, KVBridge, KVBridgeMapper, fit_mapper
from kvbridge_hf.cache_argument import cache_kwargs, output_cache
from kvbridge_hf.calibration import repair_scorer as fitting
from kvbridge_hf.calibration.repair_scorer import fit_repair_scorer
from kvbridge_hf.errors import ArtifactError, CalibrationError, GenerateArgumentError
from kvbridge_hf.repair_scorer import RepairScorer, default_layers, query_features

STOP = 5
SETTINGS = {"layers": [0, 2], "heads": 2, "rank": 3, "window": 4}


def with_scorer():
    """The pair of the other tests with a scorer of random weights."""
    source, target, mapper = pair("qwen3", "llama")
    mapper = copy.deepcopy(mapper)
    mapper.config.boundary_tokens = [STOP]
    mapper.config.repair_scorer = dict(SETTINGS)
    mapper.repair_scorer = RepairScorer(SETTINGS, mapper.config.source_geometry)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in mapper.repair_scorer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return source, target, mapper.eval()


def sentences(lengths, side="left", seed=0):
    """A batch in which every fifth token ends a sentence."""
    ids, mask = batch(lengths, side=side, seed=seed)
    ids[(positions_of(mask) % 5 == 4) & mask.bool()] = STOP
    return ids, mask


def chosen_by_hand(source, mapper, tokens, columns, num_sinks, budget, question_tokens):
    """Float64: the row read by the source in one piece, features, heads, sentences, words."""
    scorer = mapper.repair_scorer
    ids = torch.tensor(tokens)
    cache = DynamicCache()
    with torch.no_grad():
        source(ids[None], **cache_kwargs(cache))
    parts = []
    for index in SETTINGS["layers"]:
        keys = rotate(cache.layers[index].keys[0].double(), torch.arange(len(ids)), source, sign=-1.0)
        parts += [keys.transpose(0, 1).flatten(1), cache.layers[index].values[0].double().transpose(0, 1).flatten(1)]
    features = torch.cat(parts, 1).numpy()
    query = np.concatenate([features[-1], features[-SETTINGS["window"] :].mean(0)])
    weight = {name: value.detach().double().numpy() for name, value in scorer.named_parameters()}
    asked = np.einsum("f,hfr->hr", query, weight["query_weight"]) + weight["query_bias"]
    heads = np.einsum("hr,nhr->hn", asked, np.einsum("nf,hfr->nhr", features, weight["key_weight"])) / 3**0.5
    segment, of_token = 0, []
    for token in tokens[:columns]:
        of_token.append(segment)
        segment += token == STOP
    count = of_token[-1] + 1
    holds = [{tokens[n] for n in range(columns) if of_token[n] == s} for s in range(count)]
    words = []
    for held in holds:
        shared = held & set(tokens[-question_tokens:])
        words.append(sum(np.log((count + 1) / sum(word in other for other in holds)) ** 2 for word in shared))
    words = np.array(words) / max(max(words), 1e-9)
    scores = []
    for s in range(count):
        members = [n for n in range(num_sinks, columns) if of_token[n] == s]
        best = heads[:, members].max(1).sum() if members else -np.inf
        scores.append(best + weight["word_weight"][0] * words[s])
    order = sorted(range(num_sinks, columns), key=lambda n: (-scores[of_token[n]], n))
    return sorted(order[:budget])


@pytest.mark.core
@pytest.mark.parametrize("side", ["left", "right", "mixed"])
def test_chooses_what_the_heads_say_of_each_row(side):
    source, target, mapper = with_scorer()
    ids, mask = sentences([33, 33, 28], side="left")
    if side != "left":
        # The same rows with their padding elsewhere: the third one's on the right, and in the middle.
        ids, mask = ids.clone(), mask.clone()
        row, keep = ids[2, 5:].clone(), torch.zeros(33, dtype=torch.long)
        places = torch.cat([torch.arange(12), torch.arange(17, 33)]) if side == "mixed" else torch.arange(28)
        ids[2] = 0
        ids[2, places], keep[places] = row, 1
        mask[2] = keep
    policy = HandoffPolicy(num_sinks=2, num_native_suffix=6, native_fraction=0.3, repair="learned", question_tokens=6)
    cache = KVBridge(source, mapper, policy).handoff(ids, mask, target_model=target)
    for row in range(3):
        columns = mask[row].nonzero()[:, 0]
        tokens, covered = ids[row, columns].tolist(), int((columns < 27).sum())
        budget = -(-(covered - 2) * 3 // 10)
        places = columns[chosen_by_hand(source, mapper, tokens, covered, 2, budget, 6)]
        assert cache.repaired[row].nonzero()[:, 0].tolist() == places.tolist()
        # A row by itself gives the same.
        own = dataclasses.replace(policy, num_native_suffix=len(tokens) - covered)
        alone = KVBridge(source, mapper, own)
        single = alone.handoff(ids[row : row + 1, columns], None, target_model=target)
        assert torch.equal(single.repaired[0], cache.repaired[row, columns[:covered]])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_all_of_it_is_the_prefill_and_an_own_source_cache_gives_the_same(implementation):
    source, target, mapper = with_scorer()
    source = copy.deepcopy(source)
    source.set_attn_implementation(implementation)
    ids, mask = sentences([26, 19])
    policy = HandoffPolicy(num_sinks=0, num_native_suffix=5, native_fraction=1.0, repair="learned")
    cache = KVBridge(source, mapper, policy).handoff(ids, mask, target_model=target)
    with torch.no_grad():
        own = output_cache(target(ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=True))
    keep = mask[:, :21].bool()
    for layer, other in zip(cache.layers, own.layers, strict=True):
        for kind in ("keys", "values"):
            mine, theirs = getattr(layer, kind).transpose(1, 2), getattr(other, kind)[:, :, :21].transpose(1, 2)
            torch.testing.assert_close(mine[keep], theirs[keep], rtol=0, atol=1e-5)
    part = HandoffPolicy(num_sinks=0, num_native_suffix=5, native_fraction=0.25, repair="learned")
    bridge = KVBridge(source, mapper, part)
    with torch.no_grad():
        read = output_cache(source(ids[:, :21], attention_mask=mask[:, :21], position_ids=positions_of(mask)[:, :21]))
    length = read.get_seq_length()
    given = bridge.handoff(ids, mask, read, target)
    assert read.get_seq_length() == length  # the question was read on a copy
    again = bridge.handoff(ids, mask, target_model=target)
    assert torch.equal(given.repaired, again.repaired) and int(given.repaired.sum()) == 6 + 4


def test_question_words_count_and_scores_can_be_joined():
    source, target, mapper = with_scorer()
    with torch.no_grad():
        for name, parameter in mapper.repair_scorer.named_parameters():
            parameter.fill_(1.0 if name == "word_weight" else 0.0)
    ids, mask = sentences([30, 30], seed=2)
    ids[0, 27:] = torch.tensor([ids[0, 6], ids[0, 7], 3])  # words of the second sentence
    chosen = {}
    for repair in ("learned", "question", "learned+question"):
        policy = HandoffPolicy(
            num_sinks=0, num_native_suffix=3, native_fraction=0.18, repair=repair, question_tokens=3
        )
        chosen[repair] = KVBridge(source, mapper, policy).handoff(ids, mask, target_model=target).repaired[0]
    assert chosen["learned"].nonzero()[:, 0].tolist() == [5, 6, 7, 8, 9]
    assert torch.equal(chosen["learned"], chosen["learned+question"])
    assert torch.equal(chosen["learned"], chosen["question"])


def test_the_query_is_the_rows_last_tokens_wherever_its_padding_stands():
    features = torch.randn(1, 9, 6, dtype=torch.float64)
    alone = query_features(features[:, :5], torch.ones(1, 5), 3)
    torch.testing.assert_close(alone[0, :6], features[0, 4])
    torch.testing.assert_close(alone[0, 6:], features[0, 2:5].mean(0))
    spread = torch.full((1, 9, 6), 7.0, dtype=torch.float64)
    places = torch.tensor([1, 2, 4, 5, 8])
    spread[0, places] = features[0, :5]
    mask = torch.zeros(1, 9).index_fill(1, places, 1)
    torch.testing.assert_close(query_features(spread, mask, 3), alone)
    short = query_features(features[:, :2], torch.ones(1, 2), 3)
    torch.testing.assert_close(short[0, 6:], features[0, :2].mean(0))
    assert default_layers(3) == [0, 1, 2] and default_layers(40) == [4, 9, 14, 19, 24, 29, 34, 39]


# --- the fit


def planted(count, seed):
    """Questions whose sentence is the one that holds a token like the query, in features of very unequal size."""
    generator = torch.Generator().manual_seed(seed)
    scale, mean = torch.logspace(-2, 2, 24), torch.randn(24, generator=torch.Generator().manual_seed(9)) * 30
    items = []
    for _ in range(count):
        white = torch.randn(20, 24, generator=generator)
        places = torch.randint(4, 20, (3,), generator=generator)
        segments = torch.arange(20) // 4
        labels = torch.zeros(3, 5)
        labels[torch.arange(3), segments[places]] = 1.0
        tokens = mean + scale * white
        queries = torch.cat([tokens[places], tokens[places] * 0 + mean], 1)
        eligible = torch.arange(20) >= 4
        items.append(fitting._Asked(tokens, queries, segments, torch.zeros(3, 5), labels, eligible))
    return items


def test_the_training_finds_a_planted_lookup_and_folds_the_scaling_into_the_weights():
    train, held = planted(150, 0), planted(30, 1)
    raw = copy.deepcopy(held)
    torch.manual_seed(0)
    geometry = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 12}
    scorer = RepairScorer({"layers": [0], "heads": 1, "rank": 16, "window": 1}, geometry)
    with torch.enable_grad():
        scorer, (before, after) = fitting._train(
            scorer, train, held, epochs=20, learning_rate=3e-3, weight_decay=0.01, dropout=0.0
        )
    assert after < 0.5 * before
    right, losses = [], []
    for item in raw:  # in the features' own units
        scores = scorer.token_scores(item.tokens[None].expand(3, -1, -1), item.queries).detach()
        found = torch.stack(
            [scores[:, 0, (item.segments == s) & item.eligible].max(1).values for s in range(1, 5)], dim=1
        )
        right += (found.argmax(1) + 1 == item.labels.argmax(1)).tolist()
        losses += (-(item.labels[:, 1:] * found.log_softmax(-1)).sum(1)).tolist()
    assert np.mean(right) > 0.8
    assert np.mean(losses) == pytest.approx(after, abs=0.02)


def lookups(count, seed=0):
    """Texts of sentences with two questions and their answers behind them."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(6, 96, (38,), generator=generator)
        ids[4::5] = STOP
        answers = torch.zeros(38, dtype=torch.bool)
        answers[[32, 37]] = True
        made.append({"input_ids": ids.tolist(), "boundary": 28, "answers": answers.tolist()})
    return made


def test_questions_stand_between_answers():
    lookup = fitting.Lookup.of(lookups(1)[0])
    assert fitting._questions(lookup) == [(28, 31), (33, 36)]
    plain = fitting.Lookup.of({"input_ids": list(range(6, 18)), "boundary": 9})
    assert fitting._questions(plain) == [(9, 11)]


def test_labels_are_where_the_target_looks_on_its_own_cache():
    source, target, _ = pair("qwen3", "llama")
    lookup = fitting.Lookup.of(lookups(1)[0])
    read = fitting._Reader(source, target, SETTINGS, torch.tensor([STOP]), 2)
    item = read(lookup)
    eager = copy.deepcopy(target)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        looks = torch.cat(eager(lookup.ids[None], output_attentions=True).attentions, 1)[0]
    for row, last in enumerate((31, 36)):
        most = looks[:, last].amax(0)[:28].square()
        most[:2] = 0
        label = torch.stack([most[start : min(start + 5, 28)].max() for start in range(0, 28, 5)])
        torch.testing.assert_close(item.labels[row], label / label.sum(), rtol=1e-4, atol=1e-5)


def test_a_fitted_mapper_chooses_by_it_and_survives_saving(tmp_path):
    source, target, _ = pair("qwen3", "llama")
    texts = [torch.randint(6, 96, (1, 40), generator=torch.Generator().manual_seed(n)) for n in range(6)]
    config = FitConfig(top_k=1, num_sinks=2, heldout_fraction=0.0, native_fraction=0.2, repair="learned")
    without = fit_mapper(source, target, texts, config, progress=False)
    assert without.config.repair == "question" and without.repair_scorer is None
    mapper = fit_mapper(source, target, texts, config, progress=False, lookups=iter(lookups(30)))
    facts = mapper.config.repair_scorer
    assert mapper.config.repair == "learned"
    assert facts["questions"] + facts["heldout_questions"] == 60 and facts["texts"] < 30
    before, after = facts["heldout_loss"]
    assert after <= before
    again = fit_mapper(source, target, texts, config, progress=False, lookups=lookups(30))
    for mine, other in zip(mapper.repair_scorer.parameters(), again.repair_scorer.parameters(), strict=True):
        assert torch.equal(mine, other)
    mapper.save_pretrained(tmp_path)
    loaded = KVBridgeMapper.from_pretrained(tmp_path)
    ids, mask = sentences([30, 22])
    first, second = (
        KVBridge(source, one).handoff(ids, mask, target_model=target).repaired for one in (mapper, loaded)
    )
    assert torch.equal(first, second) and int(first.sum()) > 0


def test_refusals():
    source, target, mapper = pair("qwen3", "llama")
    ids, mask = batch([12, 12])
    policy = HandoffPolicy(num_sinks=0, native_fraction=0.5, repair="learned")
    with pytest.raises(GenerateArgumentError, match="fitted scorer"):
        KVBridge(source, mapper, policy).handoff(ids, mask, target_model=target)
    geometry = mapper.config.source_geometry
    for wrong in ({"layers": [9]}, {"layers": []}, {"heads": 0}, {"rank": None}, {"window": 0}):
        with pytest.raises(ArtifactError, match="repair_scorer"):
            RepairScorer({**SETTINGS, **wrong}, geometry)
    own = copy.deepcopy(mapper)
    own.config.num_sinks = 40  # of which no text has more
    with pytest.raises(CalibrationError, match="lookups"):
        fit_repair_scorer(own, source, target, lookups(12))
