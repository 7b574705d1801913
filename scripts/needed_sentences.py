"""Which sentences of a Tinytown text a question about it needs, as the generator of its world wrote them.

They are the last statement or event that sets a fact, the introduction that a pronoun points to, and both steps of a
two-step question.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import lookup_texts  # noqa: F401  (makes the family's modules importable)
import torch
import words as W
from questions import SETS, written_questions
from world import ATTRIBUTES, Writer

from kvbridge_hf.evaluation import Question


def slots_of(writer: Writer, kind: str, question: str) -> dict[str, str]:
    """The names in a question; its stem holds all of them."""
    stem = W.QUESTIONS[kind][1]
    for slots, _ in writer.candidates(kind):
        if question.endswith(f"? {stem.format(**slots)}"):
            return slots
    raise ValueError(f"This is no question of kind {kind!r} about the writer's world: {question!r}.")


def facts_of(writer: Writer, kind: str, slots: dict[str, str]) -> list[tuple[str, ...]]:
    """The facts that an answer follows from."""
    world = writer.world
    if kind in ATTRIBUTES:
        return [(kind, slots["p"])]
    if kind == "thing":
        return [(kind, slots["t"])]
    if kind == "thing_city":
        return [("thing", slots["t"]), ("city", world.holder[slots["t"]])]
    if kind in ("friend_city", "friend_job"):
        return [("friend", slots["p"]), (kind.split("_")[1], world.values["friend", slots["p"]])]
    if kind in ("resident", "count"):
        return [("city", person) for person in world.with_value("city", slots["c"])]
    if kind == "worker":
        return [("job", person) for person in world.with_value("job", slots["j"])]
    if kind == "sum":
        return [("coins", slots["p"]), ("coins", slots["q"])]
    if kind in ("teller", "listener"):
        place, name = (1, slots["q"]) if kind == "teller" else (0, slots["p"])
        return [("tell", *told) for told in world.told if told[place] == name and told[2] == slots["t"]]
    raise ValueError(f"No facts are known for questions of kind {kind!r}.")


def needed_segments(writer: Writer, kind: str, question: str) -> set[int]:
    """The segments of a writer's text that must be read to answer a question about it."""
    facts = facts_of(writer, kind, slots_of(writer, kind, question))
    return {index for fact in facts for index in writer.told_in[fact]}


def with_same_people(writer: Writer, needed: set[int]) -> set[int]:
    """These segments and all others that name somebody whom they name."""
    names = [set(text.replace(".", " ").split()) & set(writer.world.people) for text, _ in writer.segments]
    people = set().union(*(names[index] for index in needed))
    return needed | {index for index, named in enumerate(names) if named & people}


def regenerate(split: str, questions: Sequence[Question]) -> list[tuple[Writer, set[int]]]:
    """The writer of each question's context, and the segments of it that are needed.

    Raises:
        ValueError: the generator does not write these questions.
    """
    found = []
    for number, (question, (writer, row)) in enumerate(zip(questions, written_questions(*SETS[split]), strict=False)):
        if question != Question.from_dict(row):
            raise ValueError(f"Question {number} of {split!r} is not what the generator writes: {question!r}, {row!r}")
        found.append((writer, needed_segments(writer, row["kind"], row["question"])))
    if len(found) < len(questions):
        raise ValueError(f"The generator writes {len(found)} questions of {split!r}; the file has {len(questions)}.")
    return found


def tokens_of(tokenizer: Any, writer: Writer, segments: set[int], context: Sequence[int]) -> torch.Tensor:
    """Which tokens of an encoded context belong to these segments, `(tokens,)`; a space belongs to what follows it."""
    texts = [text for text, _ in writer.segments]
    starts = [0, *accumulate(len(text) + 1 for text in texts)][:-1]
    encoded = tokenizer(" ".join(texts), return_offsets_mapping=True)
    if list(encoded["input_ids"][: len(context)]) != list(context):
        raise ValueError("The context was encoded in another way than the tokenizer encodes it.")
    spans = encoded["offset_mapping"][: len(context)]
    return torch.tensor([last > first and bisect_right(starts, last - 1) - 1 in segments for first, last in spans])
