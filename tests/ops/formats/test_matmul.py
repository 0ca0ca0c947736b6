"""A matmul with a weight in any format has the bits of a matmul with the matrix that it stands for."""

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.fakes.cublaslt import sequential_k
from tests.ops.formats.cases import PACKED
from vllm_batch_invariant.ops.common.cancelling import cancelling
from vllm_batch_invariant.ops.formats import PLAIN, Format
from vllm_batch_invariant.ops.linear import MatmulSpec, matmul
from vllm_batch_invariant.ops.linear.spec import SPECS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("spec", [one for one in SPECS if one.b_format is not PLAIN], ids=str)
def test_its_bits_are_those_of_the_matrix(spec: MatmulSpec, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=draw).to(dtype) for shape in ((9, 256), (48, 256), (48,)))
    codes, *scales = spec.b_format.stored(weight)
    matrix = spec.b_format.decode((codes, *scales), torch.empty_like(weight))
    bias = bias if spec.epilogue.has_bias else None
    found = matmul(x, codes, spec, bias, scales=scales)
    assert_same_bits(found, matmul(x, matrix, MatmulSpec(spec.epilogue), bias))
    if None in spec.b_format.storage:
        with pytest.raises(ValueError, match=f"{spec.b_format.name} is stored as .*{dtype}"):
            matmul(x, codes, spec, bias, scales=[scales[0].half(), *scales[1:]])


@pytest.mark.parametrize("format", PACKED, ids=lambda one: one.name)
def test_operands_of_a_certificate_show_the_order_of_a_sum(format: Format) -> None:
    a, weight = cancelling(16, 96, 256, torch.bfloat16, "cpu", exponents=format.exponents)
    matrix = format.decode(format.stored(weight), torch.empty_like(weight)).t()
    assert (sequential_k(a, matrix, splits=2) != sequential_k(a, matrix)).double().mean() > 0.5
