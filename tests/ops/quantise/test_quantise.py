"""Codes of rows: those that are written out, for each row by itself, on every device."""

from functools import partial

import numpy as np
import pytest
import torch

from tests.assertions import DTYPES, assert_same_bits
from tests.ops.quantise.written_out import LEAST, LEAST_E4M3, codes_of, e4m3_of, fp32
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.quantise import E4M3, QuantiseReduction, quantise, reference

STATIC = torch.tensor([0.0173])


def assert_same(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert_same_bits(*(each.cpu().view(torch.uint8) if each.dtype == E4M3 else each.cpu() for each in (one, other)))


def rows(device, dtype: torch.dtype, length: int) -> torch.Tensor:
    """Of many sizes; an outlier; ties between two codes; zeros; tiny numbers; an infinity and a NaN."""
    x = device.draw(16, length, dtype=torch.float32)
    x[:6] *= 10.0 ** torch.arange(-3, 3, device=x.device)[:, None]
    x[6, length // 2] = 1e4
    x[7] = torch.arange(length, device=x.device) % 127 + 0.5
    x[7, 0] = 127
    x[8], x[9], x[10] = 0, 1e-39, x[10].sign() * 2.0**-120
    x[11] = 2.0**-119
    x[12, -1], x[13, 0], x[14, length // 2] = torch.inf, -torch.inf, torch.nan
    return x.to(dtype)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 31, 600])
def test_codes_and_scales_are_those_that_are_written_out(length, dtype, static, device):
    x, scale = rows(device, dtype, length), STATIC if static else None
    found = quantise(x, None if scale is None else scale.to(device.type))
    assert_same(found, codes_of(x, scale))
    assert found[1][12:15].isnan().all()
    assert static or not found[0][8:11].any()
    assert static or dtype == torch.float16 or found[0][11, 0] == 127


@pytest.mark.parametrize("static", [False, True])
def test_codes_are_near_those_of_float64(static, device):
    x, scale = device.draw(20, 300), STATIC.to(device.type) if static else None
    codes, scales = quantise(x, scale)
    near, near_scales = reference.quantise(x, scale)
    assert (codes - near).abs().max() <= 1
    assert (codes != near).double().mean() < 1e-3
    assert ((scales - near_scales).abs() <= 2**-23 * near_scales).all()
    error = (codes.double() * scales.double()[:, None] - x.double()).abs().amax(-1)
    assert (error <= 0.50001 * scales.double()).all() or static


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [77, 512])
def test_a_row_has_the_same_codes_at_every_batch_size_and_beside_an_outlier(length, dtype, device):
    most = device.row_counts[-1]
    x = device.draw(most, length, dtype=dtype)
    whole = quantise(x)
    for count in device.row_counts:
        found = quantise(x[most - count :])
        assert_same_bits(found[0], whole[0][most - count :])
        assert_same_bits(found[1], whole[1][most - count :])
    x[0, 3] = 1e4
    beside = quantise(x)
    assert_same_bits(beside[0][1:], whole[0][1:])
    scale_of_all = x.abs().max().float().reshape(1) / 127  # a scale of a whole tensor moves the others' codes
    assert not torch.equal(quantise(x, scale_of_all)[0][1:], whole[0][1:])


def test_the_inverse_of_the_scale_is_not_a_division_by_the_scale(device):
    """Codes show which of the two is computed, in bf16, where many numbers lie between two codes."""
    x = device.draw(100, 600, dtype=torch.bfloat16)
    codes, scales = quantise(x)
    divided = (x.float() / scales[:, None]).round().clamp(-127, 127).to(torch.int8)
    assert 0 < (codes != divided).sum().item() < 1e-3 * codes.numel()


def test_any_dimensions_strides_and_threads_give_the_same_codes(device, threads):
    x = device.draw(4, 60, 70)
    whole = quantise(x)
    assert whole[0].shape == x.shape
    assert whole[1].shape == (4, 60)
    for view, part in ((x[:, 3], (slice(None), 3)), (x[1:, ::7], (slice(1, None), slice(None, None, 7)))):
        assert_same(quantise(view), (whole[0][part].cpu(), whole[1][part].cpu()))
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    threads(1)
    assert_same(quantise(turned), tuple(one.cpu() for one in whole))
    assert [list(one.shape) for one in quantise(x[:0])] == [[0, 60, 70], [0, 60]]


def test_codes_at_the_bounds_are_saturated(device):
    x = torch.tensor([[-1e30, -128.5, -127.5, 126.5, 127.5, 1e30]]).to(device.type)
    assert quantise(x, torch.ones(1).to(device.type))[0].tolist() == [[-128, -128, -128, 126, 127, 127]]
    assert quantise(x[:, 1:5] * 2)[0].tolist() == [[-127, -126, 125, 126]]


