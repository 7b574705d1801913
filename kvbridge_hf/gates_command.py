"""`kvbridge calibrate-gates`: the gates of a mapper that is there, from a pair and text that its fit has not used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def calibrate_gates_of(
    mapper: Annotated[Path, typer.Argument(help="Folder of the mapper; its gates are replaced.")],
    source: Annotated[str, typer.Option("--source", help="Source model: folder or Hub id.")],
    target: Annotated[str, typer.Option("--target", help="Target model: folder or Hub id.")],
    dataset: Annotated[
        list[str] | None, typer.Option(help="Text that the fit has not used; as --dataset of kvbridge fit.")
    ] = None,
    skip: Annotated[
        int, typer.Option(min=0, help="First sequences of it to leave out: the fit's, where its data are given again.")
    ] = 0,
    num_sequences: Annotated[int, typer.Option(min=1, help="Sequences to calibrate on.")] = 200,
    sequence_length: Annotated[int, typer.Option(min=8, help="Tokens of a sequence.")] = 1024,
    packing: Annotated[str, typer.Option(help="cut or pack; as in kvbridge fit.")] = "cut",
    source_revision: Annotated[str | None, typer.Option(help="Hub revision of the source.")] = None,
    target_revision: Annotated[str | None, typer.Option(help="Hub revision of the target.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer of the pair (default: the models').")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of one handoff.")] = 8,
    dtype: Annotated[str, typer.Option(help="Of the models: auto, float32, bfloat16 or float16.")] = "auto",
    device_map: Annotated[str | None, typer.Option(help="Spread the models over devices: auto.")] = None,
    quantization: Annotated[str | None, typer.Option(help="Load the models in 4bit or 8bit (bitsandbytes).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
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
