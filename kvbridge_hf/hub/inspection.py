"""What an artifact is, without loading it: config, hashes, and the headers of the weight files."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from ..errors import ArtifactError
from .artifact import read_config
from .card_metrics import results_of
from .download import fetch_artifact

_MAX_HEADER = 100 * 2**20  # bytes; the limit of the safetensors format


def inspect_artifact(
    path_or_repo_id: str | os.PathLike, *, subfolder: str = "", **download_kwargs: Any
) -> dict[str, Any]:
    """Describe an artifact as one JSON-able dict.

    In a folder all files are verified. Of a repository only manifest, config and card are downloaded and verified; of
    the weight files the headers are read.

    Args:
        path_or_repo_id: folder or Hub id.
        subfolder: folder inside it.
        download_kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, as for `from_pretrained`.

    Raises:
        ArtifactError: no artifact, or a damaged one.
    """
    is_local = os.path.isdir(path_or_repo_id)
    folder, manifest = fetch_artifact(path_or_repo_id, subfolder=subfolder, weights=is_local, **download_kwargs)
    config = read_config(folder)
    if is_local:
        tensors = {name: fact for file in manifest.weight_files for name, fact in _read_header(folder / file).items()}
    else:
        tensors = _remote_headers(str(path_or_repo_id), subfolder, manifest.weight_files, folder, download_kwargs)
    floating = {name: fact for name, fact in tensors.items() if fact["dtype"].startswith(("F", "BF"))}
    source, target = config.source_geometry, config.target_geometry
    return {
        "mapper": str(path_or_repo_id),
        "digest": manifest.digest,
        "method": config.method,
        "support": config.support,
        "top_k": config.top_k,
        "source": {**_brief(source), **_named(config.source_fingerprint)},
        "target": {**_brief(target), **_named(config.target_fingerprint)},
        "selected_layers": config.selected_layers,
        "num_sinks": config.num_sinks,
        "num_native_suffix": config.num_native_suffix,
        "max_calibrated_positions": config.max_calibrated_positions,
        "parameters": sum(_count(fact["shape"]) for fact in floating.values()),
        "dtypes": sorted({fact["dtype"] for fact in floating.values()}),
        "tensors": tensors,
        "files": {name: {"bytes": size, "sha256": sha256} for name, (size, sha256) in sorted(manifest.files.items())},
        "verified": "all files" if is_local else "config and card; weights are verified when they are loaded",
        "fit": config.fit,
        "gates": config.gates,
        "results": results_of(config.evaluation),
        "verdict": config.evaluation.get("verdict"),
    }


def to_text(facts: dict[str, Any]) -> str:
    """The facts of [`inspect_artifact`] for people."""
    lines = [f"{facts['mapper']}  (digest {facts['digest'][:16]})"]
    for role in ("source", "target"):
        model = facts[role]
        shape = f"{model['num_layers']} layers x {model['num_kv_heads']} KV heads x {model['head_dim']}"
        revision = f" at {model['revision']}" if model.get("revision") else ""
        lines.append(f"{role}: {model.get('name') or 'not recorded'}{revision}, {shape}")
    lines.append(
        f"map: {facts['method']}, {facts['support']}, {facts['top_k']} source layers per target layer, "
        f"{facts['parameters']:,} parameters in {', '.join(facts['dtypes'])}"
    )
    lines.append(f"native: first {facts['num_sinks']} and last {facts['num_native_suffix']} tokens of a prompt")
    lines.append("source layers of each target layer, best first:")
    lines += [f"  {layer}: {' '.join(map(str, row))}" for layer, row in enumerate(facts["selected_layers"])]
    lines.append(f"files ({facts['verified']} verified):" if "all" in facts["verified"] else "files:")
    lines += [f"  {name}: {file['bytes']:,} bytes, {file['sha256'][:16]}" for name, file in facts["files"].items()]
    lines.append("results:" if facts["results"] else "results: none recorded")
    lines += [f"  {result['name']}: {result['value']:.4g}{_interval(result)}" for result in facts["results"]]
    if facts["verdict"]:
        lines.append(f"verdict: {facts['verdict']}")
    return "\n".join(lines)


def _read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Names, dtypes and shapes of a safetensors file: a length of 8 bytes, little-endian, then that much JSON."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, _MAX_HEADER)))
        return {
            name: {"dtype": fact["dtype"], "shape": fact["shape"]}
            for name, fact in header.items()
            if name != "__metadata__"
        }
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{str(path)!r} is not a readable safetensors file: {error!r}.") from error


def _remote_headers(
    repo_id: str, subfolder: str, names: list[str], folder: Path, download_kwargs: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    if download_kwargs.get("local_files_only"):
        here = [folder / name for name in names if (folder / name).is_file()]
        return {name: fact for path in here for name, fact in _read_header(path).items()}
    api = HfApi(token=download_kwargs.get("token"))
    tensors = {}
    for name in names:
        path = f"{subfolder}/{name}" if subfolder else name
        metadata = api.parse_safetensors_file_metadata(repo_id, path, revision=download_kwargs.get("revision"))
        for tensor, info in metadata.tensors.items():
            tensors[tensor] = {"dtype": info.dtype, "shape": list(info.shape)}
    return tensors


def _brief(geometry: dict[str, Any]) -> dict[str, Any]:
    return {name: geometry.get(name) for name in ("model_type", "num_layers", "num_kv_heads", "head_dim")}


def _named(fingerprint: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": fingerprint.get("name_or_path"),
        "revision": fingerprint.get("revision"),
        "kv_projections": fingerprint.get("kv_projections"),
    }


def _count(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _interval(result: dict[str, Any]) -> str:
    if result.get("low") is None or result.get("high") is None:
        return ""
    return f" [{result['low']:.4g}, {result['high']:.4g}]"
