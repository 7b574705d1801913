"""Geometry read from configs against the caches that models make, and every reason why a pair does not fit."""

from __future__ import annotations

import json

import pytest
import torch
from models import ARCHITECTURES, tiny_config, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, PreTrainedTokenizerFast

from kvbridge_hf.cache_argument import output_cache
from kvbridge_hf.config_facts import decoder_layers
from kvbridge_hf.errors import KVBridgeError, PairMismatchError, UnsupportedModelError
from kvbridge_hf.geometry import KVGeometry, PairCheck, check_pair, text_config


def fields_of(reasons):
    return [reason.field for reason in reasons]


@pytest.mark.parametrize("arch", list(ARCHITECTURES))
def test_geometry_is_that_of_the_cache(arch):
    model = tiny_model(arch, num_layers=2)
    geometry = KVGeometry.from_model(model)
    with torch.no_grad():
        cache = output_cache(model(torch.tensor([[3, 4, 5]]), use_cache=True))
    assert geometry.num_layers == len(cache.layers) == len(decoder_layers(model))
    for layer in cache.layers:
        assert layer.keys.shape == layer.values.shape == (1, geometry.num_kv_heads, 3, geometry.head_dim)
    assert geometry.kv_width == geometry.num_kv_heads * geometry.head_dim
    assert geometry.vocab_size == model.get_input_embeddings().weight.shape[0]
    assert geometry.hidden_size == model.get_input_embeddings().weight.shape[1]
    assert geometry.num_query_heads == 4
    assert set(geometry.layer_types) == {"full_attention"}
    assert geometry.rotary_layers == ((True, False) if arch == "smollm3" else (True, True))
    assert geometry.rotary["interleaved"] is (arch in ("glm", "cohere"))
    assert geometry.rotary["partial_rotary_factor"] == (0.5 if arch in ("glm", "phi3") else 1.0)
    assert geometry == KVGeometry.from_config(model.config) == KVGeometry.of(model) == KVGeometry.of(geometry)


@pytest.mark.parametrize(
    ("model_type", "fields", "kv_heads", "head_dim"),
    [
        ("falcon", {}, 1, 64),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 8}, 8, 64),
        ("gpt_bigcode", {}, 1, 64),
        ("gpt2", {}, 12, 64),
        ("gemma", {}, 16, 256),
        ("gpt_neox", {}, 64, 96),
    ],
)
def test_kv_heads_under_other_names(model_type, fields, kv_heads, head_dim):
    geometry = KVGeometry.from_config(AutoConfig.for_model(model_type, **fields))
    assert (geometry.num_kv_heads, geometry.head_dim) == (kv_heads, head_dim)


def test_rotary_facts():
    llama = KVGeometry.from_config(tiny_config("llama", rope="llama3")).rotary
    assert (llama["rope_type"], llama["rope_theta"], llama["interleaved"]) == ("llama3", 500000.0, False)
    assert llama["scaling"]["factor"] == 8.0
    assert llama["scaling"]["original_max_position_embeddings"] == 1024
    gemma = KVGeometry.from_config(AutoConfig.for_model("gemma3_text")).rotary
    assert gemma["rope_type"] == "per_layer_type"
    assert gemma["per_layer_type"]["full_attention"]["rope_theta"] == 1e6
    assert gemma["per_layer_type"]["sliding_attention"]["rope_theta"] == 1e4
    assert KVGeometry.from_config(AutoConfig.for_model("gpt2")).rotary["rope_type"] == "none"
    # Cohere 2 rotates its sliding layers only.
    cohere = KVGeometry.from_config(AutoConfig.for_model("cohere2"))
    assert cohere.rotary_layers == tuple(name == "sliding_attention" for name in cohere.layer_types)


def test_json_round_trip():
    for config in (tiny_config("smollm3"), tiny_config("glm", rope="yarn"), AutoConfig.for_model("gemma3_text")):
        geometry = KVGeometry.from_config(config)
        assert KVGeometry.from_dict(json.loads(json.dumps(geometry.to_dict()))) == geometry
    data = KVGeometry.from_config(tiny_config("llama")).to_dict()
    with pytest.raises(UnsupportedModelError, match="head_dim.*missing.*'heads'.*unknown"):
        KVGeometry.from_dict({**{k: v for k, v in data.items() if k != "head_dim"}, "heads": 3})


def test_text_part_of_multimodal_wrappers():
    config = AutoConfig.for_model("mistral3", text_config={"model_type": "ministral3", "num_hidden_layers": 7})
    assert text_config(config).model_type == "ministral3"
    geometry = KVGeometry.from_config(config)
    assert (geometry.model_type, geometry.num_layers) == ("ministral3", 7)
    plain = tiny_config("llama")
    assert text_config(plain) is plain


