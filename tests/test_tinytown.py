"""The Tinytown data: its answers follow from its texts, its splits are apart, its tokenizer loses nothing."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest

TINYTOWN = Path(__file__).resolve().parent.parent / "examples" / "tinytown"
sys.path.insert(0, str(TINYTOWN))

import corpus  # noqa: E402
import questions  # noqa: E402
import tokenizer as tokenizer_module  # noqa: E402
import words as W  # noqa: E402
import world  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_module.build_tokenizer()


class Reader:
    """Reads a text sentence by sentence with patterns of its own and remembers the last thing said of each fact."""

    PATTERNS = [
        ("city", r"(\w+) lives in (\w+)\."),
        ("city", r"The home of (\w+) is (\w+)\."),
        ("city", r"(\w+) has a house in (\w+)\."),
        ("city", r"(\w+) moved to (\w+)\."),
        ("city", r"house of (\w+) in (\w+)\."),
        ("job", r"(\w+) works as a (\w+)\."),
        ("job", r"(\w+) now works as a (\w+)\."),
        ("job", r"The job of (\w+) is (\w+)\."),
        ("job", r"(\w+) is a (\w+)\."),
        ("job", r"I saw (\w+) at work, as a (\w+)\."),
        ("color", r"(\w+) likes the color (\w+)\."),
        ("color", r"The best color for (\w+) is (\w+)\."),
        ("color", r"I asked (\w+) which color is best and the answer was (\w+)\."),
        ("friend", r"The friend of (\w+) is (\w+)\."),
        ("friend", r"(\w+) has a friend named (\w+)\."),
        ("friend", r"I met (\w+) and then (\w+), the friend"),
        ("coins", r"(\w+) has (\d+) coins\."),
        ("coins", r"In the purse of (\w+) are (\d+) coins\."),
        ("thing", r"(\w+) (?:has|owns) the (\w+)\."),
        ("tell", r"(\w+) told (\w+) about the (\w+)\."),
    ]
    SWAPPED = [
        ("thing", r"The (\w+) is with (\w+)\."),
        ("thing", r"(?:gave) the (\w+) to (\w+)\."),
        ("thing", r"I saw the (\w+) in the house of (\w+)\."),
        ("thing", r"I gave my (\w+) to (\w+)\."),
    ]

    def __init__(self, text: str):
        self.facts: dict[tuple[str, str], str] = {}
        self.told: list[tuple[str, str, str]] = []
        last = {"She": None, "He": None}
        for sentence in re.findall(r'[^.?]*[.?](?: ")?', text):
            sentence = sentence.strip()
            quoted = sentence.startswith('"') or ': "' in sentence
            got = re.search(r"(\w+) got the (\w+) from (\w+)\.", sentence)
            if got:
                self.facts["thing", got[2]] = got[1]
                continue
            introduced = re.search(r"(?:This is|Here comes|Then we met|there is) (\w+) \w+\.", sentence)
            if introduced and introduced[1] in W.FIRST_NAMES:
                last["She" if introduced[1] in W.WOMEN else "He"] = introduced[1]
                continue
            for kind, pattern in self.PATTERNS:
                found = re.search(pattern, sentence)
                if not found:
                    continue
                if kind == "tell":
                    self.told.append((found[1], found[2], found[3]))
                    break
                subject = last[found[1]] if found[1] in last else found[1]
                if subject not in W.FIRST_NAMES:
                    continue
                if kind == "thing":
                    self.facts["thing", found[2]] = subject
                elif not quoted or (kind, subject) not in self.facts:
                    self.facts[kind, subject] = found[2]
                break
            else:
                for kind, pattern in self.SWAPPED:
                    found = re.search(pattern, sentence)
                    if found and found[2] in W.FIRST_NAMES:
                        self.facts[kind, found[1]] = found[2]

    def answer(self, kind: str, question: str) -> str:
        names = [w for w in re.findall(r"\w+", question) if w in W.FIRST_NAMES]
        things = [w for w in re.findall(r"\w+", question) if w in W.THINGS]
        if kind in ("city", "job", "color", "friend", "coins"):
            return self.facts[kind, names[0]]
        if kind == "thing":
            return self.facts["thing", things[0]]
        if kind in ("friend_city", "friend_job"):
            return self.facts[kind.split("_")[1], self.facts["friend", names[0]]]
        if kind == "thing_city":
            return self.facts["city", self.facts["thing", things[0]]]
        if kind in ("resident", "worker"):
            attribute, pool = ("city", W.CITIES) if kind == "resident" else ("job", W.JOBS)
            value = next(w for w in re.findall(r"\w+", question) if w in pool)
            return next(p for (a, p), v in self.facts.items() if a == attribute and v == value)
        if kind == "teller":
            return next(a for a, b, t in self.told if b == names[0] and t == things[0])
        if kind == "listener":
            return next(b for a, b, t in self.told if a == names[0] and t == things[0])
        if kind == "count":
            city = next(w for w in re.findall(r"\w+", question) if w in W.CITIES)
            return str(sum(a == "city" and v == city for (a, _), v in self.facts.items()))
        return str(int(self.facts["coins", names[0]]) + int(self.facts["coins", names[1]]))


@pytest.mark.parametrize("name", ["validation", "test", "test_long", "test_diary"])
def test_every_answer_follows_from_its_text(name):
    rows = [json.loads(line) for line in (TINYTOWN / "questions" / f"{name}.jsonl").open(encoding="utf-8")]
    assert len(rows) >= 100
    for row in rows:
        answer = Reader(row["context"]).answer(row["kind"], row["question"])
        assert row["choices"][row["answer"]] == f" {answer}", (row["kind"], row["question"], row["context"])
        assert len(set(row["choices"])) == len(row["choices"])


def test_bundled_sets_are_what_the_generator_writes():
    for name, settings in questions.SETS.items():
        rows = [json.loads(line) for line in (TINYTOWN / "questions" / f"{name}.jsonl").open(encoding="utf-8")]
        assert rows == list(questions.question_set(*settings))


def test_worlds_are_disjoint():
    people = {split: set(world.full_names(split)) for split in world.SPLITS}
    assert all(people.values())
    assert not people["train"] & people["validation"] | people["train"] & people["test"]
    assert not people["validation"] & people["test"]


def test_held_out_templates_occur_in_test_documents_only():
    def marks(templates):
        starts = {re.sub(r"\{\w+\}.*", "", text).strip() for text in templates}
        return {start for start in starts if start.count(" ") > 1}

    held_out = marks(W.HELD_OUT_FILLERS) | marks(t for group in W.HELD_OUT_QUESTIONS.values() for t in group)
    held_out -= marks(W.FILLERS) | marks(t for group, _ in W.QUESTIONS.values() for t in group)
    rng = random.Random(5)
    text = {
        split: " ".join(corpus.text_of(corpus.document(rng, split, 300)) for _ in range(150)) for split in world.SPLITS
    }
    assert sum(mark in text["test"] for mark in held_out) > 3
    assert not any(mark in text[split] for mark in held_out for split in ("train", "validation"))


def test_documents_have_about_the_length_asked_for(tokenizer):
    encode = tokenizer_module.SegmentEncoder(tokenizer)
    for length in (50, 200, 1500):
        found = [len(encode(corpus.document(random.Random(seed), "train", length))[0]) for seed in range(8)]
        assert all(length <= count <= 1.15 * length + 40 for count in found), found


def test_segments_encode_as_the_tokenizer_does(tokenizer):
    encode = tokenizer_module.SegmentEncoder(tokenizer)
    for genre in ("story", "chat", "diary", "list", "quiz"):
        segments = corpus.document(random.Random(7), "test", 200, genre=genre)
        assert encode(segments)[0] == tokenizer.encode(corpus.text_of(segments))


def test_any_text_can_be_encoded(tokenizer):
    text = "Zoë paid 3,50 € — naïve?\n\tTab, two  spaces, 漢字 and 🙂."
    ids = tokenizer.encode(text)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_known_words_are_one_token(tokenizer):
    assert all(len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1 for word in W.vocabulary())


def test_chat_template_is_what_chat_documents_hold(tokenizer):
    messages = [{"role": "user", "content": "Listen."}, {"role": "assistant", "content": "Go on."}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == "<|bos|><|user|> Listen. <|end|> <|assistant|> Go on. <|end|>"
