"""What generate(bridge=...) refuses, what it falls back to, and what the hook leaves alone."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys

import pytest
import torch
from generate_by_hand import MODES, by_hand, character_tokenizer, read, run
from handoff_reference import PAD, batch, pair, positions_of
from transformers import AutoModelForSeq2SeqLM, DynamicCache, GenerationConfig, GenerationMixin, T5Config

import kvbridge_hf
from kvbridge_hf import HandoffFallbackWarning, HandoffPolicy, KVBridge, KVBridgeMapper, generate_hook
from kvbridge_hf.errors import FingerprintError, GenerateArgumentError, KVBridgeError, PairMismatchError

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def models():
    return pair("qwen3", "llama")


@pytest.fixture
def bridge(models):
    return KVBridge(*models[::2], HandoffPolicy(num_sinks=0))


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


# --- refusals and fallbacks


def test_what_cannot_work_says_so(models, bridge):
    target = models[1]
    ids, mask = batch([8])
    embeds = target.get_input_embeddings()(ids)
    cases = [
        ({"use_cache": False}, "use_cache=False"),
        ({"generation_config": GenerationConfig(use_cache=False)}, "use_cache=False"),
        ({"inputs_embeds": embeds}, "inputs_embeds"),
        ({"custom_generate": "org/repo"}, "custom_generate"),
        ({"cache_implementation": "paged"}, "paged"),
        ({"position_ids": torch.arange(5, 13)[None]}, "position_ids"),
        ({"attention_mask": torch.ones(1, 12, dtype=torch.long)}, "attention_mask has shape"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "Hub repository"),
        ({"token_healing": True}, "token_healing"),
        ({"assistant_early_exit": 2}, "assistant_early_exit"),
    ]
    for kwargs, message in cases:
        kwargs = {"attention_mask": mask, "max_new_tokens": 3, **kwargs}
        with pytest.raises(GenerateArgumentError, match=message):
            target.generate(ids, bridge=bridge, **kwargs)
    with pytest.raises(GenerateArgumentError, match="must be a KVBridge"):
        target.generate(ids, bridge=models[2])
    good = torch.equal(
        run(target, ids, mask, bridge=bridge, position_ids=positions_of(mask)), by_hand(models, ids, mask)
    )
    assert good
    lenient = KVBridge(*models[::2], HandoffPolicy(on_failure="prefill"))
    with pytest.raises(GenerateArgumentError):  # wrong arguments are no reason to fall back
        target.generate(ids, bridge=lenient, use_cache=False, max_new_tokens=3)


def test_an_encoder_decoder_is_refused(models, bridge):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 96}
    t5 = AutoModelForSeq2SeqLM.from_config(T5Config(decoder_start_token_id=0, **sizes))
    with pytest.raises(GenerateArgumentError, match="encoder-decoder"):
        t5.generate(batch([8])[0], bridge=bridge)


@pytest.mark.parametrize("mode", ["greedy", "returned beams"])
@pytest.mark.parametrize("failure", ["geometry", "fingerprint", "cache", "map", "source"])
def test_fallback_is_the_targets_own_prefill(models, monkeypatch, failure, mode):
    source, target, mapper = models
    bridge = KVBridge(source, mapper, HandoffPolicy(on_failure="prefill", num_sinks=2))
    strict = KVBridge(source, mapper, HandoffPolicy(num_sinks=2))
    ids, mask = batch([14, 6, 10])
    kwargs, reason, error = {}, failure, KVBridgeError
    if failure == "geometry":
        target, reason, error = source, "num_layers", PairMismatchError
    elif failure == "fingerprint":
        target, reason, error = copy.deepcopy(target), "weights differ", FingerprintError
        with torch.no_grad():
            target.model.layers[1].self_attn.k_proj.weight.mul_(1.5)
    elif failure == "cache":
        kwargs, reason = {"source_cache": read(source, ids[:1], mask[:1])}, "rows"
    else:

        def fail(*_, **__):
            raise RuntimeError("the accelerator is on fire")

        monkeypatch.setattr(
            type(mapper if failure == "map" else source), "map_layer" if failure == "map" else "forward", fail
        )
        reason, error = "on fire", RuntimeError
    expected = run(target, ids, mask, **MODES[mode])
    with pytest.warns(HandoffFallbackWarning, match=reason):
        got = run(target, ids, mask, bridge=bridge, return_dict_in_generate=True, **kwargs, **MODES[mode])
    assert torch.equal(got.sequences, expected)
    report = got.handoff_report
    assert report.status == "fallback" and reason in report.reason
    assert report.tokens_mapped == 0 and report.tokens_native == 30
    with pytest.raises(error, match=reason):
        run(target, ids, mask, bridge=strict, **kwargs, **MODES[mode])


def test_a_fallback_warns_once(models, recwarn):
    source, _, mapper = models
    bridge = KVBridge(source, mapper, HandoffPolicy(on_failure="prefill"))
    ids, mask = batch([6])
    for _ in range(3):
        run(source, ids, mask, bridge=bridge)
        assert bridge.last_report.status == "fallback"
    assert sum(issubclass(entry.category, HandoffFallbackWarning) for entry in recwarn) == 1


def test_a_fallback_also_turns_right_padding(models):
    source, _, mapper = models
    bridge = KVBridge(source, mapper, HandoffPolicy(on_failure="prefill"))
    ids, mask = batch([14, 6], side="right")
    with pytest.warns(HandoffFallbackWarning):
        got = run(source, ids, mask, bridge=bridge)
    assert torch.equal(got[:, 14:], run(source, *batch([14, 6]))[:, 14:])


def test_the_source_and_the_tokenizer_are_checked_when_a_bridge_is_made(models, tokenizer):
    source, target, mapper = models
    other = copy.deepcopy(source)
    with torch.no_grad():
        other.model.layers[0].self_attn.v_proj.weight.mul_(1.5)
    with pytest.raises(FingerprintError):
        KVBridge(other, mapper)
    config = copy.deepcopy(mapper.config)
    config.tokenizer_fingerprint = "of another tokenizer"
    with pytest.raises(FingerprintError, match="tokenizer"):
        KVBridge(source, KVBridgeMapper(config), tokenizer=tokenizer)


def test_a_target_is_checked_once(models, bridge, monkeypatch):
    from kvbridge_hf import pair_checks

    calls = []
    check = pair_checks.check_fingerprint
    monkeypatch.setattr(pair_checks, "check_fingerprint", lambda *args: (calls.append(args[-1]), check(*args))[1])
    ids, mask = batch([6])
    for _ in range(3):
        run(models[1], ids, mask, bridge=bridge)
    assert calls == ["target"]


# --- the hook


def test_without_a_bridge_generate_is_untouched(models):
    target = models[1]
    original = GenerationMixin.generate.__wrapped__
    assert inspect.signature(GenerationMixin.generate) == inspect.signature(original)
    ids, mask = batch([9, 5])
    plain = original(target, ids, attention_mask=mask, max_new_tokens=5, pad_token_id=PAD)
    assert torch.equal(run(target, ids, mask, max_new_tokens=5), plain)
    assert torch.equal(run(target, ids, mask, max_new_tokens=5, bridge=None), plain)
    with pytest.raises(ValueError, match="source_cache"):  # Transformers' own answer to an argument it does not know
        run(target, ids, mask, source_cache=DynamicCache())
    passed = []

    def spy(self, *args, **kwargs):
        passed.append((args, kwargs))

    hook = GenerationMixin.generate
    try:
        GenerationMixin.generate = spy
        generate_hook.install()
        target.generate(ids, max_new_tokens=5)
    finally:
        GenerationMixin.generate = hook
    assert len(passed) == 1 and passed[0][0][0] is ids and passed[0][1] == {"max_new_tokens": 5}


def test_install_twice_and_uninstall():
    hook = GenerationMixin.generate
    generate_hook.install()
    assert GenerationMixin.generate is hook
    try:
        generate_hook.uninstall()
        assert GenerationMixin.generate is hook.__wrapped__
    finally:
        generate_hook.install()


def test_public_names_and_a_light_import():
    for name in kvbridge_hf.__all__:
        assert name in dir(kvbridge_hf) and getattr(kvbridge_hf, name).__module__.startswith("kvbridge_hf.")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvbridge_hf.nothing  # noqa: B018
    heavy = ["calibration", "evaluation", "session", "mappers", "cli"]
    code = f"import sys, kvbridge_hf; print([m for m in {heavy} if 'kvbridge_hf.' + m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
