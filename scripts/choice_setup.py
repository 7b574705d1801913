"""What the scripts about the choice of tokens to repair share: arguments, pair, questions, a learned scorer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lookup_texts import LOOKUPS, lookup_texts
from transformers import AutoTokenizer

from kvbridge_hf import KVBridgeMapper, bundled, fit_mapper
from kvbridge_hf.demo import load_model, read_texts
from kvbridge_hf.evaluation import Judge, load_questions
from kvbridge_hf.mappers.config import FitConfig


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that say what is measured on and with."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--pair", default="s-to-m")
    found.add_argument("--split", choices=("validation", "test"), default="validation")
    found.add_argument("--questions", type=int, help="at most so many")
    found.add_argument("--texts", type=int, default=200, help="calibration texts")
    found.add_argument("--lookups", type=int, default=LOOKUPS, help="texts with questions that the scorer learns from")
    found.add_argument("--mapper", type=Path, help="a mapper with a scorer, instead of a fit")
    return found


class ChoiceSetup:
    """A pair with its questions, as the arguments say."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        folders = [bundled.model_path(part) for part in bundled.split_pair(args.pair)]
        self.source, self.target = (load_model(folder) for folder in folders)
        self.tokenizer = AutoTokenizer.from_pretrained(str(folders[1]))
        self.questions = load_questions(bundled.questions_path(args.split), args.questions)
        self.judge = Judge(
            self.source, self.target, questions=self.questions, tokenizer=self.tokenizer, attention=False
        )

    def mapper(self, top_k: int) -> Any:
        """The mapper given, or one of so many source layers with a scorer, fitted now."""
        if self.args.mapper is not None:
            return KVBridgeMapper.from_pretrained(self.args.mapper)
        texts = read_texts(bundled.text_path("train"), self.args.texts)
        batches = [self.tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
        config = FitConfig.preset("default", top_k=top_k, repair="learned")
        lookups = lookup_texts(self.tokenizer, self.args.lookups)
        return fit_mapper(
            self.source, self.target, batches, config, tokenizer=self.tokenizer, lookups=lookups, progress=False
        )


def interval(entry: dict[str, Any]) -> str:
    """`estimate [low, high]` in percent."""
    return f"{entry['estimate']:.1%} [{entry['low']:.1%}, {entry['high']:.1%}]"
