"""Which tokens a distillation sees at which step: a function of the data and the seed, whatever ran before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import Dataset

from ..calibration.traces import Batch
from ..errors import CalibrationError
from ..padding import pad
from .distillation_config import DistillationConfig
from .functional import draw_boundary, hash_seed

# Last tokens of a prefix of running text by which tokens to recompute are chosen, as in a handoff.
QUESTION_TOKENS = 8
# Batches of sequences of like length are made within pools of so many batches.
POOL = 8


def sequences_of(
    batches: Iterable[Batch], heldout_fraction: float, seed: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Rows without their padding, those to train on and those held out, by the hash that the closed form uses."""
    training: list[torch.Tensor] = []
    heldout: list[torch.Tensor] = []
    for batch in batches:
        for ids, mask, value in zip(batch.input_ids, batch.attention_mask, batch.sequence_hashes(seed), strict=True):
            if int(mask.sum()) > 1:
                (heldout if value < heldout_fraction else training).append(ids[mask].cpu())
    return training, heldout


@dataclass(frozen=True)
class Lookup:
    """A text and what is asked of it.

    Attributes:
        ids (`(T,)`): The text, then questions with their answers.
        boundary: Tokens of the text.
        answers (`(T,)`): Bool; tokens of answers, by which nothing may be chosen.
    """

    ids: torch.Tensor
    boundary: int
    answers: torch.Tensor

    @classmethod
    def of(cls, item: Mapping[str, Any] | Lookup) -> Lookup:
        """From a mapping with `input_ids`, `boundary` and (all False by default) `answers`.

        Raises:
            CalibrationError: it has no tokens on one of the two sides.
        """
        if isinstance(item, Lookup):
            return item
        ids = torch.as_tensor(item["input_ids"]).long().flatten()
        answers = torch.as_tensor(item.get("answers", torch.zeros(len(ids)))).bool().flatten()
        boundary = int(item["boundary"])
        if not 2 <= boundary < len(ids) or len(answers) != len(ids):
            raise CalibrationError(
                f"A lookup has {len(ids)} tokens, {len(answers)} answer flags and its questions from token {boundary} "
                "on; it needs two tokens or more before them, one or more behind, and a flag a token."
            )
        return cls(ids, boundary, answers)


def split_lookups(lookups: Iterable[Any], heldout_fraction: float, seed: int) -> tuple[list[Lookup], list[Lookup]]:
    """Those to train on and those held out, by a hash of the text: questions about one text stay together."""
    training: list[Lookup] = []
    heldout: list[Lookup] = []
    for item in lookups:
        lookup = Lookup.of(item)
        text = padded_batch([lookup.ids[: lookup.boundary]])
        (heldout if text.sequence_hashes(seed)[0] < heldout_fraction else training).append(lookup)
    return training, heldout


def lookup_batch(lookups: list[Lookup]) -> tuple[Batch, int, torch.Tensor]:
    """Texts that end in one column, their questions behind it; with that column and the questions' mask `(B, T)`."""
    boundary = max(lookup.boundary for lookup in lookups)
    width = boundary + max(len(lookup.ids) - lookup.boundary for lookup in lookups)
    ids = torch.zeros(len(lookups), width, dtype=torch.long)
    mask, question = torch.zeros(2, len(lookups), width, dtype=torch.bool)
    for row, lookup in enumerate(lookups):
        columns = slice(boundary - lookup.boundary, boundary - lookup.boundary + len(lookup.ids))
        ids[row, columns], mask[row, columns] = lookup.ids, True
        question[row, columns] = ~lookup.answers
    question[:, :boundary] = False
    return Batch(ids, mask, torch.arange(len(lookups))), boundary, question


def text_question(batch: Batch, boundary: int) -> torch.Tensor:
    """The mask of what stands for a question in running text: the last tokens of the prefix."""
    question = torch.zeros_like(batch.attention_mask)
    question[:, max(boundary - QUESTION_TOKENS, 0) : boundary] = True
    return question


def padded_batch(rows: list[torch.Tensor]) -> Batch:
    """Rows side by side, padded on the right."""
    ids, mask = pad(rows, side="right")
    return Batch(ids, mask.bool(), torch.arange(len(rows)))


