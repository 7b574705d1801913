"""The command line: what it prints, and one line with exit code 2 for wrong arguments."""

from __future__ import annotations

import json

import pytest

from kvbridge_hf import bundled, cli


def run(capsys, *args):
    code = cli.main(list(args))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["frob"], "frob"),
        (["plan", "--source", "Qwen/Qwen3-14B"], "--target"),
        (["plan", "--source", "no/such-folder", "--target", "Qwen/Qwen3-32B"], "no/such-folder"),
        (
            ["plan", "--source", "Qwen/Qwen3-14B", "--target", "Qwen/Qwen3-32B", "--support", "everything"],
            "everything",
        ),
        (["plan", "--source", "Qwen/Qwen3-14B", "--target", "Qwen/Qwen3-32B", "--top-k", "none"], "--top-k"),
        (["demo", "--pair", "m"], "SOURCE-to-TARGET"),
        (["demo", "--pair", "x-to-y"], "tinytown-x"),
        (["demo", "--questions", "0"], "--questions"),
        (["inspect", "no/such-folder"], "no/such-folder"),
    ],
)
def test_wrong_arguments_are_answered_in_one_line(capsys, monkeypatch, args, says):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out, err = run(capsys, *args)
    assert code == 2
    assert out == ""
    assert err.startswith("kvbridge: ")
    assert err.count("\n") == 1
    assert says in err


def test_plan_of_a_published_pair_needs_no_download(capsys):
    pair = ["--source", "Qwen/Qwen3-14B", "--target", "Qwen/Qwen3-32B", "--top-k", "8", "--json"]
    code, out, _ = run(capsys, "plan", *pair)
    assert code == 0
    text = json.dumps(json.loads(out))
    # 64 target layers x 8 heads x (8 layers x 8 heads x 128) features x 128 channels x keys and values; and biases.
    weights, biases = 64 * 8 * (8 * 8 * 128) * 128 * 2, 64 * 8 * 128 * 2
    assert (weights, biases) == (1_073_741_824, 131_072)
    assert str(weights) in text and str(biases) in text and str(weights + biases) in text
    code, out, _ = run(capsys, "plan", *pair, "--support", "head_local")
    assert str(weights // 8) in json.dumps(json.loads(out))
    assert "4.0005 GiB" in run(capsys, "plan", *pair[:-1])[1]


@pytest.fixture(scope="module")
def demo_result():
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.echo", lines.append)
        assert cli.main(["demo", "--json", "--questions", "24", "--repeats", "2", "--max-new-tokens", "6"]) == 0
    assert len(lines) == 1
    return json.loads(lines[0])


def test_demo_prints_one_object_with_the_promised_keys(demo_result):
    promised = {"source", "target", "prompt_tokens", "status", "native_text", "handoff_text", "kl_mean"}
    promised |= {"top1_agreement", "accuracy", "latency_ms", "mapper_parameters"}
    assert promised <= set(demo_result)
    assert set(demo_result["accuracy"]) == {"target", "handoff", "no_context", "source"}
    paths = {"target_prefill", "handoff", "source_prefill_handoff", "target_cache"}
    assert set(demo_result["latency_ms"]) == paths
    assert all(value > 0 for value in demo_result["latency_ms"].values())
    assert demo_result["status"] == "ok"


def test_demo_handoff_is_better_than_no_context(demo_result):
    assert demo_result["kl_mean"] < demo_result["kl_no_context"]
    assert demo_result["accuracy"]["target"] > demo_result["accuracy"]["no_context"]


def test_inspect_and_generate_on_a_bundled_mapper(capsys):
    mapper = str(bundled.mapper_path("s-to-m"))
    code, out, _ = run(capsys, "inspect", mapper, "--json")
    assert code == 0
    assert json.loads(out)
    source, target = (str(bundled.model_path(name)) for name in ("s", "m"))
    prompt = "Alice lives in Rome. Bob lives in Oslo. Where does Bob live? Bob lives in"
    args = ["generate", prompt, "--source", source, "--target", target, "--mapper", mapper, "--max-new-tokens", "3"]
    code, out, _ = run(capsys, *args, "--json")
    assert code == 0
    assert json.loads(out)["report"]["status"] == "ok"


def test_a_mapper_of_another_pair_is_refused_in_one_line(capsys):
    source, target = (str(bundled.model_path(name)) for name in ("m", "s"))
    args = ["generate", "Alice.", "--source", source, "--target", target]
    code, _, err = run(capsys, *args, "--mapper", str(bundled.mapper_path("s-to-m")))
    assert code == 2
    assert err.count("\n") == 1


def test_a_model_that_is_not_there_is_no_traceback(capsys):
    mapper = str(bundled.mapper_path("s-to-m"))
    models = ["--source", "/no/model", "--target", "/no/model"]
    code, out, err = run(capsys, "generate", "Hi.", *models, "--mapper", mapper)
    assert (code, out) == (2, "")
    assert "kvbridge: " in err and "/no/model" in err and "Traceback" not in err
