"""What statistics cost on top of the two models' forwards.

    python scripts/benchmark_statistics.py                                  # random pair of Qwen3 0.6B's geometry
    python scripts/benchmark_statistics.py --source FOLDER --target FOLDER --sequence-length 256 --token-stride 1

Prints seconds for one batch: the forwards of both models alone, the forwards with their content read out, and the
whole with the statistics summed up; best of some rounds taken in turn, so that a slow moment of the machine meets all
three. The last line is the cost of the statistics as a share of the forwards.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

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


def seconds(function: Callable[[], None], device: str) -> float:
    """On a CPU those of all its threads, which other processes do not lengthen; on a GPU those that pass."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


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
    parser.add_argument("--rounds", type=int, default=3)
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
    keep = kept_tokens(batch.attention_mask, config.num_sinks, config.token_stride)

    def forwards() -> None:
        with evaluating(*models):
            source.forward(batch)
            target.forward(batch)

    def contents() -> None:
        with evaluating(*models):
            source.content(batch, keep)
            target.content(batch, keep)

    def whole() -> None:
        accumulator.add(batch, accumulator.read(batch))

    parts = {"forwards": forwards, "with contents": contents, "with statistics": whole}
    times = {name: float("inf") for name in parts}
    for round_number in range(arguments.rounds + 1):  # the first one warms up
        for name, function in parts.items():
            taken = seconds(function, arguments.device)
            if round_number:
                times[name] = min(times[name], taken)
    overhead = times["with statistics"] / times["forwards"] - 1
    result = {
        **{key: getattr(arguments, key) for key in ("support", "token_stride", "moments_dtype", "dtype", "device")},
        "source": arguments.source or "random Qwen3 0.6B geometry",
        "target": arguments.target or "random Qwen3 0.6B geometry",
        "tokens": shape[0] * shape[1],
        "kept_tokens": int(keep.sum()),
        "threads": torch.get_num_threads(),
        "seconds": times,
        "overhead": overhead,
    }
    print(json.dumps(result, indent=2))
    print(f"Statistics cost {100 * overhead:.1f} % on top of the two models' forwards.")


if __name__ == "__main__":
    main()
