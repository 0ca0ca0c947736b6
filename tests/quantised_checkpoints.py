"""Quantised checkpoints as their tools write them, each with that of the matrices that it stands for, made without the
plugin's code.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
_PROJECTIONS = "re:.*(q|k|v|o|gate|up|down)_proj$"
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def rounded(exact: torch.Tensor) -> torch.Tensor:
    """fp64 numbers in bf16, rounded once, half to even."""
    bits = exact.contiguous().view(torch.int64)
    bits = (bits + (1 << 44) - 1 + (bits >> 45 & 1)) >> 45 << 45
    return bits.view(torch.float64).bfloat16()


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Words int32 along the last dimension, the first code in the lowest bits."""
    lists = codes.long().unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    words = lists.sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


@dataclass(frozen=True)
class Integers:
    """A linear layer by groups of integers: codes and zero points [N, K] and [N, G], and scales [N, G] in bf16."""

    bits: int
    group: int | None
    zeros: bool

    def of(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, zero points and scales near a weight, and the matrix that they stand for; a group is all zeros."""
        n, k = weight.shape
        groups = weight.float().view(n, -1, self.group or k).clone()
        groups[0, 0] = 0
        most, half = (1 << self.bits) - 1, 1 << self.bits - 1
        scales = ((groups.amax(-1) - groups.amin(-1)) / (most - 1)).clamp(1e-4).bfloat16()
        row = torch.arange(n)[:, None] + torch.arange(groups.shape[1])
        zeros = half + row % 4 - 1 if self.zeros else torch.full_like(row, half)
        codes = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, most)
        exact = (codes.double() - zeros[..., None]) * scales.double()[..., None]
        return codes.view(n, k).int(), zeros.int(), scales, rounded(exact).view(n, k)


def compressed_integers(form: Integers, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scales, matrix = form.of(weight)
    made = {
        "weight_packed": pack(codes, form.bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if form.zeros:
        made["weight_zero_point"] = pack(zeros.t(), form.bits).t().contiguous()
    return made, matrix


def gptq(form: Integers, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scales, matrix = form.of(weight)
    k, group = weight.shape[1], form.group or weight.shape[1]
    return {
        "qweight": pack(codes, form.bits).t().contiguous(),
        "qzeros": pack((zeros - 1).t(), form.bits),
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(k) // group).int(),
    }, matrix


def awq(form: Integers, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scales, matrix = form.of(weight)

    def packed(values: torch.Tensor) -> torch.Tensor:
        return pack(values.t().unflatten(1, (-1, 8))[..., _AWQ].flatten(1), form.bits)

    return {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales.t().contiguous()}, matrix


def fp8(shared: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """FP8 codes with scales in fp32, of a matrix, of rows, or of blocks of 128 x 128, the last of which may be cut."""
    n, k = weight.shape
    size = {"tensor": (n, k), "channel": (1, k), "block": (128, 128)}[shared]
    whole = torch.nn.functional.pad(weight.float(), (0, -k % size[1], 0, -n % size[0]))
    blocks = whole.view(whole.shape[0] // size[0], size[0], whole.shape[1] // size[1], size[1])
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    codes = (blocks / scales).to(torch.float8_e4m3fn)
    matrix = rounded(codes.double() * scales.double()).view(whole.shape)[:n, :k]
    scales = scales.flatten() if shared == "tensor" else scales[:, 0, :, 0]
    return {"weight": codes.view(whole.shape)[:n, :k].contiguous(), "weight_scale": scales}, matrix.contiguous()


def nvfp4(_: None, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    n, k = weight.shape
    groups = weight.float().view(n, k // 16, 16)
    reciprocal = (448 * 6 / weight.float().abs().max()).reshape(1)
    scales = (groups.abs().amax(-1) / 6 * reciprocal).to(torch.float8_e4m3fn)
    whole = 1 / reciprocal
    nearest = groups / (scales.float() * whole)[..., None].clamp(1e-12)
    codes = (nearest.abs()[..., None] - _E2M1).abs().argmin(-1)
    numbers = torch.copysign(_E2M1[codes], nearest)
    matrix = rounded(numbers.double() * scales.double()[..., None] * whole.double()).view(n, k)
    nibbles = (codes + 8 * nearest.signbit()).to(torch.uint8).view(n, k // 2, 2)
    packed = nibbles[..., 0] | nibbles[..., 1] << 4
    return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": reciprocal}, matrix


def nvfp4_of_activations(_: None, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    made, matrix = nvfp4(None, weight)
    return made | {"input_global_scale": torch.tensor([448 * 6 / 8.0])}, matrix


def modelopt(activations: bool, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The same, with the global scale itself."""
    made, matrix = nvfp4(None, weight)
    made = {
        "weight": made["weight_packed"],
        "weight_scale": made["weight_scale"],
        "weight_scale_2": 1 / made["weight_global_scale"][0],
    }
    return made | ({"input_scale": torch.tensor(8 / (448 * 6))} if activations else {}), matrix


def mxfp4(_: None, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    n, k = weight.shape
    groups = weight.double().view(n, k // 32, 32)
    powers = groups.abs().amax(-1).log2().floor() - 2
    nearest = groups / powers.exp2()[..., None]
    codes = (nearest.abs()[..., None] - _E2M1).abs().argmin(-1)
    matrix = (torch.copysign(_E2M1[codes].double(), nearest) * powers.exp2()[..., None]).bfloat16().view(n, k)
    nibbles = (codes + 8 * nearest.signbit()).to(torch.uint8).view(n, k // 2, 2)
    packed = nibbles[..., 0] | nibbles[..., 1] << 4
    return {"weight_packed": packed, "weight_scale": (powers + 127).to(torch.uint8)}, matrix


def _compressed(
    kind: str, weights: dict[str, Any], head: bool = False, activations: dict[str, Any] | None = None
) -> dict[str, Any]:
    group = {
        "targets": [_PROJECTIONS, *["re:.*lm_head$"] * head],
        "weights": {"symmetric": True, "dynamic": False} | weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": {"group_0": group},
    }


def _packed(form: Integers, head: bool) -> dict[str, Any]:
    size = {"strategy": "channel"} if form.group is None else {"strategy": "group", "group_size": form.group}
    of = {"num_bits": form.bits, "type": "int", "symmetric": not form.zeros} | size
    return _compressed("pack-quantized", of, head)


def _gptq(form: Integers, **more: Any) -> dict[str, Any]:
    of = {"bits": form.bits, "group_size": form.group or -1, "desc_act": False, "sym": True, "lm_head": True}
    return {"quant_method": "gptq"} | of | more


@dataclass(frozen=True)
class Stored:
    """How a tool stores a model.

    Attributes:
        write: gives the tensors of a linear layer and the matrix that they stand for.
        form: its first argument.
        config: ``quantization_config``.
        head: whether the output head is quantised too.
    """

    write: Callable[[Any, torch.Tensor], tuple[Tensors, torch.Tensor]]
    form: Any
    config: dict[str, Any] = field(hash=False)
    head: bool = False

    @property
    def group(self) -> dict[str, Any]:
        """What compressed-tensors says of its layers."""
        return self.config["config_groups"]["group_0"]

    def layer(self, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        """Tensors of a linear layer by their names in it, and the matrix in bf16 that they stand for."""
        return self.write(self.form, weight)


def _compressed_integers(bits: int, group: int | None, zeros: bool = False, head: bool = False) -> Stored:
    form = Integers(bits, group, zeros)
    return Stored(compressed_integers, form, _packed(form, head), head)


_FLOAT8 = {"num_bits": 8, "type": "float"}
_FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_LOCAL = {"symmetric": True, "dynamic": "local"}
_MX = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
_MODELOPT = {"quant_method": "modelopt", "group_size": 16, "ignore": []}
_AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FORMATS = {
    "w4a16 of 128": _compressed_integers(4, 128),
    "w4a16 of 32": _compressed_integers(4, 32),
    "w4a16 of 32 with zero points": _compressed_integers(4, 32, zeros=True, head=True),
    "w4a16 by rows": _compressed_integers(4, None),
    "w8a16 of 64": _compressed_integers(8, 64),
    "w8a16 by rows with zero points": _compressed_integers(8, None, zeros=True),
    "gptq": Stored(gptq, Integers(4, 64, False), _gptq(Integers(4, 64, False)), head=True),
    "gptq of eight bits by rows": Stored(
        gptq, Integers(8, None, False), _gptq(Integers(8, None, False), desc_act=True), head=True
    ),
    "awq": Stored(awq, Integers(4, 128, True), _AWQ_CONFIG),
    **{
        f"fp8 by {shared}": Stored(
            fp8,
            shared,
            _compressed(
                "float-quantized",
                _FLOAT8 | {"strategy": shared} | ({"block_structure": [128, 128]} if shared == "block" else {}),
            ),
        )
        for shared in ("tensor", "channel", "block")
    },
    "nvfp4": Stored(nvfp4, None, _compressed("nvfp4-pack-quantized", _FLOAT4)),
    "nvfp4 with activations": Stored(
        nvfp4_of_activations, None, _compressed("nvfp4-pack-quantized", _FLOAT4, activations=_FLOAT4 | _LOCAL)
    ),
    "nvfp4 of ModelOpt": Stored(modelopt, False, _MODELOPT | {"quant_algo": "W4A16_NVFP4"}, head=True),
    "nvfp4 of ModelOpt with activations": Stored(modelopt, True, _MODELOPT | {"quant_algo": "NVFP4"}, head=True),
    "mxfp4": Stored(mxfp4, None, _compressed("mxfp4-pack-quantized", _MX)),
    "mxfp4 with activations": Stored(
        mxfp4, None, _compressed("mxfp4-pack-quantized", _MX, activations=_MX | {"symmetric": True, "dynamic": True})
    ),
}
"""By a name."""


def write(source: Path, stored: Stored, packed: Path, unpacked: Path, change: float = 0) -> None:
    """Write a checkpoint in bf16 as it is stored, and the matrices of that in bf16.

    Args:
        source: the folder of the checkpoint.
        packed: a new folder.
        unpacked: a new folder.
        change: added to one element of the last matrix that is unpacked.
    """
    tensors, made, matrices = load_file(source / "model.safetensors"), {}, {}
    for number, (name, tensor) in enumerate(tensors.items()):
        is_quantised = "_proj." in name or (name == "lm_head.weight" and stored.head)
        if not is_quantised:
            made[name] = matrices[name] = tensor
            continue
        parts, matrices[name] = stored.layer(tensor * (1 + number % 3))  # shards with scales of their own
        made |= {name.removesuffix("weight") + part: of_layer for part, of_layer in parts.items()}
    if change:
        last = [name for name in matrices if name.endswith("down_proj.weight")][-1]
        matrices[last][5, 7] += change
    for folder, weights in ((packed, made), (unpacked, matrices)):
        shutil.copytree(source, folder)
        save_file(
            {name: tensor.contiguous() for name, tensor in weights.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
    config = json.loads((packed / "config.json").read_text()) | {"quantization_config": stored.config}
    (packed / "config.json").write_text(json.dumps(config))
