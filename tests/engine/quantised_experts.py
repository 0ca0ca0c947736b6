"""Checkpoints whose experts are stored in a format, and those of the matrices that these stand for.

Nothing here is the package's: a format is written and unpacked as its specification says.
"""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engine import fp8_caches
from tests.quantised_checkpoints import FORMATS

Tensors = dict[str, torch.Tensor]

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Which of eight neighbouring columns lies where in a word."""


def words(codes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """int32 [..., K * bits / 32] of unsigned codes [..., K], the first in the lowest bits."""
    per_word = 32 // bits
    parts = codes.long().unflatten(-1, (-1, per_word)) << (bits * torch.arange(per_word))
    return parts.sum(-1).to(torch.uint32).view(torch.int32)


class Integers:
    """A matrix [N, K] as integers of four bits with zero points, a group at a time.

    Scales are numbers that fp16 and bf16 have, so that every checkpoint's are the same; their products with codes are
    rounded.
    """

    def __init__(self, weight: torch.Tensor, group: int, zeros: bool) -> None:
        n, k = weight.shape
        groups = weight.float().unflatten(1, (-1, group))
        self.scales = (groups.abs().amax(2) / 5).bfloat16()  # [N, G]
        draw = torch.Generator().manual_seed(n + k)
        self.zeros = torch.randint(5, 11, self.scales.shape, generator=draw) if zeros else self.scales.new_full((), 8)
        zero = self.zeros[..., None] if zeros else self.zeros
        self.codes = (groups / self.scales.float()[..., None] + zero).round().clamp(0, 15).int()
        self.matrix = ((self.codes - zero).float() * self.scales.float()[..., None]).bfloat16().flatten(1)
        self.codes = self.codes.flatten(1)


def compressed_tensors(name: str, of: Integers) -> Tensors:
    """As llm-compressor writes a weight."""
    stored = {
        f"{name}.weight_packed": words(of.codes),
        f"{name}.weight_scale": of.scales,
        f"{name}.weight_shape": torch.tensor(of.codes.shape),
    }
    return stored | ({f"{name}.weight_zero_point": words(of.zeros.t()).t().contiguous()} if of.zeros.dim() else {})


def gptq(name: str, of: Integers) -> Tensors:
    """As AutoGPTQ writes a symmetric one: zero points less 1."""
    k, n = of.codes.shape[1], of.codes.shape[0]
    groups = of.scales.shape[1]
    return {
        f"{name}.qweight": words(of.codes).t().contiguous(),
        f"{name}.scales": of.scales.t().half().contiguous(),
        f"{name}.qzeros": words(torch.full((groups, n), 7)),
        f"{name}.g_idx": (torch.arange(k) // (k // groups)).int(),
    }


def awq(name: str, of: Integers) -> Tensors:
    """As AutoAWQ writes it."""

    def packed(codes: torch.Tensor) -> torch.Tensor:
        return words(codes.t().unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1))

    return {
        f"{name}.qweight": packed(of.codes),
        f"{name}.scales": of.scales.t().half().contiguous(),
        f"{name}.qzeros": packed(of.zeros),
    }


def _compressed_tensors_config(group: int, zeros: bool) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": not zeros, "strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$", "re:.*layers.0.mlp.*"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | {"dynamic": False}}},
    }


def int8_matrix(weight: torch.Tensor) -> torch.Tensor:
    """What a matrix [N, K] stands for as int8 with a scale a row, which has the dtype of the weights."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = torch.where(scales == 0, 0, (weight / scales).round().clamp(-127, 127)).to(torch.int8)
    return (codes.float() * scales.float()).to(weight.dtype)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False}
INTEGERS: dict[str, tuple[bool, dict[str, Any], Callable[[str, Integers], Tensors], dict[str, Any]]] = {
    "compressed-tensors": (False, _compressed_tensors_config(32, False), compressed_tensors, {}),
    "GPTQ": (False, GPTQ, gptq, {}),
    "GPTQ by moe_wna16": (
        False,
        GPTQ | {"modules_in_block_to_quantize": ["mlp.experts"]},
        gptq,
        {"quantization": "moe_wna16"},
    ),
    "compressed-tensors with zero points": (True, _compressed_tensors_config(32, True), compressed_tensors, {}),
    "AWQ": (
        True,
        AWQ | {"modules_to_not_convert": ["self_attn", "layers.0.mlp", "mlp.gate", "lm_head"]},
        awq,
        {},
    ),
}
"""By name: whether there are zero points, config.json's part, what writes a weight, and arguments of the engine."""


