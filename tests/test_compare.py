"""The comparisons that other tests rest on: what they accept, what they reject, and what they say then."""

import subprocess
import sys

import pytest
import torch

from vllm_batch_invariant.compare import (
    TOLERANCES,
    Comparison,
    Mismatch,
    accuracy_comparison,
    assert_accuracy,
    assert_same_bits,
    bitwise_comparison,
)

HALVES = (torch.float16, torch.bfloat16)
INTEGERS = tuple(dtype for dtype in TOLERANCES if not dtype.is_floating_point and dtype != torch.bool)
SIGNED = tuple(dtype for dtype in INTEGERS if dtype.is_signed)
FLOATS = (*HALVES, torch.float32, torch.float64)
NAN, INF = float("nan"), float("inf")


def pair(actual: list, expected: list, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(actual, dtype=dtype), torch.tensor(expected, dtype=dtype)


def other_nan() -> torch.Tensor:
    """A NaN of fp32 with a payload of its own."""
    return torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize("dtype", [*TOLERANCES, torch.float64, torch.float8_e4m3fn, torch.complex64])
def test_a_tensor_has_the_bits_of_its_copy(dtype):
    tensor = torch.arange(24).view(2, 3, 4).to(dtype)
    found = bitwise_comparison(tensor, tensor.clone())
    assert found
    assert found == Comparison("bits", dtype, (2, 3, 4), 24, 0, 0.0, None)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_one_wrong_element_is_found_by_both_comparisons_in_every_dtype(dtype):
    expected = torch.zeros(2, 3, 4, dtype=dtype)
    actual = expected.clone()
    actual[1, 0, 3] = 1
    for compare in (bitwise_comparison, accuracy_comparison):
        found = compare(actual, expected)
        assert not found
        assert (found.elements, found.different, found.largest_error) == (24, 1, 1.0)
        assert (found.first.where, found.first.actual, found.first.expected) == ((1, 0, 3), 1, 0)


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_may_be_off_by_a_thousandth(dtype):
    one_step = torch.finfo(dtype).eps
    assert bool(accuracy_comparison(*pair([1 + one_step], [1.0], dtype))) == (one_step <= 2e-3)
    assert accuracy_comparison(*pair([9e-4], [0.0], dtype))
    assert not accuracy_comparison(*pair([1.1e-3], [0.0], dtype))


def test_halves_are_compared_as_fp32():
    """The fp16 nearest to a thousandth is more than a thousandth, which fp16 itself cannot tell."""
    actual, expected = pair([1e-3], [0.0], torch.float16)
    assert torch.isclose(actual, expected, rtol=1e-3, atol=1e-3)
    assert not accuracy_comparison(actual, expected)


def test_fp32_may_be_off_by_a_tenth_of_that():
    assert accuracy_comparison(*pair([1.00019], [1.0]))
    assert not accuracy_comparison(*pair([1.00021], [1.0]))
    assert accuracy_comparison(*pair([100.009], [100.0]))
    assert not accuracy_comparison(*pair([100.011], [100.0]))
    assert str(accuracy_comparison(*pair([1.0], [1.0]))).endswith(
        "(float32 [1], rtol=0.0001 atol=0.0001), largest error 0"
    )


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_exact_at_both_ends_of_their_range(dtype):
    limits = torch.iinfo(dtype)
    ends = torch.tensor([limits.min, limits.max], dtype=dtype)
    assert accuracy_comparison(ends, ends.clone())
    found = accuracy_comparison(ends, torch.tensor([limits.min, limits.max - 1], dtype=dtype))
    assert found.different == 1
    assert (found.first.where, found.first.actual, found.first.expected) == ((1,), limits.max, limits.max - 1)
    assert found.rule == "exact"


def test_booleans_are_exact():
    found = accuracy_comparison(*pair([True, False], [True, True], torch.bool))
    assert (found.different, found.largest_error, found.first.actual) == (1, 1.0, False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float8_e5m2])
def test_a_dtype_without_a_rule_is_an_error(dtype):
    tensor = torch.ones(3).to(dtype)
    with pytest.raises(TypeError, match=f"no rule for the accuracy of {dtype}"):
        accuracy_comparison(tensor, tensor)
    with pytest.raises(TypeError, match="no rule"):
        accuracy_comparison(tensor, tensor, rtol=1e-3)


