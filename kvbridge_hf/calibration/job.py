"""What a calibration run is asked for, and what it must find unchanged to go on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..errors import ArtifactError, CalibrationError
from ..mappers.config import FitConfig
from .data import DataConfig
from .storage import write_atomically

IDENTITY_NAME = "identity.json"
LIBRARIES = ("torch", "transformers", "accelerate", "kvbridge_hf")
# How a run goes, not what comes out of it; and what stands in its identity by its content.
FREE = ("output", "checkpoint_every", "restart", "report_to", "memory_budget", "plan", "target_blocks", "fit", "data")
IN_IDENTITY = ("lookups",)


@dataclass
class CalibrationJob:
    """One run of `kvbridge fit` or `scripts/calibrate.py`.

    Attributes:
        source, target (`str`): Folders or Hub ids; `source_revision`, `target_revision` pin the latter.
        output (`Path`): Folder of the mapper; `.calibration` in it holds the state.
        data (`DataConfig`): The tokens.
        fit (`FitConfig`): The fit.
        tokenizer (`str`, *optional*): Where the tokenizer is; the target's by default.
        batch_size (`int`): Sequences of one forward.
        dtype (`str`): Of the models; `"auto"` is their own, float32 on a CPU.
        device_map (`str`, *optional*): For Accelerate's big-model loading, `"auto"`.
        quantization (`str`, *optional*): `"4bit"` or `"8bit"`, through bitsandbytes.
        plan (`str`): `"auto"`, `"a"`, `"b"` or `"c"`; see `memory_plan`.
        target_blocks (`int`, *optional*): Blocks of target layers in plans b and c.
        memory_budget (`int`, *optional*): Bytes of one process; what is free by default.
        checkpoint_every (`int`): Batches between saved states.
        max_bad_sequences (`int`): Sequences with NaN or Inf that are left out, for each process and pass.
        restart (`bool`): Throw away the state that is there.
        report_to (`str`, *optional*): A tracker that Accelerate knows, such as `"trackio"`.
        lookups (`Path`, *optional*): Texts with questions, for what learns from such; see `lookups`.
    """

    source: str
    target: str
    output: Path
    data: DataConfig
    fit: FitConfig
    source_revision: str | None = None
    target_revision: str | None = None
    tokenizer: str | None = None
    batch_size: int = 8
    dtype: str = "auto"
    device_map: str | None = None
    quantization: str | None = None
    plan: str = "auto"
    target_blocks: int | None = None
    memory_budget: int | None = None
    checkpoint_every: int = 50
    max_bad_sequences: int = 10
    restart: bool = False
    report_to: str | None = None
    lookups: Path | None = None

    def __post_init__(self):
        self.output = Path(self.output)
        self.lookups = None if self.lookups is None else Path(self.lookups)
        if self.plan not in ("auto", "a", "b", "c"):
            raise CalibrationError(f"plan must be auto, a, b or c, got {self.plan!r}.")
        if self.quantization not in (None, "4bit", "8bit"):
            raise CalibrationError(f"quantization must be 4bit or 8bit, got {self.quantization!r}.")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise CalibrationError(f"dtype must be auto, float32, bfloat16 or float16, got {self.dtype!r}.")
        for name, least in (("batch_size", 1), ("checkpoint_every", 1), ("max_bad_sequences", 0)):
            if getattr(self, name) < least:
                raise CalibrationError(f"{name} must be at least {least}, got {getattr(self, name)}.")

    @property
    def state_folder(self) -> Path:
        return self.output / ".calibration"

    def settings(self) -> dict[str, Any]:
        """All that decides the mapper, as JSON types."""
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in FREE + IN_IDENTITY}
        return json.loads(json.dumps({**own, "data": self.data.to_dict(), "fit": self.fit.to_dict()}))


@dataclass
class Identity:
    """What a state belongs to.

    Attributes:
        facts (`dict`): Settings, fingerprints, data, plan, processes and libraries; JSON types.
    """

    facts: dict[str, Any] = field(default_factory=dict)

    def check(self, found: dict[str, Any], folder: Path) -> None:
        """Compare with those of a state.

        Raises:
            CalibrationError: names all that differs.
        """
        names = self.facts.keys() & found.keys()
        changes = [change for name in sorted(names) for change in differences(found[name], self.facts[name], name)]
        if changes:
            raise CalibrationError(
                f"The calibration in {folder} was started with other settings and cannot go on: {'; '.join(changes)}. "
                "Use the old ones, another output folder, or --restart to begin again."
            )


def differences(before: Any, after: Any, name: str) -> list[str]:
    """`name: before -> after` for every leaf that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        found = []
        for key in sorted(before.keys() | after.keys()):
            found += differences(before.get(key), after.get(key), f"{name}.{key}")
        return found
    return [] if before == after else [f"{name}: {before!r} -> {after!r}"]


def read_identity(folder: Path) -> dict[str, Any] | None:
    """The identity of the state in a folder; None if there is none.

    Raises:
        ArtifactError: it is damaged.
    """
    path = folder / IDENTITY_NAME
    if not path.exists():
        return None
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(facts, dict)
        return facts
    except (ValueError, AssertionError) as error:
        raise ArtifactError(f"{path} is damaged ({error}); begin again with --restart.") from error


def write_identity(folder: Path, facts: dict[str, Any]) -> None:
    write_atomically(folder / IDENTITY_NAME, json.dumps(facts, indent=2, sort_keys=True) + "\n")


def library_majors() -> dict[str, str]:
    """Major versions of the libraries that shape the numbers."""
    majors = {}
    for name in LIBRARIES:
        try:
            found = torch.__version__ if name == "torch" else version(name)
        except PackageNotFoundError:
            from .. import __version__ as found
        majors[name] = str(found).split(".")[0]
    return majors


__all__ = ["CalibrationJob", "Identity", "differences", "library_majors", "read_identity", "write_identity"]
