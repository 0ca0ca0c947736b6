"""Codes of rows: those that are written out, for each row by itself, on every device."""

import pytest
import torch

from tests.assertions import DTYPES, assert_same_bits
from tests.ops.quantise.written_out import LEAST, codes_of
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.quantise import QuantiseReduction, quantise, reference

STATIC = torch.tensor([0.0173])


def assert_same(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one.cpu(), other)


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


def test_what_has_no_codes_is_refused(device):
    x = device.draw(2, 8)
    with pytest.raises(NotCovered, match=r"rows of torch.float64 as int8"):
        quantise(x.double())
    for scale in (torch.ones(2), torch.ones(1, dtype=torch.float64)):
        with pytest.raises(ValueError, match="a static scale is one fp32 number"):
            quantise(x, scale.to(device.type))


def test_a_row_of_the_least_size_has_normal_numbers():
    least = QuantiseReduction.of_dtype(torch.float32).least
    assert least == LEAST
    assert least / 127 >= 2.0**-126
    assert 127 / least < 2.0**126
