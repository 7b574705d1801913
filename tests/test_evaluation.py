"""Every condition of a judgement against an independent computation: plain forwards of unpadded rows, and numpy."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from models import tiny_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from kvbridge_hf.cache_argument import cache_kwargs
from kvbridge_hf.errors import KVBridgeError, UnsupportedModelError
from kvbridge_hf.evaluation import (
    BridgeHandoff,
    Document,
    EvaluationError,
    Judge,
    OwnCache,
    PrefillCost,
    Question,
    UnmappedHandoff,
    build_report,
    handoff_flops,
    judge_handoff,
    load_questions,
    map_flops_per_token,
    split_documents,
    to_markdown,
)
from kvbridge_hf.evaluation.controls import nearest_layer
from kvbridge_hf.evaluation.fidelity import AttentionOutputs, CosineSums, R2Sums, kl_divergence, top1_agreement
from kvbridge_hf.evaluation.questions import EncodedQuestion, encode_question, question_batches
from kvbridge_hf.evaluation.runs import cache_entries, cache_from_entries
from kvbridge_hf.generation_kvbridge import KVBridge
from kvbridge_hf.handoff import HandoffPolicy
from kvbridge_hf.modeling_kvbridge import KVBridgeMapper

VOCAB = 96


@pytest.fixture(scope="module")
def source():
    return tiny_model("qwen3", num_layers=2, seed=1)


@pytest.fixture(scope="module")
def target():
    return tiny_model("llama", num_layers=3, seed=2)


def tokens(rng: np.random.Generator, length: int) -> tuple[int, ...]:
    return tuple(int(token) for token in rng.integers(3, VOCAB, size=length))


@pytest.fixture(scope="module")
def documents():
    rng = np.random.default_rng(0)
    lengths = ((7, 5), (12, 3), (3, 6), (9, 1), (12, 5))
    return [Document(tokens(rng, prefix), tokens(rng, continuation)) for prefix, continuation in lengths]


@pytest.fixture(scope="module")
def questions():
    """Three contexts of unequal length with two questions each; some choices have several tokens."""
    rng = np.random.default_rng(1)
    made = []
    for length in (11, 5, 8):
        context = (1, *tokens(rng, length))
        for kind, sizes in (("one", (1, 1, 1)), ("several", (1, 3, 2, 2))):
            choices = tuple(tokens(rng, size) for size in sizes)
            made.append(EncodedQuestion(context, tokens(rng, int(rng.integers(2, 6))), choices, 1, kind, bos=(1,)))
    return made


@pytest.fixture(scope="module")
def judge(source, target, documents, questions):
    return Judge(source, target, documents=documents, questions=questions, batch_size=3)


def logits_of(model, ids):
    """Float64 log-probabilities of a plain forward of one row; `[i]` predicts token i + 1."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1).numpy()


def log_likelihood(model, before, continuation):
    log_probs = logits_of(model, before + continuation)
    return sum(log_probs[len(before) + i - 1, token] for i, token in enumerate(continuation))


class Damaged(OwnCache):
    """The target's own cache with the tokens of its values in reverse."""

    def __call__(self, input_ids, attention_mask):
        cache = super().__call__(input_ids, attention_mask)
        return cache_from_entries([(keys, values.flip(2)) for keys, values in cache_entries(cache)])


# Token scores


def test_kl_and_agreement_against_float64():
    rng = np.random.default_rng(0)
    own, other = rng.normal(size=(2, 3, 11)), rng.normal(size=(2, 3, 11))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (own, other))
    expected = (p * np.log(p / q)).sum(-1)
    as_logs = [torch.tensor(np.log(x), dtype=torch.float32) for x in (p, q)]
    assert np.allclose(kl_divergence(*as_logs), expected, atol=1e-6)
    assert torch.equal(kl_divergence(as_logs[0], as_logs[0]), torch.zeros(2, 3))
    assert np.array_equal(top1_agreement(*as_logs), p.argmax(-1) == q.argmax(-1))


def test_kl_over_padded_vocabularies_and_impossible_tokens():
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.75])
    expected = 0.5 * np.log(2.0) + 0.5 * np.log(0.5 / 0.75)
    assert float(kl_divergence(p.log(), q.log())) == pytest.approx(expected, abs=1e-6)
    q = torch.tensor([0.25, 0.375, 0.375])
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.375)
    assert float(kl_divergence(p.log(), q.log())) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "phi3", "glm", "cohere", "smollm3"])
