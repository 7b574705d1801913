"""Batches of weighted, centred second moments of features `x` and outputs `y`, merged exactly.

This is all that a linear fit needs of its data, and it is the same size for a hundred tokens and for a billion. With
`n = sum w`, means `mx, my` and centred sums

    gram  = sum w (x - mx)(x - mx)'        cross = sum w (x - mx)(y - my)'        power = sum w (y - my)^2

two sets of tokens merge by Chan, Golub and LeVeque (1979), "Updating formulae and a pairwise algorithm for computing
sample variances", eq. 2.1: the centred sums add up, plus `n_a n_b / (n_a + n_b) d d'` with `d` the difference of the
means. The correction is one more row of the product, so an update is a single accumulating matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

# Working memory of one update in bytes: tokens are taken in chunks whose float64 copy stays below this.
CHUNK_BYTES = 256 * 1024**2
# Rows of a gram matrix that are multiplied at once; what lies left of them is known by symmetry.
GRAM_ROWS = 512


@contextmanager
def exact_matmul() -> Iterator[None]:
    """No TF32 and no autocast: products keep the precision of their inputs."""
    settings: Any = torch.backends.cuda.matmul
    # Newer PyTorch names the setting differently and refuses to read the old name once the new one was used.
    name, exact = ("fp32_precision", "ieee") if hasattr(settings, "fp32_precision") else ("allow_tf32", False)
    before = getattr(settings, name)
    setattr(settings, name, exact)
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        setattr(settings, name, before)


@dataclass
class Moments:
    """Moments of `S` independent systems with `F` features and `M` outputs each, all float64.

    Attributes:
        weight (`(S,)`): Sum of the weights (the number of tokens where they are 1).
        weight_sq (`(S,)`): Sum of the squared weights, for the effective sample size.
        x_mean (`(S, F)`), y_mean (`(S, M)`): Weighted means.
        gram (`(S, F, F)`), cross (`(S, F, M)`), power (`(S, M)`): Centred sums.
    """

    weight: torch.Tensor
    weight_sq: torch.Tensor
    x_mean: torch.Tensor
    y_mean: torch.Tensor
    gram: torch.Tensor
    cross: torch.Tensor
    power: torch.Tensor

    FIELDS = ("weight", "weight_sq", "x_mean", "y_mean", "gram", "cross", "power")

    @classmethod
    def zeros(cls, systems: int, features: int, outputs: int, device: torch.device | str = "cpu") -> Moments:
        def new(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(
            weight=new(systems),
            weight_sq=new(systems),
            x_mean=new(systems, features),
            y_mean=new(systems, outputs),
            gram=new(systems, features, features),
            cross=new(systems, features, outputs),
            power=new(systems, outputs),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in self.FIELDS}

    def __getitem__(self, systems: slice | torch.Tensor) -> Moments:
        """Some of the systems; with a slice the tensors are views, and an update of them is one of this object."""
        return Moments(**{name: tensor[systems] for name, tensor in self.tensors().items()})

    def to(self, device: torch.device | str) -> Moments:
        return Moments(**{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def clone(self) -> Moments:
        return Moments(**{name: tensor.clone() for name, tensor in self.tensors().items()})

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    # ---- accumulation -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        weights: torch.Tensor | None = None,
        products: torch.dtype = torch.float64,
    ) -> None:
        """Add tokens, in place.

        Args:
            x (`(S, N, F)`), y (`(S, N, M)`): Features and outputs of `N` tokens.
            weights (`(S, N)`, *optional*): Weights >= 0; 1 where not given.
            products: Dtype of the matrix products. Sums are float64 whatever it is.
        """
        rows = max(1, CHUNK_BYTES // (8 * max(1, x.shape[0]) * (x.shape[2] + y.shape[2])))
        for start in range(0, x.shape[1], rows):
            part = slice(start, start + rows)
            self._update_chunk(
                x[:, part],
                y[:, part],
                None if weights is None else weights[:, part].double(),
                products,
            )
        self._mirror()

    def _mirror(self) -> None:
        """Copy what an update left out: the blocks of the gram below its diagonal."""
        features = self.gram.shape[1]
        for rows in _gram_blocks(features):
            if rows.stop < features:
                self.gram[:, rows.stop :, rows] = self.gram[:, rows, rows.stop :].mT

    def _update_chunk(
        self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor | None, products: torch.dtype
    ) -> None:
        tokens = x.shape[1]
        if tokens == 0:
            return
        if weights is None:
            added = torch.full_like(self.weight, tokens)
            added_sq = added
        else:
            added, added_sq = weights.sum(dim=1), weights.square().sum(dim=1)
        total = self.weight + added
        fraction = torch.where(total > 0, added / total, torch.zeros_like(total))
        scale = (self.weight * fraction).sqrt().unsqueeze(-1)
        x, x_step = _centre(x, weights, self.x_mean, scale)
        y, y_step = _centre(y, weights, self.y_mean, scale)
        self.power.add_(torch.linalg.vector_norm(y, dim=1).square())
        with exact_matmul():
            if products == torch.float64:
                for rows in _gram_blocks(x.shape[2]):
                    self.gram[:, rows, rows.start :].baddbmm_(x[:, :, rows].mT, x[:, :, rows.start :])
                self.cross.baddbmm_(x.mT, y)
            else:
                low_x, low_y = x[:, :tokens].to(products), y[:, :tokens].to(products)
                x_row, y_row = x[:, tokens:], y[:, tokens:]
                for rows in _row_blocks(x.shape[0], x.shape[2], x.shape[2] + y.shape[2]):
                    left, correction = low_x[:, :, rows].mT, x_row[:, :, rows].mT
                    right = self.gram[:, rows, rows.start :]
                    right.add_(left @ low_x[:, :, rows.start :]).add_(correction * x_row[:, :, rows.start :])
                    self.cross[:, rows].add_(left @ low_y).add_(correction * y_row)
        self.x_mean.add_(fraction.unsqueeze(-1) * x_step)
        self.y_mean.add_(fraction.unsqueeze(-1) * y_step)
        self.weight.copy_(total)
        self.weight_sq.add_(added_sq)

    @torch.no_grad()
    def merge(self, other: Moments) -> Moments:
        """Add the tokens of another set of moments, in place (Chan et al., eq. 2.1)."""
        total = self.weight + other.weight
        fraction = torch.where(total > 0, other.weight / total, torch.zeros_like(total))
        scale = (self.weight * fraction).unsqueeze(-1)
        x_step, y_step = other.x_mean - self.x_mean, other.y_mean - self.y_mean
        self.gram.add_(other.gram)
        self.cross.add_(other.cross)
        for system in range(len(total)):
            self.gram[system].addr_(scale[system] * x_step[system], x_step[system])
            self.cross[system].addr_(scale[system] * x_step[system], y_step[system])
        self.power.add_(other.power).add_(scale * y_step.square())
        self.x_mean.add_(fraction.unsqueeze(-1) * x_step)
        self.y_mean.add_(fraction.unsqueeze(-1) * y_step)
        self.weight.copy_(total)
        self.weight_sq.add_(other.weight_sq)
        return self

    # ---- reading ------------------------------------------------------------------------------------------------

    def scaled(self, factor: torch.Tensor | float) -> Moments:
        """The moments with all weights multiplied by `factor` (a number or one per system)."""
        factor = torch.as_tensor(factor, dtype=torch.float64, device=self.weight.device).expand_as(self.weight)
        return Moments(
            weight=self.weight * factor,
            weight_sq=self.weight_sq * factor.square(),
            x_mean=self.x_mean.clone(),
            y_mean=self.y_mean.clone(),
            gram=self.gram * factor[:, None, None],
            cross=self.cross * factor[:, None, None],
            power=self.power * factor[:, None],
        )

    def about(self, x_mean: torch.Tensor, y_mean: torch.Tensor) -> Moments:
        """The same sums about other means (not centred any more): what a fit made elsewhere leaves on this data."""
        x_step, y_step = self.x_mean - x_mean, self.y_mean - y_mean
        weighted = self.weight.unsqueeze(-1) * x_step
        return Moments(
            weight=self.weight,
            weight_sq=self.weight_sq,
            x_mean=x_mean,
            y_mean=y_mean,
            gram=self.gram + weighted.unsqueeze(-1) * x_step.unsqueeze(1),
            cross=self.cross + weighted.unsqueeze(-1) * y_step.unsqueeze(1),
            power=self.power + self.weight.unsqueeze(-1) * y_step.square(),
        )

    def features(self, index: torch.Tensor) -> Moments:
        """The moments of some features: `index` is `(F',)` for all systems."""
        return Moments(
            weight=self.weight,
            weight_sq=self.weight_sq,
            x_mean=self.x_mean[:, index],
            y_mean=self.y_mean,
            gram=self.gram[:, index[:, None], index[None, :]],
            cross=self.cross[:, index],
            power=self.power,
        )

    def outputs(self, index: slice | torch.Tensor) -> Moments:
        """The moments of some outputs."""
        return Moments(
            weight=self.weight,
            weight_sq=self.weight_sq,
            x_mean=self.x_mean,
            y_mean=self.y_mean[:, index],
            gram=self.gram,
            cross=self.cross[:, :, index],
            power=self.power[:, index],
        )

    def residual(self, solution: torch.Tensor) -> torch.Tensor:
        """Sum of squared residuals `sum w (y - b - W'x)^2` with `b = y_mean - W' x_mean` of these moments.

        For the residual of a fit on other data, take `about(the fit's means)` first.

        Args:
            solution (`(S, F, M)`): `W`.

        Returns:
            `(S, M)`, not below 0.
        """
        explained = (solution * (2 * self.cross - self.gram @ solution)).sum(dim=1)
        return (self.power - explained).clamp(min=0)

    @property
    def effective_samples(self) -> torch.Tensor:
        """Kish's effective sample size `(sum w)^2 / sum w^2`, `(S,)`."""
        return self.weight.square() / self.weight_sq.clamp(min=torch.finfo(torch.float64).tiny)


