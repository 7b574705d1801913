"""Paired bootstrap intervals over questions or documents.

Every condition of a judgement (the target alone, the handoff, a control, ...) is scored on the same items. A resample
therefore draws items once and takes *every* condition's scores of exactly these items, so that a difference or a ratio
between conditions varies only as much as the items make it vary (Efron & Tibshirani 1993, chapters 8 and 13:
percentile intervals of the paired statistic).

Questions about one context are not independent of each other, so the unit that is drawn is the *group* (the context);
without groups each item is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .errors import EvaluationError


@dataclass(frozen=True)
class Interval:
    """A statistic with its bootstrap interval.

    Attributes:
        estimate: the statistic on the items as they are; None where it is undefined (a gap of zero, say).
        low, high: percentile bounds at `confidence`; None where too many resamples leave the statistic undefined.
        confidence: coverage aimed at, 0.95 for a 95 % interval.
        num_resamples: resamples drawn.
        num_items: items behind the estimate.
        num_groups: units that were drawn (contexts, documents).
        undefined_resamples: resamples in which the statistic had no value.
        seed: seed of the draws.
    """

    estimate: float | None
    low: float | None
    high: float | None
    confidence: float
    num_resamples: int
    num_items: int
    num_groups: int
    undefined_resamples: int
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """The interval as plain JSON types."""
        return asdict(self)


class PairedBootstrap:
    """Draws resamples once and answers any number of statistics from them.

    Args:
        num_items: number of items every column has.
        groups: one label an item; items with the same label are drawn together. None: each item alone.
        num_resamples: number of resamples.
        confidence: coverage of the intervals, in (0, 1).
        seed: seed of `numpy.random.default_rng`. Resample `r` is the `r`-th call of `integers(0, G, size=G)`.
    """

    def __init__(
        self,
        num_items: int,
        groups: Sequence[Any] | np.ndarray | None = None,
        num_resamples: int = 2000,
        confidence: float = 0.95,
        seed: int = 0,
    ):
        if num_items < 1:
            raise EvaluationError("A bootstrap needs at least one item, got none; give questions or documents.")
        if num_resamples < 1:
            raise EvaluationError(f"num_resamples must be at least 1, got {num_resamples}.")
        if not 0.0 < confidence < 1.0:
            raise EvaluationError(f"confidence must lie between 0 and 1, got {confidence}; 0.95 is usual.")
        if groups is not None and len(groups) != num_items:
            raise EvaluationError(f"groups has {len(groups)} labels for {num_items} items; give one label an item.")
        self.num_items = num_items
        self.num_resamples = num_resamples
        self.confidence = confidence
        self.seed = seed
        if groups is None:
            self.group_of_item = np.arange(num_items)
            self.num_groups = num_items
        else:
            # Numbered by first appearance, so that the draws depend on the order of the data and not on the labels.
            seen: dict[Any, int] = {}
            self.group_of_item = np.array([seen.setdefault(label, len(seen)) for label in groups])
            self.num_groups = len(seen)
        rng = np.random.default_rng(seed)
        # (resamples, groups): how often each group was drawn. int32 keeps 2,000 x 10,000 at 80 MB.
        self.counts = np.empty((num_resamples, self.num_groups), dtype=np.int32)
        for row in range(num_resamples):
            drawn = rng.integers(0, self.num_groups, size=self.num_groups)
            self.counts[row] = np.bincount(drawn, minlength=self.num_groups)

    def _column(self, values: Any, weights: Any) -> tuple[np.ndarray, np.ndarray]:
        values = np.asarray(values, dtype=np.float64)
        if values.shape != (self.num_items,):
            raise EvaluationError(f"Expected one value for each of {self.num_items} items, got shape {values.shape}.")
        weights = np.ones(self.num_items) if weights is None else np.asarray(weights, dtype=np.float64)
        if weights.shape != values.shape:
            raise EvaluationError(f"weights has shape {weights.shape}, the values have {values.shape}.")
        return values, weights

    def mean(self, values: Any, weights: Any = None) -> float:
        """Weighted mean of a column on the items as they are."""
        values, weights = self._column(values, weights)
        total = weights.sum()
        return float((values * weights).sum() / total) if total > 0 else float("nan")

    def means(self, values: Any, weights: Any = None) -> np.ndarray:
        """Weighted mean of a column in every resample, `(num_resamples,)`; NaN where no weight was drawn."""
        values, weights = self._column(values, weights)
        group_sum = np.bincount(self.group_of_item, weights=values * weights, minlength=self.num_groups)
        group_weight = np.bincount(self.group_of_item, weights=weights, minlength=self.num_groups)
        with np.errstate(invalid="ignore", divide="ignore"):
            return (self.counts @ group_sum) / (self.counts @ group_weight)

    def interval(
        self,
        statistic: Callable[..., Any],
        *columns: Any,
        weights: Any = None,
        undefined: str = "drop",
    ) -> Interval:
        """Interval of `statistic(mean of column 1, mean of column 2, ...)`.

        Args:
            statistic: takes one number a column and gives a number, or NaN (or None) where it has no value.
            columns: arrays `(num_items,)`, one a condition, over the same items in the same order.
            weights: `(num_items,)`, the same for every column (tokens of each document, say).
            undefined: "drop" leaves out resamples without a value, but gives no bounds once their share exceeds half
                of the tail that the interval cuts off (2.5 % at 95 %), as the bounds would then be made up;
                "error" raises on the first.

        Returns:
            The [`Interval`].
        """
        if not columns:
            raise EvaluationError("interval() needs at least one column of scores.")
        estimate = _number(statistic(*[self.mean(column, weights) for column in columns]))
        resampled = np.stack([self.means(column, weights) for column in columns])
        values = np.array([_number(statistic(*resampled[:, row])) for row in range(self.num_resamples)])
        defined = np.isfinite(values)
        num_undefined = int((~defined).sum())
        if num_undefined and undefined == "error":
            raise EvaluationError(f"The statistic has no value in {num_undefined} of {self.num_resamples} resamples.")
        tail = (1.0 - self.confidence) / 2.0
        low = high = None
        if np.isfinite(estimate) and num_undefined <= tail * self.num_resamples:
            low, high = (float(bound) for bound in np.quantile(values[defined], [tail, 1.0 - tail]))
        return Interval(
            estimate=float(estimate) if np.isfinite(estimate) else None,
            low=low,
            high=high,
            confidence=self.confidence,
            num_resamples=self.num_resamples,
            num_items=self.num_items,
            num_groups=self.num_groups,
            undefined_resamples=num_undefined,
            seed=self.seed,
        )

    def mean_interval(self, values: Any, weights: Any = None) -> Interval:
        """Interval of the (weighted) mean of one column."""
        return self.interval(lambda mean: mean, values, weights=weights)

    def difference_interval(self, values: Any, others: Any, weights: Any = None) -> Interval:
        """Interval of the paired difference `mean(values) - mean(others)`."""
        return self.interval(lambda mean, other: mean - other, values, others, weights=weights)


def paired_bootstrap(
    columns: Mapping[str, Any],
    statistic: Callable[[dict[str, float]], Any],
    *,
    groups: Sequence[Any] | None = None,
    weights: Any = None,
    num_resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """One interval of a statistic of named columns; for several statistics share one [`PairedBootstrap`]."""
    names = list(columns)
    if not names:
        raise EvaluationError("paired_bootstrap() needs at least one column of scores.")
    sampler = PairedBootstrap(len(columns[names[0]]), groups, num_resamples, confidence, seed)
    return sampler.interval(
        lambda *means: statistic(dict(zip(names, means, strict=True))),
        *[columns[name] for name in names],
        weights=weights,
    )


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)
