"""Decode from a KV cache that another model has built: the mapper of this repository, in one file.

    target.generate(**inputs, custom_generate="<this repository>", trust_remote_code=True, source_model=source)

It needs Transformers and nothing else. The source reads the prompt; its keys are freed of their rotary rotation,
mapped to the target's layers by the affine maps of this repository, and rotated as the target does. The target reads
the first few and the last few tokens itself, recomputes what the config's `native_layers` and `native_fraction` say,
and goes on with its own `generate`. Files are checked against `kvbridge_manifest.json`, both models against the
digests in `config.json`. The tokens are those of the library `kvbridge_hf` where the config's `repair` is "question";
other choices need the library, and the question's words stand in for them here. The library also watches gates, falls
back, reports, takes a cache that the source has already, and maps a layer when it is first touched.
"""

import contextlib
import functools
import hashlib
import inspect
import json
import os
import sys
import warnings
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file
from torch.nn.functional import pad
from transformers import DynamicCache, GenerationMixin

MANIFEST = "kvbridge_manifest.json"
# Transformers calls a cache `past_key_values` up to 5.17 and `cache` later.
CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)
# The last tokens of a prompt that count as its question, at least.
QUESTION_TOKENS = 8
# Names of the parameters that make keys and values, for the digest of a checkpoint.
KV_NAMES = frozenset(
    ("k_proj", "v_proj", "kv_proj", "qkv_proj", "k_norm", "v_norm", "key_layernorm", "k_layernorm", "key", "value")
    + ("query_key_value", "c_attn", "Wqkv", "qkv", "W_pack", "att_proj", "k", "v")
)


@torch.no_grad()
def generate(model, inputs=None, source_model=None, mapper=None, token=None, cache_dir=None, **kwargs):
    """Let `source_model` read the prompt and `model` generate from it.

    Args:
        model: the target; Transformers passes it.
        inputs: token ids `(batch, tokens)`, or pass them as `input_ids`. Rows may be padded on the left.
        source_model: the model that the mapper was fitted for as source.
        mapper: folder or repository id of the mapper; by default the one that this file belongs to.
        token, cache_dir: for the download.
        kwargs: anything that `generate` takes: sampling, beams, streamers, stopping criteria, ...
    """
    input_ids = kwargs.pop("input_ids", None)
    input_ids = inputs if input_ids is None else input_ids
    if source_model is None or input_ids is None:
        raise ValueError("Pass input_ids= (or inputs=) and source_model=, the model that is to read the prompt.")
    if kwargs.get("cache") is not None or kwargs.get("past_key_values") is not None:
        raise ValueError("The cache is made here; leave cache= and past_key_values= out.")
    kwargs = {name: value for name, value in kwargs.items() if name not in ("cache", "past_key_values", "revision")}
    mask = kwargs.pop("attention_mask", None)
    mask = torch.ones_like(input_ids) if mask is None else mask.long()
    if not mask[:, -1].all():
        raise ValueError("Pad the prompts on the left: tokenizer.padding_side = 'left'.")

    repository, revision = (mapper, None) if mapper else locate()
    config, tensors = load(repository, revision, token, cache_dir)
    check_model(source_model, config["source_geometry"], config["source_fingerprint"], "source")
    check_model(model, config["target_geometry"], config["target_fingerprint"], "target")

    # The last tokens are left to the target, at least one: its logits start the continuation.
    columns = input_ids.shape[1] - max(1, config["num_native_suffix"])
    if columns > 0:
        cache = hand_over(source_model, model, config, tensors, input_ids[:, :columns], mask[:, :columns])
        read_lowest_layers(model, cache, input_ids[:, :columns], mask[:, :columns], config.get("native_layers", 0))
        repair(model, cache, config, input_ids, mask)
        settings = kwargs.get("generation_config") or model.generation_config
        beams = kwargs.get("num_beams") or getattr(settings, "num_beams", None) or 1
        returned = kwargs.get("num_return_sequences") or getattr(settings, "num_return_sequences", None) or 1
        if max(beams, returned) > 1:
            cache.batch_repeat_interleave(max(beams, returned))
        kwargs[CACHE] = cache
    return model.generate(input_ids, attention_mask=mask, **kwargs)


