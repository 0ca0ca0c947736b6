"""The norms of heads and their rotation in one kernel, on a GPU, against vLLM's two."""

import pytest
import torch

from tests.assertions import assert_near, assert_same_bits
from tests.ops.linear.cases import draw
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops import kv_cache
from vllm_batch_invariant.ops.common.kv_cache import E4M3, CacheSlots
from vllm_batch_invariant.ops.norm import rms_norm
from vllm_batch_invariant.ops.norm_rotary import Sections, norm_rotary, reference


def heads_to_turn(tokens, heads, kv_heads, size, dtype):
    """qkv, positions, both weights and a cache of cosines and sines."""
    qkv = draw(tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
    weights = [draw(size, dtype=dtype, seed=seed) for seed in (1, 2)]
    positions = torch.arange(tokens, device="cuda") * 7919 % 4096
    exponents = torch.arange(0, size, 2, device="cuda").float() / size
    angles = torch.arange(4096, device="cuda").float()[:, None] / 1e6**exponents
    return qkv, positions, *weights, torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(32, 8, 128), (14, 2, 64), (3, 1, 256), (32, 4, 128)])
def test_norm_and_rotation_in_one_have_the_bits_of_the_norm_and_then_of_vllms_kernel(heads, kv_heads, size, dtype):
    rotary = pytest.importorskip("vllm._custom_ops").rotary_embedding
    qkv, positions, *weights, cache = heads_to_turn(1000, heads, kv_heads, size, dtype)
    turned = norm_rotary(qkv, positions, *weights, cache, 1e-6, heads, kv_heads)
    views = [part.unflatten(1, (-1, size)) for part in qkv.split([heads * size, kv_heads * size, kv_heads * size], 1)]
    apart = [rms_norm(view, weight, 1e-6).flatten(1) for view, weight in zip(views, weights, strict=False)]
    rotary(positions, *apart, size, cache, True)
    for out, expected, view, weight in zip(turned, apart, views, weights, strict=False):
        assert_same_bits(out, expected)
        exact = reference.norm_rotary(view, positions, weight, cache, 1e-6)
        assert_near(out.view_as(view), exact, factor=2)
    for rows in (1, 2, 3, 64, 999):
        part = norm_rotary(qkv[1000 - rows :], positions[1000 - rows :], *weights, cache, 1e-6, heads, kv_heads)
        for out, whole in zip(part, turned, strict=True):
            assert_same_bits(out, whole[1000 - rows :], f"{rows} rows")
    # The check can fail: a rotation of bf16 products is another.
    cos, sin = cache[positions][:, None].chunk(2, dim=-1)
    first, second = rms_norm(views[0], weights[0], 1e-6).chunk(2, dim=-1)
    rounded = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(1)
    assert not torch.equal(rounded, turned[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(32, 8, 128), (14, 2, 64), (3, 1, 256), (28, 4, 128)])
