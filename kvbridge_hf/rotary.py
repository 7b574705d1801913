"""Content space: keys with their rotary rotation taken off, and put on again.

A cached key is `R(p) k`: the content key `k` rotated by an angle that grows with the position `p` (RoFormer, Su et al.
2021, arXiv:2104.09864, eq. 14-16). Maps between models are fitted and applied on `k`. Both directions use the model's
own rotary module for cos and sin, and the model's own `apply_rotary_pos_emb`, so that the half-rotated and interleaved
layouts, partial rotation and every fixed frequency scaling need no code here. The inverse is the same function with
`-sin`. Where the module scales cos and sin by `s` (YaRN's attention factor, Peng et al. 2023, arXiv:2309.00071, sec.
3.4), applying and inverting would give `s^2 k`, so cos and sin of the inverse are divided by `s^2`. Channels that are
not rotated stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from .cache_argument import output_cache
from .config_facts import decoder_of, modeling_module, text_config
from .errors import CacheMismatchError, UnsupportedModelError
from .geometry import KVGeometry
from .rotary_kinds import rotary_problem

# Positions at which a rotary function is tried out before it is trusted.
_PROBE_POSITIONS = (0, 1, 77, 5000)

CosSin = tuple[torch.Tensor, torch.Tensor]


def positions_from_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """Position of each token, counted over the tokens that are not padding.

    Args:
        attention_mask: `(batch, tokens)`, nonzero where a token is real; padding may be on either side.

    Returns:
        `(batch, tokens)` int64. Padding before the first token has position 0, padding after the last token that
        token's position.
    """
    return (attention_mask.long().ne(0).cumsum(-1) - 1).clamp(min=0)


class ContentRotary:
    """Takes one model's keys into content space and back.

    Build it with [`ContentRotary.from_model`], which shares the model's rotary module and so the exact frequencies the
    model uses, or with [`ContentRotary.from_config`] where no model is loaded. The computation is in float32 whatever
    the dtype of the keys.

    Args:
        geometry (`KVGeometry`): Tells which layers rotate and which layer type each has.
        module (`nn.Module`, *optional*): The model's rotary embedding; None if no layer rotates.
        function (callable, *optional*): The modelling file's `apply_rotary_pos_emb`.

    Raises:
        UnsupportedModelError: If the rotation depends on more than the position, or `module` and `function` together
            do not act as a rotation that `-sin` undoes.
    """

    def __init__(self, geometry: KVGeometry, module: nn.Module | None, function: Callable[..., Any] | None):
        problem = rotary_problem(geometry.rotary, geometry.layer_types)
        if problem is not None:
            message, remedy = problem
            raise UnsupportedModelError(f"The {message} (model type {geometry.model_type!r}). {remedy}")
        if geometry.cache.get("kv_lora_rank"):
            raise UnsupportedModelError(
                f"Model type {geometry.model_type!r} has multi-head latent attention, which rotates a part of the "
                "keys that all heads share. Use a model that caches keys and values themselves."
            )
        self.geometry = geometry
        self._module = module
        self._function = function
        self._by_layer_type = False
        self._one_tensor = False
        self._three_axes = False
        self._rotates_slice = False
        self._scaling: dict[str, float] = {}
        if any(geometry.rotary_layers):
            self._set_up()

    @classmethod
    def from_model(cls, model: Any) -> ContentRotary:
        """Content space of a loaded causal LM (also inside a multimodal wrapper or a PEFT model).

        Raises:
            UnsupportedModelError: See the class; also if the model's rotary module is not found.
        """
        geometry = KVGeometry.from_model(model)
        code = modeling_module(model)
        if not any(geometry.rotary_layers):
            return cls._without_rotation(geometry, code)
        modules = [m for name, m in decoder_of(model).named_modules() if name.rpartition(".")[2] == "rotary_emb"]
        return cls(geometry, modules[0] if modules else None, getattr(code, "apply_rotary_pos_emb", None))

    @classmethod
    def from_config(cls, config: PreTrainedConfig, device: torch.device | str | None = None) -> ContentRotary:
        """Content space from a config alone, with float32 frequencies on `device` (default: the CPU).

        Raises:
            UnsupportedModelError: See the class; also if the architecture's code is not part of Transformers.
        """
        geometry = KVGeometry.from_config(config)
        code = modeling_module(config)
        if not any(geometry.rotary_layers):
            return cls._without_rotation(geometry, code)
        classes: list[Any] = [
            value
            for name, value in vars(code).items()
            if name.endswith("RotaryEmbedding") and "Vision" not in name and inspect.isclass(value)
        ]
        if len(classes) != 1:
            raise UnsupportedModelError(
                f"Model type {geometry.model_type!r} has {len(classes)} rotary embedding classes, not one. Load the "
                "model and use ContentRotary.from_model."
            )
        module = classes[0](config=text_config(config))
        module = module if device is None else module.to(device)
        return cls(geometry, module, getattr(code, "apply_rotary_pos_emb", None))

    @classmethod
    def _without_rotation(cls, geometry: KVGeometry, code: Any) -> ContentRotary:
        silent = geometry.rotary["rope_type"] == "none" and "position_embedding_type" not in geometry.rotary
        if silent and any("rotary" in name.lower() for name in vars(code)):
            raise UnsupportedModelError(
                f"The config of model type {geometry.model_type!r} has no rope parameters, but its code rotates keys. "
                "How is not known; use a model whose config has rope_parameters."
            )
        return cls(geometry, None, None)

    def rotation_of(self, layer_idx: int) -> str | None:
        """Key of a layer's rotation: layers with the same key share cos and sin. None: the layer does not rotate."""
        if not self.geometry.rotary_layers[layer_idx]:
            return None
        return self.geometry.layer_types[layer_idx] if self._by_layer_type else "all"

    def cos_sin(self, position_ids: torch.Tensor, layer_idx: int = 0) -> CosSin | None:
        """Cos and sin at some positions, for [`~ContentRotary.apply_with`] and [`~ContentRotary.strip_with`].

        Args:
            position_ids: `(batch, tokens)` or `(1, tokens)`.
            layer_idx: Any layer with the wanted rotation; see [`~ContentRotary.rotation_of`].

        Returns:
            Two float32 tensors `(batch or 1, tokens, rotated channels)` on the device of `position_ids`, or None if
            the layer does not rotate.
        """
        if not self.geometry.rotary_layers[layer_idx]:
            return None
        assert self._module is not None
        device = position_ids.device
        kwargs = {"layer_type": self.geometry.layer_types[layer_idx]} if self._by_layer_type else {}
        if self._three_axes:
            position_ids = position_ids[None].expand(3, -1, -1)
        # The module returns the dtype of its first argument, which it uses for nothing else but the device.
        like = torch.empty((), dtype=torch.float32, device=device)
        with torch.no_grad():
            cos, sin = self._module(like, position_ids, **kwargs)
        return cos, sin

    def apply_with(self, keys: torch.Tensor, cos_sin: CosSin | None, layer_idx: int = 0) -> torch.Tensor:
        """Rotate content keys with the result of [`~ContentRotary.cos_sin`]; see [`~ContentRotary.apply`]."""
        if cos_sin is None:
            return keys
        return self._rotate(keys, *cos_sin)

    def strip_with(self, keys: torch.Tensor, cos_sin: CosSin | None, layer_idx: int = 0) -> torch.Tensor:
        """Unrotate cached keys with the result of [`~ContentRotary.cos_sin`]; see [`~ContentRotary.strip`]."""
        if cos_sin is None:
            return keys
        cos, sin = cos_sin
        scaling = self._scaling[self.rotation_of(layer_idx) or "all"]
        if scaling != 1.0:
            cos, sin = cos / scaling**2, sin / scaling**2
        return self._rotate(keys, cos, -sin)

    def apply(self, keys: torch.Tensor, position_ids: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Rotate content keys to their positions, as the model does before it caches them.

        Args:
            keys: `(batch, kv_heads, tokens, head_dim)`.
            position_ids: `(batch, tokens)` or `(1, tokens)`.
            layer_idx: The layer of this model that the keys belong to.

        Returns:
            Keys of the same shape and dtype; the keys themselves where the layer does not rotate.

        Raises:
            CacheMismatchError: If keys and positions do not fit together or to the model.
        """
        self._check(keys, position_ids)
        return self.apply_with(keys, self.cos_sin(position_ids.to(keys.device), layer_idx), layer_idx)

    def strip(self, keys: torch.Tensor, position_ids: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Take cached keys into content space: the inverse of [`~ContentRotary.apply`], with the same arguments."""
        self._check(keys, position_ids)
        return self.strip_with(keys, self.cos_sin(position_ids.to(keys.device), layer_idx), layer_idx)

    @torch.no_grad()
    def verify(self, model: Any) -> None:
        """Compare with the model's own forward: one pass over a batch of two tokens.

        A single token attends to itself alone, so everything but the rotation is the same wherever it stands. The same
        token is run at position 0 and at a far position, and its content keys must agree in every layer. This finds
        layers that rotate against the config's word, keys that are changed after the rotation, and KV of another
        shape than the config says.

        Raises:
            UnsupportedModelError: Naming the first layer that differs.
        """
        rotates = self.geometry.rotary["rope_type"] != "none"
        far = min(4097, (self.geometry.max_position_embeddings or 4098) - 1)
        device = model.get_input_embeddings().weight.device
        token = torch.full((2, 1), self.geometry.vocab_size // 2, device=device)
        position_ids = torch.tensor([[0], [far]], device=device)
        output = model(input_ids=token, use_cache=True, **({"position_ids": position_ids} if rotates else {}))
        try:
            cache: Any = output_cache(output)
        except ValueError as error:
            raise UnsupportedModelError(f"{type(model).__name__} returns no KV cache: {error}") from error
        shape = (2, self.geometry.num_kv_heads, 1, self.geometry.head_dim)
        for layer_idx, layer in enumerate(cache.layers):
            if layer.keys.shape != shape or layer.values.shape != shape:
                raise UnsupportedModelError(
                    f"Layer {layer_idx} of {type(model).__name__} caches keys {tuple(layer.keys.shape)} and values "
                    f"{tuple(layer.values.shape)}, where its config says {shape}. Such a cache cannot be handed over."
                )
            if not rotates:
                continue  # positions may be learned embeddings, which content keys keep
            near, other = self.strip(layer.keys, position_ids, layer_idx).float()
            gap = float((near - other).norm() / near.norm())
            # Two roundings of the rotated and one of the unrotated keys, with a margin.
            if not gap < 16 * torch.finfo(layer.keys.dtype).eps + 1e-3:
                raise UnsupportedModelError(
                    f"Layer {layer_idx} of {type(model).__name__} does not rotate its keys as its config says: the "
                    f"content key of one token differs by {gap:.2g} between positions 0 and {far}. This "
                    "architecture is not supported; please report it with the model's name."
                )

    def _rotate(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        assert self._function is not None
        compute = torch.promote_types(keys.dtype, torch.float32)
        cos, sin = cos.to(keys.device), sin.to(keys.device)
        full = keys.to(compute)
        rotated = full[..., : cos.shape[-1]] if self._rotates_slice else full
        if self._one_tensor:
            rotated = self._function(rotated, cos, sin)
        else:
            rotated = self._function(rotated[:, :0], rotated, cos, sin)[1]
        if self._rotates_slice:
            rotated = torch.cat((rotated, full[..., cos.shape[-1] :]), dim=-1)
        return rotated.to(keys.dtype)

    def _check(self, keys: torch.Tensor, position_ids: torch.Tensor) -> None:
        if keys.ndim != 4 or keys.shape[-1] != self.geometry.head_dim:
            raise CacheMismatchError(
                f"Keys have shape {tuple(keys.shape)}; {self.geometry.model_type!r} needs (batch, kv_heads, tokens, "
                f"{self.geometry.head_dim})."
            )
        if (
            position_ids.ndim != 2
            or position_ids.shape[0] not in (1, keys.shape[0])
            or (position_ids.shape[1] != keys.shape[2])
        ):
            raise CacheMismatchError(
                f"position_ids have shape {tuple(position_ids.shape)} and keys {tuple(keys.shape)}; positions must be "
                f"({keys.shape[0]}, {keys.shape[2]}) or (1, {keys.shape[2]}). positions_from_mask() makes them from "
                "an attention mask."
            )

    def _set_up(self) -> None:
        """Find out how module and function are called, and try them out on a few positions."""
        name = self.geometry.model_type
        if self._module is None or self._function is None:
            raise UnsupportedModelError(
                f"No rotary_emb module or no apply_rotary_pos_emb function was found for model type {name!r}, "
                "although its config has rope parameters. Use an architecture of Transformers that has both."
            )
        arguments = list(inspect.signature(self._function).parameters)
        self._one_tensor = arguments[1:3] == ["cos", "sin"]
        if not self._one_tensor and arguments[2:4] != ["cos", "sin"]:
            raise UnsupportedModelError(
                f"apply_rotary_pos_emb of model type {name!r} takes {arguments}, not (q, k, cos, sin). This "
                "architecture is not supported."
            )
        self._by_layer_type = "layer_type" in inspect.signature(self._module.forward).parameters
        tensors = [*self._module.buffers(), *self._module.parameters()]
        device = tensors[0].device if tensors else torch.device("cpu")
        if device.type == "meta":
            raise UnsupportedModelError(
                f"The rotary module of {name!r} is on the meta device. Load the model's weights first, or use "
                "ContentRotary.from_config."
            )
        positions = torch.tensor([_PROBE_POSITIONS], device=device)
        seen: set[str | None] = {None}
        for layer_idx in range(self.geometry.num_layers):
            if self.rotation_of(layer_idx) not in seen:
                seen.add(self.rotation_of(layer_idx))
                self._try_out(positions, layer_idx)

    def _try_out(self, positions: torch.Tensor, layer_idx: int) -> None:
        rotation = self.rotation_of(layer_idx)
        assert rotation is not None
        try:
            cos_sin = self.cos_sin(positions, layer_idx)
        except (IndexError, RuntimeError):
            # Qwen-VL in older releases: positions in time, height and width, which are the same for text.
            self._three_axes = True
            cos_sin = self.cos_sin(positions, layer_idx)
        assert cos_sin is not None
        # cos(0) = 1, so what stands there is the factor that the module scales cos and sin with.
        self._scaling[rotation] = float(cos_sin[0][0, 0, 0])
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(1, 2, positions.shape[1], self.geometry.head_dim, generator=generator).to(positions.device)
        try:
            rotated = self.apply_with(keys, cos_sin, layer_idx)
        except RuntimeError:  # the attention module cuts the rotated channels out by itself (StableLM, Phi)
            self._rotates_slice = True
            rotated = self.apply_with(keys, cos_sin, layer_idx)
        stripped = self.strip_with(rotated, cos_sin, layer_idx)
        is_inverse = rotated.shape == keys.shape and torch.allclose(stripped, keys, rtol=1e-4, atol=1e-4)
        if not is_inverse or torch.equal(rotated[:, :, 1:], keys[:, :, 1:]):
            raise UnsupportedModelError(
                f"The rotary functions of model type {self.geometry.model_type!r} do not act as a rotation that can "
                "be undone. This architecture is not supported."
            )
