"""The one place that decides which implementation of a map runs.

Faster twins of the functions in `reference` are chosen here by device and dtype; callers import from this package.
"""

from __future__ import annotations

from .reference import map_full_head, map_head_local

__all__ = ["map_full_head", "map_head_local"]