def test_a_tolerance_of_ones_own_takes_the_place_of_the_rule():
    actual, expected = pair([1.01, 0.0], [1.0, 0.0])
    assert not accuracy_comparison(actual, expected)
    assert accuracy_comparison(actual, expected, rtol=0.02)
    assert not accuracy_comparison(actual, expected, rtol=0, atol=0.009)
    assert accuracy_comparison(actual.double(), expected.double(), rtol=0, atol=0.011)
    assert accuracy_comparison(*pair([7], [8], torch.int32), atol=1)
    assert accuracy_comparison(*pair([1.0], [1.0], torch.float8_e4m3fn), rtol=0, atol=0)


def test_a_tight_tolerance_is_kept_in_fp64():
    actual, expected = pair([1 + 1e-12], [1.0], torch.float64)
    assert accuracy_comparison(actual, expected, rtol=1e-11, atol=0)
    assert not accuracy_comparison(actual, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("tolerance", [{"rtol": -1e-3}, {"atol": NAN}])
def test_a_tolerance_that_is_none_is_an_error(tolerance):
    with pytest.raises(ValueError, match="a tolerance is at least 0"):
        accuracy_comparison(torch.ones(1), torch.ones(1), **tolerance)


@pytest.mark.parametrize("compare", [bitwise_comparison, accuracy_comparison, assert_same_bits, assert_accuracy])
def test_shapes_and_dtypes_must_match(compare):
    with pytest.raises(ValueError, match=r"shapes differ: \[2, 3\] against \[3, 2\]"):
        compare(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"\[1\] against \[\]"):
        compare(torch.ones(1), torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"dtypes differ: torch\.float16 against torch\.bfloat16"):
        compare(torch.ones(2).half(), torch.ones(2).bfloat16())


@pytest.mark.parametrize("compare", [bitwise_comparison, accuracy_comparison])
def test_what_is_no_plain_tensor_is_an_error(compare):
    with pytest.raises(TypeError, match="got a list"):
        compare([1.0], torch.ones(1))
    with pytest.raises(TypeError, match="sparse_coo tensor"):
        compare(torch.ones(2, 2), torch.ones(2, 2).to_sparse())
    with pytest.raises(TypeError):
        compare(torch.ones(2, dtype=torch.complex128), torch.ones(2, dtype=torch.complex128))


def test_nan_differs_unless_it_may_be_equal():
    actual, expected = pair([NAN, 1.0, NAN], [NAN, NAN, 1.0])
    found = accuracy_comparison(actual, expected)
    assert (found.different, found.largest_error, found.first.where) == (3, INF, (0,))
    found = accuracy_comparison(actual, expected, equal_nan=True)
    assert (found.different, found.largest_error, found.first.where) == (2, INF, (1,))
    assert accuracy_comparison(actual, actual, equal_nan=True).largest_error == 0


def test_a_nan_has_the_bits_of_the_same_payload_and_sign_alone():
    nan = torch.tensor([NAN])
    assert bitwise_comparison(nan, nan.clone())
    for other in (other_nan(), -nan):
        found = bitwise_comparison(nan, other)
        assert not found
        assert found.largest_error == 0
        assert bitwise_comparison(nan, other, equal_nan=True)
    assert str(bitwise_comparison(nan, other_nan()).first) == "at (0,): nan (0x7fc00000) against nan (0x7fc00001)"
    assert not bitwise_comparison(nan, torch.ones(1), equal_nan=True)
    nan = nan.to(torch.complex64)
    assert bitwise_comparison(nan, -nan, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_of_both_signs_have_other_bits_and_the_same_accuracy(dtype):
    actual, expected = pair([-0.0, 0.0], [0.0, 0.0], dtype)
    found = bitwise_comparison(actual, expected)
    assert (found.different, found.largest_error, found.first.where) == (1, 0.0, (0,))
    digits = 2 * dtype.itemsize
    assert found.first.bits == ("0x8" + "0" * (digits - 1), "0x" + "0" * digits)
    assert accuracy_comparison(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_an_infinity_is_near_nothing_but_itself(dtype):
    actual, expected = pair([INF, -INF, INF, 1.0, INF], [INF, -INF, -INF, INF, NAN], dtype)
    for compare in (bitwise_comparison, accuracy_comparison):
        found = compare(actual, expected)
        assert (found.different, found.largest_error, found.first.where) == (3, INF, (2,))
    assert accuracy_comparison(actual[:2], expected[:2]).largest_error == 0


def test_the_largest_error_counts_elements_that_are_accepted():
    found = accuracy_comparison(*pair([1000.05, 0.01], [1000.0, 0.0]))
    assert found.different == 1
    assert found.first.where == (1,)
    assert found.largest_error == pytest.approx(0.05, rel=1e-2)
    assert accuracy_comparison(*pair([1000.05], [1000.0])).largest_error == pytest.approx(0.05, rel=1e-2)


def test_the_first_mismatch_is_the_first_with_the_last_dimension_running_fastest():
    expected = torch.zeros(3, 4, 5)
    actual = expected.clone()
    for where in ((2, 0, 0), (1, 3, 1), (1, 2, 4)):
        actual[where] = 1
    transposed = [tensor.permute(2, 0, 1) for tensor in (actual, expected)]
    for compare in (bitwise_comparison, accuracy_comparison):
        assert compare(actual, expected).first.where == (1, 2, 4)
        assert compare(*transposed).first.where == (0, 2, 0)


@pytest.mark.parametrize("compare", [bitwise_comparison, accuracy_comparison])
def test_empty_and_0_dimensional_tensors_compare(compare):
    empty = torch.ones(3, 0, 2)
    assert compare(empty, empty.clone()) == Comparison(
        compare(empty, empty).rule, torch.float32, (3, 0, 2), 0, 0, 0.0, None
    )
    assert compare(torch.tensor(2.5), torch.tensor(2.5))
    found = compare(torch.tensor(2.5), torch.tensor(3.5))
    assert (found.first.where, found.first.actual, found.first.expected) == ((), 2.5, 3.5)
    assert compare(torch.tensor(True), torch.tensor(True))


@pytest.mark.parametrize("compare", [bitwise_comparison, accuracy_comparison])
def test_strides_and_history_do_not_count(compare):
    wide = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    every_second = wide[::2, ::2].t()
    assert compare(every_second, every_second.contiguous())
    assert compare(wide[:1].expand(4, 8), wide[:1].repeat(4, 1))
    other = every_second.detach().clone()
    other[3, 1] += 1
    assert compare(every_second, other).first.where == (3, 1)


def test_the_message_says_where_how_many_and_how_far():
    actual, expected = pair([[1.0, 2.0], [3.5, -0.5]], [[1.0, 2.0], [3.0, 0.5]])
    with pytest.raises(Mismatch) as failure:
        assert_same_bits(actual, expected, "7 rows")
    assert str(failure.value) == (
        "7 rows: 2 of 4 elements differ (float32 [2, 2], bits), first at (1, 0): 3.5 (0x40600000) against 3.0 "
        "(0x40400000), largest error 1"
    )
    assert failure.value.comparison == bitwise_comparison(actual, expected)
    with pytest.raises(AssertionError) as failure:
        assert_accuracy(actual, expected)
    assert str(failure.value) == (
        "2 of 4 elements differ (float32 [2, 2], rtol=0.0001 atol=0.0001), first at (1, 0): 3.5 against 3.0, "
        "largest error 1"
    )


def test_what_holds_is_returned_and_cannot_be_changed():
    found = assert_accuracy(torch.ones(2), torch.ones(2) + 1e-5)
    assert found == accuracy_comparison(torch.ones(2), torch.ones(2) + 1e-5)
    assert assert_same_bits(torch.ones(2), torch.ones(2))
    with pytest.raises(AttributeError):
        found.different = 3


def test_a_tensor_on_another_device_is_compared_with_one_of_the_cpu():
    """PyTorch has no second device everywhere, so this one fails in the copy, which shows that it is made."""
    with pytest.raises(NotImplementedError, match="meta"):
        bitwise_comparison(torch.ones(2, device="meta"), torch.ones(2))


def test_comparing_imports_no_vllm_and_no_device_library():
    code = (
        "import sys, vllm_batch_invariant.compare; "
        "print([name for name in ('vllm', 'numba', 'triton', 'torch_npu') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
