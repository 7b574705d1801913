"""Options that `kvbridge fit` and `kvbridge calibrate-gates` share: the pair, and how its models are loaded."""

from __future__ import annotations

from typing import Annotated

import typer

Source = Annotated[str, typer.Option("--source", help="Source model: folder or Hub id.")]
Target = Annotated[str, typer.Option("--target", help="Target model: folder or Hub id.")]
SourceRevision = Annotated[str | None, typer.Option(help="Hub revision of the source.")]
TargetRevision = Annotated[str | None, typer.Option(help="Hub revision of the target.")]
PairTokenizer = Annotated[str | None, typer.Option(help="Tokenizer of the pair (default: the models').")]
SequenceLength = Annotated[int, typer.Option(min=8, help="Tokens of a sequence.")]
ModelDtype = Annotated[str, typer.Option(help="Of the models: auto, float32, bfloat16 or float16.")]
DeviceMap = Annotated[str | None, typer.Option(help="Spread the models over devices: auto.")]
Quantization = Annotated[str | None, typer.Option(help="Load the models in 4bit or 8bit (bitsandbytes).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

__all__ = [
    "AsJson",
    "DeviceMap",
    "ModelDtype",
    "PairTokenizer",
    "Quantization",
    "SequenceLength",
    "Source",
    "SourceRevision",
    "Target",
    "TargetRevision",
]
