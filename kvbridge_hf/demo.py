"""What `kvbridge demo` and `kvbridge generate` do: a handoff on real models, beside what it is compared with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from . import bundled
from .evaluation import Judge, build_report, load_questions, measure_latency, split_documents
from .evaluation.controls import BridgeHandoff
from .generation_kvbridge import KVBridge
from .guard.settings import Gates
from .handoff import HandoffPolicy
from .modeling_kvbridge import KVBridgeMapper

PATH_LABELS = {
    "target_prefill": "target reads the prompt itself",
    "handoff": "handoff of the source's cache",
    "source_prefill_handoff": "source reads it, then handoff",
    "target_cache": "target has its own cache already",
}


def load_model(name_or_path: str | Path, dtype: Any = "auto") -> Any:
    """A causal LM for inference, on a GPU where there is one; on a CPU in float32 (16-bit products are slow there)."""
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if device == "cpu" and dtype == "auto" else dtype
    model = AutoModelForCausalLM.from_pretrained(str(name_or_path), dtype=dtype)
    return model.eval().to(device)


def read_texts(path: Path, limit: int | None = None) -> list[str]:
    """The `text` of each line of a JSONL file."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line)["text"] for number, line in enumerate(file) if limit is None or number < limit]


def fit_bundled(
    source: PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: Any,
    preset: str = "default",
    lookups: list[Any] | None = None,
) -> KVBridgeMapper:
    """Fit a mapper on the bundled calibration texts, and calibrate its gates on the texts that are there for them.

    `lookups` are texts with questions about them, for presets that learn from such (see `fit_mapper`).
    """
    from .calibration.driver import fit_mapper
    from .guard import calibrate_gates
    from .mappers.config import FitConfig

    def batches(name: str) -> list[torch.Tensor]:
        return [tokenizer(text, return_tensors="pt")["input_ids"] for text in read_texts(bundled.text_path(name))]

    config = FitConfig.preset(preset)
    mapper = fit_mapper(
        source, target, batches("train"), config, tokenizer=tokenizer, dataset="tinytown/train", lookups=lookups
    )
    calibrate_gates(source, target, mapper, batches("gates"))
    return mapper


@torch.no_grad()
def run_demo(
    pair: str = "s-to-m",
    *,
    fit: bool = False,
    prompt: str | None = None,
    max_new_tokens: int = 24,
    num_questions: int = 120,
    latency_repeats: int = 10,
) -> dict[str, Any]:
    """Hand a prompt over within the bundled family and measure how well it went.

    Args:
        pair: `SOURCE-to-TARGET` of the family.
        fit: fit the mapper now instead of loading the bundled one.
        prompt: a text; a Tinytown story of about 300 tokens by default.
        max_new_tokens: of each continuation, greedy.
        num_questions: of the test set, for the accuracies.
        latency_repeats: timed runs of each of the four paths.

    Returns:
        A JSON-able dict: `source`, `target`, `prompt_tokens`, `status`, the three continuations, `kl_mean` and
        `top1_agreement` (on the documents of the bundled test text), `accuracy` of each condition on the questions,
        `gap_recovered`, `latency_ms` (medians of the four paths, with their spread in `latency`), `mapper_parameters`.
    """
    source_name, target_name = bundled.split_pair(pair)
    source_path, target_path = bundled.model_path(source_name), bundled.model_path(target_name)
    tokenizer = AutoTokenizer.from_pretrained(str(target_path))
    source, target = load_model(source_path), load_model(target_path)
    mapper: Any
    if fit:
        mapper = fit_bundled(source, target, tokenizer)
    else:
        mapper = KVBridgeMapper.from_pretrained(str(bundled.mapper_path(pair)), dtype=torch.float32)
    bridge = KVBridge(source, mapper.to(target.device), tokenizer=tokenizer)

    questions = load_questions(bundled.questions_path("test"), limit=num_questions)
    if prompt is None:
        longest = max(questions, key=lambda question: len(question.context))
        prompt = f"{longest.context} {longest.question}"
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(target.device)
    length = inputs["input_ids"].shape[1]
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
    native = target.generate(**inputs, **settings)
    handed = target.generate(**inputs, **settings, bridge=bridge)
    suffix = max(1, int(mapper.config.num_native_suffix))
    blind = target.generate(**{name: tensor[:, -suffix:] for name, tensor in inputs.items()}, **settings)

    documents = split_documents(
        [tokenizer(text)["input_ids"] for text in read_texts(bundled.text_path("test"))], continuation_tokens=32
    )
    judge = Judge(source, target, questions=questions, documents=documents, tokenizer=tokenizer, attention=False)
    # Without gates: a fallback would be judged as a handoff that went well.
    ungated = KVBridge(source, bridge.mapper, HandoffPolicy(gates=Gates.off()), tokenizer=tokenizer)
    handoff = BridgeHandoff(ungated, target)
    report = build_report(judge.judge(handoff))
    latency = measure_latency(source, target, handoff, inputs["input_ids"], repeats=latency_repeats)
    conditions = report["conditions"]
    return {
        "source": source_path.name,
        "target": target_path.name,
        "prompt": prompt,
        "prompt_tokens": length,
        "status": handed.handoff_report.status,
        "native_text": tokenizer.decode(native.sequences[0, length:], skip_special_tokens=True),
        "handoff_text": tokenizer.decode(handed.sequences[0, length:], skip_special_tokens=True),
        "no_context_text": tokenizer.decode(blind.sequences[0, suffix:], skip_special_tokens=True),
        "tokens_mapped": handed.handoff_report.tokens_mapped,
        "tokens_native": handed.handoff_report.tokens_native,
        "kl_mean": conditions["handoff"]["kl"]["estimate"],
        "kl_no_context": conditions["no_context"]["kl"]["estimate"],
        "top1_agreement": conditions["handoff"]["top1"]["estimate"],
        "accuracy": {
            name: conditions[name]["accuracy"]["estimate"] for name in ("target", "handoff", "no_context", "source")
        },
        "gap_recovered": report["headline"]["gap_recovered"],
        "share_of_prefill": report["cost"]["share_of_prefill"],
        "num_questions": len(questions),
        "num_documents": len(documents),
        "latency_ms": {name: latency["paths"][name]["median"] for name in PATH_LABELS},
        "latency": latency,
        "mapper_parameters": sum(parameter.numel() for parameter in mapper.parameters()),
    }


