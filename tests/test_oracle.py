"""The oracle knows the sentences that an answer follows from, and the generator writes the bundled questions again."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path

import pytest
import torch

from kvbridge_hf import bundled
from kvbridge_hf.evaluation import load_questions

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "tinytown"))
    import measure_oracle
    import needed_sentences

    yield needed_sentences, measure_oracle
    for name in ("measure_oracle", "needed_sentences", "lookup_texts"):
        sys.modules.pop(name, None)


@pytest.fixture
def oracle(scripts):
    return scripts[0]


@pytest.fixture
def writer(oracle):
    """A writer who has told nothing yet, of three people."""
    writer = oracle.Writer(random.Random(0), "train", 3, 3)
    writer.world.people = ["Alice", "Bob", "Carol"]
    writer.world.full = {name: f"{name} Ash" for name in writer.world.people}
    return writer


def say(writer, attribute, person, value, pronoun=False):
    writer.world.values[attribute, person] = value
    writer.render(attribute, person, value, pronoun)


def test_of_a_fact_that_is_set_twice_the_later_sentence_is_needed(oracle, writer):
    say(writer, "city", "Alice", "Rome")
    say(writer, "job", "Alice", "baker")
    while ("city", "Alice") not in writer.world.changed:
        writer.event()
        writer.world.told.clear()  # so that there is always something to tell
    moved = len(writer.segments) - 1
    writer.filler()
    now = writer.world.values["city", "Alice"]
    assert now != "Rome" and writer.segments[moved][0].endswith(f"{now}.")
    assert oracle.needed_segments(writer, "city", "Where does Alice live? Alice lives in") == {moved}


def test_a_two_step_question_needs_both_steps(oracle, writer):
    say(writer, "city", "Bob", "Oslo")
    say(writer, "city", "Carol", "Lima")
    say(writer, "friend", "Alice", "Carol")
    question = "Where does the friend of Alice live? The friend of Alice lives in"
    assert oracle.needed_segments(writer, "friend_city", question) == {1, 2}
    # Whoever names Alice or Carol, but not Bob.
    writer.add("Alice slept well.")
    assert oracle.with_same_people(writer, {1, 2}) == {1, 2, 3}


def test_a_pronoun_needs_its_introduction(oracle, writer):
    writer.filler()
    writer.rng.random = lambda: 0.0  # every fact of an introduction with a pronoun
    writer.attributes = ["coins"]
    writer.introduce("Carol")
    say(writer, "coins", "Bob", "4")
    assert writer.segments[2][0].startswith("She has")
    stem = "Carol has"
    assert oracle.needed_segments(writer, "coins", f"How many coins does Carol have? {stem}") == {1, 2}
    total = "How many coins do Bob and Carol have together? Together Bob and Carol have"
    assert oracle.needed_segments(writer, "sum", total) == {1, 2, 3}


def test_reverse_and_told_questions(oracle, writer):
    say(writer, "city", "Bob", "Oslo")
    say(writer, "city", "Carol", "Oslo")
    writer.world.holder["lamp"] = "Bob"
    writer.render("thing", "Bob", "lamp")
    writer.tell_of_thing("Alice", "Bob")
    thing = writer.world.told[0][2]
    needed = oracle.needed_segments
    assert needed(writer, "count", "How many people live in Oslo? The number of people in Oslo is") == {0, 1}
    assert needed(writer, "thing_city", "In which city is the lamp? The lamp is in") == {0, 2}
    told = f"Whom did Alice tell about the {thing}? Alice told about the {thing} to"
    assert needed(writer, "listener", told) == {3}
    with pytest.raises(ValueError, match="no question"):
        needed(writer, "city", "Where does Alice live? Alice lives in")


@pytest.mark.parametrize("split", ["validation", "test"])
def test_contexts_regenerate_and_their_needed_sentences_hold_the_answer(oracle, split):
    questions = load_questions(bundled.questions_path(split))
    written = oracle.regenerate(split, questions)
    counted = 0
    for question, (writer, needed) in zip(questions, written, strict=True):
        said = " ".join(writer.segments[index][0] for index in sorted(needed)).replace(".", " ").split()
        answer = question.choices[question.answer].strip()
        if question.kind not in ("count", "sum"):
            # A first name that a pronoun stands for is in the introduction.
            assert answer in said, (question, said)
            counted += 1
        for word in question.question.replace("?", " ").split():
            if word in writer.world.people or word in oracle.W.THINGS:
                assert word in said, (question, said)
    assert counted > 200
    changed = [
        dataclasses.replace(questions[0], context=questions[0].context + " It was a quiet day."),
        *questions[1:],
    ]
    with pytest.raises(ValueError, match="Question 0"):
        oracle.regenerate(split, changed)


def test_tokens_of_segments_are_those_of_their_own_text(oracle, writer):
    import tokenizer as tokenizer_module

    tokenizer = tokenizer_module.build_tokenizer()
    say(writer, "city", "Bob", "Oslo")
    say(writer, "friend", "Bob", "Carol")
    say(writer, "color", "Alice", "red")
    context = tokenizer(" ".join(text for text, _ in writer.segments))["input_ids"]
    flags = oracle.tokens_of(tokenizer, writer, {0, 2}, context)
    assert tokenizer.decode(torch.tensor(context)[flags]).strip() == f"{writer.segments[0][0]} {writer.segments[2][0]}"
    with pytest.raises(ValueError, match="encoded"):
        oracle.tokens_of(tokenizer, writer, {0}, context[1:])


def test_coverage_counts_rows_whose_needed_tokens_are_all_chosen(scripts):
    measure = scripts[1]
    coverage = measure.Coverage.__new__(measure.Coverage)
    coverage.covered = {0.25: 0, 0.5: 0}
    eligible = torch.ones(3, 4, dtype=torch.bool)
    scores = torch.tensor([[4.0, 3, 2, 1]]).expand(3, -1)
    wanted = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1]]).bool()
    assert not coverage.hook(scores, eligible, wanted).any()
    assert coverage.covered == {0.25: 1, 0.5: 2}
