"""`kvbridge calibrate-gates`: the gates of a mapper that is there, from a pair and text that its fit has not used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .command_options import (
    AsJson,
    DeviceMap,
    ModelDtype,
    PairTokenizer,
    Quantization,
    SequenceLength,
    Source,
    SourceRevision,
    Target,
    TargetRevision,
)


def calibrate_gates_of(
    mapper: Annotated[Path, typer.Argument(help="Folder of the mapper; its gates are replaced.")],
    source: Source,
    target: Target,
    dataset: Annotated[
        list[str] | None, typer.Option(help="Text that the fit has not used; as --dataset of kvbridge fit.")
    ] = None,
    skip: Annotated[
        int, typer.Option(min=0, help="First sequences of it to leave out: the fit's, where its data are given again.")
    ] = 0,
    num_sequences: Annotated[int, typer.Option(min=1, help="Sequences to calibrate on.")] = 200,
    sequence_length: SequenceLength = 1024,
    packing: Annotated[str, typer.Option(help="cut or pack; as in kvbridge fit.")] = "cut",
    source_revision: SourceRevision = None,
    target_revision: TargetRevision = None,
    tokenizer: PairTokenizer = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of one handoff.")] = 8,
    dtype: ModelDtype = "auto",
    device_map: DeviceMap = None,
    quantization: Quantization = None,
    as_json: AsJson = False,
) -> None:
    """Calibrate the gates of a saved mapper, with both models in memory."""
    from accelerate import PartialState

    from .calibration.data import DataConfig, with_defaults
    from .calibration.job import CalibrationJob
    from .guard.after_fit import calibrate_saved, device_of
    from .mappers.config import FitConfig

    job = CalibrationJob(
        source=source,
        target=target,
        output=mapper,
        data=DataConfig(with_defaults(dataset or []), num_sequences, sequence_length, packing),
        fit=FitConfig(),
        source_revision=source_revision,
        target_revision=target_revision,
        tokenizer=tokenizer,
        batch_size=batch_size,
        dtype=dtype,
        device_map=device_map,
        quantization=quantization,
    )
    gates = calibrate_saved(job, skip, num_sequences, device=device_of(PartialState()))
    found = {name: gates[name] for name in ("rows", "tokens", "quantile", "kl")}
    text = f"Gates of {mapper} calibrated on {gates['rows']} sequences, {gates['tokens']} tokens."
    typer.echo(json.dumps(found) if as_json else text)


__all__ = ["calibrate_gates_of"]
