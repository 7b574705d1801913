"""Geometry of some published models, so that a pair can be planned without asking the Hub.

Only what sizes depend on is kept: these are no configs to load weights with. Sources: the models' own `config.json`
files and, for Ministral 3, table 1 of arXiv:2601.08584.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

# Architecture and what all sizes of a family share.
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960},
    "llama-3.1": {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072},
    "ministral-3": {"model_type": "ministral3", "vocab_size": 131072, "max_position_embeddings": 262144},
}

# family, size -> hidden_size, intermediate_size, layers, query heads, tied embeddings; all have 8 KV heads of 128.
_SIZES: dict[tuple[str, str], tuple[int, int, int, int, bool]] = {
    ("qwen3", "0.6b"): (1024, 3072, 28, 16, True),
    ("qwen3", "1.7b"): (2048, 6144, 28, 16, True),
    ("qwen3", "4b"): (2560, 9728, 36, 32, True),
    ("qwen3", "8b"): (4096, 12288, 36, 32, False),
    ("qwen3", "14b"): (5120, 17408, 40, 40, False),
    ("qwen3", "32b"): (5120, 25600, 64, 64, False),
    ("llama-3.1", "8b"): (4096, 14336, 32, 32, False),
    ("llama-3.1", "70b"): (8192, 28672, 80, 64, False),
    ("ministral-3", "3b"): (3072, 9216, 26, 32, True),
    ("ministral-3", "8b"): (4096, 14336, 34, 32, False),
    ("ministral-3", "14b"): (5120, 16384, 40, 32, False),
}

# "Qwen/Qwen3-14B-Base", "meta-llama/Meta-Llama-3.1-8B-Instruct", "Ministral-3-14B-Reasoning-2512", "qwen3-14b"
_NAME = re.compile(
    r"(?:[^/]+/)?(?:meta-)?(?P<family>qwen3|llama-3\.1|ministral-3)-(?P<size>[0-9.]+b)"
    r"(?:-(?:base|instruct|reasoning))?(?:-2512)?"
)


def published_config(name: str) -> PreTrainedConfig | None:
    """Config of a published model by its name, with or without the organisation; None if it is not one of these."""
    match = _NAME.fullmatch(name.lower())
    sizes = _SIZES.get((match["family"], match["size"])) if match else None
    if match is None or sizes is None:
        return None
    hidden_size, intermediate_size, layers, heads, tied = sizes
    fields = dict(_FAMILIES[match["family"]])
    return AutoConfig.for_model(
        fields.pop("model_type"),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
        **fields,
    )


def published_names() -> list[str]:
    """Short names of all models here."""
    return [f"{family}-{size}" for family, size in _SIZES]
