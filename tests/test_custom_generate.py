"""`custom_generate/generate.py` of an artifact against the library, and where the library is not installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from handoff_reference import random_mapper
from hub_server import LoopbackHub
from models import ARCHITECTURES, tiny_model
from test_modeling import make_mapper, make_source
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbridge_hf import Gates, HandoffPolicy, KVBridge, KVBridgeMapper, bundled
from kvbridge_hf.evaluation import load_questions
from kvbridge_hf.fingerprint import model_fingerprint
from kvbridge_hf.hub import artifact
from kvbridge_hf.hub.integrity import GENERATE_NAME

FILE = Path(artifact.__file__).parent / GENERATE_NAME


def load_file():
    spec = importlib.util.spec_from_file_location("artifact_generate", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate_file = load_file()


def make_pair(source_arch="qwen3", target_arch="llama", source_rope=None, target_rope=None, **mapper_options):
    source = tiny_model(source_arch, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, rope=source_rope)
    target = tiny_model(target_arch, num_layers=4, num_heads=6, num_kv_heads=3, head_dim=8, seed=1, rope=target_rope)
    return source, target, random_mapper(source, target, **mapper_options)


def prompt(batch: int = 3, tokens: int = 11) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded on the left."""
    ids = torch.randint(3, 96, (batch, tokens), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : 4 * row] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


PAIRS = {
    "qwen3 to llama": {},
    "sinks and suffix": {"num_sinks": 2, "num_native_suffix": 3},
    "more sinks than the shortest row has": {"num_sinks": 6},
    "scaled both ways": {"source_rope": "yarn", "target_rope": "llama3"},
    "scaled the other way": {"source_rope": "llama3", "target_rope": "yarn"},
    "interleaved to partial": {"source_arch": "cohere", "target_arch": "phi3"},
    "partial interleaved to layers without rotation": {"source_arch": "glm", "target_arch": "smollm3"},
    "layers without rotation to OLMo 2": {"source_arch": "smollm3", "target_arch": "olmo2"},
}


@pytest.mark.parametrize("options", PAIRS.values(), ids=PAIRS)
def test_file_does_what_the_library_does(tmp_path, options):
    source, target, mapper = make_pair(**options)
    mapper.save_pretrained(tmp_path / "mapper")
    settings = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = target.generate(**prompt(), bridge=KVBridge(source, mapper), **settings)
    found = generate_file.generate(
        target, source_model=source, mapper=str(tmp_path / "mapper"), **prompt(), **settings
    )
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=2e-4, rtol=2e-4)
    assert torch.equal(found.sequences, expected.sequences)


RECOMPUTED = {
    "sentences": {"native_fraction": 0.3, "boundary_tokens": list(range(10, 30))},
    "no sentences known": {"native_fraction": 0.3},
    "lowest layers": {"native_layers": 2},
    "both": {"native_layers": 1, "native_fraction": 0.15, "boundary_tokens": list(range(10, 30))},
    "sentences in the lowest layers": {
        "native_fraction": 0.3,
        "boundary_tokens": list(range(10, 30)),
        "repair_layers": 2,
    },
    "as many layers as there are": {"native_fraction": 0.3, "repair_layers": 4},
    "everything": {"native_fraction": 1.0},
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("options", RECOMPUTED.values(), ids=RECOMPUTED)
def test_file_recomputes_what_the_library_recomputes(tmp_path, options, attention):
    source, target, mapper = make_pair(num_sinks=2, num_native_suffix=3)
    target.set_attn_implementation(attention)
    for name, value in options.items():
        setattr(mapper.config, name, value)
    mapper.save_pretrained(tmp_path / "mapper")
    inputs = prompt(tokens=40)
    # Words of the question stand in the text, some of them often.
    inputs["input_ids"] = inputs["input_ids"] % 37 * inputs["attention_mask"]
    settings = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = target.generate(**inputs, bridge=KVBridge(source, mapper), **settings)
    found = generate_file.generate(target, source_model=source, mapper=str(tmp_path / "mapper"), **inputs, **settings)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=2e-4, rtol=2e-4)
    assert torch.equal(found.sequences, expected.sequences)
    repaired, layers = expected.handoff_report.tokens_repaired, expected.handoff_report.native_layers
    assert (repaired > 0, layers) == ("native_fraction" in options, options.get("native_layers", 0))
    mapper.config.native_layers = mapper.config.native_fraction = 0
    plain = target.generate(**inputs, bridge=KVBridge(source, mapper), **settings)
    assert not torch.allclose(torch.stack(plain.logits), torch.stack(expected.logits), atol=1e-2)
    if options == RECOMPUTED["everything"]:
        own = target.generate(**inputs, **settings)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(own.logits), atol=2e-4, rtol=2e-4)


def test_other_choices_are_replaced_by_the_questions_words_and_that_is_said(tmp_path):
    source, target, mapper = make_pair(num_sinks=2, num_native_suffix=3)
    mapper.config.native_fraction, mapper.config.repair = 0.3, "learned"
    mapper.save_pretrained(tmp_path / "mapper")
    inputs = prompt(tokens=40)
    inputs["input_ids"] = inputs["input_ids"] % 37 * inputs["attention_mask"]
    with pytest.warns(UserWarning, match="by the question's words, not by 'learned'"):
        found = generate_file.generate(
            target, **inputs, source_model=source, mapper=str(tmp_path / "mapper"), max_new_tokens=6, do_sample=False
        )
    mapper.config.repair = "question"
    expected = target.generate(**inputs, bridge=KVBridge(source, mapper), max_new_tokens=6, do_sample=False)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["s-to-m", "m-to-m-diary"])
