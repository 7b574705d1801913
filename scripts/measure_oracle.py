"""What a perfect choice of the tokens to repair would be worth, and how often each choice finds what it would.

python scripts/measure_oracle.py --pair s-to-m --split validation

The oracle knows which sentences hold the answer and the facts on the way to it, as the generator of the Tinytown world
wrote them: the last statement or event that sets a fact, the introduction that a pronoun points to, both steps of a
two-step question. Three Markdown tables are printed: handoffs that repair these sentences alone, the same by kind of
question, and the share of questions for which a choice takes all tokens of these sentences (coverage). First tokens
and last ones that the target reads in any case need no choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import torch
from choice_setup import ChoiceSetup, interval, parser
from needed_sentences import regenerate, tokens_of, with_same_people

from kvbridge_hf import HandoffPolicy, KVBridge, handoff_repair
from kvbridge_hf.attention_reading import attention_to_prefix
from kvbridge_hf.evaluation import BridgeHandoff, Judge, build_report
from kvbridge_hf.guard.settings import Gates
from kvbridge_hf.prompt_reading import read_columns
from kvbridge_hf.repair_choice import choose, segments_of

CHOICES = "question question+source_attention source_attention target_attention learned recency random".split()


class HookedHandoff(BridgeHandoff):
    """A handoff in which a function says what is repaired, as it knows the questions.

    Args:
        bridge, target_model: see [`BridgeHandoff`].
        needed: for each question the needed ones `(tokens,)` among the tokens of its context.
    """

    def __init__(self, bridge: KVBridge, target_model: Any, needed: Sequence[torch.Tensor]):
        super().__init__(bridge, target_model)
        self.needed = needed
        self.tokens = self.repaired = 0

    def hook(self, scores: torch.Tensor, eligible: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """The oracle: what is needed, whatever the scores."""
        return wanted

    def for_questions(self, batch: Any) -> Any:
        columns = batch.prefix_ids.shape[1]
        flags = [self.needed[item] for item in batch.items]
        needed = torch.stack([torch.nn.functional.pad(row, (columns - len(row), 0)) for row in flags])

        def chosen(scores: torch.Tensor, eligible: torch.Tensor, fraction: float) -> torch.Tensor:
            wanted = needed[:, : eligible.shape[1]].to(eligible.device) & eligible
            taken = self.hook(scores, eligible, wanted)
            self.repaired += int(taken.sum())
            return taken

        self.tokens += int(batch.prefix_mask[batch.rows].sum())
        with mock.patch.object(handoff_repair, "choose", chosen):
            return super().for_questions(batch)

    def choice_flops(self, num_tokens: int, num_question: int) -> float:
        return 0.0


class Coverage(HookedHandoff):
    """Counts the questions for which all that is needed is among the best-scored tokens; repairs nothing."""

    def __init__(
        self, bridge: KVBridge, target_model: Any, needed: Sequence[torch.Tensor], fractions: Sequence[float]
    ):
        super().__init__(bridge, target_model, needed)
        self.covered = dict.fromkeys(fractions, 0)

    def hook(self, scores: torch.Tensor, eligible: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        for fraction in self.covered:
            self.covered[fraction] += int((~(wanted & ~choose(scores, eligible, fraction)).any(1)).sum())
        return torch.zeros_like(eligible)

    @torch.no_grad()
    def measure(self, batches: Iterable[Any]) -> list[float]:
        for batch in batches:
            self.for_questions(batch)
        return [count / len(self.needed) for count in self.covered.values()]


class OwnAttention(Coverage):
    """As if the choice knew in which sentences the target looks when it has read the context itself.

    A sentence counts by the most attention that any head gives to a token of it from the question's last token, as in
    the labels of a scorer's training.
    """

    def for_questions(self, batch: Any) -> Any:
        cache = read_columns(self.target_model, batch.prefix_ids, batch.prefix_mask.bool())
        cache.batch_select_indices(batch.rows)
        ids = torch.cat([batch.prefix_ids[batch.rows], batch.suffix_ids], dim=1)
        mask = torch.cat([batch.prefix_mask[batch.rows], batch.suffix_mask], dim=1)
        self.looks = attention_to_prefix(self.target_model, cache, ids, mask)[:, :, -1].amax(1)
        held = self.looks.shape[1]
        boundaries = torch.tensor(self.mapper.config.boundary_tokens, dtype=torch.long)
        self.segments = segments_of(ids[:, :held], mask[:, :held].bool(), boundaries)
        return super().for_questions(batch)

    def hook(self, scores: torch.Tensor, eligible: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        looks, segments = (kept[:, : eligible.shape[1]] for kept in (self.looks, self.segments))
        most = looks.new_zeros(len(looks), int(segments.max()) + 1)
        most = most.scatter_reduce(1, segments, looks * eligible, "amax")
        return super().hook(most.gather(1, segments), eligible, wanted)


def oracle_tables(judge: Judge, bridge: KVBridge, marked: dict[str, list[torch.Tensor]]) -> None:
    """Accuracy and cost of handoffs that repair just what is marked, under its name; then by kind, of the first."""
    print("| condition | accuracy | tokens repaired | cost |\n| --- | ---: | ---: | ---: |")
    kinds: dict[str, Any] = {}
    for number, (name, needed) in enumerate(marked.items()):
        handoff = HookedHandoff(bridge, judge.target_model, needed)
        report = build_report(judge.judge(handoff, controls=("native_only",)))
        accuracy = {condition: interval(entry["accuracy"]) for condition, entry in report["conditions"].items()}
        if number == 0:
            kinds = report["kinds"]
            print(f"| target alone | {accuracy['target']} | | 100.0% |\n| source alone | {accuracy['source']} | | |")
        share = f"{handoff.repaired / handoff.tokens:.1%}"
        print(f"| {name} | {accuracy['handoff']} | {share} | {report['cost']['share_of_prefill']:.1%} |")
        print(f"| {name}, mapped tokens hidden | {accuracy['native_only']} | {share} | |", flush=True)
    conditions = ("target", "source", "handoff", "native_only")
    print(f"\n| kind | questions | target | source | {next(iter(marked))} | mapped tokens hidden |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for kind, entry in kinds.items():
        right = " | ".join(f"{entry['accuracy'][condition]['estimate']:.1%}" for condition in conditions)
        print(f"| {kind} | {entry['questions']} | {right} |")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--fractions", nargs="+", type=float, default=[0.05, 0.08, 0.1, 0.12, 0.15])
    arguments.add_argument("--choices", nargs="+", default=CHOICES)
    args = arguments.parse_args()
    setup = ChoiceSetup(args)
    judge, source, target = setup.judge, setup.source, setup.target
    written = regenerate(args.split, setup.questions)
    wanted = {
        "needed sentences": [needed for _, needed in written],
        "and all that name the same people": [with_same_people(*pair) for pair in written],
    }
    marked = {
        name: [
            tokens_of(setup.tokenizer, writer, segments, question.context)
            for (writer, _), segments, question in zip(written, chosen, judge.questions, strict=True)
        ]
        for name, chosen in wanted.items()
    }
    mapper = setup.mapper(top_k=2)

    # Any share that is not zero lets the handoff ask for a choice; the hooks say how many tokens that is.
    def policy(choice: str) -> HandoffPolicy:
        return HandoffPolicy(native_fraction=1.0, repair=choice, gates=Gates.off())

    oracle_tables(judge, KVBridge(source, mapper, policy("recency")), marked)
    print(f"\n| choice | {' | '.join(f'{fraction:.0%}' for fraction in args.fractions)} |")
    print(f"| --- |{' ---: |' * len(args.fractions)}")
    needed, batches = marked["needed sentences"], judge.batches["questions"]
    ways: list[tuple[str, type[Coverage], str]] = [(choice, Coverage, choice) for choice in args.choices]
    ways.append(("*sentences that the target looks at on its own cache*", OwnAttention, "recency"))
    for name, kind, choice in ways:
        coverage = kind(KVBridge(source, mapper, policy(choice)), target, needed, args.fractions)
        shares = coverage.measure(batches)
        print(f"| {name} | {' | '.join(f'{share:.1%}' for share in shares)} |", flush=True)


if __name__ == "__main__":
    main()
