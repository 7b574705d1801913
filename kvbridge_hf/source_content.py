"""What a mapper reads: the source's content, and the features that a linear map of a target layer has of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from .errors import CacheMismatchError

# `source.keys` or `source.values`.
Reader = Callable[[int], torch.Tensor]


class SourceContent:
    """What a mapper reads: the source's keys and values in content space, layer by layer, read when asked for.

    Columns that `valid` calls padding are returned as zeros, so that nothing that stands in them (NaN included)
    reaches a mapped token.

    Args:
        keys, values: one tensor `(batch, source_heads, tokens, source_head_dim)` per source layer; keys without their
            rotary rotation.
        position_ids: `(batch, tokens)`, long; the row index by default.
        valid: `(batch, tokens)`, bool; `None` when no column is padding.
        extras: further tensors that a method asks for by name (see [`MapperMethod.requires`]).
    """

    def __init__(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        position_ids: torch.Tensor | None = None,
        valid: torch.Tensor | None = None,
        extras: dict[str, torch.Tensor] | None = None,
    ):
        if len(keys) != len(values) or len(keys) == 0:
            raise CacheMismatchError(
                f"keys and values must have one tensor a layer, got {len(keys)} and {len(values)}."
            )
        batch, _, tokens, _ = keys[0].shape
        if position_ids is None:
            position_ids = torch.arange(tokens, device=keys[0].device).expand(batch, tokens)
        self._setup(
            len(keys),
            lambda layer: keys[layer],
            lambda layer: values[layer],
            position_ids,
            valid,
            extras,
        )

    def _setup(
        self,
        num_layers: int,
        read_keys: Callable[[int], torch.Tensor],
        read_values: Callable[[int], torch.Tensor],
        position_ids: torch.Tensor,
        valid: torch.Tensor | None,
        extras: dict[str, torch.Tensor] | None,
    ) -> None:
        self.num_layers = num_layers
        self._read_keys, self._read_values = read_keys, read_values
        self.position_ids = position_ids
        self.extras = extras or {}
        # Asked once, here: the answer costs a device synchronisation.
        self._padding = None if valid is None or bool(valid.all()) else ~valid
        self.valid = torch.ones_like(position_ids, dtype=torch.bool) if valid is None else valid
        self._content: dict[tuple[str, int], torch.Tensor] = {}
        self._shared: dict[Hashable, torch.Tensor] = {}

    @classmethod
    def from_cache(
        cls,
        cache: Any,
        rotary: Any,
        position_ids: torch.Tensor,
        valid: torch.Tensor | None = None,
        start: int = 0,
        stop: int | None = None,
        extras: dict[str, torch.Tensor] | None = None,
    ) -> SourceContent:
        """View columns `start` to `stop` of a source model's cache.

        Args:
            cache: a Transformers `Cache`; read, never written.
            rotary: the source's [`ContentRotary`].
            position_ids: `(batch, cache length)` or `(1, cache length)`, positions of all columns of the cache.
            valid: `(batch, cache length)`, bool.
            start, stop: columns to map; `stop` defaults to the number of positions given, so that the unused end of a
                static cache is left out.

        Raises:
            CacheMismatchError: the cache holds fewer tokens than `stop`.
        """
        stop = position_ids.shape[1] if stop is None else stop
        held = int(cache.get_seq_length()) if len(cache.layers) > 0 else 0
        if held < stop:
            raise CacheMismatchError(
                f"The source cache holds {held} tokens and {stop} are to be mapped. Pass the cache of exactly these "
                "tokens, or none: the source then reads the prompt itself."
            )
        batch = cache.layers[0].keys.shape[0]
        position_ids = position_ids[:, start:stop].expand(batch, -1)
        if valid is not None:
            valid = valid[:, start:stop].to(torch.bool).expand(batch, -1)

        def read_keys(layer: int) -> torch.Tensor:
            keys = cache.layers[layer].keys[:, :, start:stop]
            return rotary.strip(keys, position_ids.to(keys.device), layer)

        def read_values(layer: int) -> torch.Tensor:
            return cache.layers[layer].values[:, :, start:stop]

        content = cls.__new__(cls)
        content._setup(len(cache.layers), read_keys, read_values, position_ids, valid, extras)
        return content

    @property
    def batch_size(self) -> int:
        return self.position_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """Columns, padding included."""
        return self.position_ids.shape[1]

    def keys(self, layer: int) -> torch.Tensor:
        """Content keys of a source layer, `(batch, source_heads, tokens, source_head_dim)`."""
        return self._get("keys", self._read_keys, layer)

    def values(self, layer: int) -> torch.Tensor:
        """Values of a source layer, `(batch, source_heads, tokens, source_head_dim)`."""
        return self._get("values", self._read_values, layer)

    def extra(self, name: str) -> torch.Tensor:
        """A tensor that a method asked for with [`MapperMethod.requires`]."""
        if name not in self.extras:
            raise CacheMismatchError(f"The mapper's method needs {name!r}, which this source content does not carry.")
        return self.extras[name]

    @property
    def held_layers(self) -> set[int]:
        """Source layers of which content is held in memory now."""
        return {layer for _, layer in tuple(self._content)}

    def forget(self, layer: int) -> None:
        """Let the content of a source layer go; it is read again when asked for."""
        for kind in ("keys", "values"):
            self._content.pop((kind, layer), None)

    def shared(self, key: Hashable, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What several target layers share, computed for the first of them.

        Args:
            key: Of the result; has to change with all that it depends on beside this content.
            compute: Makes it.
        """
        found = self._shared.get(key)
        if found is None:
            found = compute()
            self._shared = {key: found}
        return found

    def release(self) -> None:
        """Let all content go; see [`forget`]."""
        self._content.clear()
        self._shared = {}

    def _get(self, kind: str, read: Callable[[int], torch.Tensor], layer: int) -> torch.Tensor:
        # A source layer feeds several target layers, so what was stripped once is kept until it is forgotten. Another
        # thread may forget it meanwhile, so it is not looked up twice.
        content = self._content.get((kind, layer))
        if content is None:
            content = read(layer)
            if self._padding is not None:
                content = content.masked_fill(self._padding.to(content.device)[:, None, :, None], 0)
            self._content[kind, layer] = content
        return content


def source_features(
    mapper: Any,
    target_layer: int,
    read: Reader,
    device: torch.device,
    places: range | None = None,
) -> torch.Tensor:
    """What a linear map of a target layer reads of one kind.

    Args:
        mapper: Its config and assignment.
        target_layer: Which.
        read: `source.keys` or `source.values`.
        device: Where to.
        places: Of the selected source layers; all by default.

    Returns:
        `(B, T, features)` with full-head support, `(B, target_heads, T, features)` with head-local support.
    """
    chosen = mapper.config.selected_layers[target_layer]
    places = range(len(chosen)) if places is None else places
    content = [read(chosen[place]).to(device) for place in places]
    if mapper.config.support == "full_head":
        return torch.cat([layer.transpose(1, 2).flatten(2) for layer in content], dim=-1)
    gathered = []
    for place, layer in zip(places, content, strict=True):
        picked = layer[:, mapper.source_heads[target_layer, place].to(layer.device)]  # (B, H_t, block, T, d_s)
        gathered.append(picked.transpose(2, 3).flatten(3))
    return torch.cat(gathered, dim=-1)


__all__ = ["Reader", "SourceContent", "source_features"]
