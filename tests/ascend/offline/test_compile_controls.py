"""The checks of compiled kernels fail for kernels that they should fail for."""

from dataclasses import replace

import pytest
import torch

from tests.ascend.offline.compiler import check_product, check_rows
from tests.ascend.offline.controls import biased_kernel, masked_rows_kernel, strided_kernel
from vllm_batch_invariant.ascend.ops import reduce, reductions, softmax
from vllm_batch_invariant.ops.common.row_reduction import RowReduction

M, N, K = 200, 4096, 1024
A, B, OUT = (torch.empty(size, dtype=torch.bfloat16) for size in ((256, K), (K, N), (256, N)))
TILE = {"tile_m": 128, "tile_n": 128, "tile_k": 128}


@pytest.fixture
def hivm(device):
    """The compiled form of the only kernel that was launched."""

    def of_the_only_one():
        [variant] = device.variants()
        return variant.hivm.result()

    return of_the_only_one


def test_rows_cut_at_m_make_steps_of_unknown_size(hivm):
    masked_rows_kernel[(1,)](A, B, OUT, M, n=N, k=K, **TILE)
    with pytest.raises(AssertionError, match=r"steps of \[\(None, 128, 128\)\]"):
        check_product(hivm(), 128, 128, 128)


def test_strides_known_at_run_time_mix_cube_and_vector_cores(hivm):
    strided_kernel[(1,)](A, B, OUT, M, N, K, K, 3, **TILE)
    with pytest.raises(AssertionError, match=r"runs on MIX, with [1-9]"):
        check_product(hivm(), 128, 128, 128)


def test_a_bias_in_the_product_mixes_cube_and_vector_cores(hivm):
    biased_kernel[(1,)](A, B, B, OUT, 2, n=N, k=K, **TILE)
    with pytest.raises(AssertionError, match=r"runs on MIX, with [1-9]"):
        check_product(hivm(), 128, 128, 128)


def test_a_tile_that_is_too_large_overflows(hivm):
    biased_kernel[(1,)](A, B, B, OUT, 1, n=N, k=K, tile_m=256, tile_n=256, tile_k=64)
    with pytest.raises(AssertionError, match="overflow"):
        check_product(hivm(), 256, 64, 256)


def double_block(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """Have a launcher find a reduction with twice the block."""
    usual = getattr(reductions, operation)

    def doubled(*args: object) -> RowReduction:
        reduction = usual(*args)
        return replace(reduction, block=2 * reduction.block)

    monkeypatch.setattr(reductions, operation, doubled)


def test_a_block_that_is_too_large_for_a_softmax_overflows(hivm, monkeypatch):
    double_block(monkeypatch, "softmax")
    softmax.softmax(torch.empty(2, 20_000), -1)
    with pytest.raises(AssertionError, match="ub overflow"):
        check_rows(hivm())


def test_a_block_that_leaves_no_room_for_the_next_one_is_seen(hivm, monkeypatch):
    double_block(monkeypatch, "reduce")
    reduce.sum(torch.empty(2, 20_000), -1)
    with pytest.raises(AssertionError, match="only after a retry"):
        check_rows(hivm())
