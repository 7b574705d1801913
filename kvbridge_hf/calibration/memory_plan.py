"""How a calibration fits into memory: all target layers at once, in blocks, or with the source's content on disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ..errors import CalibrationError
from ..geometry import KVGeometry
from ..mappers.config import FitConfig
from .accumulate import statistics_support
from .layout import KINDS, StatisticsLayout, identity_blocks
from .model_size import ModelSize, Workload
from .moments import CHUNK_BYTES
from .processes import divide

PLANS = ("a", "b", "c")
DESCRIPTIONS = {
    "a": "all target layers in one pass",
    "b": "blocks of target layers, a pass each",
    "c": "the source's content on disk first, then the target",
}
FLOAT64 = 8
# Metrics of keys and values, and what adding them up holds beside them.
METRIC_COPIES = 4
# Moments of one target layer at a solve: fitted, held out, the system, its factor, and both again in LAPACK's order.
SOLVE_COPIES = 6


@dataclass(frozen=True)
class MemoryPlan:
    """One way to run a calibration.

    Attributes:
        plan (`str`): `"a"`, `"b"` or `"c"`.
        blocks (`list[list[int]]`): Target layers of each pass.
        sensitivity_blocks (`int`): Passes for sensitivity weights within each block; 0 with uniform weights.
        passes (`int`): Times that the data are read by the target.
        parts (`dict[str, int]`): Bytes of each thing in memory at the peak, in one process.
        disk (`int`): Bytes written, besides the mapper.
        artifact (`int`): Bytes of the mapper.
        flops (`float`): Of the forwards and the statistics, over all passes.
    """

    plan: str
    blocks: list[list[int]]
    sensitivity_blocks: int
    passes: int
    parts: dict[str, int] = field(default_factory=dict)
    disk: int = 0
    artifact: int = 0
    flops: float = 0.0

    @property
    def peak(self) -> int:
        """Bytes of one process at its peak, on the host without an accelerator."""
        return sum(self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "peak": self.peak}

    def identity(self) -> dict[str, Any]:
        """What decides which state a run has."""
        return {
            "plan": self.plan,
            "blocks": [len(block) for block in self.blocks],
            "sensitivity_blocks": self.sensitivity_blocks,
        }

    def describe(self) -> str:
        """One line for a terminal."""
        parts = ", ".join(f"{name} {gib(size)}" for name, size in self.parts.items() if size)
        blocks = f", {len(self.blocks)} blocks of target layers" if len(self.blocks) > 1 else ""
        return (
            f"Plan {self.plan} ({DESCRIPTIONS[self.plan]}{blocks}): {self.passes} passes, peak {gib(self.peak)} a "
            f"process ({parts}); disk {gib(self.disk)}, mapper {gib(self.artifact)}, {self.flops:.2e} FLOPs."
        )


def gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def make_plan(
    name: str,
    num_blocks: int,
    source: ModelSize,
    target: ModelSize,
    config: FitConfig,
    work: Workload,
    sensitivity_blocks: int = 1,
    base: int = 0,
) -> MemoryPlan:
    """A plan with its figures.

    Args:
        name: `"a"`, `"b"` or `"c"`.
        num_blocks: Blocks of target layers; 1 for plan a.
        source, target: The pair.
        config: Settings of the fit, with `top_k` as a number.
        work: What is run.
        sensitivity_blocks: Passes for sensitivity weights within a block.
        base: Bytes that the process holds before anything is loaded.
    """
    blocks = divide(list(range(target.geometry.num_layers)), num_blocks)
    layers = max(len(block) for block in blocks)
    layout = StatisticsLayout.from_geometries(statistics_support(config), source.geometry, target.geometry)
    layout = replace(layout, target_layers=layers)
    sensitive = config.weighting == "sensitivity"
    models = work.weight_bytes * (
        max(source.parameters, target.parameters) if name == "c" else source.parameters + target.parameters
    )
    parts = {
        "process": base,
        "models": models,
        "statistics": 2 * layout.num_bytes,
        "sensitivity": _sensitivity_bytes(layout, config, -(-layers // max(1, sensitivity_blocks)))
        if sensitive
        else 0,
        "metrics": METRIC_COPIES * FLOAT64 * target.geometry.num_layers * layout.target_heads * layout.target_dim**2
        if config.metric == "query"
        else 0,
        "working": max(_batch_bytes(source, target, layout, work, name), _solve_bytes(layout, config)),
    }
    with_source = len(blocks) * (1 + (sensitivity_blocks if sensitive else 0))
    passes = with_source + (config.metric == "query")
    kept = work.sequences * work.kept_tokens
    disk = 2 * parts["statistics"] * work.processes + 4 * work.sequences * work.sequence_length
    if name == "c":
        width = source.geometry.num_layers * source.geometry.num_kv_heads * source.geometry.head_dim
        disk += 4 * len(KINDS) * width * kept
    read = work.sequences * work.sequence_length
    source_reads = 1 if name == "c" else with_source
    forwards = 2.0 * read * (source_reads * source.body_parameters + passes * target.body_parameters)
    moments = sum(
        2.0 * kept * len(KINDS) * len(layout.groups) * layout.features * (layout.features + outputs)
        for outputs in (len(block) * layout.heads_per_group * layout.target_dim for block in blocks)
    )
    return MemoryPlan(
        name,
        blocks,
        sensitivity_blocks if sensitive else 0,
        passes,
        parts,
        disk,
        artifact_bytes(source.geometry, target.geometry, config),
        forwards + moments,
    )


def artifact_bytes(source: KVGeometry, target: KVGeometry, config: FitConfig) -> int:
    """Bytes of a ridge mapper's weights."""
    features = _features(source, target, config)
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[config.dtype]
    return len(KINDS) * target.num_layers * target.num_kv_heads * target.head_dim * (features + 1) * size


