"""Model cards and inspection: what was measured, and nothing else."""

from __future__ import annotations

import json

import pytest
from huggingface_hub import ModelCard
from test_artifact import flip
from test_modeling import make_config

from kvbridge_hf.errors import ArtifactError
from kvbridge_hf.hub import create_model_card
from kvbridge_hf.hub.inspection import inspect_artifact, to_text
from kvbridge_hf.modeling_kvbridge import KVBridgeMapper

EVALUATION = {
    "metrics": [
        {
            "type": "retention",
            "name": "Retention",
            "value": 0.912345,
            "low": 0.88,
            "high": 0.94,
            "confidence": 0.95,
            "num_items": 400,
            "dataset": "Lookup questions",
            "split": "test",
        },
        {"type": "kl_mean", "value": float("nan"), "dataset": "Lookup questions"},
    ],
    "verdict": "Fit for long answers, not for look-ups.",
    "command": "kvbridge evaluate small large",
}


def test_card_shows_what_was_measured_and_nothing_else():
    config = make_config(
        source_fingerprint={"name_or_path": "org/small", "revision": "abc123", "kv_projections": "0123456789abcdef00"},
        target_fingerprint={"name_or_path": "/home/somebody/large"},
        fit={"ridge_lambda": 0.01, "tokens": 1234567, "r2": {"key": [0.5, 0.7]}, "note": "a|b"},
        gates={"attention_cosine": 0.9},
        evaluation=EVALUATION,
        max_calibrated_positions=2048,
    )
    card = create_model_card(
        config, repo_id="org/small-to-large", num_parameters=1000, license="apache-2.0", tags=["x"]
    )
    data = ModelCard(str(card)).data  # parsed again, as the Hub does
    assert (data.library_name, data.base_model, data.license) == ("kvbridge_hf", ["org/small"], "apache-2.0")
    assert data.tags == ["kvbridge", "kv-cache", "x"]
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == (
        "retention",
        0.912345,
        "Lookup questions",
    )
    assert result.metric_args == {"low": 0.88, "high": 0.94, "confidence": 0.95, "num_items": 400}
    for text in (
        "| Retention | 0.9123 | 0.88 to 0.94 (95%) | Lookup questions, test | 400 |",
        "| tokens | 1,234,567 |",
        "| r2: key | mean 0.6000, minimum 0.5000 over 2 values |",
        "| note | a\\|b |",
        "| attention_cosine | 0.9 |",
        'from_pretrained("org/small", revision="abc123")',
        'KVBridgeMapper.from_pretrained("org/small-to-large")',
        "Positions from 2,048 on",
        "Fit for long answers",
        "kvbridge evaluate small large",
    ):
        assert text in card.text, text
    assert "somebody" not in str(card) and "kl_mean" not in str(card) and "custom_generate" not in str(card)


def test_card_of_an_unmeasured_mapper_claims_nothing():
    card = create_model_card(make_config())
    assert card.data.eval_results is None and card.data.base_model is None
    assert "No evaluation is recorded" in card.text and "Nothing is recorded about how" in card.text


def test_card_of_a_fuser_cites_its_source():
    config = make_config()
    assert "2510.03215" not in create_model_card(config).text
    config.method = "fuser"
    assert "C2C (Cache-to-Cache), Fu et al., arXiv:2510.03215" in create_model_card(config).text


REPORT = {  # the parts of a report of kvbridge_hf.evaluation that go into an artifact
    "headline": {
        "gap_recovered": {"estimate": 0.4, "low": 0.3, "high": 0.5, "handoff": 0.7, "target": 0.9, "source": 0.5},
        "retention": {"estimate": None, "low": None, "high": None},
    },
    "conditions": {
        "target": {"accuracy": {"estimate": 0.9, "low": 0.85, "high": 0.95}},
        "handoff": {"accuracy": {"estimate": 0.7, "low": 0.6, "high": 0.8}, "kl": {"estimate": 0.12}},
    },
    "cost": {"share_of_prefill": 0.25},
    "data": {"questions": 300},
    "bootstrap": {"confidence": 0.95, "questions_items": 300, "documents_items": 40},
    "dataset": "Tinytown test",
}


def test_card_reads_a_report_of_the_evaluation():
    card = create_model_card(make_config(evaluation=REPORT))
    results = {result.metric_type: result for result in ModelCard(str(card)).data.eval_results}
    values = {name: result.metric_value for name, result in results.items()}
    assert values == {"gap_recovered": 0.4, "accuracy": 0.7, "kl": 0.12, "share_of_prefill": 0.25}
    assert results["accuracy"].metric_args == {"low": 0.6, "high": 0.8, "confidence": 0.95, "num_items": 300}
    assert results["kl"].metric_args == {"confidence": 0.95, "num_items": 40}
    assert {result.dataset_name for result in results.values()} == {"Tinytown test"}
    assert "| Share of the gap recovered | 0.4 | 0.3 to 0.5 (95%) | Tinytown test | 300 |" in card.text
    assert "|  | target | handoff |" in card.text and "| Answers right | 0.9 | 0.7 |" in card.text


def test_inspection_describes_without_loading(tmp_path):
    mapper = KVBridgeMapper(make_config("head_local", evaluation=REPORT))
    mapper.bfloat16().save_pretrained(tmp_path / "mapper", max_shard_size=1500)
    facts = inspect_artifact(tmp_path / "mapper")
    assert facts["parameters"] == sum(parameter.numel() for parameter in mapper.parameters())
    assert facts["dtypes"] == ["BF16"] and facts["digest"] == mapper.artifact_digest
    assert facts["tensors"]["key_weight"]["shape"] == list(mapper.key_weight.shape)
    assert {result["type"] for result in facts["results"]} == {"gap_recovered", "accuracy", "kl", "share_of_prefill"}
    json.dumps(facts)
    text = to_text(facts)
    for part in ("head_local", "4 layers x 2 KV heads x 6", "README.md", "Answers right: 0.7 [0.6, 0.8]"):
        assert part in text
    flip(tmp_path / "mapper" / "model.safetensors.index.json", 10)
    with pytest.raises(ArtifactError):
        inspect_artifact(tmp_path / "mapper")
