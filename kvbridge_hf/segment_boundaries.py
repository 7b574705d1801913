"""Tokens at which a sentence or a line ends, so that repair can take whole ones."""

from __future__ import annotations

from typing import Any

ENDS = frozenset(".?!;。？！；")
BESIDE = frozenset("\"'”’)]*`")
LINE = frozenset("\nĊ")
# How tokenizers write a space or a line break.
_SPACES = str.maketrans("", "", " Ġ▁\r\tč")


def boundary_tokens(tokenizer: Any) -> list[int]:
    """Ids of the tokens that end a sentence or a line: punctuation alone, line breaks, and the end-of-turn markers.

    A token that carries letters or digits is none, so that "Mr." written as one token is not taken for an end.

    Args:
        tokenizer: of the pair.
    """
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = set(tokenizer.all_special_ids)
    end = getattr(tokenizer, "eos_token_id", None)
    found: set[int] = set() if end is None else {end}
    for index, name in enumerate(names):
        if not isinstance(name, str) or index in special:
            continue
        marks = name.translate(_SPACES)
        if name == "<0x0A>" or (marks and set(marks) <= ENDS | BESIDE | LINE and set(marks) & (ENDS | LINE)):
            found.add(index)
    return sorted(found)


__all__ = ["boundary_tokens"]
