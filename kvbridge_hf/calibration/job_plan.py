"""Which plan a job runs by: from its settings, the memory that is free, and the state that is there."""

from __future__ import annotations

import psutil
import torch

from ..errors import CalibrationError, FitConfigError
from ..mappers.config import FitConfig
from .job import CalibrationJob, read_identity
from .memory_plan import MemoryPlan, choose_plan, free_memory, make_plan
from .model_size import ModelSize, Workload
from .parts import is_divisible, learns_choice, needs_data, needs_pair
from .processes import Processes

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_divisible(job: CalibrationJob, config: FitConfig, processes: Processes) -> None:
    """Refuse a plan or a number of processes that the settings do not allow.

    Raises:
        FitConfigError: says what to change.
        CalibrationError: likewise.
    """
    if job.device_map is not None and processes.count > 1:
        raise CalibrationError(
            f"--device-map {job.device_map} spreads the models of one process over all devices, and there are "
            f"{processes.count} processes. Start one process, or leave --device-map out."
        )
    _check_lookups(job, config)
    _check_repair_layers(job, config)
    if needs_data(config) and (processes.count > 1 or job.plan in ("b", "c")):
        what = "distillation" if config.distillation is not None else f"method={config.method!r}"
        raise FitConfigError(
            f"{what} needs all target layers and the data in one process: run it with one process and --plan a, or "
            "fit the closed form here and go on from it."
        )
    if not is_divisible(config) and (job.plan == "b" or (job.target_blocks or 1) > 1):
        what = f"method={config.method!r}" if config.method != "ridge" else "layer_budget"
        raise FitConfigError(f"{what} needs all target layers at once: use --plan a, or --plan c with one block.")


def _check_repair_layers(job: CalibrationJob, config: FitConfig) -> None:
    if config.repair_layers == "auto" and job.plan == "c":
        raise FitConfigError(
            "repair_layers='auto' runs both models, and plan c never has both in memory: use --plan a or b, or say "
            "--set repair_layers=NUMBER."
        )


def _check_lookups(job: CalibrationJob, config: FitConfig) -> None:
    asks = config.distillation is not None and config.distillation.lookup_fraction > 0
    if job.lookups is None and asks:
        assert config.distillation is not None
        raise FitConfigError(
            f"lookup_fraction={config.distillation.lookup_fraction} trains on texts with questions: give them with "
            "--lookups, or leave it out."
        )
    if job.lookups is None:
        return
    if not asks and not learns_choice(config):
        raise FitConfigError(
            f"--lookups {job.lookups}: nothing in these settings learns from questions. Use --preset quality or "
            "--set repair=learned, or leave --lookups out."
        )
    if job.plan == "c":
        raise FitConfigError(
            "Both models read the texts of --lookups, and plan c never has both in memory: use --plan a or b, or "
            "leave --lookups out and call calibration.repair_scorer.fit_repair_scorer where both fit."
        )


def plan_job(
    job: CalibrationJob,
    config: FitConfig,
    sizes: tuple[ModelSize, ModelSize],
    processes: Processes,
    own_bytes: int = 2,
) -> MemoryPlan:
    """The plan of a job: the one that its state was made by, or the cheapest that fits.

    Args:
        job: Of the run.
        config: Its fit, with `top_k` as a number.
        sizes: Source and target.
        processes: Those of the run.
        own_bytes: Bytes of a weight in the checkpoints' own dtype.

    Raises:
        CalibrationError: nothing fits; says what the smallest plan needs.
    """
    device = processes.device
    base = psutil.Process().memory_info().rss if device.type == "cpu" else 0
    work = Workload(
        job.data.num_sequences,
        job.data.sequence_length,
        job.batch_size,
        config.token_stride,
        config.num_sinks,
        _weight_bytes(job, device, own_bytes),
        processes.count,
    )
    both = needs_pair(config, job.lookups is not None)
    budget, wanted = job.memory_budget, "a" if needs_data(config) else job.plan
    if budget is None and wanted == "auto":
        existing = read_identity(job.state_folder)
        if existing is not None and "plan" in existing and not (both and existing["plan"]["plan"] == "c"):
            # What is free changes from run to run; the plan of a run that goes on does not.
            name, blocks = existing["plan"]["plan"], len(existing["plan"]["blocks"])
            inner = max(1, existing["plan"]["sensitivity_blocks"])
            return make_plan(name, blocks, *sizes, config, work, inner, base)
        budget = free_memory(device)
        if budget is not None and device.type == "cpu":
            budget = budget // processes.count + base
    divisible = is_divisible(config)
    return choose_plan(*sizes, config, work, budget, wanted, job.target_blocks, base, divisible, both)


def _weight_bytes(job: CalibrationJob, device: torch.device, own_bytes: int) -> int:
    """Bytes of a model's weight as `loading` loads it."""
    if job.quantization is not None:
        return 1
    if job.dtype == "auto":
        return 4 if device.type == "cpu" and job.device_map is None else own_bytes
    return _DTYPE_BYTES[job.dtype]


def own_bytes_of(*configs: object) -> int:
    """Bytes of a weight in the configs' own dtypes, the largest of them; 2 where they do not say."""
    names = [str(getattr(config, "dtype", None)).removeprefix("torch.") for config in configs]
    return max(_DTYPE_BYTES.get(name, 2) for name in names)


__all__ = ["check_divisible", "own_bytes_of", "plan_job"]
