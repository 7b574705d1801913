"""The mapper: source keys and values in content space in, target keys and values in content space out."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from .configuration_kvbridge import KVBridgeConfig
from .errors import ArtifactError, CacheMismatchError
from .hub.artifact import ArtifactMixin
from .kernels import map_full_head, map_head_local
from .repair_scorer import RepairScorer
from .source_content import Reader, SourceContent, source_features


class MapperMethod:
    """How one kind of mapper turns source content into target content. A method is a subclass in a file of its own.

    A method object holds no tensors: `build` registers them on the mapper, so their names in the artifact are the
    method's own, and `.to()`, sharding and training see ordinary parameters. Whatever `build` needs to know stands in
    `mapper.config` (`method_config` is the method's own corner of it).
    """

    name: ClassVar[str]
    #: Names of tensors that `SourceContent.extras` must carry, see [`kvbridge_hf.target_extras`]. A handoff with such
    #: a mapper needs the prompt's `input_ids`.
    requires: ClassVar[tuple[str, ...]] = ()
    #: Whether a token is mapped from its own column alone; such a mapping may be computed in pieces. Any other gets
    #: all columns from the first one on.
    tokenwise: ClassVar[bool] = True

    def build(self, mapper: KVBridgeMapper) -> None:
        """Register parameters, modules and buffers on `mapper`. The values may be left empty."""
        raise NotImplementedError

    def init_weights(self, mapper: KVBridgeMapper) -> None:
        """Give the floating-point tensors their values before any fit."""
        raise NotImplementedError

    def map_layer(
        self, mapper: KVBridgeMapper, target_layer: int, source: SourceContent
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return content keys and values of a target layer, each `(batch, target_heads, tokens, target_head_dim)`."""
        raise NotImplementedError

    def context_flops(self, mapper: KVBridgeMapper, num_tokens: int) -> float:
        """Operations that do not grow with the tokens alone, for a prompt of so many of them."""
        return 0.0

    def flops_per_distinct_token(self, mapper: KVBridgeMapper, mapped_layers: float = 1.0) -> float:
        """Operations for each different token of a prompt, however often it stands there.

        Args:
            mapper: Its sizes.
            mapped_layers: Share of the target's layers that is mapped.
        """
        return 0.0


_METHODS: dict[str, MapperMethod] = {}


def register_method(method: type[MapperMethod]) -> type[MapperMethod]:
    """Class decorator that makes a method known under its `name`, the value of `KVBridgeConfig.method`."""
    _METHODS[method.name] = method()
    return method


def get_method(name: str) -> MapperMethod:
    """Return the method registered under `name`.

    Raises:
        ArtifactError: there is none.
    """
    if name not in _METHODS:
        # The library's own methods register themselves where they are defined, beside their fits.
        importlib.import_module("kvbridge_hf.mappers")
    if name not in _METHODS:
        raise ArtifactError(
            f"Unknown mapper method {name!r}; known: {sorted(_METHODS)}. It may need a newer kvbridge_hf, or the "
            "import of the module that registers it."
        )
    return _METHODS[name]


@register_method
class AffineMethod(MapperMethod):
    """One affine map a target layer, head and kind; what a ridge regression fits (DESIGN 4, Heo et al. 2608.03893).

    Keys are mapped from source content keys, values from source values. Features are the selected source layers in
    the order of `selected_layers`, within a layer the source heads (all, or the assigned ones), within a head its
    channels.
    """

    name = "ridge"

    def build(self, mapper: KVBridgeMapper) -> None:
        config = mapper.config
        layers, heads = config.target_geometry["num_layers"], config.target_geometry["num_kv_heads"]
        head_dim = config.target_geometry["head_dim"]
        for kind in ("key", "value"):
            weight = torch.empty(layers, heads, config.num_features, head_dim)
            mapper.register_parameter(f"{kind}_weight", nn.Parameter(weight))
            mapper.register_parameter(f"{kind}_bias", nn.Parameter(torch.empty(layers, heads, head_dim)))

    def init_weights(self, mapper: KVBridgeMapper) -> None:
        for name in ("key_weight", "value_weight", "key_bias", "value_bias"):
            nn.init.zeros_(getattr(mapper, name))

    def map_layer(
        self, mapper: KVBridgeMapper, target_layer: int, source: SourceContent
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self._map(mapper, target_layer, source.keys, mapper.key_weight, mapper.key_bias)
        values = self._map(mapper, target_layer, source.values, mapper.value_weight, mapper.value_bias)
        return keys, values

    @staticmethod
    def _map(
        mapper: KVBridgeMapper, target_layer: int, read: Reader, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        apply = map_full_head if mapper.config.support == "full_head" else map_head_local
        features = source_features(mapper, target_layer, read, weight.device)
        return apply(features, weight[target_layer], bias[target_layer])


class KVBridgeMapper(ArtifactMixin, PreTrainedModel):
    """Maps a source model's keys and values to a target model's, both in content space.

    The tensors are those of `config.method`. For `"ridge"`: `key_weight` and `value_weight` of shape `(target_layers,
    target_heads, features, target_head_dim)`, `key_bias` and `value_bias` `(target_layers, target_heads,
    target_head_dim)`. Buffers of every method: `selected_layers` `(target_layers, top_k)`, and with head-local support
    `source_heads` `(target_layers, top_k, target_heads, block)`.

    How a mapper is saved, loaded and pushed stands in [`ArtifactMixin`].

    Raises:
        ArtifactError: the config's fields do not fit each other.
    """

    config_class = KVBridgeConfig
    base_model_prefix = ""
    main_input_name = "source"
    _no_split_modules: list[str] = []

    selected_layers: torch.Tensor
    source_heads: torch.Tensor
    key_weight: nn.Parameter
    value_weight: nn.Parameter
    key_bias: nn.Parameter
    value_bias: nn.Parameter

    def __init__(self, config: KVBridgeConfig):
        super().__init__(config)
        config.check()
        self.method = get_method(config.method)
        self.register_buffer("selected_layers", torch.tensor(config.selected_layers, dtype=torch.long))
        if config.support == "head_local":
            self.register_buffer("source_heads", torch.tensor(config.head_assignment, dtype=torch.long))
        self.method.build(self)
        # A part of the artifact that no map reads: what a handoff repairs is chosen by it.
        scorer = RepairScorer(config.repair_scorer, config.source_geometry) if config.repair_scorer else None
        self.repair_scorer: RepairScorer | None = scorer
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            self.method.init_weights(self)

    def map_layer(self, target_layer: int, source: SourceContent) -> tuple[torch.Tensor, torch.Tensor]:
        """Map one target layer.

        Returns:
            Content keys and values, each `(batch, target_heads, tokens, target_head_dim)`, on the mapper's device; in
            float32 unless source and mapper share a 16-bit dtype.
        """
        if source.num_layers != self.config.source_geometry["num_layers"]:
            raise CacheMismatchError(
                f"The mapper reads a source of {self.config.source_geometry['num_layers']} layers, got "
                f"{source.num_layers}."
            )
        return self.method.map_layer(self, target_layer, source)

    def forward(self, source: SourceContent) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Map all target layers; see [`map_layer`]."""
        return [self.map_layer(layer, source) for layer in range(self.config.target_geometry["num_layers"])]

    @classmethod
    def identity(cls, geometry: Any, support: str = "full_head") -> KVBridgeMapper:
        """Build the mapper of a model to itself: layer from layer, head from head, weight 1, bias 0.

        Args:
            geometry: a [`KVGeometry`], a model's config, or a model (whose fingerprint is then recorded too).
            support: `"full_head"`, or `"head_local"` for the smaller of the two equal mappers.
        """
        from .geometry import KVGeometry

        fingerprint: dict[str, Any] = {}
        if isinstance(geometry, nn.Module):
            from .fingerprint import model_fingerprint

            fingerprint = model_fingerprint(geometry)
            geometry = KVGeometry.from_model(geometry)
        elif not isinstance(geometry, KVGeometry):
            geometry = KVGeometry.from_config(geometry)
        layers, heads, dim = geometry.num_layers, geometry.num_kv_heads, geometry.head_dim
        config = KVBridgeConfig(
            source_geometry=geometry.to_dict(),
            target_geometry=geometry.to_dict(),
            source_fingerprint=fingerprint,
            target_fingerprint=dict(fingerprint),
            support=support,
            top_k=1,
            selected_layers=[[layer] for layer in range(layers)],
            head_assignment=[[[[head] for head in range(heads)]]] * layers if support == "head_local" else None,
            num_sinks=0,
            num_native_suffix=1,
        )
        mapper = cls(config)
        with torch.no_grad():
            eye = torch.eye(dim)
            for weight in (mapper.key_weight, mapper.value_weight):
                for head in range(heads):
                    first = head * dim if support == "full_head" else 0
                    weight[:, head, first : first + dim] = eye
        return mapper.eval()


AutoConfig.register(KVBridgeConfig.model_type, KVBridgeConfig)
AutoModel.register(KVBridgeConfig, KVBridgeMapper)

__all__ = ["KVBridgeMapper", "MapperMethod", "SourceContent", "get_method", "register_method"]
