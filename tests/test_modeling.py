"""The mapper against independent float64 arithmetic, and its behaviour as an ordinary Transformers model."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from models import tiny_config
from torch import nn
from transformers import DynamicCache, StaticCache

from kvbridge_hf.configuration_kvbridge import KVBridgeConfig
from kvbridge_hf.errors import ArtifactError, CacheMismatchError
from kvbridge_hf.geometry import KVGeometry
from kvbridge_hf.kernels import map_full_head, map_head_local
from kvbridge_hf.modeling_kvbridge import KVBridgeMapper, MapperMethod, SourceContent, register_method

SOURCE = {"num_layers": 4, "num_kv_heads": 2, "head_dim": 6}
TARGET = {"num_layers": 3, "num_kv_heads": 3, "head_dim": 4}
SELECTED = [[2, 0], [3, 1], [0, 3]]
# Heads out of order and used twice, so that any other order of features would show.
ASSIGNED = [
    [[[1, 0], [0, 1], [1, 1]], [[0, 0], [1, 0], [0, 1]]],
    [[[0, 1], [0, 1], [0, 1]], [[1, 0], [1, 1], [0, 0]]],
    [[[1, 1], [0, 0], [1, 0]], [[0, 1], [1, 0], [1, 1]]],
]


def make_config(support: str = "full_head", **changes) -> KVBridgeConfig:
    values = {
        "source_geometry": SOURCE,
        "target_geometry": TARGET,
        "support": support,
        "top_k": 2,
        "selected_layers": SELECTED,
        "head_assignment": ASSIGNED if support == "head_local" else None,
    }
    return KVBridgeConfig(**(values | changes))


def make_mapper(support: str = "full_head", seed: int = 0) -> KVBridgeMapper:
    mapper = KVBridgeMapper(make_config(support))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in mapper.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return mapper


def make_source(batch: int = 2, tokens: int = 5, seed: int = 1, **kwargs) -> SourceContent:
    generator = torch.Generator().manual_seed(seed)
    shape = (SOURCE["num_layers"], batch, SOURCE["num_kv_heads"], tokens, SOURCE["head_dim"])
    keys, values = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    return SourceContent(list(keys), list(values), **kwargs)


def expected_map(mapper: KVBridgeMapper, layer: int, content: list[torch.Tensor], kind: str) -> np.ndarray:
    """The contract, entry by entry in float64: y[b, h, t] = W[layer, h]' x[b, h, t] + bias."""
    weight = getattr(mapper, f"{kind}_weight")[layer].detach().double().numpy()
    bias = getattr(mapper, f"{kind}_bias")[layer].detach().double().numpy()
    batch, source_heads, tokens, _ = content[0].shape
    out = np.zeros((batch, TARGET["num_kv_heads"], tokens, TARGET["head_dim"]))
    for b, h, t in np.ndindex(out.shape[:3]):
        features = []
        for rank, source_layer in enumerate(SELECTED[layer]):
            heads = range(source_heads) if mapper.config.support == "full_head" else ASSIGNED[layer][rank][h]
            for head in heads:
                features.extend(content[source_layer][b, head, t].double().tolist())
        out[b, h, t] = np.asarray(features) @ weight[h] + bias[h]
    return out


@pytest.mark.parametrize("support", ["full_head", "head_local"])
def test_map_is_the_affine_map_of_the_contract(support):
    mapper, source = make_mapper(support), make_source()
    for layer, (keys, values) in enumerate(mapper(source)):
        assert keys.dtype == values.dtype == torch.float32
        for mapped, kind in ((keys, "key"), (values, "value")):
            read = source.keys if kind == "key" else source.values
            content = [read(index) for index in range(SOURCE["num_layers"])]
            np.testing.assert_allclose(mapped.detach(), expected_map(mapper, layer, content, kind), atol=2e-5)


@pytest.mark.parametrize("support", ["full_head", "head_local"])
def test_state_dict_has_the_names_and_shapes_of_the_contract(support):
    shapes = {name: tuple(tensor.shape) for name, tensor in make_mapper(support).state_dict().items()}
    features = 2 * 2 * 6
    expected = {
        "key_weight": (3, 3, features, 4),
        "value_weight": (3, 3, features, 4),
        "key_bias": (3, 3, 4),
        "value_bias": (3, 3, 4),
        "selected_layers": (3, 2),
    }
    assert shapes == (expected | {"source_heads": (3, 2, 3, 2)} if support == "head_local" else expected)


@pytest.mark.parametrize("support", ["full_head", "head_local"])
def test_identity_returns_its_input(support):
    geometry = KVGeometry(
        model_type="qwen3",
        num_query_heads=4,
        hidden_size=16,
        vocab_size=32,
        layer_types=("full_attention",) * 4,
        rotary_layers=(True,) * 4,
        rotary={},
        max_position_embeddings=64,
        **SOURCE,
    )
    mapper, source = KVBridgeMapper.identity(geometry, support=support), make_source()
    for layer, (keys, values) in enumerate(mapper(source)):
        torch.testing.assert_close(keys, source.keys(layer), rtol=0, atol=0)
        torch.testing.assert_close(values, source.values(layer), rtol=0, atol=0)


