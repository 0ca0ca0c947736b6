"""A cache in e4m3 on a CPU: the bits of the same attention over the numbers of its codes."""

import math
from dataclasses import replace

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.attention.cases import Chunk, Heads, Request, by_tokens, call_of, features, paged, with_powers_of_two
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.attention import AttentionReduction, PagedAttention, attend
from vllm_batch_invariant.ops.attention.reference import paged_attention as reference_attention
from vllm_batch_invariant.ops.common.kv_cache import E4M3, codes_of

HEADS = Heads(4, 2, 64, torch.bfloat16)
MIXED = [Chunk(Request(HEADS, 300, 1), 250, 300), Chunk(Request(HEADS, 520, 2), 519, 520)]
MIXED.append(Chunk(Request(HEADS, 20, 3), 0, 20))
REDUCTION = AttentionReduction()


Scales = float | list[float] | None
OF_ALL, OF_HEADS, OF_TOKENS = (0.013, 0.021), ([0.013, 0.4], [0.021, 0.0007]), (None, None)
"""Of keys and of values, no powers of two; the last are of what they scale."""
kinds = pytest.mark.parametrize("scales", [OF_ALL, OF_HEADS, OF_TOKENS], ids=["of all", "of heads", "of tokens"])


def coded(chunks: list[Chunk], k_scale: Scales, v_scale: Scales, **spec: object) -> PagedAttention:
    """A call over codes, each with a scale of its token where None is given; what no chunk has written is NaN."""
    call = call_of(paged(chunks, filler=math.nan), REDUCTION, **{"scale": HEADS.size**-0.5} | spec)
    if k_scale is not None:
        return replace(call, cache=call.cache.coded(k_scale, v_scale))
    return replace(call, cache=by_tokens(call.cache))


def upcast(
    call: PagedAttention, k_factor: float | torch.Tensor = 1.0, v_factor: float | torch.Tensor = 1.0
) -> PagedAttention:
    """The same over the numbers of its codes times these factors, exactly, in the query's dtype."""
    cache = call.cache
    numbers = [
        (one.float() * factor).to(call.query.dtype)
        for one, factor in ((cache.keys, k_factor), (cache.values, v_factor))
    ]
    return replace(call, cache=replace(cache, keys=numbers[0], values=numbers[1], k_scale=None, v_scale=None))


@features
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_with_scales_of_1_have_the_bits_of_their_numbers(options, dtype):
    chunks = [replace(one, request=Request(replace(HEADS, dtype=dtype), one.stop, 1)) for one in MIXED]
    call = coded(chunks, 1.0, 1.0, **options)
    assert call.cache.keys.dtype == E4M3
    assert_same_bits(attend(call), attend(upcast(call)), "codes")


@pytest.mark.parametrize("size", [256, 512])
def test_codes_of_large_heads_have_the_bits_of_their_numbers(size):
    chunks = [replace(one, request=Request(replace(HEADS, size=size), one.stop, 1)) for one in MIXED]
    call = coded(chunks, 0.25, 8.0, scale=size**-0.5)
    assert_same_bits(attend(call), attend(upcast(call, 0.25, 8.0)), "codes")
    assert not torch.equal(attend(call), attend(upcast(call, 8.0, 0.25)))


@features
def test_codes_with_powers_of_two_have_the_bits_of_numbers_times_them(options):
    """What tells the two scales apart, and says that a sum meets neither: a power of two rounds nothing."""
    call = coded(MIXED, 0.25, 8.0, **options)
    got = attend(call)
    assert_same_bits(got, attend(upcast(call, 0.25, 8.0)), "codes")
    for wrong in ((8.0, 0.25), (1.0, 8.0), (0.25, 1.0), (0.25, 0.25)):
        assert not torch.equal(got, attend(upcast(call, *wrong))), wrong
    with_codes = replace(call, query=codes_of(call.query, torch.ones(())).to(call.query.dtype))
    assert not torch.equal(got, attend(with_codes)), "with queries in e4m3"


@features
def test_a_head_with_scales_of_its_own_has_the_bits_of_these_for_all(options):
    got, group = attend(coded(MIXED, *OF_HEADS, **options)), HEADS.query // HEADS.kv
    for head, scales in enumerate(zip(*OF_HEADS, strict=True)):
        rows = slice(head * group, (head + 1) * group)
        for_all = attend(coded(MIXED, *scales, **options))
        assert_same_bits(got[:, rows], for_all[:, rows], f"head {head}")
        others = torch.ones(HEADS.query, dtype=torch.bool)
        others[rows] = False
        assert not torch.equal(got[:, others], for_all[:, others]), "of the other head"


