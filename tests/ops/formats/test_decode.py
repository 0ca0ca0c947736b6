"""What a format stands for is the exact product of code and scales, rounded once, for every code, scale and zero."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.formats.cases import DTYPES, PACKED, Stored, decoded, finite, random_stored
from tests.ops.formats.one_rounding import nearest, numbers
from vllm_batch_invariant.ops.formats import (
    FP8,
    FP8_BLOCK,
    INT8,
    MXFP4,
    NVFP4,
    PLAIN,
    Format,
    integers,
    products,
)
from vllm_batch_invariant.ops.formats.eight import EIGHT
from vllm_batch_invariant.ops.formats.layouts import pack

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def assert_same_numbers(found: torch.Tensor, exact: np.ndarray) -> None:
    """Those that are no number apart, whose bits mean nothing."""
    wanted = nearest(exact, found.dtype)
    none = wanted.isnan()
    assert torch.equal(found.isnan(), none)
    assert_same_bits(found.masked_fill(none, 0), wanted.masked_fill(none, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_integer_of_four_bits_by_every_scale_and_zero(dtype: torch.dtype) -> None:
    codes = torch.arange(32) % 16
    scales = finite(dtype, 1)[:, None]
    words = pack(codes, 4).expand(len(scales), -1)
    found = decoded(integers(4, 32), (words, scales), dtype, 32)
    assert_same_numbers(found, (codes.numpy() - 8) * numbers(scales))
    scales = finite(dtype, 7)[:, None].expand(-1, 17)  # 15 less one is 16 where GPTQ has it
    words = pack(codes.repeat(17), 4).expand(len(scales), -1)
    zeros = torch.arange(17, dtype=torch.uint8).expand(len(scales), -1)
    found = decoded(integers(4, 32, zeros=True), (words, scales, zeros), dtype, 32 * 17)
    exact = (codes.numpy() - np.arange(17)[:, None]) * numbers(scales)[..., None]
    assert_same_numbers(found, exact.reshape(len(scales), -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_integer_of_eight_bits_by_every_zero(dtype: torch.dtype) -> None:
    codes, scales = torch.arange(256), finite(dtype, 1021)[:, None]
    words = pack(codes, 8).expand(len(scales), -1)
    found = decoded(integers(8), (words, scales), dtype, 256)
    assert_same_numbers(found, (codes.numpy() - 128) * numbers(scales))
    scales = scales[::4].expand(-1, 512)  # groups of 128: a zero has two
    zeros = torch.arange(256, dtype=torch.uint8).repeat_interleave(2).expand(len(scales), -1)
    words = pack(codes.repeat(256), 8).expand(len(scales), -1)
    found = decoded(integers(8, 128, zeros=True), (words, scales, zeros), dtype, 2**16)
    exact = (codes.numpy() - np.arange(256)[:, None]) * numbers(scales[:, :1])[..., None]
    assert_same_numbers(found, exact.reshape(len(scales), -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", [INT8, FP8], ids=lambda one: one.name)
def test_every_code_of_eight_bits_by_scales_in_fp32(format: Format, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(format.storage[0])
    shows = torch.tensor([float.fromhex("0x1.522e8cp+52")])  # a second rounding shows
    scales = torch.cat([finite(torch.float32, 8), shows])[:, None]
    stored = codes.expand(len(scales), -1), scales
    found = decoded(format, stored, dtype, 256)
    exact = numbers(codes) * numbers(scales)
    assert_same_numbers(found, exact)
    if dtype == torch.bfloat16:
        twice = (codes.float() * scales).to(dtype)
        assert not torch.equal(twice.nan_to_num(), found.nan_to_num()), "numbers that show a second rounding"


def test_blocks_end_where_the_matrix_does() -> None:
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 120, (300, 200), dtype=torch.uint8, generator=draw).view(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=draw)
    found = decoded(FP8_BLOCK, (codes, scales), torch.bfloat16, 200)
    each = numbers(scales)[np.arange(300)[:, None] // 128, np.arange(200) // 128]
    assert_same_numbers(found, numbers(codes) * each)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_fp4_code_by_every_scale_and_some_global_scales(dtype: torch.dtype) -> None:
    pairs = torch.arange(0, 16, 2)
    codes = (pairs | pairs + 1 << 4).to(torch.uint8)  # 0 to 15, the first of two in the lower half
    scales = torch.arange(256, dtype=torch.uint8)
    found = decoded(MXFP4, (codes.repeat(512)[None], scales[None]), dtype, 2**13)
    exact = E2M1 * np.ldexp(1.0, np.arange(256) - 127)[:, None].repeat(2, 0)
    exact[-2:] = np.nan
    assert_same_numbers(found, exact.reshape(1, -1))
    of_rows = torch.cat([torch.tensor([0.0, 1.0, 1 / 3, 2.0**-126]), finite(torch.float32, 256)])[:, None]
    stored = (
        codes.repeat(256).expand(len(of_rows), -1),
        scales.view(torch.float8_e4m3fn).expand(len(of_rows), -1),
        of_rows,
    )
    found = decoded(NVFP4, stored, dtype, 4096)
    exact = E2M1 * numbers(stored[1])[..., None] * numbers(of_rows)[..., None]
    assert_same_numbers(found, exact.reshape(len(of_rows), -1))


@pytest.mark.parametrize("format", PACKED, ids=lambda one: one.name)
def test_a_block_of_rows_has_the_bits_of_the_whole(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = random_stored(format, n=300)
    whole = decoded(format, stored, torch.bfloat16, 256)
    monkeypatch.setattr(products, "_BLOCK", 7 * 256)
    assert_same_bits(decoded(format, stored, torch.bfloat16, 256), whole)
    assert format.is_stored_as(stored, torch.bfloat16)
    assert format.is_stored_as(stored, torch.float16) is (None not in format.storage)


def test_rows_of_experts_are_decoded_at_once() -> None:
    for format in (integers(4, 32, zeros=True), MXFP4):
        stored = random_stored(format)
        whole = decoded(format, stored, torch.bfloat16, 256)
        parts = [
            decoded(format, [tensor[rows] for tensor in stored], torch.bfloat16, 256)
            for rows in (slice(8), slice(8, 24))
        ]
        assert_same_bits(torch.cat(parts), whole)


def test_an_order_of_k_says_which_group_an_element_has() -> None:
    for zeros in (False, True):
        format, ordered = integers(4, 32, zeros), integers(4, zeros=zeros, ordered=True)
        stored = random_stored(format)
        order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
        right = decoded(format, stored, torch.bfloat16, 256)[:, order]
        codes = (stored[0][..., None] >> torch.arange(0, 32, 4)).flatten(1)[:, order] & 15
        found = decoded(ordered, (pack(codes, 4), *stored[1:], (order // 32).int()), torch.bfloat16, 256)
        assert_same_bits(found, right)


INT4_ZEROS = integers(4, 32, zeros=True)
FAULTS: dict[str, tuple[Format, Callable[..., Stored]]] = {
    "the zero point of a file less one": (INT4_ZEROS, lambda q, s, z: (q, s, z + 1)),
    "the zero point of another group": (INT4_ZEROS, lambda q, s, z: (q, s, z.roll(1, 1))),
    "the halves of bytes swapped": (
        INT4_ZEROS,
        lambda q, s, z: (((q >> 4) & 0x0F0F0F0F) | ((q & 0x0F0F0F0F) << 4), s, z),
    ),
    "the scale of another group": (INT4_ZEROS, lambda q, s, z: (q, s.roll(1, 1), z)),
    "the scale of another row": (INT4_ZEROS, lambda q, s, z: (q, s.roll(1, 0), z)),
    "scales through fp16": (INT4_ZEROS, lambda q, s, z: (q, (s * 2**-20).half().bfloat16() * 2**20, z)),
    "codes with a sign": (integers(8, 32), lambda q, s: (q ^ 0x80, s)),
    "the scale of another block": (FP8_BLOCK, lambda q, s: (q, s.roll(1, 1))),
    "the scale of another fp4 group": (NVFP4, lambda q, s, g: (q, s.roll(1, 1), g)),
    "the halves of fp4 bytes swapped": (NVFP4, lambda q, s, g: (q >> 4 | q << 4, s, g)),
    "the global scale's reciprocal": (NVFP4, lambda q, s, g: (q, s, 1 / g)),
    "a wrong bias of powers of two": (MXFP4, lambda q, s: (q, s - 1)),
    "the power of two of another group": (MXFP4, lambda q, s: (q, s.roll(1, 1))),
    "K in another order": (integers(4, ordered=True), lambda q, s, i: (q, s, i.flip(0))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_operands_of_a_certificate_show_what_is_read_wrongly(fault: str) -> None:
    format, wrong = FAULTS[fault]
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    stored = format.stored(weight)
    right = decoded(format, stored, torch.bfloat16, 256)
    assert (decoded(format, wrong(*stored), torch.bfloat16, 256) != right).float().mean() > 0.2


@pytest.mark.parametrize("format", PACKED, ids=lambda one: one.name)
def test_sums_of_a_certificate_still_cancel(format: Format) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, order = torch.randn(64, 512, generator=draw).bfloat16(), torch.randperm(512, generator=draw)
    weight[:, order[256:]] = -weight[:, order[:256]]
    weight[5] = 0
    found = decoded(format, format.stored(weight), torch.bfloat16, 512)
    assert torch.equal(found[:, order[256:]], -found[:, order[:256]])
    assert not found[5].any()
    distance = (found - weight).float().norm() / weight.float().norm()
    assert distance < (0.04 if format in EIGHT or format.name.startswith("w8") else 0.35)


@pytest.mark.parametrize("format", [PLAIN, *PACKED], ids=lambda one: one.name)
def test_what_is_no_number_is_named(format: Format) -> None:
    stored = format.stored(torch.randn(16, 256).bfloat16())
    assert format.flaw(stored) == ""
    for place, name in enumerate(format.names):
        bad = [tensor.clone() for tensor in stored]
        if name == "group indices":
            bad[place][3] = bad[1].shape[1]
        elif bad[place].dtype == torch.float8_e4m3fn or (format is MXFP4 and name == "scales"):
            bad[place].view(torch.uint8)[0, 1] = 255
        elif bad[place].dtype.is_floating_point:
            bad[place][0, 0] = torch.nan
        else:  # every code is a number
            continue
        assert format.flaw(bad).startswith(f"{name}: 1 of {bad[place].numel()} are "), name


def test_vllm_decodes_fp4_to_the_same_numbers() -> None:
    """Of a global scale of a power of two, where vLLM rounds nothing before the end."""
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

    codes, scales, of_rows = random_stored(NVFP4)
    of_rows = torch.full_like(of_rows, 2.0**-9)
    theirs = dequantize_to_dtype(codes, scales, of_rows[0], torch.bfloat16, swizzle=False)
    assert_same_bits(decoded(NVFP4, (codes, scales, of_rows), torch.bfloat16, 256), theirs)
