"""Sessions: a conversation that moves between models, against each model's own forward over the whole text."""

from __future__ import annotations

import copy
import functools
import json
from contextlib import nullcontext

import pytest
import torch
from handoff_reference import random_mapper, row_states
from models import tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import DynamicCache, PreTrainedTokenizerFast

from kvbridge_hf import HandoffPolicy, KVBridgeMapper
from kvbridge_hf.cache_argument import cache_kwargs
from kvbridge_hf.errors import ArtifactError, FingerprintError, GenerateArgumentError
from kvbridge_hf.guard import Gates
from kvbridge_hf.session import HandoffSession

TEMPLATE = (
    "<bos>{% for message in messages %} <{{ message['role'] }}> {{ message['content'] }} <end>{% endfor %}"
    "{% if add_generation_prompt %} <assistant>{% endif %}"
)


@functools.cache
def tokenizer():
    special = ["<pad>", "<bos>", "<end>", "<system>", "<user>", "<assistant>"]
    vocab = {word: index for index, word in enumerate(special + [f"w{index}" for index in range(90)])}
    core = Tokenizer(WordLevel(vocab, unk_token="w0"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<end>", chat_template=TEMPLATE
    )


@functools.cache
def models():
    """Two models with one cache shape; `mappers` says what turns one's into the other's."""
    return {"small": tiny_model("qwen3", num_layers=2), "large": tiny_model("llama", num_layers=3, seed=1)}


@functools.cache
def mappers():
    small, large = models()["small"], models()["large"]
    return {
        ("small", "large"): random_mapper(small, large, num_sinks=2, num_native_suffix=3),
        ("large", "small"): random_mapper(large, small, num_sinks=2, num_native_suffix=3, seed=1),
    }


def text(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{index}" for index in torch.randint(0, 90, (count,), generator=generator).tolist())


def twins():
    """Two equal models with an exact mapper between them: a handoff changes nothing."""
    model = tiny_model("qwen3", num_layers=2)
    exact = KVBridgeMapper.identity(model)
    return {"small": model, "large": copy.deepcopy(model)}, {("small", "large"): exact, ("large", "small"): exact}


@torch.no_grad()
def own_entries(model, ids):
    cache = DynamicCache()
    model(ids, **cache_kwargs(cache))
    return [(layer.keys, layer.values) for layer in cache.layers]


@torch.no_grad()
def greedy(model, ids, count):
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return out[0, ids.shape[1] :].tolist()


def render(messages, prompt=True):
    rendered = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    return torch.tensor([tokenizer()(rendered, add_special_tokens=False)["input_ids"]])


def assert_native(session, name, columns):
    """Columns of a model's cache equal its own forward over the tokens."""
    ids = session.input_ids
    own = own_entries(session.models[name], ids)
    for layer, (keys, values) in zip(session.cache_of(name).layers, own, strict=True):
        torch.testing.assert_close(layer.keys[:, :, columns], keys[:, :, columns], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer.values[:, :, columns], values[:, :, columns], rtol=1e-4, atol=1e-4)


def test_switches_between_equal_models_change_no_token():
    pair, exact = twins()
    session = HandoffSession(pair, exact, tokenizer())
    messages = []
    for turn, name in enumerate(["small", "large", "large", "small", "large"]):
        session.send("user", text(9, turn))
        messages.append({"role": "user", "content": text(9, turn)})
        expected = greedy(pair["small"], render(messages), 4)
        answer = session.generate(name, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert answer == tokenizer().decode(expected, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
    assert session.messages == messages
    mapped = [report.tokens_mapped for report in session.reports]
    # The first turn has no one to map from, the third stays with its model.
    assert mapped[0] == 0 and mapped[1] > 0 and mapped[2] == 0 and mapped[3] > 0 and mapped[4] > 0


@pytest.mark.parametrize("repaired", [True, False])
def test_what_was_mapped_in_earlier_turns_is_repaired_for_the_question_of_this_one(repaired):
    """With every token recomputed the history is the model's own; without it stays as it was mapped."""
    session = HandoffSession(models(), mappers(), tokenizer(), repair_history=repaired)
    session.send("user", text(20))
    session.catch_up("small")
    session.catch_up("large")
    held = session.spans("large")[1]
    assert held.origin == "small" and session.reports[-1].tokens_repaired == 0
    before = [(layer.keys.clone(), layer.values.clone()) for layer in session.cache_of("large").layers]
    branch = session.branch()
    session.policy = HandoffPolicy(native_fraction=1.0, repair="question")
    session.send("user", text(6, 1))
    session.catch_up("small")
    report = session.catch_up("large")
    columns = slice(held.start, held.stop)
    if repaired:
        assert report.tokens_repaired == held.stop - held.start
        assert_native(session, "large", columns)
    else:
        assert report.tokens_repaired == 0
    for caches in (session, branch):
        for (keys, values), layer in zip(before, caches.cache_of("large").layers, strict=True):
            # The branch shares the tensors, and keeps them as they were.
            same = torch.equal(layer.keys[:, :, columns], keys[:, :, columns])
            same &= torch.equal(layer.values[:, :, columns], values[:, :, columns])
            assert same == (caches is branch or not repaired)


def test_the_part_of_the_history_that_a_question_asks_for_is_repaired():
    session = HandoffSession(models(), mappers(), tokenizer(), HandoffPolicy(question_tokens=6))
    words = [f"w{index}" for index in range(40)]
    session.send("user", " ".join(words))
    session.catch_up("small")
    session.catch_up("large")
    before = session.cache_of("large").layers[2].values.clone()
    session.policy = HandoffPolicy(native_fraction=0.25, repair="question", question_tokens=6)
    session.send("user", "w71 w72 w73 w20")
    session.catch_up("small")
    report = session.catch_up("large")
    after = session.cache_of("large").layers[2].values[:, :, : before.shape[2]]
    changed = (after != before).any(3).any(1)[0].nonzero()[:, 0].tolist()
    asked = session.input_ids[0].tolist().index(tokenizer().convert_tokens_to_ids("w20"))
    assert len(changed) == report.tokens_repaired > 0 and asked in changed
    # The question has the end of a message in common with the history, too.
    end = session.input_ids[0].tolist().index(tokenizer().convert_tokens_to_ids("<end>"))
    assert all(min(abs(column - asked), abs(column - end)) <= 8 for column in changed)


def test_only_what_the_target_lacks_is_mapped_and_its_own_stays_native():
    session = HandoffSession(models(), mappers(), tokenizer())
    session.send("user", text(20))
    session.catch_up("large")
    own = session.spans("large")[-1].stop
    assert own == session.input_ids.shape[1] - 1 and session.spans("large")[0].origin is None
    session.catch_up("small")  # from large
    session.send("assistant", text(12, 1))
    session.send("user", text(15, 2))
    session.catch_up("small")
    report = session.catch_up("large")
    assert (report.source, report.status) == ("small", "ok")
    total = session.input_ids.shape[1]
    # Large's first tokens stay; small's others are mapped, but for the native suffix.
    common = report.tokens_kept
    assert report.tokens_mapped == total - 3 - common
    assert report.tokens_native == 2 and report.tokens_kept + report.tokens_mapped + report.tokens_native == total - 1
    assert [(span.start, span.stop, span.origin) for span in session.spans("large")] == [
        (0, common, None),
        (common, total - 3, "small"),
        (total - 3, total - 1, None),
    ]
    assert_native(session, "large", slice(0, common))


def test_mapped_columns_are_the_map_of_what_the_source_read():
    session = HandoffSession(models(), mappers(), tokenizer())
    session.send("user", text(25))
    session.catch_up("small")
    report = session.catch_up("large")
    ids = session.input_ids
    stop = ids.shape[1] - 3
    keys, values = row_states(
        models()["small"], models()["large"], mappers()["small", "large"], ids[0].tolist(), stop, 2
    )
    assert report.tokens_mapped == stop - 2
    for layer, key, value in zip(session.cache_of("large").layers, keys, values, strict=True):
        torch.testing.assert_close(layer.keys[0, :, :stop], key, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(layer.values[0, :, :stop], value, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("change", ["edit", "truncate"])
def test_changes_of_the_history_crop_every_cache(change):
    session = HandoffSession(models(), mappers(), tokenizer())
    for turn in range(3):
        session.send("user", text(10, turn))
        session.generate("small" if turn % 2 else "large", max_new_tokens=3, do_sample=False, pad_token_id=0)
    before = session.input_ids[0].tolist()
    if change == "edit":
        session.edit(2, text(10, 77))
    else:
        session.truncate(2)
    after = session.input_ids[0].tolist()
    common = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    assert 0 < common < len(before)
    for name in ("small", "large"):
        length = session.cache_of(name).get_seq_length()
        assert length <= common and session.spans(name)[-1].stop == length
    if change == "truncate":
        session.send("user", text(10, 78))
    answer = session.generate("large", max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert session.messages[-1] == {"role": "assistant", "content": answer}
    native = [span for span in session.spans("large") if span.origin is None]
    assert_native(session, "large", slice(native[0].start, native[0].stop))


def test_branches_do_not_reach_each_other():
    session = HandoffSession(models(), mappers(), tokenizer())
    session.send("user", text(12))
    session.generate("small", max_new_tokens=3, do_sample=False, pad_token_id=0)
    other = session.branch()
    held = [layer.keys.clone() for layer in session.cache_of("small").layers]
    other.send("user", text(8, 5))
    other.generate("small", max_new_tokens=3, do_sample=False, pad_token_id=0)
    other.edit(0, text(4, 6))
    assert len(session.messages) == 2 and len(other.messages) == 4
    for layer, keys in zip(session.cache_of("small").layers, held, strict=True):
        torch.testing.assert_close(layer.keys, keys, rtol=0, atol=0)
    # The branched-off session goes on as if the other had never been.
    session.send("user", text(7, 9))
    assert session.generate("small", max_new_tokens=3, do_sample=False, pad_token_id=0) == tokenizer().decode(
        greedy(models()["small"], render(session.messages[:-1]), 3), skip_special_tokens=True
    )


def test_resync_every_second_switch_reads_the_mapped_tokens_again():
    session = HandoffSession(models(), mappers(), tokenizer(), resync="every 2")
    session.send("user", text(20))
    session.catch_up("small")
    assert session.catch_up("large").tokens_mapped > 0
    session.send("assistant", text(6, 1))
    session.send("user", text(20, 2))
    session.catch_up("small")
    report = session.catch_up("large")
    assert report.resync and report.tokens_mapped == 0
    assert report.tokens_kept == 2  # the sinks were native
    assert {span.origin for span in session.spans("large")} == {None}
    assert_native(session, "large", slice(0, session.input_ids.shape[1] - 1))


def test_resync_on_gate_and_a_rejection_without_it():
    """With it everything mapped is read again; without, only what the rejected handoff would have brought."""
    answers = iter([True, False, True, False])
    policy = HandoffPolicy(on_failure="prefill", gates=Gates(accept=lambda cache, report: next(answers)))
    for resync in ("on gate", "never"):
        session = HandoffSession(
            models(), {("small", "large"): mappers()["small", "large"]}, tokenizer(), policy, resync=resync
        )
        session.send("user", text(20))
        session.catch_up("small")
        assert session.catch_up("large").status == "ok"
        session.send("user", text(20, 2))
        session.catch_up("small")
        with pytest.warns(UserWarning) if resync == "never" else nullcontext():
            report = session.catch_up("large")
        assert report.status == "fallback" and "accept" in report.reason and report.tokens_mapped == 0
        assert report.resync == (resync == "on gate")
        mapped = [span for span in session.spans("large") if span.origin == "small"]
        assert bool(mapped) == (resync == "never")
        if not mapped:
            assert_native(session, "large", slice(0, session.input_ids.shape[1] - 1))


def test_saved_sessions_come_back_and_refuse_what_does_not_belong(tmp_path):
    session = HandoffSession(models(), mappers(), tokenizer())
    session.send("user", text(15))
    session.generate("small", max_new_tokens=3, do_sample=False, pad_token_id=0)
    session.send("user", text(9, 1))
    session.catch_up("large")
    session.save(tmp_path / "s")
    restored = HandoffSession.load(tmp_path / "s", models(), mappers(), tokenizer())
    assert restored.messages == session.messages and restored.spans("large") == session.spans("large")
    for name in ("small", "large"):
        for one, two in zip(session.cache_of(name).layers, restored.cache_of(name).layers, strict=True):
            torch.testing.assert_close(one.keys, two.keys, rtol=0, atol=0)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert restored.generate("large", **settings) == session.generate("large", **settings)

    others = {**models(), "large": tiny_model("llama", num_layers=3, seed=5)}
    with pytest.raises(FingerprintError, match="large"):
        HandoffSession.load(tmp_path / "s", others, {}, tokenizer())
    facts = json.loads((tmp_path / "s" / "session.json").read_text())
    facts["tokens"][3] += 1
    (tmp_path / "s" / "session.json").write_text(json.dumps(facts))
    with pytest.raises(ArtifactError, match="hash"):
        HandoffSession.load(tmp_path / "s", models(), mappers(), tokenizer())
    session.save(tmp_path / "s")
    caches = tmp_path / "s" / "caches.safetensors"
    damaged = bytearray(caches.read_bytes())
    damaged[-1] ^= 1
    caches.write_bytes(bytes(damaged))
    with pytest.raises(ArtifactError, match="hash"):
        HandoffSession.load(tmp_path / "s", models(), mappers(), tokenizer())
    with pytest.raises(ArtifactError):
        HandoffSession.load(tmp_path / "none", models(), mappers(), tokenizer())


def test_streamed_pieces_are_the_answer_and_an_abandoned_stream_ends():
    session = HandoffSession(models(), mappers(), tokenizer())
    session.send("user", text(12))
    twin = session.branch()
    pieces = list(session.stream("large", max_new_tokens=6, do_sample=False, pad_token_id=0))
    assert len(pieces) > 1
    assert "".join(pieces).strip() == twin.generate("large", max_new_tokens=6, do_sample=False, pad_token_id=0)
    session.send("user", text(5, 1))
    stream = session.stream("large", max_new_tokens=200, do_sample=False, pad_token_id=0)
    next(stream)
    stream.close()
    assert len(session.messages) == 4 and len(session.messages[-1]["content"].split()) < 200
    broken = session.stream("nobody", max_new_tokens=3)
    with pytest.raises(GenerateArgumentError, match="nobody"):
        list(broken)


def test_a_failing_generation_leaves_the_session_as_it_was():
    session = HandoffSession(models(), mappers(), tokenizer())
    session.send("user", text(12))
    session.catch_up("small")

    def explode(ids, scores, **kwargs):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        session.generate("small", max_new_tokens=6, do_sample=False, pad_token_id=0, stopping_criteria=[explode])
    assert len(session.messages) == 1
    assert_native(session, "small", slice(0, session.cache_of("small").get_seq_length()))
    expected = greedy(models()["small"], render(session.messages), 3)
    answer = session.generate("small", max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert answer == tokenizer().decode(expected, skip_special_tokens=True)


def test_switches_are_told_and_arguments_checked():
    events = []
    policy = HandoffPolicy(on_failure="prefill", on_event=events.append)
    session = HandoffSession(models(), mappers(), tokenizer(), policy)
    with pytest.raises(GenerateArgumentError, match="send"):
        session.generate("small")
    session.send("user", text(12))
    session.catch_up("small")
    session.catch_up("large")
    switches = [event for event in events if event["event"] == "switch"]
    assert [(event["source"], event["target"]) for event in switches] == [(None, "small"), ("small", "large")]
    assert switches[1]["tokens_mapped"] > 0 and json.dumps(events)
    with pytest.raises(GenerateArgumentError, match="num_beams"):
        session.generate("small", num_beams=2)
    with pytest.raises(GenerateArgumentError, match="resync"):
        HandoffSession(models(), mappers(), tokenizer(), resync="sometimes")
    with pytest.raises(GenerateArgumentError, match="medium"):
        HandoffSession(models(), {("small", "medium"): mappers()["small", "large"]}, tokenizer())
    plain = copy.deepcopy(tokenizer())
    plain.chat_template = None
    with pytest.raises(GenerateArgumentError, match="render"):
        HandoffSession(models(), mappers(), plain)