def test_configs_without_one_kv_shape_are_refused():
    with pytest.raises(UnsupportedModelError, match="'mamba' has num_attention_heads=None"):
        KVGeometry.from_config(AutoConfig.for_model("mamba"))
    with pytest.raises(UnsupportedModelError, match="head_dim differs from layer to layer"):
        KVGeometry.from_config(AutoConfig.for_model("gemma4"))
    with pytest.raises(UnsupportedModelError, match="Linear has no Transformers config"):
        KVGeometry.of(torch.nn.Linear(1, 1))


# --- pairs -----------------------------------------------------------------------------------------------------------


def test_a_fitting_pair_has_no_reasons_and_says_what_is_unequal():
    source = tiny_config("qwen3", num_layers=2, num_kv_heads=2, head_dim=16)
    target = tiny_config("llama", num_layers=4, num_kv_heads=4, head_dim=32, rope="llama3")
    check = check_pair(source, target)
    assert check.ok and list(check) == [] and len(check) == 0
    check.raise_if_unfit()
    noted = {note.field: (note.source, note.target) for note in check.notes}
    assert noted["num_layers"] == (2, 4)
    assert noted["num_kv_heads"] == (2, 4)
    assert noted["head_dim"] == (16, 32)
    assert noted["hidden_size"] == (64, 128)
    assert "theta 500000" in noted["rotary"][1] or "theta 5e+05" in noted["rotary"][1]
    assert "tokenizer" in noted  # not compared, and said
    assert check.describe().startswith("The pair fits.\nNotes:\n- rotary")
    assert not check_pair(source, source).notes[1:]  # nothing unequal but the tokenizer that was not compared


def test_models_geometries_and_dicts_are_taken_alike():
    model = tiny_model("qwen3", num_layers=2)
    geometry = KVGeometry.from_model(model)
    assert check_pair(model, model.config) == check_pair(geometry, geometry.to_dict())


PLAIN = {"num_hidden_layers": 4, "vocab_size": 1000}


def config(model_type, **fields):
    return AutoConfig.for_model(model_type, **PLAIN | fields)


