"""Where documents come from: datasets of the Hub, folders and files, one column of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import CalibrationError
from .storage import sha256_file

FILE_TYPES = (".jsonl", ".parquet", ".txt")
DEFAULT_DATASET = "HuggingFaceFW/fineweb-edu,config=sample-10BT"
_OPTIONS = ("config", "split", "revision", "column", "weight")


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


def with_defaults(specs: list[str] | tuple[str, ...], **defaults: Any) -> tuple[DatasetSpec, ...]:
    """Parse the datasets of a command line; none means [`DEFAULT_DATASET`]."""
    if specs:
        return tuple(DatasetSpec.parse(text, **defaults) for text in specs)
    default = DatasetSpec.parse(DEFAULT_DATASET)
    return (replace(default, **{key: value for key, value in defaults.items() if value is not None}),)


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


__all__ = ["DEFAULT_DATASET", "DatasetSpec", "open_dataset", "source_identity", "with_defaults"]
