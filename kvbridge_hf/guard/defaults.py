"""The calibrated defaults that an artifact carries in `config.gates`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..errors import ArtifactError
from .likelihood import SuffixScores

VERSION = 2


@dataclass(frozen=True)
class SuffixModel:
    """What suffix scores looked like in calibration, and the score that is made of them.

    Each statistic is measured in how far it lies above its calibrated median, in units of the distance from the median
    to the 95 % quantile, and these are summed. Divided by the sum that the wanted share of good handoffs stayed below,
    this is the score: 1 is the calibrated threshold.

    Args:
        statistics: `{name: (median, distance)}`.
        limit: sum of all statistics that the wanted share stayed below.
        limit_without_drift: the same without `drift`, for handoffs without repair.
        max_score: score above which a handoff is rejected.
        num_tokens: scored tokens of a row in calibration. A mean over far fewer scatters more, so that rows with less
            than half of them are not judged.
    """

    statistics: dict[str, tuple[float, float]]
    limit: float
    limit_without_drift: float
    num_tokens: int
    max_score: float = 1.0

    def score(self, scores: SuffixScores) -> torch.Tensor:
        """`(batch,)`; NaN where a row has no scored tokens, or where a statistic is not known."""
        bare = self.total(scores, without_drift=True) / self.limit_without_drift
        if "drift" not in self.statistics or scores.drift is None:
            return bare
        # A row without recomputed tokens has no drift.
        return torch.where(scores.drift.isnan(), bare, self.total(scores) / self.limit)

    def total(self, scores: SuffixScores, *, without_drift: bool = False) -> torch.Tensor:
        """The sum of the scaled statistics, `(batch,)`."""
        found = torch.zeros(len(scores.tokens), dtype=torch.float64)
        for name, (median, distance) in self.statistics.items():
            value = getattr(scores, name)
            if name != "drift" or not without_drift:
                missing = torch.full_like(found, torch.nan)
                found += missing if value is None else (value.double() - median) / distance
        return found


@dataclass(frozen=True)
class MagnitudeModel:
    """Calibrated range of the norm of a token's mapped keys and of its values, all heads together.

    Args:
        keys, values: `(low, high)` quantiles for each target layer.
        max_outside: share of a row's tokens that may lie outside in the worst layer.
    """

    keys: list[tuple[float, float]]
    values: list[tuple[float, float]]
    max_outside: float


@dataclass(frozen=True)
class GateDefaults:
    """`config.gates` of a mapper.

    Args:
        magnitude, suffix_likelihood: models of the two calibrated gates.
        quantile: share of the calibration rows that each threshold lets pass.
        rows, tokens: rows and mapped tokens behind them.
        kl: quantiles of the KL to the target's own prefill that these rows had, for orientation.
    """

    magnitude: MagnitudeModel
    suffix_likelihood: SuffixModel | None
    quantile: float
    rows: int
    tokens: int
    kl: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_config(cls, config: Any) -> GateDefaults | None:
        """Those of a mapper's config; None where it has none.

        Raises:
            ArtifactError: they are malformed, or of a newer version.
        """
        given = config.gates
        if not given:
            return None
        if given.get("version") != VERSION:
            raise ArtifactError(
                f"config.gates has version {given.get('version')!r}; this kvbridge_hf reads {VERSION}. Update it, or "
                "calibrate the gates again."
            )
        try:
            magnitude, suffix = given["magnitude"], given["suffix_likelihood"]
            defaults = cls(
                magnitude=MagnitudeModel(
                    keys=[_pair(row) for row in magnitude["keys"]],
                    values=[_pair(row) for row in magnitude["values"]],
                    max_outside=_number(magnitude["max_outside"]),
                ),
                suffix_likelihood=None
                if suffix is None
                else SuffixModel(
                    statistics={name: _pair(row) for name, row in suffix["statistics"].items()},
                    limit=_number(suffix["limit"]),
                    limit_without_drift=_number(suffix["limit_without_drift"]),
                    num_tokens=int(suffix["num_tokens"]),
                    max_score=_number(suffix["max_score"]),
                ),
                quantile=_number(given["quantile"]),
                rows=int(given["rows"]),
                tokens=int(given["tokens"]),
                kl=dict(given["kl"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(
                f"config.gates is malformed ({type(error).__name__}: {error}). Calibrate the gates again, or set "
                "config.gates = {} to go without."
            ) from error
        layers = int(config.target_geometry["num_layers"])
        if len(defaults.magnitude.keys) != layers or len(defaults.magnitude.values) != layers:
            raise ArtifactError(
                f"config.gates has ranges of {len(defaults.magnitude.keys)} and {len(defaults.magnitude.values)} "
                f"layers; the target has {layers}. Calibrate the gates again."
            )
        unknown = set(defaults.suffix_likelihood.statistics if defaults.suffix_likelihood else ()) - set(STATISTICS)
        if unknown:
            raise ArtifactError(f"config.gates names unknown statistics {sorted(unknown)}; there are {STATISTICS}.")
        return defaults


#: Statistics of [`SuffixScores`] that a score may be made of.
STATISTICS = ("nll", "excess", "divergence", "reverse_divergence", "drift")
#: Those that it is made of. They need no labels: text that is rare and yet read well is no alarm. See docs/serve.md.
SCORED = ("reverse_divergence", "drift")


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not finite")
    return number


def _pair(row: Any) -> tuple[float, float]:
    low, high = row
    return _number(low), _number(high)


__all__ = ["SCORED", "STATISTICS", "GateDefaults", "MagnitudeModel", "SuffixModel"]