def test_recorded_attention_outputs_are_weights_times_values(arch):
    model = tiny_model(arch)
    ids = torch.randint(3, VOCAB, (2, 6), generator=torch.Generator().manual_seed(3))
    cache = DynamicCache()
    with torch.no_grad(), AttentionOutputs(model, keep_last=4) as recorder:
        output = model(input_ids=ids, output_attentions=True, use_cache=True, **cache_kwargs(cache))
    for layer, weights in enumerate(output.attentions):
        values = cache.layers[layer].values.repeat_interleave(2, dim=1)
        expected = torch.einsum("bhqk,bhkd->bqhd", weights, values)[:, -4:]
        assert torch.allclose(recorder.outputs[layer], expected, atol=1e-5)
    model(input_ids=ids)  # the hooks are gone
    assert recorder.outputs[0].shape[1] == 4


def test_attention_outputs_need_known_modules():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.config = tiny_model("llama").config
    with pytest.raises(UnsupportedModelError, match="attention=False"):
        AttentionOutputs(model)


def test_cosine_and_r2_over_batches_against_numpy():
    rng = np.random.default_rng(4)
    own, other = (rng.normal(size=(3, 4, 5, 2, 6)) + 2 for _ in range(2))  # layers, rows, queries, heads, channels
    valid = rng.random((4, 5)) > 0.3
    cosines = (own * other).sum(-1) / np.linalg.norm(own, axis=-1) / np.linalg.norm(other, axis=-1)
    expected = cosines[:, valid].mean(1)  # layers, heads
    sums, r2 = CosineSums(), R2Sums()
    for rows in (slice(0, 1), slice(1, 4)):
        part = [torch.tensor(x[:, rows]) for x in (own, other)]
        one = CosineSums()
        one.add(list(part[0]), list(part[1]), torch.tensor(valid[rows]))
        sums.merge(one)
        for layer in range(3):
            r2.add(layer, *[x[layer].transpose(1, 2) for x in part], torch.tensor(valid[rows]))
    result = sums.result()
    assert result["mean"] == pytest.approx(expected.mean(), abs=1e-6)
    assert result["min"] == pytest.approx(expected.min(), abs=1e-6)
    assert (result["min_layer"], result["min_head"]) == np.unravel_index(expected.argmin(), expected.shape)
    y, x = own[:, valid], other[:, valid]  # layers, tokens, heads, channels
    scores = 1 - ((y - x) ** 2).sum((1, 3)) / ((y - y.mean(1, keepdims=True)) ** 2).sum((1, 3))
    assert r2.result()["mean"] == pytest.approx(scores.mean(), abs=1e-9)


# Conditions, each against plain forwards of unpadded rows


def test_documents_against_plain_forwards(judge, source, target, documents):
    scores = judge.judge(OwnCache(target)).scores["documents"]
    for index, document in enumerate(documents):
        start = len(document.prefix) - 1
        own = logits_of(target, document.prefix + document.continuation)[start:-1]
        theirs = logits_of(source, document.prefix + document.continuation)[start:-1]
        alone = logits_of(target, document.prefix[-1:] + document.continuation)[:-1]
        for name, log_probs in (("target", own), ("handoff", own), ("source", theirs), ("no_context", alone)):
            items = scores[name].items
            nll = -np.mean([row[token] for row, token in zip(log_probs, document.continuation, strict=True)])
            kl = (np.exp(own) * (own - log_probs)).sum(-1).mean()
            agreement = (own.argmax(-1) == log_probs.argmax(-1)).mean()
            assert items["nll"][index] == pytest.approx(nll, abs=1e-4), name
            assert items["kl"][index] == pytest.approx(kl, abs=1e-4), name
            assert items["top1"][index] == pytest.approx(agreement, abs=1e-6), name
            assert items["tokens"][index] == len(document.continuation)


def test_questions_against_plain_forwards(judge, source, target, questions):
    scores = judge.judge(OwnCache(target)).scores["questions"]
    for index, question in enumerate(questions):
        full, alone = question.context + question.question, question.bos + question.question
        own = logits_of(target, full)[-1]
        for name, model, before in (
            ("target", target, full),
            ("handoff", target, full),
            ("source", source, full),
            ("no_context", target, alone),
        ):
            items = scores[name].items
            expected = [log_likelihood(model, before, choice) for choice in question.choices]
            assert items["nll"][index] == pytest.approx(-expected[question.answer], abs=1e-4), name
            assert items["choice"][index] == int(np.argmax(expected)), name
            assert items["correct"][index] == float(np.argmax(expected) == question.answer), name
            kl = (np.exp(own) * (own - logits_of(model, before)[-1])).sum()
            assert items["kl"][index] == pytest.approx(kl, abs=1e-4), name


