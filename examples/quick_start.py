"""A large model answers from what a small model has read.

    python examples/quick_start.py

Runs on the bundled Tinytown family; put Hub ids in place of the three folders for models of your own.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbridge_hf import KVBridge, KVBridgeMapper, bundled  # importing it makes generate() understand bridge=

SOURCE, TARGET = str(bundled.model_path("s")), str(bundled.model_path("m"))
MAPPER = str(bundled.mapper_path("s-to-m"))
PROMPT = "Alice lives in Rome. Bob has a friend named Carl. Paula is a baker. Where does Alice live? Alice lives in"


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    source = AutoModelForCausalLM.from_pretrained(SOURCE, dtype=torch.float32)
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    mapper = KVBridgeMapper.from_pretrained(MAPPER, dtype=torch.float32)
    bridge = KVBridge(source, mapper, tokenizer=tokenizer)

    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    settings = {"max_new_tokens": 8, "do_sample": False}
    length = inputs["input_ids"].shape[1]

    native = target.generate(**inputs, **settings)
    print("the target alone:     ", tokenizer.decode(native[0, length:]))
    handed = target.generate(**inputs, **settings, bridge=bridge)
    print("after the handoff:    ", tokenizer.decode(handed[0, length:]))

    # The source has read the prompt already: hand its cache in, and it reads nothing again.
    read = source(**inputs, use_cache=True)
    cache = getattr(read, "cache", None) or read.past_key_values
    handed = target.generate(**inputs, **settings, bridge=bridge, source_cache=cache)
    print("from an existing cache:", tokenizer.decode(handed[0, length:]))
    report = bridge.last_report
    assert report is not None
    print(f"{report.status}: {report.tokens_mapped} tokens mapped, {report.tokens_native} read by the target itself")


if __name__ == "__main__":
    main()
