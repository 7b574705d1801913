"""Which pairs of models the page offers, and loading them: the bundled family, Hub ids, and (locally) folders."""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import whole_machine
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from zero import ON_ZERO

from kvbridge_hf import HandoffFallbackWarning, HandoffPolicy, KVBridge, KVBridgeConfig, KVBridgeMapper, bundled
from kvbridge_hf.demo import load_model
from kvbridge_hf.errors import KVBridgeError
from kvbridge_hf.planning import count_parameters

# Fallbacks stand on the page; in the log they would only repeat themselves.
warnings.filterwarnings("ignore", category=HandoffFallbackWarning)

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
#: Parameters that both models of a pair from the Hub may have together; they stay in memory beside the others.
MAX_PARAMETERS = int(os.environ.get("KVBRIDGE_SPACE_MAX_PARAMETERS", 8_000_000_000))
ON_SPACES = "SPACE_ID" in os.environ


class PairError(KVBridgeError, ValueError):
    """A pair that was asked for cannot be loaded here."""


class Example(NamedTuple):
    """A prompt to click; `answer` is how a right continuation begins, where that is known."""

    label: str
    prompt: str
    answer: str = ""


@dataclass
class Pair:
    """Two loaded models with the bridge from the one to the other, and back where there is a mapper for it."""

    key: str
    source_name: str
    target_name: str
    source: PreTrainedModel
    target: PreTrainedModel
    tokenizer: Any
    bridge: KVBridge
    back: KVBridgeMapper | None = None
    examples: list[Example] = field(default_factory=list)

    @property
    def mapper(self) -> KVBridgeMapper:
        return self.bridge.mapper

    @property
    def max_tokens(self) -> int:
        """Tokens that both models can hold."""
        lengths = [m.config.get_text_config().max_position_embeddings for m in (self.source, self.target)]
        return int(min(lengths))

    def answer_to(self, prompt: str | None) -> str:
        """How a right continuation of an example begins; empty for any other text."""
        return next((example.answer for example in self.examples if example.prompt == (prompt or "").strip()), "")


class Pairs:
    """Loads pairs and keeps the latest few.

    Args:
        family: folder of the bundled family; where it lies in this installation by default.
        keep: loaded pairs that stay in memory.
    """

    def __init__(self, family: Path | None = None, keep: int = 3):
        self._family, self.keep = family, keep
        self._loaded: OrderedDict[str, Pair] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def family(self) -> Path | None:
        """The family's folder; None where the installation lacks it."""
        if self._family is not None:
            return self._family
        try:
            return bundled.family_folder()
        except KVBridgeError:
            return None

    def bundled(self) -> list[tuple[str, str]]:
        """`(label, key)` of the bundled pairs, `s-to-m` first where it is there."""
        folder = self.family
        if folder is None or not (folder / "mappers").is_dir():
            return []
        keys = []
        for mapper in sorted((folder / "mappers").iterdir()):
            ends = mapper.name.split("-to-")
            if (mapper / "config.json").is_file() and len(ends) == 2:
                if all((folder / "models" / f"tinytown-{end}").is_dir() for end in ends):
                    keys.append(mapper.name)
        keys.sort(key=lambda key: key != "s-to-m")
        return [("tinytown-{} → tinytown-{}".format(*key.split("-to-")), key) for key in keys]

    def first_prompt(self) -> str:
        """The first example of the bundled family; a short story where the installation lacks it."""
        examples = family_examples(self.family) if self.bundled() and self.family is not None else []
        return examples[0].prompt if examples else PLAIN_STORY

    def load(self, key: str) -> Pair:
        """A bundled pair by its key, or one loaded by [`load_custom`] before.

        Raises:
            KVBridgeError, OSError: what is wrong.
        """
        with self._lock:
            if key in self._loaded:
                self._loaded.move_to_end(key)
                return self._loaded[key]
            folder = self.family
            if folder is None or key not in [known for _, known in self.bundled()]:
                raise PairError(f"There is no pair {key!r} here any more. Choose one from the list, or load it again.")
            source, target = (folder / "models" / f"tinytown-{end}" for end in key.split("-to-"))
            back = folder / "mappers" / "-to-".join(reversed(key.split("-to-")))
            pair = _load(
                key, str(source), str(target), str(folder / "mappers" / key), str(back) if back.is_dir() else None
            )
            pair.examples = family_examples(folder)
            return self._keep(pair)

    def load_custom(self, source: str, target: str, mapper: str, revision: str = "") -> Pair:
        """A pair by Hub ids (or, where this is no public Space, folders). Models left empty are the mapper's own.

        Raises:
            KVBridgeError, OSError: what is wrong.
        """
        source, target, mapper, revision = (text.strip() for text in (source, target, mapper, revision))
        if not mapper:
            raise PairError("Name a mapper: a Hub id such as org/mapper.")
        for name in (mapper, source, target):
            _check_name(name)
        config = KVBridgeConfig.from_pretrained(mapper, revision=revision or None)
        source = source or str(config.source_fingerprint.get("name_or_path") or "")
        target = target or str(config.target_fingerprint.get("name_or_path") or "")
        if not source or not target:
            raise PairError(f"{mapper} does not say which models it was fitted for. Name source and target.")
        for name in (source, target):
            _check_name(name)
        size = sum(count_parameters(AutoConfig.from_pretrained(name))[1] for name in (source, target))
        if size > MAX_PARAMETERS:
            raise PairError(
                f"{source} and {target} have {size / 1e9:.1f} billion parameters together; this page loads up to "
                f"{MAX_PARAMETERS / 1e9:g} billion. Run it on a larger machine with KVBRIDGE_SPACE_MAX_PARAMETERS."
            )
        key = " ".join(filter(None, (source, target, mapper, revision)))
        with self._lock:
            if key not in self._loaded:
                pair = _load(key, source, target, mapper, None, revision or None)
                pair.examples = [Example("A short story", PLAIN_STORY)]
                self._keep(pair)
            self._loaded.move_to_end(key)
            return self._loaded[key]

    def _keep(self, pair: Pair) -> Pair:
        self._loaded[pair.key] = pair
        while len(self._loaded) > self.keep:
            self._loaded.popitem(last=False)
        return pair


