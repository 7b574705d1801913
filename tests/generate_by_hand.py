"""`generate` on a mapped cache that was built by hand, to compare `generate(bridge=...)` with."""

from __future__ import annotations

import copy

import torch
from handoff_reference import PAD, positions_of, reference_cache
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.cache_utils import QuantizedLayer

from kvbridge_hf.cache_argument import cache_kwargs, output_cache

#: The targets are a Qwen 3, a Llama and a Mistral.
PAIRS = [("llama", "qwen3"), ("qwen3", "llama"), ("qwen3", "mistral")]
NEW = 9

MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"num_beams": 3, "do_sample": False},
    "beam sampling": {"num_beams": 2, "do_sample": True},
    "returned beams": {"num_beams": 4, "num_return_sequences": 2, "do_sample": False},
    "returned samples": {"num_return_sequences": 3, "do_sample": True},
    "processors": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[7]]},
    "eos": {"do_sample": False, "eos_token_id": list(range(3, 40))},
    "length": {"do_sample": False, "max_new_tokens": None, "max_length": 24},
    "config": {
        "generation_config": GenerationConfig(do_sample=True, top_p=0.7, max_new_tokens=NEW, pad_token_id=PAD),
        "max_new_tokens": None,
    },
}


def expansion(mode):
    return max(mode.get("num_beams", 1), mode.get("num_return_sequences", 1))


def by_hand(models, ids, mask, *, num_sinks=0, suffix=1, **mode):
    """Plain generate on a hand-made cache; `mask` pads on the left."""
    source, target, mapper = models
    cache = reference_cache(source, target, mapper, ids, mask, ids.shape[1] - suffix, num_sinks)
    cache.batch_repeat_interleave(expansion(mode))
    return run(target, ids, mask, **cache_kwargs(cache), **mode)


def run(target, ids, mask=None, **kwargs):
    kwargs = {"max_new_tokens": NEW, "pad_token_id": PAD, **kwargs}
    if kwargs["max_new_tokens"] is None:
        del kwargs["max_new_tokens"]
    if "generation_config" in kwargs:
        del kwargs["pad_token_id"]
    torch.manual_seed(11)
    return target.generate(ids, attention_mask=mask, **kwargs)


def read(model, ids, mask):
    """A model's own cache."""
    with torch.no_grad():
        return output_cache(model(ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=True))


def forward_lengths(model):
    """A list that receives the columns of each forward, and the handle of its hook."""
    lengths = []
    handle = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return lengths, handle


def assistant(target):
    """The target with a little noise: right often, not always."""
    model = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.lm_head.weight.add_(0.1 * torch.randn(model.lm_head.weight.shape, generator=generator))
    model.generation_config.num_assistant_tokens = 4
    model.generation_config.num_assistant_tokens_schedule = "constant"
    return model


def character_tokenizer():
    """One token a character: the 93 printable ones of ASCII after the space."""
    vocab = {token: index for index, token in enumerate(["<pad>", "<unk>", "<bos>", *map(chr, range(33, 126))])}
    characters = Tokenizer(BPE(vocab, [], unk_token="<unk>"))
    characters.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>", padding_side="left"
    )


class EightBitLayer(QuantizedLayer):
    """A backend of Transformers' quantised cache that needs no further package: 8 bits, one scale a token."""

    def _quantize(self, tensor, axis):
        scale = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        return (tensor / scale).round().to(torch.int8), scale

    def _dequantize(self, quantized):
        states, scale = quantized
        return states * scale
