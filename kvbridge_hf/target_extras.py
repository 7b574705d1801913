"""What a mapper's method may ask of the target itself, beside the source's content.

    anchor_keys, anchor_values   exact content keys and values of target layer 0, (different, heads, head_dim)
    anchor_embeddings            the target's token embeddings, (different, hidden_size)
    anchor_places                the row of these three that belongs to each column's token, (batch, tokens), long
    own_keys, own_values         content keys and values of all target layers, (layers, batch, heads, tokens, head_dim)

Content keys and values of layer 0 follow from the token alone: they need no attention, and without its rotation a key
knows no position. So each different token of the columns is looked at once and held once, and `anchor_places` says
which one stands where. The `own_` ones are the target's prefill.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .errors import GenerateArgumentError
from .native_layers import read_native_layers
from .prompt_reading import read_columns
from .rotary import ContentRotary, positions_from_mask

ANCHORS = ("anchor_keys", "anchor_values", "anchor_embeddings", "anchor_places")
OWN = ("own_keys", "own_values")


@torch.no_grad()
def read_extras(
    names: Sequence[str],
    target: Any,
    rotary: ContentRotary,
    input_ids: torch.Tensor,
    mask: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """The tensors that a method requires, for some columns.

    Args:
        names: of the tensors, see the module.
        target: the target model.
        rotary: its rotation.
        input_ids, mask: `(batch, tokens)`; what stands at padding is not read, it counts as token 0.

    Raises:
        GenerateArgumentError: there is no tensor of one of the names.
    """
    if unknown := sorted(set(names) - {*ANCHORS, *OWN}):
        raise GenerateArgumentError(f"The mapper's method asks for {unknown}; there are {(*ANCHORS, *OWN)}.")
    ids = input_ids.masked_fill(~mask.to(input_ids.device), 0)
    extras: dict[str, torch.Tensor] = {}
    if set(ANCHORS) & set(names):
        different, extras["anchor_places"] = ids.unique(return_inverse=True)
    if {"anchor_keys", "anchor_values"} & set(names):
        # One sequence of one token each, all at position 0.
        [(keys, values)] = read_native_layers(target, different[:, None], None, 1)
        keys = rotary.strip(keys, keys.new_zeros(len(keys), 1, dtype=torch.long), 0)
        extras["anchor_keys"], extras["anchor_values"] = keys[:, :, 0], values[:, :, 0]
    if "anchor_embeddings" in names:
        embeddings = target.get_input_embeddings()
        extras["anchor_embeddings"] = embeddings(different.to(embeddings.weight.device))
    if set(OWN) & set(names):
        layers: list[Any] = read_columns(target, ids, mask).layers
        entries = [(layer.keys, layer.values) for layer in layers]
        extras.update(own_extras(entries, rotary, positions_from_mask(mask)))
    return {name: extras[name] for name in names}


def own_extras(
    entries: Iterable[tuple[torch.Tensor, torch.Tensor]], rotary: ContentRotary, position_ids: torch.Tensor
) -> dict[str, torch.Tensor]:
    """`own_keys` and `own_values` of the target's own cache entries (keys rotated)."""
    keys, values = zip(*entries, strict=True)
    device = keys[0].device
    content = [rotary.strip(states, position_ids.to(states.device), layer) for layer, states in enumerate(keys)]
    return {
        "own_keys": torch.stack([states.to(device) for states in content]),
        "own_values": torch.stack([states.to(device) for states in values]),
    }


__all__ = ["ANCHORS", "OWN", "own_extras", "read_extras"]
