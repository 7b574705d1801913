"""What a handed-over cache costs while it is mapped, and mapping it ahead on another thread, stream or device."""

from __future__ import annotations

import threading

import pytest
import torch
from handoff_reference import batch, pair, random_mapper, reference_cache
from live_memory import LiveMemory, cache_bytes
from models import tiny_model
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from kvbridge_hf import HandoffPolicy, KVBridge, cache_kvbridge
from kvbridge_hf.cache_argument import cache_kwargs
from kvbridge_hf.cache_kvbridge import BridgedCache
from kvbridge_hf.mapped_prefix import MappedPrefix
from kvbridge_hf.modeling_kvbridge import KVBridgeMapper, SourceContent
from kvbridge_hf.prompt_reading import read_columns
from kvbridge_hf.rotary import ContentRotary

pytestmark = pytest.mark.core


# What is asked of a mask is asked of a real one: fake tensors hold no numbers.
PADDED = torch.tensor([[False] + [True] * 8])


def assert_same(cache, expected):
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys, rtol=0, atol=2e-5)
        torch.testing.assert_close(layer.values, other.values, rtol=0, atol=2e-5)


def scratch(depth, padding):
    """Bytes above the two caches at the peak of mapping all layers, and of one target layer."""
    sizes = {"num_layers": depth, "num_heads": 2, "num_kv_heads": 2, "head_dim": 32}
    source, target = tiny_model("qwen3", **sizes), tiny_model("llama", seed=1, **sizes)
    bridge = KVBridge(source, random_mapper(source, target), HandoffPolicy(num_native_suffix=1))
    ids, mask = batch([256, 256 - padding])
    source_cache = read_columns(source, ids, mask.bool())
    bridge.check_target(target)
    with LiveMemory() as memory:
        cache = bridge.handoff(ids, mask, source_cache, target).map_all()
    assert memory.live >= cache_bytes(cache)
    return memory.peak - cache_bytes(cache), cache_bytes(cache) // depth


@pytest.mark.parametrize("padding", [0, 40])
def test_peak_memory_is_two_caches_and_one_layers_scratch_at_any_depth(padding):
    shallow, layer = scratch(4, padding)
    deep, _ = scratch(12, padding)
    assert deep <= shallow + layer // 4 and deep < 5 * layer


def test_live_memory_counts_what_is_alive():
    known = torch.ones(1000)
    with LiveMemory() as memory:
        first = known + 1
        view = first[:10].view(5, 2)
        second = known * 2
        del second
        third = known - 1
        del first
    # `view` keeps the first storage alive.
    assert memory.live == 8000 and memory.peak == 8000 and view.numel() + third.numel() > 0
    del view, third
    assert memory.live == 0


def test_forgotten_content_is_read_again_and_only_what_a_layer_reads_is_held():
    source, target, mapper = pair("qwen3", "llama")
    ids, mask = batch([12, 8])
    cache = KVBridge(source, mapper, HandoffPolicy(num_sinks=0)).handoff(ids, mask, target_model=target)
    content = cache.layers[0]._prefix.source
    for index, layer in enumerate(cache.layers):
        layer.map()
        assert content.held_layers == set(mapper.config.selected_layers[index])
    assert_same(cache, reference_cache(source, target, mapper, ids, mask, 11))
    before = content.keys(0)
    content.forget(0)
    assert 0 not in content.held_layers and content.keys(0) is not before
    torch.testing.assert_close(content.keys(0), before, rtol=0, atol=0)


def test_mapping_ahead_on_a_thread():
    source, target, mapper = pair("qwen3", "llama")
    ids, mask = batch([12, 8])
    bridge = KVBridge(source, mapper, HandoffPolicy(num_sinks=0))
    cache = bridge.handoff(ids, mask, target_model=target)
    cache.map_ahead().join()
    assert cache.num_mapped_layers == 4
    assert_same(cache, reference_cache(source, target, mapper, ids, mask, 11))
    racing = bridge.handoff(ids, mask, target_model=target)
    thread = racing.map_ahead()
    with torch.no_grad():
        together = target(ids[:, 11:], attention_mask=mask, **cache_kwargs(racing)).logits
        cold = bridge.handoff(ids, mask, target_model=target)
        alone = target(ids[:, 11:], attention_mask=mask, **cache_kwargs(cold)).logits
    thread.join()
    torch.testing.assert_close(together, alone)
    assert racing.report.times["map"] > 0


