"""A Hopper's usual arithmetic as it is written down: near float64, and with the order and the cuts that it says."""

from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch

from scripts.hopper_bits import operands
from tests.ops.hopper.cases import numbers, same, step_in_fractions
from vllm_batch_invariant.ops.exact.definition import bf16, fp32
from vllm_batch_invariant.ops.hopper import definition, tables
from vllm_batch_invariant.ops.hopper.tables import Tables
from vllm_batch_invariant.ops.norm.reduction import NormReduction
from vllm_batch_invariant.ops.softmax.reduction import SoftmaxReduction

KINDS = [kind for kind, *_ in operands(np.random.default_rng(0), 5, 4, 16)]


@cache
def ideal() -> Tables:
    return tables.ideal()


def relative(found: np.ndarray, right: np.ndarray) -> float:
    return float(np.max(np.abs(found - right)) / np.max(np.abs(right)))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "infinities and NaN"])
def test_a_step_of_the_tensor_core_is_that_of_fractions(kind: str) -> None:
    rng = np.random.default_rng(3)
    [(a, b)] = [(a, b) for name, a, b in operands(rng, 6, 5, 16) if name == kind]
    c = bf16(rng.standard_normal((6, 5)).astype(fp32)) * np.exp2(rng.integers(-30, 30, (6, 5))).astype(fp32)
    c[0], c[1, 0] = 0, fp32(-0.0)
    found = definition.mma_step(a, b, c)
    for m, n in np.ndindex(c.shape):
        assert same(found[m, n], step_in_fractions(a[m], b[n], c[m, n])), (m, n)


def test_infinities_and_nan_are_those_of_the_exact_sum() -> None:
    a, b, c = np.ones((4, 16), fp32), np.ones((1, 16), fp32), np.zeros((4, 1), fp32)
    a[0, 3], a[1, :2], a[2, 5], c[3] = np.inf, (np.inf, -np.inf), np.nan, -np.inf
    with np.errstate(invalid="ignore"):
        found = definition.mma_step(a, b, c)
    assert same(found, np.array([[np.inf], [np.nan], [np.nan], [-np.inf]], fp32))


def test_only_the_order_of_whole_steps_moves_a_bit() -> None:
    a, b = numbers(1, 40, 256), numbers(2, 30, 256)
    a[:, ::7] *= 64
    right, rng = definition.mma(a, b), np.random.default_rng(0)
    within = np.concatenate([start + rng.permutation(16) for start in range(0, 256, 16)])
    assert same(definition.mma(a[:, within], b[:, within]), right)
    assert same(definition.mma(b, a), right.T)
    assert same(definition.mma(np.pad(a, ((0, 0), (0, 24))), np.pad(b, ((0, 0), (0, 24)))), right)
    steps = (rng.permutation(16)[:, None] * 16 + np.arange(16)).reshape(-1)
    assert not same(definition.mma(a[:, steps], b[:, steps]), right)
    shifted = np.roll(np.arange(256), 8)
    assert not same(definition.mma(a[:, shifted], b[:, shifted]), right)


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(3000).astype(fp32) for _ in range(2))
    c = (-(a.astype(np.float64) * b) * (1 + rng.choice([0, 2.0**-24, 2.0**-30, 1e-3], 3000))).astype(fp32)
    c[::3] = rng.standard_normal(1000).astype(fp32) * fp32(2.0**-20)
    found = definition.fma(a, b, c)
    for x, y, z, one in zip(a, b, c, found, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        around = [np.nextafter(one, fp32(-np.inf)), one, np.nextafter(one, fp32(np.inf))]
        errors = [abs(Fraction(float(candidate)) - exact) for candidate in around]
        assert errors[1] == min(errors)
        even = int(one.view(np.uint32)) % 2 == 0
        assert errors.count(errors[1]) == 1 or even
    assert not same(found, a * b + c)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("exp", -80, 80), ("ln", 1e-30, 1e30), ("cosine", -5000, 5000), ("sine", -5000, 5000), ("tanh", -10, 10)],
)
def test_functions_are_near_float64(name: str, low: float, high: float) -> None:
    x = np.random.default_rng(1).uniform(low, high, 20_000).astype(fp32)
    wide = x.astype(np.float64)
    found, right = {
        "exp": lambda: (definition.exp(x, ideal()) / np.exp(wide), np.ones_like(wide)),
        "ln": lambda: (definition.ln(x), np.log(wide)),
        "cosine": lambda: (definition.cosine(x), np.cos(wide)),
        "sine": lambda: (definition.cosine(x, 0), np.sin(wide)),
        "tanh": lambda: (definition.tanh(x, ideal()), np.tanh(wide)),
    }[name]()
    assert relative(found, right) < (8e-6 if name == "exp" else 2e-7)  # x * log2 e is rounded before the power


