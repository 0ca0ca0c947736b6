"""Checkpoints of ModelOpt whose layers have several of its formats, made without the plugin's code."""

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from tests import fp8_checkpoints, quantised_checkpoints
from tests.quantised_checkpoints import Tensors

EIGHT = fp8_checkpoints.FORMS["ModelOpt's by tensors, given"]
CACHE = {"num_bits": 8, "type": "float", "dynamic": False}
SCALES = {"k": 0.03125, "v": 0.015625}
"""Of a KV cache in FP8."""


class Mixture(NamedTuple):
    """Which layers have which format, by patterns of their names; the others keep 16 bits.

    Attributes:
        four: those in NVFP4.
        eight: those of the others in FP8.
        algorithm: how ModelOpt names NVFP4.
        cached: whether there are scales of a KV cache in FP8.
    """

    four: str
    eight: str
    algorithm: str = "NVFP4"
    cached: bool = True


def write(source: Path, of: Mixture, packed: Path, unpacked: Path | None = None, factor: float = 1) -> Path:
    """Write a checkpoint in bf16 as a mixture.

    Args:
        source: the folder of the checkpoint.
        packed: a new folder.
        unpacked: a new folder, of a checkpoint in FP8 alone, that has the matrices of what is in NVFP4.
        factor: of weights that are quantised. Those of a fused layer have other scales than their neighbours.

    Returns:
        ``packed``.
    """
    made: Tensors = {}
    matrices: Tensors = {}
    layers: dict[str, dict[str, Any]] = {}
    kept = []
    for number, (name, tensor) in enumerate(load_file(source / "model.safetensors").items()):
        layer = name.removesuffix(".weight")
        scaled = tensor * (1 + number % 3) * factor
        if re.search(of.four, layer):
            parts, matrices[name] = quantised_checkpoints.modelopt(of.algorithm == "NVFP4", scaled)
            layers[layer] = {"quant_algo": of.algorithm, "group_size": 16}
            kept.append(layer)
        elif re.search(of.eight, layer):
            parts = EIGHT.layer(scaled)
            matrices |= {f"{layer}.{part}": of_layer for part, of_layer in parts.items()}
            layers[layer] = {"quant_algo": "FP8"}
        else:
            made[name] = matrices[name] = tensor
            kept += [layer] * (tensor.dim() > 1)
            continue
        made |= {f"{layer}.{part}": of_layer for part, of_layer in parts.items()}
    for name in [name for name in (*made,) if of.cached and name.endswith(("k_proj.weight", "v_proj.weight"))]:
        part = name.removesuffix("_proj.weight")[-1]
        scale = {name.replace("weight", f"{part}_scale"): torch.tensor(SCALES[part])}
        made |= scale
        matrices |= scale
    cache = {"kv_cache_scheme": CACHE} if of.cached else {}
    mixed = fp8_checkpoints.modelopt("MIXED_PRECISION", quantized_layers=layers, **cache)
    for folder, weights, config in (
        (packed, made, mixed),
        (unpacked, matrices, fp8_checkpoints.modelopt("FP8") | {"ignore": kept} | cache),
    ):
        if folder is not None:
            shutil.copytree(source, folder)
            whole = {name: tensor.contiguous() for name, tensor in weights.items()}
            save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
            say(folder, config)
    return packed


def say(folder: Path, config: dict[str, Any]) -> None:
    """Give a checkpoint another ``quantization_config``."""
    whole = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(whole))


def said(folder: Path) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint."""
    return json.loads((folder / "config.json").read_text())["quantization_config"]
