"""A conversation that starts with the small model and goes on with the large one.

    python examples/escalate_mid_conversation.py

On the switch the large model gets what the small one has read and written mapped; on the way back there is no mapper,
so the small model reads natively what it lacks.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbridge_hf import HandoffSession, KVBridgeMapper, bundled

TURNS = [
    ("small", "Here is some news. Karen owns the violin. The home of Alice is Oslo. Who owns the violin?"),
    ("small", "Listen. Mark works as a baker. Mark has 3 coins. Which job does Mark have?"),
    ("large", "In which city is the home of Alice?"),
    ("small", "How many coins does Mark have?"),
]


def main() -> None:
    models = {
        name: AutoModelForCausalLM.from_pretrained(bundled.model_path(short), dtype=torch.float32)
        for name, short in (("small", "s"), ("large", "m"))
    }
    tokenizer = AutoTokenizer.from_pretrained(bundled.model_path("m"))
    up = KVBridgeMapper.from_pretrained(str(bundled.mapper_path("s-to-m")), dtype=torch.float32)
    session = HandoffSession(models, {("small", "large"): up}, tokenizer)

    session.send("system", "You are a good friend.")
    for model, question in TURNS:
        session.send("user", question)
        answer = session.generate(model, max_new_tokens=12, do_sample=False)
        report = session.reports[-1]
        print(f"user:  {question}")
        print(
            f"{model}: {answer}   [of {report.tokens_history} tokens {report.tokens_kept} kept, "
            f"{report.tokens_mapped} mapped, {report.tokens_native} read natively]"
        )
    print("the large model's cache:", session.spans("large"))


if __name__ == "__main__":
    main()
