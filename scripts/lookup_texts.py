"""Texts of Tinytown's train worlds with questions about them, as a distillation and a learned choice take them."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

FAMILY = Path(__file__).resolve().parent.parent / "examples" / "tinytown"


def lookup_texts(tokenizer: Any, count: int, seed: int = 0, questions: int = 6) -> list[dict[str, Any]]:
    """So many texts with `input_ids`, `boundary` and `answers`; see [`fit_mapper`]."""
    if str(FAMILY) not in sys.path:
        sys.path.insert(0, str(FAMILY))
    from world import Writer

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