class StepBatches(Dataset):
    """The batch of every step, with the column at which its continuation starts.

    Args:
        sequences: To train on.
        config: Sizes.
        steps: How many.
        seed: Of the run.
        lookups: Texts with questions, for `config.lookup_fraction` of the steps.
    """

    def __init__(
        self,
        sequences: list[torch.Tensor],
        config: DistillationConfig,
        steps: int,
        seed: int,
        lookups: Sequence[Lookup] = (),
    ):
        self.sequences, self.config, self.seed = sequences, config, seed
        self.lookups = list(lookups)
        self.asks = [asks_at(step, config.lookup_fraction) for step in range(steps)]
        asked = sum(self.asks)
        self.groups = self._groups([len(sequence) for sequence in sequences], steps - asked, 1)
        self.lookup_groups = self._groups([len(lookup.ids) for lookup in self.lookups], asked, 5)

    def _groups(self, lengths: list[int], steps: int, kind: int) -> list[list[int]]:
        groups: list[list[int]] = []
        epoch = 0
        while len(groups) < steps:
            groups += self._epoch(lengths, (self.seed, kind, epoch))
            epoch += 1
        return groups[:steps]

    def _epoch(self, lengths: list[int], seed: tuple[int, ...]) -> list[list[int]]:
        """Every sequence once, in batches of like length (padding is work for nothing)."""
        generator = torch.Generator().manual_seed(hash_seed(seed))
        order = torch.randperm(len(lengths), generator=generator).tolist()
        size = self.config.batch_size
        groups = []
        for start in range(0, len(order), POOL * size):
            pool = sorted(order[start : start + POOL * size], key=lambda index: lengths[index])
            groups += [pool[place : place + size] for place in range(0, len(pool), size)]
        return [groups[place] for place in torch.randperm(len(groups), generator=generator).tolist()]

    def __len__(self) -> int:
        return len(self.asks)

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        # Steps of its own kind before it.
        place = sum(asks == self.asks[step] for asks in self.asks[:step])
        if self.asks[step]:
            batch, boundary, question = lookup_batch([self.lookups[index] for index in self.lookup_groups[place]])
        else:
            batch, boundary = draw_boundary(
                padded_batch([self.sequences[index] for index in self.groups[place]]),
                (self.seed, 2, step),
                min_prefix=self.config.min_prefix,
                min_continuation=self.config.min_continuation,
                max_continuation=self.config.max_continuation,
            )
            question = text_question(batch, boundary)
        return {
            "input_ids": batch.input_ids,
            "attention_mask": batch.attention_mask,
            "boundary": torch.tensor(boundary),
            "question": question,
            "native_fraction": torch.tensor(self.config.native_fraction if place % 2 else 0.0),
        }


def asks_at(step: int, lookup_fraction: float) -> bool:
    """Whether a step is on lookups: spread evenly."""
    return int((step + 1) * lookup_fraction + 1e-9) > int(step * lookup_fraction + 1e-9)


def validation_items(
    sequences: list[torch.Tensor], lookups: Sequence[Lookup], config: DistillationConfig, seed: int
) -> list[tuple[Batch, int, torch.Tensor, float]]:
    """[`validation_batches`] and, as `config` says, lookups and repaired handoffs; arguments of `continuation_kl`."""
    count = round(config.validation_sequences * config.lookup_fraction)
    text = replace(config, validation_sequences=max(config.validation_sequences - count, 1))
    items = []
    if config.lookup_fraction < 1:
        items = [(batch, at, text_question(batch, at)) for batch, at in validation_batches(sequences, text, seed)]
    rows = sorted(lookups[:count], key=lambda lookup: len(lookup.ids))
    size = config.batch_size
    items += [lookup_batch(rows[start : start + size]) for start in range(0, len(rows), size)]
    shares = (0.0, config.native_fraction) if config.native_fraction > 0 else (0.0,)
    return [(*item, share) for share in shares for item in items]


def validation_batches(
    sequences: list[torch.Tensor], config: DistillationConfig, seed: int
) -> list[tuple[Batch, int]]:
    """Fixed batches with fixed boundaries; the same for every run with one seed of the data."""
    generator = torch.Generator().manual_seed(hash_seed((seed, 3)))
    chosen = torch.randperm(len(sequences), generator=generator)[: config.validation_sequences].tolist()
    rows = sorted((sequences[index] for index in chosen), key=len)
    size = config.batch_size
    batches = []
    for place, start in enumerate(range(0, len(rows), size)):
        batches.append(
            draw_boundary(
                padded_batch(rows[start : start + size]),
                (seed, 4, place),
                min_prefix=config.min_prefix,
                min_continuation=config.min_continuation,
                max_continuation=config.max_continuation,
            )
        )
    return batches


__all__ = [
    "Lookup",
    "StepBatches",
    "lookup_batch",
    "padded_batch",
    "sequences_of",
    "split_lookups",
    "text_question",
    "validation_batches",
    "validation_items",
]
