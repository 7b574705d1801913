"""A small network for each target layer, head and kind, plain or added to the linear map.

Heo et al., arXiv:2608.03893, section 4.4: two hidden layers of 1,024 ReLU units, Adam at 1e-3, 20 epochs, batches of
4,096 tokens. All heads and both kinds of a target layer train at once, as batched products. The state kept of each
network is that of its best epoch on held-out tokens; a residual network starts as the linear map alone.
"""

from __future__ import annotations

from typing import Any

import torch
from tqdm.auto import tqdm

from ..calibration.samples import Samples
from ..errors import ArtifactError, FitConfigError
from ..modeling_kvbridge import KVBridgeMapper, SourceContent, register_method
from .base import FitContext, FitMethod, register_fit
from .features import (
    KIND_NAMES,
    ByKindMethod,
    Reader,
    add_parameters,
    fill_parameters,
    grouped_features,
    target_shape,
)
from .linear import by_head, check_solution, fit_layer, gather_facts, r2_by_kind


@register_method
class MLPMethod(ByKindMethod):
    """ReLU networks on the features of a linear map.

    Tensors: `key_hidden_0`, `key_hidden_1`, ... and `key_out`, `(target_layers, target_heads, inputs, outputs)`, each
    with its `_bias` `(target_layers, target_heads, outputs)`; with `method_config["residual"]` also the linear map's
    `key_weight`. The same for values. `method_config["hidden"]` has the widths.
    """

    name = "mlp"

    def build(self, mapper: KVBridgeMapper) -> None:
        config = mapper.config
        layers, heads, head_dim = target_shape(config)
        hidden = config.method_config.get("hidden")
        if not isinstance(hidden, list) or not hidden or not all(isinstance(w, int) and w > 0 for w in hidden):
            raise ArtifactError(f"method_config['hidden'] must be a list of widths, got {hidden!r}.")
        widths = [config.num_features, *hidden, head_dim]
        for kind in KIND_NAMES:
            for place, name in enumerate(self.stages(mapper, kind)):
                inputs, outputs = widths[place], widths[place + 1]
                add_parameters(mapper, **{name: (layers, heads, inputs, outputs)})
                add_parameters(mapper, **{f"{name}_bias": (layers, heads, outputs)})
            if config.method_config.get("residual"):
                add_parameters(mapper, **{f"{kind}_weight": (layers, heads, config.num_features, head_dim)})

    @staticmethod
    def stages(mapper: KVBridgeMapper, kind: str) -> list[str]:
        """Names of a network's weights, first to last."""
        return [
            *(f"{kind}_hidden_{place}" for place in range(len(mapper.config.method_config["hidden"]))),
            f"{kind}_out",
        ]

    def map_kind(
        self, mapper: KVBridgeMapper, kind: str, target_layer: int, source: SourceContent, read: Reader
    ) -> torch.Tensor:
        names = self.stages(mapper, kind)
        features = grouped_features(mapper, target_layer, read)
        states = features
        for place, name in enumerate(names):
            weight = getattr(mapper, name)[target_layer].to(states.dtype)
            states = states @ weight + getattr(mapper, f"{name}_bias")[target_layer].to(states.dtype).unsqueeze(1)
            if place < len(names) - 1:
                states = states.relu()
        if mapper.config.method_config.get("residual"):
            states = states + features @ getattr(mapper, f"{kind}_weight")[target_layer].to(states.dtype)
        return states

    def flops_per_token(self, mapper: KVBridgeMapper) -> float:
        return 2.0 * sum(p.numel() for name, p in mapper.named_parameters() if not name.endswith("_bias"))


