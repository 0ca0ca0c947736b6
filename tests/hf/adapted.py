"""Models of :mod:`tests.hf.models` with LoRA adapters, in layers that have what PEFT's have: tests need no PEFT."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.hf.models import model
from vllm_batch_invariant.hf.adapters import base_of

TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
"""Parts of fused layers, and whole ones."""
WITH_EXPERTS = (*TARGETS, "experts")


@dataclass
class Config:
    """What is looked at of PEFT's LoraConfig."""

    r: int = 6
    lora_alpha: int = 20
    use_rslora: bool = True
    lora_dropout: float = 0.0
    bias: str = "none"
    use_dora: bool = False
    modules_to_save: list[str] | None = None
    init_lora_weights: bool | str = True


class _Layer(torch.nn.Module):
    """What PEFT's layers have, with one adapter, "default"."""

    __module__ = "peft.tuners.lora.layer"

    def __init__(
        self, base_layer: torch.nn.Module, k: int, n: int, config: Config, like: torch.Tensor, experts: int = 1
    ) -> None:
        """Take a layer with k inputs and n outputs; matrices of the adapter are like a tensor."""
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = k, n
        self.r, self.lora_alpha = {"default": config.r}, {"default": config.lora_alpha}
        self.use_rslora = {"default": config.use_rslora}
        self.scaling = {"default": config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)}
        dropout = torch.nn.Dropout(config.lora_dropout) if config.lora_dropout else torch.nn.Identity()
        self.lora_dropout = torch.nn.ModuleDict({"default": dropout})
        options: dict[str, Any] = {"bias": False, "dtype": like.dtype, "device": like.device}
        rank = experts * config.r
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(self.in_features, rank, **options)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(rank, self.out_features, **options)})
        self.lora_variant: dict[str, Any] = {}
        self.fan_in_fan_out = self.merged = self.disable_adapters = False
        self.active_adapters = ["default"]


class Linear(_Layer):
    """A linear layer with an adapter."""

    __module__ = "peft.tuners.lora.layer"

    def __init__(self, base_layer: torch.nn.Linear, config: Config, dtype: torch.dtype) -> None:
        like = base_layer.weight.detach().to(dtype)
        super().__init__(base_layer, base_layer.in_features, base_layer.out_features, config, like)

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias

    def delta(self) -> torch.Tensor:
        """What merging adds to the weight."""
        a, b = self.lora_A["default"].weight, self.lora_B["default"].weight
        return b.float() @ a.float() * self.scaling["default"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.lora_A["default"], self.lora_B["default"]
        delta = b(a(self.lora_dropout["default"](x.to(a.weight.dtype)))) * self.scaling["default"]
        return self.base_layer(x) + delta.to(x.dtype)


class ParamWrapper(_Layer):
    """Experts, or a layer around them, with an adapter of one of their parameters [experts, N, K]."""

    __module__ = "peft.tuners.lora.layer"

    def __init__(self, base_layer: torch.nn.Module, name: str, config: Config, dtype: torch.dtype) -> None:
        weight = getattr(base_of(base_layer), name).detach()
        self.num_experts, n, k = weight.shape
        super().__init__(base_layer, k, n, config, weight.to(dtype), self.num_experts)
        self.parameter_name = name

    @property
    def weight(self) -> torch.Tensor:
        return getattr(base_of(self), self.parameter_name)

    def delta(self) -> torch.Tensor:
        """What merging adds to the parameter, in the adapter's dtype."""
        a, b = self.lora_A["default"].weight, self.lora_B["default"].weight
        a, b = a.unflatten(0, (self.num_experts, -1)), b.unflatten(1, (-1, self.num_experts))
        return torch.einsum("nre,erk->enk", b, a) * self.scaling["default"]

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        layer, weights = self, {}
        while isinstance(layer, ParamWrapper):
            weights[layer.parameter_name] = layer.weight + layer.delta()
            layer = layer.base_layer
        return torch.func.functional_call(layer, weights, args)


def adapted(
    dtype: torch.dtype = torch.bfloat16,
    *kind: type,
    targets: Sequence[str] = TARGETS,
    of_adapters: torch.dtype | None = None,
    config: Config | None = None,
    **changed: Any,
) -> torch.nn.Module:
    """A model, frozen but for its adapters, whose matrices are random and the same at every call.

    Args:
        targets: ends of the names of layers that have one; second products of experts have one of a higher rank.
        of_adapters: dtype of the adapters; None: the model's.
        config: of all of them.
    """
    made, config = model(dtype, *kind, **changed).requires_grad_(False), config or Config()
    for name in [name for name, _ in made.named_modules() if name.endswith(tuple(targets))]:
        base, kept = made.get_submodule(name), of_adapters or dtype
        if hasattr(base, "gate_up_proj"):
            first = ParamWrapper(base, "gate_up_proj", config, kept)
            made.set_submodule(name, ParamWrapper(first, "down_proj", replace(config, r=config.r + 1), kept))
        else:
            made.set_submodule(name, Linear(base, config, kept))
    made.peft_config = {"default": config}
    fill(made)
    return made


def fill(model: torch.nn.Module) -> None:
    """Write random numbers into every adapter: so large that they change logprobs."""
    generator = torch.Generator().manual_seed(3)
    for weight in own(model).values():
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)


def own(model: torch.nn.Module) -> Mapping[str, torch.nn.Parameter]:
    """The adapters' matrices, by name."""
    return {name: weight for name, weight in model.named_parameters() if ".lora_" in name}
