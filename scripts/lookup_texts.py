"""Texts that scripts have the family's generator write: with questions to learn from, or of one genre."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

FAMILY = Path(__file__).resolve().parent.parent / "examples" / "tinytown"
LOOKUPS = 1200  # texts that a learned choice of what to repair is fitted on
if str(FAMILY) not in sys.path:
    sys.path.insert(0, str(FAMILY))

from corpus import document, text_of  # noqa: E402
from world import Writer  # noqa: E402


def lookup_texts(tokenizer: Any, count: int, seed: int = 0, questions: int = 6) -> list[dict[str, Any]]:
    """Texts of train worlds with `input_ids`, `boundary` and `answers`, as [`fit_mapper`] takes them."""
    rng = random.Random(seed)
    texts: list[dict[str, Any]] = []
    while len(texts) < count:
        length = rng.choice((96, 160, 224))
        writer = Writer(rng, "train", 3, rng.randint(4, min(9, 3 + length // 40)))
        writer.tell(length)
        told = len(writer.segments)
        for _ in range(questions):
            writer.ask()
        ids = tokenizer(" ".join(text for text, _ in writer.segments[:told]))["input_ids"]
        boundary, answers = len(ids), [False] * len(ids)
        for text, is_answer in writer.segments[told:]:
            more = tokenizer(f" {text}", add_special_tokens=False)["input_ids"]
            ids, answers = ids + more, answers + [is_answer] * len(more)
        if len(ids) > boundary:
            texts.append({"input_ids": ids, "boundary": boundary, "answers": answers})
    return texts


def genre_texts(genre: str, split: str, count: int, rng: random.Random) -> list[str]:
    """So many texts of one genre."""
    return [text_of(document(rng, split, (160, 256, 384)[index % 3], genre=genre)) for index in range(count)]
