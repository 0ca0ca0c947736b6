"""Models of :mod:`tests.hf.models` with LoRA adapters, in layers that have what PEFT's have: tests need no PEFT."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.hf.models import model

TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
"""Parts of fused layers, and whole ones."""


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


class Linear(torch.nn.Module):
    """A linear layer with one adapter, "default"."""

    __module__ = "peft.tuners.lora.layer"

    def __init__(self, base_layer: torch.nn.Linear, config: Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        self.r, self.lora_alpha = {"default": config.r}, {"default": config.lora_alpha}
        self.use_rslora = {"default": config.use_rslora}
        self.scaling = {"default": config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)}
        dropout = torch.nn.Dropout(config.lora_dropout) if config.lora_dropout else torch.nn.Identity()
        self.lora_dropout = torch.nn.ModuleDict({"default": dropout})
        options: dict[str, Any] = {"bias": False, "dtype": dtype, "device": base_layer.weight.device}
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(self.in_features, config.r, **options)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(config.r, self.out_features, **options)})
        self.lora_variant: dict[str, Any] = {}
        self.fan_in_fan_out = self.merged = self.disable_adapters = False
        self.active_adapters = ["default"]

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.lora_A["default"], self.lora_B["default"]
        delta = b(a(self.lora_dropout["default"](x.to(a.weight.dtype)))) * self.scaling["default"]
        return self.base_layer(x) + delta.to(x.dtype)


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
        targets: ends of the names of layers that have one.
        of_adapters: dtype of the adapters; None: the model's.
        config: of all of them.
    """
    made, config = model(dtype, *kind, **changed).requires_grad_(False), config or Config()
    for name in [name for name, _ in made.named_modules() if name.endswith(tuple(targets))]:
        made.set_submodule(name, Linear(made.get_submodule(name), config, of_adapters or dtype))
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
