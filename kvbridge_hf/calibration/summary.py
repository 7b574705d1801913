"""What a finished calibration says of itself: a file of facts, and the same for a terminal."""

from __future__ import annotations

import json
import time
from typing import Any

import psutil
import torch

from ..modeling_kvbridge import KVBridgeMapper
from .job import CalibrationJob
from .memory_plan import MemoryPlan
from .processes import Processes
from .storage import write_atomically

SUMMARY_NAME = "summary.json"


def read_summary(job: CalibrationJob) -> dict[str, Any] | None:
    """The summary of a run that was complete already, whose mapper is there and whole; None if it was not."""
    path = job.state_folder / SUMMARY_NAME
    if not path.exists():
        return None
    KVBridgeMapper.from_pretrained(job.output)
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return summary


def write_summary(
    job: CalibrationJob,
    plan: MemoryPlan,
    mapper: KVBridgeMapper,
    processes: Processes,
    seconds: dict[str, float],
    began: float,
) -> dict[str, Any]:
    """Write the summary of a run.

    Args:
        job, plan, mapper, processes: What was done, and what came of it.
        seconds: Of each part.
        began: Of the whole, by the monotonic clock.
    """
    fit = mapper.config.fit
    summary = {
        "output": str(job.output),
        "plan": plan.plan,
        "passes": plan.passes,
        "processes": processes.count,
        "parameters": sum(parameter.numel() for parameter in mapper.parameters()),
        "support": mapper.config.support,
        "top_k": mapper.config.top_k,
        "sequences": fit.get("sequences"),
        "heldout_sequences": fit.get("heldout_sequences"),
        "bad_sequences": fit.get("bad_sequences", []),
        "input_tokens": fit.get("input_tokens"),
        "tokens": fit.get("tokens"),
        "heldout_tokens": fit.get("heldout_tokens"),
        "selected_layers": mapper.config.selected_layers,
        "r2": fit.get("r2"),
        "heldout_r2": fit.get("heldout_r2"),
        "seconds": {
            **{name: round(value, 3) for name, value in seconds.items()},
            "total": round(time.monotonic() - began, 3),
        },
        "peak_memory": peak_memory(processes.device),
        "planned_memory": plan.peak,
    }
    write_atomically(job.state_folder / SUMMARY_NAME, json.dumps(summary, indent=2) + "\n")
    return summary


def peak_memory(device: torch.device) -> dict[str, int]:
    """Largest resident memory of this process so far, and what was allocated on its device; bytes."""
    found = {}
    try:
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found["host"] = int(peak if sys.platform == "darwin" else peak * 1024)
    except ImportError:  # Windows
        found["host"] = int(psutil.Process().memory_info().peak_wset)
    if device.type == "cuda":
        found["device"] = int(torch.cuda.max_memory_allocated(device))
    return found


def mean_r2(scores: dict[str, list[float]]) -> dict[str, float]:
    """R^2 of keys and of values, mean over the target layers."""
    return {kind: sum(layers) / len(layers) for kind, layers in scores.items()}


def summary_text(summary: dict[str, Any]) -> str:
    """The summary for a terminal."""

    def scores(name: str) -> str:
        if summary[name] is None:
            return "none"
        return ", ".join(f"{kind} {value:.4f}" for kind, value in mean_r2(summary[name]).items())

    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in summary["seconds"].items())
    memory = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in summary["peak_memory"].items())
    lines = [
        f"Mapper in {summary['output']}: {summary['parameters']:,} parameters, {summary['support']}, "
        f"top_k={summary['top_k']}.",
        f"Fitted on {summary['tokens']:,} tokens of {summary['sequences']} sequences; held out "
        f"{summary['heldout_tokens']:,} tokens of {summary['heldout_sequences']}.",
        f"R^2, mean over target layers: {scores('r2')}; held out: {scores('heldout_r2')}.",
        "Source layers of each target layer, best first:",
        *(f"  {layer:>3}: {' '.join(map(str, row))}" for layer, row in enumerate(summary["selected_layers"])),
        f"Plan {summary['plan']}, passes: {summary['passes']}, processes: {summary['processes']}. Time: {seconds}. "
        f"Peak memory: {memory}; planned: {summary['planned_memory'] / 2**20:.0f} MiB.",
    ]
    if summary["bad_sequences"]:
        lines.append(f"Left out because of NaN or Inf: sequences {', '.join(map(str, summary['bad_sequences']))}.")
    return "\n".join(lines)


__all__ = ["mean_r2", "peak_memory", "read_summary", "summary_text", "write_summary"]
