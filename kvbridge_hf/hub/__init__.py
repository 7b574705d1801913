"""A mapper as an artifact: sealed files, a card, and the way to the Hub and back."""

from __future__ import annotations

from .download import fetch_artifact
from .integrity import Manifest, read_manifest, verify_folder, write_manifest
from .model_card import create_model_card
from .publishing import publish_folder, search_mappers

__all__ = [
    "Manifest",
    "create_model_card",
    "fetch_artifact",
    "publish_folder",
    "read_manifest",
    "search_mappers",
    "verify_folder",
    "write_manifest",
]
