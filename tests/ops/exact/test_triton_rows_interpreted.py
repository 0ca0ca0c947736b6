"""The GPU's kernels of exact arithmetic but for products and attention, in Triton's interpreter: each has the bits of
the definition in numpy.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.faults import exact as faults
from tests.ops.exact.cases import assert_same, bf16, numbers, rows_of_all_kinds
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.common import triton_exact_math
from vllm_batch_invariant.ops.common.triton_exact_math import (
    ceil,
    exp2,
    gumbel,
    ln,
    ln_of_integer,
    mass,
    rint,
    rint_24,
    tanh,
    to_bf16,
)  # fmt: skip
from vllm_batch_invariant.ops.exact import cuda, definition, triton_kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of infinities and NaN in numpy
fp32 = np.float32
DRAW = np.random.default_rng(0)
SPECIAL = np.array(
    [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.1754944e-38, 1.0, -1.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.4028235e38, 1e30, -1e30],
    fp32,
)
NOT_FINITE = np.array([np.inf, -np.inf, np.nan], fp32)


@triton.jit
def _apply_kernel(x_ptr, out_ptr, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, FUNCTION(tl.load(x_ptr + offs)).to(out_ptr.dtype.element_ty))


def apply(function: object, x: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A function of Triton's of some numbers."""
    block = triton.next_power_of_2(x.size)
    padded = torch.from_numpy(np.resize(x, block))
    out = torch.zeros(block, dtype=dtype)
    _apply_kernel[(1,)](padded, out, FUNCTION=function, BLOCK=block, enable_fp_fusion=False)
    return out[: x.size]


def test_functions_of_numbers_have_the_bits_of_the_definition():
    near = np.arange(-130, 131, dtype=fp32)[:, None] / 2 + np.array([-1e-5, 0, 1e-5], fp32)
    x = np.concatenate((DRAW.uniform(-131, 131, 4000).astype(fp32), near.ravel().astype(fp32), SPECIAL, NOT_FINITE))
    assert_same(apply(exp2, x), definition.exp2(x), "exp2")
    assert_same(apply(ceil, x) + 0.0, np.ceil(x) + fp32(0), "ceil")  # its zeros have no sign
    assert_same(apply(tanh, x), definition.tanh(x), "tanh")
    near = DRAW.uniform(-0.7, 0.7, 4000).astype(fp32)
    assert_same(apply(tanh, near), definition.tanh(near), "tanh")
    bits = DRAW.integers(-(2**31), 2**31, 6000).astype(np.int32)
    ties = (bits & ~0xFFFF | 0x8000).view(fp32)
    values = np.concatenate((bits.view(fp32), ties, SPECIAL, NOT_FINITE))
    assert_same(apply(to_bf16, values, torch.bfloat16), definition.bf16(values), "bf16")
    positive = np.abs(values[np.isfinite(values)])
    positive = positive[positive >= np.finfo(fp32).tiny]
    assert_same(apply(ln, positive), definition.ln(positive), "ln")
    s = np.concatenate([(1 << np.arange(62)) + step for step in (-1, 0, 1)] + [DRAW.integers(1, 2**60, 3000)])
    s = s[s > 0]
    found = apply(ln_of_integer, s, torch.float64).numpy()
    assert np.array_equal(found.view(np.int64), definition.ln_of_integer(s).view(np.int64))
    halves, steps = (np.arange(-2001, 2002) / 2).astype(fp32), np.arange(100, dtype=fp32) / 2
    for function, limit in ((rint, fp32(2**22)), (rint_24, fp32(2**23))):
        x = np.concatenate((halves, limit - steps, steps - limit))
        assert_same(apply(function, x, torch.int32), np.rint(x).astype(np.int32), "rint")
    below = -np.abs(DRAW.standard_normal(3000).astype(fp32) * 20)
    exact = np.rint(definition.exp2(below * definition.LOG2_E) * fp32(2.0**40)).astype(np.int64)
    assert_same(apply(mass, below, torch.int64), exact, "mass")