class _Networks:
    """The networks of one target layer: `G = 2 * heads` of them (keys, then values), in standardised coordinates."""

    def __init__(self, widths: list[int], groups: int, generator: torch.Generator, zero_output: bool):
        self.weights, self.biases = [], []
        for place, (inputs, outputs) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
            weight = torch.randn(groups, inputs, outputs, generator=generator) * (2 / inputs) ** 0.5
            if place == len(widths) - 2:
                weight = torch.zeros_like(weight) if zero_output else weight * 0.5**0.5
            self.weights.append(weight.requires_grad_())
            self.biases.append(torch.zeros(groups, 1, outputs).requires_grad_())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`(2, 1 or heads, N, F)` -> `(G, N, d)`."""
        kinds, heads = 2, self.weights[0].shape[0] // 2
        first = self.weights[0].unflatten(0, (kinds, heads))
        states = (x @ first).flatten(0, 1) + self.biases[0]
        for weight, bias in zip(self.weights[1:], self.biases[1:], strict=True):
            states = torch.baddbmm(bias, states.relu(), weight)
        return states

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.weights, *self.biases]


@register_fit
class MLPFit(FitMethod):
    """Networks trained on samples; see the module."""

    name = "mlp"
    needs_data = True

    def fit(self, context: FitContext) -> KVBridgeMapper:
        config, layout = context.config, context.statistics.layout
        if not config.mlp_hidden:
            raise FitConfigError("method='mlp' needs at least one hidden layer; method='ridge' is the linear map.")
        assert context.data is not None
        from ..calibration.driver import collect_samples  # which imports the methods

        data = context.data
        training, heldout = collect_samples(
            data.source_model, data.target_model, data.token_batches, config, progress=data.progress
        )
        heads, dim = layout.target_heads, layout.target_dim
        with torch.no_grad():
            fits = [fit_layer(context, target) for target in range(layout.target_layers)]
            linear = [by_head(fit.solution, heads, dim).float() for fit in fits]
            biases = [fit.bias(fit.solution).reshape(2, heads, dim).float() for fit in fits]
        facts: dict[str, Any] = gather_facts(fits)
        method_config = {"hidden": list(config.mlp_hidden), "residual": config.mlp_residual}
        scores: dict[str, list[torch.Tensor]] = {"r2": [], "heldout_r2": []}
        epochs: list[list[int]] = []
        states: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        bar = tqdm(
            range(layout.target_layers), desc="mlp", unit="layer", disable=None if context.data.progress else True
        )
        for target in bar:
            trained = _train_layer(context, target, training, heldout, linear[target], biases[target])
            states.append(trained[:2])
            epochs.append(trained[2])
            for name, score in zip(scores, trained[3], strict=True):
                if score is not None:
                    scores[name].append(score)
        facts.update(
            r2=r2_by_kind(scores["r2"]),
            heldout_r2=r2_by_kind(scores["heldout_r2"]) if scores["heldout_r2"] else None,
            best_epochs=epochs,
            sampled_tokens=training.num_tokens,
        )
        mapper = KVBridgeMapper(self.mapper_config(context, method_config=method_config, **facts))
        for kind, name in enumerate(KIND_NAMES):
            for place, stage in enumerate(MLPMethod.stages(mapper, name)):
                weight = torch.stack([weights[place].unflatten(0, (2, -1))[kind] for weights, _ in states])
                bias = torch.stack([shifts[place].unflatten(0, (2, -1))[kind].squeeze(-2) for _, shifts in states])
                check_solution(weight, bias)
                fill_parameters(mapper, **{stage: weight, f"{stage}_bias": bias})
            if config.mlp_residual:
                fill_parameters(mapper, **{f"{name}_weight": torch.stack([weight[kind] for weight in linear])})
        return mapper.to(getattr(torch, config.dtype)).eval()


def _train_layer(
    context: FitContext,
    target: int,
    training: Samples,
    heldout: Samples,
    linear: torch.Tensor,
    bias: torch.Tensor,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int], tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Train the networks of one target layer.

    Returns:
        Weights and biases for raw features and outputs (the linear map's bias is in the last one), the best epochs,
        and R^2 on training and on held-out tokens.
    """
    config = context.config
    x, y = _sample_tensors(context, target, training)  # (2, 1 or H, N, F), (2 * H, N, d)
    held = _sample_tensors(context, target, heldout) if heldout.num_tokens else None
    flat_bias = bias.flatten(0, 1).unsqueeze(1)

    def wanted(features: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        if not config.mlp_residual:
            return outputs
        return outputs - (features @ linear).flatten(0, 1) - flat_bias

    goal = wanted(x, y)
    x_mean, x_scale = x.mean(2, keepdim=True), x.std(2, keepdim=True).clamp(min=1e-6)
    y_mean = torch.zeros_like(goal[:, :1]) if config.mlp_residual else goal.mean(1, keepdim=True)
    # One scale a head: the error counts in the outputs' own proportions.
    y_scale = (goal - y_mean).square().mean((1, 2), keepdim=True).sqrt().clamp(min=1e-12)
    x, goal = (x - x_mean) / x_scale, (goal - y_mean) / y_scale
    if held is not None:
        held_goal = (wanted(*held) - y_mean) / y_scale
        held_x = (held[0] - x_mean) / x_scale
    generator = torch.Generator().manual_seed(config.seed + target)
    groups, dim = y.shape[0], y.shape[2]
    networks = _Networks([x.shape[-1], *config.mlp_hidden, dim], groups, generator, config.mlp_residual)
    optimizer = torch.optim.Adam(networks.tensors, lr=config.mlp_learning_rate)
    best = torch.full((groups,), float("inf"))
    best_epoch = torch.zeros(groups, dtype=torch.long)
    kept = [tensor.detach().clone() for tensor in networks.tensors]

    def measure(epoch: int) -> None:
        with torch.no_grad():
            if held is None:
                better = torch.ones(groups, dtype=torch.bool)
            else:
                loss = _mean_loss(networks, held_x, held_goal, config.mlp_batch_size)
                better = loss < best
                best[better] = loss[better]
            best_epoch[better] = epoch
            for old, new in zip(kept, networks.tensors, strict=True):
                old[better] = new[better]

    if config.mlp_residual:
        measure(0)
    count = x.shape[2]
    for epoch in range(1, config.mlp_epochs + 1):
        order = torch.randperm(count, generator=generator)
        for start in range(0, count, config.mlp_batch_size):
            part = order[start : start + config.mlp_batch_size]
            optimizer.zero_grad(set_to_none=True)
            with torch.enable_grad():
                # The mean over a network's own outputs, summed over networks: each sees its own gradient.
                loss = (networks(x[:, :, part]) - goal[:, part]).square().mean((1, 2)).sum()
                loss.backward()
            optimizer.step()
        measure(epoch)
    with torch.no_grad():
        for tensor, state in zip(networks.tensors, kept, strict=True):
            tensor.copy_(state)
        score = _r2(networks, x, goal, y, y_scale, config.mlp_batch_size)
        held_score = None
        if held is not None:
            held_score = _r2(networks, held_x, held_goal, held[1], y_scale, config.mlp_batch_size)
        weights, biases = [w.detach() for w in networks.weights], [b.detach() for b in networks.biases]
        # Put the standardisation into the first and the last layer.
        kinds, heads = 2, groups // 2
        mean = x_mean.expand(kinds, heads, 1, -1).flatten(0, 1)
        scale = x_scale.expand(kinds, heads, 1, -1).flatten(0, 1)
        biases[0] = biases[0] - (mean / scale) @ weights[0]
        weights[0] = weights[0] / scale.mT
        weights[-1] = weights[-1] * y_scale
        biases[-1] = biases[-1] * y_scale + y_mean + (flat_bias if config.mlp_residual else 0)
    return weights, biases, best_epoch.tolist(), (score, held_score)


def _sample_tensors(context: FitContext, target: int, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
    """Features `(2, 1 or target_heads, N, F)` and outputs `(2 * target_heads, N, d)` of a target layer."""
    layers = context.selection.layers[target]
    features, outputs = [], []
    for kind in ("keys", "values"):
        chosen = samples.tensors[f"source_{kind}"][layers]  # k, N, H_s, d
        if context.selection.heads is None:
            features.append(chosen.transpose(0, 1).flatten(1).unsqueeze(0))
        else:
            heads = torch.tensor(context.selection.heads[target])  # k, H_t, block
            parts = [layer[:, heads[place]] for place, layer in enumerate(chosen)]  # N, H_t, block, d
            features.append(torch.stack(parts, dim=2).flatten(2).transpose(0, 1))
        outputs.append(samples.tensors[f"target_{kind}"][target].transpose(0, 1))
    return torch.stack(features), torch.cat(outputs)


def _mean_loss(networks: _Networks, x: torch.Tensor, goal: torch.Tensor, size: int) -> torch.Tensor:
    total = torch.zeros(goal.shape[0])
    for start in range(0, goal.shape[1], size):
        part = slice(start, start + size)
        total += (networks(x[:, :, part]) - goal[:, part]).square().sum((1, 2))
    return total / goal[0].numel()


def _r2(
    networks: _Networks, x: torch.Tensor, goal: torch.Tensor, y: torch.Tensor, y_scale: torch.Tensor, size: int
) -> torch.Tensor:
    """Mean over heads of `1 - residual / variance`, `(2,)` for keys and values."""
    residual = _mean_loss(networks, x, goal, size) * y_scale.flatten().square()
    power = (y - y.mean(1, keepdim=True)).square().mean((1, 2)).clamp(min=1e-30)
    return (1 - residual / power).double().unflatten(0, (2, -1)).mean(dim=1)


__all__ = ["MLPFit", "MLPMethod"]
