"""Question sets and conversations from Tinytown worlds, as JSON lines in the style of lm-eval.

    python examples/tinytown/questions.py examples/tinytown/questions

A question line holds ``context``, ``question`` (ending in the stem of the answer), ``choices`` (each a continuation
of one token), ``answer`` (index of the right choice), ``kind`` and ``context_id``. A conversation line holds ten
turns, each with the user's text, the stem, choices and answer of the assistant's reply.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import words as W
from corpus import text_of
from world import Writer

# Answers of one word; how often each kind is asked. Reverse lookups ("Who lives in Rome?") are few: the family learns
# them late, and a question that the target cannot answer says nothing about a handoff.
KIND_WEIGHTS = {
    "city": 5,
    "job": 4,
    "friend": 4,
    "color": 3,
    "coins": 3,
    "listener": 3,
    "friend_city": 1,
    "thing": 1,
    "resident": 1,
    "teller": 1,
    "worker": 0.5,
    "thing_city": 0.5,
    "sum": 0.5,
    "count": 0.5,
}
SETS = {
    # file: (split, seed, contexts, context lengths, diary)
    "validation": ("validation", 101, 80, (96, 160, 224, 320), False),
    "test": ("test", 102, 160, (96, 160, 224, 320), False),
    "test_long": ("test", 103, 40, (512, 768, 1024, 1400), False),
    "test_diary": ("test", 104, 60, (96, 160, 224), True),
}
QUESTIONS_PER_CONTEXT = 3


def new_writer(rng: random.Random, split: str, length: int, diary: bool = False) -> Writer:
    return Writer(rng, split, level=3, num_people=rng.randint(4, min(9, 3 + length // 40)), diary=diary)


def draw_question(writer: Writer, kinds: set[str], held_out: bool):
    """A question of one of ``kinds``; among its possible answers each is equally likely, however often it is true."""
    rng = writer.rng
    options = [kind for kind in KIND_WEIGHTS if kind in kinds and writer.candidates(kind)]
    if not options:
        return None
    kind = rng.choices(options, [KIND_WEIGHTS[k] for k in options])[0]
    candidates = writer.candidates(kind)
    answer = rng.choice(sorted({value for _, value in candidates}))
    slots = rng.choice([slots for slots, value in candidates if value == answer])
    templates, stem = W.QUESTIONS[kind]
    question = rng.choice(W.HELD_OUT_QUESTIONS[kind] if held_out else templates).format(**slots)
    choices = writer.choices(kind, answer)
    return {
        "kind": kind,
        "question": question,
        "stem": stem.format(**slots),
        "choices": [f" {choice}" for choice in choices],
        "answer": choices.index(answer),
    }


def question_set(split: str, seed: int, contexts: int, lengths: tuple[int, ...], diary: bool):
    return (row for _, row in written_questions(split, seed, contexts, lengths, diary))


def written_questions(split: str, seed: int, contexts: int, lengths: tuple[int, ...], diary: bool):
    """The lines of a set, each with the writer of its context."""
    rng = random.Random(seed)
    for context_id in range(contexts):
        length = lengths[context_id % len(lengths)]
        writer = new_writer(rng, split, length, diary)
        if diary:
            writer.add(writer.pick(W.DIARY["open"], f=" ".join(writer.world.full[writer.world.people[0]])))
        writer.tell(length)
        kinds = set(KIND_WEIGHTS)
        for _ in range(QUESTIONS_PER_CONTEXT):
            drawn = draw_question(writer, kinds, held_out=split == "test" and rng.random() < 0.5)
            if drawn is None:
                break
            kinds.discard(drawn["kind"])
            text = f"{drawn['question']} {drawn['stem']}"
            yield (
                writer,
                {
                    "context_id": context_id,
                    "context": text_of(writer.segments),
                    "question": text,
                    "choices": drawn["choices"],
                    "answer": drawn["answer"],
                    "kind": drawn["kind"],
                },
            )


def conversation(rng: random.Random, split: str, turns: int = 10) -> dict:
    """Facts from the user, a question at the end of each turn, answered by the assistant from anything said so far."""
    writer = new_writer(rng, split, 240)
    out = []
    for _ in range(turns):
        start = len(writer.segments)
        writer.add(rng.choice(W.USER_OPENERS))
        for _ in range(rng.randint(2, 3)):
            if not writer.fact():
                writer.event()
        drawn = draw_question(writer, set(KIND_WEIGHTS) - {"sum", "count"}, held_out=False)
        told = text_of(writer.segments[start:])
        del drawn["kind"]
        out.append({"user": f"{told} {drawn.pop('question')}", **drawn})
    return {"system": rng.choice(W.SYSTEM_PROMPTS), "turns": out}


def write_lines(path: Path, rows) -> int:
    rows = list(rows)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, settings in SETS.items():
        print(f"{name}.jsonl: {write_lines(folder / f'{name}.jsonl', question_set(*settings))} questions")
    rng = random.Random(106)
    count = write_lines(folder / "conversations.jsonl", (conversation(rng, "test") for _ in range(24)))
    print(f"conversations.jsonl: {count} conversations of ten turns")


if __name__ == "__main__":
    main()
