"""Ridge solutions for many penalties from one eigendecomposition, in a metric of the outputs.

In the eigenbasis of the features' moments, `gram = Q diag(e) Q'`, a ridge solution is `Q ((Q' cross) / (e + lambda))`.
A metric `M = U diag(mu) U'` of a head's outputs makes the least squares problem one per eigendirection of `M`, in
which the penalty weighs `lambda / mu`.
"""

from __future__ import annotations

import torch

from ..calibration.moments import Moments
from ..calibration.solve import EPS


class OutputBasis:
    """Eigenbases of the outputs' metrics.

    Args:
        metrics (`(S * serve, d, d)`): One per head, in the order of systems and of the heads they serve.
        systems: `S`.
    """

    def __init__(self, metrics: torch.Tensor, systems: int):
        self.size, self.vectors = torch.linalg.eigh(metrics.double())
        self.size = self.size.clamp(min=EPS).reshape(systems, -1)  # S, M
        self.vectors = self.vectors.reshape(systems, -1, *metrics.shape[1:])  # S, serve, d, d

    def rotate(self, outputs: torch.Tensor) -> torch.Tensor:
        """`(S, F, M)` into the basis."""
        return self._apply(outputs, self.vectors)

    def rotate_back(self, outputs: torch.Tensor) -> torch.Tensor:
        return self._apply(outputs, self.vectors.mT)

    def root(self, outputs: torch.Tensor) -> torch.Tensor:
        """`outputs M^(1/2)`, in the basis."""
        return self.rotate(outputs) * self.size.sqrt().unsqueeze(1)

    def unroot(self, outputs: torch.Tensor) -> torch.Tensor:
        """Inverse of `root`."""
        return self.rotate_back(outputs / self.size.sqrt().unsqueeze(1))

    def _apply(self, outputs: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        split = outputs.unflatten(-1, (vectors.shape[1], vectors.shape[2]))  # S, F, serve, d
        return torch.einsum("sfhd,shde->sfhe", split, vectors).flatten(2)


def identity_basis(systems: int, outputs: int, dim: int) -> OutputBasis:
    """The basis that changes nothing."""
    return OutputBasis(torch.eye(dim, dtype=torch.float64).expand(systems * outputs // dim, dim, dim), systems)


class SpectralRidge:
    """All ridge solutions of some systems.

    Args:
        moments: `S` systems.
        basis: Metric of the outputs.
    """

    def __init__(self, moments: Moments, basis: OutputBasis):
        self.basis = basis
        self.values, self.vectors = torch.linalg.eigh(moments.gram)
        cutoff = 8 * moments.gram.shape[-1] * EPS * self.values[:, -1:].clamp(min=0)
        self.kept = self.values > cutoff
        self.cross = self.vectors.mT @ basis.rotate(moments.cross)

    def in_basis(self, penalty: torch.Tensor) -> torch.Tensor:
        """Solutions `(S, F, M)` whose outputs are in the basis, for penalties `(S, M)` before the metric."""
        weighed = penalty / self.basis.size
        below = self.values.unsqueeze(-1) + weighed.unsqueeze(1)
        inverse = torch.where(self.kept.unsqueeze(-1), 1 / torch.where(below > 0, below, 1.0), 0.0)
        return self.vectors @ (inverse * self.cross)

    def solve(self, penalty: torch.Tensor) -> torch.Tensor:
        """Solutions `(S, F, M)` for penalties `(S, M)`."""
        return self.basis.rotate_back(self.in_basis(penalty))

    def best_penalty(self, grid: torch.Tensor, scored: Moments, dim: int) -> torch.Tensor:
        """The penalty of each head that leaves the least error, in the metric, on other moments.

        Args:
            grid (`(G, S)`): Penalties to choose from, ascending.
            scored: The other moments, about the means of the fitted ones.
            dim: Outputs of a head.

        Returns:
            `(S, M)`, the same for all outputs of a head; the largest among equals.
        """
        cross = self.basis.rotate(scored.cross)
        best = torch.full((*self.basis.size.shape[:1], self.basis.size.shape[1] // dim), -float("inf")).double()
        best = best.to(cross.device)
        chosen = torch.zeros_like(best)
        for penalties in grid:
            solution = self.in_basis(penalties.unsqueeze(-1).expand_as(self.basis.size))
            explained = (solution * (2 * cross - scored.gram @ solution)).sum(dim=1) * self.basis.size
            gain = explained.unflatten(-1, (-1, dim)).sum(-1)
            better = gain >= best
            chosen = torch.where(better, penalties.unsqueeze(-1).expand_as(best), chosen)
            best = torch.where(better, gain, best)
        return chosen.repeat_interleave(dim, dim=-1)


def penalty_grid(moments: Moments, least: torch.Tensor) -> torch.Tensor:
    """Penalties from `least` `(S,)` up to the mean diagonal of the moments in powers of ten, `(G, S)`."""
    largest = moments.gram.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    start = torch.where(least > 0, least, largest * 1e-9)
    steps = int((largest / start.clamp(min=torch.finfo(start.dtype).tiny)).clamp(min=1).log10().ceil().max()) + 1
    powers = 10.0 ** torch.arange(min(steps, 14), dtype=start.dtype, device=start.device)
    return torch.minimum(start * powers.unsqueeze(1), torch.maximum(largest, start))


__all__ = ["OutputBasis", "SpectralRidge", "identity_basis", "penalty_grid"]
