"""From source content and a target to a fitted mapper: the passes, merges, selections and solves of a run.

Every process saves its own moments, before they are merged; merging again after an interruption gives the same sums. A
block of target layers is done when its parts are there.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..mappers.base import FitContext, FitData
from ..mappers.config import FitConfig
from ..modeling_kvbridge import KVBridgeMapper
from .accumulate import Contents, ModelFacts, SensitivityAccumulator, StatisticsAccumulator, new_statistics
from .driver import check_enough, fit_and_distill, statistics_device
from .memory_plan import MemoryPlan
from .metrics import MetricsAccumulator, OutputMetrics
from .parts import assemble, fit_part, has_part, is_divisible, of_target_layers, part_folder, save_part
from .passes import PassRunner
from .processes import Processes, divide, merge_moments, merge_statistics
from .repair_fit import fit_repair
from .selection import Selection, select
from .statistics import CalibrationStatistics
from .storage import write_atomically
from .traces import TracedModel
from .weighting import SensitivityMoments

BAD_NAME = "bad_sequences.json"


@dataclass
class Fitting:
    """The part of a run in which the target is in memory.

    Attributes:
        config (`FitConfig`): Settings, with `top_k` as a number.
        plan (`MemoryPlan`): Blocks of target layers.
        processes (`Processes`): They share sequences and target layers.
        passes (`PassRunner`): Runs this process's share.
        folder (`Path`): State of all processes; `work_folder` is this process's own.
        source, facts (`ModelFacts`): Of source and target.
        contents (`Contents`): The source's content.
        target (`TracedModel`): The target.
        info (`Mapping`): Facts of tokenizer and data for the provenance.
        pair (`FitData`, *optional*): Both models, the data and the lookups, for what needs them.
    """

    config: FitConfig
    plan: MemoryPlan
    processes: Processes
    passes: PassRunner
    folder: Path
    work_folder: Path
    source: ModelFacts
    facts: ModelFacts
    contents: Contents
    target: TracedModel
    info: Mapping[str, Any]
    pair: FitData | None = None

    def run(self) -> KVBridgeMapper | None:
        """Fit all target layers.

        Returns:
            The mapper, in the main process; None in the others.
        """
        metrics = self._metrics() if self.config.metric == "query" else None
        if not is_divisible(self.config):
            return self._fit_whole(metrics)
        folders = []
        for number, block in enumerate(self.plan.blocks):
            inner = divide(block, max(1, self.plan.sensitivity_blocks))
            wanted = [
                part_folder(self.folder / "parts", share[0], share[-1] + 1)
                for layers in inner
                for share in divide(layers, self.processes.count)
                if share
            ]
            folders += wanted
            if not self.processes.on_main(partial(_all_there, wanted)):
                self._fit_block(number, block, inner, metrics)
        self.processes.wait()
        started = time.monotonic()
        mapper = assemble(folders, self.facts.geometry) if self.processes.is_main else None
        self.passes.progress.note("assembly", started)
        if self.pair is not None:
            self.processes.on_main(partial(self._fit_repair, mapper))
        return mapper

    def _fit_repair(self, mapper: KVBridgeMapper | None) -> None:
        """What both models do in the main process with the whole mapper in front of them; the others wait."""
        assert mapper is not None
        started = time.monotonic()
        fit_repair(mapper, self.config, self.pair)
        self.passes.progress.note("repair", started)

    # ---- what is fitted from ----------------------------------------------------------------------------------------

    def _statistics(self, number: int, layers: list[int]) -> CalibrationStatistics:
        """Merged statistics of a block of target layers."""
        block = (layers[0], layers[-1] + 1)
        device = statistics_device(self.target)
        statistics = new_statistics(self.source, self.facts, self.config, block, device=device, info=self.info)
        accumulator = StatisticsAccumulator(statistics, self.contents, self.target, self.config, block)
        self.passes.run("statistics", accumulator, self.work_folder / f"statistics-{number:04d}")
        started = time.monotonic()
        merge_statistics(statistics, self.processes)
        self.passes.progress.note("merging", started)
        check_enough(statistics, self.config)
        return statistics

    def _selection(self, layers: list[int], statistics: CalibrationStatistics) -> Selection:
        """Source layers of some target layers, whose statistics these are; each process chooses for its share."""
        mine = self.processes.share(layers)
        own = None if not mine else of_target_layers(statistics, mine[0] - layers[0], mine[-1] + 1 - layers[0])
        started = time.monotonic()
        found = self.processes.gather(self.processes.together(partial(_select, own, self.config)))
        self.passes.progress.note("selection", started)
        return _join([part for part in found if part is not None])

    def _sensitivity(
        self, name: str, layers: list[int], statistics: CalibrationStatistics, selection: Selection
    ) -> SensitivityMoments:
        """Merged sensitivity moments of some target layers."""
        moments = SensitivityMoments(
            statistics.layout,
            selection,
            self.config.support,
            statistics_device(self.target),
            statistics.train.products,
        )
        block = (layers[0], layers[-1] + 1)
        accumulator = SensitivityAccumulator(moments, self.contents, self.target, self.config, block)
        self.passes.run("sensitivity", accumulator, self.work_folder / f"sensitivity-{name}")
        started = time.monotonic()
        for part in moments.moments:
            merge_moments(part, self.processes)
        self.passes.progress.note("merging", started)
        return moments

    def _metrics(self) -> OutputMetrics:
        """Merged metrics of all target layers; one pass of the target alone."""
        accumulator = MetricsAccumulator(self.target, self.config)
        self.passes.run("metrics", accumulator, self.work_folder / "metrics")
        self.processes.sum_(accumulator.keys)
        return self.processes.together(accumulator.result)

    # ---- fits -------------------------------------------------------------------------------------------------------

    def _fit_block(
        self, number: int, layers: list[int], inner: list[list[int]], metrics: OutputMetrics | None
    ) -> None:
        """Fit and save a block of target layers, every process its share."""
        statistics = self._statistics(number, layers)
        for place, sub in enumerate(inner):
            part = of_target_layers(statistics, sub[0] - layers[0], sub[-1] + 1 - layers[0])
            selection = self._selection(sub, part)
            sensitivity = None
            if self.config.weighting == "sensitivity":
                sensitivity = self._sensitivity(f"{number:04d}-{place:04d}", sub, part, selection)
            self.passes.settings.stop.check()
            started = time.monotonic()
            context = FitContext(part, self.config, selection, sensitivity, metrics)
            self.processes.together(partial(self._solve, sub, context))
            self.passes.progress.note("solving", started)
            self.passes.settings.stop.check()
        self._note_bad()
        for name in (f"statistics-{number:04d}", f"sensitivity-{number:04d}-*"):
            for folder in self.work_folder.glob(name):
                shutil.rmtree(folder)

    def _solve(self, layers: list[int], context: FitContext) -> None:
        """Fit and save those of the target layers that are this process's share; there may be none."""
        mine = self.processes.share(layers)
        if mine:
            first, last = mine[0], mine[-1] + 1
            mapper = fit_part(context, first - layers[0], last - layers[0], layers[0])
            save_part(part_folder(self.folder / "parts", first, last), mapper)

    def _fit_whole(self, metrics: OutputMetrics | None) -> KVBridgeMapper | None:
        """A method that needs all target layers at once: the passes are shared, the main process fits."""
        layers = list(range(self.facts.geometry.num_layers))
        statistics = self._statistics(0, layers)
        selection = self._selection(layers, statistics)
        sensitivity = None
        if self.config.weighting == "sensitivity":
            sensitivity = self._sensitivity("0000-0000", layers, statistics, selection)
        self._note_bad()
        self.passes.settings.stop.check()
        started = time.monotonic()
        found: list[KVBridgeMapper] = []

        def fit() -> None:
            context = FitContext(statistics, self.config, selection, sensitivity, metrics, self.pair)
            found.append(fit_and_distill(context, self.folder / "distillation"))

        self.processes.on_main(fit)
        self.passes.progress.note("solving", started)
        return found[0] if found else None

    def _note_bad(self) -> None:
        """Keep the list of sequences left out in a block, whose states are removed now; all processes wait here."""
        path = self.folder / BAD_NAME
        found = self.processes.gather(self.passes.bad)

        def write() -> None:
            known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            for bad in found:
                known.update({str(number): message for number, message in bad.items()})
            write_atomically(path, json.dumps(known, indent=2) + "\n")

        self.processes.on_main(write)


def bad_sequences(folder: Path) -> list[int]:
    """Numbers of the sequences that were left out because of NaN or Inf."""
    path = folder / BAD_NAME
    return sorted(map(int, json.loads(path.read_text(encoding="utf-8")))) if path.exists() else []


def _select(statistics: CalibrationStatistics | None, config: FitConfig) -> Selection | None:
    with torch.no_grad():
        return None if statistics is None else select(statistics, config)


def _join(parts: list[Selection]) -> Selection:
    """The selections of consecutive target layers as one."""
    heads = None
    if parts[0].heads is not None:
        heads = [row for part in parts for row in part.heads or []]
    layers = [row for part in parts for row in part.layers]
    return Selection(layers, heads, torch.cat([part.scores.cpu() for part in parts]), parts[0].scored_on)


def _all_there(folders: list[Path]) -> bool:
    return all(has_part(folder) for folder in folders)


__all__ = ["Fitting", "bad_sequences"]
