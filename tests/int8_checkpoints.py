"""Checkpoints of int8 weights and activations as their tools write them, made without the plugin's code."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
INPUT_SCALE = 0.04
"""Of activations that have a given one."""


def group(targets: list[str], weights: str, activations: str, symmetric: bool = True) -> dict[str, Any]:
    """Of a configuration: layers whose weights have a scale a "channel" or a "tensor", and what they are given one a
    "token", dynamic, or a "tensor", static.
    """
    eight = {"num_bits": 8, "type": "int"}
    dynamic = activations == "token"
    return {
        "targets": targets,
        "weights": eight | {"symmetric": True, "dynamic": False, "strategy": weights},
        "input_activations": eight | {"symmetric": symmetric, "dynamic": dynamic, "strategy": activations},
        "output_activations": None,
    }


def configuration(*groups: dict[str, Any]) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint."""
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {f"group_{number}": of for number, of in enumerate(groups)},
    }


def tensors(weight: torch.Tensor, weights: str, activations: str) -> Tensors:
    """What such a checkpoint has of a layer, by names in it."""
    top = weight.float().abs().amax(1, keepdim=True)
    top = top if weights == "channel" else top.max().reshape(1)
    scale = top / 127
    codes = (weight.float() / scale).round().clamp(-128, 127).to(torch.int8)
    given = {"input_scale": torch.tensor([INPUT_SCALE])} if activations == "tensor" else {}
    return {"weight": codes, "weight_scale": scale} | given


MIXED = {"self_attn": ("tensor", "tensor"), "mlp": ("channel", "token")}
"""By a part of a layer's name, what has one scale: of its weight and of what it is given."""


def write(source: Path, folder: Path, schemes: dict[str, tuple[str, str]] = MIXED) -> Path:
    """Write a checkpoint in 16 bits with the projections of its layers in int8; the shards of a fused layer have scales
    of different sizes.
    """
    made: Tensors = {}
    for number, (name, tensor) in enumerate(load_file(source / "model.safetensors").items()):
        if not name.endswith("_proj.weight"):
            made[name] = tensor
            continue
        [scheme] = [of for part, of in schemes.items() if f".{part}." in name]
        parts = tensors(tensor * (1 + number % 3), *scheme)
        made |= {name.removesuffix("weight") + part: of_layer.contiguous() for part, of_layer in parts.items()}
    shutil.copytree(source, folder)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    groups = [group([f"re:.*{part}.*_proj$"], *scheme) for part, scheme in schemes.items()]
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": configuration(*groups)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