def hand_over(source_model, model, config, tensors, input_ids, mask):
    """The target's cache of these columns, mapped from the source's reading of them."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    content = read_source(source_model, config, input_ids, mask, positions)
    rows, heads, tokens = input_ids.shape[0], config["target_geometry"]["num_kv_heads"], input_ids.shape[1]
    num_sinks = min(config["num_sinks"], tokens)
    sinks = read_first_tokens(model, input_ids, mask, num_sinks) if num_sinks else []
    cos, sin = rotation(model, positions)
    cache = DynamicCache()
    for layer, rotated in enumerate(config["target_geometry"]["rotary_layers"]):
        mapped = []
        for index, kind in enumerate(("key", "value")):
            states = map_layer(config, tensors, kind, layer, [pair[index] for pair in content])
            if kind == "key" and rotated:
                states = rotate(model, states, cos, sin)
            mapped.append(states.to(model.device, model.dtype))
        for row in range(rows):
            padding = int((mask[row] == 0).sum())
            count = min(num_sinks, tokens - padding)
            for index, states in enumerate(mapped):
                states[row, :, :padding] = 0
                if count:
                    states[row, :, padding : padding + count] = sinks[layer][index][row, :, :count]
        assert mapped[0].shape[:3] == (rows, heads, tokens)
        cache.update(mapped[0], mapped[1], layer)
    return cache


def read_source(source_model, config, input_ids, mask, positions):
    """The source's keys without rotation and its values, one pair `(batch, heads, tokens, head_dim)` a layer."""
    device = source_model.device
    input_ids, mask, positions = input_ids.to(device), mask.to(device), positions.to(device)
    output = source_model.get_decoder()(input_ids, attention_mask=mask, position_ids=positions, use_cache=True)
    layers, rotary_layers = getattr(output, CACHE).layers, config["source_geometry"]["rotary_layers"]
    cos, sin = rotation(source_model, positions)
    # YaRN scales cos and sin by `s`; the inverse of a rotation scaled so is divided by its square.
    scaling = float(cos[0, 0, 0] ** 2 + sin[0, 0, 0] ** 2)
    cos, sin = cos / scaling, -sin / scaling
    padding = (mask == 0)[:, None, :, None]
    content = []
    for layer, rotated in zip(layers, rotary_layers, strict=True):
        keys = rotate(source_model, layer.keys, cos, sin).to(layer.keys.dtype) if rotated else layer.keys
        content.append((keys.masked_fill(padding, 0), layer.values.masked_fill(padding, 0)))
    return content


def read_first_tokens(model, input_ids, mask, count):
    """The target's own keys and values of each row's first tokens, which take much of the attention."""
    order = torch.argsort((mask == 0).long(), dim=-1, stable=True)[:, :count]
    ids, real = input_ids.gather(1, order), mask.gather(1, order)
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    output = model.get_decoder()(ids, attention_mask=real, position_ids=positions, use_cache=True)
    return [(layer.keys, layer.values) for layer in getattr(output, CACHE).layers]


class Reached(Exception):
    """Ends a forward whose further layers are not needed."""


class LowestLayers(DynamicCache):
    """Takes the keys and values of the first `count` layers and ends the forward."""

    def __init__(self, count):
        super().__init__()
        self.count = count
        self.read: list = []

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.read.append(super().update(key_states, value_states, layer_idx, *args, **kwargs))
        if len(self.read) == self.count:
            raise Reached
        return self.read[-1]


def read_lowest_layers(model, cache, input_ids, mask, count):
    """Put the target's own keys and values of its lowest layers in their place; they need nothing from above."""
    if count == 0:
        return
    own, positions = LowestLayers(count), (mask.cumsum(-1) - 1).clamp(min=0)
    with contextlib.suppress(Reached):
        model.get_decoder()(input_ids, attention_mask=mask, position_ids=positions, use_cache=True, **{CACHE: own})
    padding = (mask == 0)[:, None, :, None]
    for mapped, (keys, values) in zip(cache.layers, own.read, strict=False):
        mapped.keys, mapped.values = keys.masked_fill(padding, 0), values.masked_fill(padding, 0)


class PatchedCache(DynamicCache):
    """Shows another cache whole, after it has put the new states of single tokens in their columns.

    The forward ends at the last of `count` layers; without a count it runs whole.
    """

    def __init__(self, cache, rows, columns, slots, count):
        super().__init__()
        self.count = count
        self.layers, self.places, self.slots = cache.layers, (rows, columns), (rows, slots)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        layer = self.layers[layer_idx]
        layer.keys, layer.values = (
            old.transpose(1, 2).index_put(self.places, new.transpose(1, 2)[self.slots]).transpose(1, 2)
            for old, new in ((layer.keys, key_states), (layer.values, value_states))
        )
        if layer_idx + 1 == self.count:
            raise Reached
        return layer.keys, layer.values


