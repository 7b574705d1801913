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
from safetensors import SafetensorError
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
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".index-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({**facts, "files": files}, file, indent=2, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / index_name)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    kept = {entry["file"] for entry in files.values()}
    for name in tensors:
        for old in folder.glob(f"{name}-*.safetensors"):
            if old.name not in kept:
                old.unlink(missing_ok=True)


def load_folder(
    folder: str | os.PathLike, index_name: str, device: str = "cpu"
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Read what `save_folder` wrote.

    Raises:
        ArtifactError: a file is missing, differs from its hash, or is no such file at all.
    """
    folder = Path(folder)
    path = folder / index_name
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        files = facts.pop("files")
    except FileNotFoundError:
        raise ArtifactError(f"{index_name} is not in {folder}; give the folder that save() wrote.") from None
    except (ValueError, KeyError, AttributeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path.name} in {folder} is damaged ({error}); collect the statistics again.") from error
    tensors = {}
    for name, entry in files.items():
        file = folder / Path(entry["file"]).name
        if not file.is_file():
            raise ArtifactError(f"{file.name}, named by {index_name}, is missing; collect the statistics again.")
        digest = sha256_file(file)
        if digest != entry["sha256"]:
            raise ArtifactError(
                f"{file.name} is damaged: its SHA-256 is {digest}, {index_name} says {entry['sha256']}. Copy it again "
                "or collect the statistics again."
            )
        try:
            tensors[name] = load_file(file, device=device)
        except SafetensorError as error:
            raise ArtifactError(f"{file.name} is not a safetensors file ({error}).") from error
    return tensors, facts


def _flush(path: str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


__all__ = ["load_folder", "save_folder", "sha256_file"]
