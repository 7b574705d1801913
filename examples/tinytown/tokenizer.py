"""The tokenizer of the Tinytown family: one entry a word, bytes for everything else, and a chat template.

python examples/tinytown/tokenizer.py FOLDER
"""

from __future__ import annotations

import sys

import words as W
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import Unigram
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<unk>"]
PUNCTUATION = list(".,?:;\"-!'")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <|end|>"
    "{% if not loop.last %} {% endif %}{% endfor %}{% if add_generation_prompt %} <|assistant|>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Special tokens, punctuation, ``▁word`` entries, then the 256 bytes that any other text falls back to."""
    entries = SPECIAL + PUNCTUATION + ["▁"] + [f"▁{mark}" for mark in '"-'] + [f"▁{word}" for word in W.vocabulary()]
    # Every entry costs the same, so that the segmentation with the fewest pieces wins: whole words. Bytes cost more.
    scores = [(entry, -1.0) for entry in entries] + [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    core = Tokenizer(Unigram(scores, unk_id=entries.index("<unk>"), byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    core.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    core.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", SPECIAL.index("<|bos|>"))]
    )
    # The space before a marker belongs to the marker.
    markers = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    core.add_special_tokens([AddedToken(marker, lstrip=True, special=True) for marker in markers])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token=AddedToken("<|end|>", lstrip=True, special=True),
        unk_token="<unk>",
        additional_special_tokens=[AddedToken(marker, lstrip=True, special=True) for marker in markers[1:]],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


class SegmentEncoder:
    """Encodes segments word by word with a cache: the tokenizer's own result, fast enough for training."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer, self.cache = tokenizer, {}

    def word(self, text: str) -> tuple[int, ...]:
        ids = self.cache.get(text)
        if ids is None:
            ids = self.cache[text] = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        return ids

    def __call__(self, segments) -> tuple[list[int], list[bool]]:
        """Token ids with the beginning-of-sequence token, and for each whether it is part of an answer."""
        ids, answers = [self.tokenizer.bos_token_id], [False]
        for text, is_answer in segments:
            for word in text.split(" "):
                piece = self.word(word)
                ids.extend(piece)
                answers.extend([is_answer] * len(piece))
        return ids, answers


if __name__ == "__main__":
    build_tokenizer().save_pretrained(sys.argv[1])
