"""Questions about a text that the source has read: loading, batching, and scoring their choices.

A line of a question file is `{"context": str, "question": str, "choices": [str, ...], "answer": int, "kind": str}`, as
lm-eval's multiple-choice tasks have it. Between context and question a space is put where neither brings white space
of its own; a choice follows the question as it stands, so one that is a word of its own begins with a space. A choice
is scored by its log-likelihood after context and question.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..added_tokens import added_tokens, joint
from ..padding import pad
from ..rotary import positions_from_mask
from .errors import EvaluationError
from .fidelity import log_probs, negative_log_likelihood
from .runs import Batch, Reading, cache_entries, cache_from_entries, run


@dataclass(frozen=True)
class Question:
    """One multiple-choice question about a context."""

    context: str
    question: str
    choices: tuple[str, ...]
    answer: int
    kind: str = "question"

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Question:
        """Checks one entry of a question file; further fields are ignored.

        Raises:
            EvaluationError: a field is missing or of the wrong kind.
        """
        missing = [name for name in ("context", "question", "choices", "answer") if name not in fields]
        if missing:
            raise EvaluationError(f"A question lacks {', '.join(missing)}; it has {', '.join(sorted(fields))}.")
        choices, answer = fields["choices"], fields["answer"]
        if not isinstance(choices, Sequence) or isinstance(choices, str) or len(choices) < 2:
            raise EvaluationError(f"choices must be a list of two or more strings, got {choices!r}.")
        if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
            raise EvaluationError(f"answer must be the index of one of {len(choices)} choices, got {answer!r}.")
        return cls(
            str(fields["context"]),
            str(fields["question"]),
            tuple(map(str, choices)),
            answer,
            str(fields.get("kind", "question")),
        )


def load_questions(path: str | Path, limit: int | None = None) -> list[Question]:
    """Reads a JSONL file of questions, at most `limit` of them.

    Raises:
        EvaluationError: a line is no question; the message names it.
    """
    questions: list[Question] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if limit is not None and len(questions) >= limit:
                break
            if not line.strip():
                continue
            try:
                questions.append(Question.from_dict(json.loads(line)))
            except (json.JSONDecodeError, EvaluationError) as error:
                raise EvaluationError(f"{path}, line {number}: {error}") from error
    if not questions:
        raise EvaluationError(f"{path} holds no questions.")
    return questions


@dataclass(frozen=True)
class EncodedQuestion:
    """A question in tokens. `context` holds what the tokenizer puts before a text, such as BOS."""

    context: tuple[int, ...]
    question: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    answer: int
    kind: str
    bos: tuple[int, ...] = ()


def encode_question(tokenizer: Any, question: Question) -> EncodedQuestion:
    """Encodes the parts so that each continues the one before it.

    The source reads the context before the question is known, so the context's tokens are those of the context alone.
    A following part gets the tokens that it adds to the text so far; where the joint falls inside a token, its own.

    Raises:
        EvaluationError: a part has no tokens.
    """

    text = joint(question.context, question.question) + question.question
    context = tuple(tokenizer(question.context, add_special_tokens=False)["input_ids"])
    suffix = tuple(added_tokens(tokenizer, question.context, text))
    choices = tuple(tuple(added_tokens(tokenizer, text, choice)) for choice in question.choices)
    if not context or not question.question or not suffix or not all(choices):
        raise EvaluationError(
            f"Context, question and every choice must have tokens; these have {len(context)}, {len(suffix)} and "
            f"{[len(choice) for choice in choices]}: {question.question!r}, {question.choices!r}."
        )
    # What stands before the text is kept; what a tokenizer puts behind it (EOS) would end the prompt.
    special = tuple(tokenizer(question.context)["input_ids"])
    start = next((i for i in range(len(special)) if special[i : i + len(context)] == context), 0)
    return EncodedQuestion(special[:start] + context, suffix, choices, question.answer, question.kind, special[:start])


@dataclass
class QuestionBatch(Batch):
    """A batch whose suffixes are questions, padded on the left: the last column is where every row is answered."""

    questions: list[EncodedQuestion]


def question_batches(questions: Sequence[EncodedQuestion], batch_size: int = 32) -> list[QuestionBatch]:
    """Groups questions that share a context, orders contexts by length, and fills batches of about `batch_size` rows.

    Where there are two contexts or more, every batch has at least two: the mismatched control needs another one.
    """
    by_context: dict[tuple[int, ...], list[int]] = {}
    for index, question in enumerate(questions):
        by_context.setdefault(question.context, []).append(index)
    groups: list[list[tuple[int, ...]]] = [[]]
    rows = 0
    for context in sorted(by_context, key=len):
        if len(groups[-1]) >= 2 and rows + len(by_context[context]) > batch_size:
            groups.append([])
            rows = 0
        groups[-1].append(context)
        rows += len(by_context[context])
    if len(groups) > 1 and len(groups[-1]) == 1:
        last = groups.pop()
        groups[-1] += last
    return [_batch(questions, [by_context[context] for context in group]) for group in groups if group]


def _batch(questions: Sequence[EncodedQuestion], members: list[list[int]]) -> QuestionBatch:
    items = [index for group in members for index in group]
    rows = torch.tensor([prefix for prefix, group in enumerate(members) for _ in group])
    prefix_ids, prefix_mask = pad([questions[group[0]].context for group in members])
    suffix_ids, suffix_mask = pad([questions[index].question for index in items])
    floor_ids, floor_mask = pad([questions[index].bos for index in items])
    return QuestionBatch(
        prefix_ids=prefix_ids,
        prefix_mask=prefix_mask,
        rows=rows,
        suffix_ids=suffix_ids,
        suffix_mask=suffix_mask,
        floor_ids=floor_ids,
        floor_mask=floor_mask,
        keep=1,
        valid=torch.ones(len(items), 1, dtype=torch.bool),
        items=items,
        questions=[questions[index] for index in items],
    )


def choice_log_likelihoods(
    model: PreTrainedModel, reading: Reading, questions: Sequence[EncodedQuestion]
) -> list[np.ndarray]:
    """Log-likelihood of every choice of every row.

    The first token of each choice is read off the logits at hand, so that choices of one token need nothing more; the
    others share one further forward on repeated rows of the cache.

    Args:
        model: the model that read the questions.
        reading: what it made of them; its cache is not changed.
        questions: one a row.

    Returns:
        One float64 array `(choices,)` a row.
    """
    first = log_probs(reading.logits[:, -1])
    scores = [
        first[row, [choice[0] for choice in q.choices]].double().cpu().numpy() for row, q in enumerate(questions)
    ]
    longer = [
        (row, index) for row, q in enumerate(questions) for index, choice in enumerate(q.choices) if len(choice) > 1
    ]
    if not longer:
        return scores
    picked = torch.tensor([row for row, _ in longer])
    tokens = [questions[row].choices[index] for row, index in longer]
    fed, fed_mask = pad([choice[:-1] for choice in tokens], side="right")
    labels, _ = pad([choice[1:] for choice in tokens], side="right")
    mask = torch.cat([reading.mask[picked], fed_mask], dim=1)
    positions = positions_from_mask(torch.cat([reading.position_mask[picked], fed_mask], dim=1))
    # The ids of cached columns are not looked at.
    ids = torch.cat([torch.zeros_like(reading.mask[picked]), fed], dim=1)
    cache = cache_from_entries(cache_entries(reading.cache), picked)
    logits = run(model, cache, ids, mask, keep=fed.shape[1], position_ids=positions).logits
    rest = -negative_log_likelihood(log_probs(logits), labels.to(logits.device)) * fed_mask.to(logits.device)
    for (row, index), value in zip(longer, rest.double().sum(1).cpu().numpy(), strict=True):
        scores[row][index] += value
    return scores