def test_special_functions_have_their_edges() -> None:
    x = np.array([0, -0.0, 128, -126, -127, -200, np.inf, -np.inf, np.nan, 1e-40], fp32)
    found = definition.ex2_ftz(x, ideal())
    assert same(found, np.array([1, 1, np.inf, 2.0**-126, 0, 0, np.inf, 0, np.nan, 1], fp32))
    assert definition.ex2(np.array([-130], fp32), ideal())[0] == fp32(2.0**-130)
    a = np.array([1, -1, 1, 3, 0], fp32)
    b = np.array([np.inf, np.inf, 2.0**-130, 2.0**127, 0], fp32)
    with np.errstate(invalid="ignore", over="ignore"):
        found = definition.divide(a, b, ideal())
    assert same(found, np.array([0, -0.0, np.inf, 3 * 2.0**-127, np.nan], fp32))
    with np.errstate(invalid="ignore"):
        found = definition.ln(np.array([1, 0, np.inf, -1, np.nan], fp32))
    assert same(found, np.array([0, -np.inf, np.inf, np.nan, np.nan], fp32))


@pytest.mark.parametrize("length", [64, 128, 576, 2048, 4096, 5120])
def test_rms_norm_is_near_float64_and_follows_its_warps(length: int) -> None:
    x, residual, weight = numbers(1, 9, length), numbers(2, 9, length), numbers(3, length)
    reduction = NormReduction.of_device("cuda", length, torch.bfloat16)
    found, z = definition.rms_norm(x, weight, 1e-6, residual, reduction)
    wide = x.astype(np.float64) + residual
    right = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * weight
    assert relative(found, right) < 8e-3
    assert same(z, bf16(x + residual))
    squares = np.random.default_rng(0).standard_normal((200, reduction.block)).astype(fp32) ** 2
    sums = definition.row_sums(squares, 32 * reduction.num_warps)
    assert relative(sums, squares.astype(np.float64).sum(-1)) < 1e-6
    if reduction.block >= 2048:
        assert not same(sums, definition.row_sums(squares, 64))


@pytest.mark.parametrize("length", [1000, 4096, 32_000, 151_936])
def test_log_softmax_is_near_float64(length: int) -> None:
    logits = bf16(numbers(1, 3, length) * fp32(4))
    logits[0, 3] = -np.inf
    reduction = SoftmaxReduction.of_device("cuda", length, torch.float32)
    found = definition.log_softmax(logits, reduction, ideal())
    right = torch.from_numpy(logits).double().log_softmax(-1).numpy()
    finite = np.isfinite(right)
    assert np.abs(found[finite] - right[finite]).max() < 4e-6
    assert np.isneginf(found[0, 3])


def test_silu_is_near_float64() -> None:
    x = bf16(numbers(1, 20, 512) * fp32(8))
    gate, up = np.split(x.astype(np.float64), 2, -1)
    assert relative(definition.silu_and_mul(x, ideal()), gate / (1 + np.exp(-gate)) * up) < 8e-3


def test_gelu_is_near_float64() -> None:
    x = bf16(numbers(1, 20, 512) * fp32(4))
    gate, up = torch.from_numpy(x).double().chunk(2, -1)
    right = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert relative(definition.gelu_and_mul(x, ideal()), right.numpy()) < 8e-3


def test_capped_logits_are_near_float64() -> None:
    x = bf16(numbers(1, 20, 512) * fp32(40))
    found = definition.capped(x, 30.0, ideal())
    assert np.abs(found - 30 * np.tanh(x.astype(np.float64) / 30)).max() < 0.25


