"""A whole calibration: from names of models and datasets to a mapper in a folder, resumable at every step.

The state lies in `.calibration` of the output folder:

    identity.json       what the state belongs to
    data/               the sequences (see `sequences`)
    process-*/          each process's unmerged moments and, in plan c, the source's content
    parts/              fitted target layers
    bad_sequences.json  those left out because of NaN or Inf
    summary.json        of a finished run

Every process saves its own moments, before they are merged; merging again after an interruption gives the same sums. A
block of target layers is done when its parts are there.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from safetensors import SafetensorError

from ..errors import ArtifactError, CalibrationError, FitConfigError
from ..fingerprint import tokenizer_fingerprint
from ..geometry import check_pair
from ..mappers.config import FitConfig
from ..modeling_kvbridge import KVBridgeMapper
from .accumulate import (
    Contents,
    ModelFacts,
    SensitivityAccumulator,
    StatisticsAccumulator,
    new_statistics,
)
from .content_store import ContentAccumulator, ContentStore
from .data import source_identity
from .driver import check_enough, statistics_device
from .interruption import FolderLock, StopRequest
from .job import CalibrationJob, Identity, library_majors, read_identity, write_identity
from .loading import load_config, load_model, load_tokenizer, unload
from .memory_plan import MemoryPlan, ModelSize, Workload, choose_plan, free_memory, make_plan
from .parts import assemble, fit_part, has_part, is_divisible, of_target_layers, part_folder, save_part
from .passes import Accumulator, Pass, PassSettings
from .processes import Processes, divide, merge_moments, merge_statistics
from .progress import Progress
from .selection import Selection, select
from .sequences import SequenceStore, write_sequences
from .statistics import CalibrationStatistics
from .storage import write_atomically
from .traces import TracedModel
from .weighting import SensitivityMoments

logger = logging.getLogger(__name__)

SUMMARY_NAME = "summary.json"
BAD_NAME = "bad_sequences.json"
# Processes wait for the slowest one at the end of a pass, and a pass may take days.
PATIENCE = timedelta(days=30)


def run_calibration(job: CalibrationJob, *, progress: bool = True, say: Any = print) -> dict[str, Any]:
    """Run a calibration, or go on with one that was interrupted.

    Args:
        job: What to do.
        progress: Show bars, on a terminal.
        say: Called with the lines to print, in the main process.

    Returns:
        The summary: `output`, `tokens`, `selected_layers`, `r2`, `heldout_r2`, `seconds`, `peak_memory`, ...

    Raises:
        CalibrationError: the data, the settings or the state do not allow it; says why.
        PairMismatchError: the pair does not fit.
        Interrupted: Ctrl-C or SIGTERM; the state is saved.
    """
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available() and not torch.backends.mps.is_available(),
        log_with=job.report_to,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )
    run = _Run(job, Processes(accelerator), progress, say)
    with StopRequest() as stop:
        try:
            return run.go(stop)
        except (OSError, SafetensorError) as error:
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
                raise CalibrationError(
                    f"The disk of {job.output} is full ({error}). What was saved before is whole: make room and run "
                    "the same command again."
                ) from error
            raise
        except Exception:
            stop.check()  # another process was stopped first and took its connection with it
            raise
        finally:
            run.lock.release()


class _Run:
    def __init__(self, job: CalibrationJob, processes: Processes, show: bool, say: Any):
        self.job, self.processes, self.say = job, processes, say
        self.progress = Progress(processes, show, job.report_to is not None)
        self.lock = FolderLock(job.state_folder / "lock")
        self.device = processes.device
        self.bad: dict[int, str] = {}
        self.began = time.monotonic()

    def tell(self, text: str) -> None:
        if self.processes.is_main:
            self.say(text)

    # ---- order of things ------------------------------------------------------------------------------------------

    def go(self, stop: StopRequest) -> dict[str, Any]:
        job, processes = self.job, self.processes
        processes.on_main(self._open_folder)
        source_config, target_config = load_config(job, "source"), load_config(job, "target")
        self.tokenizer = load_tokenizer(job, "target")
        check_pair(
            source_config,
            target_config,
            source_tokenizer=load_tokenizer(job, "source"),
            target_tokenizer=self.tokenizer,
        ).raise_if_unfit()
        sizes = ModelSize.of(source_config), ModelSize.of(target_config)
        self.config: FitConfig = job.fit.resolve_top_k(sizes[0].geometry.num_layers)
        self._check_divisible()
        self.settings = PassSettings(
            job.batch_size, job.checkpoint_every, job.max_bad_sequences, stop, self.progress.batch
        )
        self.plan = processes.on_main(lambda: self._choose_plan(*sizes))
        self.tell(self.plan.describe())
        identity = Identity(
            {
                "settings": job.settings(),
                "processes": processes.count,
                "plan": self.plan.identity(),
                "libraries": library_majors(),
                "tokenizer": tokenizer_fingerprint(self.tokenizer),
                "datasets": [source_identity(spec) for spec in job.data.datasets],
            }
        )
        processes.on_main(lambda: self._check_identity(identity))
        vocab_size = min(size.geometry.vocab_size for size in sizes)
        started = time.monotonic()
        processes.on_main(lambda: self._prepare_data(vocab_size))
        self.store = processes.together(lambda: SequenceStore(job.state_folder / "data"))
        self.progress.note("data", started)
        self.numbers = self.store.share(job.batch_size, processes.index, processes.count)
        self.work_folder = job.state_folder / f"process-{processes.index:05d}"
        self._tell_data()
        stop.check()
        if job.report_to is not None:
            processes.accelerator.init_trackers("kvbridge-calibration", config={"job": str(job.settings())})

        if self.plan.plan == "c":
            contents: Contents = self._write_contents()
            source = None
        else:
            source = self._load("source")
            contents = TracedModel(source, "source")
            self.source = processes.together(partial(ModelFacts.of, source))
        target = source if self._is_same_model() else self._load("target")
        traced = contents if self._is_same_model() else TracedModel(target, "target")
        self.target = processes.together(partial(ModelFacts.of, target))
        identity.facts.update(source=self.source.fingerprint, target=self.target.fingerprint, data=self.store.digest)
        processes.on_main(lambda: self._settle_identity(identity))
        finished = processes.on_main(self._finished)
        if finished is not None:
            return finished

        mapper = self._fit(contents, traced, source, target)  # type: ignore[arg-type]
        summary = processes.on_main(lambda: self._finish(mapper))
        if job.report_to is not None:
            processes.accelerator.end_training()
        return summary

    def _open_folder(self) -> None:
        folder = self.job.state_folder
        if self.job.output.exists() and not self.job.output.is_dir():
            raise CalibrationError(f"{self.job.output} is a file; the mapper needs a folder.")
        folder.mkdir(parents=True, exist_ok=True)
        self.lock.acquire()
        if self.job.restart:
            for entry in folder.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif entry != self.lock.path:
                    entry.unlink()

    def _is_same_model(self) -> bool:
        job = self.job
        return job.source == job.target and job.source_revision == job.target_revision and self.plan.plan != "c"

    def _check_divisible(self) -> None:
        if is_divisible(self.config):
            return
        what = "distillation" if self.config.distillation is not None else f"method={self.config.method!r}"
        if self.config.method == "ridge" and self.config.distillation is None:
            what = "layer_budget" if self.config.layer_budget is not None else f"metric={self.config.metric!r}"
        if self.processes.count > 1 or self.job.plan in ("b", "c"):
            raise FitConfigError(
                f"{what} needs all target layers and the data in one process: run it with one process and --plan a, "
                "or fit the closed form here and go on from it."
            )

    def _choose_plan(self, source: ModelSize, target: ModelSize) -> MemoryPlan:
        job = self.job
        weight_bytes = {"float32": 4, "auto": 4 if self.device.type == "cpu" else 2}.get(job.dtype, 2)
        if job.quantization is not None:
            weight_bytes = 1
        work = Workload(
            job.data.num_sequences,
            job.data.sequence_length,
            job.batch_size,
            self.config.token_stride,
            self.config.num_sinks,
            weight_bytes,
            self.processes.count,
        )
        base = psutil.Process().memory_info().rss if self.device.type == "cpu" else 0
        budget = job.memory_budget
        wanted = job.plan
        if not is_divisible(self.config):
            wanted = "a"
        if budget is None and wanted == "auto":
            budget = free_memory(self.device)
            if budget is not None and self.device.type == "cpu":
                budget = budget // self.processes.count + base
        existing = read_identity(job.state_folder)
        if existing is not None and job.memory_budget is None and wanted == "auto" and "plan" in existing:
            # What is free changes from run to run; the plan of a run that goes on does not.
            name, blocks = existing["plan"]["plan"], len(existing["plan"]["blocks"])
            inner = max(1, existing["plan"]["sensitivity_blocks"])
            return make_plan(name, blocks, source, target, self.config, work, inner, base)
        limit = budget if wanted == "auto" or job.memory_budget is not None else None
        return choose_plan(source, target, self.config, work, limit, wanted, job.target_blocks, base)

    # ---- identity and data ----------------------------------------------------------------------------------------

    def _check_identity(self, identity: Identity) -> None:
        found = read_identity(self.job.state_folder)
        if found is not None:
            identity.check(found, self.job.output)
        else:
            write_identity(self.job.state_folder, identity.facts)

    def _settle_identity(self, identity: Identity) -> None:
        found = read_identity(self.job.state_folder) or {}
        identity.check(found, self.job.output)
        write_identity(self.job.state_folder, {**found, **identity.facts})

    def _prepare_data(self, vocab_size: int) -> None:
        folder = self.job.state_folder / "data"
        try:
            SequenceStore(folder)
            return
        except ArtifactError as error:
            if folder.exists():
                logger.info("The sequences are read again: %s", error)
        write_sequences(
            folder, self.job.data, self.tokenizer, vocab_size, self.config.num_sinks, self.settings.stop.check
        )

    def _tell_data(self) -> None:
        facts, report, job = self.store.facts, self.store.facts["report"], self.job
        counts = ", ".join(
            f"{value} {name.replace('_', ' ')}" for name, value in report.items() if value and isinstance(value, int)
        )
        self.tell(f"Data: {facts['sequences']} sequences, {facts['tokens']} tokens ({counts}).")
        if facts["sequences"] < job.data.num_sequences:
            self.tell(
                f"The data ended after {facts['sequences']} of {job.data.num_sequences} sequences "
                f"({', '.join(report['exhausted'])})."
            )

    # ---- passes ---------------------------------------------------------------------------------------------------

    def _load(self, role: str) -> Any:
        started = time.monotonic()
        model = self.processes.together(lambda: load_model(self.job, role, self.device))
        self.progress.note("loading", started)
        return model

    def _pass(self, name: str, accumulator: Accumulator, folder: Path | None, numbers: Any = None) -> None:
        numbers = self.numbers if numbers is None else numbers
        self.progress.start(name, int(self.store.lengths[numbers].sum()))
        work = Pass(name, accumulator, self.store, numbers, folder, self.settings)
        try:
            bad = work.run()
        finally:
            self.progress.stop()
        self.bad.update({entry["number"]: entry["message"] for entry in bad})

    def _write_contents(self) -> ContentStore:
        """The first half of plan c; the source is in memory only here."""
        store = ContentStore(self.work_folder / "content")
        store.drop_damaged()
        source = self._load("source")
        self.source = self.processes.together(partial(ModelFacts.of, source))
        traced = TracedModel(source, "source")
        config = self.config
        accumulator = ContentAccumulator(
            store, traced, config.num_sinks, config.token_stride, self.job.max_bad_sequences
        )
        missing = store.missing(self.numbers)
        if len(missing):
            self._pass("source content", accumulator, None, missing)
        accumulator.source = None  # type: ignore[assignment]
        del source, traced
        unload()
        self.processes.wait()
        return store

    def _fit(
        self, contents: Contents, target: TracedModel, source_model: Any, target_model: Any
    ) -> KVBridgeMapper | None:
        """All blocks; the mapper in the main process."""
        if not is_divisible(self.config):
            return self._fit_whole(contents, target, source_model, target_model)
        folders = []
        for number, block in enumerate(self.plan.blocks):
            first, last = block[0], block[-1] + 1
            inner = divide(block, max(1, self.plan.sensitivity_blocks))
            wanted = [
                part_folder(self.job.state_folder / "parts", share[0], share[-1] + 1)
                for layers in inner
                for share in divide(layers, self.processes.count)
                if share
            ]
            folders += wanted
            if not self.processes.on_main(partial(_all_there, wanted)):
                self._fit_block(number, (first, last), inner, contents, target)
        self.processes.wait()
        started = time.monotonic()
        mapper = assemble(folders, self.target.geometry) if self.processes.is_main else None
        self.progress.note("assembly", started)
        return mapper

    def _statistics(
        self, number: int, layers: tuple[int, int], contents: Contents, target: TracedModel
    ) -> CalibrationStatistics:
        """Merged statistics of a block of target layers."""
        statistics = new_statistics(
            self.source,
            self.target,
            self.config,
            layers,
            device=statistics_device(target),
            tokenizer_fingerprint=tokenizer_fingerprint(self.tokenizer),
            dataset=self.store.provenance,
        )
        accumulator = StatisticsAccumulator(statistics, contents, target, self.config, layers)
        self._pass("statistics", accumulator, self.work_folder / f"statistics-{number:04d}")
        started = time.monotonic()
        merge_statistics(statistics, self.processes)
        self.progress.note("merging", started)
        check_enough(statistics, self.config)
        return statistics

    def _fit_block(
        self, number: int, layers: tuple[int, int], inner: list[list[int]], contents: Contents, target: TracedModel
    ) -> None:
        config, processes = self.config, self.processes
        statistics = self._statistics(number, layers, contents, target)
        first = layers[0]
        for place, sub in enumerate(inner):
            mine = processes.share(sub)
            started = time.monotonic()
            own = of_target_layers(statistics, mine[0] - first, mine[-1] + 1 - first) if mine else None
            selection = processes.together(partial(_select, own, config))
            self.progress.note("selection", started)
            moments = None
            if config.weighting == "sensitivity":
                moments = self._sensitivity(f"{number:04d}-{place:04d}", sub, statistics, selection, contents, target)
            self.settings.stop.check()
            started = time.monotonic()
            if moments is not None and mine:
                moments = moments.of_target_layers(mine[0] - sub[0], mine[-1] + 1 - sub[0])
            processes.together(partial(self._solve, mine, own, selection, moments))
            self.progress.note("solving", started)
            self.settings.stop.check()
        self._note_bad()
        for folder in self.work_folder.glob(f"statistics-{number:04d}"):
            shutil.rmtree(folder)
        for folder in self.work_folder.glob(f"sensitivity-{number:04d}-*"):
            shutil.rmtree(folder)

    def _solve(
        self,
        layers: list[int],
        statistics: CalibrationStatistics | None,
        selection: Selection | None,
        moments: SensitivityMoments | None,
    ) -> None:
        """Fit and save the target layers that are this process's share; there may be none."""
        if statistics is not None and selection is not None:
            mapper = fit_part(statistics, self.config, selection, moments)
            save_part(part_folder(self.job.state_folder / "parts", layers[0], layers[-1] + 1), mapper)

    def _sensitivity(
        self,
        name: str,
        layers: list[int],
        statistics: CalibrationStatistics,
        selection: Selection | None,
        contents: Contents,
        target: TracedModel,
    ) -> SensitivityMoments:
        """Merged sensitivity moments of some target layers, whose selections the processes have made."""
        found = [part for part in self.processes.gather(selection) if part is not None]
        joined = Selection(
            [row for part in found for row in part.layers],
            None if found[0].heads is None else [row for part in found for row in part.heads],  # type: ignore[union-attr]
            torch.cat([part.scores for part in found]),
            found[0].scored_on,
        )
        small = of_target_layers(statistics, 0, len(layers)).layout
        products = statistics.train.products
        moments = SensitivityMoments(small, joined, self.config.support, statistics_device(target), products)
        block = (layers[0], layers[-1] + 1)
        accumulator = SensitivityAccumulator(moments, contents, target, self.config, block)
        self._pass("sensitivity", accumulator, self.work_folder / f"sensitivity-{name}")
        started = time.monotonic()
        for part in moments.moments:
            merge_moments(part, self.processes)
        self.progress.note("merging", started)
        return moments

    def _fit_whole(
        self, contents: Contents, target: TracedModel, source_model: Any, target_model: Any
    ) -> KVBridgeMapper:
        """A method that needs all target layers, or the data, at once: one process, plan a."""
        from ..mappers.base import FitData
        from .driver import collect_metrics, fit_from_statistics
        from .sequences import StoredBatches

        config = self.config
        statistics = self._statistics(0, (0, self.target.geometry.num_layers), contents, target)
        batches = StoredBatches(self.store, self.job.batch_size)
        sensitivity = metrics = None
        if config.weighting == "sensitivity":
            selection = _select(statistics, config)
            layers = list(range(self.target.geometry.num_layers))
            sensitivity = self._sensitivity("0000-0000", layers, statistics, selection, contents, target)
        if config.metric == "query":
            metrics = collect_metrics(source_model, target_model, batches, config, progress=self.progress.show)
        started = time.monotonic()
        data = FitData(source_model, target_model, batches, self.progress.show)
        self._note_bad()
        mapper = fit_from_statistics(statistics, config, sensitivity=sensitivity, metrics=metrics, data=data)
        if config.distillation is not None:
            from ..mappers.distillation import distill

            mapper = distill(
                mapper,
                source_model,
                target_model,
                batches,
                config.distillation,
                heldout_fraction=config.heldout_fraction,
                seed=config.seed,
                output_dir=self.job.state_folder / "distillation",
                progress=self.progress.show,
            )
        self.progress.note("solving", started)
        return mapper

    def _note_bad(self) -> None:
        """Keep the list of sequences left out in a block, whose states are removed now; all processes wait here."""
        path = self.job.state_folder / BAD_NAME
        found = self.processes.gather(self.bad)

        def write() -> None:
            known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            for bad in found:
                known.update({str(number): message for number, message in bad.items()})
            write_atomically(path, json.dumps(known, indent=2) + "\n")

        self.processes.on_main(write)

    # ---- the end --------------------------------------------------------------------------------------------------

    def _finished(self) -> dict[str, Any] | None:
        """The summary of a run that was complete already."""
        path = self.job.state_folder / SUMMARY_NAME
        if not path.exists():
            return None
        KVBridgeMapper.from_pretrained(self.job.output)
        self.say(f"The mapper in {self.job.output} is complete; --restart fits it again.")
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return summary

    def _finish(self, mapper: KVBridgeMapper | None) -> dict[str, Any]:
        assert mapper is not None
        job, fit = self.job, mapper.config.fit
        path = job.state_folder / BAD_NAME
        bad = sorted(map(int, json.loads(path.read_text(encoding="utf-8")))) if path.exists() else []
        if bad:
            fit["bad_sequences"] = bad
        mapper.save_pretrained(job.output)
        summary = {
            "output": str(job.output),
            "plan": self.plan.plan,
            "passes": self.plan.passes,
            "processes": self.processes.count,
            "parameters": sum(parameter.numel() for parameter in mapper.parameters()),
            "support": mapper.config.support,
            "top_k": mapper.config.top_k,
            "sequences": fit.get("sequences"),
            "heldout_sequences": fit.get("heldout_sequences"),
            "bad_sequences": bad,
            "input_tokens": fit.get("input_tokens"),
            "tokens": fit.get("tokens"),
            "heldout_tokens": fit.get("heldout_tokens"),
            "selected_layers": mapper.config.selected_layers,
            "r2": fit.get("r2"),
            "heldout_r2": fit.get("heldout_r2"),
            "seconds": {
                **{name: round(value, 3) for name, value in self.progress.seconds.items()},
                "total": round(time.monotonic() - self.began, 3),
            },
            "peak_memory": peak_memory(self.device),
            "planned_memory": self.plan.peak,
        }
        write_atomically(job.state_folder / SUMMARY_NAME, json.dumps(summary, indent=2) + "\n")
        for folder in [*job.state_folder.glob("process-*"), job.state_folder / "parts"]:
            shutil.rmtree(folder, ignore_errors=True)
        return summary