def repair(model, cache, config, input_ids, mask):
    """Let the target recompute a share of the mapped tokens, those that tell most about the question, in one pass.

    Each is run at its own position; in every layer its new key and value take their column before anything attends.
    With the config's `repair_layers` that is done in so many of the lowest layers, and the others stay mapped.
    """
    fraction, columns = config.get("native_fraction", 0), cache.get_seq_length()
    if fraction == 0:
        return
    if model.config._attn_implementation not in ("eager", "sdpa"):
        warnings.warn("Nothing is repaired: that needs eager or SDPA attention.", stacklevel=3)
        return
    if config.get("repair", "question") != "question":
        message = f"This file chooses what to repair by the question's words, not by {config['repair']!r}."
        warnings.warn(message, stacklevel=3)
    valid, positions = mask[:, :columns].bool(), (mask[:, :columns].cumsum(-1) - 1).clamp(min=0)
    eligible = valid & (positions >= config["num_sinks"])
    scores = score_by_question(config, input_ids, mask, columns).masked_fill(~eligible, -torch.inf)
    best = scores.argsort(dim=-1, descending=True, stable=True)
    budget = torch.ceil(eligible.sum(-1, keepdim=True) * fraction - 1e-6)
    chosen = (best.argsort(-1) < budget) & eligible
    width = int(chosen.sum(1).max())
    if width == 0:
        return
    # The chosen columns of each row in their order; a row with fewer is filled up, and those states are dropped.
    order = (~chosen).long().argsort(dim=1, stable=True)[:, :width]
    kept = chosen.gather(1, order)
    rows, slots = kept.nonzero(as_tuple=True)
    before = torch.arange(columns, device=mask.device) <= order[:, :, None]
    seen = valid[:, None, :] & (before | ~kept[:, :, None])
    bias = torch.zeros(seen.shape, dtype=model.dtype, device=mask.device)
    patched = PatchedCache(cache, rows, order[rows, slots], slots, config.get("repair_layers"))
    with contextlib.suppress(Reached):
        model.get_decoder()(
            input_ids.gather(1, order),
            attention_mask=bias.masked_fill(~seen, torch.finfo(model.dtype).min)[:, None],
            position_ids=positions.gather(1, order),
            use_cache=True,
            **{CACHE: patched},
        )


def score_by_question(config, input_ids, mask, columns):
    """Score the covered tokens by the question's words in their sentence, `(batch, columns)`.

    A word weighs `log(n / c)^2`, where it stands in `c` of `n` sentences, and the next sentence gets a tenth of a
    sentence's score. Where the config does not know how sentences end, a word counts for the tokens around it.
    """
    ids, valid = input_ids[:, :columns], mask[:, :columns].bool()
    count = mask[:, columns:].sum(1, keepdim=True).clamp(min=QUESTION_TOKENS)
    width = int(count.max())
    last = mask.argsort(dim=1, stable=True)[:, -width:]
    # A row's own question: its last words, however long the others' are.
    own = torch.arange(last.shape[1], device=mask.device) >= last.shape[1] - count
    question, is_question = input_ids.gather(1, last), mask.gather(1, last).bool() & own
    asked = ((ids[:, :, None] == question[:, None, :]) & is_question[:, None, :]).any(-1) & valid
    same = (ids[:, :, None] == ids[:, None, :]) & valid[:, None, :]
    if not config.get("boundary_tokens"):
        weight = torch.log(valid.sum(-1, keepdim=True).clamp(min=1) / same.sum(-1).clamp(min=1))
        weight = weight.clamp(min=0).square() * asked
        scores = weight.clone()
        for distance in range(1, min(8, columns - 1) + 1):
            scores[:, distance:] += weight[:, :-distance] * (1 - distance / 9)
            if distance <= 6:
                scores[:, :-distance] += weight[:, distance:] * (1 - distance / 7)
        return scores.masked_fill(~valid, 0)
    ends = torch.isin(ids, torch.tensor(config["boundary_tokens"], device=ids.device)) & valid
    sentence = pad(ends[:, :-1].long(), (1, 0)).cumsum(-1)
    earlier = torch.ones(columns, columns, dtype=torch.bool, device=ids.device).tril(-1)
    first = ~(same & (sentence[:, :, None] == sentence[:, None, :]) & earlier).any(-1) & valid
    found_in = (same & first[:, None, :]).sum(-1).clamp(min=1)
    number = sentence.masked_fill(~valid, 0).amax(-1, keepdim=True) + 2
    weight = torch.log(number / found_in).clamp(min=0).square() * (asked & first)
    totals = weight.new_zeros(len(ids), int(sentence.max()) + 2).scatter_add_(1, sentence, weight)
    totals[:, 1:] += 0.1 * totals[:, :-1].clone()
    return totals.gather(1, sentence).masked_fill(~valid, 0)


