"""RMSNorm: a row has the same bits alone and in any batch, plain and with a residual, by every name."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.ascend.hardware.sweep import ROWS, assert_rows_keep_their_bits, draw
from tests.assertions import DTYPES, assert_same_bits
from vllm_batch_invariant import batch_invariant_mode
from vllm_batch_invariant.ops.norm import rms_norm

LENGTHS = (64, 100, 896, 4096, 9001)


def operands(length: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """x and residual [ROWS, length], weight [length]."""
    x, residual = (draw(ROWS, length, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    return x, residual, draw(length, dtype=dtype, device=device, seed=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_row_has_the_same_bits_in_any_batch(length, dtype, device):
    x, _, weight = operands(length, dtype, device)
    assert_rows_keep_their_bits(lambda rows: rms_norm(rows, weight, 1e-6), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_row_has_the_same_bits_in_any_batch_with_a_residual(length, dtype, device):
    x, residual, weight = operands(length, dtype, device)
    assert_rows_keep_their_bits(lambda rows, added: rms_norm(rows, weight, 1e-6, added), x, residual)


@pytest.mark.parametrize("length", [100, 896])
def test_a_row_has_the_same_bits_in_any_batch_without_weight_with_a_wider_one_and_by_part_of_the_row(length, device):
    x, _, weight = operands(length, torch.bfloat16, device)
    assert_rows_keep_their_bits(lambda rows: rms_norm(rows, None, 1e-6), x)
    assert_rows_keep_their_bits(lambda rows: rms_norm(rows, weight.float(), 1e-6), x)
    assert_rows_keep_their_bits(lambda rows: rms_norm(rows, weight, 1e-6, variance_size=40), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_a_row_are_rows(dtype, device):
    x, weight = draw(130, 8, 96, dtype=dtype, device=device), draw(96, dtype=dtype, device=device, seed=1)
    assert_rows_keep_their_bits(lambda rows: rms_norm(rows, weight, 1e-6), x)
    assert_same_bits(rms_norm(x[:, 2:5], weight, 1e-6), rms_norm(x, weight, 1e-6)[:, 2:5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_of_pytorch_keeps_the_bits_of_a_row_in_the_mode(dtype, device):
    x, _, weight = operands(896, dtype, device)
    with batch_invariant_mode(), torch.no_grad():
        assert_rows_keep_their_bits(lambda rows: F.rms_norm(rows, (896,), weight, 1e-6), x)


def test_more_rows_than_a_grid_of_65535(device):
    x = draw(70_001, 40, device=device)
    assert_same_bits(rms_norm(x, None, 1e-6)[-9:], rms_norm(x[-9:], None, 1e-6))


@pytest.mark.npu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norms_of_torch_npu_have_the_bits_of_ours_in_the_mode(dtype, npu):
    x, residual, weight = operands(896, dtype, npu)
    fused, summed = rms_norm(x, weight, 1e-6, residual)
    with batch_invariant_mode(), torch.no_grad():
        assert_same_bits(torch.ops.npu.npu_rms_norm(x, weight, 1e-6)[0], rms_norm(x, weight, 1e-6))
        out, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, 1e-6)
        assert_same_bits(out, fused)
        assert_same_bits(total, summed)
        assert_rows_keep_their_bits(partial(torch.ops.npu.npu_add_rms_norm, gamma=weight, epsilon=1e-6), x, residual)