@pytest.mark.parametrize(
    ("other", "field", "value", "words", "remedy"),
    [
        (
            config("mistral", sliding_window=64),
            "layer_types",
            "4 x sliding_attention, window 64",
            "do not keep",
            "None",
        ),
        (
            config("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=3),
            "layer_types",
            "3 x full_attention, 1 x sliding_attention, window 64",
            "do not keep",
            "full attention in every layer",
        ),
        (config("gemma2"), "layer_types", "2 x sliding_attention, 2 x full_attention, window 4096", "keep", "full"),
        (config("qwen3_next"), "layer_types", "3 x linear_attention, 1 x full_attention", "do not keep", "full"),
        (config("falcon_h1"), "layer_types", "4 x hybrid", "do not keep", "full"),
        (config("deepseek_v3"), "kv_lora_rank", 512, "compressed cache", "keys and values themselves"),
        (AutoConfig.for_model("bart", vocab_size=1000), "is_encoder_decoder", True, "an encoder", "decoder-only"),
        (AutoConfig.for_model("t5", vocab_size=1000), "is_encoder_decoder", True, "an encoder", "decoder-only"),
        (tiny_config("llama", rope="dynamic", vocab_size=1000), "rotary", "dynamic", "length of the whole", "fixed"),
        (AutoConfig.for_model("gptj", vocab_size=1000), "rotary", "unknown", "not known to depend", "default"),
        (
            AutoConfig.for_model("mamba", vocab_size=1000),
            "config",
            "mamba",
            "num_attention_heads=None",
            "decoder-only",
        ),
        (AutoConfig.for_model("gemma4"), "config", "gemma4", "differs from layer to layer", "decoder-only"),
        (config("llama", vocab_size=9000), "vocab_size", 9000, "different tokenizers", "source_tokenizer"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_reason_names_field_values_and_remedy_on_either_side(other, field, value, words, remedy):
    fine = config("llama")
    for check, role in ((check_pair(other, fine), "source"), (check_pair(fine, other), "target")):
        reasons = [reason for reason in check if reason.field == field]
        assert len(reasons) == 1 and not check.ok, check.describe()
        (reason,) = reasons
        found = getattr(reason, role)
        assert value in found if isinstance(value, str) else value == found
        assert getattr(reason, "target" if role == "source" else "source") != found
        assert words in reason.message
        if field != "vocab_size":  # a difference of the two, where neither is at fault
            assert field == "config" or f"the {role}" in reason.message
        assert remedy in reason.remedy
        with pytest.raises(PairMismatchError, match=field) as caught:
            check.raise_if_unfit()
        assert caught.value.reasons == check.reasons
        assert isinstance(caught.value, ValueError) and isinstance(caught.value, KVBridgeError)


def test_all_reasons_are_given_at_once():
    check = check_pair(config("gemma3n_text", num_kv_shared_layers=1), AutoConfig.for_model("bart"))
    assert fields_of(check) == ["is_encoder_decoder", "shared_kv_layers", "layer_types", "vocab_size"]
    both = check_pair(config("mistral", sliding_window=64), config("gemma2"))
    assert [reason.message.split(" layers")[0] for reason in both] == ["both models have"]
    unreadable = check_pair(AutoConfig.for_model("mamba"), AutoConfig.for_model("t5"))
    assert fields_of(unreadable) == ["config", "is_encoder_decoder"]


@pytest.mark.parametrize(
    "harmless",
    [
        config("mistral", sliding_window=None),
        config("qwen2", use_sliding_window=False, sliding_window=4096),
        config("qwen3", sliding_window=4096, use_sliding_window=False, layer_types=["full_attention"] * 4),
        config("ministral3"),
        config("smollm3", use_sliding_window=False),
    ],
    ids=lambda value: value.model_type,
)
def test_a_window_that_is_not_used_is_no_reason(harmless):
    check = check_pair(harmless, config("llama"))
    assert check.ok, check.describe()
    assert "layer_types" not in fields_of(check.notes)


def test_a_window_as_long_as_the_longest_sequence_is_noted():
    wide = config("phi3", sliding_window=262144, max_position_embeddings=131072, pad_token_id=0)
    check = check_pair(wide, config("llama"))
    assert check.ok and "layer_types" in fields_of(check.notes)


def test_the_truth_of_a_check_is_whether_there_are_reasons():
    assert not PairCheck() and PairCheck().ok


# --- tokenizers ------------------------------------------------------------------------------------------------------

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "The", "quick", "brown", "fox", "over", "lazy", "dogs", "two", "spaces"]


def word_tokenizer(words=WORDS, bos=False, **special):
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    if bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    roles = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles | special)


def bpe_tokenizer(merges):
    letters = sorted(ByteLevel.alphabet())
    tokens = letters + ["qu", "ui"]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def check_tokenizers(source, target):
    return check_pair(config("llama"), config("llama"), source_tokenizer=source, target_tokenizer=target)


def test_equal_tokenizers_fit():
    check = check_tokenizers(word_tokenizer(), word_tokenizer())
    assert check.ok and check.notes == ()


def test_another_vocabulary():
    check = check_tokenizers(word_tokenizer(), word_tokenizer([*WORDS, "wolf"]))
    (reason,) = check
    assert reason.field == "tokenizer.vocabulary"
    assert (reason.source, reason.target) == ({"wolf": None}, {"wolf": len(WORDS)})
    assert "1 are known to one of them only and 0 have another id" in reason.message
    assert "same tokenizer files" in reason.remedy


def test_other_ids_for_the_same_tokens():
    swapped = [*WORDS[:4], WORDS[5], WORDS[4], *WORDS[6:]]
    check = check_tokenizers(word_tokenizer(), word_tokenizer(swapped))
    assert fields_of(check) == ["tokenizer.vocabulary", "tokenizer.ids"]
    vocabulary, ids = check
    assert (vocabulary.source, vocabulary.target) == ({"The": 4, "quick": 5}, {"The": 5, "quick": 4})
    assert (ids.source[:2], ids.target[:2]) == ([4, 5], [5, 4]) and "from token 22" in ids.message


def test_one_vocabulary_with_other_merges():
    left = bpe_tokenizer([("q", "u"), ("u", "i")])  # qu i c k
    right = bpe_tokenizer([("u", "i"), ("q", "u")])  # q ui c k
    assert left.get_vocab() == right.get_vocab()
    check = check_tokenizers(left, right)
    assert fields_of(check) == ["tokenizer.ids"]


def test_other_special_tokens_around_a_text():
    check = check_tokenizers(word_tokenizer(bos=True), word_tokenizer())
    (reason,) = check
    assert reason.field == "tokenizer.special_tokens"
    assert reason.source == "1 added, first id (1,)" and reason.target.startswith("0 added")
    assert "add_bos_token" in reason.remedy


def test_roles_that_do_not_change_ids_are_noted():
    """A base model and its chat variant end their generations with different tokens of one vocabulary."""
    check = check_tokenizers(word_tokenizer(), word_tokenizer(eos_token="<pad>"))
    assert check.ok
    (note,) = check.notes
    assert note.field == "tokenizer.special_token_roles"
    assert (note.source, note.target) == ({"eos_token": "</s>"}, {"eos_token": "<pad>"})


def test_tokenizers_settle_what_vocabulary_sizes_leave_open():
    """Qwen2.5's embedding tables are padded differently for one tokenizer; a table that is too small is a reason."""
    padded = check_pair(
        config("llama"),
        config("llama", vocab_size=9000),
        source_tokenizer=word_tokenizer(),
        target_tokenizer=word_tokenizer(),
    )
    assert padded.ok
    small = check_pair(
        config("llama", vocab_size=8),
        config("llama"),
        source_tokenizer=word_tokenizer(),
        target_tokenizer=word_tokenizer(),
    )
    (reason,) = small
    assert (reason.field, reason.source, reason.target) == ("vocab_size", 8, 1000)
    assert "13 ids" in reason.message and "resize_token_embeddings" in reason.remedy