def to_text(result: dict[str, Any]) -> str:
    """The demo's result for a terminal."""
    accuracy, latency = result["accuracy"], result["latency_ms"]
    gap = result["gap_recovered"]
    share = gap["estimate"]
    lines = [
        f"{result['source']} has read {result['prompt_tokens']} tokens; {result['target']} goes on from its cache "
        f"({result['tokens_mapped']} mapped, {result['tokens_native']} read natively; status: {result['status']}).",
        "",
        f"  ... {result['prompt'][-160:]}",
        f"  target alone   {result['native_text']}",
        f"  handoff        {result['handoff_text']}",
        f"  no context     {result['no_context_text']}",
        "",
        f"On {result['num_documents']} test documents: KL {result['kl_mean']:.4f} nats a token (no context "
        f"{result['kl_no_context']:.4f}), top-1 agreement {result['top1_agreement']:.1%}",
        f"On {result['num_questions']} test questions, right answers:",
        *(f"  {name:<13}{accuracy[name]:7.1%}" for name in ("target", "handoff", "source", "no_context")),
        f"  share of the gap between source and target recovered: {'undefined' if share is None else f'{share:.0%}'}",
        "",
        "First logits, median of the timed runs on this machine:",
        *(f"  {label:<34}{latency[name]:8.2f} ms" for name, label in PATH_LABELS.items()),
        "",
        f"Mapper: {result['mapper_parameters']:,} parameters. Small models of our own; no claim about others.",
    ]
    return "\n".join(lines)


def generate_once(
    prompt: str,
    source: str,
    target: str,
    mapper: str,
    max_new_tokens: int,
    *,
    do_sample: bool = False,
    seed: int = 0,
    on_failure: str = "error",
) -> dict[str, Any]:
    """Generate from one prompt across a pair; returns the text and the handoff's report."""
    policy = HandoffPolicy(on_failure=on_failure)
    bridge_mapper: Any = KVBridgeMapper.from_pretrained(mapper)
    tokenizer = AutoTokenizer.from_pretrained(target)
    source_model, target_model = load_model(source), load_model(target)
    bridge = KVBridge(source_model, bridge_mapper.to(target_model.device), policy, tokenizer=tokenizer)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(target_model.device)
    torch.manual_seed(seed)
    output = target_model.generate(
        **inputs, bridge=bridge, max_new_tokens=max_new_tokens, do_sample=do_sample, return_dict_in_generate=True
    )
    text = tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return {"text": text, "report": output.handoff_report.to_dict()}