def int8_of(folder: Path, at: Path) -> Path:
    """A checkpoint of 16 bits itself, whose experts an engine quantises while it loads them; and in ``matrix`` of
    ``at`` the one of the matrices that these stand for.
    """
    weights = load_file(folder / "model.safetensors").items()
    matrices = {name: int8_matrix(weight) if ".experts." in name else weight for name, weight in weights}
    _write(folder, at / "matrix", matrices, None)
    return folder


def qwen_of(folder: Path, at: Path, kind: str) -> Path:
    """A checkpoint of Qwen3-MoE with experts of a kind of :data:`INTEGERS`.

    Args:
        folder: of one in bf16.
        at: where it is written, and beside it, in ``matrix``, the one of the matrices that the experts stand for.
        kind: of the table.
    """
    zeros, config, write, _ = INTEGERS[kind]
    stored: Tensors = {}
    matrices: Tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if ".experts." in name:
            of = Integers(weight, 32, zeros)
            stored |= write(name.removesuffix(".weight"), of)
            matrices[name] = of.matrix
        else:
            stored[name] = matrices[name] = weight
    _write(folder, at / "matrix", matrices, None)
    return _write(folder, at / "stored", stored, config)


NVFP4 = {
    f"NVFP4 of {of}{activations}": f"nvfp4{name}{activations}"
    for of, name in (("compressed-tensors", ""), ("ModelOpt", " of ModelOpt"))
    for activations in ("", " with activations")
}
"""Names in :data:`tests.quantised_checkpoints.FORMATS`, by names."""
WITH_CACHE = "NVFP4 of ModelOpt with activations and a KV cache"
"""In FP8, as published."""
_CACHE = {".k_proj.k_scale": 0.03125, ".v_proj.v_scale": 0.015625}
"""Its scales, by the names that ModelOpt gives them."""


def nvfp4_of(folder: Path, at: Path, kind: str) -> Path:
    """A checkpoint of Qwen3-MoE whose experts and linear layers are in NVFP4, of a kind of :data:`NVFP4`.

    Args:
        folder: of one in bf16.
        at: as of :func:`qwen_of`.
        kind: of the table, or :data:`WITH_CACHE`.
    """
    form = FORMATS[NVFP4[kind.removesuffix(" and a KV cache")]]
    stored: Tensors = {}
    matrices: Tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            layer = name.removesuffix("weight")
            made, matrices[name] = form.layer(weight)
            stored |= {layer + part: tensor for part, tensor in made.items()}
        else:
            stored[name] = matrices[name] = weight
    routers = [name.removesuffix(".weight") for name in stored if name.endswith(".mlp.gate.weight")]
    config, of_matrices = form.config | {"ignore": ["lm_head", *routers]}, None
    if kind == WITH_CACHE:
        config |= {"kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False}}
        of_matrices = fp8_caches.CONFIG
        layers = [name.removesuffix(".q_proj.weight") for name in matrices if name.endswith(".q_proj.weight")]
        for layer, (name, scale) in itertools.product(layers, _CACHE.items()):
            stored[layer + name] = matrices[f"{layer}.{name.rpartition('.')[2]}"] = torch.tensor(scale)
    _write(folder, at / "matrix", matrices, of_matrices)
    return _write(folder, at / "stored", stored, config)


def mxfp4_of(folder: Path, at: Path) -> Path:
    """The same of gpt-oss, with experts in MXFP4."""
    stored: Tensors = {}
    matrices: Tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj") and ".experts." in name:  # [experts, K, N]
            blocks, scales, matrix = _mxfp4(weight.transpose(1, 2).float())
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            matrices[name] = matrix.transpose(1, 2).contiguous()
        else:
            stored[name] = matrices[name] = weight
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _write(folder, at / "matrix", matrices, None)
    return _write(folder, at / "stored", stored, {"quant_method": "mxfp4", "modules_to_not_convert": skipped})


def _mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks [experts, N, K / 32, 16], scales [experts, N, K / 32], and bf16 [experts, N, K]; some are tiny."""
    groups = weight.unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp(2**-100))) - 2
    exponent[:, ::7, ::3] -= 40
    codes = (groups / torch.exp2(exponent)[..., None])[..., None].sub(E2M1).abs().argmin(-1)
    matrix = (E2M1[codes] * torch.exp2(exponent)[..., None]).flatten(-2).bfloat16()
    halves = codes.unflatten(-1, (-1, 2))
    return (halves[..., 0] | halves[..., 1] << 4).to(torch.uint8), (exponent + 127).to(torch.uint8), matrix


def _write(folder: Path, at: Path, tensors: Tensors, quantisation: dict[str, Any] | None) -> Path:
    at.mkdir(parents=True)
    for path in _others(folder):
        shutil.copy(path, at)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, at / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text())
    (at / "config.json").write_text(
        json.dumps(config | ({"quantization_config": quantisation} if quantisation else {}))
    )
    return at


def _others(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if path.name not in ("config.json", "model.safetensors"))
