"""Plans of published pairs against published sizes and against mappers and models that are really made."""

from __future__ import annotations

import json

import pytest
import torch
from models import tiny_config, tiny_model

from kvbridge_hf.calibration.model_size import ModelSize
from kvbridge_hf.errors import FitConfigError, KVBridgeError, ModelNotFoundError
from kvbridge_hf.geometry import KVGeometry
from kvbridge_hf.planning import count_parameters, load_config, mapper_size, plan_pair, to_text
from kvbridge_hf.published_models import published_config, published_names

PAIRS = [
    ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"),
    ("Qwen/Qwen3-14B", "Qwen/Qwen3-32B"),
    ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"),
    ("mistralai/Ministral-3-3B-Base-2512", "mistralai/Ministral-3-14B-Base-2512"),
]


@pytest.fixture(scope="module")
def qwen_plan():
    return plan_pair("Qwen/Qwen3-14B", "Qwen/Qwen3-32B", support="full_head", top_k=8)


def test_the_published_mapper_of_qwen3(qwen_plan):
    """4.296 GB in float32 by Qu et al. (arXiv:2609.00891), and an eighth of it head-local."""
    mapper = qwen_plan["mapper"]
    assert (mapper["weights"], mapper["biases"]) == (1_073_741_824, 131_072)
    assert mapper["parameters"] == 1_073_872_896
    assert mapper["bytes"]["float32"] == 4 * 1_073_872_896
    assert f"{mapper['gib']['float32']:.4f}" == "4.0005"
    assert mapper["weights_by_support"]["head_local"] * 8 == mapper["weights"]
    text = to_text(qwen_plan)
    for words in ("1,073,741,824 weights + 131,072 biases", "1,073,872,896 parameters", "4.0005 GiB in float32"):
        assert words in text
    local = plan_pair("qwen3-14b", "qwen3-32b", support="head_local")
    assert local["mapper"]["weights"] == 134_217_728 and local["mapper"]["biases"] == 131_072
    assert qwen_plan["fits"] and qwen_plan["reasons"] == []
    assert qwen_plan["source"]["cache_bytes_per_token"] == 2 * 40 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as the models' safetensors indices sum up
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
    ],
)
def test_known_models_have_their_published_parameter_counts(name, parameters):
    assert count_parameters(published_config(name))[1] == parameters


def test_counts_equal_a_real_model():
    for tied in (True, False):
        model = tiny_model("qwen3", tie_word_embeddings=tied)
        body, whole = count_parameters(model.config)
        assert whole == sum(p.numel() for p in model.parameters())
        embeddings = model.get_input_embeddings().weight.numel() * (1 if tied else 2)
        assert body == whole - embeddings
        size = ModelSize.of(model.config)
        assert (size.body_parameters, size.parameters) == (body, whole)
        assert size.intermediate_size == model.config.intermediate_size


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_support_and_plan_of_the_published_pairs(source, target):
    plan = plan_pair(source, target)
    assert json.loads(json.dumps(plan)) == plan
    assert plan["fits"], plan["reasons"]
    rows = plan["calibration"]["plans"]
    assert [(row["support"], row["plan"]) for row in rows] == [
        (support, name) for support in ("full_head", "head_local") for name in "abc"
    ]
    for row in rows:
        assert row["passes"] >= 1 and row["flops"] > 0
        assert all(row[name] > 0 for name in ("device_bytes", "host_bytes", "disk_bytes", "artifact_bytes"))
        assert row["fits"] == (row["device_bytes"] <= plan["calibration"]["memory_budget"])
    by_name = {(row["support"], row["plan"]): row for row in rows}
    assert by_name["full_head", "a"]["artifact_bytes"] == plan["mapper"]["bytes"]["float32"]
    assert by_name["full_head", "a"]["passes"] == 1
    # The FLOPs of one pass are those of both forwards and the moments, so no less than the forwards'.
    tokens = plan["calibration"]["num_sequences"] * plan["calibration"]["sequence_length"]
    weights = sum(count_parameters(load_config(name))[0] for name in (source, target))
    assert 2 * weights * tokens < by_name["head_local", "a"]["flops"] < by_name["full_head", "a"]["flops"]
    text = to_text(plan)
    assert all(name in text for name in ("passes", "device", "host", "disk", "artifact", "FLOPs", source, target))


@pytest.mark.parametrize(
    ("source_heads", "target_heads", "features", "local"),
    [
        (2, 2, 3 * 2 * 16, 3 * 16),
        (2, 4, 3 * 2 * 16, 3 * 16),
        (4, 2, 3 * 4 * 16, 3 * 2 * 16),
        (3, 2, 3 * 48, 3 * 2 * 16),
    ],
)
def test_mapper_sizes_by_hand(source_heads, target_heads, features, local):
    source = KVGeometry.from_config(tiny_config("llama", num_kv_heads=source_heads, num_heads=12, hidden_size=192))
    target = KVGeometry.from_config(
        tiny_config("llama", num_kv_heads=target_heads, num_heads=4, num_layers=5, head_dim=8, hidden_size=32)
    )
    outputs = 2 * 5 * target_heads * 8
    for support, wanted in (("full_head", features), ("head_local", local)):
        size = mapper_size(source, target, support, 3)
        assert (size.features, size.weights, size.biases) == (wanted, wanted * outputs, outputs)
        assert size.flops_per_token() == 2 * size.weights


