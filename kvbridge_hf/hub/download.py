"""Bring an artifact to a local folder, whole and verified, from a folder or from the Hub.

The Hub's own errors (missing or gated repository, no such revision, no connection, nothing cached while offline) are
let through as `huggingface_hub` raises them; what is wrong with the artifact itself is an [`ArtifactError`].
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from ..errors import ArtifactError
from .integrity import CARD_NAME, INDEX_NAME, MANIFEST_NAME, Manifest, read_manifest, verify_file, verify_folder
from .retries import with_retries

_MAX_WORKERS = 8


def fetch_artifact(
    path_or_repo_id: str | os.PathLike,
    *,
    subfolder: str = "",
    weights: bool = True,
    artifact_digest: str | None = None,
    **download_kwargs: Any,
) -> tuple[Path, Manifest]:
    """Return a local folder with a verified artifact, and its manifest.

    From the Hub, the manifest is read first; it pins the commit and names the other files, which are then downloaded
    in parallel and nothing else is. A file whose bytes are not those of the manifest is removed from the cache and
    asked for once more before the artifact is refused.

    Args:
        path_or_repo_id: a folder, or the id of a model repository.
        subfolder: folder inside it.
        weights: whether the weight files are wanted; without, only config and card are brought and checked.
        artifact_digest: the digest that the artifact has to have ([`Manifest.digest`]).
        download_kwargs: `revision`, `token`, `cache_dir`, `force_download`, `local_files_only`, as for
            `hf_hub_download`.

    Raises:
        ArtifactError: no artifact, a damaged one, or one with another digest.
    """
    if os.path.isdir(path_or_repo_id):
        folder = Path(path_or_repo_id) / subfolder
        manifest = read_manifest(folder)
        _check_digest(manifest, artifact_digest, str(folder))
        verify_folder(folder, _wanted(manifest, weights))
        return folder, manifest
    if os.path.isabs(path_or_repo_id) or os.path.exists(path_or_repo_id):
        raise ArtifactError(f"{str(path_or_repo_id)!r} is neither a folder with a mapper nor the id of a repository.")

    repo_id = str(path_or_repo_id)
    folder, manifest = _fetch_manifest(repo_id, subfolder, download_kwargs)
    _check_digest(manifest, artifact_digest, repo_id)
    # All other files come from the very commit the manifest came from.
    root = folder.parents[len(PurePosixPath(subfolder).parts) - 1] if PurePosixPath(subfolder).parts else folder
    pinned = {**download_kwargs, "revision": root.name}
    wanted = _wanted(manifest, weights)
    with ThreadPoolExecutor(_MAX_WORKERS) as pool:
        list(pool.map(lambda name: _fetch_file(repo_id, subfolder, name, manifest, pinned), wanted))
    verify_folder(folder, names=())  # every byte was compared above; this looks for files that do not belong
    return folder, manifest


def _wanted(manifest: Manifest, weights: bool) -> list[str]:
    if weights:
        return list(manifest.files)
    return [name for name in ("config.json", CARD_NAME, INDEX_NAME) if name in manifest.files]


def _check_digest(manifest: Manifest, expected: str | None, where: str) -> None:
    if expected is not None and manifest.digest != expected:
        raise ArtifactError(
            f"The artifact at {where!r} has the digest {manifest.digest}, not {expected}: it is another artifact than "
            "the one that was pinned."
        )


def _fetch_manifest(repo_id: str, subfolder: str, kwargs: dict[str, Any]) -> tuple[Path, Manifest]:
    for attempt in range(2):
        path = _download(repo_id, subfolder, MANIFEST_NAME, kwargs if attempt == 0 else _again(kwargs))
        try:
            return path.parent, read_manifest(path.parent)
        except ArtifactError:
            _forget(path)
            if attempt == 1 or kwargs.get("local_files_only"):
                raise
    raise AssertionError("unreachable")


def _fetch_file(repo_id: str, subfolder: str, name: str, manifest: Manifest, kwargs: dict[str, Any]) -> None:
    for attempt in range(2):
        path = _download(repo_id, subfolder, name, kwargs if attempt == 0 else _again(kwargs))
        problem = verify_file(path, *manifest.files[name])
        if problem is None:
            return
        # Left in the cache, the wrong bytes would be served to every later load.
        _forget(path)
        if attempt == 1 or kwargs.get("local_files_only"):
            raise ArtifactError(
                f"{name} of {repo_id!r} at {kwargs['revision']} {problem}. It was removed from the cache. If a new "
                "download does not help, the repository holds a damaged artifact: push it again."
            )


def _download(repo_id: str, subfolder: str, name: str, kwargs: dict[str, Any]) -> Path:
    try:
        return Path(with_retries(hf_hub_download, repo_id, name, subfolder=subfolder or None, **kwargs))
    except Exception as error:
        _raise_for(error, repo_id, name)


def _raise_for(error: Exception, repo_id: str, name: str) -> NoReturn:
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        hint = "Was it written by KVBridgeMapper.push_to_hub?" if name == MANIFEST_NAME else "Push the mapper again."
        raise ArtifactError(
            f"The repository {repo_id!r} has no {name}, so it holds no whole mapper. {hint}"
        ) from error
    raise error


def _again(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "force_download": True}


def _forget(path: Path) -> None:
    """Remove a file of the Hub cache: the pointer in the snapshot and the repository's blob behind it."""
    blob = path.parent / os.readlink(path) if path.is_symlink() else None
    path.unlink(missing_ok=True)
    if blob is not None and blob.parent.name == "blobs":
        blob.unlink(missing_ok=True)
