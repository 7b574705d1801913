"""The sequences of a calibration on disk: written once, read by every pass, process and resumption alike.

`tokens.bin` holds all token ids, int32, one sequence after the other. `sequences.jsonl` has one line for each: the
dataset, row and token it starts at, its number of tokens and the SHA-256 of its ids. `data.json` names both with their
own hashes, what was asked for and what was read; it is written last.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import ArtifactError, CalibrationError
from ..padding import pad
from .data import DataConfig, read_sequences
from .storage import sha256_file, write_atomically
from .traces import Batch

INDEX_NAME = "data.json"
TOKENS_NAME = "tokens.bin"
LIST_NAME = "sequences.jsonl"


def sequence_digest(ids: np.ndarray) -> str:
    """SHA-256 of token ids, whatever integer type they are held in."""
    return hashlib.sha256(np.ascontiguousarray(ids, dtype="<i4").tobytes()).hexdigest()


def write_sequences(
    folder: Path,
    config: DataConfig,
    tokenizer: Any,
    vocab_size: int,
    num_sinks: int = 0,
    check: Callable[[], None] | None = None,
) -> SequenceStore:
    """Read the data and write its sequences.

    Args:
        folder: Made if it is not there.
        config: Which data.
        tokenizer: The pair's.
        vocab_size: Of the pair; token ids must be below it.
        num_sinks: Sequences without a token behind so many are left out.
        check: Called for every sequence; may raise.

    Raises:
        CalibrationError: the data cannot be used; says why and where.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sequences, report = read_sequences(config, tokenizer, num_sinks)
    count, tokens = 0, 0
    temporary = [folder / f".{name}.tmp" for name in (TOKENS_NAME, LIST_NAME)]
    with open(temporary[0], "wb") as ids_file, open(temporary[1], "w", encoding="utf-8", newline="\n") as list_file:
        for number, sequence in enumerate(sequences):
            if check is not None:
                check()
            ids = np.asarray(sequence.tokens, dtype="<i4")
            if int(ids.max()) >= vocab_size or int(ids.min()) < 0:
                column = int(((ids >= vocab_size) | (ids < 0)).argmax())
                raise CalibrationError(
                    f"Sequence {number} (row {sequence.row} of {config.datasets[sequence.dataset].label}) holds token "
                    f"{int(ids[column])} at place {column}; the models' shared vocabulary has {vocab_size} tokens. "
                    "The tokenizer knows tokens that the models do not: use the models' own tokenizer."
                )
            ids_file.write(ids.tobytes())
            entry = {
                "number": number,
                "dataset": sequence.dataset,
                "row": sequence.row,
                "start": sequence.start,
                "tokens": len(ids),
                "sha256": sequence_digest(ids),
            }
            list_file.write(json.dumps(entry) + "\n")
            count, tokens = number + 1, tokens + len(ids)
        for file in (ids_file, list_file):
            file.flush()
            os.fsync(file.fileno())
    if count == 0:
        counts = {name: value for name, value in asdict(report).items() if isinstance(value, int) and value}
        raise CalibrationError(
            f"The data of {', '.join(spec.label for spec in config.datasets)} gave no sequence: "
            f"{counts or 'it is empty'}. Sequences need more than num_sinks={num_sinks} tokens."
        )
    digests = {}
    for path, name in zip(temporary, (TOKENS_NAME, LIST_NAME), strict=True):
        digests[name] = sha256_file(path)
        os.replace(path, folder / name)
    facts = {
        "config": config.to_dict(),
        "sequences": count,
        "tokens": tokens,
        "report": asdict(report),
        "files": digests,
    }
    write_atomically(folder / INDEX_NAME, json.dumps(facts, indent=2, sort_keys=True) + "\n")
    return SequenceStore(folder)


class SequenceStore:
    """Reads what [`write_sequences`] wrote; holds the lengths in memory and maps the tokens.

    Raises:
        ArtifactError: the folder is incomplete or damaged.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        try:
            self.facts = json.loads((self.folder / INDEX_NAME).read_text(encoding="utf-8"))
            for name, expected in self.facts["files"].items():
                if sha256_file(self.folder / name) != expected:
                    raise ArtifactError(
                        f"{name} in {folder} is damaged: its SHA-256 is not the one it was written with."
                    )
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, ArtifactError):
                raise
            raise ArtifactError(f"The sequences in {folder} are incomplete: {error!r}.") from error
        self.lengths = np.zeros(self.facts["sequences"], dtype=np.int64)
        with open(self.folder / LIST_NAME, encoding="utf-8") as file:
            for line in file:
                entry = json.loads(line)
                self.lengths[entry["number"]] = entry["tokens"]
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self._tokens = np.memmap(self.folder / TOKENS_NAME, dtype="<i4", mode="r")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def digest(self) -> str:
        """SHA-256 over the list of all sequences: the identity of the data."""
        return str(self.facts["files"][LIST_NAME])

    @property
    def provenance(self) -> dict[str, Any]:
        """What a mapper records of its data."""
        config = self.facts["config"]
        return {
            "datasets": [
                {**spec, "name": Path(spec["name"]).name if Path(spec["name"]).exists() else spec["name"]}
                for spec in config["datasets"]
            ],
            "fingerprints": self.facts["report"]["fingerprints"],
            "packing": config["packing"],
            "sequence_length": config["sequence_length"],
            "sequences": len(self),
            "tokens": self.facts["tokens"],
            "sequences_sha256": self.digest,
        }

    def tokens(self, number: int) -> np.ndarray:
        return np.asarray(self._tokens[self.starts[number] : self.starts[number + 1]])

    def batch(self, numbers: list[int] | np.ndarray) -> Batch:
        """Some sequences, padded on the right."""
        ids, mask = pad([self.tokens(int(number)).astype(np.int64) for number in numbers], side="right")
        return Batch(ids, mask.bool(), torch.as_tensor(np.asarray(numbers)))

    def share(self, batch_size: int, process: int = 0, num_processes: int = 1) -> np.ndarray:
        """Sequences of one process, in the order in which it reads them.

        Long ones come first, so that the largest batch is the first one; batches hold sequences of like length, and
        are the same for any number of processes. Of those a process takes every `num_processes`-th.
        """
        order = np.argsort(-self.lengths, kind="stable")
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        mine = batches[process::num_processes]
        return np.concatenate(mine) if mine else np.zeros(0, dtype=np.int64)


class StoredBatches:
    """The sequences as a re-iterable of padded batches, for whatever reads `token_batches`."""

    def __init__(self, store: SequenceStore, batch_size: int):
        self.store, self.batch_size = store, batch_size
        self.order = store.share(batch_size)

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for start in range(0, len(self.order), self.batch_size):
            batch = self.store.batch(self.order[start : start + self.batch_size])
            yield {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask.long()}


__all__ = ["SequenceStore", "StoredBatches", "sequence_digest", "write_sequences"]
