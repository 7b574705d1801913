"""The source's content keys and values on disk, so that source and target need not be in memory together.

Shards are safetensors files with the kept tokens of consecutive sequences. `index.jsonl` gets one line for each when
it is complete: file, SHA-256, the sequences and their numbers of tokens, and those left out because of NaN or Inf. A
line that is cut off does not count, and neither does a shard without a line.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..errors import ArtifactError, CalibrationError
from .storage import sha256_file
from .traces import Batch, NonFiniteError, TracedModel, evaluating, kept_tokens

logger = logging.getLogger(__name__)

INDEX_NAME = "index.jsonl"


@dataclass
class Shard:
    """A line of the index.

    Attributes:
        file, sha256 (`str`): Of the shard; empty where every sequence was left out.
        sequences (`list[tuple[int, int]]`): Number and kept tokens of each sequence, in the order of the file.
        bad (`list[dict]`): Number and message of each sequence left out.
    """

    file: str
    sha256: str
    sequences: list[tuple[int, int]]
    bad: list[dict[str, Any]] = field(default_factory=list)

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.sequences] + [entry["number"] for entry in self.bad]


class ContentStore:
    """Shards of one process.

    Args:
        folder: Of the shards; made if it is not there.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.shards: list[Shard] = []
        path = self.folder / INDEX_NAME
        if path.exists():
            whole = path.read_bytes()
            lines = whole.split(b"\n")
            for line in lines[:-1]:  # what stands behind the last line break was cut off
                self.shards.append(Shard(**json.loads(line)))
            if lines[-1]:
                with open(path, "r+b") as file:
                    file.truncate(len(whole) - len(lines[-1]))
        self._index()
        self._loaded: tuple[int, dict[str, torch.Tensor]] | None = None

    def _index(self) -> None:
        self._places: dict[int, tuple[int, int, int]] = {}
        self._bad: dict[int, str] = {}
        for place, shard in enumerate(self.shards):
            start = 0
            for number, tokens in shard.sequences:
                self._places[number] = (place, start, tokens)
                start += tokens
            for entry in shard.bad:
                self._bad[entry["number"]] = entry["message"]

    @property
    def bad(self) -> list[dict[str, Any]]:
        """Sequences left out."""
        return [entry for shard in self.shards for entry in shard.bad]

    @property
    def num_bytes(self) -> int:
        return sum((self.folder / shard.file).stat().st_size for shard in self.shards if shard.file)

    def missing(self, numbers: np.ndarray) -> np.ndarray:
        """Those of the sequences that no shard holds, in the same order."""
        held = self._places.keys() | self._bad.keys()
        return np.asarray([number for number in numbers if int(number) not in held], dtype=np.int64)

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, sequences: list[tuple[int, int]], bad: list[dict[str, Any]]
    ) -> None:
        """Add a shard.

        Args:
            keys, values: `(layers, N, heads, dim)`, the kept tokens of all its sequences.
            sequences, bad: See [`Shard`].
        """
        name, digest = "", ""
        if sequences:
            temporary = self.folder / ".shard.tmp"
            try:
                save_file({"keys": keys.contiguous().cpu(), "values": values.contiguous().cpu()}, temporary)
                with open(temporary, "rb") as file:
                    os.fsync(file.fileno())
                digest = sha256_file(temporary)
                name = f"shard-{sequences[0][0]:09d}-{digest[:12]}.safetensors"
                os.replace(temporary, self.folder / name)
            finally:
                temporary.unlink(missing_ok=True)
        shard = Shard(name, digest, sequences, bad)
        with open(self.folder / INDEX_NAME, "a", encoding="utf-8", newline="\n") as index:
            index.write(json.dumps(shard.__dict__) + "\n")
            index.flush()
            os.fsync(index.fileno())
        self.shards.append(shard)
        self._index_last()

    def _index_last(self) -> None:
        place, shard, start = len(self.shards) - 1, self.shards[-1], 0
        for number, tokens in shard.sequences:
            self._places[number] = (place, start, tokens)
            start += tokens
        self._bad.update({entry["number"]: entry["message"] for entry in shard.bad})

    def drop_damaged(self) -> list[str]:
        """Compare every shard with its hash and forget those that differ or are gone.

        Returns:
            Names of the shards forgotten; their sequences are `missing` now.
        """
        damaged = [
            shard
            for shard in self.shards
            if shard.file and (not (self.folder / shard.file).is_file() or self._digest(shard) != shard.sha256)
        ]
        if damaged:
            self.shards = [shard for shard in self.shards if shard not in damaged]
            temporary = self.folder / f".{INDEX_NAME}.tmp"
            temporary.write_text("".join(json.dumps(shard.__dict__) + "\n" for shard in self.shards), encoding="utf-8")
            os.replace(temporary, self.folder / INDEX_NAME)
            for shard in damaged:
                (self.folder / shard.file).unlink(missing_ok=True)
                logger.warning(
                    "Shard %s is damaged or gone; its %d sequences are computed again.",
                    shard.file,
                    len(shard.numbers),
                )
            self._index()
        return [shard.file for shard in damaged]

    def _digest(self, shard: Shard) -> str:
        return sha256_file(self.folder / shard.file)

    def content(self, batch: Batch, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Content keys and values of the kept tokens of a batch, as the source gave them.

        Raises:
            NonFiniteError: the source gave NaN or Inf for some of the sequences.
            ArtifactError: a shard is damaged.
        """
        numbers = [int(number) for number in batch.numbers]
        rows = torch.tensor([number in self._bad for number in numbers])
        if bool(rows.any()):
            raise NonFiniteError(self._bad[numbers[int(rows.nonzero()[0])]], rows)
        parts: dict[str, list[torch.Tensor]] = {"keys": [], "values": []}
        for number, kept in zip(numbers, keep.sum(dim=1).tolist(), strict=True):
            place, start, tokens = self._places[number]
            if tokens != kept:
                raise ArtifactError(
                    f"{self.shards[place].file} has {tokens} tokens of sequence {number}, {kept} are wanted. Start "
                    "again with --restart."
                )
            shard = self._read(place)
            for name, part in parts.items():
                part.append(shard[name][:, start : start + tokens])
        return torch.cat(parts["keys"], dim=1), torch.cat(parts["values"], dim=1)

    def _read(self, place: int) -> dict[str, torch.Tensor]:
        if self._loaded is None or self._loaded[0] != place:
            shard = self.shards[place]
            file = self.folder / shard.file
            self._loaded = None
            if not file.is_file() or self._digest(shard) != shard.sha256:
                raise ArtifactError(
                    f"Shard {shard.file} in {self.folder} is damaged or gone. Run the same command again: it is then "
                    "computed again."
                )
            try:
                self._loaded = (place, load_file(file))
            except SafetensorError as error:
                raise ArtifactError(f"Shard {shard.file} is not a safetensors file ({error}).") from error
        return self._loaded[1]


class ContentAccumulator:
    """Fills a store from the source, one shard a batch. What it remembers lies on disk.

    Args:
        store: To fill.
        source: The source.
        num_sinks, token_stride: Which tokens are kept.
        max_bad_sequences: Sequences with NaN or Inf that are left out, before it becomes an error.
    """

    def __init__(
        self, store: ContentStore, source: TracedModel, num_sinks: int, token_stride: int, max_bad_sequences: int
    ):
        self.store, self.source = store, source
        self.num_sinks, self.token_stride, self.max_bad_sequences = num_sinks, token_stride, max_bad_sequences

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        return {}

    def facts(self) -> dict[str, Any]:
        return {}

    def restore(self, facts: dict[str, Any]) -> None:
        pass

    def reset(self) -> None:
        pass

    def read(self, batch: Batch) -> tuple[Batch, torch.Tensor, tuple[torch.Tensor, torch.Tensor], list[dict]]:
        bad: list[dict[str, Any]] = []
        while True:
            keep = kept_tokens(batch.attention_mask, self.num_sinks, self.token_stride)
            if not len(batch.input_ids):
                return batch, keep, (torch.empty(0), torch.empty(0)), bad
            try:
                with evaluating(self.source.model):
                    return batch, keep, self.source.content(batch, keep), bad
            except NonFiniteError as error:
                numbers = batch.numbers[error.rows].tolist()
                bad += [{"number": number, "message": str(error)} for number in numbers]
                logger.warning("Left out sequences %s: %s", ", ".join(map(str, numbers)), error)
                count = len(bad) + len(self.store.bad)
                if count > self.max_bad_sequences:
                    raise CalibrationError(
                        f"{count} sequences gave NaN or Inf, more than --max-bad-sequences={self.max_bad_sequences}. "
                        f"The last: {error}"
                    ) from error
                batch = batch.select(~error.rows)

    def add(
        self, batch: Batch, found: tuple[Batch, torch.Tensor, tuple[torch.Tensor, torch.Tensor], list[dict]]
    ) -> None:
        good, keep, (keys, values), bad = found
        sequences = list(zip(good.numbers.tolist(), keep.sum(dim=1).tolist(), strict=True))
        self.store.write(keys, values, sequences, bad)


__all__ = ["ContentAccumulator", "ContentStore", "Shard"]
