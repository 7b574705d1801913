"""generate(bridge=...) against plain generate on a mapped cache that was built by hand."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
import threading

import pytest
import torch
from handoff_reference import PAD, batch, pair, positions_of, random_mapper, reference_cache
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import (
    AutoModelForSeq2SeqLM,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    PreTrainedTokenizerFast,
    QuantizedCache,
    StaticCache,
    StoppingCriteriaList,
    T5Config,
    pipeline,
)

import kvbridge_hf
from kvbridge_hf import BridgedCache, HandoffFallbackWarning, HandoffPolicy, KVBridge, KVBridgeMapper, generate_hook
from kvbridge_hf.cache_argument import CACHE_ARG, cache_kwargs, output_cache
from kvbridge_hf.errors import FingerprintError, GenerateArgumentError, KVBridgeError, PairMismatchError

pytestmark = pytest.mark.core

PAIRS = [("llama", "qwen3"), ("qwen3", "llama"), ("qwen3", "mistral")]
NEW = 9

MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"num_beams": 3, "do_sample": False},
    "beam sampling": {"num_beams": 2, "do_sample": True},
    "returned beams": {"num_beams": 4, "num_return_sequences": 2, "do_sample": False},
    "returned samples": {"num_return_sequences": 3, "do_sample": True},
    "processors": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[7]]},
    "eos": {"do_sample": False, "eos_token_id": list(range(3, 40))},
    "length": {"do_sample": False, "max_new_tokens": None, "max_length": 24},
    "config": {
        "generation_config": GenerationConfig(do_sample=True, top_p=0.7, max_new_tokens=NEW, pad_token_id=PAD),
        "max_new_tokens": None,
    },
}


def expansion(mode):
    return max(mode.get("num_beams", 1), mode.get("num_return_sequences", 1))


def by_hand(models, ids, mask, *, num_sinks=0, suffix=1, **mode):
    """Plain generate on a hand-made cache; `mask` pads on the left."""
    source, target, mapper = models
    cache = reference_cache(source, target, mapper, ids, mask, ids.shape[1] - suffix, num_sinks)
    cache.batch_repeat_interleave(expansion(mode))
    return run(target, ids, mask, **cache_kwargs(cache), **mode)


def run(target, ids, mask=None, **kwargs):
    kwargs = {"max_new_tokens": NEW, "pad_token_id": PAD, **kwargs}
    if kwargs["max_new_tokens"] is None:
        del kwargs["max_new_tokens"]
    if "generation_config" in kwargs:
        del kwargs["pad_token_id"]
    torch.manual_seed(11)
    return target.generate(ids, attention_mask=mask, **kwargs)


@pytest.fixture(scope="module")
def models():
    return pair("qwen3", "llama")


@pytest.fixture
def bridge(models):
    return KVBridge(*models[::2], HandoffPolicy(num_sinks=0))


@pytest.fixture(scope="module")
def tokenizer():
    """One token a character: the 93 printable ones of ASCII after the space."""
    vocab = {token: index for index, token in enumerate(["<pad>", "<unk>", "<bos>", *map(chr, range(33, 126))])}
    characters = Tokenizer(BPE(vocab, [], unk_token="<unk>"))
    characters.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>", padding_side="left"
    )


# --- decoding modes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("archs", PAIRS, ids="->".join)
def test_tokens_equal_plain_generate(archs, mode):
    models = pair(*archs)
    ids, mask = batch([14, 6, 10])
    bridge = KVBridge(*models[::2], HandoffPolicy(num_sinks=2))
    expected = by_hand(models, ids, mask, num_sinks=2, **MODES[mode])
    got = run(models[1], ids, mask, bridge=bridge, **MODES[mode])
    assert torch.equal(got, expected)
    assert bridge.last_report.status == "ok" and bridge.last_report.tokens_mapped == 30 - 3 * 2 - 3


@pytest.mark.parametrize("suffix", [1, 4, 13])
@pytest.mark.parametrize("num_sinks", [0, 4])
def test_native_parts(models, num_sinks, suffix):
    ids, mask = batch([14, 6, 10])
    bridge = KVBridge(*models[::2], HandoffPolicy(num_sinks=num_sinks, num_native_suffix=suffix))
    expected = by_hand(models, ids, mask, num_sinks=num_sinks, suffix=suffix)
    assert torch.equal(run(models[1], ids, mask, bridge=bridge), expected)


def test_the_mapper_says_what_is_native_by_default(models):
    source, target, _ = models
    mapper = random_mapper(source, target, num_sinks=3, num_native_suffix=5)
    ids, mask = batch([14, 10])
    expected = by_hand((source, target, mapper), ids, mask, num_sinks=3, suffix=5)
    assert torch.equal(run(target, ids, mask, bridge=KVBridge(source, mapper)), expected)


@pytest.mark.parametrize("mode", ["greedy", "sampling", "beams"])
@pytest.mark.parametrize("cache", ["static", "static with chunks", "chunks"])
def test_static_cache_and_chunks(models, bridge, mode, cache):
    ids, mask = batch([14, 6, 10])
    settings = {}
    if "static" in cache:
        settings["cache_implementation"] = "static"
    suffix = 1
    if "chunks" in cache:
        suffix, settings["prefill_chunk_size"] = 8, 3
        bridge = KVBridge(*models[::2], HandoffPolicy(num_sinks=0, num_native_suffix=suffix))
    expected = by_hand(models, ids, mask, suffix=suffix, **MODES[mode])
    got = run(models[1], ids, mask, bridge=bridge, return_dict_in_generate=True, **settings, **MODES[mode])
    assert torch.equal(got.sequences, expected)
    assert isinstance(output_cache(got), StaticCache if "static" in cache else BridgedCache)


@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_scores_cache_and_report_on_the_output(models, bridge, mode):
    ids, mask = batch([14, 6, 10])
    settings = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, **MODES[mode]}
    expected = by_hand(models, ids, mask, **settings)
    got = run(models[1], ids, mask, bridge=bridge, **settings)
    assert type(got) is type(expected)
    for name in ("scores", "logits"):
        for ours, theirs in zip(getattr(got, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-5)
    assert output_cache(got).get_seq_length() == 14 + NEW - 1
    assert got.handoff_report is bridge.last_report is not None
    assert got.handoff_report.times.keys() == {"source_prefill", "map"}
    assert got.handoff_report.tokens_mapped == 27 and got.handoff_report.tokens_native == 3


def test_padding_of_any_side_gives_the_single_rows(models, bridge):
    target = models[1]
    lengths = [14, 6, 1, 10]
    rows = {}
    for side in ("left", "right", "mixed"):
        ids, mask = batch(lengths, side=side)
        got = run(target, ids, mask, bridge=bridge, output_logits=True, return_dict_in_generate=True)
        assert torch.equal(got.sequences[:, :14], ids)  # the caller's columns, wherever the padding stands
        for row, length in enumerate(lengths):
            single = ids[row, mask[row].bool()][None]
            alone = run(target, single, bridge=bridge, output_logits=True, return_dict_in_generate=True)
            assert torch.equal(got.sequences[row, 14:], alone.sequences[0, length:])
            for ours, theirs in zip(got.logits, alone.logits, strict=True):
                torch.testing.assert_close(ours[row], theirs[0], rtol=1e-5, atol=1e-5)
            rows.setdefault(row, []).append(got.sequences[row, 14:])
    assert all(torch.equal(tokens[0], other) for tokens in rows.values() for other in tokens[1:])


@pytest.mark.parametrize("mode", ["greedy", "returned beams", "returned samples"])
def test_right_padding_is_turned(models, bridge, mode):
    """Also where generate itself infers the mask from the pad token."""
    left_ids, left_mask = batch([14, 6, 10])
    ids, mask = batch([14, 6, 10], side="right")
    expected = by_hand(models, left_ids, left_mask, **MODES[mode])
    returned = MODES[mode].get("num_return_sequences", 1)
    for given in (mask, None):
        got = run(models[1], ids, given, bridge=bridge, **MODES[mode])
        assert torch.equal(got[:, 14:], expected[:, 14:])
        assert torch.equal(got[:, :14], ids.repeat_interleave(returned, 0))


def test_a_prompt_of_one_token(models, bridge):
    ids = torch.tensor([[5], [9]])
    assert torch.equal(run(models[1], ids, bridge=bridge), run(models[1], ids))
    assert bridge.last_report.status == "ok" and bridge.last_report.tokens_mapped == 0
    assert bridge.last_report.tokens_native == 2


@pytest.mark.parametrize("kind", ["prompt lookup", "assistant"])
@pytest.mark.parametrize("length", [2, 23])
def test_assisted_decoding(models, bridge, kind, length):
    ids, mask = batch([length])
    ids[0, length // 2 :] = ids[0, : length - length // 2].clone()  # something to look up
    expected = by_hand(models, ids, mask, max_new_tokens=20, do_sample=False)
    target = models[1]
    settings = {"prompt_lookup_num_tokens": 3} if kind == "prompt lookup" else {"assistant_model": assistant(target)}
    lengths = []
    handle = target.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    got = run(target, ids, mask, bridge=bridge, max_new_tokens=20, do_sample=False, **settings)
    handle.remove()
    assert torch.equal(got, expected)
    assert max(lengths) < 23  # the target never read the prompt again


def assistant(target):
    """The target with a little noise: right often, not always."""
    model = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.lm_head.weight.add_(0.1 * torch.randn(model.lm_head.weight.shape, generator=generator))
    model.generation_config.num_assistant_tokens = 4
    model.generation_config.num_assistant_tokens_schedule = "constant"
    return model


def test_streamer_stopping_criteria_and_stop_strings(models, bridge, tokenizer):
    source, target, mapper = models

    class Streamer:
        def __init__(self):
            self.tokens, self.ended = [], 0

        def put(self, value):
            self.tokens += value.reshape(-1).tolist()

        def end(self):
            self.ended += 1

    ids, mask = batch([12])
    plain = by_hand(models, ids, mask, max_new_tokens=20)
    streamer = Streamer()
    got = run(target, ids, mask, bridge=bridge, max_new_tokens=20, streamer=streamer)
    assert torch.equal(got, plain) and streamer.tokens == plain[0].tolist() and streamer.ended == 1

    word = tokenizer.convert_ids_to_tokens(int(plain[0, 15]))
    stopped = run(target, ids, mask, bridge=bridge, max_new_tokens=20, stop_strings=[word], tokenizer=tokenizer)
    first = plain[0, 12:].tolist().index(int(plain[0, 15]))
    assert torch.equal(stopped, plain[:, : 12 + first + 1])
    config = GenerationConfig(max_new_tokens=20, stop_strings=[word], pad_token_id=PAD)
    settings = {"generation_config": config, "tokenizer": tokenizer, "max_new_tokens": None}
    assert torch.equal(run(target, ids, mask, bridge=bridge, **settings), stopped) and config.stop_strings == [word]
    with pytest.raises(ValueError, match="tokenizer"):  # as plain generate says it
        run(target, ids, mask, bridge=bridge, stop_strings=[word])

    criteria = StoppingCriteriaList([lambda tokens, scores, **_: torch.full((1,), tokens.shape[1] >= 17)])
    assert run(target, ids, mask, bridge=bridge, stopping_criteria=criteria).shape[1] == 17
    processors = LogitsProcessorList([MinNewTokensLengthLogitsProcessor(12, 6, list(range(3, 96)), device="cpu")])
    settings = {"logits_processor": processors, "eos_token_id": list(range(3, 96))}
    assert torch.equal(run(target, ids, mask, bridge=bridge, **settings), by_hand(models, ids, mask, **settings))
    with pytest.raises(ValueError, match="streamer"):  # as plain generate says it
        run(target, ids, mask, bridge=bridge, num_beams=2, streamer=streamer)


def test_the_text_generation_pipeline(models, bridge, tokenizer):
    source, target, mapper = models
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer)
    texts = ["abcdef", "xyz"]
    settings = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
    batched = pipe(texts, batch_size=2, bridge=bridge, **settings)
    assert bridge.last_report.tokens_mapped == 7
    for text, answer in zip(texts, batched, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        expected = by_hand(models, ids, torch.ones_like(ids), max_new_tokens=5, do_sample=False)
        assert answer[0]["generated_text"] == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_custom_generate_callable_gets_the_handed_over_cache(models, bridge):
    seen = {}

    def custom(model, input_ids, logits_processor, stopping_criteria, generation_config, flavour=None, **model_kwargs):
        cache = model_kwargs[CACHE_ARG]
        seen.update(flavour=flavour, length=cache.get_seq_length())
        return type(model)._sample(
            model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
        )

    ids, mask = batch([12, 7])
    got = run(models[1], ids, mask, bridge=bridge, custom_generate=custom, flavour="plain")
    assert torch.equal(got, by_hand(models, ids, mask)) and seen == {"flavour": "plain", "length": 11}


def test_inference_mode_and_autocast(models, bridge):
    ids, mask = batch([12, 7], side="right")
    with torch.inference_mode():
        inside = run(models[1], ids, mask, bridge=bridge)
    assert torch.equal(inside, run(models[1], ids, mask, bridge=bridge))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = run(models[1], ids, mask, bridge=bridge, return_dict_in_generate=True)
        plain = run(models[1], *batch([12, 7]), return_dict_in_generate=True)
    ours, theirs = output_cache(out).layers[2].keys, output_cache(plain).layers[2].keys
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_source_and_target_of_different_dtypes(models, dtypes):
    source, target, mapper = (copy.deepcopy(model) for model in models)
    source, target = source.to(dtypes[0]), target.to(dtypes[1])
    ids, mask = batch([12, 7])
    bridge = KVBridge(source, mapper, HandoffPolicy(num_sinks=2))
    out = run(target, ids, mask, bridge=bridge, return_dict_in_generate=True)
    assert output_cache(out).layers[0].keys.dtype == dtypes[1]
    # The first mapped entry depends on the source's rounding alone.
    exact = KVBridge(models[0], models[2], HandoffPolicy(num_sinks=2)).handoff(ids, mask, target_model=models[1])
    torch.testing.assert_close(
        output_cache(out).layers[0].keys[:, :, :11].float(), exact.layers[0].keys, rtol=0.1, atol=0.1
    )


# --- source caches and caches of the target


def read(model, ids, mask):
    with torch.no_grad():
        return output_cache(model(ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=True))


@pytest.mark.parametrize("mode", ["greedy", "sampling", "returned beams"])
def test_source_cache_handed_in(models, bridge, mode):
    source, target, _ = models
    ids, mask = batch([14, 6, 10])
    expected = by_hand(models, ids, mask, **MODES[mode])
    calls = []
    handle = source.register_forward_pre_hook(lambda *_: calls.append(1))
    for columns in (14, 13):
        cache = read(source, ids[:, :columns], mask[:, :columns])
        calls.clear()
        assert torch.equal(run(target, ids, mask, bridge=bridge, source_cache=cache, **MODES[mode]), expected)
        assert not calls and cache.get_seq_length() == columns
    handle.remove()


def test_prompt_longer_than_the_source_cache(models, bridge):
    source, target, _ = models
    ids, mask = batch([14, 9])
    cache = read(source, ids[:, :8], mask[:, :8])
    assert torch.equal(run(target, ids, mask, bridge=bridge, source_cache=cache), by_hand(models, ids, mask, suffix=6))
    assert bridge.last_report.tokens_native == 12 and bridge.last_report.tokens_mapped == 11


def test_the_source_has_gone_on_after_the_prompt(models, bridge):
    """A router's case: the small model has answered, and the large one answers again from the prompt."""
    source, target, _ = models
    ids, mask = batch([14, 9])
    answered = run(source, ids, mask, return_dict_in_generate=True)
    got = run(target, ids, mask, bridge=bridge, source_cache=output_cache(answered))
    assert torch.equal(got, by_hand(models, ids, mask))
    assert "not used" in bridge.last_report.notes[0]


