"""Train an affine map in coordinates in which its features are white.

The directions of a source's features differ in variance by orders of magnitude, and a first-order method crawls along
the small ones. With `W = W_0 + C^(-1/2) V` and `C` the features' covariance, trained is `V` from 0; the function class
and the start are the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..errors import FitConfigError
from ..modeling_kvbridge import KVBridgeMapper, SourceContent
from .anchored import RUNTIMES, with_anchors
from .features import grouped_features, kinds_of

# Relative to the mean variance: directions below it are not enlarged any further.
FLOOR = 1e-4
ANCHORED = tuple(runtime.name for runtime in RUNTIMES.values())
NAMES = ("key_weight", "value_weight")


class FeatureCovariance:
    """Covariance of what each target layer's maps read.

    Args:
        mapper: Of an affine method, or of one with an affine part: `key_weight` and `value_weight` of ridge's shape.
        num_sinks: First tokens that the maps do not see.

    Raises:
        FitConfigError: the mapper is of another method.
    """

    def __init__(self, mapper: KVBridgeMapper, num_sinks: int):
        if mapper.config.method not in ("ridge", "causal", *ANCHORED):
            raise FitConfigError(
                "precondition=True is for maps with an affine part (methods 'ridge', 'anchored', 'causal'); this "
                f"mapper is of {mapper.config.method!r}."
            )
        self.mapper, self.num_sinks = mapper, num_sinks
        config = mapper.config
        layers = config.target_geometry["num_layers"]
        heads = 1 if config.support == "full_head" else config.target_geometry["num_kv_heads"]
        features = mapper.key_weight.shape[2]
        shape = (2, layers, heads, features)
        self.count = 0
        self.total = torch.zeros(shape, dtype=torch.float64)
        self.square = torch.zeros((*shape, features), dtype=torch.float64)

    @torch.no_grad()
    def update(self, source: SourceContent) -> None:
        """Add the tokens of a prefix."""
        counted = source.valid & (source.position_ids >= self.num_sinks)
        self.count += int(counted.sum())
        for kind, (name, read) in enumerate(kinds_of(source)):
            for layer in range(self.total.shape[1]):
                x = grouped_features(self.mapper, layer, read)  # (B, heads, T, F)
                if (anchors := getattr(self.mapper.method, "anchors", ())) != ():
                    x = with_anchors(x, source, name, anchors)
                x = x.to(counted.device).transpose(1, 2)[counted].transpose(0, 1).double()  # heads, N, F
                self.total[kind, layer] += x.sum(1).cpu()
                self.square[kind, layer] += (x.mT @ x).cpu()

    def inverse_roots(self) -> torch.Tensor:
        """`(C / mean variance + floor)^(-1/2)`, `(2, layers, heads, F, F)` float32."""
        mean = self.total / max(self.count, 1)
        covariance = self.square / max(self.count, 1) - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        scale = covariance.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-30)[..., None, None]
        values, vectors = torch.linalg.eigh(covariance / scale)
        return ((vectors * (values.clamp(min=0) + FLOOR).rsqrt().unsqueeze(-2)) @ vectors.mT).float()


class _White(nn.Module):
    """`V -> W_0 + R V`."""

    start: torch.Tensor
    root: torch.Tensor

    def __init__(self, start: torch.Tensor, root: torch.Tensor):
        super().__init__()
        # Not saved: a resumed run makes them again from the same data.
        self.register_buffer("start", start, persistent=False)
        self.register_buffer("root", root, persistent=False)

    def forward(self, change: torch.Tensor) -> torch.Tensor:
        return self.start + self.root @ change

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(weight)


def precondition(mapper: KVBridgeMapper, roots: torch.Tensor) -> None:
    """Replace a mapper's weights by changes in white coordinates, in place.

    Args:
        mapper: As for [`FeatureCovariance`], float32.
        roots: From [`FeatureCovariance.inverse_roots`].
    """
    for kind, name in enumerate(NAMES):
        weight = getattr(mapper, name)
        white = _White(weight.detach().clone(), roots[kind].to(weight.device))
        parametrize.register_parametrization(mapper, name, white)


def plain_state(mapper: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the mapper's tensors under their own names, whatever coordinates it is trained in."""
    state = {name: tensor for name, tensor in mapper.state_dict().items() if not name.startswith("parametrizations.")}
    if parametrize.is_parametrized(mapper):
        state.update({name: getattr(mapper, name) for name in mapper.parametrizations})  # type: ignore[union-attr]
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def covariance_of(mapper: KVBridgeMapper, num_sinks: int, contents: Iterable[SourceContent]) -> torch.Tensor:
    """[`FeatureCovariance.inverse_roots`] over some prefixes."""
    covariance = FeatureCovariance(mapper, num_sinks)
    for content in contents:
        covariance.update(content)
    return covariance.inverse_roots()


__all__ = ["FeatureCovariance", "covariance_of", "plain_state", "precondition"]