TWICE = (1 << 54) + (1 << 30) + 1 + (np.arange(64) << 31)
"""In fp64 the last bit is lost, and then what is left lies between two fp32 numbers."""


def test_an_integer_is_rounded_once():
    for integers in (TWICE, -TWICE, DRAW.integers(-(2**62), 2**62, 500)):
        assert_same(apply(triton_exact_math.to_fp32, integers), integers.astype(fp32))


@pytest.mark.parametrize(("length", "parts"), [(1, 1), (33, 1), (300, 1), (256, 8), (4096 + 200, 1), (8192, 1)])
def test_grids_of_activations_are_those_of_the_definition(length, parts):
    x = rows_of_all_kinds(length)[2 :: 3 if length > 4096 or parts > 1 else 1]
    exact = definition.activations(definition.in_segments(x, parts))
    found = cuda.quantize(torch.from_numpy(x), parts, activations=True)
    digits, third = found.digits.view(2, len(x), parts, -1).int(), found.third.view(len(x), parts, -1).int()
    step = cuda.QuantizeSchedule.of(length // parts).mask_step
    bits = torch.arange(length // parts) // step
    marked = (found.high_digit_mask[:, :, None] >> bits) & 1 != 0
    third = torch.where(marked, third, 0)
    assert_same((third << 16) + (digits[0] << 8) + digits[1], exact.integers, "integers")
    assert_same(found.scale, exact.scale, "scale")
    for row, part in np.ndindex(len(x), parts):
        where = {int(bit) for bit in bits[third[row, part] != 0]}
        assert int(found.high_digit_mask[row, part]) == sum(1 << bit if bit < 63 else -(1 << 63) for bit in where)
    if length == 300:
        assert third.any()


@pytest.mark.parametrize(("length", "shared"), [(33, False), (512, True), (4096 + 200, False)])
def test_grids_of_weights_are_those_of_the_definition(length, shared):
    x, parts = rows_of_all_kinds(length)[:: 3 if shared else 1], definition.segments(length, shared)
    exact = definition.two_digits(definition.in_segments(x, parts))
    found = cuda.prepare(torch.from_numpy(x), parts)
    digits = found.digits.view(2, len(x), parts, -1).int()
    assert_same((digits[0] << 8) + digits[1], exact.integers, "integers")
    assert_same(found.scale, exact.scale, "scale")


@pytest.mark.parametrize(("rows", "length"), [(18, 33), (18, 896), (7, 200), (3, 5000)])
def test_norms_have_the_bits_of_the_definition(rows, length):
    x, residual = (torch.from_numpy(definition.bf16(rows_of_all_kinds(length)[:rows])).bfloat16() for _ in range(2))
    weight, gemma = bf16(length), bf16(length).float() + 1
    for w in (None, weight, gemma):
        exact = definition.rms_norm(numbers(x), None if w is None else numbers(w), 1e-6)[0]
        assert_same(cuda.rms_norm(x, w, 1e-6), exact, "norm")
    out, summed = cuda.rms_norm(x, weight, 1e-5, residual)
    exact = definition.rms_norm(numbers(x), numbers(weight), 1e-5, numbers(residual))
    assert_same(out, exact[0], "norm of a sum")
    assert_same(summed, exact[1], "sum")


def test_heads_are_normed_where_they_lie():
    qkv, weight = bf16(5, 12 * 64), bf16(64)
    heads = qkv[:, 2 * 64 : 10 * 64].unflatten(1, (8, 64))
    assert_same(cuda.rms_norm(heads, weight, 1e-6), definition.rms_norm(numbers(heads), numbers(weight), 1e-6)[0])
    with pytest.raises(NotCovered, match="part of a row"):
        cuda.rms_norm(heads, weight, 1e-6, variance_size=32)


@pytest.mark.parametrize("length", [1, 100, 1500])
def test_silu_and_gelu_have_the_bits_of_the_definition(length):
    x = bf16(6, 2 * length, scale=8)
    x[1, 0], x[2, 0], x[3, -1], x[4, 0] = torch.inf, -torch.inf, torch.nan, -300
    assert_same(cuda.silu_and_mul(x), definition.silu_and_mul(numbers(x)))
    assert_same(cuda.gelu_and_mul(x), definition.gelu_and_mul(numbers(x)))


@pytest.mark.parametrize("length", [1, 100, 1500])
def test_a_soft_cap_has_the_bits_of_the_definition(length):
    x = bf16(6, length, scale=8)
    x[1, 0], x[2, 0], x[3, -1], x[4, 0] = torch.inf, -torch.inf, torch.nan, -300
    assert_same(cuda.capped(x, 3.7), definition.bf16(definition.capped(numbers(x), 3.7)))


@pytest.mark.parametrize(("heads", "size"), [(5, 64), (17, 128), (1, 80)])
def test_rotation_has_the_bits_of_the_definition(heads, size):
    wide = bf16(4, heads + 3, size)
    table = definition.rotary_table(1000, definition.turns(size, 10_000.0))[[0, 1, 500, 999]]
    x = wide[:, 1 : 1 + heads]
    assert_same(cuda.rotate(x, torch.from_numpy(table).bfloat16()), definition.rotate(numbers(x), table))


def logits(rows: int, length: int) -> np.ndarray:
    x = (DRAW.standard_normal((rows, length)) * 4).astype(fp32)
    x[0] = np.round(x[0])  # ties
    x[1, 1:] = -np.inf
    x[2] *= 30
    x[3, ::2] = -np.inf
    return x


@pytest.mark.parametrize("length", [5, 8192, 20_001])
def test_softmax_has_the_bits_of_the_definition(length):
    x = logits(5, length)
    assert_same(cuda.softmax(torch.from_numpy(x)), definition.softmax(x), "softmax")
    assert_same(cuda.log_softmax(torch.from_numpy(x)), definition.log_softmax(x), "log_softmax")


def test_rows_without_a_finite_maximum_have_no_probabilities():
    x = torch.from_numpy(logits(4, 100))
    x[0, 7], x[1, 7], x[2] = torch.nan, torch.inf, -torch.inf
    for found in (cuda.softmax(x), cuda.log_softmax(x)):
        assert found[:3].isnan().all()
        assert not found[3].isnan().any()


def keys_of(seeds: list[int], positions: list[int]) -> torch.Tensor:
    """What each row's noise is made of beside the token."""
    keys = [definition.key_of(*of) for of in zip(seeds, positions, strict=True)]
    return torch.tensor(keys, dtype=torch.uint64).view(torch.int64)


def test_the_drawn_token_is_that_of_the_definition():
    x = logits(5, 8192 + 77)
    x[4] = 0
    seeds, positions = [0, 5, -3, 2**62, 7], [0, 1, 100, 3, 70_000]
    found = cuda.draw(torch.from_numpy(x), keys_of(seeds, positions))
    exact = [definition.draw(row, 1.0, 0, 1.0, *of) for row, *of in zip(x, seeds, positions, strict=True)]
    assert found.tolist() == exact
    tokens = torch.arange(4096)
    noise = torch.empty(4096)
    _noise_kernel[(1,)](keys_of([3], [9]), tokens, noise, BLOCK=4096, enable_fp_fusion=False)
    assert_same(noise, definition.gumbel(3, 9, tokens.numpy().astype(np.uint64)))


@triton.jit
def _noise_kernel(key_ptr, tokens_ptr, out_ptr, BLOCK: tl.constexpr):  # noqa: N803
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, gumbel(tl.load(key_ptr).to(tl.uint64), tl.load(tokens_ptr + offs).to(tl.uint64)))


def test_of_equal_sums_of_logit_and_noise_the_lowest_token_is_drawn(monkeypatch):
    monkeypatch.setattr(triton_kernels, "gumbel", _no_noise)
    x = torch.zeros(3, 20_000)
    x[1, [7, 9000, 19_000]] = 3
    x[2] = -torch.inf
    assert cuda.draw(x, torch.zeros(3, dtype=torch.int64)).tolist() == [0, 7, 0]


def test_a_row_whose_temperature_is_0_takes_its_first_largest_logit_beside_rows_that_draw():
    x = logits(5, 9000)
    x[3, [5, 8500]] = 100
    seeds, temperatures = [0, 5, -3, 9, 7], torch.tensor([0.0, 0.7, 1.0, 0.0, 2.0])
    found = cuda.draw(torch.from_numpy(x), keys_of(seeds, [4] * 5), temperatures).tolist()
    exact = [definition.draw(row, float(t > 0), 0, 1.0, s, 4) for row, t, s in zip(x, temperatures, seeds, strict=True)]
    assert found == exact
    assert found[3] == 5
    without = cuda.draw(torch.from_numpy(x), keys_of(seeds, [4] * 5)).tolist()
    assert [ours == others for ours, others in zip(found, without, strict=True)] == [False, True, True, True, True]


def test_logits_are_divided_cut_and_penalised_as_in_the_definition():
    x, p = logits(5, 3000), np.array([0, 0.1, 1, 0.5, 0.02], fp32)
    x[3, ::2], x[4, 7] = -np.inf, -0.0
    temperatures = np.array([0, 0.7, 1, 1.3, 1e-3], fp32)
    heated = cuda.heat(torch.from_numpy(x.copy()), torch.from_numpy(temperatures))
    assert_same(heated, x / np.where(temperatures == 0, fp32(1), temperatures)[:, None], "temperature")
    cut = cuda.min_p(torch.from_numpy(x.copy()), torch.from_numpy(p))
    for row, found in enumerate(cut):
        assert_same(found, definition.min_p(x[row], p[row]), f"min-p {p[row]}")
    in_prompt, counts = DRAW.random(x.shape) < 0.2, DRAW.integers(-9, 4, x.shape).clip(0)
    penalties = np.array([[1, 0, 0], [1.3, 0, 0], [1, 0.7, 0], [0.8, -0.3, 0.9], [1.1, 0.1, 1.7]], fp32)
    found = cuda.penalise(
        *(torch.from_numpy(one) for one in (x.copy(), in_prompt, counts)), *torch.from_numpy(penalties).unbind(1)
    )
    for row, ours in enumerate(found):
        exact = definition.penalised(x[row], in_prompt[row], counts[row], *map(float, penalties[row]))
        assert_same(ours, exact, f"penalties {penalties[row]}")


@triton.jit
def _no_noise(key, tokens):
    return tl.where(tokens < 0, 1.0, -0.0)


def test_top_k_and_top_p_keep_what_the_definition_keeps():
    x = logits(7, 700)
    x[5], x[6] = 0, np.round(x[6] * 4)
    k, p = torch.tensor([5, 700, 1, 40, 300, 33, 699]), torch.tensor([0.5, 0.9, 0.3, 1.0, 0.999, 0.5, 1e-6])
    for ks, ps in ((k, p), (k, None), (None, p)):
        found = cuda.top_k_top_p(torch.from_numpy(x.copy()), ks, ps)
        for row, kept in enumerate(found):
            asked = 0 if ks is None else int(ks[row]), 1.0 if ps is None else float(ps[row])
            assert_same(kept, definition.top_k_top_p(x[row], *asked), f"row {row}, {asked}")


@pytest.mark.parametrize(
    ("name", "fault", "check"),
    [
        ("polynomial", faults.contracted, test_functions_of_numbers_have_the_bits_of_the_definition),
        ("to_fp32", faults.rounded_twice, test_an_integer_is_rounded_once),
        ("rint_24", faults.truncated, lambda: test_grids_of_activations_are_those_of_the_definition(300, 1)),
        ("last_digit", faults.of_two_digits, lambda: test_grids_of_activations_are_those_of_the_definition(300, 1)),
    ],
)
def test_an_injected_fault_is_found(name, fault, check, monkeypatch):
    for module in (triton_exact_math, triton_kernels):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError):
        check()
