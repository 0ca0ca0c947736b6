"""The Triton kernel that writes a cache, and the conversions of codes, in Triton's interpreter."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from tests.assertions import assert_same_bits
from tests.ops.kv_cache.cases import (
    KV_HEADS,
    PAGE,
    SIZE,
    empty,
    empty_of_tokens,
    every_number,
    written,
)
from vllm_batch_invariant.ops.common.kv_cache import E4M3, CacheSlots
from vllm_batch_invariant.ops.common.triton_e4m3 import from_e4m3
from vllm_batch_invariant.ops.kv_cache import cpu, cuda


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for an A100."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=8))
    for name in ("device", "device_of"):
        monkeypatch.setattr(torch.cuda, name, lambda device: nullcontext())


@pytest.mark.parametrize("scales", [(0.3, 2.0), ([0.3, 0.07], [2.0, 1.3])], ids=["of all", "of heads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_writes_the_bytes_of_a_cpu(dtype, scales):
    key = every_number(dtype)[:: 16 if dtype.itemsize == 2 else 1]
    value, caches = key.flip(0), [empty(len(key), *scales) for _ in range(2)]
    for module, cache in zip((cuda, cpu), caches, strict=True):
        module.write(key, value, cache)
    for got, expected in zip(*map(written, caches), strict=True):
        assert_same_bits(got, expected, "codes")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_writes_the_scales_of_tokens_and_their_codes_of_a_cpu(dtype):
    key = torch.cat(
        [every_number(dtype)[:: 64 if dtype.itemsize == 2 else 1], torch.randn(60, KV_HEADS, SIZE).to(dtype)]
    )
    value, caches = key.flip(0), [empty_of_tokens(len(key)) for _ in range(2)]
    for module, cache in zip((cuda, cpu), caches, strict=True):
        cache.slots[5] = -1
        module.write(key, value, cache)
    for name in ("keys", "values"):
        got, expected = (getattr(cache, name).view(torch.uint8) for cache in caches)
        assert_same_bits(got, expected, f"codes of {name}")
    for name in ("k_scale", "v_scale"):
        got, expected = (getattr(cache, name).contiguous() for cache in caches)
        assert_same_bits(got, expected, name)


def test_numbers_and_padding():
    key, value = torch.randn(2, 5, KV_HEADS, SIZE).half()
    caches = [torch.zeros(2, 3, KV_HEADS, PAGE, SIZE, dtype=torch.float16) for _ in range(2)]
    for module, held in zip((cuda, cpu), caches, strict=True):
        module.write(key, value, CacheSlots(*held, torch.tensor([9, -1, 2, -1])))
    assert_same_bits(*caches, "numbers")


@triton.jit
def _convert(codes_ptr, out_ptr, CONVERTS_E4M3: tl.constexpr):  # noqa: N803
    offs = tl.arange(0, 256)
    numbers = from_e4m3(tl.load(codes_ptr + offs), out_ptr.dtype.element_ty, CONVERTS_E4M3)
    tl.store(out_ptr + offs, numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_is_read_exactly_without_an_instruction_for_it(dtype):
    codes, out = torch.arange(256).to(torch.uint8), torch.zeros(256, dtype=dtype)
    _convert[(1,)](codes, out, False)
    assert_same_bits(out.nan_to_num(1000.0), codes.view(E4M3).to(dtype).nan_to_num(1000.0), "numbers")
    assert out.isnan().sum() == 2
