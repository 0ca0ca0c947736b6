"""Checkpoints in quantised formats, of weights that are rounded to the nearest code, and beside one the checkpoint of
exactly the matrices that it stands for: an engine of either has the bits of the other.

Nothing is calibrated. Tensors and config.json are as compressed-tensors, GPTQ, AWQ, ModelOpt and gpt-oss have them and
as vLLM 0.32 and 0.33 read them.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..ops.formats import FP8, FP8_BLOCK, INT8, MXFP4, NVFP4, Format, fp4, integers, layouts

Tensors = Mapping[str, torch.Tensor]

LINEAR = (
    *(f".{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down", "in", "out")),
    *(".in_proj_qkv.weight", ".in_proj_z.weight", ".w1.weight", ".w2.weight", ".w3.weight"),
    *(".q_a_proj.weight", ".kv_a_proj_with_mqa.weight", ".q_b_proj.weight", ".kv_b_proj.weight"),
)
"""The last rows are of layers with states, of LFM2, and of latent attention."""
_LAST = ".kv_a_proj_with_mqa.weight"
"""The last of what vLLM fuses, which may end within a block."""
EXPERTS = ".experts.gate_up_proj", ".experts.down_proj"
"""Of gpt-oss: [E, K, N], where a linear layer has [N, K]."""
_ROUTER = ".mlp.gate.weight"
"""Of a mixture of experts: a linear layer that vLLM's own method quantises where config.json does not say otherwise."""
_GATES = ".in_proj_a.weight", ".in_proj_b.weight"
"""What gates of a delta rule follow from: linear layers that each of vLLM's methods quantises, unless it is told."""
_FEED_FORWARD = ".gate_proj", ".up_proj", ".down_proj", ".w1", ".w2", ".w3"
"""What the names of layers of MLPs and experts end with."""
_E4M3_MOST, _E2M1_MOST = 448.0, 6.0
_BLOCK = 128
_INPUT_SCALE = 1 / 16
"""That static activations are given, which nobody has calibrated: up to 28."""
_CACHE_SCALES = {".k_proj": (".k_scale", 1 / 32), ".v_proj": (".v_scale", 1 / 64)}
"""That a KV cache in FP8 is given so, by the layers that ModelOpt stores them of: up to 14 and 7."""


@dataclass(frozen=True)
class CheckpointFormat:
    """A format of checkpoints."""

    name: str
    config: dict[str, Any]
    """``quantization_config`` of config.json."""
    encode: Callable[[torch.Tensor], dict[str, torch.Tensor]]
    """The tensors of a weight [N, K] in fp32, by the ends of their names."""
    stored: Callable[[Tensors, torch.dtype], tuple[torch.Tensor, ...]]
    """Those tensors as ``format`` has them, for activations of a dtype."""
    format: Format
    """What they stand for."""
    group: int = 1
    """Every K is a whole number of them."""
    rows: int = 1
    """Every N is a whole number of them."""
    of_experts: bool = False
    """Whether gpt-oss's experts are quantised, and not linear layers."""
    has_file: bool = False
    """Whether ``config`` is in a file of its own, as of ModelOpt before 0.31, and not in config.json."""
    beside: "CheckpointFormat | None" = None
    """The format of all layers but those of MLPs and of experts that a router chooses, if it is another one."""

    @property
    def cache_scales(self) -> Mapping[str, tuple[str, float]]:
        """Scales of the KV cache by the ends of the names of layers: their own names and numbers."""
        return _CACHE_SCALES if "kv_cache_scheme" in self.config else {}

    def layer_of(self, name: str) -> str | None:
        """The layer whose weight has that name; None: it is left as it is."""
        if not name.endswith(EXPERTS if self.of_experts else LINEAR):
            return None
        return name if self.of_experts else name.removesuffix(".weight")

    def of(self, layer: str) -> "CheckpointFormat":
        """The format of a layer."""
        is_own = layer.endswith(_FEED_FORWARD) and "shared_expert" not in layer
        return self if self.beside is None or is_own else self.beside

    def check(self, name: str, n: int, k: int) -> None:
        """Refuse a weight [N, K] that cannot be written.

        Raises:
            ValueError: N or K is no whole number of groups.
        """
        for side, size, unit in (("rows", n, self.rows), ("columns", k, self.group)):
            ends_within = side == "rows" and self.format is FP8_BLOCK and name.endswith(_LAST)
            if size % unit and not ends_within:
                raise ValueError(f"{self.name} takes multiples of {unit} {side}, and {name} has {size}")

    def matrix(self, tensors: Tensors, k: int, dtype: torch.dtype) -> torch.Tensor:
        """The matrix [N, K] that a layer's tensors stand for."""
        stored = self.stored(tensors, dtype)
        assert self.format.decode is not None
        return self.format.decode(stored, stored[0].new_empty(len(stored[0]), k, dtype=dtype))


