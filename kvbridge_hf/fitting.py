"""Fit a mapper from files: what `kvbridge fit` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from .demo import load_model
from .errors import CalibrationError


def read_column(path: Path, column: str, limit: int | None = None) -> list[str]:
    """Texts of a `.jsonl` file (one column of each object) or a `.txt` file (one text a line).

    Raises:
        CalibrationError: the file is of another kind, a line is not an object with that column, or there is no text.
    """
    texts: list[str] = []
    if path.suffix not in (".jsonl", ".txt"):
        raise CalibrationError(f"{path} is neither .jsonl nor .txt; convert it, one text a line.")
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if limit is not None and len(texts) >= limit:
                break
            if not line.strip():
                continue
            if path.suffix == ".txt":
                texts.append(line.rstrip("\n"))
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise CalibrationError(f"{path}, line {number} is not JSON: {error}.") from error
            if not isinstance(row, dict) or not isinstance(row.get(column), str):
                there = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise CalibrationError(f"{path}, line {number} has no text in column {column!r}; it has: {there}.")
            texts.append(row[column])
    if not texts:
        raise CalibrationError(f"{path} holds no text.")
    return texts


def fit_from_files(
    source: str,
    target: str,
    dataset: str,
    output: Path,
    *,
    preset: str = "default",
    overrides: dict[str, Any] | None = None,
    text_column: str = "text",
    num_sequences: int | None = None,
    sequence_length: int = 512,
    batch_size: int = 8,
) -> dict[str, Any]:
    """Fit a mapper for two models on a text file and save it; returns a summary of what was fitted."""
    from .calibration.driver import fit_mapper
    from .mappers.config import FitConfig

    config = FitConfig.preset(preset, **(overrides or {}))
    path = Path(dataset)
    if not path.is_file():
        raise CalibrationError(f"There is no file {dataset!r}; give a .jsonl or .txt file.")
    texts = read_column(path, text_column, num_sequences)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    source_model, target_model = load_model(source), load_model(target)
    texts.sort(key=len)
    batches = [
        tokenizer(
            texts[start : start + batch_size],
            return_tensors="pt",
            padding=True,
            truncation=True,
            max_length=sequence_length,
            return_token_type_ids=False,
        )
        for start in range(0, len(texts), batch_size)
    ]
    mapper = fit_mapper(
        source_model,
        target_model,
        batches,
        config,
        tokenizer=tokenizer,
        dataset={"file": path.name, "texts": len(texts)},
    )
    mapper.save_pretrained(output)
    provenance = mapper.config.fit
    return {
        "output": str(output),
        "parameters": sum(parameter.numel() for parameter in mapper.parameters()),
        "support": mapper.config.support,
        "top_k": mapper.config.top_k,
        "selected_layers": mapper.config.selected_layers,
        "tokens": provenance.get("tokens"),
        "r2": provenance.get("r2"),
        "heldout_r2": provenance.get("heldout_r2"),
    }
