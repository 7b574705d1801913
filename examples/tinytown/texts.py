"""Running text from Tinytown worlds, for fits, gates and judging: one JSON object with ``text`` a line.

python examples/tinytown/texts.py examples/tinytown/texts
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from corpus import document, text_of
from questions import write_lines

SETS = {
    # file: (split, seed, documents, lengths in tokens)
    "train": ("train", 201, 480, (96, 160, 256, 384)),
    "validation": ("validation", 202, 48, (160, 256, 384)),
    "test": ("test", 203, 64, (160, 256, 384)),
    # For the thresholds of gates: no fit sees them, and no judgement either.
    "gates": ("validation", 204, 240, (160, 256, 384)),
}


def texts(split: str, seed: int, documents: int, lengths: tuple[int, ...]):
    rng = random.Random(seed)
    for index in range(documents):
        yield {"text": text_of(document(rng, split, lengths[index % len(lengths)]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, settings in SETS.items():
        print(f"{name}.jsonl: {write_lines(folder / f'{name}.jsonl', texts(*settings))} documents")


if __name__ == "__main__":
    main()
