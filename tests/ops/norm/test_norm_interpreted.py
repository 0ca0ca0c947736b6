"""The GPU's norm kernels in Triton's interpreter, on the CPU."""

import pytest
import torch

from tests.assertions import assert_near, assert_same_bits
from vllm_batch_invariant.ops.norm import cuda as norm
from vllm_batch_invariant.ops.norm import reference as exact
from vllm_batch_invariant.ops.norm_rotary import cuda as norm_rotary
from vllm_batch_invariant.ops.norm_rotary import reference as exact_rotary

EPS = 1e-6
HALF = torch.float16
"""The interpreter truncates to bf16."""


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("length", [7, 64, 96, 777, 17_000])
def test_values_are_near_the_float64_reference_and_a_row_has_the_same_bits_alone(length, dtype):
    x, residual = (draw(19 if length < 1000 else 2, length, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = draw(length, dtype=dtype, seed=2)
    plain = norm.rms_norm(x, weight, EPS, None, None)
    assert_near(plain, exact.rms_norm(x, weight, EPS), factor=2)
    fused, summed = norm.rms_norm(x, weight, EPS, residual, 5)
    assert_near(fused, exact.rms_norm(x.double() + residual.double(), weight, EPS, 5), factor=2)
    assert_same_bits(summed, (x.float() + residual.float()).to(dtype))
    for rows in (1, len(x) - 1):
        assert_same_bits(norm.rms_norm(x[-rows:], weight, EPS, None, None), plain[-rows:])


@pytest.mark.parametrize(("length", "dtype"), [(128, HALF), (64, torch.float32), (100, HALF)])
def test_strided_heads_have_the_bits_of_packed_ones(length, dtype):
    wide = draw(5, 5 * length, dtype=dtype)
    weight = draw(length, dtype=torch.float32, seed=1)
    for heads in (wide[:, : 3 * length], wide[:, 3 * length : 4 * length]):
        view = heads.unflatten(1, (-1, length))
        expected = norm.rms_norm(view.contiguous(), weight, EPS, None, None)
        for strided in (view, view.transpose(0, 1).contiguous().transpose(0, 1), view[:, None]):
            out = norm.rms_norm(strided, weight, EPS, None, None)
            assert out.is_contiguous()
            assert_same_bits(out.reshape(expected.shape), expected)
        pair = norm.rms_norm(view, weight, EPS, view.flip(0), None)
        packed = norm.rms_norm(view.contiguous(), weight, EPS, view.flip(0).contiguous(), None)
        for part, whole in zip(pair, packed, strict=True):
            assert_same_bits(part, whole)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 2, 128), (17, 2, 64), (5, 1, 256)])
def test_norm_and_rotation_in_one_have_the_bits_of_the_norm_and_then_the_rotation(heads, kv_heads, size):
    wide = draw(3, (heads + 2 * kv_heads) * size + 8, dtype=HALF)
    qkv = wide[:, :-8]
    weights = [draw(size, dtype=HALF, seed=seed) for seed in (1, 2)]
    positions = torch.tensor([0, 31, 5])
    angles = torch.rand(32, size // 2, generator=torch.Generator().manual_seed(3)) * 6
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1).to(HALF)
    turned = norm_rotary.norm_rotary(qkv, positions, *weights, cache, EPS, heads, kv_heads)
    parts = qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)[:2]
    cos, sin = cache[positions].float()[:, None].chunk(2, dim=-1)
    for out, part, weight in zip(turned, parts, weights, strict=True):
        view = part.unflatten(1, (-1, size))
        out = out.unflatten(1, (-1, size))
        first, second = norm.rms_norm(view, weight, EPS, None, None).float().chunk(2, dim=-1)
        assert_same_bits(out, torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(HALF))
        assert_near(out, exact_rotary.norm_rotary(view, positions, weight, cache, EPS), factor=2)
