"""The norms of heads and their rotation in one kernel, in Triton's interpreter, on the CPU."""

import pytest
import torch

from tests.assertions import assert_near, assert_same_bits
from vllm_batch_invariant.ops.common.kv_cache import E4M3, CacheSlots
from vllm_batch_invariant.ops.kv_cache import cpu as kv_cache
from vllm_batch_invariant.ops.norm import cuda as norm
from vllm_batch_invariant.ops.norm_rotary import Sections
from vllm_batch_invariant.ops.norm_rotary import cuda as norm_rotary
from vllm_batch_invariant.ops.norm_rotary import reference as exact_rotary

EPS = 1e-6
HALF = torch.float16
"""The interpreter truncates to bf16."""


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


SHAPES = [(9, 2, 128), (17, 2, 64), (5, 1, 256)]


def heads_to_turn(tokens: int, heads: int, kv_heads: int, size: int) -> tuple[torch.Tensor, ...]:
    """qkv whose tokens are apart, positions, both weights and a cache of cosines and sines."""
    qkv = draw(tokens, (heads + 2 * kv_heads) * size + 8, dtype=HALF)[:, :-8]
    weights = [draw(size, dtype=HALF, seed=seed) for seed in (1, 2)]
    angles = torch.rand(32, size // 2, generator=torch.Generator().manual_seed(3)) * 6
    positions = torch.tensor([0, 31, 5, 6, 30])[:tokens]
    return qkv, positions, *weights, torch.cat((angles.cos(), angles.sin()), dim=-1).to(HALF)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
def test_norm_and_rotation_in_one_have_the_bits_of_the_norm_and_then_the_rotation(heads, kv_heads, size):
    qkv, positions, *weights, cache = heads_to_turn(3, heads, kv_heads, size)
    turned = norm_rotary.norm_rotary(qkv, positions, *weights, cache, EPS, heads, kv_heads)
    parts = qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)[:2]
    cos, sin = cache[positions].float()[:, None].chunk(2, dim=-1)
    for out, part, weight in zip(turned, parts, weights, strict=True):
        view = part.unflatten(1, (-1, size))
        out = out.unflatten(1, (-1, size))
        first, second = norm.rms_norm(view, weight, EPS, None, None).float().chunk(2, dim=-1)
        assert_same_bits(out, torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(HALF))
        assert_near(out, exact_rotary.norm_rotary(view, positions, weight, cache, EPS), factor=2)


@pytest.mark.parametrize("interleaved", [False, True], ids=["one after the other", "interleaved"])
@pytest.mark.parametrize("has_norms", [False, True], ids=["without norms", "with norms"])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
def test_each_frequency_turns_by_its_own_of_three_positions(heads, kv_heads, size, has_norms, interleaved):
    qkv, _, *weights, cache = heads_to_turn(5, heads, kv_heads, size)
    given = weights if has_norms else (None, None)
    sections = Sections(size // 8, 3 * size // 16, 3 * size // 16, interleaved)
    rows = torch.tensor([[0, 31, 5, 6, 30, 9], [3, 31, 7, 1, 2, 9], [8, 31, 0, 4, 11, 9]])[:, :5]
    turned = norm_rotary.norm_rotary(qkv, rows, *given, cache, EPS, heads, kv_heads, sections=sections)
    of_time = norm_rotary.norm_rotary(qkv, rows[0], *given, cache, EPS, heads, kv_heads)
    parts = qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)[:2]
    for out, part, weight, other in zip(turned, parts, given, of_time, strict=True):
        view, out, other = (one.unflatten(1, (-1, size)) for one in (part, out, other))
        assert_near(out, exact_rotary.norm_rotary(view, rows, weight, cache, EPS, sections), factor=2)
        assert_same_bits(out[1], other[1], "a token of text")
        assert not torch.equal(out[0], other[0])


@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
def test_without_norms_heads_are_turned_as_they_are(heads, kv_heads, size):
    qkv, positions, *_, cache = heads_to_turn(3, heads, kv_heads, size)
    turned = norm_rotary.norm_rotary(qkv, positions, None, None, cache, EPS, heads, kv_heads)
    parts = qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)[:2]
    cos, sin = cache[positions].float()[:, None].chunk(2, dim=-1)
    for out, part in zip(turned, parts, strict=True):
        view = part.unflatten(1, (-1, size))
        first, second = view.float().chunk(2, dim=-1)
        expected = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(HALF)
        assert_same_bits(out.unflatten(1, (-1, size)), expected)
        assert_near(expected, exact_rotary.norm_rotary(view, positions, None, cache, EPS), factor=2)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
def test_keys_and_values_go_to_their_pages_and_padding_goes_nowhere(heads, kv_heads, size):
    qkv, *rest = heads_to_turn(5, heads, kv_heads, size)
    pages, page_size, slots = 3, 16, torch.tensor([47, -1, 0, 17])  # the fifth token has no slot
    both = draw(pages, kv_heads, page_size, 2 * size, dtype=HALF, seed=4)
    keys, values = both.split(size, dim=-1)
    expected = [cache.clone() for cache in (keys, values)]
    made = norm_rotary.norm_rotary(qkv, *rest, EPS, heads, kv_heads)
    for cache, rows in zip(expected, (made[1], qkv[:, -kv_heads * size :]), strict=True):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                cache[slot // page_size, :, slot % page_size] = rows[token].unflatten(0, (kv_heads, size))
    queries, none = norm_rotary.norm_rotary(qkv, *rest, EPS, heads, kv_heads, CacheSlots(keys, values, slots))
    assert none is None
    assert_same_bits(queries, made[0])
    for cache, wanted in zip((keys, values), expected, strict=True):
        assert_same_bits(cache, wanted)


@pytest.mark.parametrize("of_heads", [False, True], ids=["of all", "of heads"])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
def test_codes_of_keys_and_values_are_those_that_are_written_alone(heads, kv_heads, size, of_heads):
    qkv, *rest = heads_to_turn(5, heads, kv_heads, size)
    slots, scales = torch.tensor([47, -1, 0, 17]), (torch.tensor(0.03), torch.tensor([0.7]))
    if of_heads:
        scales = torch.rand(2, kv_heads) + 0.01
    caches = [torch.full((3, kv_heads, 16, 2 * size), 7, dtype=torch.uint8).view(E4M3) for _ in range(2)]
    of_both = [CacheSlots(*cache.split(size, dim=-1), slots, *scales) for cache in caches]
    made = norm_rotary.norm_rotary(qkv, *rest, EPS, heads, kv_heads)
    parts = made[1], qkv[:, -kv_heads * size :]
    kv_cache.write(*(part.unflatten(1, (kv_heads, size)) for part in parts), of_both[0])
    queries, none = norm_rotary.norm_rotary(qkv, *rest, EPS, heads, kv_heads, of_both[1])
    assert none is None
    assert_same_bits(queries, made[0])
    assert_same_bits(caches[1].view(torch.uint8), caches[0].view(torch.uint8))
    assert (caches[0].view(torch.uint8) != 7).any()