@pytest.mark.parametrize("longer", [0, 3])
def test_source_cache_of_a_right_padded_batch(models, bridge, longer):
    source, target, _ = models
    left_ids, left_mask = batch([14, 6, 10])
    ids, mask = batch([14, 6, 10], side="right")
    source_ids = torch.cat([ids, torch.full((3, longer), 7)], 1)
    cache = read(source, source_ids, torch.cat([mask, mask.new_ones(3, longer)], 1))
    expected = by_hand(models, left_ids, left_mask)
    for given in (mask, None):
        got = run(target, ids, given, bridge=bridge, source_cache=cache)
        assert torch.equal(got[:, 14:], expected[:, 14:])
    explicit = {"source_cache": read(source, ids, mask), "source_attention_mask": mask}
    assert torch.equal(run(target, left_ids, left_mask, bridge=bridge, **explicit), expected)


@pytest.mark.parametrize("filled", [0, 8])
def test_a_cache_of_the_target_is_filled_in_place(models, bridge, filled):
    """Target-native tokens in front (0: an empty cache that the caller keeps)."""
    source, target, mapper = models
    ids, mask = batch([14, 9])
    own = DynamicCache() if filled == 0 else read(target, ids[:, :filled], mask[:, :filled])
    by_parts = copy.deepcopy(own)
    rest = reference_cache(source, target, mapper, ids, mask, 13)
    for layer in range(4):
        rest_layer = rest.layers[layer]
        by_parts.update(rest_layer.keys[:, :, filled:], rest_layer.values[:, :, filled:], layer)
    expected = run(target, ids, mask, **cache_kwargs(by_parts))
    got = run(target, ids, mask, bridge=bridge, **cache_kwargs(own))
    assert torch.equal(got, expected) and own.get_seq_length() == 14 + NEW - 1


