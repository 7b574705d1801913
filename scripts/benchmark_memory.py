"""Resident memory of a calibration over few and over many sequences, beside what the plan said.

    python scripts/benchmark_memory.py --work FOLDER [--source FOLDER --target FOLDER] [--counts 64 1024]
    python scripts/benchmark_memory.py --work FOLDER --layers 18 18 --counts 32 --plans a b c

Each plan and count runs `kvbridge fit` in a process of its own on random words of the tokenizer. Without models
a random pair with 4 KV heads of 64 is made; with many layers its statistics are most of the memory. Prints the peak of
each run, how far the largest of a plan is above the smallest, and how far the plan's figure is from the peak.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def write_random_pair(folder: Path, layers: list[int]) -> tuple[str, str]:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number + 2 for number in range(510)}}
    core = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    core.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    for name, count in zip(("source", "target"), layers, strict=True):
        config = AutoConfig.for_model("qwen3", num_hidden_layers=count, head_dim=64, vocab_size=512, **sizes)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return str(folder / "source"), str(folder / "target")


def write_texts(path: Path, tokenizer, count: int, length: int) -> None:
    draw = random.Random(0)
    words = [word for word in tokenizer.get_vocab() if word.isalnum()]
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(count):
            file.write(json.dumps({"text": " ".join(draw.choice(words) for _ in range(length))}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="Folder for texts, models and mappers.")
    parser.add_argument("--source")
    parser.add_argument("--target")
    parser.add_argument("--counts", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--support", default="full_head")
    parser.add_argument("--weighting", default="uniform")
    parser.add_argument("--plans", nargs="+", default=["a"])
    parser.add_argument("--layers", type=int, nargs=2, default=[6, 8], help="Of the random pair.")
    arguments = parser.parse_args()

    arguments.work.mkdir(parents=True, exist_ok=True)
    source, target = arguments.source, arguments.target
    if source is None or target is None:
        source, target = write_random_pair(arguments.work, arguments.layers)
    texts = arguments.work / "texts.jsonl"
    tokenizer = AutoTokenizer.from_pretrained(target)
    write_texts(texts, tokenizer, max(arguments.counts), arguments.sequence_length)
    for plan in arguments.plans:
        peaks = []
        for count in arguments.counts:
            command = [sys.executable, "-m", "kvbridge_hf.cli", "fit", "--json", "--restart"]
            command += ["--source", source, "--target", target, "--dataset", str(texts), "--num-sequences", str(count)]
            command += ["--sequence-length", str(arguments.sequence_length)]
            command += ["--batch-size", str(arguments.batch_size), "--support", arguments.support]
            command += ["--plan", plan, "--preset", "fast", "--selection", "r2", "--weighting", arguments.weighting]
            command += ["--output", str(arguments.work / f"mapper-{plan}-{count}")]
            finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            summary = json.loads(finished.stdout.splitlines()[-1])
            peak, planned = summary["peak_memory"]["host"], summary["planned_memory"]
            peaks.append(peak)
            print(
                f"plan {plan}, {count:>5} sequences, {summary['input_tokens']} tokens: peak {peak / 2**20:.1f} MiB, "
                f"planned {planned / 2**20:.1f} MiB ({100 * (planned / peak - 1):+.1f} %)",
                flush=True,
            )
        if len(peaks) > 1:
            print(f"plan {plan}: largest peak over the smallest {100 * (max(peaks) / min(peaks) - 1):+.2f} %")


if __name__ == "__main__":
    main()
