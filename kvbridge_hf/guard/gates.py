"""The gates of one handoff: each looks, writes what it saw into the report, and may reject."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from ..errors import GenerateArgumentError, HandoffRejected
from ..rotary import positions_from_mask
from .defaults import STATISTICS, GateDefaults, MagnitudeModel
from .likelihood import SuffixScores, score_suffix, scored_columns
from .peek import peek, run_columns
from .settings import Gates

#: Tokens of a row that may leave the calibrated range whatever their share: a few are no proof in a short prompt.
FEW_TOKENS = 2


class PositionRangeWarning(UserWarning):
    """A prompt is longer than anything that the mapper was calibrated on."""


@dataclass
class Handed:
    """What a bridge has prepared when its layers may be mapped.

    Args:
        input_ids, mask: `(batch, columns)` of the whole prompt; ids are None where only a cache was given.
        start, stop: columns that `cache` stands for.
        valid, position_ids: `(batch, stop - start)` of them.
        num_sinks: first tokens of a row that the target has read itself.
        source: the source's cache, `.layers[i].keys` and `.values`, of which `source_stop` columns may be seen.
        source_mask: `(batch, source_stop)`, bool, tokens of the source that the handed-over columns stand for.
        source_rotary: the source's rotation, a [`ContentRotary`].
        target_cache: what the target held before, `start` columns; None for nothing.
    """

    input_ids: torch.Tensor | None
    mask: torch.Tensor
    start: int
    stop: int
    valid: torch.Tensor
    position_ids: torch.Tensor
    num_sinks: int
    source: Any
    source_mask: torch.Tensor
    source_rotary: Any
    target_cache: Cache | None = None

    @property
    def columns(self) -> int:
        return self.mask.shape[1]


class HandoffGate:
    """Runs the gates of one handoff. Not shared: each handoff has its own.

    Args:
        gates: the settings.
        config: the mapper's config.
        report: the handoff's report; `.gates[name]` receives what each gate saw.

    Raises (every method):
        HandoffRejected: a gate rejected; its name is in `report.gate`.
    """

    def __init__(self, gates: Gates, config: Any, report: Any):
        self.gates = gates
        self.report = report
        self.max_positions = config.max_calibrated_positions
        self.defaults = GateDefaults.from_config(config)
        self._started = time.perf_counter()
        for name, limit in (("magnitude", "max_outside"), ("suffix_likelihood", "max_suffix_score")):
            calibrated = self.defaults is not None and getattr(self.defaults, name) is not None
            needed = limit if getattr(gates, limit) is not None else f"{name}=True"
            if not calibrated and (needed == limit or (getattr(gates, name) and not self._has_limit(name))):
                raise GenerateArgumentError(
                    f"Gates({needed}) compares with calibration, and this mapper carries no calibrated gates. Run "
                    "kvbridge_hf.guard.calibrate_gates(source, target, mapper, token_batches), or use max_nll or "
                    "max_excess, which need none."
                )

    def _has_limit(self, name: str) -> bool:
        if name == "suffix_likelihood" and self.gates.has_limits:
            return True
        return self.defaults is not None and getattr(self.defaults, name) is not None

    def wants(self, name: str) -> bool:
        """Whether one of the three calibrated gates is on."""
        asked = getattr(self.gates, name)
        if asked is not None:
            return bool(asked)
        return self.defaults is not None if name == "mapped_finite" else self._has_limit(name)

    @property
    def wants_mapped(self) -> bool:
        """Whether the layers have to be mapped before the target starts."""
        return (
            self.wants("mapped_finite")
            or self.wants("magnitude")
            or self.wants("suffix_likelihood")
            or self.gates.latency_budget is not None
            or self.gates.accept is not None
        )

    def check_request(self, mask: torch.Tensor) -> None:
        """Batch size, lengths and positions; before any model runs."""
        rows, longest = mask.shape[0], int(mask.sum(-1).max())
        gates = self.gates
        self._limit("max_batch_size", rows, gates.max_batch_size, rows > (gates.max_batch_size or rows))
        self._limit("min_tokens", longest, gates.min_tokens, longest < (gates.min_tokens or 0))
        self._limit("max_tokens", longest, gates.max_tokens, longest > (gates.max_tokens or longest))
        if self.max_positions is None or gates.position_range == "ignore":
            return
        beyond = longest > self.max_positions
        seen = {"value": longest, "limit": self.max_positions}
        if beyond and gates.position_range == "warn":
            self.report.gates["position_range"] = {"status": "warned", **seen}
            self.report.notes.append(f"A row has {longest} tokens, calibrated were {self.max_positions}.")
            # The same text each time, so that Python shows it once.
            warnings.warn(
                f"A prompt is longer than the {self.max_positions} tokens that the mapper was calibrated on; what is "
                "beyond may be mapped badly. Gates(position_range='refuse') reads such prompts natively.",
                PositionRangeWarning,
                stacklevel=6,
            )
            return
        self._decide("position_range", beyond, f"{longest} tokens, calibrated on {self.max_positions}", seen)

    def check_source(self, source: Any, stop: int, valid: torch.Tensor) -> None:
        """The source's cache holds numbers where tokens stand; `valid` is `(batch, stop)`."""
        if not self.gates.source_finite:
            return
        finite = []
        for layer in source.layers:
            for states in (layer.keys, layer.values):
                shown = valid.to(states.device)[:, None, :, None]
                finite.append(
                    torch.where(shown, states[:, :, :stop], 0).isfinite().all().to(source.layers[0].keys.device)
                )
        bad = (~torch.stack(finite)).nonzero()[:, 0].tolist()
        where = [f"layer {index // 2} {'values' if index % 2 else 'keys'}" for index in bad[:3]]
        self._decide("source_finite", bool(bad), f"not finite: {', '.join(where)}", {"bad_tensors": len(bad)})

    def check_time(self) -> None:
        """The latency budget, asked between parts."""
        budget = self.gates.latency_budget
        if budget is None:
            return
        spent = time.perf_counter() - self._started
        self._decide(
            "latency_budget", spent > budget, f"{spent:.4f} s spent of {budget} s", {"value": spent, "limit": budget}
        )

    def check_mapped(self, cache: Cache, handed: Handed) -> None:
        """Finiteness and magnitude of the mapped columns."""
        model = None if self.defaults is None or not self.wants("magnitude") else self.defaults.magnitude
        if model is None and not self.wants("mapped_finite"):
            return
        finite, outside = mapped_norms(cache, handed, model, self.report.native_layers)
        if self.wants("mapped_finite"):
            bad = (~finite).nonzero()[:, 0].tolist()
            where = f"not finite: layers {bad[:8]}"
            self._decide("mapped_finite", bool(bad), where, {"bad_layers": len(bad)})
        if model is None:
            return
        limit = model.max_outside if self.gates.max_outside is None else self.gates.max_outside
        tokens = mapped_columns(cache, handed).sum(-1).cpu()
        worst = outside.amax(0)  # (batch,)
        beyond = (worst > limit) & (worst * tokens > FEW_TOKENS)
        layer = int(outside.amax(1).argmax())
        seen = {"value": float(worst.max()), "limit": limit, "layer": layer}
        share = f"{float(worst.max()):.1%} of a row's tokens"
        reason = f"{share} leave the calibrated range in layer {layer}, limit {limit:.1%}"
        self._decide("magnitude", bool(beyond.any()), reason, seen)

    def check_suffix(self, scores: SuffixScores | None) -> None:
        """The suffix likelihood of every row that has enough known tokens."""
        if scores is None:
            self.report.gates["suffix_likelihood"] = {
                "status": "skipped",
                "why": "no known tokens to score: the native suffix is one column, or there are no input_ids",
            }
            return
        score = self.suffix_score(scores)
        seen: dict[str, Any] = {}
        enough = scores.tokens > 0
        beyond = torch.zeros_like(enough)
        model = None if self.defaults is None else self.defaults.suffix_likelihood
        limit = self.gates.max_suffix_score
        if score is not None and model is not None and self.gates.suffix_likelihood is not False:
            limit = model.max_score if limit is None else limit
            judged = enough & (2 * scores.tokens >= model.num_tokens)
            beyond |= judged & ~(score <= limit)  # a NaN score is no good score
            seen.update(score=_worst(score, judged), limit=limit, judged_rows=int(judged.sum()))
        for name in STATISTICS:
            value = getattr(scores, name)
            if value is None:
                continue
            seen[name] = _worst(value, enough)
            own = getattr(self.gates, f"max_{name}", None)
            if own is not None:
                beyond |= enough & ~(value <= own)
                seen[f"max_{name}"] = own
        seen.update(tokens=int(scores.tokens.sum()))
        rows = beyond.nonzero()[:, 0].tolist()
        reason = f"known text is too surprising in {len(rows)} of {len(beyond)} rows: {_numbers(seen)}"
        self._decide("suffix_likelihood", bool(rows), reason, {**seen, "rejected_rows": len(rows)})

    def suffix_score(self, scores: SuffixScores) -> torch.Tensor | None:
        """The calibrated score of each row, None without calibration."""
        model = None if self.defaults is None else self.defaults.suffix_likelihood
        return None if model is None else model.score(scores)

    def check_accept(self, cache: Cache) -> None:
        """The caller's own word."""
        if self.gates.accept is None:
            return
        answer = self.gates.accept(cache, self.report)
        refused = isinstance(answer, str) or not answer
        self._decide("accept", refused, answer if isinstance(answer, str) else "the caller's accept() said no", {})

    def _limit(self, name: str, value: int, limit: int | None, beyond: bool) -> None:
        if limit is not None:
            self._decide(name, beyond, f"{value}, limit {limit}", {"value": value, "limit": limit})

    def _decide(self, name: str, rejected: bool, reason: str, seen: dict[str, Any]) -> None:
        self.report.gates[name] = {"status": "rejected" if rejected else "passed", **seen}
        if rejected:
            self.report.gate = name
            raise HandoffRejected(f"The gate {name} rejected the handoff: {reason}.", self.report)


