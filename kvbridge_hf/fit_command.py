"""The arguments of `kvbridge fit` and `scripts/calibrate.py`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

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
from .errors import CalibrationError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes from `"24GiB"`, `"24GB"` or a number.

    Raises:
        CalibrationError: it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise CalibrationError(f"{text!r} is no size; write 24GiB, 24GB or a number of bytes.")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def parse_settings(texts: list[str]) -> dict[str, Any]:
    """`name=value` texts; values are JSON where they can be read so.

    Raises:
        CalibrationError: one has no `=`.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise CalibrationError(f"--set {text!r}: write NAME=VALUE, such as --set layer_budget=4.")
        try:
            settings[name.strip()] = json.loads(value)
        except ValueError:
            settings[name.strip()] = value
    return settings


def fit(
    source: Source,
    target: Target,
    output: Annotated[Path, typer.Option(help="Folder for the mapper, and for the state of the run.")],
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help="Dataset id, folder, or .jsonl, .parquet or .txt file; more than once for a mixture. Options of one "
            "follow its name: NAME,config=..,split=..,revision=..,column=..,weight=.. (default: fineweb-edu)."
        ),
    ] = None,
    dataset_config: Annotated[str | None, typer.Option(help="Config of the datasets.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of the datasets (default: train).")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the datasets.")] = None,
    text_column: Annotated[
        str | None, typer.Option(help="Column with texts or chat messages (default: text).")
    ] = None,
    streaming: Annotated[bool, typer.Option(help="Read Hub datasets only as far as needed.")] = True,
    num_sequences: Annotated[int, typer.Option(min=1, help="Sequences in all, held-out ones included.")] = 500,
    sequence_length: SequenceLength = 1024,
    packing: Annotated[
        str, typer.Option(help="cut: one document a sequence; pack: documents side by side in whole sequences.")
    ] = "cut",
    short_sequences: Annotated[
        str, typer.Option(help="With cut, documents shorter than a sequence: keep, skip or error.")
    ] = "keep",
    preset: Annotated[str, typer.Option(help="Settings to start from.")] = "default",
    support: Annotated[str | None, typer.Option(help="full_head or head_local.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Source layers per target layer.")] = None,
    ridge_lambda: Annotated[float | None, typer.Option(help="Penalty on the summed moments.")] = None,
    selection: Annotated[str | None, typer.Option(help="r2, r2_layer or greedy.")] = None,
    weighting: Annotated[str | None, typer.Option(help="uniform or sensitivity.")] = None,
    num_sinks: Annotated[int | None, typer.Option(min=0, help="First tokens that are not mapped.")] = None,
    token_stride: Annotated[int | None, typer.Option(min=1, help="Use every so-manieth token.")] = None,
    heldout_fraction: Annotated[float | None, typer.Option(help="Share of the sequences held out.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Chooses the sequences held out.")] = None,
    mapper_dtype: Annotated[str | None, typer.Option(help="In which the mapper is stored.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any other field of FitConfig, as NAME=VALUE; repeatable.")
    ] = None,
    source_revision: SourceRevision = None,
    target_revision: TargetRevision = None,
    tokenizer: PairTokenizer = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of one forward; halved if memory runs out.")] = 8,
    dtype: ModelDtype = "auto",
    device_map: DeviceMap = None,
    quantization: Quantization = None,
    plan: Annotated[
        str, typer.Option(help="auto, a (one pass), b (blocks of target layers) or c (source content on disk).")
    ] = "auto",
    target_blocks: Annotated[int | None, typer.Option(min=1, help="Blocks of target layers in plans b and c.")] = None,
    memory_budget: Annotated[
        str | None, typer.Option(help="Memory of one process, such as 24GiB (default: what is free).")
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Batches between two saved states.")] = 50,
    max_bad_sequences: Annotated[int, typer.Option(min=0, help="Sequences with NaN or Inf to leave out.")] = 10,
    gate_sequences: Annotated[
        int,
        typer.Option(
            min=0, help="Further sequences, on which the gates are calibrated; 0 (and plan c) leaves the gates out."
        ),
    ] = 200,
    gate_dataset: Annotated[
        list[str] | None, typer.Option(help="Other data for the gates, that the fit does not use; as --dataset.")
    ] = None,
    lookups: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with context, question, choices and answer (index), or answer (text) alone: questions "
            "from which repair=learned (preset quality) learns what to repair."
        ),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Begin again; the saved state is thrown away.")] = False,
    report_to: Annotated[str | None, typer.Option(help="A tracker of Accelerate, such as trackio.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fit a mapper for a pair and save it; the same command goes on after an interruption."""
    from .calibration.data import DataConfig, with_defaults
    from .calibration.job import CalibrationJob
    from .calibration.run import run_calibration, summary_text
    from .mappers.config import FitConfig

    named = {
        "support": support,
        "top_k": top_k,
        "ridge_lambda": ridge_lambda,
        "selection": selection,
        "weighting": weighting,
        "num_sinks": num_sinks,
        "token_stride": token_stride,
        "heldout_fraction": heldout_fraction,
        "seed": seed,
        "dtype": mapper_dtype,
    }
    overrides = {name: value for name, value in named.items() if value is not None}
    job = CalibrationJob(
        source=source,
        target=target,
        output=output,
        data=DataConfig(
            with_defaults(dataset or [], config=dataset_config, split=split, revision=revision, column=text_column),
            num_sequences,
            sequence_length,
            packing,
            short_sequences,
            streaming,
        ),
        fit=FitConfig.preset(preset, **{**overrides, **parse_settings(set_ or [])}),
        source_revision=source_revision,
        target_revision=target_revision,
        tokenizer=tokenizer,
        batch_size=batch_size,
        dtype=dtype,
        device_map=device_map,
        quantization=quantization,
        plan=plan,
        target_blocks=target_blocks,
        memory_budget=None if memory_budget is None else parse_size(memory_budget),
        checkpoint_every=checkpoint_every,
        max_bad_sequences=max_bad_sequences,
        restart=restart,
        report_to=report_to,
        lookups=lookups,
    )
    says: list[str] = []
    say = says.append if as_json else typer.echo
    summary = run_calibration(job, progress=not as_json, say=say)
    from accelerate import PartialState

    if PartialState().is_main_process:
        summary["gates"] = None
        if gate_sequences > 0:
            from .guard.after_fit import calibrate_after_fit, device_of

            other = None
            if gate_dataset:
                other = replace(
                    job.data,
                    datasets=with_defaults(
                        gate_dataset, config=dataset_config, split=split, revision=revision, column=text_column
                    ),
                )
            gates = calibrate_after_fit(
                job, gate_sequences, data=other, plan=summary["plan"], device=device_of(PartialState()), say=say
            )
            if gates is not None:
                summary["gates"] = {name: gates[name] for name in ("rows", "tokens", "quantile", "kl")}
        typer.echo(json.dumps(summary, ensure_ascii=False) if as_json else summary_text(summary))


__all__ = ["fit", "parse_settings", "parse_size"]
