"""Search for a learning rate by validation loss, past the edges of the grid where the best one lies there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..errors import FitConfigError


def search_learning_rate(
    loss_of: Callable[[float], float], rates: Sequence[float], max_extensions: int = 3
) -> tuple[float, dict[float, float]]:
    """The rate with the least loss.

    Args:
        loss_of: Validation loss after a short run at a rate; NaN counts as infinite.
        rates: The grid, ascending.
        max_extensions: How often the grid may grow by one rate where the best one is its first or last, by the factor
            between the last two on that side (3 where the grid is one rate).

    Returns:
        The best rate (the smallest among equals) and the loss of every rate tried, ascending.

    Raises:
        FitConfigError: no rate gave a finite loss.
    """
    losses: dict[float, float] = {}

    def measure(rate: float) -> None:
        loss = float(loss_of(rate))
        losses[rate] = loss if math.isfinite(loss) else math.inf

    for rate in rates:
        measure(rate)
    for _ in range(max_extensions):
        tried = sorted(losses)
        best = min(tried, key=lambda rate: losses[rate])
        if best == tried[-1]:
            measure(best * (best / tried[-2] if len(tried) > 1 else 3.0))
        elif best == tried[0]:
            measure(best / (tried[1] / best))
        else:
            break
    tried = sorted(losses)
    best = min(tried, key=lambda rate: losses[rate])
    if not math.isfinite(losses[best]):
        raise FitConfigError(
            f"No learning rate of {tried} gave a finite validation loss; try smaller ones, or look at the mapper's "
            "start."
        )
    return best, {rate: losses[rate] for rate in tried}


__all__ = ["search_learning_rate"]
