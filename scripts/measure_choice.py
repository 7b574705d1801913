"""What a choice of the tokens to repair is worth: accuracy and cost on the questions alone, as a Markdown table.

python scripts/measure_choice.py --split validation        # what settings are chosen by
python scripts/measure_choice.py --split test              # what is reported

The study (`study_methods.py`) counts the cost of questions and documents together; here it is that of the questions.
"""

from __future__ import annotations

from choice_setup import ChoiceSetup, interval, parser

from kvbridge_hf import HandoffPolicy, KVBridge
from kvbridge_hf.evaluation import BridgeHandoff, Judge, build_report
from kvbridge_hf.guard.settings import Gates


def row(judge: Judge, bridge: KVBridge, name: str) -> str:
    """One line of the table."""
    report = build_report(judge.judge(BridgeHandoff(bridge, judge.target_model), controls=()))
    accuracy = report["conditions"]["handoff"]["accuracy"]
    gap, cost = report["headline"]["gap_recovered"], report["cost"]
    parts = " + ".join(f"{cost[part]:.1%}" for part in ("map_share", "native_share", "repair_share", "choice_share"))
    return f"| {name} | {interval(accuracy)} | {interval(gap)} | {cost['share_of_prefill']:.1%} | {parts} |"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--top-k", nargs="+", type=int, default=[2])
    arguments.add_argument("--fractions", nargs="+", type=float, default=[0.07, 0.1, 0.15])
    arguments.add_argument("--choices", nargs="+", default=["question", "question+source_attention", "learned"])
    args = arguments.parse_args()
    setup = ChoiceSetup(args)
    print("| choice | accuracy | gap recovered | cost | map + native + repair + choice |")
    print("| --- | ---: | ---: | ---: | ---: |")
    # A mapper that is given has its own number of layers.
    for top_k in args.top_k if args.mapper is None else args.top_k[:1]:
        mapper = setup.mapper(top_k)
        for choice in args.choices:
            for fraction in args.fractions:
                policy = HandoffPolicy(native_fraction=fraction, repair=choice, gates=Gates.off())
                name = f"{choice}, {fraction:g}, k={mapper.config.top_k}"
                print(row(setup.judge, KVBridge(setup.source, mapper, policy), name), flush=True)


if __name__ == "__main__":
    main()
