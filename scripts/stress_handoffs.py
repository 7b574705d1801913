"""1,000 handoffs of random shapes, paddings, policies and injected faults through one bridge from 8 threads.

    python scripts/stress_handoffs.py [--pair s-to-m] [--handoffs 1000] [--threads 8]

Each must equal its single-threaded reference or be a visible fallback (and then equal the target's own result). Memory
in use after all of them is compared with that after the first 50. Exits with 1 if a handoff is neither, or if memory
has grown by more than 5 %. The cases are those of tests/stress_workload.py, on tiny random models or on a pair of the
bundled family.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from handoff_reference import pair  # noqa: E402
from stress_workload import prepare, run_all  # noqa: E402

from kvbridge_hf import KVBridge, KVBridgeMapper, bundled  # noqa: E402
from kvbridge_hf.demo import load_model  # noqa: E402

WARM_UP = 50
ALLOWED_GROWTH = 0.05


def resident_bytes() -> int:
    """Memory in use, after what is free has been given back to the system."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        pass
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def models_of(name: str | None) -> tuple[Any, Any, Any]:
    """Source, target and mapper."""
    if name is None:
        return pair(num_sinks=2, num_native_suffix=4)
    source, target = (load_model(bundled.model_path(part)) for part in bundled.split_pair(name))
    mapper = KVBridgeMapper.from_pretrained(str(bundled.mapper_path(name)), dtype=torch.float32)
    # The prompts are random tokens, which calibrated gates rejected one and all.
    mapper.config.gates = {}
    return source, target, mapper


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", help="pair of the bundled family instead of random models")
    parser.add_argument("--handoffs", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    source, target, mapper = models_of(args.pair)
    numbers = range(args.handoffs)
    started = time.perf_counter()
    references, natives = prepare(numbers, KVBridge(source, mapper), target)
    single = time.perf_counter() - started

    bridge = KVBridge(source, mapper)
    started = time.perf_counter()
    warm_up, rest = list(numbers)[:WARM_UP], list(numbers)[WARM_UP:]
    complaints, counts = run_all(warm_up, bridge, target, args.threads, references, natives)
    before = resident_bytes()
    more, further = run_all(rest, bridge, target, args.threads, references, natives)
    after = resident_bytes()
    seconds = time.perf_counter() - started
    complaints += more
    for status, count in further.items():
        counts[status] = counts.get(status, 0) + count
    growth = after / before - 1
    print(
        json.dumps(
            {
                "pair": args.pair or "random models",
                "handoffs": args.handoffs,
                "threads": args.threads,
                "status": counts,
                "neither": len(complaints),
                "seconds_threads": round(seconds, 1),
                "seconds_references": round(single, 1),
                "memory_after_50_mib": round(before / 2**20, 1),
                "memory_at_end_mib": round(after / 2**20, 1),
                "growth": round(growth, 4),
            },
            indent=1,
        )
    )
    for text in complaints[:20]:
        print(text)
    return int(bool(complaints) or growth > ALLOWED_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