def map_layer(config, tensors, kind, layer, content):
    """The affine map of one target layer: `y[b, h, t] = x[b, h, t] @ weight[h] + bias[h]`, in float32.

    The features `x` are the selected source layers side by side, best first; in each the source heads (all of them, or
    those assigned to the target head), in each head its channels.
    """
    weight, bias = tensors[f"{kind}_weight"][layer].float(), tensors[f"{kind}_bias"][layer].float()
    selected = [content[index].float().to(weight.device) for index in config["selected_layers"][layer]]
    if config["support"] == "full_head":
        features = torch.cat([states.transpose(1, 2).flatten(2) for states in selected], dim=-1)
        return torch.einsum("btf,hfd->bhtd", features, weight) + bias[None, :, None]
    assigned = zip(selected, config["head_assignment"][layer], strict=True)
    gathered = [states[:, torch.tensor(heads)].transpose(2, 3).flatten(3) for states, heads in assigned]
    return torch.einsum("bhtf,hfd->bhtd", torch.cat(gathered, dim=-1), weight) + bias[None, :, None]


def rotation(model, positions):
    """Cos and sin of the model's own rotary module, in float32."""
    modules = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "rotary_emb"]
    if not modules:
        return None, None
    return modules[0](torch.empty((), dtype=torch.float32, device=model.device), positions.to(model.device))


def rotate(model, keys, cos, sin):
    """The model's own `apply_rotary_pos_emb` on keys, in float32."""
    function = sys.modules[type(model.get_decoder()).__module__].apply_rotary_pos_emb
    keys = keys.float().to(cos.device)
    return function(keys, keys, cos, sin)[1]


def locate():
    """Repository and commit that this file was loaded from.

    `generate` does not pass the repository on, so it is read from the local variables of the call that led here. The
    commit is the name of the folder that Transformers has put this file into.
    """
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_locals.get("custom_generate")
        if frame.f_code.co_name == "generate" and isinstance(name, str):
            commit = Path(__file__).parents[1].name
            is_commit = len(commit) == 40 and set(commit) <= set("0123456789abcdef")
            return name, commit if is_commit and not os.path.isdir(name) else None
        frame = frame.f_back
    raise ValueError("Pass mapper=, the folder or repository id of the mapper.")


@functools.lru_cache(maxsize=2)
def load(repository, revision, token, cache_dir):
    """Config and tensors of the mapper, every byte compared with the manifest."""

    def fetch(name):
        if os.path.isdir(repository):
            return Path(repository) / name
        return Path(hf_hub_download(repository, name, revision=revision, token=token, cache_dir=cache_dir))

    listed = json.loads(fetch(MANIFEST).read_text(encoding="utf-8"))["files"]
    tensors = {}
    for name in ["config.json", *(name for name in sorted(listed) if name.endswith(".safetensors"))]:
        path = fetch(name)
        if hashlib.sha256(path.read_bytes()).hexdigest() != listed[name]["sha256"]:
            raise OSError(f"{name} of {repository} is damaged: its SHA-256 is not the one in {MANIFEST}.")
        if name == "config.json":
            config = json.loads(path.read_text(encoding="utf-8"))
        else:
            tensors.update(load_file(path))
    if config["method"] != "ridge":
        raise ValueError(f"This file maps with method 'ridge'; the mapper has {config['method']!r}. Use kvbridge_hf.")
    return config, tensors


def check_model(model, geometry, fingerprint, role):
    """Refuse another model than the one that the mapper was fitted for."""
    decoder, count = model.get_decoder(), geometry["num_layers"]
    lists = [module for module in decoder.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = next((module for module in lists if len(module) == count), None)
    expected = (fingerprint or {}).get("kv_projections")
    found = None if layers is None else digest_of(layers)
    if layers is None or None not in (expected, found) and expected != found:
        raise ValueError(
            f"The {role} model {model.name_or_path!r} is not the one this mapper was fitted for, which was "
            f"{(fingerprint or {}).get('name_or_path')!r} at revision {(fingerprint or {}).get('revision')}."
        )


def digest_of(layers):
    """SHA-256 of the weights that make keys and values, rounded to bfloat16; None where they cannot be read."""
    digest = hashlib.sha256()
    for index, layer in enumerate(layers):
        for prefix, module in sorted(layer.named_modules(), key=lambda item: item[0]):
            parts = [part for part in prefix.split(".") if part and part != "base_layer"]
            for name, weight in sorted(module.named_parameters(recurse=False), key=lambda item: item[0]):
                if not KV_NAMES & {*parts, name}:
                    continue
                if weight.is_meta or not weight.is_floating_point() or weight.element_size() == 1:
                    return None
                digest.update(f"{index}.{'.'.join([*parts, name])} {tuple(weight.shape)}".encode())
                rounded = weight.detach().to(torch.bfloat16).cpu().contiguous()
                # What a float16 copy of the checkpoint cannot hold does not count.
                rounded = torch.where(rounded.abs() <= 2.0**-17, torch.zeros_like(rounded), rounded)
                digest.update(rounded.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
