"""How close a target that decodes from a handed-over cache stays to the same target with its own cache.

Token scores compare next-token distributions; the attention-output cosine compares what each head read; R^2 compares
the cache entries themselves and stands last, as it does not predict retention (published: r = -0.20, where the
attention cosine has r = +0.57).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..attention_outputs import output_projections
from ..config_facts import text_config
from ..errors import UnsupportedModelError
from .errors import EvaluationError


def log_probs(logits: torch.Tensor) -> torch.Tensor:
    """Natural log-probabilities in float32, whatever the logits' dtype."""
    return logits.float().log_softmax(-1)


def kl_divergence(target_log_probs: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
    """KL(target || other) in nats for each position.

    Args:
        target_log_probs: `(..., vocab)` of the target with its own cache.
        log_probs: `(..., vocab)` of the other; where one vocabulary is padded further than the other, both are cut to
            the shorter one and renormalised.

    Returns:
        `(...)`, clamped at 0, below which only rounding leads.
    """
    if target_log_probs.shape[-1] != log_probs.shape[-1]:
        size = min(target_log_probs.shape[-1], log_probs.shape[-1])
        target_log_probs = target_log_probs[..., :size].log_softmax(-1)
        log_probs = log_probs[..., :size].log_softmax(-1)
    # A token that the target rules out adds nothing, and exp(-inf) * -inf would be NaN.
    terms = torch.where(target_log_probs > -torch.inf, target_log_probs.exp() * (target_log_probs - log_probs), 0.0)
    return terms.sum(-1).clamp_min(0.0)


def negative_log_likelihood(log_probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`-log p(label)` in nats; `(..., vocab)` and `(...)` give `(...)`."""
    return -log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def top1_agreement(target_log_probs: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
    """1.0 where both give the same token the highest probability; `(...)`."""
    return (target_log_probs.argmax(-1) == log_probs.argmax(-1)).float()


class AttentionOutputs:
    """Records what every head of every layer read from the cache: the input of the attention's output projection.

    Use as a context manager around one forward. `outputs[layer]` is then `(batch, queries, heads, head_dim)`.

    Args:
        model: a causal LM of transformers.
        keep_last: record the last queries only; None for all.

    Raises:
        UnsupportedModelError: the model has no attention modules with a known output projection.
    """

    def __init__(self, model: nn.Module, keep_last: int | None = None):
        self.num_heads = text_config(model.config).num_attention_heads  # type: ignore[arg-type]
        self.keep_last = keep_last
        self.outputs: list[torch.Tensor] = []
        self._handles: list[Any] = []
        try:
            self._projections = output_projections(model)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{error} Judge it with attention=False.") from error

    def __enter__(self) -> AttentionOutputs:
        self.outputs = [torch.empty(0)] * len(self._projections)
        for layer, projection in enumerate(self._projections):
            self._handles.append(projection.register_forward_pre_hook(self._hook(layer)))
        return self

    def __exit__(self, *_: Any) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, layer: int) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def record(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            states = args[0]
            if self.keep_last is not None:
                states = states[:, -self.keep_last :]
            # A copy, as a view would keep the whole activation alive.
            self.outputs[layer] = states.detach().unflatten(-1, (self.num_heads, -1)).clone()

        return record


class CosineSums:
    """Mean attention-output cosine of every layer and head, summed up over batches in float64."""

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None
        self.count = 0.0

    def add(self, own: Sequence[torch.Tensor], other: Sequence[torch.Tensor], valid: torch.Tensor) -> None:
        """Adds one batch.

        Args:
            own, other: one `(batch, queries, heads, head_dim)` a layer, from the target with its own and with the
                other cache.
            valid: `(batch, queries)`, False for padding.
        """
        cosines = torch.stack(
            [torch.cosine_similarity(a.float(), b.float(), dim=-1) for a, b in zip(own, other, strict=True)]
        ).double()  # (layers, batch, queries, heads)
        weight = valid.to(cosines.device, torch.float64)[None, :, :, None]
        total = (cosines * weight).sum((1, 2))
        self.total = total if self.total is None else self.total + total
        self.count += float(valid.sum())

    def merge(self, other: CosineSums) -> None:
        """Adds what another one has summed up."""
        if other.total is not None:
            self.total = other.total.clone() if self.total is None else self.total + other.total
            self.count += other.count

    def result(self) -> dict[str, Any] | None:
        """Mean and minimum over layers and heads, the place of the minimum, and the mean of each layer."""
        if self.total is None or self.count == 0:
            return None
        cosines = self.total / self.count
        layer, head = divmod(int(cosines.argmin()), cosines.shape[1])
        return {
            "mean": float(cosines.mean()),
            "min": float(cosines.min()),
            "min_layer": layer,
            "min_head": head,
            "per_layer": cosines.mean(1).tolist(),
        }


class R2Sums:
    """R^2 of the entries of one kind (content keys or values), per layer and head, summed up in float64.

    `1 - |own - other|^2 / |own - mean(own)|^2`, both summed over the tokens and channels of a head; the mean is taken
    over all tokens added. It is shift-stable because entries are centred on the first batch's mean before squaring.
    """

    def __init__(self) -> None:
        self._layers: dict[int, dict[str, torch.Tensor]] = {}

    def add(self, layer: int, own: torch.Tensor, other: torch.Tensor, valid: torch.Tensor) -> None:
        """Adds `(batch, heads, tokens, head_dim)` entries of one layer where `valid` `(batch, tokens)` is True."""
        if own.shape != other.shape:
            raise EvaluationError(
                f"Layer {layer}: own entries have shape {tuple(own.shape)}, {tuple(other.shape)} came."
            )
        own = own.transpose(1, 2)[valid].double()  # (tokens, heads, head_dim)
        other = other.transpose(1, 2)[valid].double()
        if own.shape[0] == 0:
            return
        if layer not in self._layers:
            zeros = torch.zeros_like(own[0])
            self._layers[layer] = {"origin": own.mean(0), "n": zeros[..., 0].clone(), "sum": zeros.clone()}
            self._layers[layer] |= {"square": zeros.clone(), "error": zeros.clone()}
        sums = self._layers[layer]
        centred = own - sums["origin"]
        sums["n"] += own.shape[0]
        sums["sum"] += centred.sum(0)
        sums["square"] += centred.square().sum(0)
        sums["error"] += (own - other).square().sum(0)

    def result(self) -> dict[str, Any] | None:
        """Mean over layers and heads, and the mean of each layer; heads that never vary are left out."""
        if not self._layers:
            return None
        per_layer = []
        for layer in sorted(self._layers):
            sums = self._layers[layer]
            spread = (sums["square"] - sums["sum"].square() / sums["n"].unsqueeze(-1)).sum(-1)
            r2 = 1.0 - sums["error"].sum(-1) / spread
            per_layer.append(float(r2[spread > 0].mean()))
        return {"mean": sum(per_layer) / len(per_layer), "per_layer": per_layer}
