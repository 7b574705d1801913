"""What statistics cost on top of the two models' forwards.

    python scripts/benchmark_statistics.py                                  # random pair of Qwen3 0.6B's geometry
    python scripts/benchmark_statistics.py --source FOLDER --target FOLDER --sequence-length 256 --token-stride 1

Prints seconds for one batch: the forwards of both models alone, the forwards with their content read out, and the sums
added. Each round does all three, so that a slow moment of the machine meets them alike; the last line is the cost of
the statistics (reading out and adding) as a share of the forwards, the median over the rounds with the least and most.
On a CPU seconds are those of all threads together, which other processes do not lengthen.
"""

from __future__ import annotations

import argparse
import json
import statistics as summary
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvbridge_hf.calibration.accumulate import ModelFacts, StatisticsAccumulator, new_statistics
from kvbridge_hf.calibration.driver import statistics_device
from kvbridge_hf.calibration.traces import Batch, TracedModel, evaluating, kept_tokens
from kvbridge_hf.mappers.config import FitConfig

QWEN3_SMALLEST = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 1024,  # the embeddings take no part in what is measured
}


def load(name: str | None, dtype: torch.dtype, device: str) -> torch.nn.Module:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    config = AutoConfig.for_model("qwen3", **QWEN3_SMALLEST)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()


def timed(function: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Seconds that a call took, of the clock on a GPU and of all threads on a CPU; and what it returned."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    result = function()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source")
    parser.add_argument("--target")
    parser.add_argument("--support", default="head_local")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--token-stride", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--moments-dtype", default="float64")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    models = [load(name, dtype, arguments.device) for name in (arguments.source, arguments.target)]
    source, target = TracedModel(models[0], "source"), TracedModel(models[1], "target")
    top_k = min(arguments.top_k, source.geometry.num_layers)
    config = FitConfig(
        support=arguments.support,
        top_k=top_k,
        token_stride=arguments.token_stride,
        moments_dtype=arguments.moments_dtype,
        heldout_fraction=0.0,
    )
    facts = [ModelFacts(model.geometry, {}) for model in (source, target)]
    statistics = new_statistics(*facts, config, device=statistics_device(target))
    accumulator = StatisticsAccumulator(statistics, source, target, config, (0, target.geometry.num_layers))
    vocabulary = min(source.geometry.vocab_size, target.geometry.vocab_size)
    shape = (arguments.batch_size, arguments.sequence_length)
    batch = Batch(torch.randint(3, vocabulary, shape), torch.ones(shape, dtype=torch.bool), torch.arange(shape[0]))
    kept = int(kept_tokens(batch.attention_mask, config.num_sinks, config.token_stride).sum())

    def forwards() -> None:
        with evaluating(*models):
            source.forward(batch)
            target.forward(batch)

    rounds = []
    for _ in range(arguments.rounds + 1):
        alone, _ = timed(forwards, arguments.device)
        read, found = timed(lambda: accumulator.read(batch), arguments.device)
        add, _ = timed(lambda found=found: accumulator.add(batch, found), arguments.device)
        rounds.append({"forwards": alone, "with contents": read, "sums": add, "overhead": (read + add) / alone - 1})
    del rounds[0]  # it warmed up
    table = {
        name: {"median": summary.median(values), "least": min(values), "most": max(values)}
        for name in rounds[0]
        for values in [[entry[name] for entry in rounds]]
    }
    overhead = table.pop("overhead")
    result = {
        **{key: getattr(arguments, key) for key in ("support", "token_stride", "moments_dtype", "dtype", "device")},
        "source": arguments.source or "random Qwen3 0.6B geometry",
        "target": arguments.target or "random Qwen3 0.6B geometry",
        "tokens": shape[0] * shape[1],
        "kept_tokens": kept,
        "threads": torch.get_num_threads(),
        "rounds": len(rounds),
        "seconds": table,
        "overhead": overhead,
    }
    print(json.dumps(result, indent=2))
    median, least, most = (100 * overhead[name] for name in ("median", "least", "most"))
    print(f"Statistics cost {median:.1f} % ({least:.1f} to {most:.1f} %) on top of the two models' forwards.")


if __name__ == "__main__":
    main()
