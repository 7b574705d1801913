"""Saving and restoring a [`HandoffSession`]: `session.json` and `caches.safetensors`, each with its hash."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from .errors import ArtifactError, FingerprintError
from .fingerprint import model_fingerprint, tokenizer_fingerprint
from .session_state import ModelState, Span, layer_states

if TYPE_CHECKING:
    from .session import HandoffSession

VERSION = 1
_FACTS, _CACHES = "session.json", "caches.safetensors"


def save_session(session: HandoffSession, folder: Path) -> None:
    """Write a session; each file is written beside its place and moved there, the facts last."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    states: dict[str, Any] = {}
    for number, (name, state) in enumerate(session._states.items()):
        layers = [] if state.cache is None else state.cache.layers
        for index, layer in enumerate(layers):
            # A copy: shared or cropped tensors have storages that safetensors refuses.
            for kind, tensor in zip(("keys", "values"), layer_states(layer), strict=True):
                tensors[f"{number}.{index}.{kind}"] = tensor.detach().cpu().contiguous().clone()
        states[name] = {
            "tensors": number,
            "layers": len(layers),
            "length": state.length,
            "switches": state.switches,
            "spans": [asdict(span) for span in state.spans],
            "fingerprint": model_fingerprint(session.models[name]),
        }
    draft = folder / (_CACHES + ".new")
    save_file(tensors, draft, metadata={"format": "pt"})
    facts = {
        "version": VERSION,
        "messages": session.messages,
        "tokens": session._tokens,
        "states": states,
        "tokenizer_fingerprint": tokenizer_fingerprint(session.tokenizer),
        "resync": session.resync,
        "caches_sha256": _file_hash(draft),
    }
    facts["sha256"] = _facts_hash(facts)
    facts_draft = folder / (_FACTS + ".new")
    facts_draft.write_text(json.dumps(facts, ensure_ascii=False, indent=1), encoding="utf-8")
    os.replace(draft, folder / _CACHES)
    os.replace(facts_draft, folder / _FACTS)


def load_session(session: HandoffSession, folder: Path) -> None:
    """Fill a new session with what was saved.

    Raises:
        ArtifactError: a file is missing, damaged, or of another version.
        FingerprintError: a model or the tokenizer is not the one of the saved session.
    """
    facts, tensors = _read(folder)
    if set(facts["states"]) != set(session.models):
        raise ArtifactError(
            f"The saved session has the models {sorted(facts['states'])}, this one {sorted(session.models)}. Give the "
            "same names."
        )
    if facts["tokenizer_fingerprint"] != tokenizer_fingerprint(session.tokenizer):
        raise FingerprintError("The session was saved with another tokenizer; its tokens would mean something else.")
    states = {}
    for name, saved in facts["states"].items():
        seen = model_fingerprint(session.models[name])
        # The name and revision say where a checkpoint was loaded from, not what it is.
        for part in ("config", "kv_projections", "weights_sample"):
            if seen.get(part) != saved["fingerprint"].get(part):
                raise FingerprintError(
                    f"The session was saved with another model {name!r} ({part} differs); its cache would be wrong "
                    "for this one. Load the same checkpoint."
                )
        cache = None
        if saved["layers"]:
            cache = DynamicCache()
            model = session.models[name]
            for index in range(saved["layers"]):
                keys, values = (tensors[f"{saved['tensors']}.{index}.{kind}"] for kind in ("keys", "values"))
                cache.update(keys.to(model.device, model.dtype), values.to(model.device, model.dtype), index)
        states[name] = ModelState(cache, [Span(**span) for span in saved["spans"]], saved["switches"])
        if states[name].length != saved["length"]:
            raise ArtifactError(
                f"The saved cache of {name!r} has {states[name].length} tokens instead of {saved['length']}."
            )
    session.messages, session._tokens, session._states = facts["messages"], facts["tokens"], states


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    try:
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        if facts.get("version") != VERSION:
            raise ArtifactError(
                f"{folder} holds a session of version {facts.get('version')!r}; {VERSION} can be read."
            )
        expected = facts.pop("sha256", None)
        if expected != _facts_hash(facts):
            raise ArtifactError(f"{folder / _FACTS} was changed since it was saved: its hash does not match.")
        if facts["caches_sha256"] != _file_hash(folder / _CACHES):
            raise ArtifactError(f"{folder / _CACHES} is damaged or of another session: its hash does not match.")
        return facts, load_file(folder / _CACHES)
    except (FileNotFoundError, ValueError, AttributeError, SafetensorError) as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"{folder} holds no readable session: {error}.") from error


def _facts_hash(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


__all__ = ["load_session", "save_session"]