def test_a_rotation_without_norms_has_the_bits_of_vllms_kernel_by_one_position_and_by_three(
    heads, kv_heads, size, dtype
):
    rotary = pytest.importorskip("vllm._custom_ops").rotary_embedding
    qkv, positions, *_, cache = heads_to_turn(1000, heads, kv_heads, size, dtype)
    three = torch.stack((positions, positions.flip(0), positions.roll(7)))
    sizes = size // 8, 3 * size // 16, 3 * size // 16
    page, slots = 16, torch.randperm(1200, device="cuda")[:1000]
    for sections in (None, Sections(*sizes), Sections(*sizes, interleaved=True)):
        given = positions if sections is None else three
        queries, keys = (
            part.contiguous() for part in qkv.split([heads * size, kv_heads * size, kv_heads * size], 1)[:2]
        )
        rows, angles = given, cache
        if sections is not None:
            picked = three[sections.rows().cuda()].T
            angles = torch.cat([half.gather(0, picked) for half in cache.chunk(2, -1)], -1).contiguous()
            rows = torch.arange(1000, device="cuda")
        rotary(rows, queries, keys, size, angles, True)
        ours = norm_rotary(qkv, given, None, None, cache, 0.0, heads, kv_heads, sections=sections)
        for out, expected in zip(ours, (queries, keys), strict=True):
            assert_same_bits(out, expected, str(sections))
        kept = torch.zeros(1200 // page, kv_heads, page, 2 * size, dtype=dtype, device="cuda")
        made, _ = norm_rotary(
            qkv, given, None, None, cache, 0.0, heads, kv_heads, CacheSlots(*kept.chunk(2, -1), slots), sections
        )
        assert_same_bits(made, queries)
        written = kept[slots // page, :, slots % page]
        assert_same_bits(written[..., :size].flatten(1), keys)
        assert_same_bits(written[..., size:].flatten(1), qkv[:, -kv_heads * size :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "page"), [(32, 8, 128, 64), (14, 2, 64, 16), (3, 1, 256, 16)])
def test_a_cache_gets_the_bits_of_vllms_three_kernels(heads, kv_heads, size, page, dtype):
    write = pytest.importorskip("vllm.v1.attention.ops.triton_reshape_and_cache_flash").triton_reshape_and_cache_flash
    qkv, *rest = heads_to_turn(1000, heads, kv_heads, size, dtype)
    slots = torch.randperm(2000, device="cuda")[:990]
    slots[::7] = -1
    shape = (2000 // page + 1, kv_heads, page, 2 * size)
    theirs, ours, from_memory = (draw(*shape, dtype=dtype, seed=9) for _ in range(3))
    queries, keys = norm_rotary(qkv, *rest, 1e-6, heads, kv_heads)
    heads_of = [part[:990].unflatten(1, (-1, size)) for part in (keys, qkv[:, -kv_heads * size :])]
    scale = torch.ones((), device="cuda")
    write(*heads_of, *(cache.transpose(1, 2) for cache in theirs.chunk(2, -1)), slots, "auto", scale, scale)
    made, none = norm_rotary(qkv, *rest, 1e-6, heads, kv_heads, CacheSlots(*ours.chunk(2, -1), slots))
    assert none is None
    assert_same_bits(made, queries)
    assert_same_bits(ours, theirs)
    assert not torch.equal(ours, from_memory)


@pytest.mark.parametrize("of_heads", [False, True], ids=["of all", "of heads"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "page"), [(32, 8, 128, 64), (14, 2, 64, 16), (3, 1, 256, 16)])
def test_a_cache_in_fp8_gets_the_codes_that_are_written_alone(heads, kv_heads, size, page, dtype, of_heads):
    qkv, *rest = heads_to_turn(1000, heads, kv_heads, size, dtype)
    slots = torch.randperm(2000, device="cuda")[:990]
    slots[::7] = -1
    scales = torch.tensor(0.03, device="cuda"), torch.tensor([0.7], device="cuda")
    if of_heads:
        scales = torch.rand(2, kv_heads, device="cuda") + 0.01
    shape = (2000 // page + 1, kv_heads, page, 2 * size)
    caches = [torch.full(shape, 7, dtype=torch.uint8, device="cuda").view(E4M3) for _ in range(2)]
    apart, in_one = (CacheSlots(*cache.split(size, dim=-1), slots, *scales) for cache in caches)
    queries, keys = norm_rotary(qkv, *rest, 1e-6, heads, kv_heads)
    kv_cache.write(*(part.unflatten(1, (-1, size)) for part in (keys, qkv[:, -kv_heads * size :])), apart)
    made, none = norm_rotary(qkv, *rest, 1e-6, heads, kv_heads, in_one)
    assert none is None
    assert_same_bits(made, queries)
    assert_same_bits(caches[1].view(torch.uint8), caches[0].view(torch.uint8))
    assert (caches[0].view(torch.uint8) != 7).any()


def test_norm_and_rotation_refuse_what_they_would_compute_otherwise():
    qkv, positions, *weights, cache = heads_to_turn(4, 4, 2, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="does not take"):
        norm_rotary(qkv, positions, *weights, cache.float(), 1e-6, 4, 2)
    with pytest.raises(ValueError, match="does not take"):
        norm_rotary(qkv, positions[:3], *weights, cache, 1e-6, 4, 2)
    caches = torch.zeros(1, 2, 16, 128, dtype=torch.bfloat16, device="cuda").chunk(2, -1)
    for wrong in (CacheSlots(*caches, positions.int()), CacheSlots(caches[0].half(), caches[1], positions)):
        with pytest.raises(ValueError, match="does not write to"):
            norm_rotary(qkv, positions, *weights, cache, 1e-6, 4, 2, wrong)
    with pytest.raises(NotCovered, match="float32"):
        norm_rotary(qkv.float(), positions, *weights, cache, 1e-6, 4, 2)