def concatenate(parts: Sequence[Moments]) -> Moments:
    """Stack the systems of several moments of equal sizes."""
    return Moments(**{name: torch.cat([getattr(part, name) for part in parts]) for name in Moments.FIELDS})


def _centre(
    x: torch.Tensor, weights: torch.Tensor | None, known: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Centre tokens about their weighted mean and put Chan's correction behind them, as one more row of the product.

    Args:
        x (`(S, N, F)`): Tokens.
        weights (`(S, N)`, *optional*): Float64.
        known (`(S, F)`): Mean of what was there before.
        scale (`(S, 1)`): Root of the correction's weight.

    Returns:
        `(S, N + 1, F)` float64, each row times the root of its weight; and the mean's distance from `known`.
    """
    systems, tokens, features = x.shape
    rows = torch.empty(systems, tokens + 1, features, dtype=torch.float64, device=x.device)
    body = rows[:, :tokens]
    body.copy_(x)
    if weights is None:
        mean = body.mean(dim=1)
        body.sub_(mean.unsqueeze(1))
    else:
        share = weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        mean = (share.unsqueeze(1) @ body).squeeze(1)
        body.sub_(mean.unsqueeze(1)).mul_(weights.sqrt().unsqueeze(-1))
    step = mean - known
    rows[:, tokens] = scale * step
    return rows, step


def _gram_blocks(features: int) -> Iterator[slice]:
    """Slices of the rows of a gram."""
    for start in range(0, features, GRAM_ROWS):
        yield slice(start, min(start + GRAM_ROWS, features))


def _row_blocks(systems: int, rows: int, width: int) -> Iterator[slice]:
    """The same, cut further so that a temporary `(systems, block, width)` stays within the working memory."""
    block = max(1, CHUNK_BYTES // (8 * systems * width))
    for outer in _gram_blocks(rows):
        for start in range(outer.start, outer.stop, block):
            yield slice(start, min(start + block, outer.stop))


__all__ = ["Moments", "concatenate", "exact_matmul"]