def _features(source: KVGeometry, target: KVGeometry, config: FitConfig) -> int:
    """Features of one target head."""
    assert config.top_k is not None
    heads = source.num_kv_heads
    if config.support == "head_local":
        heads = len(identity_blocks(source.num_kv_heads, target.num_kv_heads, config.head_block)[0])
    return config.top_k * heads * source.head_dim


def _sensitivity_bytes(layout: StatisticsLayout, config: FitConfig, layers: int) -> int:
    assert config.top_k is not None
    heads = layout.source_heads
    if config.support == "head_local":
        heads = len(identity_blocks(layout.source_heads, layout.target_heads, config.head_block)[0])
    features = config.top_k * heads * layout.source_dim
    return layers * len(KINDS) * layout.target_heads * FLOAT64 * features * (features + layout.target_dim + 1)


def _batch_bytes(source: ModelSize, target: ModelSize, layout: StatisticsLayout, work: Workload, name: str) -> int:
    """Both contents of a batch, one copy in the order of the statistics, and the products' working memory."""
    tokens = work.batch_size * work.sequence_length
    kept = work.batch_size * work.kept_tokens
    widths = [side.geometry.num_layers * side.geometry.kv_width for side in (source, target)]
    contents = sum(4 * len(KINDS) * width * kept for width in widths)
    rows = len(layout.groups) * (layout.features + layout.outputs)
    products = 3 * min(CHUNK_BYTES, FLOAT64 * rows * kept) + 4 * rows * kept
    caches = max(len(KINDS) * width * tokens * work.weight_bytes for width in widths)
    activations = max(
        work.weight_bytes * tokens * (4 * side.geometry.hidden_size + 3 * side.intermediate_size)
        for side in (source, target)
    )
    return contents + max(products, caches + activations)


def _solve_bytes(layout: StatisticsLayout, config: FitConfig) -> int:
    """Moments of one target layer's regressions (fitted and held out), their factor and their solution."""
    assert config.top_k is not None
    groups = len(layout.groups)
    width = len(layout.groups[0]) * layout.source_dim
    single = len(KINDS) * groups * FLOAT64 * width * (3 * width + 5 * layout.outputs)
    heads = layout.source_heads
    systems = len(KINDS)
    if config.support == "head_local":
        heads = len(identity_blocks(layout.source_heads, layout.target_heads, config.head_block)[0])
        systems = len(KINDS) * (groups if layout.support == "head_local" else layout.target_heads)
    if config.weighting == "sensitivity":  # every head has weights of its own
        systems = len(KINDS) * layout.target_heads
    features = config.top_k * heads * layout.source_dim
    outputs = layout.target_heads * layout.target_dim
    joint = SOLVE_COPIES * FLOAT64 * features * (systems * features + len(KINDS) * outputs)
    return max(single, joint)


def choose_plan(
    source: ModelSize,
    target: ModelSize,
    config: FitConfig,
    work: Workload,
    budget: int | None,
    wanted: str = "auto",
    blocks: int | None = None,
    base: int = 0,
    divisible: bool = True,
    both: bool = False,
) -> MemoryPlan:
    """The plan with the fewest passes that fits.

    Args:
        source, target, config, work, base: As in [`make_plan`].
        budget: Bytes of one process; None takes the first plan that is allowed.
        wanted: `"auto"`, or one of the plans.
        blocks: Blocks of target layers, where the user says so (plans b and c).
        divisible: False where all target layers are fitted together, so that there are no blocks.
        both: Whether both models are needed in memory at once, which rules plan c out.

    Raises:
        CalibrationError: nothing fits; says what the smallest plan needs.
    """
    layers = target.geometry.num_layers
    names = [wanted]
    if wanted == "auto":
        names = [name for name in PLANS if (divisible or name != "b") and not (both and name == "c")]
    smallest: MemoryPlan | None = None
    for name in names:
        counts = [1] if name == "a" else sorted({-(-layers // size) for size in range(1, layers + 1)})
        if name == "b" and len(counts) > 1:
            counts = [count for count in counts if count > 1]
        if blocks is not None and name != "a":
            counts = [min(blocks, layers)]
        elif not divisible:
            counts = [1]
        for count in counts:
            width = -(-layers // count)
            for inner in sorted({-(-width // size) for size in range(1, width + 1)}):
                plan = make_plan(name, count, source, target, config, work, inner, base)
                if smallest is None or plan.peak < smallest.peak:
                    smallest = plan
                if budget is None or plan.peak <= budget:
                    return plan
                if config.weighting != "sensitivity" or not divisible:
                    break
    assert smallest is not None and budget is not None
    raise CalibrationError(
        f"No plan fits into {gib(budget)}: the smallest needs {gib(smallest.peak)} a process. {smallest.describe()} "
        "Use support='head_local', a smaller batch or sequence length, moments of fewer heads, or more memory."
    )


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free where the statistics are kept; None where that cannot be asked."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        import psutil
    except ImportError:
        return None
    return int(psutil.virtual_memory().available)


__all__ = ["MemoryPlan", "choose_plan", "free_memory", "gib", "make_plan"]