@features
def test_tokens_with_powers_of_two_have_the_bits_of_numbers_times_them(options):
    call = coded(with_powers_of_two(MIXED), None, None, **options)
    cache = call.cache
    written = cache.k_scale[~cache.k_scale.isnan()]
    assert len(written.unique()) > 3
    assert torch.equal(torch.exp2(torch.log2(written).round()), written)
    got = attend(call)
    assert_same_bits(got, attend(upcast(call, cache.k_scale[..., None], cache.v_scale[..., None])), "codes")
    for wrong in ({"k_scale": cache.v_scale, "v_scale": cache.k_scale}, {"k_scale": cache.k_scale.roll(1, 2)}):
        other = replace(cache, **{name: torch.where(scale.isnan(), 1.0, scale) for name, scale in wrong.items()})
        assert not torch.equal(got, attend(replace(call, cache=other))), wrong.keys()


@features
@kinds
def test_codes_with_any_scales_are_near_float64(options, scales):
    call = coded(MIXED, *scales, **options)
    expected = torch.empty_like(call.query, dtype=torch.float64)
    reference_attention(call, expected, torch.float64)
    torch.testing.assert_close(attend(call).double(), expected, rtol=2**-8, atol=1e-4)
    by_reference = attend(call, "reference")
    torch.testing.assert_close(by_reference.double(), expected, rtol=2**-8, atol=1e-4)


def test_every_code_is_read_exactly():
    codes = torch.arange(256).to(torch.uint8).view(16, 1, 1, 16).view(E4M3)
    one, table = torch.ones(()), torch.zeros(1, 1, dtype=torch.int32)
    request = Request(Heads(1, 1, 16), 1, 0)
    call = call_of(paged([Chunk(request, 0, 1)]), REDUCTION, scale=1.0)
    for values in codes.split(1):
        cache = replace(call.cache, keys=values, values=values, block_table=table, k_scale=one, v_scale=one)
        got = attend(replace(call, query=torch.zeros(1, 1, 16), cache=cache))
        if values.float().isnan().any():
            assert got.isnan().all(), "by its key"
        else:
            assert torch.equal(got.view(torch.int32), (values.float() + 0.0).view(1, 1, 16).view(torch.int32))


@kinds
@pytest.mark.parametrize("size", [1, 7, 64])
def test_chunks_equal_prefill_alone_and_among_others(size, scales):
    request = Request(HEADS, 330, 4)
    prefill = attend(coded([Chunk(request, 0, 330)], *scales))
    for start in range(max(200, 330 - 12 * size), 330, size):
        chunk = Chunk(request, start, min(start + size, 330))
        expected = prefill[chunk.start : chunk.stop]
        assert torch.equal(attend(coded([chunk], *scales)), expected), chunk.start
        beside = attend(coded([*MIXED, chunk], *scales))[-len(expected) :]
        assert torch.equal(beside, expected), chunk.start


def test_scales_are_asked_for_with_codes_and_refused_without():
    call = coded(MIXED, 1.0, 1.0)
    one, three = torch.ones(()), torch.ones(3)
    apart = torch.ones(2, 2)[:, 0]
    for wrong in ({"k_scale": None}, {"v_scale": three}, {"k_scale": one.double()}, {"k_scale": apart}):
        with pytest.raises(ValueError, match=r"must be fp32 on their device, one number or \[2\]"):
            attend(replace(call, cache=replace(call.cache, **wrong)))
    tokens = torch.ones(call.cache.keys.shape[:3])
    with pytest.raises(ValueError, match="must both be one number, one a head, or one a token"):
        attend(replace(call, cache=replace(call.cache, k_scale=tokens, v_scale=tokens.transpose(1, 2).contiguous().mT)))
    with pytest.raises(ValueError, match="must both be one number, one a head, or one a token"):
        attend(replace(call, cache=replace(call.cache, k_scale=torch.ones(2))))
    plain = upcast(call)
    with pytest.raises(ValueError, match=r"v_scale of keys and values in torch\.bfloat16 must be None"):
        attend(replace(plain, cache=replace(plain.cache, v_scale=one)))


@pytest.mark.parametrize("implementation", ["flex", "exact"])
def test_implementations_that_do_not_read_codes_refuse_them(implementation):
    with pytest.raises(NotCovered, match=f"a KV cache in fp8 by '{implementation}'"):
        attend(coded(MIXED, 1.0, 1.0), implementation)
