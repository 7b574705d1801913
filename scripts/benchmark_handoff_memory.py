"""Peak memory of a handoff: the two caches plus one layer's scratch, whatever the depth.

    python scripts/benchmark_handoff_memory.py [--tokens 512] [--layers 4 8 16]

Random models of the given depths (source and target alike, 4 KV heads of 64, float32) hand prompts over; the mapper
reads `--top-k` source layers for each target layer, chosen at random. Every tensor that is alive is counted. Printed
are, in MiB, the two caches, the peak while the target's layers are mapped one by one, what that is above the two
caches ("scratch"), the same in layers of the target's cache, and the scratch with everything kept that was stripped of
its rotation, as it would be without forgetting.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from handoff_reference import random_mapper  # noqa: E402
from live_memory import LiveMemory, cache_bytes  # noqa: E402
from models import tiny_model  # noqa: E402

from kvbridge_hf import HandoffPolicy, KVBridge  # noqa: E402
from kvbridge_hf.mapped_prefix import MappedPrefix  # noqa: E402
from kvbridge_hf.prompt_reading import read_columns  # noqa: E402

MIB = 2**20


@torch.no_grad()
def peaks(depth: int, tokens: int, top_k: int, padding: int, forget: bool) -> tuple[int, int, int, int]:
    """Bytes: source cache, target cache, one target layer of it, peak above the source's cache while mapping."""
    sizes = {"num_layers": depth, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64}
    source, target = tiny_model("qwen3", **sizes), tiny_model("llama", seed=1, **sizes)
    bridge = KVBridge(source, random_mapper(source, target, top_k=top_k), HandoffPolicy(num_native_suffix=1))
    ids = torch.randint(3, 96, (2, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :padding] = False
    source_cache = read_columns(source, ids, mask)
    bridge.check_target(target)
    keep_all = mock.patch.object(MappedPrefix, "_forget_others", lambda self, layer: None)
    with contextlib.nullcontext() if forget else keep_all, LiveMemory() as memory:
        cache = bridge.handoff(ids, mask, source_cache, target)
        cache.map_all()
    layers = cache_bytes(cache)
    return cache_bytes(source_cache), layers, layers // depth, memory.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--padding", type=int, default=0, help="padded columns of the second of two rows")
    args = parser.parse_args()
    print("| layers | source cache | target cache | peak | scratch | in layers | scratch, nothing forgotten |")
    print("|---" * 7 + "|")
    for depth in args.layers:
        source, target, layer, peak = peaks(depth, args.tokens, args.top_k, args.padding, True)
        *_, kept = peaks(depth, args.tokens, args.top_k, args.padding, False)
        cells = (source, target, source + peak, peak - target)
        print(
            f"| {depth} | "
            + " | ".join(f"{size / MIB:.1f}" for size in cells)
            + f" | {(peak - target) / layer:.1f} | {(kept - target) / MIB:.1f} |"
        )


if __name__ == "__main__":
    main()
