"""A learned choice of what to repair: where the target would look, foretold from the source's keys and values.

The map loses who stands before whom, so the target cannot find on the mapped cache what it should recompute, and words
find only sentences that share some with the question. But the source's cache holds what its tokens have seen around
them. A few small heads read it: the question's last token asks, every token of the text answers,

    score[h, n] = (W_q[h]' x_q + b[h])' (W_k[h]' x_n) / sqrt(rank)

with `x` the keys (in content space) and values of some source layers. A sentence gets the best of its tokens in each
head, summed over the heads, and a learned weight times what the question's words in it are worth. The heads are fitted
by `calibration.repair_scorer.fit_repair_scorer` to where the target looks in texts that it has read itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .errors import ArtifactError
from .prompt_layout import last_columns


class RepairScorer(nn.Module):
    """The heads, in float32 as any choice should not depend on rounding more than it must.

    Args:
        settings: `layers` (source layers that are read), `heads`, `rank` and `window` (tokens that ask); what else
            stands in it is provenance.
        source_geometry: of the mapper.

    Raises:
        ArtifactError: a setting is missing or out of range.
    """

    def __init__(self, settings: dict[str, Any], source_geometry: dict[str, Any]):
        super().__init__()
        layers, heads, rank, window = (settings.get(name) for name in ("layers", "heads", "rank", "window"))
        num_layers = source_geometry["num_layers"]
        fine = isinstance(layers, (list, tuple)) and len(layers) > 0
        if not fine or any(not isinstance(layer, int) or not 0 <= layer < num_layers for layer in layers or ()):
            raise ArtifactError(
                f"repair_scorer['layers'] must name layers of the {num_layers} source layers: {layers}"
            )
        for name, value in (("heads", heads), ("rank", rank), ("window", window)):
            if not isinstance(value, int) or value < 1:
                raise ArtifactError(f"repair_scorer[{name!r}] must be a positive integer, got {value!r}.")
        assert layers is not None and isinstance(heads, int) and isinstance(rank, int) and isinstance(window, int)
        self.layers, self.window = tuple(layers), window
        features = 2 * len(layers) * source_geometry["num_kv_heads"] * source_geometry["head_dim"]
        self.query_weight = nn.Parameter(torch.zeros(heads, 2 * features, rank))
        self.query_bias = nn.Parameter(torch.zeros(heads, rank))
        self.key_weight = nn.Parameter(torch.zeros(heads, features, rank))
        self.word_weight = nn.Parameter(torch.zeros(1))

    def token_scores(self, tokens: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """What each head gives to each token.

        Args:
            tokens: `(batch, tokens, features)`, see [`scorer_features`].
            query: `(batch, 2 * features)`, see [`query_features`].

        Returns:
            `(batch, heads, tokens)`, float32.
        """
        asked = torch.einsum("bf,hfr->bhr", query.float(), self.query_weight.float()) + self.query_bias.float()
        # The query goes through the keys' weights once, so that a token costs one product a head.
        wanted = torch.einsum("bhr,hfr->bhf", asked, self.key_weight.float()) / self.query_bias.shape[1] ** 0.5
        return torch.einsum("bnf,bhf->bhn", tokens.float(), wanted)

    def segment_scores(
        self, scores: torch.Tensor, words: torch.Tensor, segments: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        """Scores of segments.

        Args:
            scores: `(batch, heads, tokens)` from [`token_scores`].
            words: `(batch, segments)`, what the question's words are worth in each segment, at most 1.
            segments: `(batch, tokens)`, the number of each token's segment.
            valid: `(batch, tokens)`; other tokens do not count.

        Returns:
            `(batch, segments)`; minus infinity where a segment has no valid token.
        """
        batch, heads, _ = scores.shape
        scores = scores.masked_fill(~valid[:, None], -torch.inf)
        empty = scores.new_full((batch, heads, words.shape[1]), -torch.inf)
        best = empty.scatter_reduce(2, segments[:, None].expand_as(scores), scores, "amax")
        return best.sum(1) + self.word_weight.float() * words

    def flops(self, num_tokens: int) -> float:
        """Operations for a question about so many tokens, beside the source's reading of the question."""
        heads, features, rank = self.key_weight.shape
        return 2.0 * heads * features * (3 * rank + num_tokens)


def scorer_features(
    layers: Sequence[Any], rotary: Any, position_ids: torch.Tensor, wanted: Sequence[int]
) -> torch.Tensor:
    """Keys in content space and values of some layers side by side, `(batch, tokens, features)`.

    Args:
        layers: of the source's cache.
        rotary: the source's [`ContentRotary`].
        position_ids: `(batch, tokens)`.
        wanted: numbers of the layers to be read.
    """
    parts = []
    for index in wanted:
        keys, values = layers[index].keys, layers[index].values
        parts += [rotary.strip(keys, position_ids.to(keys.device), index), values]
    return torch.cat([part.transpose(1, 2).flatten(2).to(parts[0].device) for part in parts], dim=-1)


def query_features(features: torch.Tensor, mask: torch.Tensor, window: int) -> torch.Tensor:
    """What asks: the last token of each row, and the mean of its last `window` tokens.

    Args:
        features: `(batch, tokens, features)` of the prompt up to the end of the question.
        mask: `(batch, tokens)`; padding may stand anywhere.

    Returns:
        `(batch, 2 * features)`; zero where a row has no token.
    """
    order = last_columns(mask, window)
    kept = mask.gather(1, order).to(features)
    last = features.gather(1, order[..., None].expand(-1, -1, features.shape[2])) * kept[..., None]
    mean = last.sum(1) / kept.sum(1, keepdim=True).clamp(min=1)
    return torch.cat([last[:, -1], mean], dim=-1)


def default_layers(num_layers: int, most: int = 8) -> list[int]:
    """Up to `most` source layers, evenly spread, the last one among them."""
    count = min(num_layers, most)
    return sorted({round((index + 1) * num_layers / count) - 1 for index in range(count)})


__all__ = ["RepairScorer", "default_layers", "query_features", "scorer_features"]
