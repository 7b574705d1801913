"""Models for a calibration, on the device of their process."""

from __future__ import annotations

import gc
from typing import Any

import torch
from accelerate.utils import release_memory
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..errors import CalibrationError
from .job import CalibrationJob


def load_config(job: CalibrationJob, role: str) -> Any:
    """Config of the source or the target."""
    name, revision = _where(job, role)
    try:
        return AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        raise CalibrationError(f"The {role} {name!r} cannot be read: {error}") from error


def load_tokenizer(job: CalibrationJob, role: str) -> Any:
    """Tokenizer of the source or the target, or the job's own."""
    name, revision = (job.tokenizer, None) if job.tokenizer is not None else _where(job, role)
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        raise CalibrationError(
            f"The {role} {name!r} has no tokenizer that can be loaded ({error}). Give one with --tokenizer."
        ) from error


def load_model(job: CalibrationJob, role: str, device: torch.device) -> Any:
    """The source or the target, in eval mode."""
    name, revision = _where(job, role)
    dtype: Any = getattr(torch, job.dtype) if job.dtype != "auto" else "auto"
    if job.dtype == "auto" and device.type == "cpu" and job.device_map is None:
        dtype = torch.float32  # 16-bit products are slow on a CPU
    arguments: dict[str, Any] = {"revision": revision, "dtype": dtype}
    if job.quantization is not None:
        from transformers import BitsAndBytesConfig

        arguments["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=job.quantization == "4bit", load_in_8bit=job.quantization == "8bit"
        )
        arguments["device_map"] = job.device_map or {"": device}
    elif job.device_map is not None:
        arguments["device_map"] = job.device_map
    try:
        model = AutoModelForCausalLM.from_pretrained(name, **arguments)
    except (OSError, ValueError, ImportError) as error:
        raise CalibrationError(f"The {role} {name!r} cannot be loaded: {error}") from error
    if "device_map" not in arguments:
        model.to(device=device)  # type: ignore[call-arg]
    return model.eval()


def unload(*models: Any) -> None:
    """Give back what is freed once the caller has dropped its models."""
    release_memory(*models)
    gc.collect()


def _where(job: CalibrationJob, role: str) -> tuple[str, str | None]:
    return (job.source, job.source_revision) if role == "source" else (job.target, job.target_revision)


__all__ = ["load_config", "load_model", "load_tokenizer", "unload"]