def test_a_map_that_fails_ahead_is_the_problem_of_whoever_touches_the_layer(monkeypatch):
    source, target, mapper = pair("qwen3", "llama")
    ids, mask = batch([12])
    map_layer = KVBridgeMapper.map_layer

    def fail(self, layer, content):
        if layer == 2:
            raise RuntimeError("out of memory")
        return map_layer(self, layer, content)

    monkeypatch.setattr(KVBridgeMapper, "map_layer", fail)
    cache = KVBridge(source, mapper, HandoffPolicy(num_sinks=0)).handoff(ids, mask, target_model=target)
    cache.map_ahead().join()
    assert cache.num_mapped_layers == 2 and cache.layers[1].keys is not None
    with pytest.raises(RuntimeError, match="out of memory"):
        _ = cache.layers[2].keys


class Stream:
    """Notes what is asked of an accelerator's stream; there is none on a CPU."""

    device = torch.device("cpu")

    def __init__(self, log, name):
        self.log, self.name = log, name

    def __enter__(self):
        self.log.append(f"enter {self.name}")

    def __exit__(self, *_):
        self.log.append(f"leave {self.name}")

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self.log.append(f"event of {self.name}")
        return "event"

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event} in thread {threading.current_thread().name}")


def test_a_layer_mapped_on_another_stream_is_waited_for_once_by_who_reads_it(monkeypatch):
    source, target, mapper = pair("qwen3", "llama")
    ids, mask = batch([12])
    log = []
    main = Stream(log, "main")
    monkeypatch.setattr(cache_kvbridge, "_current_stream", lambda device: main)
    kept = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: kept.append(stream.name))
    cache = KVBridge(source, mapper, HandoffPolicy(num_sinks=0)).handoff(ids, mask, target_model=target)
    cache.map_ahead(Stream(log, "side")).join()
    assert log == ["enter side", "side waits for main", *["event of side"] * 4, "leave side"] and not kept
    log.clear()
    for _ in range(2):
        assert cache.layers[1].keys is not None and cache.layers[1].values is not None
    assert log == ["main waits for event in thread MainThread"] and kept == ["main", "main"]
    log.clear()
    states = torch.zeros(1, 3, 1, 8)
    cache.update(states, states, 2)
    cache.update(states, states, 2)
    assert len(log) == 1


def getitem_without_a_device(tensor, index):
    """`tensor[index]` by operations that need no accelerator behind a fake tensor (the C++ indexing does)."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in entries:
        place = entries.index(Ellipsis)
        used = sum(entry is not None for entry in entries) - 1
        entries[place : place + 1] = [slice(None)] * (tensor.dim() - used)
    dim = 0
    for entry in entries:
        if isinstance(entry, int):
            tensor = tensor.select(dim, entry)
            continue
        if entry is None:
            tensor = tensor.unsqueeze(dim)
        else:
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, entry.start, entry.stop, entry.step or 1)
        dim += 1
    return tensor


def test_source_mapper_and_target_each_on_a_device_of_their_own(monkeypatch):
    """Fake tensors of three accelerators: PyTorch itself refuses any operation that mixes two of them.

    Only the map is seen so, from a source's states to the target's layers: models and masks need numbers.
    """
    monkeypatch.setattr(FakeTensor, "__getitem__", getitem_without_a_device, raising=False)
    source, target, mapper = pair("qwen3", "llama")
    rotaries = [ContentRotary.from_model(model) for model in (source, target)]
    first, second, third = (torch.device("cuda", index) for index in range(3))
    with FakeTensorMode(allow_non_fake_inputs=True):

        def moved(tensor, device):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

        states = torch.empty(1, 2, 9, 16, device=first)
        with pytest.raises(RuntimeError, match="device"):
            _ = states + torch.empty(1, 2, 9, 16, device=second)  # the guard works
        faked = KVBridgeMapper(mapper.config)
        for name, parameter in list(faked.named_parameters()):
            setattr(faked, name, torch.nn.Parameter(moved(parameter, second), requires_grad=False))
        positions = torch.empty(1, 9, dtype=torch.long, device=first)
        content = SourceContent([states] * 3, [states] * 3, positions)
        content._read_keys = lambda layer: rotaries[0].strip(states, positions, layer)
        places = {"position_ids": moved(positions, third), "source_columns": positions, "device": third}
        with unset_fake_temporarily():
            prefix = MappedPrefix(faked, content, rotaries[1], valid=PADDED, **places)
        cache = BridgedCache(prefix)
        for layer in cache.layers:
            assert layer.keys.device == layer.values.device == third and layer.keys.shape == (1, 3, 9, 8)
        states = torch.empty(1, 3, 1, 8, device=third)
        cache.update(states, states, 0)
