"""Fitting the likelihood gate's threshold to what shadow runs recorded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import CalibrationError
from ..modeling_kvbridge import KVBridgeMapper
from .defaults import GateDefaults

#: Fields of a shadow event's rows that a threshold can be fitted for, and the setting of [`Gates`] that takes it.
SETTINGS = {"score": "max_suffix_score", "nll": "max_nll", "excess": "max_excess"}


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Events of a JSONL file, one a line; a log line may have something before the object.

    Raises:
        CalibrationError: a line holds no JSON object.
    """
    events = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            start = line.find("{")
            try:
                events.append(json.loads(line[start:] if start >= 0 else line))
            except json.JSONDecodeError as error:
                raise CalibrationError(f"{path}, line {number} holds no JSON object: {error}.") from error
    return events


def tune_gate(
    events: Iterable[Mapping[str, Any]],
    *,
    max_kl: float,
    miss_rate: float = 0.05,
    statistic: str = "score",
    kl_field: str = "kl",
) -> dict[str, Any]:
    """The highest threshold that lets at most a wanted share of the bad handoffs pass.

    A row is bad where its KL to the target's own prefill exceeds `max_kl`. The threshold is chosen on the recorded
    rows, so the miss rate holds for traffic like them; `miss_rate_upper` says how high the true rate may be.

    Args:
        events: events of any kind; shadow events count (see [`kvbridge_hf.guard.events`]).
        max_kl: bound in nats.
        miss_rate: wanted share of bad rows that pass.
        statistic: `"score"`, `"nll"` or `"excess"`.
        kl_field: `"kl"` (mean over the compared columns) or `"kl_last"` (of the first new token).

    Returns:
        `setting` (the [`Gates`] field), `threshold`, counts (`rows`, `bad`, `good`, `left_out`), `miss_rate` and
        `false_alarm_rate` reached, their 95 % upper bounds (`..._upper`, Clopper-Pearson's by the exact binomial), and
        `auroc`.

    Raises:
        CalibrationError: nothing to fit: no bad or no good rows, or settings out of range.
    """
    if statistic not in SETTINGS:
        raise CalibrationError(f"statistic must be one of {sorted(SETTINGS)}, got {statistic!r}.")
    if kl_field not in ("kl", "kl_last"):
        raise CalibrationError(f"kl_field must be 'kl' or 'kl_last', got {kl_field!r}.")
    if not 0 <= miss_rate < 1 or not max_kl > 0:
        raise CalibrationError(f"miss_rate must be in [0, 1) and max_kl above 0, got {miss_rate!r} and {max_kl!r}.")
    good: list[float] = []
    bad: list[float] = []
    left_out = 0
    for event in events:
        for row in event.get("rows", ()) if event.get("event") == "shadow" else ():
            value, kl = row.get(statistic), row.get(kl_field)
            if kl is None or value is None:
                left_out += 1
            else:
                (bad if kl > max_kl else good).append(float(value))
    if not bad or not good:
        raise CalibrationError(
            f"{len(good)} recorded rows have a KL of at most {max_kl} and {len(bad)} a larger one ({left_out} without "
            "a score left out); both kinds are needed. Record more shadow events, or choose another bound."
        )
    bad.sort()
    passing = math.floor(miss_rate * len(bad) + 1e-9)
    # Rejected is what lies above the threshold, so it has to lie just under the first bad row that must not pass.
    threshold = math.nextafter(bad[passing], -math.inf)
    missed, alarms = sum(value <= threshold for value in bad), sum(value > threshold for value in good)
    return {
        "setting": SETTINGS[statistic],
        "threshold": threshold,
        "max_kl": max_kl,
        "rows": len(good) + len(bad),
        "good": len(good),
        "bad": len(bad),
        "left_out": left_out,
        "miss_rate": missed / len(bad),
        "miss_rate_upper": binomial_upper(missed, len(bad)),
        "false_alarm_rate": alarms / len(good),
        "false_alarm_rate_upper": binomial_upper(alarms, len(good)),
        "auroc": auroc(good, bad),
    }