def test_padding_reaches_nothing():
    """A padded row, NaN in its padding, gives at its real columns what the row alone gives."""
    valid = torch.tensor([[False, False, True, True, True], [True, True, True, True, False]])
    source = make_source()
    keys, values = ([read(layer).clone() for layer in range(4)] for read in (source.keys, source.values))
    for tensor in (*keys, *values):
        tensor.masked_fill_(~valid[:, None, :, None], float("nan"))
    mapper = make_mapper()
    padded = mapper(SourceContent(keys, values, valid=valid))
    for row in range(2):
        columns = valid[row]
        alone = mapper(SourceContent(*([t[row : row + 1, :, columns] for t in kind] for kind in (keys, values))))
        for (padded_keys, padded_values), (alone_keys, alone_values) in zip(padded, alone, strict=True):
            assert padded_keys.isfinite().all() and padded_values.isfinite().all()
            torch.testing.assert_close(padded_keys[row : row + 1, :, columns], alone_keys)
            torch.testing.assert_close(padded_values[row : row + 1, :, columns], alone_values)


@pytest.mark.parametrize("kernel", [map_full_head, map_head_local])
def test_sixteen_bit_products_accumulate_in_float32(kernel):
    # 4,096 ones: a bfloat16 accumulator stops at 256.
    features = 4096
    weight = torch.ones(2, features, 8, dtype=torch.bfloat16)
    x = torch.ones((1, 3, features) if kernel is map_full_head else (1, 2, 3, features), dtype=torch.bfloat16)
    y = kernel(x, weight, torch.zeros(2, 8, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16 and y.shape == (1, 2, 3, 8)
    assert (y == features).all()


def test_float32_mapper_on_bfloat16_source_computes_in_float32():
    mapper, source = make_mapper(), make_source()
    half = SourceContent(*([read(layer).bfloat16() for layer in range(4)] for read in (source.keys, source.values)))
    keys, _ = mapper.map_layer(0, half)
    assert keys.dtype == torch.float32
    content = [half.keys(layer) for layer in range(4)]
    np.testing.assert_allclose(keys.detach(), expected_map(mapper, 0, content, "key"), atol=2e-5)


def test_gradients_reach_every_parameter():
    mapper = make_mapper()
    sum((keys.square().sum() + values.square().sum()) for keys, values in mapper(make_source())).backward()
    for name, parameter in mapper.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_is_an_ordinary_module():
    mapper = make_mapper().to(torch.float64)
    assert mapper.dtype == torch.float64 and mapper.selected_layers.dtype == torch.long
    twin = copy.deepcopy(mapper)
    with torch.no_grad():
        mapper.key_bias.zero_()
    assert twin.key_bias.abs().sum() > 0


class CountingRotary:
    """Stands in for the source's rotary module; notes which layers were asked for."""

    def __init__(self):
        self.layers = []

    def strip(self, keys, position_ids, layer_idx):
        self.layers.append(layer_idx)
        return keys - position_ids[:, None, :, None]


def fill(cache, tokens: int):
    generator = torch.Generator().manual_seed(3)
    for layer in range(SOURCE["num_layers"]):
        cache.update(
            *torch.randn(2, 2, SOURCE["num_kv_heads"], tokens, SOURCE["head_dim"], generator=generator), layer
        )
    return cache


def test_cache_is_read_lazily_once_and_never_written():
    cache, rotary = fill(DynamicCache(), 7), CountingRotary()
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    source = SourceContent.from_cache(cache, rotary, torch.arange(7)[None], start=2, stop=6)
    assert rotary.layers == [] and (source.batch_size, source.num_tokens) == (2, 4)
    mapper = make_mapper()
    mapper.map_layer(1, source)
    assert sorted(rotary.layers) == [1, 3]
    mapper.map_layer(2, source)
    assert sorted(rotary.layers) == [0, 1, 3]
    expected = before[3][0][:, :, 2:6] - torch.arange(2, 6)[:, None]
    torch.testing.assert_close(source.keys(3), expected)
    torch.testing.assert_close(source.values(3), before[3][1][:, :, 2:6])
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


def test_unused_end_of_a_static_cache_is_left_out():
    config = tiny_config("qwen3", num_layers=4, num_kv_heads=2, head_dim=6)
    static, dynamic = fill(StaticCache(config, max_cache_len=16), 5), fill(DynamicCache(), 5)
    position_ids = torch.arange(5)[None]
    a, b = (SourceContent.from_cache(cache, CountingRotary(), position_ids) for cache in (static, dynamic))
    assert a.num_tokens == 5
    torch.testing.assert_close(a.keys(1), b.keys(1))
    torch.testing.assert_close(a.values(1), b.values(1))


def test_cache_shorter_than_the_prompt_is_refused():
    with pytest.raises(CacheMismatchError, match="holds 3 tokens and 5"):
        SourceContent.from_cache(fill(DynamicCache(), 3), CountingRotary(), torch.arange(5)[None])
    with pytest.raises(CacheMismatchError, match="holds 0 tokens"):
        SourceContent.from_cache(DynamicCache(), CountingRotary(), torch.arange(5)[None])


def test_source_with_another_number_of_layers_is_refused():
    source = SourceContent([torch.zeros(1, 2, 3, 6)] * 5, [torch.zeros(1, 2, 3, 6)] * 5)
    with pytest.raises(CacheMismatchError, match="4 layers, got 5"):
        make_mapper().map_layer(0, source)


BAD_CONFIGS = {
    "negative layer": ({"selected_layers": [[2, -1], [3, 1], [0, 3]]}, r"selected_layers\[0\]"),
    "layer out of range": ({"selected_layers": [[2, 0], [3, 4], [0, 3]]}, "layers 0 to 3"),
    "layer twice": ({"selected_layers": [[2, 0], [3, 1], [3, 3]]}, r"selected_layers\[2\]"),
    "row too short": ({"selected_layers": [[2, 0], [3], [0, 3]]}, r"selected_layers\[1\]"),
    "row missing": ({"selected_layers": [[2, 0], [3, 1]]}, "3 target layers"),
    "no geometry": ({"source_geometry": {}}, "source_geometry"),
    "no heads": ({"target_geometry": TARGET | {"num_kv_heads": 0}}, "num_kv_heads"),
    "unknown support": ({"support": "sparse"}, "sparse"),
    "unknown method": ({"method": "no_such_method"}, "no_such_method"),
    "no top_k": ({"top_k": 0}, "top_k"),
    "negative sinks": ({"num_sinks": -1}, "num_sinks"),
    "heads without head_local": ({"head_assignment": ASSIGNED}, "head_assignment"),
}
BAD_ASSIGNMENTS = {
    "missing": None,
    "head out of range": [[[[2, 0]] * 3] * 2] * 3,
    "negative head": [[[[-1, 0]] * 3] * 2] * 3,
    "unequal blocks": [[[[0, 1], [0], [1]]] * 2] * 3,
    "empty blocks": [[[[]] * 3] * 2] * 3,
    "too few target heads": [[[[0, 1]] * 2] * 2] * 3,
}


@pytest.mark.parametrize("changes, message", BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_malformed_config_is_refused(changes, message):
    with pytest.raises(ArtifactError, match=message):
        KVBridgeMapper(make_config(**changes))


@pytest.mark.parametrize("assignment", BAD_ASSIGNMENTS.values(), ids=BAD_ASSIGNMENTS)
def test_malformed_head_assignment_is_refused(assignment):
    with pytest.raises(ArtifactError, match="head_assignment|names heads"):
        KVBridgeMapper(make_config("head_local", head_assignment=assignment))


def test_a_method_is_one_class(tmp_path):
    """A low-rank map that also reads an extra tensor: what a file in `mappers/` has to write, and no more."""

    @register_method
    class LowRank(MapperMethod):
        name = "low_rank_of_the_test"
        requires = ("anchor",)

        def build(self, mapper):
            rank = mapper.config.method_config["rank"]
            mapper.down = nn.Parameter(torch.empty(SOURCE["head_dim"], rank))
            mapper.up = nn.Linear(rank, TARGET["head_dim"], bias=False)

        def init_weights(self, mapper):
            nn.init.constant_(mapper.down, 0.5)
            nn.init.constant_(mapper.up.weight, 2.0)

        def map_layer(self, mapper, target_layer, source):
            def low_rank(content):
                return mapper.up(content @ mapper.down).repeat_interleave(2, dim=1)[:, :3]

            layer = mapper.config.selected_layers[target_layer][0]
            return low_rank(source.keys(layer)) + source.extra("anchor"), low_rank(source.values(layer))

    mapper = KVBridgeMapper(make_config(method="low_rank_of_the_test", method_config={"rank": 3}))
    assert set(mapper.state_dict()) == {"down", "up.weight", "selected_layers"}
    source = make_source(extras={"anchor": torch.tensor(7.0)})
    keys, values = mapper.map_layer(0, source)
    # Rank 3, every entry 0.5 * 2: each output channel is three times the sum of the input channels.
    expected = 3 * source.values(2).sum(-1, keepdim=True).repeat_interleave(2, dim=1)[:, :3].expand(-1, -1, -1, 4)
    torch.testing.assert_close(values, expected)
    with pytest.raises(CacheMismatchError, match="anchor"):
        mapper.map_layer(0, make_source())
    mapper.save_pretrained(tmp_path / "mapper")
    again = KVBridgeMapper.from_pretrained(tmp_path / "mapper")
    torch.testing.assert_close(again.map_layer(0, source)[0], keys, rtol=0, atol=0)
