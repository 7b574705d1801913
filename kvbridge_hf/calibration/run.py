"""A whole calibration: from names of models and datasets to a mapper in a folder, resumable at every step.

The state lies in `.calibration` of the output folder:

    identity.json       what the state belongs to
    data/               the sequences (see `sequences`)
    process-*/          each process's unmerged moments and, in plan c, the source's content
    parts/              fitted target layers
    bad_sequences.json  those left out because of NaN or Inf
    summary.json        of a finished run

This module opens the folder, prepares the data and loads the models; `fitting` does the rest.
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from safetensors import SafetensorError

from ..errors import ArtifactError, CalibrationError
from ..fingerprint import tokenizer_fingerprint
from ..geometry import check_pair
from ..mappers.base import FitData
from ..mappers.config import FitConfig
from ..modeling_kvbridge import KVBridgeMapper
from ..repair_choice import without_learned
from .accumulate import Contents, ModelFacts, data_info
from .content_store import ContentAccumulator, ContentStore
from .documents import source_identity
from .fitting import Fitting, bad_sequences
from .interruption import FolderLock, StopRequest
from .job import CalibrationJob, Identity, library_majors, read_identity, write_identity
from .job_plan import check_divisible, own_bytes_of, plan_job
from .loading import load_config, load_model, load_tokenizer, unload
from .lookups import read_lookups
from .model_size import ModelSize
from .parts import learns_choice, needs_pair
from .passes import PassRunner, PassSettings
from .processes import Processes
from .progress import Progress
from .sequences import SequenceStore, StoredBatches, write_sequences
from .storage import sha256_file
from .summary import mean_r2, read_summary, summary_text, write_summary
from .traces import TracedModel

logger = logging.getLogger(__name__)

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
    run = _Run(job, Processes(_accelerator(job)), progress, say)
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


def _accelerator(job: CalibrationJob) -> Accelerator:
    """With the tracker that was asked for.

    Raises:
        CalibrationError: Accelerate does not know it, or its package is not installed.
    """
    try:
        accelerator = Accelerator(
            cpu=not torch.cuda.is_available() and not torch.backends.mps.is_available(),
            log_with=job.report_to,
            project_dir=None if job.report_to is None else job.state_folder,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
        )
    except ValueError as error:
        if job.report_to is None:
            raise
        raise CalibrationError(f"--report-to {job.report_to}: {error}") from error
    if job.report_to is not None and not accelerator.log_with:  # Accelerate drops what it cannot import
        raise CalibrationError(
            f"--report-to {job.report_to}: its package is not installed. Install it (pip install {job.report_to}), or "
            "leave --report-to out."
        )
    return accelerator


class _Run:
    def __init__(self, job: CalibrationJob, processes: Processes, show: bool, say: Any):
        self.job, self.processes, self.say = job, processes, say
        self.progress = Progress(processes, show, job.report_to is not None)
        self.lock = FolderLock(job.state_folder / "lock")
        self.work_folder = job.state_folder / f"process-{processes.index:05d}"
        self.began = time.monotonic()
        self.lookups: list[Any] | None = None

    def tell(self, text: str) -> None:
        if self.processes.is_main:
            self.say(text)

    # ---- order of things ------------------------------------------------------------------------------------------

    def go(self, stop: StopRequest) -> dict[str, Any]:
        job, processes = self.job, self.processes
        processes.on_main(self._open_folder)
        configs = load_config(job, "source"), load_config(job, "target")
        self.tokenizer = load_tokenizer(job, "target")
        tokenizers = {"source_tokenizer": load_tokenizer(job, "source"), "target_tokenizer": self.tokenizer}
        check_pair(*configs, **tokenizers).raise_if_unfit()
        sizes = ModelSize.of(configs[0]), ModelSize.of(configs[1])
        self.config = job.fit.resolve_top_k(sizes[0].geometry.num_layers)
        check_divisible(job, self.config, processes)
        processes.on_main(self._read_lookups)
        if learns_choice(self.config) and job.lookups is None:
            self.config = self._without_learned()
        self.plan = processes.on_main(lambda: plan_job(job, self.config, sizes, processes, own_bytes_of(*configs)))
        self.tell(self.plan.describe())
        identity = self._identity()
        processes.on_main(lambda: self._check_identity(identity))
        self._open_data(stop, min(size.geometry.vocab_size for size in sizes))
        if job.report_to is not None:
            processes.accelerator.init_trackers("kvbridge-calibration", config={"job": str(job.settings())})
        fitting = self._load_pair()
        facts = {"source": fitting.source.fingerprint, "target": fitting.facts.fingerprint}
        identity.facts.update(facts, data=self.passes.store.digest)
        processes.on_main(lambda: self._settle_identity(identity))
        summary = processes.on_main(self._finished)
        if summary is None:
            mapper = fitting.run()
            summary = processes.on_main(lambda: self._finish(mapper))
        if job.report_to is not None:
            self._report(summary)
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

    def _read_lookups(self) -> None:
        """Before anything that takes long, as a line of the file may be wrong; they stay in the main process."""
        if self.job.lookups is not None:
            self.lookups = read_lookups(self.job.lookups, self.tokenizer)

    def _without_learned(self) -> FitConfig:
        """The settings without the choice that there is nothing to learn from, which is said."""
        known = without_learned(self.config.repair)
        if self.processes.is_main:
            logger.warning(
                "repair=%r learns from texts with questions about them (--lookups FILE) and there are none, so the "
                "mapper will choose what to repair by %r.",
                self.config.repair,
                known,
            )
        return self.config.replace(repair=known)

    # ---- identity -------------------------------------------------------------------------------------------------

    def _identity(self) -> Identity:
        """What is known before anything is loaded."""
        return Identity(
            {
                "settings": self.job.settings(),
                "processes": self.processes.count,
                "plan": self.plan.identity(),
                "libraries": library_majors(),
                "tokenizer": tokenizer_fingerprint(self.tokenizer),
                "datasets": [source_identity(spec) for spec in self.job.data.datasets],
                "lookups": self._lookup_facts(),
            }
        )

    def _lookup_facts(self) -> dict[str, Any] | None:
        path = self.job.lookups
        return None if path is None else {"name": path.name, "sha256": sha256_file(path)}

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

    # ---- data and models --------------------------------------------------------------------------------------------

    def _open_data(self, stop: StopRequest, vocab_size: int) -> None:
        """Read the sequences, unless they are there, and take this process's share."""
        job, processes = self.job, self.processes
        started = time.monotonic()
        processes.on_main(lambda: self._prepare_data(stop, vocab_size))
        store = processes.together(lambda: SequenceStore(job.state_folder / "data"))
        self.progress.note("data", started)
        settings = PassSettings(job.batch_size, job.checkpoint_every, job.max_bad_sequences, stop, self.progress.batch)
        numbers = store.share(job.batch_size, processes.index, processes.count)
        self.passes = PassRunner(store, numbers, settings, self.progress)
        self._tell_data(store)
        stop.check()

    def _prepare_data(self, stop: StopRequest, vocab_size: int) -> None:
        folder = self.job.state_folder / "data"
        try:
            SequenceStore(folder)
            return
        except ArtifactError as error:
            if folder.exists():
                logger.info("The sequences are read again: %s", error)
        write_sequences(folder, self.job.data, self.tokenizer, vocab_size, self.config.num_sinks, stop.check)

    def _tell_data(self, store: SequenceStore) -> None:
        facts, report, job = store.facts, store.facts["report"], self.job
        counts = ", ".join(
            f"{value} {name.replace('_', ' ')}" for name, value in report.items() if value and isinstance(value, int)
        )
        self.tell(f"Data: {facts['sequences']} sequences, {facts['tokens']} tokens ({counts}).")
        if facts["sequences"] < job.data.num_sequences:
            self.tell(
                f"The data ended after {facts['sequences']} of {job.data.num_sequences} sequences "
                f"({', '.join(report['exhausted'])})."
            )

    def _load_pair(self) -> Fitting:
        """The source's content, or the source itself, and the target."""
        job, processes, store = self.job, self.processes, self.passes.store
        source: Any = None
        if self.plan.plan == "c":
            contents, source_facts = self._write_contents()
        else:
            source = self._load("source")
            contents = TracedModel(source, "source")
            source_facts = processes.together(partial(ModelFacts.of, source))
        same = source is not None and (job.source, job.source_revision) == (job.target, job.target_revision)
        target = source if same else self._load("target")
        pair = None
        if needs_pair(self.config, job.lookups is not None):
            pair = FitData(source, target, StoredBatches(store, job.batch_size), self.progress.show, self.lookups)
        return Fitting(
            config=self.config,
            plan=self.plan,
            processes=processes,
            passes=self.passes,
            folder=job.state_folder,
            work_folder=self.work_folder,
            source=source_facts,
            facts=processes.together(partial(ModelFacts.of, target)),
            contents=contents,
            target=contents if same else TracedModel(target, "target"),  # type: ignore[arg-type]
            info=data_info(self.tokenizer, store.provenance),
            pair=pair,
        )

    def _load(self, role: str) -> Any:
        started = time.monotonic()
        model = self.processes.together(lambda: load_model(self.job, role, self.processes.device))
        self.progress.note("loading", started)
        return model

    def _write_contents(self) -> tuple[Contents, ModelFacts]:
        """The first half of plan c; the source is in memory only here."""
        store = ContentStore(self.work_folder / "content")
        store.drop_damaged()
        source = self._load("source")
        facts = self.processes.together(partial(ModelFacts.of, source))
        config = self.config
        accumulator = ContentAccumulator(
            store,
            TracedModel(source, "source"),
            config.num_sinks,
            config.token_stride,
            self.job.max_bad_sequences,
        )
        missing: np.ndarray = store.missing(self.passes.numbers)
        if len(missing):
            self.passes.run("source content", accumulator, None, missing)
        del source, accumulator
        unload()
        self.processes.wait()
        return store, facts

    # ---- the end --------------------------------------------------------------------------------------------------

    def _finished(self) -> dict[str, Any] | None:
        """The summary of a run that was complete already."""
        summary = read_summary(self.job)
        if summary is not None:
            self.say(f"The mapper in {self.job.output} is complete; --restart fits it again.")
        return summary

    def _finish(self, mapper: KVBridgeMapper | None) -> dict[str, Any]:
        assert mapper is not None
        job = self.job
        bad = bad_sequences(job.state_folder)
        if bad:
            mapper.config.fit["bad_sequences"] = bad
        if self.lookups is not None:
            mapper.config.fit["lookups"] = {**(self._lookup_facts() or {}), "texts": len(self.lookups)}
        mapper.save_pretrained(job.output)
        summary = write_summary(job, self.plan, mapper, self.processes, self.progress.seconds, self.began)
        for folder in [*job.state_folder.glob("process-*"), job.state_folder / "parts"]:
            shutil.rmtree(folder, ignore_errors=True)
        return summary

    def _report(self, summary: dict[str, Any]) -> None:
        """Send what came out of the run to the tracker."""
        for name in ("r2", "heldout_r2"):
            if summary[name] is not None:
                scores = mean_r2(summary[name])
                self.processes.accelerator.log({f"{name}/{kind}": value for kind, value in scores.items()})


__all__ = ["run_calibration", "summary_text"]