@pytest.mark.parametrize("suffix", [0, 1, 3])
def test_own_cache_is_perfect(judge, target, suffix):
    judgement = judge.judge(OwnCache(target, num_native_suffix=suffix))
    report = build_report(judgement, num_resamples=50)
    handoff = report["conditions"]["handoff"]
    assert handoff["kl"]["estimate"] < 1e-5 and handoff["answer_kl"]["estimate"] < 1e-5
    assert handoff["top1"]["estimate"] == 1.0
    assert handoff["attention_cosine"]["min"] > 1 - 1e-5 and handoff["answer_attention_cosine"]["min"] > 1 - 1e-5
    assert report["answers"] == {"same_choice": 1.0, "lost": 0, "gained": 0, "questions": 6}
    for entry in report["r2"].values():
        assert entry["mean"] == pytest.approx(1.0, abs=1e-6)
    for name in ("nll_gap_recovered", "answer_nll_gap_recovered"):
        value = report["headline"][name]["estimate"]
        assert value is None or value == pytest.approx(1.0, abs=1e-3)
    assert report["cost"]["share_of_prefill"] == pytest.approx(1.0)
    assert report["handoffs"] == {"ok": 5 + 3}


def test_damaged_cache_is_found_out(judge, target):
    report = build_report(judge.judge(Damaged(target)), num_resamples=50)
    handoff = report["conditions"]["handoff"]
    assert handoff["kl"]["estimate"] > 0.05 and handoff["answer_kl"]["estimate"] > 0.05
    assert handoff["attention_cosine"]["mean"] < 0.9
    assert report["r2"]["documents_values"]["mean"] < 0.5
    assert report["r2"]["documents_keys"]["mean"] == pytest.approx(1.0, abs=1e-6)
    assert report["comparisons"]["source"]["kl"]["handoff_is"] in ("better", "worse", "not apart")


def test_mismatched_control_is_another_prompts_cache(source, target):
    rng = np.random.default_rng(7)
    documents = [Document(tokens(rng, length), tokens(rng, 4)) for length in (9, 6)]
    judge = Judge(source, target, documents=documents)
    scores = judge.judge(OwnCache(target, num_native_suffix=2)).scores["documents"]["mismatched"]
    for index, document in enumerate(documents):
        other = documents[1 - index].prefix[:-2] + document.prefix[-2:]
        log_probs = logits_of(target, other + document.continuation)[len(other) - 1 : -1]
        nll = -np.mean([row[token] for row, token in zip(log_probs, document.continuation, strict=True)])
        assert scores.items["nll"][index] == pytest.approx(nll, abs=1e-4)


def test_mismatched_control_needs_two_prompts(source, target, questions):
    judgement = Judge(source, target, questions=questions[:2]).judge(OwnCache(target))
    assert "two different prompts" in judgement.undefined["mismatched"]
    assert "mismatched" not in judgement.scores["questions"]
    assert "two different prompts" in to_markdown(build_report(judgement, num_resamples=10))


def test_unmapped_control_of_a_model_and_itself_is_exact(target, documents):
    control = UnmappedHandoff(target, target, num_sinks=2, num_native_suffix=2)
    scores = Judge(target, target, documents=documents, batch_size=2).judge(control).scores["documents"]
    assert scores["handoff"].items["kl"].max() < 1e-5
    assert scores["unmapped"].items["kl"].max() < 1e-5


