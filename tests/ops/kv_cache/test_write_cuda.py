"""On a GPU a cache is written with the bytes of a CPU, and every code is read exactly."""

from dataclasses import replace

import pytest
import torch

from tests.assertions import assert_same_bits
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
from vllm_batch_invariant.ops.common.kv_cache import CacheSlots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.3, 2.0), (0.0123, 71.0), ([0.3, 0.07], [2.0, 1.3])])
def test_codes_are_those_of_a_cpu(dtype, scales):
    key = every_number(dtype)
    value = key.flip(0)
    caches = [empty(len(key), *scales, device) for device in ("cpu", "cuda")]
    for cache in caches:
        device = cache.keys.device
        kv_cache.write(key.to(device), value.to(device), cache)
    for expected, got in zip(*map(written, caches), strict=True):
        assert_same_bits(got.cpu(), expected, "codes")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_of_tokens_and_their_codes_are_those_of_a_cpu(dtype):
    key = torch.cat([every_number(dtype), torch.randn(500, KV_HEADS, SIZE).to(dtype)])
    value, caches = key.flip(0), [empty_of_tokens(len(key), device) for device in ("cpu", "cuda")]
    for cache in caches:
        kv_cache.write(key.to(cache.keys.device), value.to(cache.keys.device), cache)
    for of in (written, written_scales):
        for expected, got in zip(*map(of, caches), strict=True):
            assert_same_bits(got.cpu().contiguous(), expected.contiguous(), of.__name__)


def test_tokens_may_be_apart_and_padding_is_not_written():
    qkv = torch.randn(70, 3, KV_HEADS, SIZE, device="cuda").bfloat16()
    whole = empty(70, 0.3, 2.0, "cuda")
    slots = whole.slots.clone()
    slots[::3] = -1
    kv_cache.write(qkv[:, 1], qkv[:, 2], replace(whole, slots=slots))
    again = empty(70, 0.3, 2.0, "cuda")
    kv_cache.write(qkv[:, 1].contiguous(), qkv[:, 2].contiguous(), again)
    for got, expected in zip(written(whole), written(again), strict=True):
        kept = slots >= 0
        assert torch.equal(got[kept], expected[kept])
        assert (got[~kept] == 7).all()


def test_numbers_are_written_as_they_are():
    key, value = torch.randn(2, 5, KV_HEADS, SIZE, device="cuda").bfloat16()
    held = torch.zeros(2, 3, KV_HEADS, PAGE, SIZE, dtype=torch.bfloat16, device="cuda")
    kv_cache.write(key, value, CacheSlots(*held, torch.tensor([9, -1, 2, -1], device="cuda")))
    assert torch.equal(held[0, 2, :, 1], key[0])
    assert torch.equal(held[1, 0, :, 2], value[2])
    assert held.count_nonzero() == 4 * KV_HEADS * SIZE
