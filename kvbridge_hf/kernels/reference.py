"""The maps in plain PyTorch: the definition that any faster kernel has to reproduce.

Products are accumulated in float32. Where input and weight share a 16-bit dtype the matrix product runs in that
dtype, whose accumulator is float32 in the BLAS libraries that PyTorch calls, and is rounded once; in every other case
both are converted to float32 (float64 stays float64).
"""

from __future__ import annotations

import torch


def _compute_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    if x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16):
        return x.dtype
    return torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)


def map_full_head(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Map features that every target head shares: `y[b, h, t] = x[b, t] @ weight[h] + bias[h]`.

    Args:
        x: `(batch, tokens, features)`.
        weight: `(target_heads, features, head_dim)`.
        bias: `(target_heads, head_dim)`.

    Returns:
        `(batch, target_heads, tokens, head_dim)` in the compute dtype (float32 unless all are 16-bit or float64).
    """
    dtype = _compute_dtype(x, weight)
    heads, features, head_dim = weight.shape
    # One matrix product for all heads: the copy of the weight is small beside it, a product per head is not.
    matrix = weight.to(dtype).permute(1, 0, 2).reshape(features, heads * head_dim)
    flat = x.to(dtype).reshape(-1, features)
    y = torch.addmm(bias.to(dtype).reshape(-1), flat, matrix)
    return y.view(*x.shape[:-1], heads, head_dim).transpose(1, 2)


def map_head_local(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Map features that each target head has for itself: `y[b, h, t] = x[b, h, t] @ weight[h] + bias[h]`.

    Args:
        x: `(batch, target_heads, tokens, features)`.
        weight: `(target_heads, features, head_dim)`.
        bias: `(target_heads, head_dim)`.

    Returns:
        `(batch, target_heads, tokens, head_dim)` in the compute dtype (float32 unless all are 16-bit or float64).
    """
    dtype = _compute_dtype(x, weight)
    batch, heads, tokens, features = x.shape
    flat = x.to(dtype).transpose(0, 1).reshape(heads, batch * tokens, features)
    y = torch.baddbmm(bias.to(dtype).unsqueeze(1), flat, weight.to(dtype))
    return y.view(heads, batch, tokens, -1).transpose(0, 1)
