"""Calibration data: documents of any dataset or file, as token sequences of one length.

What is read and in which order depends on the settings alone: no shuffling, no random draws, no number of processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import CalibrationError
from .storage import sha256_file

FILE_TYPES = (".jsonl", ".parquet", ".txt")
DEFAULT_DATASET = "HuggingFaceFW/fineweb-edu,config=sample-10BT"
_OPTIONS = ("config", "split", "revision", "column", "weight")
# ShareGPT's names of roles; everything else keeps its name.
_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class DatasetSpec:
    """One dataset or file.

    Attributes:
        name (`str`): Dataset id, a folder that `datasets` can load, or a .jsonl, .parquet or .txt file.
        config, split, revision (`str`, *optional*): As for `datasets.load_dataset`.
        column (`str`): Holds a text or a list of chat messages.
        weight (`float`): Share of the sequences, relative to the other datasets'.
    """

    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    column: str = "text"
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str, **defaults: Any) -> DatasetSpec:
        """From `NAME[,config=..][,split=..][,revision=..][,column=..][,weight=..]`; `defaults` fill what is not said.

        Raises:
            CalibrationError: an option is unknown or the weight is not a positive number.
        """
        name, *options = text.split(",")
        fields = {key: value for key, value in defaults.items() if value is not None}
        for option in options:
            key, equals, value = option.partition("=")
            if not equals or key.strip() not in _OPTIONS:
                raise CalibrationError(
                    f"--dataset {text!r}: {option!r} is not one of {', '.join(f'{known}=' for known in _OPTIONS)}."
                )
            fields[key.strip()] = value.strip()
        try:
            fields["weight"] = float(fields.get("weight", 1.0))
        except ValueError:
            fields["weight"] = -1.0
        if not 0 < fields["weight"] < float("inf"):
            raise CalibrationError(f"--dataset {text!r}: weight must be a positive number.")
        return cls(name.strip(), **fields)

    @property
    def is_file(self) -> bool:
        return Path(self.name).is_file()

    @property
    def label(self) -> str:
        """Its name for messages and provenance, without this machine's folders."""
        return Path(self.name).name if Path(self.name).exists() else self.name


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


# ---- documents ------------------------------------------------------------------------------------------------------


def open_dataset(spec: DatasetSpec, streaming: bool = True) -> tuple[Callable[[], Iterator[Any]], dict[str, Any]]:
    """Open a dataset or a file.

    Returns:
        A function that gives an iterator over the column, and what identifies the content.

    Raises:
        CalibrationError: it does not exist, cannot be read, or lacks the column.
    """
    path = Path(spec.name)
    if path.suffix in FILE_TYPES and not path.is_file():
        raise CalibrationError(f"There is no file {spec.name!r}.")
    if path.is_file():
        if path.suffix not in FILE_TYPES:
            raise CalibrationError(f"{spec.name!r} is none of {', '.join(FILE_TYPES)}; convert it to one of them.")
        readers = {".jsonl": _read_jsonl, ".txt": _read_txt, ".parquet": _read_parquet}
        return lambda: readers[path.suffix](path, spec.column), {"sha256": sha256_file(path)}
    return _open_from_hub(spec, streaming)


def source_identity(spec: DatasetSpec) -> dict[str, Any]:
    """What can be said of a dataset's content without reading it as one: hashes of files on this machine."""
    path = Path(spec.name)
    if path.is_file():
        return {"name": spec.label, "sha256": sha256_file(path)}
    if path.is_dir():
        files = {str(file.relative_to(path)): sha256_file(file) for file in sorted(path.rglob("*")) if file.is_file()}
        return {"name": spec.label, "files": files}
    return {"name": spec.label}


