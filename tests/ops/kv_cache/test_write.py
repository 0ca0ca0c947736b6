from dataclasses import replace

import pytest
import torch

from tests.ops.kv_cache.cases import (
    KV_HEADS,
    PAGE,
    SIZE,
    empty,
    empty_of_tokens,
    every_number,
    written,
    written_scales,
)
from vllm_batch_invariant.ops import kv_cache
from vllm_batch_invariant.ops.common.kv_cache import E4M3, CacheSlots
from vllm_batch_invariant.ops.kv_cache.reference import number_of_code, scale_of_token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_the_nearest_to_the_definition(dtype):
    key = every_number(dtype)
    value = key.flip(0)
    cache = empty(len(key), 0.125, 2.0)
    kv_cache.write(key, value, cache)
    for codes, x, scale in zip(written(cache), (key, value), (0.125, 2.0), strict=True):
        got = codes.view(E4M3)
        assert torch.equal(codes == 0x7F, x.isnan()), "of either sign"
        assert not (codes == 0xFF).any()
        finite = ~x.isnan()
        assert torch.equal(got.double()[finite], number_of_code(x, scale)[finite]), "a power of two rounds nothing"
        assert torch.equal(got.float().signbit()[finite], x.signbit()[finite])


def test_a_scale_divides_by_one_rounding():
    x = torch.randn(64, KV_HEADS, SIZE) * 30
    cache = empty(64, 0.3, 0.7)
    kv_cache.write(x, x, cache)
    for codes, scale in zip(written(cache), (cache.k_scale, cache.v_scale), strict=True):
        expected = number_of_code((x / scale).double(), 1.0)
        assert torch.equal(codes.view(E4M3).double(), expected)
        assert not torch.equal(codes.view(E4M3).double(), number_of_code(x, 1.0))


def test_a_head_is_divided_by_a_scale_of_its_own():
    x = torch.randn(64, KV_HEADS, SIZE) * 30
    scales = [0.3, 1.7], [0.7, 0.01]
    cache = empty(64, *scales)
    kv_cache.write(x, x, cache)
    for head, of_head in enumerate(zip(*scales, strict=True)):
        for_all = empty(64, *of_head)
        kv_cache.write(x, x, for_all)
        for codes, expected in zip(written(cache), written(for_all), strict=True):
            assert torch.equal(codes[:, head], expected[:, head])
            assert not torch.equal(codes[:, 1 - head], expected[:, 1 - head])


def test_a_token_has_in_each_head_the_scale_of_its_largest_number():
    """Of none that is below 1e-6; a token of zeros has that."""
    key = torch.randn(64, KV_HEADS, SIZE) * torch.logspace(-9, 3, 64)[:, None, None]
    value = key.flip(0).bfloat16().float()
    value[3] = 0.0
    cache = empty_of_tokens(64)
    kv_cache.write(key, value, cache)
    for codes, scales, x in zip(written(cache), written_scales(cache), (key, value), strict=True):
        expected = scale_of_token(x)
        assert ((scales.double() - expected).abs() <= 2**-24 * expected).all(), "by one rounding"
        numbers = (x / scales[..., None]).double()
        assert torch.equal(codes.view(E4M3).double(), number_of_code(numbers, 1.0))
        normal = expected > 1e-6
        assert torch.equal(codes.view(E4M3).float().abs().amax(-1)[normal], torch.full_like(scales[normal], 448.0))
    assert (scales[3] == torch.tensor(1e-6)).all()
    others = empty_of_tokens(64)
    kv_cache.write(key[:1], value[:1], replace(others, slots=cache.slots[:1]))
    for alone, among in zip(written(others), written(cache), strict=True):
        assert torch.equal(alone[0], among[0])
        assert (alone[1:] == 7).all(), "no other slot"


def test_a_number_that_is_none_leaves_the_scale_of_its_token():
    x = torch.randn(2, KV_HEADS, SIZE)
    with_nan = x.clone()
    smallest = int(x[0, 0].abs().argmin())
    with_nan[0, 0, smallest] = -torch.nan
    caches = [empty_of_tokens(2) for _ in range(2)]
    for cache, numbers in zip(caches, (x, with_nan), strict=True):
        kv_cache.write(numbers, numbers, cache)
    assert torch.equal(written_scales(caches[0])[0], written_scales(caches[1])[0])
    different = (written(caches[0])[0] != written(caches[1])[0]).nonzero()
    assert different.tolist() == [[0, 0, smallest]]
    assert written(caches[1])[0][0, 0, smallest] == 0x7F


def test_padding_is_not_written_and_numbers_go_as_they_are():
    key, value = torch.randn(2, 5, KV_HEADS, SIZE).bfloat16()
    slots = torch.tensor([9, -1, 2, -1])
    codes = empty(12, 1.0, 1.0)
    kv_cache.write(key, value, CacheSlots(codes.keys, codes.values, slots, codes.k_scale, codes.v_scale))
    untouched = torch.ones(codes.keys.shape[0] * PAGE, dtype=torch.bool)
    untouched[[9, 2]] = False
    for held in (codes.keys, codes.values):
        rows = held.view(torch.uint8).transpose(1, 2).reshape(-1, KV_HEADS, SIZE)
        assert (rows[untouched] == 7).all()
        assert not (rows[~untouched] == 7).all()
    held = torch.zeros(2, 3, KV_HEADS, PAGE, SIZE, dtype=torch.bfloat16)
    kv_cache.write(key, value, CacheSlots(*held, slots))
    assert torch.equal(held[0, 2, :, 1], key[0])
    assert torch.equal(held[1, 0, :, 2], value[2])
    assert held.count_nonzero() == 4 * KV_HEADS * SIZE


@pytest.mark.parametrize("rows", [3, 3000], ids=["one thread", "many"])
def test_a_slot_outside_the_cache_is_an_error_and_not_written(rows: int) -> None:
    whole = torch.zeros(2, 5, KV_HEADS, PAGE, SIZE)
    held, key = whole[:, :3], torch.ones(rows, KV_HEADS, SIZE)
    slots = torch.full((rows,), -1)
    slots[rows // 2] = 3 * PAGE
    with pytest.raises(IndexError):
        kv_cache.write(key, key, CacheSlots(*held, slots))
    assert not whole.any()
    slots[rows // 2] -= 1
    kv_cache.write(key, key, CacheSlots(*held, slots))
    assert held[:, 2, :, -1].all()


def test_scales_are_asked_for_with_codes_and_refused_without():
    x, codes = torch.randn(3, KV_HEADS, SIZE), empty(3, 1.0, 1.0)
    numbers = torch.zeros(2, 3, KV_HEADS, PAGE, SIZE)
    for wrong in (
        CacheSlots(codes.keys, codes.values, codes.slots),
        CacheSlots(codes.keys, codes.values, codes.slots, torch.ones(3), torch.ones(3)),
        CacheSlots(codes.keys, codes.values, codes.slots, torch.ones(2), torch.ones(1)),
        CacheSlots(codes.keys, codes.values, codes.slots, *torch.ones(2, *codes.keys.shape[:2])),
        CacheSlots(*numbers, codes.slots, codes.k_scale, codes.v_scale),
    ):
        with pytest.raises(ValueError, match="no cache is written"):
            kv_cache.write(x, x, wrong)
