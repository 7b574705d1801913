"""What a visitor typed, as tokens, or a kind word about why that does not work; and every error as a text."""

from __future__ import annotations

from typing import Any

import torch
from machine import Stopped

from kvbridge_hf.errors import KVBridgeError

# Tokenizing takes time too; no sensible text of this page is longer.
MAX_CHARACTERS = 200_000


class Unsuitable(Exception):
    """Input that cannot be used; the message is for the visitor."""


def encode(pair: Any, text: str | None, max_new_tokens: int) -> torch.Tensor:
    """The prompt's tokens, `(1, tokens)`, on the target's device.

    Raises:
        Unsuitable: it is empty, or too long for the pair.
    """
    text = (text or "").strip()
    if not text:
        raise Unsuitable("There is nothing to read yet. Type a text, or click one of the examples.")
    room = pair.max_tokens - max_new_tokens
    if len(text) > MAX_CHARACTERS:
        raise Unsuitable(
            f"That is a text of {len(text):,} characters. This page takes up to {MAX_CHARACTERS:,}, and this pair "
            f"{room:,} tokens. Please shorten it."
        )
    ids = pair.tokenizer(text, return_tensors="pt", return_token_type_ids=False)["input_ids"]
    check_length(ids.shape[1], room, max_new_tokens)
    return ids.to(pair.target.device)


def check_length(tokens: int, room: int, max_new_tokens: int) -> None:
    """Raise [`Unsuitable`] where a text is longer than the room for it."""
    if tokens > room:
        raise Unsuitable(
            f"Your text has {tokens:,} tokens. This pair reads up to {room:,} when the answer may take "
            f"{max_new_tokens:,}. Shorten it by {tokens - room:,} tokens, or ask for a shorter answer."
        )


def explain(error: BaseException) -> str:
    """An error in words for the page."""
    if isinstance(error, Unsuitable):
        return str(error)
    if isinstance(error, Stopped):
        return "Stopped."
    if isinstance(error, torch.OutOfMemoryError):
        return "The machine ran out of memory. Try a shorter text or a smaller pair."
    message = " ".join(str(error).split())
    if isinstance(error, (KVBridgeError, OSError, ValueError)) and message:
        return message
    return f"{type(error).__name__}: {message or 'no further message'}"


def pieces(tokenizer: Any, tokens: list[int]) -> list[str]:
    """The text of each token such that together they give the text of all of them.

    Tokens that are part of a character of several bytes get an empty text until the character is whole.
    """
    texts: list[str] = []
    for stop in range(1, len(tokens) + 1):
        # A window is enough: what stands far in front does not change how a token is written.
        start = max(0, stop - 8)
        before = tokenizer.decode(tokens[start : stop - 1], skip_special_tokens=False) if stop - 1 > start else ""
        after = tokenizer.decode(tokens[start:stop], skip_special_tokens=False)
        if after.endswith("\ufffd"):
            texts.append("")
            continue
        before = before.rstrip("\ufffd")
        texts.append(after[len(before) :] if after.startswith(before) else tokenizer.decode(tokens[stop - 1 : stop]))
    return texts


__all__ = ["MAX_CHARACTERS", "Unsuitable", "check_length", "encode", "explain", "pieces"]
