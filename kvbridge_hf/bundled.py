"""Where things lie that a wheel holds beside the code: the Tinytown family, the demonstration page, templates."""

from __future__ import annotations

from pathlib import Path

from .errors import KVBridgeError

_PREFIX = "tinytown-"


class BundledFileError(KVBridgeError, FileNotFoundError):
    """A bundled file or folder that does not exist."""


def folder_of(in_package: str, in_checkout: str, holds: str, what: str) -> Path:
    """A folder that a wheel holds inside the package and a checkout elsewhere (`setup.py` copies it).

    Args:
        in_package, in_checkout: where it lies, below the package's folder and below the checkout's.
        holds: something in it, by which it is known.
        what: what it is, for the message.

    Raises:
        BundledFileError: the installation lacks it.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / in_package, package.parent / in_checkout):
        if (folder / holds).exists():
            return folder
    raise BundledFileError(
        f"This installation does not hold {what}. Install the package from its wheel or from a checkout "
        "(pip install -e .)."
    )


def family_folder() -> Path:
    """The family's folder.

    Raises:
        BundledFileError: the installation lacks it.
    """
    return folder_of("tinytown", "examples/tinytown", "models", "the bundled Tinytown family")


def space_folder() -> Path:
    """The folder of the demonstration page.

    Raises:
        BundledFileError: the installation lacks it.
    """
    return folder_of("handoff-demo", "spaces/handoff-demo", "app.py", "the demonstration page")


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
