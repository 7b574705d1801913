"""Whether the files of an artifact are the ones that were written, and whether its tensors can be a mapper's.

An artifact carries `kvbridge_manifest.json`: size and SHA-256 of every other file of it, and a digest of that list.
The manifest has one legal spelling, so a changed byte in it is noticed as well. What this protects against is damage,
half a download and a mixture of two saves. It does not by itself tell who wrote an artifact: whoever can rewrite all
of its files can rewrite the manifest. Against that, pin the commit (`revision=`) or the digest (`artifact_digest=`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import ArtifactError

MANIFEST_NAME = "kvbridge_manifest.json"
MANIFEST_FORMAT = "kvbridge-artifact/1"
CARD_NAME = "README.md"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
GENERATE_NAME = "custom_generate/generate.py"

# No affine map between caches has entries near this: keys and values of trained models lie between 1e-2 and 1e3.
MAX_MAGNITUDE = 1e4

# Files that Transformers would pick up or run although the manifest does not know them.
_LOADABLE = re.compile(r"(model|pytorch_model|adapter_model)[.-].*|adapter_config\.json|custom_generate/.*\.py")


@dataclass(frozen=True)
class Manifest:
    """Size in bytes and SHA-256 of every file of an artifact, by its path inside the artifact."""

    files: Mapping[str, tuple[int, str]]

    @property
    def digest(self) -> str:
        """SHA-256 of the list of files: one name for the whole artifact."""
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()

    @property
    def weight_files(self) -> list[str]:
        return sorted(name for name in self.files if name.endswith(".safetensors"))

    def to_json(self) -> str:
        """The one spelling of this manifest."""
        return json.dumps({**self._content(), "digest": self.digest}, indent=2, sort_keys=True) + "\n"

    def _content(self) -> dict[str, Any]:
        files = {name: {"size": size, "sha256": sha256} for name, (size, sha256) in self.files.items()}
        return {"format": MANIFEST_FORMAT, "files": files}

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Read a manifest and check that it is whole.

        Raises:
            ArtifactError: it is no manifest, of another format, names a path outside the artifact, or was changed.
        """
        try:
            content = json.loads(text)
            format_, listed = content["format"], content["files"]
            files = {name: (entry["size"], entry["sha256"]) for name, entry in listed.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{where} is no mapper manifest ({error!r}). Download the artifact again.") from error
        if format_ != MANIFEST_FORMAT:
            raise ArtifactError(
                f"{where} has the format {format_!r}; this version reads {MANIFEST_FORMAT!r}. A newer kvbridge_hf may "
                "be needed."
            )
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or "\\" in name or str(path) != name:
                raise ArtifactError(f"{where} names the file {name!r}, which does not lie inside the artifact.")
        manifest = cls(files)
        if manifest.to_json() != text:
            raise ArtifactError(
                f"{where} was changed after it was written: its digest or spelling does not match. Download the "
                "artifact again, or, if the change is yours, write it anew: kvbridge_hf.hub.write_manifest(folder)."
            )
        return manifest


def file_sha256(path: str | os.PathLike) -> str:
    """Return the SHA-256 of a file, as hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def write_manifest(folder: str | os.PathLike, names: Iterable[str] | None = None) -> Manifest:
    """Write `kvbridge_manifest.json` for the files as they lie in `folder`.

    Use it after a deliberate change of an artifact, such as an edited model card.

    Args:
        folder: the artifact.
        names: files to list; by default those listed by the manifest that is there, or else all that make an artifact.
    """
    folder = Path(folder)
    if names is None:
        names = _listed_names(folder) or [name for name in _present_names(folder) if _is_artifact_file(name)]
    files = {name: ((folder / name).stat().st_size, file_sha256(folder / name)) for name in sorted(names)}
    manifest = Manifest(files)
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8", newline="\n")
    return manifest


def read_manifest(folder: str | os.PathLike) -> Manifest:
    """Read and check the manifest of a folder.

    Raises:
        ArtifactError: there is none, or it is damaged.
    """
    path = Path(folder) / MANIFEST_NAME
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ArtifactError(
            f"{str(folder)!r} has no {MANIFEST_NAME}, so nothing says that its files belong together. Is it a mapper "
            "written by KVBridgeMapper.save_pretrained, and a complete download?"
        ) from None
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{str(path)!r} is not text ({error}). Download the artifact again.") from error
    return Manifest.from_json(text, where=repr(str(path)))


def verify_file(path: str | os.PathLike, size: int, sha256: str) -> str | None:
    """Compare one file with its manifest entry; return what is wrong with it, or `None`."""
    try:
        actual_size = os.path.getsize(path)
        if actual_size != size:
            return f"has {actual_size} bytes instead of {size}"
        actual = file_sha256(path)
    except FileNotFoundError:
        return "is missing"
    return None if actual == sha256 else f"has SHA-256 {actual} instead of {sha256}"


def verify_folder(folder: str | os.PathLike, names: Iterable[str] | None = None) -> Manifest:
    """Check the files of an artifact against its manifest.

    Args:
        folder: the artifact.
        names: check only these; the default is every listed file.

    Raises:
        ArtifactError: a file is missing, shortened or changed, or a file that would be loaded is not listed.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    for name in manifest.files if names is None else names:
        problem = verify_file(folder / name, *manifest.files[name])
        if problem is not None:
            raise ArtifactError(
                f"{name} in {str(folder)!r} {problem}: it was damaged or changed after it was written. Download or "
                "save the artifact again, or, if the change is yours, run kvbridge_hf.hub.write_manifest(folder)."
            )
    strangers = find_strangers(folder, manifest)
    if strangers:
        raise ArtifactError(
            f"{str(folder)!r} holds {strangers}, which would be loaded and is not part of the artifact. Remove it, "
            "or save the mapper into an empty folder."
        )
    return manifest


def find_strangers(folder: str | os.PathLike, manifest: Manifest) -> list[str]:
    """Files of a folder that Transformers would load or run although the manifest does not list them."""
    return [name for name in _present_names(Path(folder)) if name not in manifest.files and _LOADABLE.fullmatch(name)]


def check_weight_files(
    folder: str | os.PathLike,
    manifest: Manifest,
    expected: Mapping[str, torch.Tensor],
    weight_hashes: Mapping[str, str],
) -> None:
    """Check the tensors of an artifact before any of them reaches a model.

    Args:
        folder: the artifact, its files already verified.
        manifest: its manifest.
        expected: tensors (on any device, `meta` included) of the names, shapes and kinds that the config calls for.
        weight_hashes: SHA-256 of each weight file, as the config has them.

    Raises:
        ArtifactError: config and weight files belong to different mappers, or a tensor is missing, unknown, of the
            wrong shape or kind, not finite, or absurdly large.
    """
    folder = Path(folder)
    actual_hashes = {name: manifest.files[name][1] for name in manifest.weight_files}
    if dict(weight_hashes) != actual_hashes:
        raise ArtifactError(
            f"config.json in {str(folder)!r} belongs to other weights: it names {_short(weight_hashes)}, the files "
            f"are {_short(actual_hashes)}. Save the mapper again with save_pretrained."
        )
    found: set[str] = set()
    for name in manifest.weight_files:
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():
                    found.add(key)
                    _check_tensor(name, key, file.get_tensor(key), expected)
        except SafetensorError as error:
            raise ArtifactError(f"{name} in {str(folder)!r} is not a readable safetensors file: {error}.") from error
    missing = sorted(set(expected) - found)
    if missing:
        raise ArtifactError(f"The weights in {str(folder)!r} lack the tensors {missing} that config.json calls for.")


def check_values(name: str, tensor: torch.Tensor) -> None:
    """Refuse a floating-point tensor that is not finite or has entries beyond `MAX_MAGNITUDE`.

    Raises:
        ArtifactError: with the tensor's name and what was seen.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.is_meta:
        return
    # Slice by slice: the temporary of a mapper of gigabytes stays small. NaN and infinity both survive `amax`.
    for part in tensor if tensor.ndim else [tensor]:
        largest = float(part.abs().amax())
        if not largest <= MAX_MAGNITUDE:
            raise ArtifactError(
                f"Tensor {name!r} holds values up to {largest}; a mapper's are finite and at most {MAX_MAGNITUDE:g}. "
                "The fit or training that made it went wrong, or the file was altered."
            )


def _check_tensor(file: str, name: str, tensor: torch.Tensor, expected: Mapping[str, torch.Tensor]) -> None:
    if name not in expected:
        raise ArtifactError(f"{file} holds a tensor {name!r} that config.json does not call for.")
    if tensor.shape != expected[name].shape:
        raise ArtifactError(
            f"Tensor {name!r} in {file} has shape {tuple(tensor.shape)}; config.json calls for "
            f"{tuple(expected[name].shape)}."
        )
    if tensor.is_floating_point() != expected[name].is_floating_point():
        raise ArtifactError(f"Tensor {name!r} in {file} has dtype {tensor.dtype}, expected {expected[name].dtype}.")
    check_values(name, tensor)


def _listed_names(folder: Path) -> list[str]:
    try:
        return [name for name in read_manifest(folder).files if (folder / name).is_file()]
    except ArtifactError:
        return []


def _present_names(folder: Path) -> list[str]:
    """Files of a folder and of its `custom_generate`, by their path inside it; other folders are not looked at."""
    names = [path.name for path in folder.iterdir() if path.is_file()]
    generate = folder / "custom_generate"
    if generate.is_dir():
        names += [f"custom_generate/{path.name}" for path in generate.iterdir() if path.is_file()]
    return sorted(names)


def _is_artifact_file(name: str) -> bool:
    return name in ("config.json", CARD_NAME, GENERATE_NAME, INDEX_NAME) or name.endswith(".safetensors")


def _short(hashes: Mapping[str, str]) -> dict[str, str]:
    return {name: str(sha256)[:12] for name, sha256 in hashes.items()}
