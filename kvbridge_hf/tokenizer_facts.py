"""What makes two tokenizers interchangeable for a handoff: the same token ids for the same text.

Source and target read the same `input_ids`, so every id has to mean the same token to both. Three things are compared:
the vocabulary, the ids of a fixed probe text (two tokenizers can share a vocabulary and split differently), and the
special tokens that are put around a text. Files and library objects are not compared: they change between releases of
`tokenizers` without a change in behaviour.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

# Case, digits, spaces, code, accents, scripts with and without spaces, emoji with joiners, and odd white space.
PROBE_TEXT = (
    "In the beginning there was nothing, other than what they had thought of themselves; everybody would've agreed. "
    "The quick brown fox's 1234567 jumps: over 3.14 lazy dogs!  two  spaces\n\n\tdef f(x):\n    return x**2 - 0x1F\n"
    "naïve Ünïcödé ångström Straße ﬁne e\u0301 Привет, мир! Γειά σου "
    "\u3053\u3093\u306b\u3061\u306f \u4e16\u754c \uc548\ub155 \u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd "
    "\u0928\u092e\u0938\u094d\u0924\u0947 \U0001f469\u200d\U0001f4bb\u00a0\u200b\ufeff <tag attr='v'/> "
    "https://example.org/?q=a%20b&c=d_e-f CamelCaseWordsINaRow $100,000.00 \r\n"
)


@dataclass(frozen=True)
class TokenizerFacts:
    """Vocabulary, special tokens by role and the probe text's ids with and without special tokens."""

    vocabulary: dict[str, int]
    special_tokens: dict[str, Any]
    probe_ids: tuple[int, ...]
    wrapped_probe_ids: tuple[int, ...]

    def digest(self) -> str:
        """SHA-256 of everything that decides which ids a text gets.

        Roles without influence on the ids (which token pads, which one ends a generation) are left out: a base model
        and its chat variant differ in them and can be bridged.
        """
        facts = [sorted(self.vocabulary.items()), self.probe_ids, self.wrapped_probe_ids]
        return hashlib.sha256(json.dumps(facts, ensure_ascii=True).encode()).hexdigest()


def tokenizer_facts(tokenizer: Any) -> TokenizerFacts:
    """Read [`TokenizerFacts`] from a tokenizer (or a processor that holds one); encodes one short text."""
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return TokenizerFacts(
        vocabulary=dict(tokenizer.get_vocab()),
        special_tokens=special,
        probe_ids=tuple(tokenizer.encode(PROBE_TEXT, add_special_tokens=False)),
        wrapped_probe_ids=tuple(tokenizer.encode(PROBE_TEXT)),
    )


def compare_tokenizers(
    source: TokenizerFacts, target: TokenizerFacts
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What keeps two tokenizers apart.

    Returns:
        Two lists of dicts with the fields of `PairReason`: differences that forbid a handoff, and harmless ones.
    """
    reasons: list[dict] = []
    notes: list[dict] = []
    remedy = (
        "Both models must read the same token ids: choose two models of one tokenizer family, and load both with the "
        "same tokenizer files."
    )
    one_sided = sorted(set(source.vocabulary) ^ set(target.vocabulary))
    moved = sorted(t for t, i in source.vocabulary.items() if target.vocabulary.get(t, i) != i)
    if one_sided or moved:
        examples = (moved or one_sided)[:3]
        reasons.append(
            {
                "field": "tokenizer.vocabulary",
                "source": {token: source.vocabulary.get(token) for token in examples},
                "target": {token: target.vocabulary.get(token) for token in examples},
                "message": (
                    f"the vocabularies have {len(source.vocabulary)} and {len(target.vocabulary)} tokens, of which "
                    f"{len(one_sided)} are known to one of them only and {len(moved)} have another id; for example "
                    f"{', '.join(map(repr, examples))}"
                ),
                "remedy": remedy,
            }
        )
    if source.probe_ids != target.probe_ids:
        place = _first_difference(source.probe_ids, target.probe_ids)
        reasons.append(
            {
                "field": "tokenizer.ids",
                "source": list(source.probe_ids[place : place + 4]),
                "target": list(target.probe_ids[place : place + 4]),
                "message": f"the same text gets other token ids, from token {place} of a probe text on",
                "remedy": remedy,
            }
        )
    elif source.wrapped_probe_ids != target.wrapped_probe_ids:
        added = [f"{len(side.wrapped_probe_ids) - len(side.probe_ids)} added" for side in (source, target)]
        reasons.append(
            {
                "field": "tokenizer.special_tokens",
                "source": f"{added[0]}, first id {source.wrapped_probe_ids[:1]}",
                "target": f"{added[1]}, first id {target.wrapped_probe_ids[:1]}",
                "message": "one tokenizer puts other special tokens around a text than the other",
                "remedy": "Tokenize for both models with one tokenizer, or set add_bos_token/add_eos_token alike.",
            }
        )
    roles = sorted(set(source.special_tokens) | set(target.special_tokens))
    other = [role for role in roles if source.special_tokens.get(role) != target.special_tokens.get(role)]
    if other:
        notes.append(
            {
                "field": "tokenizer.special_token_roles",
                "source": {role: source.special_tokens.get(role) for role in other},
                "target": {role: target.special_tokens.get(role) for role in other},
                "message": f"{', '.join(other)} differ; the ids of a text do not",
                "remedy": "Nothing to do: generation ends at the target's own end token.",
            }
        )
    return reasons, notes


def _first_difference(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return min(len(left), len(right))
