"""RMSNorm: right, and with the same bits for a row whatever other rows there are."""

import pytest
import torch

from tests.assertions import DTYPES, ROW_COUNTS, assert_near, assert_same_bits
from vllm_batch_invariant.ops.norm import reference, rms_norm


def inputs(rows: int, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    x, residual = torch.randn(2, rows, length, generator=generator).to(dtype)
    return x, residual, torch.randn(length, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [64, 100, 1024])
def test_a_row_has_the_same_bits_at_every_batch_size(length: int, dtype: torch.dtype) -> None:
    x, residual, weight = inputs(1000, length, dtype)
    plain = rms_norm(x, weight, 1e-6)
    fused, summed = rms_norm(x, weight, 1e-6, residual)
    for rows in ROW_COUNTS:
        last = slice(1000 - rows, None)
        assert_same_bits(rms_norm(x[last], weight, 1e-6), plain[last], f"{rows} rows")
        fused_part, summed_part = rms_norm(x[last], weight, 1e-6, residual[last])
        assert_same_bits(fused_part, fused[last], f"{rows} rows")
        assert_same_bits(summed_part, summed[last], f"{rows} rows")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [True, False])
def test_values_are_near_the_float64_reference(weighted: bool, dtype: torch.dtype) -> None:
    x, residual, weight = inputs(50, 320, dtype)
    weight = weight if weighted else None
    assert_near(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), factor=2)
    fused, summed = rms_norm(x, weight, 1e-5, residual)
    assert_near(fused, reference.rms_norm(x.double() + residual.double(), weight, 1e-5), factor=2)
    assert_same_bits(summed, (x.float() + residual.float()).to(dtype))


def test_the_mean_can_run_over_the_leading_elements_alone() -> None:
    x, _, weight = inputs(9, 96, torch.float32)
    assert_near(rms_norm(x, weight, 1e-6, variance_size=40), reference.rms_norm(x, weight, 1e-6, 40), factor=2)


def test_a_wider_weight_multiplies_in_its_own_dtype() -> None:
    x, _, weight = inputs(9, 96, torch.bfloat16)
    out = rms_norm(x, weight.float(), 1e-6)
    assert out.dtype == torch.bfloat16
    assert_near(out, reference.rms_norm(x, weight, 1e-6))


def test_per_head_norms_are_norms_of_short_rows() -> None:
    x, _, weight = inputs(40 * 8, 64, torch.float32)
    whole = rms_norm(x.view(40, 8, 64), weight, 1e-6)
    assert_same_bits(rms_norm(x.view(40, 8, 64)[7:8], weight, 1e-6), whole[7:8])


def test_bad_shapes_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"got \[2, 4\], \[3\], None and None"):
        rms_norm(torch.ones(2, 4), torch.ones(3), 1e-6)
    with pytest.raises(ValueError, match="None and 5"):
        rms_norm(torch.ones(2, 4), None, 1e-6, variance_size=5)
