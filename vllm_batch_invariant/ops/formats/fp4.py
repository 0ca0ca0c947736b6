"""FP4 numbers (e2m1), two to a byte: NVFP4 and MXFP4 (OCP Microscaling Formats 1.0).

NVFP4, ``code * scale * global``: bytes [N, K / 2], the first code in the lower half; scales e4m3 [N, K / 16]; global
scales fp32 [N, 1], those of each shard of a fused layer its own. A checkpoint of compressed-tensors has the global
scale's reciprocal. Kernels for experts read it by steps: of each group the products of both scales with 1 and with 1.5,
[N, K / 8] of the activations' dtype; every element is a power of two times one of them, exactly. MXFP4,
``code * 2^(scale - 127)``: bytes [N, K / 2], scales uint8 [N, K / 32].
"""

from collections.abc import Callable, Sequence

import torch

from .products import alternate, blocks, step, write_product
from .record import CODES, GLOBAL, SCALES, Format

NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0 to 7; those of 8 to 15 are their negatives."""
BIAS = 127
"""Of e8m0: the code of a scale of 1."""
_ODD_SCALE = 22
"""Of NVFP4 in certificates: no power of two, and e4m3 as its half is."""


def numbers_of(codes: torch.Tensor) -> torch.Tensor:
    """fp32 [..., K] of bytes [..., K / 2]."""
    table = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)], device=codes.device)
    return torch.stack([table[(codes & 15).int()], table[(codes >> 4).int()]], -1).flatten(-2)


def codes_of(numbers: torch.Tensor) -> torch.Tensor:
    """Bytes [..., K / 2] of the nearest codes of numbers [..., K]; ties go to the even code, and what is larger than 6
    is 6.
    """
    table = torch.tensor(NUMBERS, device=numbers.device)
    between = (table[1:] + table[:-1]) / 2
    size = numbers.float().abs().contiguous()
    nearest = torch.bucketize(size, between)  # the lower of two at a tie
    at_tie = (nearest < len(between)) & (size == between[nearest.clamp(max=len(between) - 1)])
    nearest += at_tie & (nearest % 2 == 1)
    codes = (nearest + 8 * numbers.signbit()).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def decode_nvfp4(stored: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """The definition; ``out`` is [N, K] of any floating-point dtype, packed."""
    codes, scales, of_rows = stored
    for rows in blocks(out):
        block = out[rows]
        groups = (len(block), scales.shape[1], -1)
        exact = numbers_of(codes[rows]).view(groups) * scales[rows].float()[..., None]  # six bits
        write_product(exact, of_rows[rows, :, None], block.view(groups))
    return out


def by_steps(stored: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What :data:`NVFP4_STEPS` stores, of what :data:`NVFP4` does: the same matrix of ``dtype``."""
    codes, scales, of_rows = stored
    steps = torch.empty(*scales.shape, 2, dtype=dtype, device=codes.device)
    for number, step_of in enumerate((1.0, 1.5)):
        made = torch.empty(scales.shape, dtype=dtype, device=codes.device)
        write_product(scales.float() * step_of, of_rows, made)  # six bits
        steps[..., number] = made
    return codes, steps.flatten(-2)


def decode_steps(stored: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """The definition; ``out`` is [N, K] of bf16 or fp32, packed."""
    codes, steps = stored
    for rows in blocks(out):
        block = out[rows]
        numbers = numbers_of(codes[rows]).view(len(block), steps.shape[1] // 2, -1)
        one, three_halves = steps[rows].float().unflatten(1, (-1, 2)).unbind(-1)
        has_three = torch.frexp(numbers)[0].abs() == 0.75
        made = torch.where(has_three, numbers / 1.5 * three_halves[..., None], numbers * one[..., None])
        block.view(numbers.shape).copy_(made)
    return out


def decode_steps_on_gpu(stored: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """The same bits by a kernel, where there is one."""
    from .triton_decode import PackedTile
    from .triton_kernels import decode_tiles

    form = PackedTile.of(NVFP4_STEPS, out.dtype)
    return decode_steps(stored, out) if form is None else decode_tiles(stored, out, form)


def decode_mxfp4(stored: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """The definition; ``out`` is [N, K] of any floating-point dtype, packed."""
    codes, scales = stored
    for rows in blocks(out):
        block = out[rows]
        groups = (len(block), scales.shape[1], -1)
        powers = scales[rows].contiguous().view(torch.float8_e8m0fnu).bfloat16()  # all of them are bf16
        write_product(numbers_of(codes[rows]).view(groups), powers[..., None], block.view(groups))
    return out


def decode_mxfp4_on_gpu(stored: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """The same bits by a kernel, where there is one."""
    from .triton_decode import PackedTile
    from .triton_kernels import decode_tiles

    form = PackedTile.of(MXFP4, out.dtype)
    return decode_mxfp4(stored, out) if form is None else decode_tiles(stored, out, form)


def _certified(
    weight: torch.Tensor, group: int, unit: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of a weight [N, K] for a certificate, where every other row has groups of two scales; what the scale of a
    group is divided by; and of each row ``unit`` of the scale with which its largest element has the largest code.
    """
    factor = alternate(len(weight), weight.shape[1] // group, weight.device)
    largest = 6 / factor.amax(1, keepdim=True)
    scale = unit(step(weight, largest, torch.float32))
    near = numbers_of(codes_of((weight.float() / scale).clamp(-largest, largest)))
    return codes_of(near * factor.repeat_interleave(group, 1)), factor, scale


def encode_nvfp4(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A weight [N, K] for a certificate."""
    codes, factor, scale = _certified(weight, 16, lambda scale: scale)
    return codes, (_ODD_SCALE / factor).to(torch.float8_e4m3fn), scale / _ODD_SCALE


def encode_steps(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A weight [N, K] for a certificate."""
    return by_steps(encode_nvfp4(weight), weight.dtype)


def encode_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A weight [N, K] for a certificate."""
    codes, factor, scale = _certified(weight, 32, lambda scale: torch.exp2(torch.frexp(scale)[1].float()))
    return codes, (torch.frexp(scale / factor)[1] - 1 + BIAS).to(torch.uint8)


NVFP4 = Format(
    "nvfp4",
    (torch.uint8, torch.float8_e4m3fn, torch.float32),
    (CODES, SCALES, GLOBAL),
    packing=2,
    group=16,
    exponents=16,
    encode=encode_nvfp4,
    decode=decode_nvfp4,
)
NVFP4_STEPS = Format(
    "nvfp4-steps",
    (torch.uint8, None),
    (CODES, SCALES),
    packing=2,
    group=16,
    exponents=16,
    encode=encode_steps,
    decode=decode_steps,
    decode_on_gpu=decode_steps_on_gpu,
)
"""Of no checkpoint, but what kernels for experts read of NVFP4."""
GLOBALS_BY_STEPS = 2.0**-110, 2.0**110
"""Between which sizes global scales that are not 0 lie: with others a step may be rounded where an element is not."""
MXFP4 = Format(
    "mxfp4",
    (torch.uint8, torch.uint8),
    (CODES, SCALES),
    packing=2,
    group=32,
    exponents=16,
    encode=encode_mxfp4,
    decode=decode_mxfp4,
    decode_on_gpu=decode_mxfp4_on_gpu,
)
