"""Calibration data: documents of any dataset or file, as token sequences of one length.

What is read and in which order depends on the settings alone: no shuffling, no random draws, no number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import CalibrationError
from .documents import DatasetSpec, open_dataset, with_defaults

# ShareGPT's names of roles; everything else keeps its name.
_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class DataConfig:
    """Which tokens a calibration runs over.

    Attributes:
        datasets (`tuple[DatasetSpec, ...]`): A mixture, by weight.
        num_sequences (`int`): Sequences in all, those held out included.
        sequence_length (`int`): Tokens of a sequence, special tokens included.
        packing (`str`): `"cut"`: one document a sequence, cut to the length; documents that are shorter stay so.
            `"pack"`: documents one after the other with the end token between them, cut into whole sequences.
        short_sequences (`str`): With `"cut"`, what to do with documents shorter than a sequence: `"keep"`, `"skip"`
            (count and leave out) or `"error"`.
        streaming (`bool`): Read a dataset of the Hub as far as needed instead of downloading it first.
    """

    datasets: tuple[DatasetSpec, ...]
    num_sequences: int = 500
    sequence_length: int = 1024
    packing: str = "cut"
    short_sequences: str = "keep"
    streaming: bool = True

    def __post_init__(self):
        if not self.datasets:
            raise CalibrationError("No dataset was given.")
        for name, choices in (("packing", ("cut", "pack")), ("short_sequences", ("keep", "skip", "error"))):
            if getattr(self, name) not in choices:
                raise CalibrationError(f"{name} must be one of {choices}, got {getattr(self, name)!r}.")
        for name in ("num_sequences", "sequence_length"):
            if getattr(self, name) < 1:
                raise CalibrationError(f"{name} must be at least 1, got {getattr(self, name)}.")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Sequence:
    """Tokens of one sequence and where they come from.

    Attributes:
        tokens (`list[int]`): Ids.
        dataset (`int`): Number of the dataset in the mixture.
        row (`int`): Row of the dataset where it starts.
        start (`int`): Token of that row where it starts.
    """

    tokens: list[int]
    dataset: int
    row: int
    start: int = 0


@dataclass
class DataReport:
    """What was read, and what was left out.

    Attributes:
        documents, empty_documents, short_documents, skipped_documents, dropped_tokens (`int`): Counts. Short documents
            are those with fewer tokens than a sequence, whatever was done with them.
        exhausted (`list[str]`): Datasets that ended before the sequences were complete.
        fingerprints (`dict`): Label of each dataset -> what identifies its content.
    """

    documents: int = 0
    empty_documents: int = 0
    short_documents: int = 0
    skipped_documents: int = 0
    dropped_tokens: int = 0
    exhausted: list[str] = field(default_factory=list)
    fingerprints: dict[str, Any] = field(default_factory=dict)


# ---- tokens ---------------------------------------------------------------------------------------------------------


def encode(value: Any, tokenizer: Any, where: str, special_tokens: bool = True) -> list[int]:
    """Token ids of a document: a text, or a list of chat messages through the tokenizer's template.

    Raises:
        CalibrationError: it is neither, or the tokenizer has no chat template.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return list(tokenizer(value, add_special_tokens=special_tokens)["input_ids"]) if value.strip() else []
    if isinstance(value, (list, tuple)) and all(isinstance(message, dict) for message in value):
        if not value:
            return []
        messages = [_as_message(message, where) for message in value]
        if not getattr(tokenizer, "chat_template", None):
            raise CalibrationError(
                f"{where} holds chat messages and the tokenizer has no chat template. Use a chat model's tokenizer, "
                "or a column of plain text."
            )
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        return list(ids)
    raise CalibrationError(
        f"{where} holds a {type(value).__name__}, neither a text nor a list of chat messages. Choose another column "
        "with --text-column."
    )


def _as_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    if "role" in message and "content" in message:
        return message
    if "from" in message and "value" in message:
        return {"role": _ROLES.get(message["from"], message["from"]), "content": message["value"]}
    raise CalibrationError(
        f"A chat message in {where} has {', '.join(map(repr, message))}, not 'role' and 'content' (or 'from' and "
        "'value')."
    )


