"""Where a decoder's attention heads leave what they read: the input of the attention's output projection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .config_facts import decoder_of, text_config
from .errors import UnsupportedModelError

# What the models of transformers call the projection behind the attention.
PROJECTION_NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo")


def output_projections(model: Any) -> list[nn.Module]:
    """The attention output projection of every layer.

    Raises:
        UnsupportedModelError: a layer has none of a known name.
    """
    found: dict[int, nn.Module] = {}
    for module in decoder_of(model).modules():
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in found:
            continue
        projection = next((p for name in PROJECTION_NAMES if (p := getattr(module, name, None))), None)
        if projection is not None:
            found[layer] = projection
    layers = text_config(model.config).num_hidden_layers
    if sorted(found) != list(range(layers)):
        raise UnsupportedModelError(
            f"{type(model).__name__} has {layers} layers, but attention output projections "
            f"({', '.join(PROJECTION_NAMES)}) were found in layers {sorted(found)} only."
        )
    return [found[layer] for layer in range(layers)]


@contextmanager
def recorded_attention(model: Any) -> Iterator[list[torch.Tensor]]:
    """Record what the heads of every layer read during forwards; gradients pass.

    Yields:
        A list that holds after a forward one `(batch, queries, heads * head_dim)` a layer.
    """
    projections = output_projections(model)
    outputs: list[torch.Tensor] = [torch.empty(0)] * len(projections)

    def hook(layer: int) -> Any:
        def record(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            outputs[layer] = args[0]

        return record

    handles = [module.register_forward_pre_hook(hook(layer)) for layer, module in enumerate(projections)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


__all__ = ["PROJECTION_NAMES", "output_projections", "recorded_attention"]
