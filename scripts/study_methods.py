"""Fits every method on every pair of a family, judges the handoffs, and writes docs/methods.md with its plots.

python scripts/study_methods.py                       # everything, in two processes; about two hours on two cores
python scripts/study_methods.py --quick               # minutes: fewer questions, texts and rows, short trainings
python scripts/study_methods.py --render              # tables and plots from the results that are there
python scripts/study_methods.py --again 8             # runs stored rows again and says whether they agree

A result is stored as soon as it is there, under a name that holds what it depends on; a second call goes on with what
is missing. Settings were chosen on the validation questions (`--split validation`); the tables report the test set.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import sys
import time
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from queue import Empty
from typing import Any

import study_report
import torch
from lookup_texts import FAMILY
from study_pair import Pair, Settings
from study_rows import CHUNKS, Case
from tqdm.auto import tqdm

PAIRS = ("s-to-m", "w-to-m", "m-to-l", "m-to-m-diary", "l-to-s")
ROOT = Path(__file__).resolve().parent.parent
QUICK = {"questions": 96, "documents": 16, "texts": 150}
FULL = {"questions": 240, "documents": 48, "texts": 200}
Task = tuple[str, tuple[tuple[int, int], ...]]  # a pair, and rows of it as (place, seed)

pair_of = lru_cache(maxsize=1)(Pair)
_results: Any = None  # of a worker: where results go


def plan(args: argparse.Namespace, settings: Settings, known: set[str]) -> list[Task]:
    """What is still to be done, the most important first, in portions that share mappers."""
    portions: list[list[Task]] = [[] for _ in range(len(CHUNKS) + 1)]
    for name in args.pairs:
        pair = Pair(name, settings)
        for place, groups in enumerate((*CHUNKS, None)):
            rows = tuple(
                (number, seed)
                for number, case in enumerate(pair.cases)
                if (case.late if groups is None else case.group in groups and not case.late)
                for seed in (args.seeds if case.repeated else args.seeds[:1])
                if _wanted(case, args) and pair.key(case, seed) not in known
            )
            if rows:
                portions[place].append((name, rows))
    return [task for portion in portions for task in portion]


def _wanted(case: Case, args: argparse.Namespace) -> bool:
    named = not args.rows or any(fnmatch(case.name, pattern) for pattern in args.rows)
    return named and (not args.groups or case.group in args.groups)


def _begin(queue: Any) -> None:
    global _results
    _results = queue
    torch.set_num_threads(1)  # the same sums whatever the machine


def _work(job: tuple[Task, Settings]) -> None:
    (name, rows), settings = job
    pair = pair_of(name, settings)
    for number, seed in rows:
        if not multiprocessing.parent_process().is_alive():  # type: ignore[union-attr]
            return  # killed; nobody would store what this finds
        case = pair.cases[number]
        torch.manual_seed(seed)
        _results.put((pair.key(case, seed), pair.run(case, seed)))


def run(args: argparse.Namespace, settings: Settings, path: Path, results: dict[str, Any]) -> None:
    """Do what is missing in `args.jobs` processes, and store each result as it comes."""
    tasks = plan(args, settings, set(results))
    deadline = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    missing = sum(len(rows) for _, rows in tasks)
    if not missing:
        return
    with (
        context.Pool(args.jobs, _begin, (queue,)) as pool,
        tqdm(total=missing, desc="rows", unit="row", disable=None) as bar,
    ):
        pending = pool.map_async(_work, [(task, settings) for task in tasks], chunksize=1)
        while missing and (deadline is None or time.monotonic() < deadline):
            try:
                key, entry = queue.get(timeout=2)
            except Empty:
                if pending.ready():
                    pending.get()  # raises what went wrong
                continue
            results[key] = entry
            save(path, results)
            missing -= 1
            bar.update(1)
            tqdm.write(study_report.line(entry), file=sys.stdout)
            sys.stdout.flush()
        if not missing:
            pool.close()
            pool.join()


def again(args: argparse.Namespace, settings: Settings, results: dict[str, Any]) -> bool:
    """Run stored rows a second time; True if they agree."""
    torch.set_num_threads(1)
    agree = True
    by_key = {}
    for name in args.pairs:
        pair = Pair(name, settings)
        by_key.update({pair.key(case, seed): (name, case, seed) for case in pair.cases for seed in args.seeds})
    stored = [key for key in sorted(results) if key in by_key and _wanted(by_key[key][1], args)][: args.again]
    for key in sorted(stored, key=lambda key: by_key[key][0]):
        name, case, seed = by_key[key]
        torch.manual_seed(seed)
        entry = pair_of(name, settings).run(case, seed)
        same = entry["digest"] == results[key]["digest"]
        agree &= same
        print("same   " if same else "DIFFERS", study_report.line(entry), flush=True)
    return agree


def save(path: Path, results: dict[str, Any]) -> None:
    """Replace the results file as a whole, so that an interruption leaves the old one."""
    temporary = path.with_suffix(".tmp")
    lines = [f"{json.dumps(key)}:{json.dumps(results[key], separators=(',', ':'))}" for key in sorted(results)]
    temporary.write_text("{" + ",\n".join(lines) + "}\n")
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--render", action="store_true", help="only write the tables and plots")
    parser.add_argument("--again", type=int, help="run so many stored rows a second time and compare")
    parser.add_argument("--models", type=Path, default=FAMILY / "models", help="folder of the models")
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), choices=PAIRS)
    parser.add_argument("--groups", nargs="+", help="only these groups of rows")
    parser.add_argument("--rows", nargs="+", help="only rows of these names; * for the rest")
    parser.add_argument("--seeds", nargs="+", type=int, help="0 1 2 by default, 0 with --quick")
    parser.add_argument("--split", choices=("validation", "test"), default="test")
    parser.add_argument("--questions", type=int, help="at most so many")
    parser.add_argument("--documents", type=int, help="at most so many")
    parser.add_argument("--texts", type=int, help="calibration texts")
    parser.add_argument("--resamples", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes")
    parser.add_argument("--output", type=Path, help="docs/ by default, methods-quick/ with --quick")
    args = parser.parse_args()
    args.seeds = args.seeds or ([0] if args.quick else [0, 1, 2])
    args.output = args.output or (Path("methods-quick") if args.quick else ROOT / "docs")
    counts = {name: getattr(args, name) or value for name, value in (QUICK if args.quick else FULL).items()}
    settings = Settings(args.models, args.split, **counts, resamples=args.resamples, quick=args.quick)
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "methods.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    if args.again:
        sys.exit(0 if again(args, settings, results) else 1)
    if not args.render:
        run(args, settings, path, results)
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit(f"{path} has the results; tables and plots need matplotlib: pip install matplotlib, then --render.")
    study_report.write(results.values(), args.output, quick=args.quick)


if __name__ == "__main__":
    main()