def test_sizes_are_those_of_a_mapper_that_is_made():
    modeling = pytest.importorskip("kvbridge_hf.modeling_kvbridge")
    configuration = pytest.importorskip("kvbridge_hf.configuration_kvbridge")
    source = KVGeometry.from_config(tiny_config("qwen3", num_layers=3))
    target = KVGeometry.from_config(tiny_config("qwen3", num_layers=4))
    mapper = modeling.KVBridgeMapper(
        configuration.KVBridgeConfig(
            source_geometry=source.to_dict(),
            target_geometry=target.to_dict(),
            support="full_head",
            top_k=2,
            selected_layers=[[0, 1]] * 4,
        )
    )
    assert sum(p.numel() for p in mapper.parameters()) == mapper_size(source, target, "full_head", 2).parameters


def test_prefill_flops_by_counting():
    """FLOPs of a real forward, as PyTorch counts them, without the head that a prefill needs for one token only."""
    from torch.utils.flop_counter import FlopCounterMode

    model = tiny_model("llama", num_layers=2)
    tokens = 64
    plan = plan_pair(model.config, model.config, top_k=2, context=tokens)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.model(torch.arange(3, 3 + tokens)[None], use_cache=False)
    # Eager attention computes the whole square of scores and values, of which a causal model needs one triangle.
    square = 2 * 4 * 4 * 16 * tokens**2
    unneeded = square - square * (tokens + 1) / (2 * tokens)
    norms = 2 * tokens * 64 * (2 * 2 + 1)  # counted as weights here, and not as matrix products there
    wanted = counter.get_total_flops() - unneeded + norms
    # Some releases take the rotary angles by a matrix product: 1,024 FLOPs here.
    assert plan["handoff"]["target_prefill_flops"] == pytest.approx(wanted, rel=3e-4)


def test_configs_folders_files_and_names(tmp_path):
    config = tiny_config("qwen3")
    config.save_pretrained(tmp_path)
    wanted = KVGeometry.from_config(config)
    for given in (config, tiny_model("qwen3"), str(tmp_path), tmp_path, str(tmp_path / "config.json")):
        assert KVGeometry.from_config(load_config(given)) == wanted
    assert plan_pair(tmp_path, config, top_k=2)["fits"]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("Qwen3-14B", 40),
        ("qwen/qwen3-14b-base", 40),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", 80),
        ("mistralai/Ministral-3-8B-Reasoning-2512", 34),
    ],
)
def test_names_of_known_models(name, layers):
    assert load_config(name).num_hidden_layers == layers


def test_known_models_are_not_confused_with_others():
    for name in (
        "Qwen3-30B-A3B",
        "Qwen2.5-14B",
        "Qwen3-14B-AWQ-custom",
        "Ministral-8B-Instruct-2410",
        "llama-3.1-405b",
    ):
        assert published_config(name) is None
    assert len(published_names()) == 11


def test_a_pair_that_does_not_fit_is_planned_with_its_reasons():
    plan = plan_pair("qwen3-0.6b", "llama-3.1-8b")
    assert not plan["fits"] and "vocab_size (source: 151936, target: 128256)" in plan["reasons"][0]
    assert "fits: no" in to_text(plan)


def test_a_budget_decides_the_passes():
    roomy = plan_pair("qwen3-14b", "qwen3-32b", memory_budget=1 << 40)["calibration"]["plans"]
    tight = plan_pair("qwen3-14b", "qwen3-32b", memory_budget=80 << 30)["calibration"]["plans"]
    local = {row["plan"]: row for row in tight if row["support"] == "head_local"}
    assert all(row["fits"] for row in roomy)
    assert not local["a"]["fits"] and local["c"]["fits"] and local["c"]["passes"] > 1
    roomy_c = next(row for row in roomy if (row["support"], row["plan"]) == ("head_local", "c"))
    assert local["c"]["passes"] > roomy_c["passes"]


def test_wrong_arguments(monkeypatch):
    with pytest.raises(FitConfigError, match="support must be one of full_head, head_local, got 'all'"):
        plan_pair("qwen3-0.6b", "qwen3-1.7b", support="all")
    with pytest.raises(FitConfigError, match="between 1 and the source's 28 layers, got 29"):
        plan_pair("qwen3-0.6b", "qwen3-1.7b", top_k=29)
    with pytest.raises(FitConfigError, match="dtype must be one of"):
        plan_pair("qwen3-0.6b", "qwen3-1.7b", dtype="int8")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="No config was found for 'no-such/model'.*qwen3-14b") as caught:
        plan_pair("no-such/model", "qwen3-1.7b")
    assert isinstance(caught.value, KVBridgeError) and isinstance(caught.value, OSError)