def _open_from_hub(spec: DatasetSpec, streaming: bool) -> tuple[Callable[[], Iterator[Any]], dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise CalibrationError(
            f"{spec.name!r} is no file, and reading datasets needs the datasets package: pip install datasets."
        ) from None
    try:
        data = datasets.load_dataset(
            spec.name, spec.config, split=spec.split, revision=spec.revision, streaming=streaming
        )
    except Exception as error:  # the library raises a dozen kinds, from the network to a malformed script
        raise CalibrationError(
            f"The dataset {spec.name!r} (config {spec.config!r}, split {spec.split!r}, revision {spec.revision!r}) "
            f"could not be opened: {type(error).__name__}: {error}"
        ) from error
    columns = data.column_names
    if columns is not None and spec.column not in columns:
        raise CalibrationError(_missing_column(spec.label, spec.column, columns))
    info = data.info
    facts = {
        "name": info.dataset_name or spec.label,
        "config": info.config_name,
        "version": str(info.version) if info.version is not None else None,
        "revision": spec.revision,
        "files": sorted(_without_machine(name) for name in info.download_checksums or {}),
    }
    if not streaming:
        facts["rows"] = len(data)
    if columns is not None and len(columns) > 1:
        data = data.select_columns([spec.column])

    def read() -> Iterator[Any]:
        for row, item in enumerate(data):
            if spec.column not in item:
                raise CalibrationError(_missing_column(f"row {row} of {spec.label}", spec.column, list(item)))
            yield item[spec.column]

    return read, facts


def _without_machine(name: str) -> str:
    return name if "://" in name else Path(name).name


def _missing_column(where: str, column: str, columns: list[str]) -> str:
    return f"There is no column {column!r} in {where}; it has {', '.join(map(repr, columns)) or 'none'}."


def _read_jsonl(path: Path, column: str) -> Iterator[Any]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise CalibrationError(f"Line {number} of {path.name} is not JSON: {error}.") from error
            if not isinstance(row, dict) or column not in row:
                there = list(row) if isinstance(row, dict) else [type(row).__name__]
                raise CalibrationError(_missing_column(f"line {number} of {path.name}", column, there))
            yield row[column]


def _read_txt(path: Path, column: str) -> Iterator[Any]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield line.rstrip("\n")


def _read_parquet(path: Path, column: str) -> Iterator[Any]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise CalibrationError(f"{path.name} needs the pyarrow package: pip install pyarrow.") from None
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:
        raise CalibrationError(f"{path.name} is not a Parquet file: {error}") from error
    if column not in file.schema_arrow.names:
        raise CalibrationError(_missing_column(path.name, column, file.schema_arrow.names))
    for batch in file.iter_batches(batch_size=256, columns=[column]):
        yield from batch.column(0).to_pylist()


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
        make = _packed if config.packing == "pack" else _cut
        readers.append(make(read(), spec, number, config, tokenizer, num_sinks, report))
    return _mix(readers, config, report), report


def _documents(
    values: Iterator[Any], spec: DatasetSpec, tokenizer: Any, special_tokens: bool, report: DataReport
) -> Iterator[tuple[int, list[int]]]:
    for row, value in enumerate(values):
        ids = encode(value, tokenizer, f"Row {row} of {spec.label}, column {spec.column!r},", special_tokens)
        report.documents += 1
        if ids:
            yield row, ids
        else:
            report.empty_documents += 1


def _cut(
    values: Iterator[Any],
    spec: DatasetSpec,
    number: int,
    config: DataConfig,
    tokenizer: Any,
    num_sinks: int,
    report: DataReport,
) -> Iterator[Sequence]:
    length = config.sequence_length
    for row, ids in _documents(values, spec, tokenizer, True, report):
        short = len(ids) < length
        report.short_documents += short
        if short and config.short_sequences == "error":
            raise CalibrationError(
                f"Row {row} of {spec.label} has {len(ids)} tokens, fewer than sequence_length={length}. Use "
                "--short-sequences keep or skip, a smaller --sequence-length, or --packing pack."
            )
        if len(ids) <= num_sinks or (short and config.short_sequences == "skip"):
            report.skipped_documents += 1
            continue
        report.dropped_tokens += max(0, len(ids) - length)
        yield Sequence(ids[:length], number, row)


def _packed(
    values: Iterator[Any],
    spec: DatasetSpec,
    number: int,
    config: DataConfig,
    tokenizer: Any,
    num_sinks: int,
    report: DataReport,
) -> Iterator[Sequence]:
    # Every sequence starts as the models are used to: with the tokenizer's own first tokens, if it has any.
    prefix = leading_tokens(tokenizer)
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    room = config.sequence_length - len(prefix)
    if room < 1:
        raise CalibrationError(f"sequence_length={config.sequence_length} leaves no room behind {prefix}.")
    buffer: list[int] = []
    first, start = 0, 0
    for row, ids in _documents(values, spec, tokenizer, False, report):
        if not buffer:
            first, start = row, 0
        report.short_documents += len(ids) < room
        buffer += ids + separator
        while len(buffer) >= room:
            yield Sequence(prefix + buffer[:room], number, first, start)
            buffer = buffer[room:]
            first, start = row, len(ids) + len(separator) - len(buffer)
    report.dropped_tokens += len(buffer)


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


def with_defaults(specs: list[str] | tuple[str, ...], **defaults: Any) -> tuple[DatasetSpec, ...]:
    """Parse the datasets of a command line; none means [`DEFAULT_DATASET`]."""
    if specs:
        return tuple(DatasetSpec.parse(text, **defaults) for text in specs)
    default = DatasetSpec.parse(DEFAULT_DATASET)
    return (replace(default, **{key: value for key, value in defaults.items() if value is not None}),)


__all__ = [
    "DEFAULT_DATASET",
    "DataConfig",
    "DataReport",
    "DatasetSpec",
    "Sequence",
    "encode",
    "leading_tokens",
    "open_dataset",
    "read_sequences",
    "source_identity",
    "with_defaults",
]
