"""The operation as a custom operator of PyTorch's."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.assertions import DTYPES, assert_same_bits
from vllm_batch_invariant.ops.linear import linear, torch_op


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operator_has_the_bits_of_the_function(dtype: torch.dtype) -> None:
    x, weight, bias = draw(3, 7, 48, dtype=dtype), draw(33, 48, dtype=dtype), draw(33, dtype=dtype)
    assert_same_bits(torch_op.linear(x, weight, bias), linear(x, weight, bias))
    assert_same_bits(torch_op.linear(x, weight), linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operator_is_one_that_pytorch_can_compile(dtype: torch.dtype) -> None:
    x, weight, bias = draw(7, 48, dtype=dtype), draw(33, 48, dtype=dtype), draw(33, dtype=dtype)
    for given in ((x, weight, bias), (x, weight), (x[None].expand(2, 7, 48), weight, bias), (x[0], weight)):
        torch.library.opcheck(torch.ops.vllm_batch_invariant.linear.default, given)


def test_one_compiled_function_serves_all_batch_sizes() -> None:
    first, bias, second = draw(33, 48), draw(33), draw(20, 33)

    def layers(x: torch.Tensor) -> torch.Tensor:
        return torch_op.linear(torch_op.linear(x, first, bias), second)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layers, backend=counter, fullgraph=True, dynamic=True)
    x = draw(300, 48)
    expected = layers(x)
    for m in (1, 2, 7, 16, 33, 300):
        assert_same_bits(compiled(x[:m]), expected[:m], f"{m} rows")
    assert counter.frame_count <= 2, "one row is a case of its own for PyTorch"
    torch._dynamo.reset()