def auroc(good: Sequence[float], bad: Sequence[float]) -> float:
    """Probability that a bad row scores above a good one, ties counting half (Mann and Whitney 1947)."""
    ranked = sorted([(value, 0) for value in good] + [(value, 1) for value in bad])
    rank_sum, start = 0.0, 0
    while start < len(ranked):
        stop = start
        while stop < len(ranked) and ranked[stop][0] == ranked[start][0]:
            stop += 1
        rank_sum += sum(kind for _, kind in ranked[start:stop]) * (start + 1 + stop) / 2
        start = stop
    return (rank_sum - len(bad) * (len(bad) + 1) / 2) / (len(good) * len(bad))


def miss_rate_at(good: Sequence[float], bad: Sequence[float], false_alarm_rate: float = 0.01) -> float:
    """Share of bad rows that pass where at most the given share of good ones is rejected."""
    alarms = math.floor(false_alarm_rate * len(good) + 1e-9)
    threshold = sorted(good, reverse=True)[alarms] if alarms < len(good) else -math.inf
    return sum(value <= threshold for value in bad) / len(bad)


def binomial_upper(hits: int, trials: int, confidence: float = 0.95) -> float:
    """One-sided upper bound of a rate (Clopper and Pearson 1934), by bisection of the exact binomial tail."""
    if hits >= trials:
        return 1.0
    low, high = hits / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        logs = [
            math.lgamma(trials + 1)
            - math.lgamma(k + 1)
            - math.lgamma(trials - k + 1)
            + k * math.log(middle)
            + (trials - k) * math.log1p(-middle)
            for k in range(hits + 1)
        ]
        tail = sum(math.exp(value) for value in logs)
        low, high = (middle, high) if tail > 1 - confidence else (low, middle)
    return high


def store_threshold(result: Mapping[str, Any], mapper: str | None, output: str | Path | None) -> None:
    """Save a copy of a mapper that carries a fitted score threshold.

    Raises:
        CalibrationError: one of the two places is missing, the threshold is in nats (which belong in a policy's
        [`Gates`]),
            or the mapper's gates are not calibrated, so that it has no score.
    """
    if mapper is None or output is None:
        raise CalibrationError("Give both the mapper that shall carry the threshold and the folder for the result.")
    if result["setting"] != "max_suffix_score":
        raise CalibrationError(
            f"Only a score threshold can be stored in a mapper; set Gates({result['setting']}="
            f"{result['threshold']:.6g}) in the policy instead."
        )
    loaded = KVBridgeMapper.from_pretrained(mapper)
    defaults = GateDefaults.from_config(loaded.config)
    if defaults is None or defaults.suffix_likelihood is None:
        raise CalibrationError(
            f"The gates of {mapper} are not calibrated, so that it has no score. Run calibrate_gates."
        )
    suffix = replace(defaults.suffix_likelihood, max_score=float(result["threshold"]))
    loaded.config.gates = replace(defaults, suffix_likelihood=suffix).to_dict()
    loaded.save_pretrained(output)


def to_text(result: Mapping[str, Any]) -> str:
    """A fitted threshold for a terminal."""
    return "\n".join(
        [
            f"Gates({result['setting']}={result['threshold']:.6g})",
            f"  {result['rows']} rows: {result['bad']} with a KL above {result['max_kl']}, {result['good']} below; "
            f"{result['left_out']} without a score left out",
            f"  bad rows that pass:     {result['miss_rate']:.1%} (95 % upper bound {result['miss_rate_upper']:.1%})",
            f"  good rows rejected:     {result['false_alarm_rate']:.1%} "
            f"(95 % upper bound {result['false_alarm_rate_upper']:.1%})",
            f"  AUROC:                  {result['auroc']:.3f}",
        ]
    )


__all__ = ["auroc", "binomial_upper", "miss_rate_at", "read_events", "store_threshold", "to_text", "tune_gate"]
