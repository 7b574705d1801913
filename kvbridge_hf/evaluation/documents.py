"""Running text, split into a prefix that is handed over and a continuation that is scored."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..padding import pad
from .errors import EvaluationError
from .runs import Batch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Document:
    """Tokens of a text: `prefix` is handed over, `continuation` scored. Both have at least one token."""

    prefix: tuple[int, ...]
    continuation: tuple[int, ...]


def split_documents(
    token_lists: Iterable[Sequence[int]],
    *,
    continuation_tokens: int = 32,
    prefix_tokens: int | None = None,
    min_prefix_tokens: int = 2,
    limit: int | None = None,
) -> list[Document]:
    """Splits texts for scoring; those that are too short are left out and counted in a log message.

    Args:
        token_lists: the texts in tokens.
        continuation_tokens: tokens that are scored.
        prefix_tokens: tokens before them, counted from the text's beginning; None takes all but the continuation.
        min_prefix_tokens: texts with a shorter prefix are left out.
        limit: at most this many documents.

    Raises:
        EvaluationError: no text is long enough.
    """
    documents: list[Document] = []
    short = 0
    for tokens in token_lists:
        if limit is not None and len(documents) >= limit:
            break
        length = len(tokens) - continuation_tokens if prefix_tokens is None else prefix_tokens
        if length < min_prefix_tokens or len(tokens) < length + continuation_tokens:
            short += 1
            continue
        tokens = tuple(int(token) for token in tokens)
        documents.append(Document(tokens[:length], tokens[length : length + continuation_tokens]))
    if short:
        logger.info("Left out %d texts that are too short to be split.", short)
    if not documents:
        raise EvaluationError(
            f"None of {short} texts has {prefix_tokens or min_prefix_tokens} tokens before a continuation of "
            f"{continuation_tokens}; give longer texts or ask for less."
        )
    return documents


@dataclass
class DocumentBatch(Batch):
    """A batch whose suffixes are continuations without their last token, padded on the right.

    `labels` is `(rows, keep)`: column j of the logits predicts column j of the continuation, the first one from the
    last token of the prefix.
    """

    labels: torch.Tensor


def document_batches(documents: Sequence[Document], batch_size: int = 32) -> list[DocumentBatch]:
    """Batches of `batch_size` documents of similar length.

    Where there are two documents or more, every batch has at least two: the mismatched control needs another one.
    """
    batch_size = max(batch_size, 2)
    order = sorted(range(len(documents)), key=lambda index: len(documents[index].prefix))
    groups = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    if len(groups) > 1 and len(groups[-1]) == 1:
        last = groups.pop()
        groups[-1] += last
    return [_batch(documents, group) for group in groups]


def _batch(documents: Sequence[Document], items: list[int]) -> DocumentBatch:
    rows = [documents[index] for index in items]
    prefix_ids, prefix_mask = pad([row.prefix for row in rows])
    labels, valid = pad([row.continuation for row in rows], side="right")
    # Without context the first token has nothing to be predicted from; the last token of the prefix stands there, as
    # the target reads it itself after every handoff too.
    floor_ids, floor_mask = pad([row.prefix[-1:] for row in rows])
    return DocumentBatch(
        prefix_ids=prefix_ids,
        prefix_mask=prefix_mask,
        rows=torch.arange(len(items)),
        suffix_ids=labels[:, :-1],
        suffix_mask=valid[:, 1:],
        floor_ids=floor_ids,
        floor_mask=floor_mask,
        keep=labels.shape[1],
        valid=valid.bool(),
        items=items,
        labels=labels,
    )
