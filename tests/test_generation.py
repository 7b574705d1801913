"""generate(bridge=...) in every decoding mode, against plain generate on a mapped cache that was built by hand."""

from __future__ import annotations

import shutil
import threading
from unittest import mock

import pytest
import torch
from generate_by_hand import MODES, NEW, PAIRS, assistant, by_hand, character_tokenizer, forward_lengths, run
from handoff_reference import PAD, batch, pair, random_mapper
from transformers import (
    CompileConfig,
    GenerationConfig,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    StaticCache,
    StoppingCriteriaList,
    pipeline,
)

from kvbridge_hf import BridgedCache, HandoffPolicy, KVBridge
from kvbridge_hf.cache_argument import CACHE_ARG, output_cache

pytestmark = pytest.mark.core


@pytest.fixture(scope="module", params=PAIRS, ids="->".join)
def models(request):
    return pair(*request.param)


@pytest.fixture
def bridge(models):
    return KVBridge(*models[::2], HandoffPolicy(num_sinks=0))


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


# --- decoding modes


@pytest.mark.parametrize("mode", MODES)
def test_tokens_equal_plain_generate(models, mode):
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


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_decode(models, bridge, backend):
    """A static cache is filled before the decoding step is compiled; inductor needs a C++ compiler on a CPU."""
    target = models[1]
    if backend == "inductor":
        if not any(map(shutil.which, ("g++", "clang++", "cl"))):
            pytest.skip("no C++ compiler")
        if target.config.model_type != "llama":
            pytest.skip("one architecture is enough for the compiler; all of them are traced")
    config = CompileConfig(backend=backend, mode="default", dynamic=False)
    config._compile_all_devices = True  # generate() compiles on accelerators only, unless it is told so
    ids, mask = batch([14, 6, 10])
    expected = by_hand(models, ids, mask, **MODES["greedy"])
    torch._dynamo.reset()
    try:
        with mock.patch.object(type(target), "get_compiled_call", autospec=True) as asked:
            asked.side_effect = lambda model, given: torch.compile(model.__call__, **given.to_dict())
            settings = {"cache_implementation": "static", "compile_config": config, **MODES["greedy"]}
            got = run(target, ids, mask, bridge=bridge, **settings)
    finally:
        torch._dynamo.reset()
    assert torch.equal(got, expected) and asked.call_count > 0


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
    lengths, handle = forward_lengths(target)
    got = run(target, ids, mask, bridge=bridge, max_new_tokens=20, do_sample=False, **settings)
    handle.remove()
    assert torch.equal(got, expected)
    assert max(lengths) < 23  # the target never read the prompt again


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
