"""Calibrating the gates of a mapper that `kvbridge fit` has saved, on sequences that the fit has not used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..calibration.data import DataConfig, read_sequences
from ..calibration.job import CalibrationJob
from ..calibration.loading import load_model, load_tokenizer
from ..configuration_kvbridge import KVBridgeConfig
from ..errors import CalibrationError
from ..modeling_kvbridge import KVBridgeMapper
from ..padding import pad
from .calibrate import calibrate_gates

#: Fewer rows say nothing about one bad handoff in a hundred.
MIN_UNSEEN = 100


@dataclass
class UnseenSequences:
    """Token lists for the gates, and how many were left out because the fit had the very same ones."""

    rows: list[list[int]]
    duplicates: int = 0


def unseen_sequences(data: DataConfig, used: int, count: int, tokenizer: Any, num_sinks: int = 0) -> UnseenSequences:
    """The sequences that follow those of a fit in its data.

    Args:
        data: the fit's, or other.
        used: first sequences of it that are the fit's own, held-out ones included: they have chosen layers.
        count: wanted.
        tokenizer, num_sinks: the fit's.
    """
    sequences, _ = read_sequences(replace(data, num_sequences=used + count), tokenizer, num_sinks)
    seen: set[tuple[int, ...]] = set()
    found = UnseenSequences([])
    for number, sequence in enumerate(sequences):
        tokens = tuple(sequence.tokens)
        if number < used:
            seen.add(tokens)
        elif tokens in seen:
            found.duplicates += 1
        else:
            found.rows.append(list(tokens))
    return found


def calibrate_after_fit(
    job: CalibrationJob,
    count: int,
    *,
    data: DataConfig | None = None,
    plan: str = "a",
    device: torch.device | str = "cpu",
    say: Callable[[str], Any] = print,
) -> dict[str, Any] | None:
    """Calibrate the gates of the mapper in `job.output` and save it again.

    Args:
        job: of the fit.
        count: sequences to calibrate on.
        data: where they are from, if not from the end of the fit's own data; then all of it may be used.
        plan: of the fit. Plan c is taken where the two models do not fit into memory together, and is left at that.
        device: of the models.
        say: called with what happened, in a line.

    Returns:
        `config.gates` of the mapper; None where the gates were not calibrated, and the mapper is as it was.

    Raises:
        CalibrationError: the data cannot be used, or something is not finite on it.
    """
    config = KVBridgeConfig.from_pretrained(job.output)
    if config.gates:
        return config.gates
    if plan == "c":
        say(
            "The gates are not calibrated: they take both models in memory, which plan c never has. Where both fit, "
            f"run kvbridge calibrate-gates {job.output} --source {job.source} --target {job.target} --dataset TEXTS "
            "with text that the fit has not used. Until then a bridge checks that caches are finite and nothing else."
        )
        return None
    tokenizer = load_tokenizer(job, "target")
    used = job.data.num_sequences if data is None else 0
    found = unseen_sequences(data or job.data, used, count, tokenizer, config.num_sinks)
    if len(found.rows) < MIN_UNSEEN:
        more = f" ({found.duplicates} of them the fit had used)" if found.duplicates else ""
        say(
            f"The gates are not calibrated: behind the {used} sequences of the fit the data has "
            f"{len(found.rows) + found.duplicates} more{more}, and {MIN_UNSEEN} are needed. Give other text with "
            "--gate-dataset, or lower --num-sequences. A bridge then checks that caches are finite and nothing else."
        )
        return None
    gates = _calibrate(job, found.rows, device)
    say(f"Gates calibrated on {gates['rows']} sequences that the fit had not used.")
    return gates


def calibrate_saved(
    job: CalibrationJob, skip: int, count: int, *, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Calibrate the gates of a mapper whenever both models fit into memory, and save it again.

    Args:
        job: says the pair, the data and, as its `output`, the mapper.
        skip: first sequences of the data to leave out, as the fit had them.
        count: sequences to calibrate on.
        device: of the models.

    Returns:
        `config.gates` of the mapper.

    Raises:
        CalibrationError: there are not enough sequences, or something is not finite on them.
        OSError: `job.output` is no mapper.
    """
    config = KVBridgeConfig.from_pretrained(job.output)
    found = unseen_sequences(job.data, skip, count, load_tokenizer(job, "target"), config.num_sinks)
    if len(found.rows) < MIN_UNSEEN:
        raise CalibrationError(
            f"Behind the first {skip} sequences the data has {len(found.rows) + found.duplicates} more, "
            f"{found.duplicates} of them the same as earlier ones; {MIN_UNSEEN} others are needed, up to "
            f"--num-sequences {count}. Give more text with --dataset."
        )
    return _calibrate(job, found.rows, device)


def device_of(state: Any) -> torch.device | str:
    """Where the models of a calibration of gates go, by Accelerate's state."""
    return "cpu" if state.device.type == "mps" else state.device


def _calibrate(job: CalibrationJob, rows: list[list[int]], device: torch.device | str) -> dict[str, Any]:
    """With both models in memory."""
    models = [load_model(job, role, torch.device(device)) for role in ("source", "target")]
    mapper: Any = KVBridgeMapper.from_pretrained(job.output)
    gates = calibrate_gates(models[0], models[1], mapper.to(models[1].device), _batches(rows, job.batch_size))
    mapper.to("cpu").save_pretrained(job.output)
    return gates


def _batches(rows: list[list[int]], batch_size: int) -> list[dict[str, torch.Tensor]]:
    """Rows of similar length side by side, padded on the right."""
    rows = sorted(rows, key=len)
    batches = [pad(rows[start : start + batch_size], side="right") for start in range(0, len(rows), batch_size)]
    return [{"input_ids": ids, "attention_mask": mask} for ids, mask in batches]


__all__ = [
    "MIN_UNSEEN",
    "UnseenSequences",
    "calibrate_after_fit",
    "calibrate_saved",
    "device_of",
    "unseen_sequences",
]
