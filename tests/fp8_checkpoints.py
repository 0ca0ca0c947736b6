"""Checkpoints of FP8 weights and activations as their tools write them, made without the plugin's code."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.quantised_checkpoints import Tensors, fp8

INPUT_SCALE = 0.0625
"""Of activations that have a given one."""


@dataclass(frozen=True)
class Form:
    """How a tool stores a model.

    Attributes:
        shared: what of a weight has one scale: a "tensor", a "channel" or a "block".
        config: ``quantization_config``.
        scale: the name of those scales.
        static: whether activations have a given scale.
        given: the name of that.
    """

    shared: str
    config: dict[str, Any] = field(hash=False)
    scale: str = "weight_scale"
    static: bool = False
    given: str = "input_scale"

    def layer(self, weight: torch.Tensor) -> Tensors:
        """What a checkpoint has of a linear layer, by names in it."""
        parts, _ = fp8(self.shared, weight)
        scale = parts["weight_scale"]
        of_modelopt = self.config["quant_method"] == "modelopt"
        of_one = () if of_modelopt or self.config["quant_method"] == "fp8" else (1,)
        if of_modelopt and self.shared != "tensor":
            scale = scale[:, None, :, None] if self.shared == "block" else scale[:, 0]
        if self.shared == "tensor":
            scale = scale.reshape(of_one)
        given = {self.given: torch.full(of_one, INPUT_SCALE)} if self.static else {}
        return {"weight": parts["weight"], self.scale: scale} | given


def _fp8(shared: str, static: bool = False) -> Form:
    config = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    if shared == "block":
        return Form(shared, config | {"weight_block_size": [128, 128]}, "weight_scale_inv")
    return Form(shared, config, static=static)


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    """``quantization_config`` of ModelOpt."""
    producer = {"name": "modelopt", "version": "0.37.0"}
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], "producer": producer} | more


def compressed(shared: str, activations: dict[str, Any]) -> dict[str, Any]:
    """``quantization_config`` of compressed-tensors."""
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    block = {"block_structure": [128, 128]} if shared == "block" else {}
    group = {
        "targets": ["Linear"],
        "weights": eight | {"dynamic": False, "strategy": shared} | block,
        "input_activations": eight | activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }


TOKEN = {"dynamic": True, "strategy": "token"}
GROUP = {"dynamic": True, "strategy": "group", "group_size": 128}
GIVEN = {"dynamic": False, "strategy": "tensor"}
FORMS = {
    "fp8 by blocks": _fp8("block"),
    "fp8 by tensors": _fp8("tensor"),
    "fp8 by tensors, given": _fp8("tensor", static=True),
    "compressed-tensors by blocks": Form("block", compressed("block", GROUP)),
    "compressed-tensors by rows": Form("channel", compressed("channel", TOKEN)),
    "compressed-tensors by rows, given": Form("channel", compressed("channel", GIVEN), static=True),
    "compressed-tensors by tensors": Form("tensor", compressed("tensor", TOKEN)),
    "compressed-tensors by tensors, given": Form("tensor", compressed("tensor", GIVEN), static=True),
    "ModelOpt's by tensors, given": Form("tensor", modelopt("FP8"), static=True),
    "ModelOpt's by rows": Form("channel", modelopt("FP8_PER_CHANNEL_PER_TOKEN")),
    "ModelOpt's by blocks": Form("block", modelopt("FP8_PB_WO")),
}
"""By a name."""


def write(source: Path, folder: Path, form: Form) -> Path:
    """Write a checkpoint in 16 bits with the projections of its layers in FP8; the shards of a fused layer have scales
    of different sizes, and experts other given ones.
    """
    made: Tensors = {}
    for number, (name, tensor) in enumerate(load_file(source / "model.safetensors").items()):
        if not name.endswith("_proj.weight"):
            made[name] = tensor
            continue
        parts = form.layer(tensor * (1 + number % 3))
        if form.static and ".experts." in name:
            parts[form.given] *= 1 + int(name.split(".experts.")[1].split(".")[0]) % 2
        made |= {name.removesuffix("weight") + part: of_layer.contiguous() for part, of_layer in parts.items()}
    shutil.copytree(source, folder)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    kept = [name.removesuffix(".weight") for name in made if name.endswith(".mlp.gate.weight")]  # routers
    skipped = {"fp8": "modules_to_not_convert", "modelopt": "ignore"}.get(form.config["quant_method"])
    said = form.config | ({skipped: ["lm_head", *kept]} if kept and skipped else {})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
