"""Many threads, one bridge: the short form of scripts/stress_handoffs.py."""

from __future__ import annotations

import gc

from handoff_reference import pair
from stress_workload import prepare, run_all

from kvbridge_hf import KVBridge
from kvbridge_hf.cache_kvbridge import MappedPrefix


def test_threads_share_a_bridge_and_every_handoff_is_its_reference_or_a_visible_fallback():
    source, target, mapper = pair(num_sinks=2, num_native_suffix=4)
    numbers = range(96)
    references, natives = prepare(numbers, KVBridge(source, mapper), target)
    complaints, counts = run_all(numbers, KVBridge(source, mapper), target, 8, references, natives)
    assert not complaints, complaints[:3]
    assert counts["ok"] > 40 and counts["fallback"] > 10, counts
    # Nothing of a finished handoff stays: no mapped prefix, and with it no source cache.
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is MappedPrefix]