def test_unmapped_control_rotates_for_the_target_and_keeps_native_sinks(target):
    # The same weights with another rotary base: stripping and applying is exact in layer 0, whose keys depend on the
    # token alone, and only there.
    other = tiny_model("llama", num_layers=3, seed=2, rope={"rope_type": "default", "rope_theta": 500.0})
    other.load_state_dict(target.state_dict())
    ids = torch.tensor([[0, 0, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        exact = cache_entries(OwnCache(target)(ids, mask))
        plain = cache_entries(UnmappedHandoff(other, target)(ids, mask))
        sinks = cache_entries(UnmappedHandoff(other, target, num_sinks=2)(ids, mask))
    real = mask[:, :5].bool()
    by_token = [[states.transpose(1, 2) for states in layer] for layer in (plain[0], exact[0])]
    for rotated, expected in zip(*by_token, strict=True):
        assert torch.allclose(rotated[real], expected[real], atol=1e-4)
    for layer in (1, 2):
        for kind in (0, 1):
            mapped, mixed, own = (entries[layer][kind] for entries in (plain, sinks, exact))
            for row, first in ((0, 2), (1, 0)):
                assert torch.allclose(mixed[row, :, first : first + 2], own[row, :, first : first + 2], atol=1e-5)
                assert torch.equal(mixed[row, :, first + 2 :], mapped[row, :, first + 2 :])
                assert not torch.allclose(mixed[row, :, first + 2 :], own[row, :, first + 2 :], atol=1e-2)


def test_unmapped_control_is_refused_where_widths_differ(target, documents):
    narrow = tiny_model("qwen3", num_layers=2, head_dim=8)
    judgement = Judge(narrow, target, documents=documents).judge(OwnCache(target))
    assert "2 KV heads of width 8, the target 2 of width 16" in judgement.undefined["unmapped"]
    assert "unmapped" not in judgement.scores["documents"]


def test_nearest_layer_keeps_the_ends():
    assert [nearest_layer(layer, 6, 3) for layer in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [nearest_layer(layer, 3, 6) for layer in range(3)] == [0, 2, 5]
    assert nearest_layer(0, 1, 4) == 3


def test_native_only_sees_sinks_and_suffix_and_nothing_else(source, target):
    rng = np.random.default_rng(8)
    prefix, continuation = tokens(rng, 10), tokens(rng, 4)
    handoff = OwnCache(target, num_native_suffix=3)
    handoff.num_sinks = 2

    def score(changed: int | None) -> float:
        row = list(prefix)
        if changed is not None:
            row[changed] = 3 + (row[changed] - 2) % (VOCAB - 3)
        judge = Judge(source, target, documents=[Document(tuple(row), continuation)])
        return float(judge.judge(handoff).scores["documents"]["native_only"].items["nll"][0])

    plain = score(None)
    assert [score(column) == pytest.approx(plain, abs=1e-6) for column in range(10)] == [False] * 2 + [True] * 5 + [
        False
    ] * 3


def test_native_only_against_a_forward_with_a_mask_of_its_own(source, target):
    rng = np.random.default_rng(9)
    document = Document(tokens(rng, 9), tokens(rng, 4))
    handoff = OwnCache(target, num_native_suffix=3)
    handoff.num_sinks = 2
    scores = Judge(source, target, documents=[document]).judge(handoff).scores["documents"]["native_only"]
    ids = document.prefix + document.continuation
    # Nobody sees columns 2 to 5 but themselves; every token keeps its own position.
    visible = torch.ones(len(ids), len(ids)).tril()
    visible[:, 2:6] = 0.0
    visible.fill_diagonal_(1.0)
    bias = torch.zeros(1, 1, len(ids), len(ids)).masked_fill(visible == 0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        log_probs = target(input_ids=torch.tensor([ids]), attention_mask=bias).logits[0].log_softmax(-1)
    expected = -np.mean([float(log_probs[8 + i, token]) for i, token in enumerate(document.continuation)])
    assert scores.items["nll"][0] == pytest.approx(expected, abs=1e-4)


def test_native_sinks_are_no_part_of_r2(source, target, documents):
    class FirstTokensWrong(OwnCache):
        def __call__(self, input_ids, attention_mask):
            cache = super().__call__(input_ids, attention_mask)
            early = (attention_mask.cumsum(1) <= 2)[:, None, : cache.get_seq_length(), None]
            return cache_from_entries([(k, v.masked_fill(early, 0.0)) for k, v in cache_entries(cache)])

    judge, handoff = Judge(source, target, documents=documents), FirstTokensWrong(target)
    seen = judge.judge(handoff).r2["documents_values"]["mean"]
    handoff.num_sinks = 2
    assert seen < 0.95 and judge.judge(handoff).r2["documents_values"]["mean"] == pytest.approx(1.0, abs=1e-6)


def test_batching_changes_nothing(source, target, documents, questions):
    every = []
    for size in (1, 4, 64):
        judge = Judge(source, target, documents=documents, questions=questions, batch_size=size)
        every.append(judge.judge(Damaged(target), controls=("unmapped", "native_only")))
    for other in every[1:]:
        for suite, conditions in every[0].scores.items():
            for name, scores in conditions.items():
                for key, column in scores.items.items():
                    if name == "handoff":
                        continue  # the damage itself depends on the padding
                    assert np.allclose(column, other.scores[suite][name].items[key], atol=1e-4), (suite, name, key)


def test_questions_share_the_handoff_of_their_context(source, target, questions):
    calls = []

    class Counting(OwnCache):
        def __call__(self, input_ids, attention_mask):
            calls.append(input_ids.shape[0])
            return super().__call__(input_ids, attention_mask)

    Judge(source, target, questions=questions, batch_size=64).judge(Counting(target))
    assert calls == [3]
    batches = question_batches(questions, batch_size=2)
    assert all(batch.num_prefixes >= 2 for batch in batches)
    assert sorted(item for batch in batches for item in batch.items) == list(range(6))


def test_baselines_are_run_once_for_many_handoffs(source, target, documents, questions):
    calls = []
    handle = source.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        judge = Judge(source, target, documents=documents, questions=questions)
        first = judge.judge(OwnCache(target))
        count = len(calls)
        second = judge.judge(Damaged(target))
    finally:
        handle.remove()
    assert count > 0 and len(calls) == count
    assert second.scores["documents"]["source"].items is first.scores["documents"]["source"].items or np.array_equal(
        second.scores["documents"]["source"].items["kl"], first.scores["documents"]["source"].items["kl"]
    )


def test_results_do_not_depend_on_what_is_kept(source, target, documents, questions):
    kept = Judge(source, target, documents=documents, questions=questions, batch_size=2)
    lean = Judge(source, target, documents=documents, questions=questions, batch_size=2, keep_bytes=0)
    for _ in range(2):
        reports = [build_report(one.judge(Damaged(target)), num_resamples=20) for one in (kept, lean)]
        assert reports[0] == reports[1]
    assert not lean._kept


def test_without_attention_the_rest_is_the_same(source, target, documents):
    seen = build_report(Judge(source, target, documents=documents).judge(OwnCache(target)), num_resamples=20)
    blind = Judge(source, target, documents=documents, attention=False).judge(OwnCache(target))
    blind = build_report(blind, num_resamples=20)
    assert blind["conditions"]["handoff"]["attention_cosine"] is None
    assert blind["conditions"]["source"] == seen["conditions"]["source"]


def test_a_fallback_is_counted_and_costs_a_prefill(source, target, documents):
    class Report:
        status = "fallback"

    class FallsBack(OwnCache):
        def flops(self, num_tokens):
            return {"map": 1.0, "native": 0.0}

        def __call__(self, input_ids, attention_mask):
            cache = super().__call__(input_ids, attention_mask)
            cache.report = Report()
            return cache

    report = build_report(Judge(source, target, documents=documents).judge(FallsBack(target)), num_resamples=20)
    assert report["handoffs"] == {"fallback": 5}
    assert report["cost"]["share_of_prefill"] == pytest.approx(1.0)
    assert "5 fallback of 5" in to_markdown(report)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s, t: Judge(s, t), "questions, documents or both"),
        (lambda s, t: Judge(s, t, questions=[Question("a", "b", ("c", "d"), 0)]), "tokenizer"),
        (
            lambda s, t: Judge(s, t, documents=[Document((5, 6), (7,))]).judge(OwnCache(t), controls=["none"]),
            "controls",
        ),
        (lambda s, t: judge_handoff(s, t, "mapper", documents=[Document((5, 6), (7,))]), "KVBridgeMapper"),
        (
            lambda s, t: Judge(s, t, documents=[Document((5, 6), (7,))]).judge(
                lambda ids, mask: OwnCache(t, num_native_suffix=0)(ids.repeat(1, 2), mask.repeat(1, 2))
            ),
            "holds 4 columns",
        ),
        (lambda s, t: Judge(s, t.train(), documents=[Document((5, 6), (7,))]), "training mode"),
    ],
)
def test_what_cannot_be_judged_is_refused(source, make, message):
    with pytest.raises(EvaluationError, match=message):
        make(source, tiny_model("llama", num_layers=2))


# Bridges


@pytest.mark.parametrize("policy", [None, HandoffPolicy(num_sinks=2, num_native_suffix=3)])
def test_a_model_bridged_to_itself_is_perfect(target, documents, questions, policy):
    bridge = KVBridge(target, KVBridgeMapper.identity(target), policy)
    report = judge_handoff(
        target,
        target,
        bridge,
        documents=documents,
        questions=questions,
        num_resamples=20,
        latency_prompt=torch.arange(3, 12)[None],
        latency_repeats=1,
    )
    handoff = report["conditions"]["handoff"]
    assert handoff["kl"]["estimate"] < 1e-5 and handoff["answer_kl"]["estimate"] < 1e-5
    assert handoff["attention_cosine"]["min"] > 1 - 1e-5 and report["answers"]["same_choice"] == 1.0
    assert report["headline"]["gap_recovered"]["estimate"] is None  # there is no gap between a model and itself
    assert "no gap in accuracy" in to_markdown(report)
    assert all(stats["median"] > 0 for stats in report["latency"]["paths"].values())
    # The identity map is a square of the KV width for keys and for values in each of three layers.
    cost, sinks, suffix = PrefillCost.from_model(target), *((0, 1) if policy is None else (2, 3))
    lengths = [len(document.prefix) for document in documents] + [len(q.context) for q in questions[::2]]
    spent = sum(
        handoff_flops(cost, n, map_per_token=2 * 2 * 3 * 32 * 32, num_sinks=sinks, num_suffix=suffix)["total"]
        for n in lengths
    )
    assert report["cost"]["share_of_prefill"] == pytest.approx(spent / sum(map(cost.flops, lengths)))
    native = sum(min(n, sinks + suffix) for n in lengths)
    assert report["cost"]["native_token_share"] == pytest.approx(native / sum(lengths))


@pytest.mark.parametrize("way", ["recency", "source_attention"])
def test_recomputing_every_token_is_perfect_and_costs_a_prefill_more(source, target, documents, questions, way):
    mapper = KVBridgeMapper.identity(target)
    with torch.no_grad():
        mapper.value_weight.zero_()  # nothing of the values comes across
    judge = Judge(target, target, documents=documents, questions=questions, batch_size=4)
    kls = {}
    for fraction in (0.0, 0.5, 1.0):
        policy = HandoffPolicy(num_sinks=0, num_native_suffix=1, native_fraction=fraction, repair=way)
        judgement = judge.judge(BridgeHandoff(KVBridge(target, mapper, policy), target))
        report = build_report(judgement, num_resamples=10)
        kls[fraction] = report["conditions"]["handoff"]["answer_kl"]["estimate"]
    assert kls[1.0] < 1e-5 < kls[0.5] < kls[0.0]
    # Each question has a handoff of its own; every token but the last is computed once more on top of the map.
    assert report["handoffs"] == {"ok": len(documents) + len(questions)}
    cost, lengths = PrefillCost.from_model(target), [len(q.context) for q in questions]
    texts = [len(document.prefix) for document in documents]
    total = sum(map(cost.flops, lengths + texts))
    again = sum(cost.flops(n - 1) for n in lengths + texts)
    assert report["cost"]["repair_share"] == pytest.approx(again / total)
    read = 0.0
    if way == "source_attention":
        read = sum(cost.flops(len(q.question), len(q.context)) for q in questions)
        read += sum(cost.flops(1, n) for n in texts)
    assert report["cost"]["choice_share"] == pytest.approx(read / total)
    assert report["cost"]["native_token_share"] == pytest.approx(1.0)


def test_a_mapper_is_checked_against_both_models(source, target, documents):
    with pytest.raises(KVBridgeError):
        judge_handoff(source, target, KVBridgeMapper.identity(target), documents=documents)
    with pytest.raises(KVBridgeError):
        judge_handoff(target, source, KVBridgeMapper.identity(target), documents=documents)


# Costs


@pytest.mark.parametrize("arch", ["llama", "qwen3", "phi3", "olmo2"])
def test_prefill_flops_against_pytorchs_counter(arch):
    model = tiny_model(arch)
    config = model.config
    cost = PrefillCost.from_model(model)

    def counted(length: int) -> float:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.full((1, length), 5), logits_to_keep=1)
        return counter.get_total_flops() - 2 * config.vocab_size * config.hidden_size

    # The counter sees the whole square of scores and not its causal half, and where a release computes the rotation's
    # angles as a matrix product, that too: two operations for each rotated pair of channels and token.
    rotation = counted(1) - cost.flops(1)
    assert rotation in (0, 16 * getattr(config, "partial_rotary_factor", 1.0))
    length = 7
    square = cost.linear_per_token * length + cost.attention_per_pair * length**2
    assert counted(length) == square + rotation * length
    assert cost.flops(length) == square - cost.attention_per_pair * length * (length - 1) / 2


def test_reading_in_pieces_costs_the_same():
    cost = PrefillCost.from_model(tiny_model("llama"))
    assert cost.flops(3) + cost.flops(5, num_before=3) == cost.flops(8)


def test_lowest_layers_cost_their_projections_and_all_below():
    cost = PrefillCost.from_model(tiny_model("llama", num_layers=4))
    below = PrefillCost.from_model(tiny_model("llama", num_layers=2))
    # Hidden size 64, four query heads and two KV heads of width 16.
    assert cost.flops_of_lowest_layers(10, 3) == pytest.approx(below.flops(10) + 10 * 2 * 64 * (64 + 32 + 32))
    assert cost.flops_of_lowest_layers(10, 0) == 0.0
    parts = handoff_flops(cost, 10, map_per_token=8.0, num_sinks=0, num_suffix=2, native_layers=3)
    assert parts["map"] == 8.0 * 8 / 4
    assert parts["native"] == pytest.approx(cost.flops(2, 8) + cost.flops_of_lowest_layers(8, 3))


def test_experts_cost_what_a_token_uses():
    model = tiny_model("llama")
    dense = PrefillCost.from_model(model).linear_per_token
    model.model.layers[0].mlp.experts = torch.nn.ParameterList([torch.zeros(8, 4, 6)])
    model.config.num_experts_per_tok = 2
    assert PrefillCost.from_model(model).linear_per_token == dense + 2 * 2 * 4 * 6


def test_handoff_flops_from_pure_mapping_to_full_prefill():
    cost = PrefillCost(linear_per_token=100.0, attention_per_pair=3.0)
    pure = handoff_flops(cost, 10, map_per_token=7.0, num_sinks=0, num_suffix=0)
    assert (pure["map"], pure["native"], pure["prefill"]) == (70.0, 0.0, cost.flops(10))
    full = handoff_flops(cost, 10, map_per_token=7.0, num_sinks=0, num_suffix=64)
    assert (full["map"], full["native"]) == (0.0, cost.flops(10))
    mixed = handoff_flops(cost, 10, map_per_token=7.0, num_sinks=2, num_suffix=3)
    pairs = (1 + 2) + (8 + 9 + 10)
    assert mixed == {"map": 35.0, "native": 500.0 + 3 * pairs, "total": 535.0 + 3 * pairs, "prefill": cost.flops(10)}


def test_map_flops_of_weights_methods_and_strangers():
    class Linear:
        key_weight, value_weight = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 5, 4)

    class Own:
        def flops_per_token(self):
            return 12

    class ByMethod:
        class method:
            @staticmethod
            def flops_per_token(mapper):
                return 13 if isinstance(mapper, ByMethod) else 0

    assert map_flops_per_token(Linear()) == 2 * 2 * 120
    assert map_flops_per_token(Own()) == 12 and map_flops_per_token(ByMethod()) == 13
    with pytest.raises(EvaluationError, match="flops_per_token"):
        map_flops_per_token(object())


