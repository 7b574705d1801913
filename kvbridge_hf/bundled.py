"""Where the bundled Tinytown family lies: models, mappers, question sets and texts."""

from __future__ import annotations

from pathlib import Path

from .errors import KVBridgeError

_PREFIX = "tinytown-"


class BundledFileError(KVBridgeError, FileNotFoundError):
    """A part of the bundled family that does not exist."""


def family_folder() -> Path:
    """The family's folder: inside the installed package, or in `examples/` of a checkout.

    Raises:
        BundledFileError: the installation lacks it.
    """
    here = Path(__file__).resolve().parent
    for folder in (here / "tinytown", here.parent / "examples" / "tinytown"):
        if (folder / "models").is_dir():
            return folder
    raise BundledFileError(
        "This installation does not hold the bundled Tinytown family. Install the package from its wheel or from a "
        "checkout (pip install -e .)."
    )


def _existing(kind: str, name: str) -> Path:
    folder = family_folder() / kind
    path = folder / name
    if not path.exists():
        there = (
            sorted(entry.stem for entry in folder.iterdir() if not entry.name.startswith("."))
            if folder.is_dir()
            else []
        )
        raise BundledFileError(
            f"No bundled {kind.rstrip('s')} is named {path.stem!r}; there are: {', '.join(there) or 'none'}."
        )
    return path


def model_path(name: str) -> Path:
    """Folder of a model, by its full or short name (`"tinytown-m"` or `"m"`)."""
    return _existing("models", name if name.startswith(_PREFIX) else _PREFIX + name)


def mapper_path(pair: str) -> Path:
    """Folder of a mapper, by its pair (`"m-to-l"`)."""
    return _existing("mappers", pair)


def questions_path(name: str) -> Path:
    """A question set, by its name (`"test"`)."""
    return _existing("questions", f"{name}.jsonl")


def text_path(name: str) -> Path:
    """Running text, one JSON object with `text` a line, by its name (`"train"`)."""
    return _existing("texts", f"{name}.jsonl")


def split_pair(pair: str) -> tuple[str, str]:
    """Source and target of a pair written `SOURCE-to-TARGET`, as short names.

    Raises:
        BundledFileError: it is not written so.
    """
    source, arrow, target = pair.partition("-to-")
    if not arrow or not source or not target:
        raise BundledFileError(f"A pair is written SOURCE-to-TARGET, such as m-to-l; got {pair!r}.")
    return source, target
