"""The models of the Tinytown family: real architectures, one tokenizer, trained apart."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

COMMON = {"max_position_embeddings": 2048, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "attention_bias": False}


@dataclass(frozen=True)
class Member:
    """One model of the family: its architecture, the tokens it is trained on, and the seed of weights and data."""

    config_class: type[PretrainedConfig]
    layers: int
    hidden: int
    mlp: int
    query_heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    peak_lr: float
    seed: int
    rope_theta: float = 10_000.0
    starts_from: str | None = None
    genre: str | None = None
    scaled_init: bool = True  # see scale_initial_weights in train.py

    def config(self, tokenizer) -> PretrainedConfig:
        return self.config_class(
            vocab_size=len(tokenizer),
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_attention_heads=self.query_heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            # With the usual 0.02 a model this narrow does not learn to look anything up in this budget.
            initializer_range=self.hidden**-0.5,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **COMMON,
        )


FAMILY = {
    "tinytown-s": Member(Qwen3Config, 2, 96, 192, 4, 2, 32, 3_600_000, 2e-3, seed=11),
    "tinytown-m": Member(Qwen3Config, 5, 160, 320, 6, 2, 32, 13_400_000, 1.5e-3, seed=12),
    "tinytown-l": Member(LlamaConfig, 6, 192, 416, 6, 2, 32, 38_000_000, 1.2e-3, seed=13, rope_theta=50_000.0),
    "tinytown-w": Member(Qwen3Config, 3, 128, 256, 4, 4, 24, 7_000_000, 2e-3, seed=14),
    "tinytown-m-diary": Member(
        Qwen3Config, 5, 160, 320, 6, 2, 32, 500_000, 3e-4, seed=15, starts_from="tinytown-m", genre="diary"
    ),
}