def test_cost_is_unknown_rather_than_guessed(source, target, documents):
    judgement = Judge(source, target, documents=documents).judge(lambda ids, mask: OwnCache(target)(ids, mask))
    report = build_report(judgement, num_resamples=10)
    assert report["cost"]["share_of_prefill"] is None and "not known" in to_markdown(report)


# Data


class Words:
    """A tokenizer of one token a word, with a beginning- and an end-of-sequence token."""

    def __init__(self):
        self.ids = {}

    def __call__(self, text, add_special_tokens=True):
        ids = [self.ids.setdefault(word, 3 + len(self.ids)) for word in text.split()]
        return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}


def test_encoding_keeps_bos_and_drops_eos():
    encoded = encode_question(Words(), Question("Ann has tea .", "Who ?", (" Ann", " Bob Low"), 0, "who"))
    assert encoded.context == (1, 3, 4, 5, 6) and encoded.bos == (1,)
    assert encoded.question == (7, 8) and encoded.choices == ((3,), (9, 10)) and encoded.kind == "who"
    with pytest.raises(EvaluationError, match="must have tokens"):
        encode_question(Words(), Question("Ann", "Who ?", (" ", " Bob"), 0))


def test_parts_continue_each_other():
    class Letters:
        """One token a letter, spaces included."""

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [ord(letter) for letter in text]}

    encoded = encode_question(Letters(), Question("It is.", "Is it?", (" y", " no"), 0))
    assert "".join(map(chr, encoded.context + encoded.question)) == "It is. Is it?"
    assert encode_question(Letters(), Question("It is.\n", "Is it?", (" y", " no"), 0)).question[0] == ord("I")

    class Merging(Letters):
        """Merges a full stop with the space behind it, so that no joint after one is clean."""

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [ord(letter) for letter in text.replace(". ", "~")]}

    encoded = encode_question(Merging(), Question("It is.", "Is it?", (" y", " no"), 0))
    assert "".join(map(chr, encoded.context + encoded.question)) == "It is. Is it?"


