"""What the tests of the fitting methods share: tokens, a tiny pair, source content, and saving and loading."""

from __future__ import annotations

import torch
from models import tiny_model

from kvbridge_hf.modeling_kvbridge import KVBridgeMapper, SourceContent

VOCAB = 96


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def token_batches(rows: int, length: int, count: int = 4) -> list[torch.Tensor]:
    return [tokens(rows, length, seed) for seed in range(count)]


def make_pair(target_layers: int = 2):
    """A source of two layers and a target, both with two key/value heads of 16."""
    return tiny_model("qwen3", num_layers=2, seed=1), tiny_model("llama", num_layers=target_layers, seed=2)


def content(seed: int = 1, batch: int = 1, length: int = 7, layers: int = 2) -> SourceContent:
    """Random keys and values of a source of two heads of 16."""
    generator = torch.Generator().manual_seed(seed)
    return SourceContent(*(torch.randn(layers, batch, 2, length, 16, generator=generator) for _ in "kv"))


def assert_same_maps(one: KVBridgeMapper, other: KVBridgeMapper, source: SourceContent, **tolerance) -> None:
    for found, expected in zip(one(source), other(source), strict=True):
        torch.testing.assert_close(found[0], expected[0], **tolerance)
        torch.testing.assert_close(found[1], expected[1], **tolerance)


def assert_saved_and_loaded(mapper: KVBridgeMapper, folder) -> KVBridgeMapper:
    """The mapper that is loaded has the same tensors under the same names."""
    mapper.save_pretrained(folder)
    again = KVBridgeMapper.from_pretrained(folder)
    mine, theirs = mapper.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    return again
