"""The norms of heads and their rotation in one kernel, in Triton's interpreter, on the CPU."""

import pytest
import torch

from tests.assertions import assert_near, assert_same_bits
from vllm_batch_invariant.ops.norm import cuda as norm
from vllm_batch_invariant.ops.norm_rotary import cuda as norm_rotary
from vllm_batch_invariant.ops.norm_rotary import reference as exact_rotary

EPS = 1e-6
HALF = torch.float16
"""The interpreter truncates to bf16."""


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
