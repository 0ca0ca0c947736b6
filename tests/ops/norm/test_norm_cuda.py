"""RMSNorm on a GPU: memory, and many rows."""

import pytest
import torch

from tests.assertions import DTYPES, assert_same_bits
from tests.ops.linear.cases import draw
from vllm_batch_invariant.ops.norm import rms_norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [64, 100, 128, 256, 1024])
def test_strided_heads_have_the_bits_of_packed_ones_and_copy_nothing(length, dtype):
    wide, weight = draw(300, 12 * length, dtype=dtype), draw(length, dtype=dtype, seed=1)
    for heads in (wide[:, : 8 * length], wide[:, 8 * length : 10 * length]):
        view = heads.unflatten(1, (-1, length))
        packed = view.contiguous()
        expected = rms_norm(packed, weight, 1e-6)
        assert_same_bits(rms_norm(packed.flatten(0, 1), weight, 1e-6).view_as(expected), expected)
        assert_same_bits(rms_norm(packed.transpose(0, 1), weight, 1e-6), expected.transpose(0, 1))
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        out = rms_norm(view, weight, 1e-6)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1 or length % 8
        assert_same_bits(out, expected)
        for rows in (1, 2, 3, 17, 299):
            assert_same_bits(rms_norm(view[300 - rows :], weight, 1e-6), expected[300 - rows :], f"{rows} rows")
        residual = wide.flip(1)[:, : heads.shape[1]].view_as(view)
        packed_pair = rms_norm(packed, weight, 1e-6, residual.contiguous())
        for part, whole in zip(rms_norm(view, weight, 1e-6, residual), packed_pair, strict=True):
            assert_same_bits(part, whole)


@pytest.mark.parametrize("length", [128, 4096])
def test_a_row_has_the_same_bits_alone_and_anywhere_among_16384(length):
    x, weight = draw(16384, length, dtype=torch.bfloat16), draw(length, dtype=torch.bfloat16, seed=1)
    x[5000:5100] = x[7]
    for residual in (None, x.flip(1)):
        outs = rms_norm(x, weight, 1e-6, residual)
        whole = outs if residual is None else outs[0]
        assert (whole[5000:5100] == whole[7]).all()
        for row in (0, 7, 15, 16, 5001, 16383):
            one = slice(row, row + 1)
            outs = rms_norm(x[one], weight, 1e-6, None if residual is None else residual[one])
            assert_same_bits(outs if residual is None else outs[0], whole[one], f"row {row}")


def test_more_rows_than_a_grid_axis_of_65535_have_their_bits():
    x = draw(70_001, 40)
    assert_same_bits(rms_norm(x, None, 1e-6)[-9:], rms_norm(x[-9:], None, 1e-6))