@torch.no_grad()
def mapped_norms(
    cache: Cache, handed: Handed, model: MagnitudeModel | None, num_native_layers: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which layers are finite, `(layers,)` bool, and each row's share of tokens outside the range, `(layers, batch)`.

    The larger share of keys and values counts. Without a model every share is zero, and so it is in the lowest
    `num_native_layers`, which the target has computed itself: a map shrinks norms, and the range is that of a map.
    """
    mapped = mapped_columns(cache, handed)
    finite, outside = [], []
    for index, layer in enumerate(cache.layers):
        for kind in ("keys", "values"):
            norms = token_norms(getattr(layer, kind), handed)
            shown = mapped.to(norms.device)
            finite.append(torch.where(shown, norms, 0.0).isfinite().all())
            if model is None or index < num_native_layers:
                outside.append(torch.zeros(len(norms), device=norms.device))
                continue
            low, high = getattr(model, kind)[index]
            left = shown & ~((norms >= low) & (norms <= high))
            outside.append(left.sum(-1) / shown.sum(-1).clamp(min=1))
    first = outside[0].device
    shares = torch.stack([share.to(first) for share in outside]).unflatten(0, (-1, 2)).amax(1)
    fine = torch.stack([flag.to(first) for flag in finite]).unflatten(0, (-1, 2)).all(1)
    return fine.cpu(), shares.cpu()


def mapped_columns(cache: Cache, handed: Handed) -> torch.Tensor:
    """Which handed-over columns hold mapped tokens, `(batch, columns)`: no padding, and not the target's own."""
    mapped = handed.valid & (handed.position_ids >= handed.num_sinks)
    repaired = getattr(cache, "repaired", None)
    return mapped if repaired is None else mapped & ~repaired.to(mapped.device)


def token_norms(states: torch.Tensor, handed: Handed) -> torch.Tensor:
    """Norm over heads and channels of the handed-over columns, `(batch, columns)`, float32.

    A rotation keeps it, so keys need no content space here.
    """
    return states[:, :, : handed.stop - handed.start].float().square().sum((1, 3)).sqrt()


@torch.no_grad()
def suffix_scores(
    target: PreTrainedModel, source: PreTrainedModel | None, cache: Cache, handed: Handed, *, keep_columns: bool
) -> SuffixScores | None:
    """Let the target read all but the last of its own columns, and score the tokens that it should have expected.

    Args:
        source: the source model, which then reads the same columns on top of its cache; None leaves it out.
        cache: the handed-over cache, `handed.start` to `handed.stop`.
        keep_columns: leave the columns read in `cache` (it then holds all but the prompt's last column). Only without
            a `target_cache` in front.

    Returns:
        None where there is nothing to score.
    """
    ids, mask, last = handed.input_ids, handed.mask, handed.columns - 1
    if ids is None or handed.stop >= last:
        return None
    first, valid = scored_columns(mask, handed.stop)
    columns, keep = slice(handed.stop, last), last - first
    positions = positions_from_mask(mask)[:, columns]
    on_top: Cache = cache
    if handed.target_cache is not None:
        on_top = peek((handed.target_cache, handed.start), (cache, handed.stop - handed.start))
    elif not keep_columns:
        on_top = peek((cache, handed.stop))
    log_probs = run_columns(target, on_top, ids[:, columns], mask[:, :last], positions, keep)
    source_log_probs = None
    if source is not None:
        seen = handed.source_mask.to(mask.device)
        source_log_probs = run_columns(
            source,
            peek((handed.source, seen.shape[1]), valid=seen),
            ids[:, columns],
            torch.cat([seen, mask[:, columns]], dim=1),
            positions,
            keep,
        )
    scores = score_suffix(log_probs, ids[:, first + 1 : last + 1], valid, source_log_probs)
    return replace(scores, drift=getattr(cache, "drift", None))


def _worst(values: torch.Tensor, rows: torch.Tensor) -> float | None:
    return float(values[rows].max()) if bool(rows.any()) else None


def _numbers(seen: dict[str, Any]) -> str:
    shown = [f"{name} {value:.3f}" for name, value in seen.items() if isinstance(value, float)]
    return ", ".join(shown)


__all__ = [
    "HandoffGate",
    "Handed",
    "PositionRangeWarning",
    "mapped_columns",
    "mapped_norms",
    "suffix_scores",
    "token_norms",
]
