"""Texts with questions about them, from a file: what a learned choice of repair and a training on lookups read.

A line of the file is `{"context": str, "question": str, "choices": [str, ...], "answer": int}`, as lm-eval's
multiple-choice tasks and the question files of `kvbridge_hf.evaluation` have it, or has its `answer` as a text and no
choices. Further fields are ignored. Between the parts a space is put where neither brings white space of its own; a
choice follows its question as it stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..added_tokens import added_tokens, joint
from ..errors import CalibrationError
from .data import leading_tokens

# Questions about one text that are read one behind the other, so that the text is read once for all of them.
QUESTIONS_PER_TEXT = 6


@dataclass
class _Asked:
    """A text with the questions about it and their answers; the line on which it first stands."""

    line: int
    context: str
    parts: list[tuple[str, str]] = field(default_factory=list)


def read_lookups(
    path: str | Path, tokenizer: Any, questions_per_text: int = QUESTIONS_PER_TEXT
) -> list[dict[str, Any]]:
    """Read a file of questions as lookups, which [`~calibration.driver.fit_mapper`] takes.

    Args:
        path: JSON lines; see the head of this module.
        tokenizer: Of the pair.
        questions_per_text: So many questions whose lines follow each other and share their context become one lookup.

    Returns:
        One dict a lookup: `input_ids` (the text, then questions with their answers), `boundary` (tokens of the text)
        and `answers` (a flag a token).

    Raises:
        CalibrationError: the file cannot be read or holds no questions, or a line is none; names file and line.
    """
    leading = leading_tokens(tokenizer)
    lookups = [_encode(asked, Path(path), tokenizer, leading) for asked in _grouped(Path(path), questions_per_text)]
    if not lookups:
        raise CalibrationError(f"{path} holds no questions.")
    return lookups


def _grouped(path: Path, most: int) -> Iterator[_Asked]:
    asked: _Asked | None = None
    for line, context, question, answer in _rows(path):
        if asked is None or asked.context != context or len(asked.parts) >= most:
            if asked is not None:
                yield asked
            asked = _Asked(line, context)
        asked.parts.append((question, answer))
    if asked is not None:
        yield asked


def _rows(path: Path) -> Iterator[tuple[int, str, str, str]]:
    """Line, context, question and answer of every row, each with its text."""
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, *_row(line, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"The lookups in {path} cannot be read: {error}") from error


def _row(line: str, where: str) -> tuple[str, str, str]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise CalibrationError(f"{where} is not JSON: {error}.") from error
    if not isinstance(row, dict):
        raise CalibrationError(f"{where} is a {type(row).__name__}, no object with context, question and answer.")
    missing = [name for name in ("context", "question", "answer") if name not in row]
    if missing:
        raise CalibrationError(f"{where} lacks {', '.join(map(repr, missing))}; it has {', '.join(map(repr, row))}.")
    for name in ("context", "question"):
        if not isinstance(row[name], str) or not row[name].strip():
            raise CalibrationError(f"{where}: {name!r} must be a text, got {row[name]!r}.")
    return row["context"], row["question"], _answer(row, where)


def _answer(row: dict[str, Any], where: str) -> str:
    """The right choice, or the answer itself where there are no choices."""
    answer, choices = row["answer"], row.get("choices")
    if choices is None:
        if not isinstance(answer, str) or not answer.strip():
            raise CalibrationError(f"{where}: without 'choices' the 'answer' must be a text, got {answer!r}.")
        return joint(row["question"], answer) + answer
    if not isinstance(choices, list) or not choices:
        raise CalibrationError(f"{where}: 'choices' must be a list of texts, got {choices!r}.")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise CalibrationError(
            f"{where}: 'answer' must be the index of one of {len(choices)} choices, got {answer!r}."
        )
    if not isinstance(choices[answer], str) or not choices[answer].strip():
        raise CalibrationError(f"{where}: choice {answer} must be a text, got {choices[answer]!r}.")
    return choices[answer]


def _encode(asked: _Asked, path: Path, tokenizer: Any, leading: list[int]) -> dict[str, Any]:
    """A lookup in tokens; every part has those that it adds to the text so far."""
    text = asked.context
    ids = leading + list(tokenizer(text, add_special_tokens=False)["input_ids"])
    boundary = len(ids)
    answers = [False] * boundary
    for question, answer in asked.parts:
        for part, is_answer in ((joint(text, question) + question, False), (answer, True)):
            more = added_tokens(tokenizer, text, part)
            if not more:
                raise CalibrationError(
                    f"{path}: {part!r}, of the text that begins on line {asked.line}, has no tokens."
                )
            text += part
            ids += more
            answers += [is_answer] * len(more)
    if boundary < 2:
        raise CalibrationError(f"{path}, line {asked.line}: 'context' must have two tokens or more, got {boundary}.")
    return {"input_ids": ids, "boundary": boundary, "answers": answers}


__all__ = ["QUESTIONS_PER_TEXT", "read_lookups"]
