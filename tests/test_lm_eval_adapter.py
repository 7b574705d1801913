"""The adapter for lm-evaluation-harness, with an identity mapper against the model's own forward."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbridge_hf import Gates, HandoffPolicy, KVBridge, KVBridgeMapper, bundled
from kvbridge_hf.evaluation import EvaluationError
from kvbridge_hf.evaluation.lm_eval_adapter import HandoffLM
from kvbridge_hf.handoff import HandoffFallbackWarning

CONTEXT = "Alice lives in Rome. Bob has a friend named Carl. Carl owns the lamp. Where does Alice live? Alice lives in"
PAIRS = [(CONTEXT, " Rome"), (CONTEXT, " Oslo."), (CONTEXT + " ", "Rome. Bob"), ("", "Alice lives"), ("Bob", " has")]


def requests(*arguments):
    return [SimpleNamespace(args=pair) for pair in arguments]


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(bundled.model_path("m"), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled.model_path("m"))


@pytest.fixture(scope="module")
def bridge(model):
    return KVBridge(model, KVBridgeMapper.identity(model))


@torch.no_grad()
def expected(model, tokenizer, context, continuation):
    """By one forward of Transformers over the whole text."""
    ids = tokenizer(context + continuation, return_tensors="pt")["input_ids"]
    start = len(tokenizer(context.rstrip())["input_ids"]) if context else 1  # the token that begins every text
    logits = model(ids).logits[0].double().log_softmax(-1)
    scores = [logits[place - 1, ids[0, place]].item() for place in range(start, ids.shape[1])]
    greedy = all(logits[place - 1].argmax() == ids[0, place] for place in range(start, ids.shape[1]))
    return sum(scores), greedy


@pytest.mark.parametrize("native", [False, True])
def test_loglikelihood_is_the_targets_own(model, tokenizer, bridge, native):
    adapter = HandoffLM(None if native else bridge, model, tokenizer, progress=False)
    results = adapter.loglikelihood(requests(*PAIRS))
    for pair, (score, greedy) in zip(PAIRS, results, strict=True):
        wanted, wanted_greedy = expected(model, tokenizer, *pair)
        assert score == pytest.approx(wanted, abs=2e-3), pair
        assert greedy == wanted_greedy, pair


def test_a_context_is_handed_over_once(model, tokenizer, bridge, monkeypatch):
    calls = []
    handoff = KVBridge.handoff
    monkeypatch.setattr(
        KVBridge, "handoff", lambda self, *args, **kwargs: calls.append(1) or handoff(self, *args, **kwargs)
    )
    adapter = HandoffLM(bridge, model, tokenizer, progress=False)
    adapter.loglikelihood(requests(*[(CONTEXT, choice) for choice in (" Rome", " Oslo", " Lima")]))
    assert len(calls) == 1 and adapter.statuses == {"ok": 1}


def test_the_source_is_what_reads(model, tokenizer):
    """A mapper that maps everything to nothing changes the scores, so the cache is really used."""
    mapper = KVBridgeMapper.identity(model)
    with torch.no_grad():
        mapper.value_weight.zero_()
    broken = HandoffLM(KVBridge(model, mapper, HandoffPolicy(num_sinks=1)), model, tokenizer, progress=False)
    ((score, _),) = broken.loglikelihood(requests(PAIRS[0]))
    assert abs(score - expected(model, tokenizer, *PAIRS[0])[0]) > 0.05


def test_what_a_gate_would_reject_is_judged_all_the_same(model, tokenizer):
    mapper = KVBridgeMapper.identity(model)
    with torch.no_grad():
        mapper.value_weight.zero_()
    rejecting = Gates(accept=lambda cache, report: False)
    bridge = KVBridge(model, mapper, HandoffPolicy(num_sinks=1, on_failure="prefill", gates=rejecting))
    own = expected(model, tokenizer, *PAIRS[0])[0]
    judged = HandoffLM(bridge, model, tokenizer, progress=False)
    ((score, _),) = judged.loglikelihood(requests(PAIRS[0]))
    judged.generate_until(requests((CONTEXT, {"max_gen_toks": 2})))
    assert abs(score - own) > 0.05 and judged.statuses == {"ok": 2}
    served = HandoffLM(bridge, model, tokenizer, progress=False, keep_gates=True)
    with pytest.warns(HandoffFallbackWarning, match="accept"):
        ((score, _),) = served.loglikelihood(requests(PAIRS[0]))
    assert score == pytest.approx(own, abs=2e-3) and served.statuses == {"fallback": 1}
    assert bridge.policy.gates is rejecting


def test_generate_until_stops(model, tokenizer, bridge):
    adapter = HandoffLM(bridge, model, tokenizer, progress=False)
    ids = tokenizer(CONTEXT, return_tensors="pt")["input_ids"]
    own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    text = tokenizer.decode(own[0, ids.shape[1] :], skip_special_tokens=True)
    (free,) = adapter.generate_until(requests((CONTEXT, {"max_gen_toks": 12})))
    assert free == text
    stop = text.split()[0][-3:]
    (cut,) = adapter.generate_until(requests((CONTEXT, {"until": [stop], "max_gen_toks": 12, "temperature": 0.0})))
    assert cut == text.split(stop)[0]


def test_what_cannot_be_handed_over_is_refused(model, tokenizer, bridge):
    adapter = HandoffLM(bridge, model, tokenizer, progress=False)
    with pytest.raises(EvaluationError, match="handed over"):
        adapter.loglikelihood_rolling(requests(("Alice lives in Rome.",)))
    with pytest.raises(EvaluationError, match="no tokens"):
        adapter.loglikelihood(requests((CONTEXT, "")))
