"""What the Hub on loopback keeps: repositories in memory, and how the Hub describes them."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

_DATE = "2026-01-01T00:00:00.000Z"


@dataclass(frozen=True)
class Blob:
    """One file at one commit."""

    data: bytes
    lfs: bool

    @property
    def oid(self) -> str:
        """Git's object id of the file, or the SHA-256 of an LFS file: what the client compares."""
        return self.sha256 if self.lfs else hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass
class Repo:
    """Commits by id, and the names that point to them."""

    repo_id: str
    private: bool = False
    gated: bool = False
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)

    def commit(self, ref: str, files: dict[str, Blob]) -> str:
        seed = json.dumps([self.repo_id, len(self.commits), sorted((name, blob.oid) for name, blob in files.items())])
        oid = hashlib.sha1(seed.encode()).hexdigest()
        self.commits[oid] = files
        self.refs[ref] = oid
        return oid

    def resolve(self, revision: str) -> str | None:
        return self.refs.get(revision) or (revision if revision in self.commits else None)


@dataclass
class Fault:
    """What to do wrong, to which requests, and how often."""

    method: str
    pattern: str
    kind: str
    times: int


class HubError(Exception):
    """An answer other than 200, with the Hub's own error code."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


def tree_entry(name: str, blob: Blob) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(blob.data), "oid": blob.oid[:40]}
    if blob.lfs:
        entry["lfs"] = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": 134}
    return entry


def describe(repo: Repo, oid: str, files: dict[str, Blob]) -> dict[str, Any]:
    """A repository as the Hub lists it, with the tags that the Hub derives from its card."""
    card: dict[str, Any] = {}
    if "README.md" in files and (match := re.match(r"\A---\n(.*?)\n---", files["README.md"].data.decode(), re.S)):
        card = yaml.safe_load(match.group(1)) or {}
    tags = list(card.get("tags", []))
    bases = card.get("base_model") or []
    for base in [bases] if isinstance(bases, str) else bases:
        relation = card.get("base_model_relation")
        tags += [f"base_model:{base}"] + ([f"base_model:{relation}:{base}"] if relation else [])
    if "library_name" in card:
        tags.append(card["library_name"])
    described = {"_id": oid[:24], "id": repo.repo_id, "modelId": repo.repo_id, "sha": oid, "private": repo.private}
    described |= {
        "gated": "manual" if repo.gated else False,
        "tags": tags,
        "cardData": card,
        "downloads": 0,
        "likes": 0,
    }
    return described | {"lastModified": _DATE, "createdAt": _DATE, "library_name": card.get("library_name")}


def card_errors(card: Any) -> list[str]:
    """What the Hub's metadata check refuses, as far as mapper cards can run into it."""
    if not isinstance(card, dict):
        return ["metadata must be a mapping"]
    errors = []
    bases = card.get("base_model", [])
    for base in bases if isinstance(bases, list) else [bases]:
        if not isinstance(base, str) or not re.fullmatch(r"[\w.-]+/[\w.-]+", base):
            errors.append(f'"base_model" {base!r} is not the id of a repository')
    if not all(isinstance(tag, str) for tag in card.get("tags", [])):
        errors.append('"tags" must be strings')
    for model in card.get("model-index", []):
        for result in model.get("results", [{}]):
            if not result.get("task", {}).get("type") or not result.get("metrics"):
                errors.append('"model-index" results need a task type and metrics')
            if not {"name", "type"} <= set(result.get("dataset", {})):
                errors.append('"model-index" datasets need a name and a type')
    return errors
