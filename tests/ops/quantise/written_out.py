"""Codes of rows and products of codes in numpy: integers, and float64 that is rounded to fp32 after each operation,
which is that operation in fp32 (of 53 bits at least 2 * 24 + 2 are needed).
"""

from collections.abc import Callable

import numpy as np
import torch

LEAST = 2.0**-119


def fp32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(np.float64)


def numbers(x: torch.Tensor) -> np.ndarray:
    return x.cpu().double().numpy()


def codes_of(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``quantise`` gives for x [M, K]."""
    codes, scales = [], []
    for row in numbers(x):
        top = np.abs(row).max(initial=0.0)
        if not np.isfinite(top):
            of_row, step = 0 * np.ones_like(row), np.nan
        elif scale is not None:
            step = float(scale)
            with np.errstate(over="ignore"):
                of_row = np.clip(np.rint(fp32(row / step)), -128, 127)
        elif top < LEAST:
            of_row, step = np.zeros_like(row), 0.0
        else:
            step = fp32(top / 127)
            of_row = np.rint(fp32(row * fp32(127 / top)))
        codes.append(of_row.astype(np.int8))
        scales.append(step)
    return torch.from_numpy(np.array(codes).reshape(x.shape)), torch.tensor(scales, dtype=torch.float32)


def product_of(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What ``scaled_linear`` gives for codes [M, K]."""
    sums = codes.cpu().numpy().astype(np.int64) @ weight.cpu().numpy().astype(np.int64).T
    assert np.abs(sums).max(initial=0) < 2**31
    out = fp32(fp32(fp32(sums) * numbers(weight_scale)) * numbers(scale)[:, None])
    if bias is not None:
        out = fp32(out + numbers(bias))
    return torch.from_numpy(out.astype(np.float32)).to(dtype)


E4M3 = torch.float8_e4m3fn
_VALUES = np.array(
    [(code & 7) * 2.0**-9 for code in range(8)] + [(8 + code % 8) * 2.0 ** (code // 8 - 10) for code in range(8, 127)]
)
"""Of the codes without a sign, 0 to 126."""
LEAST_E4M3 = 2.0**-117


def e4m3(x: np.ndarray) -> np.ndarray:
    """The bits of the codes nearest to numbers, of two the even one, and of larger numbers the largest."""
    magnitude = np.minimum(np.abs(x), 448.0)
    above = np.clip(np.searchsorted(_VALUES, magnitude), 1, 126)
    to_below, to_above = magnitude - _VALUES[above - 1], _VALUES[above] - magnitude
    is_below = (to_below < to_above) | ((to_below == to_above) & (above % 2 == 1))
    return (np.where(is_below, above - 1, above) | np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def e4m3_of(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    group: int | None = None,
    step_of: Callable[[np.ndarray], np.ndarray] = lambda top: fp32(top / 448),
    divide: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda x, step: fp32(x / step),
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``quantise`` gives for x [M, K] in e4m3; other ``step_of`` and ``divide`` are other formulas."""
    numbered, length = numbers(x), x.shape[1]
    codes, scales = np.zeros(x.shape, np.uint8), []
    for start in range(0, max(length, 1), group or max(length, 1)):
        part = numbered[:, start : start + (group or length)]
        top = np.abs(part).max(1, initial=0.0, keepdims=True)
        if scale is not None:
            step = np.full_like(top, float(scale))
        else:
            step = np.where(top < LEAST_E4M3, 1.0, step_of(np.where(np.isfinite(top), top, 1.0)))
        with np.errstate(over="ignore", invalid="ignore"):
            of_part = e4m3(np.nan_to_num(divide(part, step)))
        zeros = ~np.isfinite(top) | ((top < LEAST_E4M3) & (scale is None))
        codes[:, start : start + part.shape[1]] = np.where(zeros, 0, of_part)
        scales.append(np.where(np.isfinite(top), step, np.nan)[:, 0])
    found = torch.from_numpy(np.stack(scales, 1)).float()
    return torch.from_numpy(codes).view(E4M3), found[:, 0] if group is None else found


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of fp32 numbers, rounded to fp32 once: the product is exact in float64, and the sum is rounded to the
    neighbour whose last bit is 1, so that it tells on which side of a tie it was.
    """
    product = a * b
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    is_even = total.view(np.int64) % 2 == 0
    return fp32(np.where((error != 0) & is_even, odd, total))


def exact_sum(q: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Of products of codes' values [M, K] and [N, K], rounded to fp32."""
    return fp32(q @ w.T)


def hopper_sum(q: np.ndarray, w: np.ndarray, fraction: int = 13, k_step: int = 32) -> np.ndarray:
    """The same as wgmma adds them: each step of K and the sum so far are cut to ``fraction`` bits behind the largest
    exponent, and the sum of them behind its own.
    """

    def exponent(x, least):
        return np.where(x == 0, -200, np.maximum(np.frexp(x)[1] - 1, least))

    def cut(x, fraction, exponent):
        return np.ldexp(np.trunc(np.ldexp(x, fraction - exponent)), exponent - fraction)

    c = np.zeros((len(q), len(w)))
    for start in range(0, q.shape[1], k_step):
        a, b = q[:, None, start : start + k_step], w[None, :, start : start + k_step]
        terms = np.concatenate([a * b, c[..., None]], -1)
        of_products = np.where(a * b == 0, -200, exponent(a, -6) + exponent(b, -6))
        exponents = np.concatenate([of_products, exponent(c, -126)[..., None]], -1)
        total = cut(terms, fraction, exponents.max(-1, keepdims=True)).sum(-1)
        c = cut(total, fraction, exponent(total, -1000))
    return c


def e4m3_product(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    sum_of: Callable[[np.ndarray, np.ndarray], np.ndarray],
    promote: int = 128,
    add: Callable[..., np.ndarray] = lambda sums, s, t, total: fma(fp32(s * t), sums, total),
    finish: Callable[..., np.ndarray] = lambda total, s, t: fp32(fp32(total * s) * t),
    shifted: int = 0,
) -> torch.Tensor:
    """What ``scaled_linear`` gives for codes of e4m3 [M, K]; the last four arguments are mistakes that one may make:
    another promotion, other orders of scales, and those of another group.
    """
    q, w, (n, k) = numbers(codes), numbers(weight), weight.shape
    s, t, in_blocks = numbers(scale), numbers(weight_scale), weight_scale.dim() == 2
    total = np.zeros((len(q), n))
    for start in range(0, k, promote):
        sums = sum_of(q[:, start : start + promote], w[:, start : start + promote])
        if in_blocks:
            group = min(start // 128 + shifted, s.shape[1] - 1)
            total = add(sums, s[:, group, None], t[np.arange(n) // 128, group][None], total)
        else:
            total = fp32(total + sums)
    if not in_blocks:
        total = finish(total, s[:, None], t[None])
    if bias is not None:
        total = fp32(total + numbers(bias))
    return torch.from_numpy(total.astype(np.float32)).to(dtype)
