"""Batched float64 solves of regularised normal equations."""

from __future__ import annotations

import torch

EPS = torch.finfo(torch.float64).eps


def solve_ridge(gram: torch.Tensor, cross: torch.Tensor, penalty: torch.Tensor | float) -> torch.Tensor:
    """Solve `(gram + penalty I) W = cross`.

    By Cholesky. Systems that are singular to rounding (dead channels, features that repeat each other, fewer tokens
    than features, all without a penalty to speak of) get the solution of least norm from an eigendecomposition: the
    limit of the ridge for penalty -> 0. `torch.linalg.lstsq` is not used; its default CPU driver needs full rank and
    is wrong without it (pytorch issue 71222).

    Args:
        gram (`(S, F, F)`): Symmetric, positive semi-definite, float64.
        cross (`(S, F, M)`): Right-hand sides.
        penalty: A number or `(S,)`, not below 0.

    Returns:
        `(S, F, M)`.
    """
    penalty = torch.as_tensor(penalty, dtype=gram.dtype, device=gram.device).expand(gram.shape[0])
    system = gram.clone()
    diagonal = system.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(penalty.unsqueeze(-1))
    factor, info = torch.linalg.cholesky_ex(system)
    # A pivot is the part of a feature that those before it do not explain. Below rounding it is noise.
    pivots = factor.diagonal(dim1=-2, dim2=-1).square()
    noise = 8 * gram.shape[-1] * EPS * diagonal
    failed = (info != 0) | ~(pivots > noise).all(dim=-1)
    if not bool(failed.any()):
        return torch.cholesky_solve(cross, factor)
    solution = torch.empty_like(cross)
    fine = ~failed
    if bool(fine.any()):
        solution[fine] = torch.cholesky_solve(cross[fine], factor[fine])
    solution[failed] = _least_norm(gram[failed], cross[failed], penalty[failed])
    return solution


def _least_norm(gram: torch.Tensor, cross: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(gram)
    cutoff = 8 * gram.shape[-1] * EPS * values[:, -1:].clamp(min=0)
    kept = values > cutoff
    inverse = torch.where(kept, 1 / torch.where(kept, values + penalty.unsqueeze(-1), torch.ones_like(values)), 0.0)
    return vectors @ (inverse.unsqueeze(-1) * (vectors.mT @ cross))


__all__ = ["solve_ridge"]