def leading_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text (a beginning-of-sequence token, or nothing)."""
    probe = "a"
    bare = list(tokenizer(probe, add_special_tokens=False)["input_ids"])
    whole = list(tokenizer(probe, add_special_tokens=True)["input_ids"])
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start]
    return []


def read_sequences(config: DataConfig, tokenizer: Any, num_sinks: int = 0) -> tuple[Iterator[Sequence], DataReport]:
    """Read the sequences of a calibration.

    Args:
        config: Which.
        tokenizer: The pair's.
        num_sinks: Sequences without a token behind so many are left out and counted.

    Returns:
        An iterator that stops after `num_sequences`, or earlier where the data ends; and the report it fills in.
    """
    report = DataReport()
    readers = []
    for number, spec in enumerate(config.datasets):
        read, facts = open_dataset(spec, config.streaming)
        report.fingerprints[f"{number}:{spec.label}"] = facts
        reader = _Reader(read(), spec, number, config, tokenizer, num_sinks, report)
        readers.append(reader.packed() if config.packing == "pack" else reader.cut())
    return _mix(readers, config, report), report


@dataclass
class _Reader:
    """Makes sequences of the documents of one dataset of a mixture; counts in the report."""

    values: Iterator[Any]
    spec: DatasetSpec
    number: int
    config: DataConfig
    tokenizer: Any
    num_sinks: int
    report: DataReport

    def documents(self, special_tokens: bool) -> Iterator[tuple[int, list[int]]]:
        """Row and token ids of every document that has any."""
        for row, value in enumerate(self.values):
            where = f"Row {row} of {self.spec.label}, column {self.spec.column!r},"
            ids = encode(value, self.tokenizer, where, special_tokens)
            self.report.documents += 1
            if ids:
                yield row, ids
            else:
                self.report.empty_documents += 1

    def cut(self) -> Iterator[Sequence]:
        """One document a sequence."""
        length, report = self.config.sequence_length, self.report
        for row, ids in self.documents(special_tokens=True):
            short = len(ids) < length
            report.short_documents += short
            if short and self.config.short_sequences == "error":
                raise CalibrationError(
                    f"Row {row} of {self.spec.label} has {len(ids)} tokens, fewer than sequence_length={length}. Use "
                    "--short-sequences keep or skip, a smaller --sequence-length, or --packing pack."
                )
            if len(ids) <= self.num_sinks or (short and self.config.short_sequences == "skip"):
                report.skipped_documents += 1
                continue
            report.dropped_tokens += max(0, len(ids) - length)
            yield Sequence(ids[:length], self.number, row)

    def packed(self) -> Iterator[Sequence]:
        """Documents side by side, in whole sequences."""
        # Every sequence starts as the models are used to: with the tokenizer's own first tokens, if it has any.
        prefix = leading_tokens(self.tokenizer)
        separator = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        room = self.config.sequence_length - len(prefix)
        if room < 1:
            raise CalibrationError(f"sequence_length={self.config.sequence_length} leaves no room behind {prefix}.")
        buffer: list[int] = []
        first, start = 0, 0
        for row, ids in self.documents(special_tokens=False):
            if not buffer:
                first, start = row, 0
            self.report.short_documents += len(ids) < room
            buffer += ids + separator
            while len(buffer) >= room:
                yield Sequence(prefix + buffer[:room], self.number, first, start)
                buffer = buffer[room:]
                first, start = row, len(ids) + len(separator) - len(buffer)
        self.report.dropped_tokens += len(buffer)


def _mix(readers: list[Iterator[Sequence]], config: DataConfig, report: DataReport) -> Iterator[Sequence]:
    """Take each next sequence from the dataset that is furthest behind its share."""
    total = sum(spec.weight for spec in config.datasets)
    taken = [0] * len(readers)
    open_readers = list(range(len(readers)))
    for count in range(1, config.num_sequences + 1):
        while open_readers:
            behind = max(
                open_readers, key=lambda place: (config.datasets[place].weight / total * count - taken[place], -place)
            )
            sequence = next(readers[behind], None)
            if sequence is not None:
                taken[behind] += 1
                yield sequence
                break
            open_readers.remove(behind)
            report.exhausted.append(config.datasets[behind].label)
        else:
            return


__all__ = [
    "DataConfig",
    "DataReport",
    "DatasetSpec",
    "Sequence",
    "encode",
    "leading_tokens",
    "read_sequences",
    "with_defaults",
]
