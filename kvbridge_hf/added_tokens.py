"""Tokens of a text that goes on from another one."""

from __future__ import annotations

from typing import Any


def added_tokens(tokenizer: Any, before: str, text: str) -> list[int]:
    """Those that a text adds to what stands before it; where the joint falls inside a token, the text's own."""
    start, whole = (list(tokenizer(one, add_special_tokens=False)["input_ids"]) for one in (before, before + text))
    if whole[: len(start)] == start:
        return whole[len(start) :]
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def joint(before: str, text: str) -> str:
    """The space between two texts, where neither brings white space of its own."""
    return "" if before[-1:].isspace() or text[:1].isspace() else " "


__all__ = ["added_tokens", "joint"]