def _nonzero(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 1, scale)


def rounded(
    weight: torch.Tensor, bits: int, group: int | None, zeros: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unsigned codes [N, K] of a weight in fp32, scales [N, G] of ``dtype`` and zero points [N, G].

    Args:
        weight: [N, K]
        bits: of a code.
        group: elements of K with one scale; None: a row has one.
        zeros: whether a group's range is its own, and not as wide below zero as above.
        dtype: of the scales.
    """
    groups = weight.view(len(weight), -1, group or weight.shape[1])
    most, half = 2**bits - 1, 2 ** (bits - 1)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    if zeros:
        scale = _nonzero(((high - low) / most).to(dtype))
        zero = (-low / scale.float()).round().clamp(0, most)
    else:
        scale = _nonzero((torch.maximum(-low, high) / (half - 0.5)).to(dtype))
        zero = torch.full_like(low, half)
    codes = ((groups / scale.float()[..., None]).round() + zero[..., None]).clamp(0, most)
    return codes.view(weight.shape).int(), scale, zero.int()


def _compressed_tensors(
    form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None
) -> dict[str, Any]:
    of_linear = {"symmetric": True, "dynamic": False} | weights
    group = {"targets": ["Linear"], "weights": of_linear, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }


def _pack_quantised(bits: int, group: int | None, zeros: bool) -> CheckpointFormat:
    def encode(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scales, zero = rounded(weight, bits, group, zeros, torch.bfloat16)
        tensors = {
            ".weight_packed": layouts.pack(codes, bits),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor(weight.shape),
        }
        if zeros:
            tensors[".weight_zero_point"] = layouts.pack(zero.t(), bits).t().contiguous()
        return tensors

    def stored(tensors: Tensors, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        scales = tensors[".weight_scale"].to(dtype)
        zero = tensors.get(".weight_zero_point")
        return layouts.from_compressed_tensors(tensors[".weight_packed"], scales, zero, bits=bits)

    spread = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    config = _compressed_tensors("pack-quantized", {"num_bits": bits, "type": "int", "symmetric": not zeros} | spread)
    name = f"w{bits}a16-{'channel' if group is None else f'g{group}'}{'-zp' * zeros}"
    per_word = 32 // bits
    form = integers(bits, group, zeros)
    return CheckpointFormat(name, config, encode, stored, form, form.group, per_word if zeros else 1)


def _gptq(bits: int, group: int | None) -> CheckpointFormat:
    def encode(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scales, zero = rounded(weight, bits, group, False, torch.float16)
        k = weight.shape[1]
        return {
            ".qweight": layouts.pack(codes, bits).t().contiguous(),
            ".scales": scales.t().contiguous(),
            ".qzeros": layouts.pack(zero.t() - 1, bits),
            ".g_idx": torch.arange(k, dtype=torch.int32) // (group or k),
        }

    def stored(tensors: Tensors, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return layouts.from_gptq(tensors[".qweight"], tensors[".scales"].to(dtype), bits=bits)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": False, "sym": True}
    name = f"gptq{'' if bits == 4 else bits}-{'channel' if group is None else f'g{group}'}"
    form = integers(bits, group)
    return CheckpointFormat(name, config | {"lm_head": False}, encode, stored, form, form.group, 32 // bits)


def _awq(group: int) -> CheckpointFormat:
    def encode(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scales, zero = rounded(weight, 4, group, True, torch.float16)
        return {
            ".qweight": layouts.pack(in_order(codes.t()), 4),
            ".scales": scales.t().contiguous(),
            ".qzeros": layouts.pack(in_order(zero.t()), 4),
        }

    def in_order(codes: torch.Tensor) -> torch.Tensor:
        return codes.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)

    def stored(tensors: Tensors, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return layouts.from_awq(tensors[".qweight"], tensors[".scales"].to(dtype), tensors[".qzeros"])

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return CheckpointFormat(f"awq-g{group}", config, encode, stored, integers(4, group, zeros=True), group, 8)


def _eight(
    name: str,
    config: dict[str, Any],
    form: Format,
    strategy: str,
    scale_name: str = ".weight_scale",
    static: bool = False,
    has_file: bool = False,
) -> CheckpointFormat:
    """One code to a byte, with a scale of the tensor, of each row or of each block of 128 x 128. Activations that are
    ``static`` have a given scale. ModelOpt stores scalars, rows of one dimension and blocks of four.
    """
    of_modelopt = config["quant_method"] == "modelopt"
    dtype = form.storage[0]
    assert dtype is not None
    most = 127.0 if dtype == torch.int8 else _E4M3_MOST
    in_blocks = strategy == "block"

    def encode(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if in_blocks:
            n, k = weight.shape
            filled = torch.nn.functional.pad(weight, (0, 0, 0, -n % _BLOCK))
            largest = filled.view(-1, _BLOCK, k // _BLOCK, _BLOCK).abs().amax((1, 3))
            scale = _nonzero(largest / most)
            whole = scale.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)[:n]
        elif strategy == "tensor":
            scale = whole = _nonzero(weight.abs().max()[None] / most)
        else:
            scale = _nonzero((weight.abs().amax(1, keepdim=True) / most).bfloat16())
            whole = scale.float()
        codes = (weight / whole).clamp(-most, most)
        given = {".input_scale": torch.tensor([_INPUT_SCALE])} if static else {}
        if of_modelopt:
            scale = scale.float()[:, None, :, None] if in_blocks else scale.float().squeeze()
            given = {name: one.squeeze() for name, one in given.items()}
        return {".weight": (codes.round() if dtype == torch.int8 else codes).to(dtype), scale_name: scale} | given

    def stored(tensors: Tensors, _: torch.dtype) -> tuple[torch.Tensor, ...]:
        codes, scale = tensors[".weight"], tensors[scale_name].float()
        if strategy == "tensor":
            return codes, layouts.per_row(scale.reshape(1), (len(codes),))
        return codes, scale.flatten(1) if in_blocks else scale.view(-1, 1)

    unit = _BLOCK if in_blocks else 1
    return CheckpointFormat(name, config, encode, stored, form, unit, unit, has_file=has_file)


def _nvfp4(
    name: str, config: dict[str, Any], codes_name: str, global_name: str, inverse: bool, given: str = ""
) -> CheckpointFormat:
    """With ``given`` there is also a scale of activations, by that name, with which they are at most 8."""

    def encode(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        # the largest scale of a group is e4m3's largest number; which of the two is stored is rounded to fp32
        largest = weight.abs().max()
        of_tensor = _nonzero(largest) / (_E4M3_MOST * _E2M1_MOST)
        kept = 1 / of_tensor if inverse else of_tensor
        of_tensor = 1 / kept if inverse else kept
        groups = weight.view(len(weight), -1, NVFP4.group)
        scales = (groups.abs().amax(2) / _E2M1_MOST / of_tensor).to(torch.float8_e4m3fn)
        codes = fp4.codes_of((groups / _nonzero(scales.float() * of_tensor)[..., None]).view(weight.shape))
        made = {codes_name: codes, ".weight_scale": scales, global_name: kept[None] if inverse else kept}
        if given:
            of_activations = torch.tensor(8 / (_E4M3_MOST * _E2M1_MOST))
            made[given] = 1 / of_activations[None] if inverse else of_activations
        return made

    def stored(tensors: Tensors, _: torch.dtype) -> tuple[torch.Tensor, ...]:
        codes, kept = tensors[codes_name], tensors[global_name]
        return codes, tensors[".weight_scale"], layouts.per_row(1 / kept if inverse else kept, (len(codes),))

    return CheckpointFormat(name, config, encode, stored, NVFP4, NVFP4.group)


def _mxfp4(
    name: str, config: dict[str, Any], codes_name: str, scales_name: str, of_experts: bool = False
) -> CheckpointFormat:
    """Of gpt-oss's experts codes lie in blocks, [.., K / 32, 16]."""

    def encode(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        groups = weight.view(len(weight), -1, MXFP4.group)
        # frexp's power is one more than that of the largest element, and 6 is 1.5 times 4
        power = torch.frexp(groups.abs().amax(2))[1] - 1 - 2
        codes = fp4.codes_of((groups * torch.exp2(-power.float())[..., None]).view(weight.shape))
        return {
            codes_name: codes.view(len(weight), -1, MXFP4.group // MXFP4.packing) if of_experts else codes,
            scales_name: (power + fp4.BIAS).clamp(0, 254).to(torch.uint8),
        }

    def stored(tensors: Tensors, _: torch.dtype) -> tuple[torch.Tensor, ...]:
        return tensors[codes_name].flatten(1), tensors[scales_name]

    return CheckpointFormat(name, config, encode, stored, MXFP4, MXFP4.group, of_experts=of_experts)


def _all() -> tuple[CheckpointFormat, ...]:
    groups = 32, 128, None
    fp8 = {"num_bits": 8, "type": "float"}
    of_token = {"symmetric": True, "dynamic": True, "strategy": "token"}
    floats = partial(_compressed_tensors, "float-quantized")
    fp4_group = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    modelopt = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    modelopt_fp8 = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    modelopt_cache = modelopt_fp8 | {"kv_cache_scheme": fp8 | {"dynamic": False}}
    own = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    own_block = own | {"weight_block_size": [_BLOCK, _BLOCK]}
    of_group = {"symmetric": True, "dynamic": True, "strategy": "group", "group_size": _BLOCK}
    block = {"strategy": "block", "block_structure": [_BLOCK, _BLOCK]}
    kept = "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
    gpt_oss = {"quant_method": "mxfp4", "modules_to_not_convert": [*kept]}
    mx_group = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": MXFP4.group}
    int8 = {"num_bits": 8, "type": "int"}
    eight = _eight("w8a8-fp8-modelopt", modelopt_fp8, FP8, "tensor", static=True)
    mixed = modelopt_cache | {"quant_algo": "MIXED_PRECISION"}
    w8a8 = _compressed_tensors("int-quantized", int8 | {"strategy": "channel"}, int8 | of_token)
    return (
        *(_pack_quantised(bits, group, zeros) for bits in (4, 8) for group in groups for zeros in (False, True)),
        *(_gptq(bits, group) for bits in (4, 8) for group in groups),
        *(_awq(group) for group in (32, 128)),
        _eight("w8a16-fp8-tensor", floats(fp8 | {"strategy": "tensor"}), FP8, "tensor"),
        _eight("w8a16-fp8-channel", floats(fp8 | {"strategy": "channel"}), FP8, "channel"),
        _nvfp4(
            "nvfp4",
            _compressed_tensors("nvfp4-pack-quantized", fp4_group),
            ".weight_packed",
            ".weight_global_scale",
            True,
        ),
        _nvfp4(
            "nvfp4-w4a4",
            _compressed_tensors("nvfp4-pack-quantized", fp4_group, fp4_group | {"symmetric": True, "dynamic": "local"}),
            ".weight_packed",
            ".weight_global_scale",
            True,
            ".input_global_scale",
        ),
        _nvfp4("nvfp4-modelopt", modelopt, ".weight", ".weight_scale_2", False),
        _nvfp4(
            "nvfp4-modelopt-w4a4",
            modelopt | {"quant_algo": "NVFP4"},
            ".weight",
            ".weight_scale_2",
            False,
            ".input_scale",
        ),
        _nvfp4(
            "nvfp4-modelopt-kv8",
            modelopt | {"quant_algo": "NVFP4", "kv_cache_scheme": fp8 | {"dynamic": False}},
            ".weight",
            ".weight_scale_2",
            False,
            ".input_scale",
        ),
        replace(
            _nvfp4("mixed-modelopt", mixed, ".weight", ".weight_scale_2", False, ".input_scale"),
            beside=eight,
        ),
        _mxfp4("mxfp4", gpt_oss, "_blocks", "_scales", of_experts=True),
        _mxfp4("mxfp4-dense", _compressed_tensors("mxfp4-pack-quantized", mx_group), ".weight_packed", ".weight_scale"),
        _eight("w8a8-int8", w8a8, INT8, "channel"),
        _eight("w8a8-fp8-block", own_block, FP8_BLOCK, "block", ".weight_scale_inv"),
        _eight("w8a8-fp8-block-ct", floats(fp8 | block, fp8 | of_group), FP8_BLOCK, "block"),
        _eight("w8a8-fp8-channel", floats(fp8 | {"strategy": "channel"}, fp8 | of_token), FP8, "channel"),
        _eight("w8a8-fp8-tensor", own, FP8, "tensor"),
        _eight("w8a8-fp8-tensor-static", own | {"activation_scheme": "static"}, FP8, "tensor", static=True),
        eight,
        _eight("w8a8-fp8-modelopt-kv8", modelopt_cache, FP8, "tensor", static=True),
        _eight("w8a8-fp8-modelopt-file", modelopt_cache, FP8, "tensor", static=True, has_file=True),
        _eight("w8a8-fp8-channel-modelopt", modelopt_fp8 | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, FP8, "channel"),
        _eight("w8a8-fp8-block-modelopt", modelopt_fp8 | {"quant_algo": "FP8_PB_WO"}, FP8_BLOCK, "block"),
    )


CHECKPOINT_FORMATS = {form.name: form for form in _all()}
"""By name. Of those whose names begin with w8a8 activations are quantised too, and of those that end with w4a4 where a
device has products of FP4.
"""


def quantised(weights: Tensors, form: CheckpointFormat) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of a checkpoint in a format, and those of the checkpoint that it stands for.

    Args:
        weights: of 16 or 32 bits, by name.
        form: of its linear layers, or of gpt-oss's experts.

    Raises:
        ValueError: a side of a weight is no whole number of groups, or there is none to quantise.
    """
    packed, plain = {}, {}
    for name, weight in weights.items():
        layer = form.layer_of(name)
        if layer is None:
            packed[name] = plain[name] = weight
            continue
        rows, of_layer = weight.transpose(-1, -2) if form.of_experts else weight, form.of(layer)
        of_layer.check(name, *rows.shape[-2:])
        k = rows.shape[-1]
        tensors = of_layer.encode(rows.reshape(-1, k).float())
        matrix = of_layer.matrix(tensors, k, weight.dtype).view(rows.shape)
        plain[name] = matrix.transpose(-1, -2).contiguous() if form.of_experts else matrix
        for end, tensor in tensors.items():
            packed[layer + end] = tensor.unflatten(0, rows.shape[:-1]) if form.of_experts else tensor
        for of_cache, (end, number) in form.cache_scales.items():
            if layer.endswith(of_cache):
                packed[layer + end] = torch.tensor(number)
    if packed.keys() == weights.keys():
        kind = "experts of gpt-oss" if form.of_experts else "linear layers"
        raise ValueError(f"{form.name} is a format of {kind}, of which the checkpoint has none")
    return packed, plain


def quantization_config(form: CheckpointFormat, names: Iterable[str]) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint with tensors of such names: vLLM is told of layers that keep 16 bits."""
    weights = [*names]
    if form.beside is not None:
        layers = [layer for name in weights if name.endswith(".weight") and (layer := form.layer_of(name))]
        form = replace(form, config=form.config | {"quantized_layers": {one: _recipe(form.of(one)) for one in layers}})
    names = [name.removesuffix(".weight") for name in weights if name.endswith((_ROUTER, *_GATES))]
    gates = [name for name in names if f"{name}.weight".endswith(_GATES)]
    match form.config["quant_method"]:
        case "fp8" if names:
            return form.config | {"modules_to_not_convert": ["lm_head", *names]}
        case "compressed-tensors" if gates:
            return form.config | {"ignore": [*form.config["ignore"], *gates]}
        case "modelopt" if names:
            return form.config | {"ignore": [*form.config["ignore"], *names]}
        case "awq" if gates:
            return form.config | {"modules_to_not_convert": gates}
        case "gptq" if gates:  # by the name of the layer that vLLM fuses of both
            return form.config | {"dynamic": {r"-:.*\.in_proj_ba$": {}}}
    return form.config


def _recipe(form: CheckpointFormat) -> dict[str, Any]:
    """What ModelOpt says of a layer in one of its formats, beside layers in others."""
    algorithm = "FP8" if form.format is FP8 else "NVFP4"
    return {"quant_algo": algorithm} | ({"group_size": NVFP4.group} if form.format is NVFP4 else {})


def quantise(folder: Path, name: str, unpacked: Path | None = None) -> None:
    """Turn a checkpoint, a folder with one file of weights, into one in a format.

    Args:
        folder: changed in place.
        name: of :data:`CHECKPOINT_FORMATS`.
        unpacked: where to write the checkpoint of the matrices that it then stands for; None: nowhere.

    Raises:
        ValueError: see :func:`quantised`.
        OSError, safetensors.SafetensorError: a folder cannot be read or written.
    """
    from safetensors.torch import load_file, save_file

    form = CHECKPOINT_FORMATS[name]
    weights, config = folder / "model.safetensors", folder / "config.json"
    packed, plain = quantised(load_file(weights), form)
    if unpacked is not None:
        shutil.copytree(folder, unpacked, dirs_exist_ok=True, ignore=shutil.ignore_patterns(weights.name))
        save_file(plain, str(unpacked / weights.name), metadata={"format": "pt"})
    # not over the file, of which the tensors that are left as they were are views
    save_file(packed, str(folder / "packed.safetensors"), metadata={"format": "pt"})
    (folder / "packed.safetensors").replace(weights)
    said = quantization_config(form, packed)
    if form.has_file:
        file = folder / "hf_quant_config.json"
        file.write_text(json.dumps(_of_file(said), indent=1) + "\n")
        return
    whole = json.loads(config.read_text()) | {"quantization_config": said}
    config.write_text(json.dumps(whole, indent=1) + "\n")


def _of_file(config: Mapping[str, Any]) -> dict[str, Any]:
    """ModelOpt's ``quantization_config`` as it is in a file of its own."""
    of = {
        "quant_algo": config["quant_algo"],
        "kv_cache_quant_algo": "FP8" if "kv_cache_scheme" in config else None,
        "exclude_modules": config["ignore"],
    }
    return {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": of}