def test_question_files(tmp_path):
    good = {"context": "c", "question": "q", "choices": [" a", " b"], "answer": 1, "context_id": 3}
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(good) + "\n\n" + json.dumps({**good, "kind": "city"}) + "\n")
    loaded = load_questions(path)
    assert loaded == [Question("c", "q", (" a", " b"), 1, "question"), Question("c", "q", (" a", " b"), 1, "city")]
    assert load_questions(path, limit=1) == loaded[:1]
    for change in ({"answer": 2}, {"answer": "b"}, {"answer": True}, {"choices": ["a"]}, {"choices": "ab"}):
        path.write_text(json.dumps(good) + "\n" + json.dumps({**good, **change}) + "\n")
        with pytest.raises(EvaluationError, match="line 2"):
            load_questions(path)
    path.write_text('{"context": "c"}\n')
    with pytest.raises(EvaluationError, match="lacks question, choices, answer"):
        load_questions(path)
    path.write_text("\n")
    with pytest.raises(EvaluationError, match="no questions"):
        load_questions(path)


def test_splitting_documents():
    made = split_documents([range(10), range(3), range(20)], continuation_tokens=4)
    assert [(len(document.prefix), len(document.continuation)) for document in made] == [(6, 4), (16, 4)]
    assert made[0].prefix + made[0].continuation == tuple(range(10))
    made = split_documents([range(10), range(20)], continuation_tokens=4, prefix_tokens=12)
    assert [document.prefix for document in made] == [tuple(range(12))]
    assert len(split_documents([range(10)] * 5, continuation_tokens=2, limit=3)) == 3
    with pytest.raises(EvaluationError, match="longer texts"):
        split_documents([range(3)], continuation_tokens=4)


