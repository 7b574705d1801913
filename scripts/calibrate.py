"""Fit a mapper with `accelerate launch scripts/calibrate.py ...`; the arguments are those of `kvbridge fit`.

    accelerate launch --num_processes 8 scripts/calibrate.py --source Qwen/Qwen3-14B --target Qwen/Qwen3-32B \\
        --num-sequences 500 --sequence-length 2048 --token-stride 4 --support head_local --top-k 8 --output mapper

The same command goes on after an interruption. On a machine without GPUs, Accelerate starts several processes only
with `--multi_gpu`; they then run on the CPU.
"""

import sys

from kvbridge_hf.cli import main

if __name__ == "__main__":
    sys.exit(main(["fit", *sys.argv[1:]]))
