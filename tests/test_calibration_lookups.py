"""`--lookups`: questions from a file, for a learned choice of what to repair."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import pytest
import torch
from calibration_jobs import (
    LENGTH,
    forkserver,
    free_port,
    job_arguments,
    make_job,
    relative_error,
    run_command_in_child,
    weights_of,
    word_tokenizer,
    write_pair,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvbridge_hf import bundled
from kvbridge_hf.calibration.driver import fit_mapper
from kvbridge_hf.calibration.lookups import read_lookups
from kvbridge_hf.calibration.memory_plan import choose_plan, make_plan
from kvbridge_hf.calibration.model_size import ModelSize, Workload
from kvbridge_hf.calibration.run import run_calibration
from kvbridge_hf.cli import main
from kvbridge_hf.errors import CalibrationError, FitConfigError
from kvbridge_hf.mappers.config import DistillationConfig, FitConfig
from kvbridge_hf.modeling_kvbridge import KVBridgeMapper

LEARNED = {"repair": "learned", "native_fraction": 0.2, "num_sinks": 2}


def tokenizer_with_stops():
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["."])
    return tokenizer


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """The pair of the other tests, whose tokenizer knows where a sentence ends, and questions."""
    folder = write_pair(tmp_path_factory.mktemp("pair"))
    for name in ("source", "target"):
        tokenizer_with_stops().save_pretrained(folder / name)
    draw = random.Random(0)

    def words(count):
        return " ".join(f"w{draw.randrange(90)}" for _ in range(count))

    rows = []
    for _ in range(24):
        context = " ".join(f"{words(4)} ." for _ in range(5))
        for _ in range(2):
            rows.append({"context": context, "question": f"{words(3)} ", "choices": [words(1), words(2)], "answer": 1})
    write_rows(folder / "questions.jsonl", rows)
    return folder


def write_rows(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def fit(job):
    return run_calibration(job, progress=False, say=lambda text: None)


# ---- the file -------------------------------------------------------------------------------------------------------


def test_lookups_are_the_text_and_its_questions_in_tokens():
    tokenizer = AutoTokenizer.from_pretrained(bundled.model_path("m"))
    path = bundled.questions_path("validation")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    found = read_lookups(path, tokenizer)
    assert len(found) == len(contexts)
    for lookup, context in zip(found, contexts, strict=True):
        asked = [row for row in rows if row["context"] == context]
        answers = [row["choices"][row["answer"]] for row in asked]
        text = context + "".join(f" {row['question']}{answer}" for row, answer in zip(asked, answers, strict=True))
        assert lookup["input_ids"] == tokenizer(text)["input_ids"]
        assert lookup["input_ids"][: lookup["boundary"]] == tokenizer(context)["input_ids"]
        flags = lookup["answers"]
        told = tokenizer.decode([token for token, flag in zip(lookup["input_ids"], flags, strict=True) if flag])
        assert told.split() == "".join(answers).split()
        assert not any(flags[: lookup["boundary"]]) and flags[-1]
    alone = read_lookups(path, tokenizer, questions_per_text=1)
    assert len(alone) == len(rows)


def test_an_answer_may_be_a_text_and_a_beginning_token_stays(tmp_path):
    class Beginning:
        """A tokenizer that puts one token before every text and one behind it."""

        def __init__(self):
            self.inner = tokenizer_with_stops()

        def __call__(self, text, add_special_tokens=True):
            ids = self.inner(text, add_special_tokens=False)["input_ids"]
            return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}

    rows = [
        {"context": "w1 w2 .", "question": "w3", "answer": "w4 w5"},
        {"context": "w1 w2 .", "question": "w6", "choices": [" w7"], "answer": 0},
        {"context": "w8 .", "question": "w9", "answer": " w0"},
    ]
    path = write_rows(tmp_path / "some.jsonl", rows)
    path.write_text(path.read_text() + "\n")  # an empty line is none
    first, second = read_lookups(path, Beginning())
    assert first["input_ids"] == [1, 4, 5, 93, 6, 7, 8, 9, 10] and first["boundary"] == 4
    assert [place for place, flag in enumerate(first["answers"]) if flag] == [5, 6, 8]
    assert second == {"input_ids": [1, 11, 93, 12, 3], "boundary": 3, "answers": [False] * 4 + [True]}


GOOD = {"context": "w1 w2 .", "question": "w3", "answer": "w4"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "is a list"),
        (json.dumps({"question": "w1", "choices": ["w2"]}), "lacks 'context', 'answer'; it has 'question', 'choices'"),
        (json.dumps({**GOOD, "context": " "}), "'context' must be a text"),
        (json.dumps({**GOOD, "answer": 1}), "without 'choices' the 'answer' must be a text, got 1"),
        (json.dumps({**GOOD, "choices": ["w1", "w2"], "answer": 2}), "index of one of 2 choices, got 2"),
        (json.dumps({**GOOD, "choices": "w1", "answer": 0}), "'choices' must be a list"),
        (json.dumps({**GOOD, "choices": [3], "answer": 0}), "choice 0 must be a text"),
    ],
)
def test_a_wrong_line_is_named_in_one_line_with_exit_code_2(pair, tmp_path, capsys, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    job = make_job(pair, tmp_path / "out", **LEARNED)
    assert main(["fit", *job_arguments(job, "--lookups", str(path))]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kvbridge: {path}, line 2") and message in said and said.count("\n") == 1
    assert not (job.output / "config.json").exists()


def test_files_without_questions_are_refused(tmp_path):
    tokenizer = tokenizer_with_stops()
    with pytest.raises(CalibrationError, match="cannot be read: .*gone"):
        read_lookups(tmp_path / "gone.jsonl", tokenizer)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(CalibrationError, match="holds no questions"):
        read_lookups(tmp_path / "empty.jsonl", tokenizer)
    with pytest.raises(CalibrationError, match="line 1: 'context' must have two tokens"):
        read_lookups(write_rows(tmp_path / "short.jsonl", [{**GOOD, "context": "w1"}]), tokenizer)


# ---- the fit --------------------------------------------------------------------------------------------------------


def test_a_fit_with_lookups_learns_the_choice_in_every_plan_that_has_the_pair(pair, tmp_path, capsys):
    tokenizer = tokenizer_with_stops()
    questions = pair / "questions.jsonl"
    job = make_job(pair, tmp_path / "none", **LEARNED)
    models = [AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for name in (job.source, job.target)]
    lines = (pair / "texts.jsonl").read_text().splitlines()
    ids = [torch.tensor([tokenizer(json.loads(line)["text"])["input_ids"][:LENGTH]]) for line in lines]
    lookups = read_lookups(questions, tokenizer)
    expected = fit_mapper(*models, ids, job.fit, tokenizer=tokenizer, progress=False, lookups=lookups)
    weights = {name: parameter.detach() for name, parameter in expected.named_parameters()}
    assert any(name.startswith("repair_scorer.") for name in weights)
    for plan, more in {"a": {}, "b": {"target_blocks": 2}}.items():
        job = make_job(pair, tmp_path / plan, plan=plan, **more, **LEARNED)
        extra = ["--lookups", str(questions), "--gate-sequences", "0"]
        extra += [] if plan == "a" else ["--target-blocks", "2"]
        assert main(["fit", "--json", *job_arguments(job, *extra)]) == 0
        mapper = KVBridgeMapper.from_pretrained(job.output)
        assert mapper.config.repair == "learned" and mapper.repair_scorer is not None
        assert mapper.config.repair_scorer["questions"] + mapper.config.repair_scorer["heldout_questions"] == 48
        assert (
            mapper.config.fit["lookups"]["name"] == "questions.jsonl" and mapper.config.fit["lookups"]["texts"] == 24
        )
        assert relative_error(weights_of(job.output), weights) < 1e-3
    capsys.readouterr()
    # With a training on the target's predictions, which takes the other way through a run.
    short = DistillationConfig(steps=2, learning_rate=1e-4, lookup_fraction=0.5, validation_sequences=2, batch_size=2)
    trained = make_job(pair, tmp_path / "trained", lookups=questions, distillation=short, **LEARNED)
    fit(trained)
    mapper = KVBridgeMapper.from_pretrained(trained.output)
    assert mapper.config.repair == "learned" and mapper.repair_scorer is not None
    assert mapper.config.fit["distillation"]["training_lookups"] > 0


def test_a_changed_file_of_lookups_does_not_go_on(pair, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_bytes((pair / "questions.jsonl").read_bytes())
    fit(make_job(pair, tmp_path / "out", lookups=path, **LEARNED))
    (tmp_path / "elsewhere").mkdir()
    moved = path.rename(tmp_path / "elsewhere" / path.name)
    fit(make_job(pair, tmp_path / "out", lookups=moved, **LEARNED))  # where it lies is its own business
    moved.write_text(moved.read_text() + json.dumps(GOOD) + "\n")
    with pytest.raises(CalibrationError, match=r"lookups\.sha256"):
        fit(make_job(pair, tmp_path / "out", lookups=moved, **LEARNED))
    with pytest.raises(CalibrationError, match=r"lookups: \{.*-> None"):
        fit(make_job(pair, tmp_path / "out", **LEARNED))


@pytest.mark.parametrize("more", [{}, {"method": "low_rank", "rank": 4}], ids=["divisible", "whole"])
def test_a_job_measures_in_how_many_layers_to_repair(pair, tmp_path, more):
    job = make_job(pair, tmp_path / "out", repair_layers="auto", **more)
    fit(job)
    mapper = KVBridgeMapper.from_pretrained(job.output)
    measured = mapper.config.fit["repair_layers_kl"]
    assert mapper.config.repair_layers in (len(measured) - 1, mapper.config.target_geometry["num_layers"])


@pytest.mark.parametrize("more", [{}, {"method": "low_rank", "rank": 4}], ids=["divisible", "whole"])
def test_without_lookups_it_is_said_once_and_words_choose(pair, tmp_path, caplog, more):
    job = make_job(pair, tmp_path / "out", **LEARNED, **more)
    with caplog.at_level(logging.WARNING):
        fit(job)
    warnings = [record.getMessage() for record in caplog.records if "learn" in record.getMessage()]
    assert len(warnings) == 1 and "--lookups" in warnings[0] and "by 'question'" in warnings[0]
    mapper = KVBridgeMapper.from_pretrained(job.output)
    assert mapper.config.repair == "question" and mapper.repair_scorer is None


def test_lookups_that_cannot_be_used_are_refused_before_anything_is_read(pair, tmp_path):
    questions = pair / "questions.jsonl"
    with pytest.raises(FitConfigError, match="plan c never has both in memory"):
        fit(make_job(pair, tmp_path / "out", plan="c", lookups=questions, **LEARNED))
    with pytest.raises(FitConfigError, match="nothing in these settings learns"):
        fit(make_job(pair, tmp_path / "out", lookups=questions))
    with pytest.raises(FitConfigError, match="plan c never has both in memory"):
        fit(make_job(pair, tmp_path / "out", plan="c", repair_layers="auto"))
    asks = DistillationConfig(steps=2, lookup_fraction=0.5)
    with pytest.raises(FitConfigError, match="give them with --lookups"):
        fit(make_job(pair, tmp_path / "out", distillation=asks))


def test_no_plan_that_parts_the_models_is_chosen(pair):
    sizes = [ModelSize.of(AutoConfig.from_pretrained(str(pair / role))) for role in ("source", "target")]
    config, work = FitConfig(top_k=2, **LEARNED), Workload(30, LENGTH, 1, 1, 2, 4, 1)
    # Enough for the larger model, and not for both.
    budget = make_plan("c", 5, *sizes, config, work).peak
    assert choose_plan(*sizes, config, work, budget).plan == "c"
    with pytest.raises(CalibrationError, match="No plan fits"):
        choose_plan(*sizes, config, work, budget, both=True)


def test_in_two_processes_the_main_one_learns(pair, tmp_path):
    context = forkserver()
    fit(make_job(pair, tmp_path / "one", lookups=pair / "questions.jsonl", **LEARNED))
    port = free_port()
    arguments = job_arguments(make_job(pair, tmp_path / "two", **LEARNED), "--lookups", str(pair / "questions.jsonl"))
    started = [
        context.Process(target=run_command_in_child, args=([*arguments, "--gate-sequences", "0"], 0.0, rank, 2, port))
        for rank in range(2)
    ]
    for child in started:
        child.start()
    for child in started:
        child.join(300)
    assert [child.exitcode for child in started] == [0, 0]
    mapper = KVBridgeMapper.from_pretrained(tmp_path / "two")
    assert mapper.config.repair == "learned"
    assert relative_error(weights_of(tmp_path / "two"), weights_of(tmp_path / "one")) < 1e-3