def _select(statistics: CalibrationStatistics | None, config: FitConfig) -> Selection | None:
    with torch.no_grad():
        return None if statistics is None else select(statistics, config)


def _all_there(folders: list[Path]) -> bool:
    return all(has_part(folder) for folder in folders)


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


def summary_text(summary: dict[str, Any]) -> str:
    """The summary for a terminal."""

    def mean(scores: dict[str, list[float]] | None, kind: str) -> str:
        return "none" if scores is None else f"{sum(scores[kind]) / len(scores[kind]):.4f}"

    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in summary["seconds"].items())
    memory = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in summary["peak_memory"].items())
    lines = [
        f"Mapper in {summary['output']}: {summary['parameters']:,} parameters, {summary['support']}, "
        f"top_k={summary['top_k']}.",
        f"Fitted on {summary['tokens']:,} tokens of {summary['sequences']} sequences; held out "
        f"{summary['heldout_tokens']:,} tokens of {summary['heldout_sequences']}.",
        *(
            f"{label}: keys {mean(summary[name], 'keys')}, values {mean(summary[name], 'values')}."
            for name, label in (("r2", "R^2, mean over target layers"), ("heldout_r2", "The same, held out"))
        ),
        "Source layers of each target layer, best first:",
        *(f"  {layer:>3}: {' '.join(map(str, row))}" for layer, row in enumerate(summary["selected_layers"])),
        f"Plan {summary['plan']}, passes: {summary['passes']}, processes: {summary['processes']}. Time: {seconds}. "
        f"Peak memory: {memory}.",
    ]
    if summary["bad_sequences"]:
        lines.append(f"Left out because of NaN or Inf: sequences {', '.join(map(str, summary['bad_sequences']))}.")
    return "\n".join(lines)


__all__ = ["peak_memory", "run_calibration", "summary_text"]