@pytest.mark.parametrize("codes", [torch.int8, E4M3])
def test_of_several_given_scales_the_largest_counts(device, codes: torch.dtype) -> None:
    x = device.draw(5, 40)
    scales = torch.tensor([0.01, 0.02, 0.005], device=device.type)
    found, expected, other = (quantise(x, scale, codes=codes) for scale in (scales, scales[1:2], scales[:1]))
    assert_same_bits(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert_same_bits(found[1], expected[1])
    assert not torch.equal(found[0].view(torch.uint8), other[0].view(torch.uint8))


def test_what_has_no_codes_is_refused(device):
    x = device.draw(2, 8)
    with pytest.raises(NotCovered, match=r"rows of torch.float64 as int8"):
        quantise(x.double())
    for scale in (torch.ones(0), torch.ones(1, dtype=torch.float64)):
        with pytest.raises(ValueError, match="a static scale is the largest of fp32 numbers"):
            quantise(x, scale.to(device.type))


def test_a_row_of_the_least_size_has_normal_numbers():
    least = QuantiseReduction.of_dtype(torch.float32).least
    assert least == LEAST
    assert least / 127 >= 2.0**-126
    assert 127 / least < 2.0**126


@pytest.mark.parametrize(("static", "group"), [(False, 128), (False, None), (True, None)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 130, 1300])
def test_codes_of_e4m3_are_those_that_are_written_out(length, dtype, static, group, device):
    x, scale = rows(device, dtype, length), STATIC if static else None
    found = quantise(x, None if scale is None else scale.to(device.type), codes=E4M3, group=group)
    assert_same(found, e4m3_of(x, scale, group))
    if not static and not group:
        near, scales = reference.quantise(x[:12], codes=E4M3)
        assert (found[0][:12].double() != near).double().mean() < 1e-3
        assert ((found[1][:12] - scales).abs() <= 2**-23 * scales).all()


def test_every_bf16_number_has_the_code_that_pytorch_gives_it_if_saturated(device):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()].float()
    values = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    ties = (values[1:] + values[:-1]) / 2
    x = torch.cat([x, ties, -ties, *(ties.nextafter(torch.tensor(to)) for to in (0.0, 999.0)), torch.tensor([464.0])])
    codes, _ = quantise(x[None].to(device.type), torch.ones(1).to(device.type), codes=E4M3)
    assert_same((codes,), (x.clamp(-448, 448).to(E4M3)[None],))


@pytest.mark.parametrize("length", [77, 300])
def test_a_group_has_the_same_codes_at_every_batch_size_and_beside_an_outlier(length, device):
    x = device.draw(device.row_counts[-1], length)
    whole = quantise(x, codes=E4M3, group=128)
    for count in device.row_counts:
        assert_same(quantise(x[-count:], codes=E4M3, group=128), tuple(one[-count:].cpu() for one in whole))
    x[0, length - 1] = torch.nan
    beside = quantise(x, codes=E4M3, group=128)
    first = (length - 1) // 128 * 128
    assert beside[1][0].isnan().tolist() == [False] * (first // 128) + [True]
    assert not beside[0][0, first:].view(torch.uint8).any()
    assert_same((beside[0][1:], beside[0][:1, :first]), (whole[0][1:].cpu(), whole[0][:1, :first].cpu()))


@pytest.mark.parametrize(
    "mistake",
    [
        {"divide": lambda x, step: fp32(x * fp32(1 / step))},
        {"divide": lambda x, step: fp32(x / step) * (1 - 2**-20)},
        {"divide": lambda x, step: np.clip(fp32(x / step), -240, 240)},
        {"divide": lambda x, step: np.roll(fp32(x / step), 1)},
        {"step_of": lambda top: 2.0 ** np.ceil(np.log2(top / 448))},
        {"step_of": lambda top: np.full_like(top, fp32(top.max() / 448))},
        {"group": 64},
        {"group": None},
    ],
    ids=["inverse", "towards zero", "saturation", "order", "power of two", "scale of the batch", "64", "row"],
)
def test_each_other_formula_gives_other_codes(mistake):
    x = torch.randn(100, 600, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    found, expected = quantise(x, codes=E4M3, group=128), partial(e4m3_of, x)
    assert_same(found, expected(group=128))
    assert not torch.equal(found[0].float(), expected(**{"group": 128} | mistake)[0].float())


def test_what_has_no_codes_of_e4m3_is_refused(device):
    x = device.draw(2, 8)
    for arguments, words in (
        ({"codes": E4M3, "group": 64}, "rows in groups of 64 as e4m3: a scale is that of a row or 128"),
        ({"group": 128}, "rows in groups of 128 as int8"),
        ({"codes": torch.float8_e5m2}, "codes of torch.float8_e5m2"),
    ):
        with pytest.raises(NotCovered, match=words):
            quantise(x, **arguments)
    with pytest.raises(NotCovered, match=r"rows of torch.float64 as e4m3"):
        quantise(x.double(), codes=E4M3)
    with pytest.raises(ValueError, match="a static scale is one of all groups"):
        quantise(x, torch.ones(1).to(device.type), codes=E4M3, group=128)
    least = QuantiseReduction.of_dtype(torch.float32, E4M3).least
    assert least == LEAST_E4M3
    assert least / 448 >= 2.0**-126
    assert [list(one.shape) for one in quantise(x[:, :0], codes=E4M3, group=128)] == [[2, 0], [2, 0]]
