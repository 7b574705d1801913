"""Models from their configs alone, and what is run over them: the input of the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModel, PreTrainedConfig

from ..config_facts import text_config
from ..geometry import KVGeometry


def count_parameters(config: PreTrainedConfig) -> tuple[int, int]:
    """Parameters of the text decoder's layers, and of the whole text model with tied embeddings counted once."""
    text = text_config(config)
    with torch.device("meta"):
        decoder = AutoModel.from_config(text)
    ends = text.vocab_size * text.hidden_size * (1 if text.tie_word_embeddings else 2)
    embeddings = {id(p) for p in decoder.get_input_embeddings().parameters()}
    body = sum(p.numel() for p in decoder.parameters() if id(p) not in embeddings)
    return body, body + ends


@dataclass(frozen=True)
class ModelSize:
    """A model from its config alone.

    Attributes:
        geometry (`KVGeometry`): Of its cache.
        parameters (`int`): Of the whole model, tied embeddings once.
        body_parameters (`int`): Without input embeddings and language modelling head: those that multiply.
        intermediate_size (`int`): Widest activation of a layer.
    """

    geometry: KVGeometry
    parameters: int
    body_parameters: int
    intermediate_size: int

    @classmethod
    def of(cls, config: Any) -> ModelSize:
        """Count the parameters of an empty model; nothing is downloaded."""
        body, whole = count_parameters(config)
        width = getattr(text_config(config), "intermediate_size", None) or 0
        return cls(KVGeometry.from_config(config), whole, body, width)


@dataclass(frozen=True)
class Workload:
    """What is run over the models.

    Attributes:
        sequences, sequence_length, batch_size, token_stride, num_sinks (`int`): Of the data.
        weight_bytes (`int`): Bytes of one model weight.
        processes (`int`): They share the sequences; each holds the models and the statistics.
    """

    sequences: int
    sequence_length: int
    batch_size: int = 8
    token_stride: int = 1
    num_sinks: int = 4
    weight_bytes: int = 2
    processes: int = 1

    @property
    def kept_tokens(self) -> int:
        """Of one sequence."""
        return max(0, -(-(self.sequence_length - self.num_sinks) // self.token_stride))


__all__ = ["ModelSize", "Workload", "count_parameters"]
