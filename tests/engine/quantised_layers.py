"""Checkpoints whose linear layers are stored in a format, whatever their names, each with that of the matrices that it
stands for.
"""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests import fp8_checkpoints, quantised_checkpoints
from tests.fp8_checkpoints import Form
from tests.quantised_checkpoints import Integers, Stored, Tensors, gptq

_ENCODERS = (
    "(visual|vision_tower|vision_adapter|vision_model|audio_tower|multi_modal_projector|mlp1|embed_vision|embed_audio|"
    "sound_encoder|sound_projection)"
)
KEPT = (
    r"(^|\.)(lm_head|embed_tokens|embed_tokens_per_layer|embeddings|conv1d|conv\.conv|gate|shared_expert_gate|"
    r"in_proj_(a|b|ba)|router\.proj|feed_forward\.router|mtp\.fc|eh_proj|shared_head\.head|fc[12]_latent_proj|"
    r"vision_projection|"
    rf"{_ENCODERS}\..*)$"
)
"""Layers whose names end so keep 16 bits, as in the published checkpoints of these models."""
BLOCKS, INTEGERS, ROWS = "fp8 by blocks", "w4a16 of 128", "compressed-tensors by rows"
OF_32 = "w4a16 of 32"
_OF_ALL = ".feed_forward.experts.gate_up_proj", ".feed_forward.experts.down_proj"
"""Llama 4's, of all experts of a layer."""
OF_COMPRESSED = "compressed-tensors by blocks"
MODELOPT = "ModelOpt's by tensors, given"
NVFP4 = "nvfp4 with activations", "nvfp4 of ModelOpt with activations"
"""Of which activations keep 16 bits."""
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False}
FORMS: dict[str, Form | Stored] = {
    "fp8 by blocks": fp8_checkpoints.FORMS["fp8 by blocks"],
    OF_COMPRESSED: fp8_checkpoints.FORMS[OF_COMPRESSED],
    "compressed-tensors by rows": fp8_checkpoints.FORMS["compressed-tensors by rows"],
    "fp8 by tensors, given, in Mistral's names": replace(
        fp8_checkpoints.FORMS["fp8 by tensors, given"], scale="weight_scale_inv", given="activation_scale"
    ),
    "w4a16 of 128": quantised_checkpoints.FORMATS["w4a16 of 128"],
    OF_32: quantised_checkpoints.FORMATS[OF_32],
    "awq": quantised_checkpoints.FORMATS["awq"],
    "gptq": Stored(gptq, Integers(4, 128, False), GPTQ),
    MODELOPT: fp8_checkpoints.FORMS[MODELOPT],
    **{name: quantised_checkpoints.FORMATS[name] for name in NVFP4},
}
"""By a name; with those of the first kind activations are codes too."""


