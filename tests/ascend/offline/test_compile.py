"""Every kernel compiles for an Ascend NPU, up to the last step before its binary, and has the shape that was meant."""

import pytest
import torch

from tests.ascend.offline.cases import COLUMNS, LENGTHS, PRODUCT_CASES, ROW_CASES
from tests.ascend.offline.compiler import check_product, check_rows
from vllm_batch_invariant.ascend.ops import reductions


@pytest.fixture(scope="module")
def launched(session_device) -> dict[str, list]:
    """What each case launched. All are lowered before the first is judged, while the compiler works behind."""
    found = {}
    for case in (*PRODUCT_CASES, *ROW_CASES):
        session_device.launches.clear()
        case.call()
        found[case.name] = [launch.variant for launch in session_device.launches]
    return found


@pytest.mark.parametrize("case", ROW_CASES, ids=str)
def test_a_row_kernel_fits_and_stays_on_the_vector_cores(case, launched):
    assert launched[case.name]
    for variant in launched[case.name]:
        assert 'mix_mode = "aiv"' in variant.linalg
        check_rows(variant.hivm.result())


@pytest.mark.parametrize("case", PRODUCT_CASES, ids=str)
def test_a_product_fits_and_is_one_static_step_on_the_cube_cores(case, launched):
    [variant] = launched[case.name]
    check_product(variant.hivm.result(), 128, case.depth, case.columns)


def test_the_cases_have_every_block_and_every_tile(launched):
    blocks, largest_of = reductions._BLOCKS, reductions._LARGEST_BLOCKS
    largest = {
        "_sum_kernel": {largest_of["sum"]},
        "_softmax_kernel": {largest_of["softmax"]},
        "_softmax_backward_kernel": {largest_of["softmax"]},
        "_rms_norm_kernel": {largest_of["norm"], largest_of["norm with residual"]},
    }
    variants = {variant for found in launched.values() for variant in found}
    for kernel, largest_blocks in largest.items():
        compiled = {dict(variant.constants)["BLOCK"] for variant in variants if variant.kernel == kernel}
        assert compiled == {*blocks, *largest_blocks}
    assert {reductions._block(length, "sum") for length in LENGTHS} == {*blocks, 8192}
    assert {reductions.linear(n, 512, torch.bfloat16).block_n for n in (1, 100, 5120, 20_000, 151_936)} == set(COLUMNS)
    assert {variant.kernel for variant in variants} == {*largest, "_gemm_kernel", "_add_bias_kernel"}