def test_bundled_mapper_answers_as_with_the_library(name):
    """Greedy answers to bundled questions, which the mapper's repair decides."""
    ends = bundled.split_pair(name)
    source, target = (AutoModelForCausalLM.from_pretrained(bundled.model_path(end)).float() for end in ends)
    tokenizer = AutoTokenizer.from_pretrained(bundled.model_path(ends[1]), padding_side="left")
    mapper = KVBridgeMapper.from_pretrained(str(bundled.mapper_path(name)), dtype=torch.float32)
    folder = bundled.mapper_path(name)
    assert mapper.config.native_fraction > 0 and mapper.config.boundary_tokens
    questions = load_questions(bundled.questions_path("test"), limit=12)
    texts = [f"{question.context} {question.question}" for question in questions]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    settings = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    # The file watches no gates.
    bridge = KVBridge(source, mapper, HandoffPolicy(gates=Gates.off()), tokenizer=tokenizer)
    expected = target.generate(**inputs, bridge=bridge, **settings)
    found = generate_file.generate(target, source_model=source, mapper=str(folder), **inputs, **settings)
    assert expected.handoff_report.tokens_repaired > 100
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=2e-3, rtol=2e-3)
    assert torch.equal(found.sequences, expected.sequences)


@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}],
    ids=["beams", "sampled twice"],
)
def test_generation_settings_are_generates_own(tmp_path, settings):
    source, target, mapper = make_pair(num_sinks=1)
    mapper.save_pretrained(tmp_path / "mapper")
    torch.manual_seed(0)
    expected = target.generate(**prompt(), bridge=KVBridge(source, mapper), max_new_tokens=6, **settings)
    torch.manual_seed(0)
    found = generate_file.generate(
        target, source_model=source, mapper=str(tmp_path / "mapper"), max_new_tokens=6, **prompt(), **settings
    )
    assert torch.equal(found, expected)


def test_head_local_map_is_that_of_the_library(tmp_path):
    mapper, source = make_mapper("head_local"), make_source()
    mapper.save_pretrained(tmp_path / "mapper")
    config, tensors = generate_file.load(str(tmp_path / "mapper"), None, None, None)
    for layer, pair in enumerate(mapper(source)):
        for kind, read, expected in zip(("key", "value"), (source.keys, source.values), pair, strict=True):
            found = generate_file.map_layer(config, tensors, kind, layer, [read(index) for index in range(4)])
            torch.testing.assert_close(found, expected)


def test_one_token_prompt_is_the_targets_own(tmp_path):
    source, target, mapper = make_pair()
    mapper.save_pretrained(tmp_path / "mapper")
    ids = torch.tensor([[5]])
    found = generate_file.generate(
        target, ids, source_model=source, mapper=str(tmp_path / "mapper"), max_new_tokens=5, do_sample=False
    )
    assert torch.equal(found, target.generate(ids, max_new_tokens=5, do_sample=False))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_digest_of_a_checkpoint_is_the_fingerprints(arch):
    model = tiny_model(arch, num_layers=2)
    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    assert generate_file.digest_of(layers) == model_fingerprint(model)["kv_projections"]


def test_what_cannot_work_is_refused(tmp_path):
    source, target, mapper = make_pair()
    folder = tmp_path / "mapper"
    mapper.save_pretrained(folder)
    call = {"source_model": source, "mapper": str(folder), "max_new_tokens": 2}
    with pytest.raises(ValueError, match="source model.*not the one"):
        generate_file.generate(target, **prompt(), **call | {"source_model": tiny_model("qwen3", seed=9)})
    with pytest.raises(ValueError, match="target model.*not the one"):
        generate_file.generate(source, **prompt(), **call)
    with pytest.raises(ValueError, match="on the left"):
        generate_file.generate(
            target, prompt()["input_ids"], attention_mask=prompt()["attention_mask"].flip(1), **call
        )
    with pytest.raises(ValueError, match="source_model="):
        generate_file.generate(target, **prompt(), mapper=str(folder))
    generate_file.load.cache_clear()
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(OSError, match="damaged"):
        generate_file.generate(target, **prompt(), **call)


WITHOUT_LIBRARY = """
import json, sys
sys.modules["kvbridge_hf"] = None  # an import of it would fail now, wherever it is installed
import torch
from transformers import AutoModelForCausalLM
source, target = (AutoModelForCausalLM.from_pretrained(path) for path in sys.argv[1:3])
inputs = torch.load(sys.argv[3])
answers = [
    target.generate(
        **inputs,
        custom_generate=mapper,
        trust_remote_code=True,
        source_model=source,
        max_new_tokens=6,
        do_sample=False,
    ).tolist()
    for mapper in sys.argv[4:]
]
print("ANSWER " + json.dumps(answers))
"""


def test_without_the_library_from_hub_and_folder(tmp_path):
    source, target, mapper = make_pair(num_sinks=2)
    source.save_pretrained(tmp_path / "source")
    target.save_pretrained(tmp_path / "target")
    mapper.save_pretrained(tmp_path / "mapper")
    torch.save(prompt(), tmp_path / "inputs.pt")
    expected = target.generate(**prompt(), bridge=KVBridge(source, mapper), max_new_tokens=6, do_sample=False)
    with LoopbackHub() as hub:
        hub.put("org/a-to-b", tmp_path / "mapper")
        environment = {**os.environ, **hub.environment(tmp_path / "home")}
        paths = [tmp_path / name for name in ("source", "target", "inputs.pt")]
        arguments = [sys.executable, "-c", WITHOUT_LIBRARY, *map(str, paths), "org/a-to-b", str(tmp_path / "mapper")]
        done = subprocess.run(arguments, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    answers = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("ANSWER "))[7:])
    assert answers == [expected.tolist()] * 2
