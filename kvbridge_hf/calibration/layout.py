"""How features and outputs of a pair are ordered in its statistics, and which heads belong together."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..errors import FitConfigError

KINDS = ("keys", "values")


def identity_blocks(source_heads: int, target_heads: int, block: int | None = None) -> list[list[int]]:
    """Source heads that each target head is matched with by number.

    With at least as many target heads, head `h` reads source head `floor(h * source_heads / target_heads)`. With fewer
    it reads its group of `source_heads / target_heads` heads; where that is no whole number, the groups are
    `ceil(source_heads / target_heads)` wide and overlap, so that every source head is read by some target head.

    Args:
        source_heads, target_heads: How many there are.
        block: Heads that each target head reads, instead of as many as that makes; a wider block has the same middle,
            as far as the edges allow.

    Returns:
        `target_heads` lists of equal length.
    """
    own = max(1, -(-source_heads // target_heads))
    block = own if block is None else block
    starts = [
        max(0, min(head * source_heads // target_heads - (block - own) // 2, source_heads - block))
        for head in range(target_heads)
    ]
    return [list(range(start, start + block)) for start in starts]


@dataclass(frozen=True)
class StatisticsLayout:
    """Sizes of a pair and the grouping of its heads.

    A *group* is a set of source heads whose features are kept together, over all source layers, with the target heads
    that read them. `"full_head"` has one group of everything, which also serves every head-local fit. `"head_local"`
    has one group per identity block, 1/groups of the memory and of the work, and serves only identity assignments.

    Feature order within a group: source layer, head in the group, dim. Output order: target layer, head of the group,
    dim. Target head `h` is head `h % heads_per_group` of group `h // heads_per_group`.

    Attributes:
        support (`str`): `"full_head"` or `"head_local"`.
        source_layers, source_heads, source_dim, target_layers, target_heads, target_dim (`int`): Sizes.
    """

    support: str
    source_layers: int
    source_heads: int
    source_dim: int
    target_layers: int
    target_heads: int
    target_dim: int

    def __post_init__(self):
        if self.support not in ("full_head", "head_local"):
            raise FitConfigError(f"support must be 'full_head' or 'head_local', got {self.support!r}.")

    @classmethod
    def from_geometries(cls, support: str, source: Any, target: Any) -> StatisticsLayout:
        """From two `KVGeometry`s."""
        return cls(
            support,
            source.num_layers,
            source.num_kv_heads,
            source.head_dim,
            target.num_layers,
            target.num_kv_heads,
            target.head_dim,
        )

    @property
    def groups(self) -> list[list[int]]:
        """Source heads of each group."""
        if self.support == "full_head":
            return [list(range(self.source_heads))]
        blocks = identity_blocks(self.source_heads, self.target_heads)
        if self.target_heads % self.source_heads == 0:
            return blocks[:: self.target_heads // self.source_heads]
        return blocks

    @property
    def heads_per_group(self) -> int:
        return self.target_heads // len(self.groups)

    @property
    def features(self) -> int:
        """Features of one group."""
        return self.source_layers * len(self.groups[0]) * self.source_dim

    @property
    def outputs(self) -> int:
        """Outputs of one group."""
        return self.target_layers * self.heads_per_group * self.target_dim

    @property
    def num_bytes(self) -> int:
        """Memory of the moments of one set of tokens, keys and values (there are two sets: fitted and held out)."""
        features, outputs = self.features, self.outputs
        return len(KINDS) * len(self.groups) * 8 * (2 + features + 2 * outputs + features * (features + outputs))

    def feature_index(self, layers: list[int], heads: list[list[int]] | None = None) -> torch.Tensor:
        """Places of features within a group.

        Args:
            layers: Source layers, in the order wanted.
            heads: For each layer the heads *within the group*; all of them where not given.

        Returns:
            Long tensor over (layer, head, dim), flattened.
        """
        block = len(self.groups[0])
        dims = torch.arange(self.source_dim)
        parts = []
        for place, layer in enumerate(layers):
            for head in range(block) if heads is None else heads[place]:
                parts.append((layer * block + head) * self.source_dim + dims)
        return torch.cat(parts)

    def output_slice(self, target_layer: int) -> slice:
        width = self.heads_per_group * self.target_dim
        return slice(target_layer * width, (target_layer + 1) * width)

    def output_index(self, heads: list[int], target_layers: list[int] | None = None) -> torch.Tensor:
        """Places of outputs within a group over (target layer, head, dim), flattened; `heads` are within the group."""
        layers = torch.tensor(list(range(self.target_layers)) if target_layers is None else target_layers)
        rows = layers[:, None] * self.heads_per_group + torch.tensor(heads)[None, :]
        return (rows[..., None] * self.target_dim + torch.arange(self.target_dim)).flatten()

    def source_features(self, source: torch.Tensor) -> torch.Tensor:
        """`(source_layers, N, source_heads, source_dim)` of one kind -> `(groups, N, features)`."""
        index = torch.tensor(self.groups, device=source.device)
        grouped = source[:, :, index]  # layers, N, groups, block, dim
        return grouped.permute(2, 1, 0, 3, 4).reshape(len(self.groups), source.shape[1], self.features)

    def target_outputs(self, target: torch.Tensor) -> torch.Tensor:
        """`(target_layers, N, target_heads, target_dim)` of one kind -> `(groups, N, outputs)`."""
        layers, tokens, _, dim = target.shape
        grouped = target.reshape(layers, tokens, len(self.groups), self.heads_per_group, dim)
        return grouped.permute(2, 1, 0, 3, 4).reshape(len(self.groups), tokens, self.outputs)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


__all__ = ["KINDS", "StatisticsLayout", "identity_blocks"]