# The report


@pytest.fixture(scope="module")
def report(source, target, documents, questions):
    ids = torch.arange(3, 11)[None]

    class Reusing(OwnCache):
        def __call__(self, input_ids, attention_mask, source_cache=None):
            return super().__call__(input_ids, attention_mask)

    return judge_handoff(
        source,
        target,
        Reusing(target),
        documents=documents,
        questions=questions,
        latency_prompt=ids,
        latency_repeats=2,
        num_resamples=100,
        seed=11,
        include_items=True,
    )


def test_report_is_json_and_its_markdown_comes_from_the_json(report):
    again = json.loads(json.dumps(report, allow_nan=False))
    assert again == report
    text = to_markdown(again, title="A pair")
    assert text == to_markdown(report, title="A pair") and text.startswith("## A pair\n")
    for label in ("target alone", "no context", "source alone", "unmapped control", "another prompt's cache"):
        assert f"| {label} |" in text
    assert "Share of the gap recovered" in text and "target_prefill" in text and "R^2" in text
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    for block in tables:
        assert len({line.count("|") for line in block.splitlines()}) == 1, block


def test_report_says_seed_counts_and_what_ratios_are_made_of(report, questions):
    assert report["bootstrap"] == {
        "num_resamples": 100,
        "confidence": 0.95,
        "seed": 11,
        "documents_items": 5,
        "documents_groups": 5,
        "questions_items": 6,
        "questions_groups": 3,
    }
    assert report["data"]["kinds"] == {"one": 3, "several": 3}
    assert report["data"]["chance"] == pytest.approx((1 / 3 + 1 / 4) / 2)
    conditions, gap = report["conditions"], report["headline"]["gap_recovered"]
    for name in ("handoff", "target", "source"):
        assert gap[name] == conditions[name]["accuracy"]["estimate"]
    items = report["items"]["questions"]
    assert conditions["source"]["accuracy"]["estimate"] == pytest.approx(np.mean(items["source"]["correct"]))
    texts = report["items"]["documents"]["source"]
    expected = np.average(texts["nll"], weights=texts["tokens"])
    assert conditions["source"]["nll"]["estimate"] == pytest.approx(expected)
    several = [index for index, question in enumerate(questions) if question.kind == "several"]
    expected = np.mean([items["source"]["correct"][index] for index in several])
    assert report["kinds"]["several"]["accuracy"]["source"]["estimate"] == pytest.approx(expected)


def test_a_clear_winner_is_called_one(report):
    # The target's own cache against no context, on logits of random models: apart on every document.
    assert report["comparisons"]["no_context"]["kl"]["handoff_is"] == "better"
    assert report["comparisons"]["mismatched"]["kl"]["handoff_is"] == "better"
    assert report["comparisons"]["target"]["nll"]["handoff_is"] == "not apart"
    assert "kl" not in report["comparisons"]["target"]


def test_the_same_seed_gives_the_same_report(source, target, documents, report):
    first, second = (
        judge_handoff(source, target, Damaged(target), documents=documents, num_resamples=50, seed=3) for _ in range(2)
    )
    assert first == second
