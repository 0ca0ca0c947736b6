"""Every kernel compiles for an Ascend NPU, up to the last step before its binary, and has the shape that was meant."""

import pytest
import torch

from tests.npu.offline.cases import COLUMNS, LENGTHS, PRODUCT_CASES, ROW_CASES
from tests.npu.offline.compiler import check_product, check_rows
from vllm_batch_invariant.ops.common import npu_rows
from vllm_batch_invariant.ops.linear import npu as linear
from vllm_batch_invariant.ops.norm import npu as norm
from vllm_batch_invariant.ops.reduce import npu as reduce
from vllm_batch_invariant.ops.softmax import npu as softmax


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
    largest = {
        "_sum_kernel": {reduce.LARGEST_BLOCK},
        "_softmax_kernel": {softmax.LARGEST_BLOCK},
        "_softmax_backward_kernel": {softmax.LARGEST_BLOCK},
        "_rms_norm_kernel": {norm.LARGEST_BLOCK, norm.LARGEST_BLOCK_WITH_RESIDUAL},
    }
    variants = {variant for found in launched.values() for variant in found}
    for kernel, blocks in largest.items():
        compiled = {dict(variant.constants)["block"] for variant in variants if variant.kernel == kernel}
        assert compiled == {*npu_rows._BLOCKS, *blocks}
    assert {npu_rows.layout_for(length, 8192).block for length in LENGTHS} == {*npu_rows._BLOCKS, 8192}
    assert {linear._reduction(n, 512, torch.bfloat16).block_n for n in (1, 100, 5120, 20_000, 151_936)} == set(COLUMNS)
    assert {variant.kernel for variant in variants} == {*largest, "_gemm_kernel", "_add_bias_kernel"}