def test_a_norm_may_multiply_with_one_more_and_rounds_once() -> None:
    x, weight = numbers(1, 9, 640), bf16(numbers(3, 640) * fp32(0.2))
    reduction = NormReduction.of_device("cuda", 640, torch.bfloat16)
    found, _ = definition.rms_norm(x, weight, 1e-6, None, reduction, adds_one=True)
    alone, _ = definition.rms_norm(x, None, 1e-6, None, reduction)
    wide = x.astype(np.float64)
    right = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * (1 + weight.astype(np.float64))
    assert relative(found, right) < 4e-3
    assert not same(found, bf16(alone * (weight + fp32(1))))


@pytest.mark.parametrize(("window", "soft_cap"), [(70, None), (1, None), (None, 3.0), (100, 2.0), (300, None)])
def test_attention_with_a_window_and_a_soft_cap_is_near_float64(window: int | None, soft_cap: float | None) -> None:
    rows, keys, size = 250, 300, 64
    q, k, v = numbers(1, rows, 4, size), numbers(2, keys, 2, size), numbers(3, keys, 2, size)
    found = definition.attention(q, k, v, size**-0.5, ideal(), window, soft_cap)
    wide = [torch.from_numpy(one).double().transpose(0, 1) for one in (q, k, v)]
    wide[1:] = [one.repeat_interleave(2, 0) for one in wide[1:]]
    scores = wide[0] @ wide[1].mT * size**-0.5
    scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
    distance = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
    scores = scores.masked_fill((distance < 0) | (distance >= (window or keys)), -np.inf)
    assert relative(found, (scores.softmax(-1) @ wide[2]).transpose(0, 1).numpy()) < 8e-3
    alone = definition.attention(q[-1:], k, v, size**-0.5, ideal(), window, soft_cap)
    assert same(alone[0], found[-1])


@pytest.mark.parametrize(("rows", "keys", "group", "size"), [(7, 7, 4, 64), (30, 300, 2, 64), (1, 2500, 1, 128)])
def test_attention_is_near_float64(rows: int, keys: int, group: int, size: int) -> None:
    q, k, v = numbers(1, rows, 2 * group, size), numbers(2, keys, 2, size), numbers(3, keys, 2, size)
    found = definition.attention(q, k, v, size**-0.5, ideal())
    wide = [torch.from_numpy(one).double().transpose(0, 1) for one in (q, k, v)]
    wide[1:] = [one.repeat_interleave(group, 0) for one in wide[1:]]
    visible = torch.arange(keys) <= torch.arange(keys - rows, keys)[:, None]
    right = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=visible).transpose(0, 1).numpy()
    assert relative(found, right) < 8e-3


def test_a_row_of_attention_has_the_bits_of_prefill_alone() -> None:
    q, k, v = numbers(1, 400, 2, 64), numbers(2, 400, 1, 64), numbers(3, 400, 1, 64)
    whole = definition.attention(q, k, v, 0.125, ideal())
    for last in (1, 64, 65, 257, 400):
        alone = definition.attention(q[last - 1 : last], k[:last], v[:last], 0.125, ideal())
        assert same(alone[0], whole[last - 1])


def test_a_rotary_table_is_near_float64() -> None:
    frequencies = definition.inverse_frequencies(128, 1e6, {}, ideal())
    right = 1e6 ** -(np.arange(0, 128, 2) / 128)
    assert relative(frequencies / right, np.ones(64)) < 3e-7
    found = definition.rotary_table(2000, frequencies)
    angles = np.arange(2000)[:, None] * frequencies.astype(np.float64)
    assert np.abs(found - np.concatenate((np.cos(angles), np.sin(angles)), -1)).max() < 4e-3
    assert same(definition.rotary_table(2000, frequencies, 8.0)[::8], found[:250])


def test_slices_of_k_are_rounded_and_added_as_a_tree() -> None:
    x, weight = numbers(1, 5, 256), numbers(2, 6, 256)
    quarters = [bf16(definition.mma(x[:, at], weight[:, at])) for at in np.split(np.arange(256), 4)]
    tree = bf16(bf16(quarters[0] + quarters[1]) + bf16(quarters[2] + quarters[3]))
    assert same(definition.linear(x, weight, k_slices=4), tree)
    assert not same(definition.linear(x, weight), tree)
