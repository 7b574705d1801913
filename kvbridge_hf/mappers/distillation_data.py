"""Which tokens a distillation sees at which step: a function of the data and the seed, whatever ran before."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.data import Dataset

from ..calibration.traces import Batch
from .distillation_config import DistillationConfig
from .functional import draw_boundary, hash_seed

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


def padded_batch(rows: list[torch.Tensor]) -> Batch:
    """Rows side by side, padded on the right."""
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for place, row in enumerate(rows):
        ids[place, : len(row)], mask[place, : len(row)] = row, True
    return Batch(ids, mask, torch.arange(len(rows)))


class StepBatches(Dataset):
    """The batch of every step, with the column at which its continuation starts.

    Args:
        sequences: To train on.
        config: Sizes.
        steps: How many.
        seed: Of the run.
    """

    def __init__(self, sequences: list[torch.Tensor], config: DistillationConfig, steps: int, seed: int):
        self.sequences, self.config, self.seed = sequences, config, seed
        self.groups: list[list[int]] = []
        epoch = 0
        while len(self.groups) < steps:
            self.groups += self._epoch(epoch)
            epoch += 1
        del self.groups[steps:]

    def _epoch(self, epoch: int) -> list[list[int]]:
        """Every sequence once, in batches of like length (padding is work for nothing)."""
        generator = torch.Generator().manual_seed(hash_seed((self.seed, 1, epoch)))
        order = torch.randperm(len(self.sequences), generator=generator).tolist()
        size = self.config.batch_size
        groups = []
        for start in range(0, len(order), POOL * size):
            pool = sorted(order[start : start + POOL * size], key=lambda index: len(self.sequences[index]))
            groups += [pool[place : place + size] for place in range(0, len(pool), size)]
        return [groups[place] for place in torch.randperm(len(groups), generator=generator).tolist()]

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        batch, boundary = draw_boundary(
            padded_batch([self.sequences[index] for index in self.groups[step]]),
            (self.seed, 2, step),
            min_prefix=self.config.min_prefix,
            min_continuation=self.config.min_continuation,
            max_continuation=self.config.max_continuation,
        )
        return {
            "input_ids": batch.input_ids,
            "attention_mask": batch.attention_mask,
            "boundary": torch.tensor(boundary),
        }


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


__all__ = ["StepBatches", "padded_batch", "sequences_of", "validation_batches"]