def _check_name(name: str) -> None:
    if not name or HUB_ID.fullmatch(name) or (not ON_SPACES and Path(name).is_dir()):
        return
    kind = "a Hub id such as org/name" if ON_SPACES else "a Hub id such as org/name, or a folder"
    raise PairError(f"{name!r} is not {kind}.")


def _load(
    key: str, source_path: str, target_path: str, mapper_path: str, back_path: str | None, revision: str | None = None
) -> Pair:
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    source, target = load_model(source_path), load_model(target_path)

    def load_mapper(path: str, revision: str | None = None) -> KVBridgeMapper:
        mapper = KVBridgeMapper.from_pretrained(path, revision=revision, dtype=target.dtype)
        return mapper.to(target.device).eval()

    bridge = KVBridge(
        source, load_mapper(mapper_path, revision), HandoffPolicy(on_failure="prefill"), tokenizer=tokenizer
    )
    bridge.check_target(target)
    back = None if back_path is None else load_mapper(back_path)
    names = [Path(path).name if Path(path).is_dir() else path for path in (source_path, target_path)]
    pair = Pair(key, *names, source, target, tokenizer, bridge, back)
    if not ON_ZERO:  # there the GPU comes with a call, and this is none
        _warm_up(pair)
    return pair


@torch.no_grad()
def _warm_up(pair: Pair) -> None:
    """One short run of everything, so that the first visitor's times are not those of a cold start."""
    ids = torch.arange(1, 33, device=pair.target.device)[None] % pair.target.config.get_text_config().vocab_size
    # The pad token among them stands for a token like any other.
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 2, "do_sample": False}
    with whole_machine():
        pair.target.generate(ids, **settings)
        pair.target.generate(ids, **settings, bridge=pair.bridge)


PLAIN_STORY = (
    "Anna keeps the lighthouse at the end of the pier. Her brother Tom builds violins in the village, and their old "
    "friend Clara brings the post by boat twice a week. Last winter a storm broke the lamp, and Clara carried the new "
    "glass across the bay. Since then a blue violin hangs in the lighthouse. The person who built the blue violin is"
)


def family_examples(folder: Path) -> list[Example]:
    """From the bundled test questions: short and long stories, each with a question at its end."""
    from kvbridge_hf.evaluation import load_questions

    chosen: list[Example] = []
    for label, name, kinds in (
        ("Where do they live?", "test", ("city", "thing")),
        ("How many coins?", "test", ("coins",)),
        ("Who told whom?", "test", ("listener", "teller")),
        ("A long story", "test_long", ()),
        ("A diary", "test_diary", ()),
    ):
        path = folder / "questions" / f"{name}.jsonl"
        if not path.is_file():
            continue
        questions = load_questions(path)
        fitting = [question for question in questions if question.kind in kinds] or questions
        used = {example.prompt for example in chosen}
        for question in fitting:
            prompt = f"{question.context} {question.question}"
            if prompt not in used:
                chosen.append(Example(label, prompt, question.choices[question.answer].strip()))
                break
    return chosen


__all__ = ["Example", "Pair", "PairError", "Pairs", "family_examples"]
