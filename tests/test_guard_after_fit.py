"""`kvbridge fit` calibrates the gates of what it has fitted, on text that it has not used."""

from __future__ import annotations

import json
import re

import pytest
from calibration_jobs import LENGTH, job_arguments, make_job, random_texts, word_tokenizer, write_jsonl, write_pair
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbridge_hf import bundled, demo
from kvbridge_hf.cli import main
from kvbridge_hf.demo import read_texts
from kvbridge_hf.guard import after_fit
from kvbridge_hf.guard.after_fit import MIN_UNSEEN, unseen_sequences
from kvbridge_hf.guard.defaults import GateDefaults
from kvbridge_hf.modeling_kvbridge import KVBridgeMapper


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = write_pair(tmp_path_factory.mktemp("pair"))
    write_jsonl(folder / "more.jsonl", random_texts(30) + random_texts(MIN_UNSEEN + 5, seed=1, shortest=16))
    return folder


def fit(capsys, job, *more):
    assert main(["fit", "--json", *job_arguments(job), *more]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_gates_come_from_the_sequences_behind_the_fits_own(pair, tmp_path, capsys):
    texts = [json.loads(line)["text"] for line in (pair / "more.jsonl").read_text().splitlines()]
    job = make_job(pair, tmp_path / "mapper", datasets=[str(pair / "more.jsonl")], num_sinks=2, num_native_suffix=4)
    found = unseen_sequences(job.data, 30, 200, word_tokenizer(), 2)
    expected = [word_tokenizer()(text)["input_ids"][:LENGTH] for text in texts[30:]]
    assert found.rows == expected and found.duplicates == 0
    summary = fit(capsys, job)
    mapper = KVBridgeMapper.from_pretrained(tmp_path / "mapper")
    assert summary["gates"]["rows"] == len(expected) == mapper.config.gates["rows"]
    assert GateDefaults.from_config(mapper.config).suffix_likelihood is not None
    before = dict(mapper.config.gates)
    assert fit(capsys, job)["gates"]["rows"] == len(expected)  # the same command again: nothing to do
    assert KVBridgeMapper.from_pretrained(tmp_path / "mapper").config.gates == before


def test_without_enough_unseen_text_it_says_so_and_other_text_may_be_given(pair, tmp_path, capsys):
    job = make_job(pair, tmp_path / "mapper", num_sinks=2, num_native_suffix=4)
    assert main(["fit", *job_arguments(job)]) == 0
    said = capsys.readouterr().out
    assert "gates are not calibrated" in said and "--gate-dataset" in said
    assert KVBridgeMapper.from_pretrained(tmp_path / "mapper").config.gates == {}
    summary = fit(capsys, job, "--gate-dataset", str(pair / "more.jsonl"))
    assert summary["gates"]["rows"] >= MIN_UNSEEN
    other = make_job(pair, tmp_path / "other")
    assert fit(capsys, other, "--gate-sequences", "0")["gates"] is None


def test_plan_c_never_has_both_models_in_memory_and_says_how_to_go_on(pair, tmp_path, capsys, monkeypatch):
    settings = {"datasets": [str(pair / "more.jsonl")], "num_sinks": 2, "num_native_suffix": 4}
    expected = fit(capsys, make_job(pair, tmp_path / "a", plan="a", **settings))["gates"]
    with monkeypatch.context() as patch:
        patch.setattr(after_fit, "load_model", lambda *_: pytest.fail("a model was loaded after the fit"))
        job = make_job(pair, tmp_path / "c", plan="c", **settings)
        assert main(["fit", *job_arguments(job)]) == 0
        said = capsys.readouterr().out
        assert "gates are not calibrated" in said
        assert KVBridgeMapper.from_pretrained(tmp_path / "c").config.gates == {}
    (command,) = re.findall(r"kvbridge (calibrate-gates .*?) with text", said)
    arguments = [part.replace("TEXTS", str(pair / "more.jsonl")) for part in command.split()]
    arguments += ["--skip", "30", "--sequence-length", str(LENGTH), "--batch-size", str(job.batch_size), "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    mapper = KVBridgeMapper.from_pretrained(tmp_path / "c")
    assert mapper.config.gates["rows"] == found["rows"] == expected["rows"] and found["tokens"] == expected["tokens"]
    assert found["kl"] == pytest.approx(expected["kl"], rel=1e-3)
    assert fit(capsys, job)["gates"]["rows"] == found["rows"]  # the fit again: they are left as they are
    assert main([*arguments[:-5], "--skip", "120"]) == 2
    said = capsys.readouterr().err
    assert f"{MIN_UNSEEN} others are needed" in said and said.count("\n") == 1
    assert main(["calibrate-gates", str(tmp_path / "none"), *arguments[2:]]) == 2


def test_what_the_fit_has_read_is_not_unseen(pair, tmp_path):
    texts = random_texts(30)
    path = write_jsonl(tmp_path / "repeated.jsonl", texts + texts[:7] + random_texts(4, seed=2))
    job = make_job(pair, tmp_path / "mapper", datasets=[str(path)])
    found = unseen_sequences(job.data, 30, 50, word_tokenizer())
    assert found.duplicates == 7 and len(found.rows) == 4


def test_the_bundled_fit_calibrates_its_gates_on_texts_of_their_own(monkeypatch):
    def first(path, limit=None):
        return read_texts(path, {"train.jsonl": 30, "gates.jsonl": 24}[path.name])

    monkeypatch.setattr(demo, "read_texts", first)
    names = [bundled.model_path(name) for name in ("s", "m")]
    models = [AutoModelForCausalLM.from_pretrained(name).eval() for name in names]
    mapper = demo.fit_bundled(*models, AutoTokenizer.from_pretrained(names[1]))
    assert mapper.config.gates["rows"] == 24
    assert mapper.config.gates["suffix_likelihood"]["statistics"].keys() == {"reverse_divergence", "drift"}
    texts = {name: set(read_texts(bundled.text_path(name))) for name in ("train", "validation", "test", "gates")}
    assert len(texts["gates"]) >= MIN_UNSEEN
    assert not any(texts["gates"] & others for name, others in texts.items() if name != "gates")
