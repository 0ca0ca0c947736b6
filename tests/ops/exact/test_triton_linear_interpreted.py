"""Exact products by the GPU's kernels in Triton's interpreter: each has the bits of the definition in numpy."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.faults import exact as faults
from tests.ops.exact.cases import assert_same, bf16, numbers, rows_of_all_kinds
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.exact import cuda, definition, triton_linear

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of infinities and NaN in numpy
CPU = torch.device("cpu")


def exact(x: torch.Tensor, weight: torch.Tensor, shared: bool, bias: torch.Tensor | None = None) -> np.ndarray:
    parts = definition.segments(x.shape[-1], shared)
    rows = definition.two_digits(definition.in_segments(numbers(weight), parts))
    return definition.linear(numbers(x), rows, None if bias is None else numbers(bias))


@pytest.mark.parametrize(
    ("n", "k", "shared", "has_bias"),
    [(20, 33, False, True), (7, 300, False, False), (5, 256, True, True), (9, 1, False, True)],
)
def test_products_have_the_bits_of_the_definition(n, k, shared, has_bias):
    """Of rows of all kinds, three of whose weights have only zeros, subnormal numbers and a NaN."""
    x = torch.from_numpy(definition.bf16(rows_of_all_kinds(k)[:: 3 if shared else 1])).bfloat16()
    weight, bias = bf16(n, k), bf16(n) if has_bias else None
    weight[0], weight[1], weight[2, -1] = 0, 1e-39, torch.nan
    prepared = cuda.prepare(weight, definition.segments(k, shared))
    assert_same(cuda.linear(x, prepared, bias), exact(x, weight, shared, bias))


def test_every_tile_and_both_kinds_of_tensor_cores_have_the_same_bits():
    """Of a K of more than one chunk of fp16's, and with third digits."""
    x, weight, bias = bf16(20, 600), bf16(20, 600), bf16(20)
    x[3, [7, 599]] = 3000
    rows, held = cuda.quantize(x, 1, activations=True), cuda.prepare(weight)
    expected = exact(x, weight, False, bias)
    assert rows.high_digit_mask[:, 0].tolist() == [0, 0, 0, 0b10001] + [0] * 16
    for schedule in cuda.linear_schedules(1):
        for int8 in (True, False):
            assert_same(cuda.product(rows, held, bias, replace(schedule, int8=int8)), expected, f"{schedule} {int8}")


def test_third_digits_in_the_last_of_64_bits_of_the_mask_count():
    x, weight = bf16(1, 8192), bf16(2, 8192)
    x[0, -1] = 3000
    assert cuda.quantize(x, 1, activations=True).high_digit_mask.tolist() == [[-(1 << 63)]]
    assert_same(cuda.linear(x, cuda.prepare(weight)), exact(x, weight, False))


def test_a_row_has_the_same_bits_alone_and_with_leading_dimensions():
    x, weight = bf16(2, 20, 64), cuda.prepare(bf16(9, 64))
    whole = cuda.linear(x, weight)
    assert whole.shape == (2, 20, 9)
    assert torch.equal(cuda.linear(x[1, 7:8], weight), whole[1, 7:8])
    assert torch.equal(cuda.linear(x[:, 3], weight), whole[:, 3])
    assert cuda.linear(x[:, :0], weight).shape == (2, 0, 9)


@pytest.mark.parametrize(("k", "shared", "int8"), [(33, False, True), (600, False, False), (256, True, True)])
def test_products_at_the_bounds_of_the_digits_are_certified(k, shared, int8):
    assert cuda.certify(5, k, shared, CPU, int8) > 0


@pytest.mark.parametrize(
    ("name", "fault", "int8"),
    [
        ("_two_digits", faults.without_the_last_product, True),
        ("dot_digits", faults.saturated, True),
        ("FP16_CHUNK", 1024, False),
    ],
)
def test_an_engine_with_an_injected_fault_is_not_certified(name, fault, int8, monkeypatch):
    monkeypatch.setattr(triton_linear, name, fault)
    with pytest.raises(ArithmeticError, match="are not exact on cpu"):
        cuda.certify(5, 2200 if name == "FP16_CHUNK" else 300, False, CPU, int8)


def test_a_product_whose_sums_may_overflow_is_refused():
    with pytest.raises(NotCovered, match="65536 elements"):
        cuda.prepare(torch.zeros(1, 65_536))
    with pytest.raises(NotCovered, match="65536 elements"):
        cuda.certify(1, 65_536, False, CPU)


def test_rows_of_another_length_are_refused():
    with pytest.raises(ValueError, match="rows of 32 in 1 segments do not fit a weight of 64 in 1"):
        cuda.linear(bf16(2, 32), cuda.prepare(bf16(3, 64)))


def test_a_certificate_has_scales_in_fp32_where_a_model_is_loaded(monkeypatch):
    """vLLM loads a model with bf16 as PyTorch's default."""
    seen, product = [], cuda.product

    def noted(x, weight, *others, **options):
        seen.extend((x.scale.dtype, weight.scale.dtype))
        return product(x, weight, *others, **options)

    monkeypatch.setattr(cuda, "product", noted)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert cuda.certify(5, 96, False, CPU) > 0
    finally:
        torch.set_default_dtype(before)
    assert set(seen) == {torch.float32}