def test_several_turns_in_a_batch_of_unequal_rows(models, bridge):
    """A returned cache goes on with plain generate, which runs the new columns only (transformers 34232, 38727)."""
    source, target, mapper = models
    ids, mask = batch([14, 6, 10])
    first = run(target, ids, mask, bridge=bridge, return_dict_in_generate=True)
    by_hand_first = by_hand(models, ids, mask, return_dict_in_generate=True)
    follow, _ = batch([5, 5, 5], seed=3)
    turn = torch.cat([first.sequences, follow], 1)
    turn_mask = torch.cat([mask, mask.new_ones(3, NEW + 5)], 1)
    lengths = []
    handle = target.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    held = copy.deepcopy(output_cache(first))
    second = run(target, turn, turn_mask, **cache_kwargs(output_cache(first)))
    handle.remove()
    assert lengths == [6] + [1] * (NEW - 1)
    assert torch.equal(second, run(target, turn, turn_mask, **cache_kwargs(output_cache(by_hand_first))))
    # And with the bridge again, what the source has read meanwhile is appended behind what the target holds.
    third_ids = torch.cat([turn, batch([7, 7, 7], seed=4)[0]], 1)
    third_mask = torch.cat([turn_mask, turn_mask.new_ones(3, 7)], 1)
    run(target, third_ids, third_mask, bridge=bridge, **cache_kwargs(held))
    assert bridge.last_report.tokens_mapped == 3 * (third_ids.shape[1] - 1 - (14 + NEW - 1))