def parts_of(form: Form | Stored, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Tensors of a linear layer by their names in it, and the matrix in bf16 that they stand for."""
    if isinstance(form, Stored):
        return form.layer(weight)
    return form.layer(weight), quantised_checkpoints.fp8(form.shared, weight)[1]


def config_of(form: Form | Stored, kept: Sequence[str]) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint whose ``kept`` linear layers have 16 bits."""
    config = dict(form.config)
    match config["quant_method"]:
        case "compressed-tensors":
            group = config["config_groups"]["group_0"] | {"targets": ["Linear"]}
            of_glm = (f"{one}_proj" for one in kept if one.endswith(".attn.qkv"))  # by which vLLM asks for it
            return config | {"ignore": [*kept, *of_glm], "config_groups": {"group_0": group}}
        case "gptq":
            return config | {"dynamic": {rf"-:.*\.(in_proj_ba|gate|{'|'.join(re.escape(one) for one in kept)})$": {}}}
        case "modelopt":
            patterns = (re.sub(rf"{_ENCODERS}\..*", r"\1*", one) for one in kept)  # as published
            return config | {"ignore": [*dict.fromkeys(["lm_head", *patterns])]}  # also a head that is the embeddings
    return config | {"modules_to_not_convert": list(kept)}


def with_each_expert(folder: Path, inputs_first: bool = False) -> Path:
    """Give a checkpoint in bf16 a matrix for each expert, as quantised ones have them.

    Args:
        folder: changed in place.
        inputs_first: whether it has those of all experts as [experts, K, N], and not [experts, N, K].
    """
    file, tensors = folder / "model.safetensors", {}
    for weight, tensor in load_file(file).items():
        layer, of_experts, projection = weight.rpartition(".experts.")
        if not of_experts or tensor.dim() < 3:
            tensors[weight] = tensor
            continue
        of_all = tensor.mT if inputs_first else tensor
        is_fused = projection == "gate_up_proj"
        names = ("gate_proj", "up_proj") if is_fused else (projection,)
        for name, of_name in zip(names, of_all.chunk(len(names), 1), strict=True):
            for number, matrix in enumerate(of_name):
                tensors[f"{layer}.experts.{number}.{name}.weight"] = matrix.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def experts_of(form: Form | Stored, weights: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The same of all experts of a layer of Llama 4, [experts, K, N], as ModelOpt stores them: with one scale a tensor
    for all.
    """

    def of_each(rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(0, (len(weights), -1)).mT

    parts, matrix = parts_of(form, weights.mT.flatten(0, 1))
    return {name: of_each(part) if part.dim() > 1 else part for name, part in parts.items()}, of_each(matrix)


def write(source: Path, form: Form | Stored, packed: Path, unpacked: Path | None = None, kept: str = KEPT) -> Path:
    """Write a checkpoint in bf16 with its linear layers as they are stored, and the matrices of that in bf16.

    Args:
        source: the folder of the checkpoint.
        packed: a new folder.
        unpacked: a new folder.
        kept: by what the names of layers end that keep 16 bits.

    Returns:
        ``packed``.
    """
    made: Tensors = {}
    matrices: Tensors = {}
    names = []
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if tensor.dim() == 3 and layer.endswith(_OF_ALL):
            parts, matrices[name] = experts_of(form, tensor)
            made |= {layer if part == "weight" else f"{layer}_{part}": of_all for part, of_all in parts.items()}
            continue
        if layer == name or tensor.dim() != 2 or re.search(kept, layer):
            made[name] = matrices[name] = tensor
            names += [layer] * (layer != name and tensor.dim() > 1)
            continue
        parts, matrices[name] = parts_of(form, tensor)
        made |= {f"{layer}.{part}": of_layer for part, of_layer in parts.items()}
    for folder, weights in ((packed, made), (unpacked, matrices)):
        if folder is not None:
            shutil.copytree(source, folder)
            whole = {name: tensor.contiguous() for name, tensor in weights.items()}
            save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text()) | {"quantization_config": config_of(form, names)}
    (packed / "config.json").write_text(json.dumps(config))
    return packed


def with_scales_of_cache(folder: Path) -> list[list[float]]:
    """Give a checkpoint of ModelOpt's a KV cache in FP8 with scales. Returns those of keys and values of each layer."""
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors, said = load_file(file), json.loads(config.read_text())
    said["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
    config.write_text(json.dumps(said))
    layers = sorted(name.removesuffix("k_proj.weight") for name in tensors if name.endswith(".k_proj.weight"))
    layers = [layer for layer in layers if not re.search(rf"{_ENCODERS}\.", layer)]
    scales = [[0.03125 * 2**number, 0.015625 * 2**number] for number in range(len(layers))]
    for layer, of_layer in zip(layers, scales, strict=True):
        for part, scale in zip("kv", of_layer, strict=True):
            tensors[f"{layer}{part}_proj.{part}_scale"] = torch.tensor(scale)
    save_file(tensors, file, metadata={"format": "pt"})
    return scales
