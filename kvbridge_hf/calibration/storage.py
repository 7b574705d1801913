"""Tensors and facts in a folder, replaced as a whole or not at all.

The folder holds one JSON index and the safetensors files it names with their SHA-256. A file's name contains its hash,
so new files never overwrite those that the present index names; the index is replaced last, in one rename. A crash at
any moment leaves the old content or the new, never a mixture.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ..errors import ArtifactError


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def save_folder(
    folder: str | os.PathLike, index_name: str, tensors: dict[str, dict[str, torch.Tensor]], facts: dict[str, Any]
) -> None:
    """Write sets of tensors and facts.

    Args:
        folder: Made if it is not there.
        index_name: Name of the JSON file, e.g. `"statistics.json"`.
        tensors: name of a set -> its tensors.
        facts: What else the index holds; JSON types.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, str]] = {}
    for name, tensor_set in tensors.items():
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}-", suffix=".tmp")
        os.close(handle)
        try:
            save_file({key: tensor.contiguous().cpu() for key, tensor in tensor_set.items()}, temporary)
            _flush(temporary)
            digest = sha256_file(Path(temporary))
            final = f"{name}-{digest[:16]}.safetensors"
            os.replace(temporary, folder / final)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        files[name] = {"file": final, "sha256": digest}
    write_atomically(folder / index_name, json.dumps({**facts, "files": files}, indent=2, sort_keys=True) + "\n")
    kept = {entry["file"] for entry in files.values()}
    for name in tensors:
        for old in folder.glob(f"{name}-*.safetensors"):
            if old.name not in kept:
                old.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file that is there as a whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".index-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_folder(
    folder: str | os.PathLike, index_name: str, device: str = "cpu"
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Read what `save_folder` wrote.

    Raises:
        ArtifactError: a file is missing, differs from its hash, or is no such file at all.
    """
    folder = Path(folder)
    facts, files = _read_index(folder, index_name)
    tensors = {}
    for name, entry in files.items():
        file = _checked_file(folder, index_name, entry)
        try:
            tensors[name] = load_file(file, device=device)
        except SafetensorError as error:
            raise ArtifactError(f"{file.name} is not a safetensors file ({error}).") from error
    return tensors, facts


def load_into(
    folder: str | os.PathLike, index_name: str, tensors: dict[str, dict[str, torch.Tensor]]
) -> dict[str, Any]:
    """Read what `save_folder` wrote into tensors that are there already, one at a time.

    Args:
        folder, index_name: As in `save_folder`.
        tensors: The same sets and names, with the same shapes and dtypes; overwritten.

    Returns:
        The facts.

    Raises:
        ArtifactError: as in `load_folder`, or the tensors are other ones. Where a file is damaged nothing was
            overwritten.
    """
    folder = Path(folder)
    facts, files = _read_index(folder, index_name)
    if sorted(files) != sorted(tensors):
        raise ArtifactError(f"{index_name} in {folder} holds {sorted(files)}, not {sorted(tensors)}.")
    checked = {name: _checked_file(folder, index_name, entry) for name, entry in files.items()}
    for name, file in checked.items():
        try:
            with safe_open(file, framework="pt") as opened:
                if sorted(opened.keys()) != sorted(tensors[name]):
                    raise ArtifactError(f"{file.name} holds {sorted(opened.keys())}, not {sorted(tensors[name])}.")
                for key, tensor in tensors[name].items():
                    found = opened.get_tensor(key)
                    if found.shape != tensor.shape or found.dtype != tensor.dtype:
                        raise ArtifactError(
                            f"{key} in {file.name} is {tuple(found.shape)} {found.dtype}, not {tuple(tensor.shape)} "
                            f"{tensor.dtype}."
                        )
                    tensor.copy_(found)
        except SafetensorError as error:
            raise ArtifactError(f"{file.name} is not a safetensors file ({error}).") from error
    return facts


def _read_index(folder: Path, index_name: str) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    path = folder / index_name
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return facts, facts.pop("files")
    except FileNotFoundError:
        raise ArtifactError(f"{index_name} is not in {folder}; give the folder that save() wrote.") from None
    except (ValueError, KeyError, AttributeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path.name} in {folder} is damaged ({error}); collect the statistics again.") from error


def _checked_file(folder: Path, index_name: str, entry: dict[str, str]) -> Path:
    file = folder / Path(entry["file"]).name
    if not file.is_file():
        raise ArtifactError(f"{file.name}, named by {index_name}, is missing; collect the statistics again.")
    digest = sha256_file(file)
    if digest != entry["sha256"]:
        raise ArtifactError(
            f"{file.name} is damaged: its SHA-256 is {digest}, {index_name} says {entry['sha256']}. Copy it again "
            "or collect the statistics again."
        )
    return file


def _flush(path: str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


__all__ = ["load_folder", "load_into", "save_folder", "sha256_file", "write_atomically"]