def test_quantised_cache(models, bridge):
    ids, mask = batch([14, 9])
    if "fp8" not in (inspect.getdoc(QuantizedCache) or ""):
        pytest.skip("this Transformers has no quantised cache without further packages")
    config = {"backend": "fp8"}
    source, target, mapper = models
    rest = reference_cache(source, target, mapper, ids, mask, 13)
    quantised = QuantizedCache(backend="fp8", config=target.config)
    for layer in range(4):
        quantised.update(rest.layers[layer].keys, rest.layers[layer].values, layer)
    expected = run(target, ids, mask, **cache_kwargs(quantised))
    got = run(target, ids, mask, bridge=bridge, cache_implementation="quantized", cache_config=config)
    assert torch.equal(got, expected)


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
    from kvbridge_hf import generation_kvbridge

    calls = []
    check = generation_kvbridge.check_fingerprint
    monkeypatch.setattr(
        generation_kvbridge, "check_fingerprint", lambda *args: (calls.append(args[-1]), check(*args))[1]
    )
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


def test_threads_share_a_bridge(models):
    source, target, mapper = models
    bridge = KVBridge(source, mapper, HandoffPolicy(num_sinks=2))
    prompts = [batch([4 + index, 3 + 2 * index], seed=index) for index in range(8)]
    expected = [run(target, *prompt, bridge=bridge) for prompt in prompts]
    bridge = KVBridge(source, mapper, HandoffPolicy(num_sinks=2))  # the target's check is raced for, too
    results, barrier = {}, threading.Barrier(8)

    def work(index):
        barrier.wait()
        for _ in range(2):
            tokens = target.generate(
                prompts[index][0],
                attention_mask=prompts[index][1],
                bridge=bridge,
                max_new_tokens=NEW,
                pad_token_id=PAD,
            )
            results[index] = (tokens, bridge.last_report.tokens_mapped + bridge.last_report.tokens_native)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(8):
        assert torch.equal(results[index][0], expected[index])
        assert results[index][1] == int(prompts[index][1].sum())
