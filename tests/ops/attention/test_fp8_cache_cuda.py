"""A cache in e4m3 on a GPU: the bits of the same attention over the numbers of its codes, by every kernel; and of a row
alone, among others, by chunks and by prefill.
"""

import math
from dataclasses import replace

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.attention.cases import Chunk, Heads, Request, by_tokens, call_of, features, paged, with_powers_of_two
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.attention import AttentionReduction, AttentionSpec, PagedAttention, certificate
from vllm_batch_invariant.ops.attention.cuda import paged_attention
from vllm_batch_invariant.ops.attention.plan import Kernels, Planner
from vllm_batch_invariant.ops.attention.reference import paged_attention as reference_attention
from vllm_batch_invariant.ops.attention.shapes import AttentionShape
from vllm_batch_invariant.ops.common.kv_cache import E4M3

REDUCTION = AttentionReduction.of_device("cuda")
SHAPES = [
    Heads(32, 8, 128, torch.bfloat16),
    Heads(14, 2, 64, torch.bfloat16),
    Heads(6, 2, 80, torch.float16),
    Heads(4, 1, 256, torch.bfloat16),
    Heads(4, 1, 512, torch.bfloat16),
    Heads(4, 2, 64, torch.float32),
]
Scales = float | list[float]
heads_of = pytest.mark.parametrize("heads", SHAPES, ids=str)


def mixed(heads: Heads) -> list[Chunk]:
    """A prefill, a chunk and decodes, of which one is long enough for splits of two sizes."""
    ends = ((150, 150), (777, 7), (520, 1), (2600, 1), (33, 1))
    return [Chunk(Request(heads, length, seed), length - count, length) for seed, (length, count) in enumerate(ends)]


def scales_of(heads: Heads, of_heads: bool) -> tuple[Scales, Scales]:
    """Of keys and of values, no powers of two: one for all heads, or for each its own."""
    of_all = 0.013, 0.021
    return tuple([scale * (1 + head % 5) for head in range(heads.kv)] for scale in of_all) if of_heads else of_all


def coded(chunks: list[Chunk], k_scale: Scales, v_scale: Scales, page_size: int = 64, **spec: object) -> PagedAttention:
    """A call on the GPU over codes that lie as an engine's, keys and values side by side; the rest is NaN."""
    size = chunks[0].request.heads.size
    tensors = [tensor.cuda() for tensor in paged(chunks, page_size, filler=math.nan)]
    call = call_of(tuple(tensors), REDUCTION, **{"scale": size**-0.5} | spec)
    cache = call.cache.coded(k_scale, v_scale)
    together = torch.cat([cache.keys.view(torch.uint8), cache.values.view(torch.uint8)], -1).view(E4M3)
    keys, values = together.split(size, dim=-1)
    return replace(call, cache=replace(cache, keys=keys, values=values))


def coded_by_tokens(chunks: list[Chunk], page_size: int = 64, **spec: object) -> PagedAttention:
    """The same with a scale a token and head behind its keys and one behind its values; what is not written is NaN."""
    size = chunks[0].request.heads.size
    tensors = [tensor.cuda() for tensor in paged(chunks, page_size, filler=math.nan)]
    call = call_of(tuple(tensors), REDUCTION, **{"scale": size**-0.5} | spec)
    cache = by_tokens(call.cache)
    parts = (cache.keys, cache.k_scale), (cache.values, cache.v_scale)
    sides = [torch.cat([codes.view(torch.uint8), scale[..., None].view(torch.uint8)], -1) for codes, scale in parts]
    halves = torch.cat(sides, -1).split(size + 4, dim=-1)
    keys, values = (half[..., :size].view(E4M3) for half in halves)
    k_scale, v_scale = (half[..., size:].view(torch.float32)[..., 0] for half in halves)
    return replace(call, cache=replace(cache, keys=keys, values=values, k_scale=k_scale, v_scale=v_scale))


Factor = float | torch.Tensor


def upcast(call: PagedAttention, k_factor: Factor = 1.0, v_factor: Factor = 1.0) -> PagedAttention:
    """The same over the numbers of its codes times these factors, which are exact in the query's dtype."""
    cache, size = call.cache, call.query.shape[2]
    pairs = (cache.keys, k_factor), (cache.values, v_factor)
    numbers = torch.cat([(one.float() * factor).to(call.query.dtype) for one, factor in pairs], -1)
    keys, values = numbers.split(size, dim=-1)
    return replace(call, cache=replace(cache, keys=keys, values=values, k_scale=None, v_scale=None))


def attend(call: PagedAttention, kernels: Kernels | None = None) -> torch.Tensor:
    """By the Triton kernel, whatever the cache holds and the call is; or by other kernels."""
    out = torch.full_like(call.query, math.nan)
    tokens, keys = len(call.query), call.cache.block_table.numel() * call.cache.page_size
    planner = Planner(
        AttentionShape.of(call), call.query.device, len(call.seq_lens), tokens, keys, kernels=kernels or Kernels(False)
    )
    paged_attention(call, out, planner.plan(call.query_start_loc, call.seq_lens, tokens, tokens))
    return out


@heads_of
@features
def test_codes_with_scales_of_1_have_the_bits_of_their_numbers(heads, options):
    if heads.query != 4:
        options = {name: value for name, value in options.items() if name not in ("alibi_slopes", "sinks")}
    call = coded(mixed(heads), 1.0, 1.0, **options)
    assert_same_bits(attend(call), attend(upcast(call)), "codes")


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("heads", SHAPES[:2], ids=str)
def test_codes_have_the_bits_of_their_numbers_whatever_kernel_serves_either(heads, page_size):
    call = coded(mixed(heads), 1.0, 1.0, page_size)
    expected = attend(call)
    for one in (call, upcast(call)):
        for kernels in Kernels.candidates(AttentionShape.of(one), one.query.device):
            assert_same_bits(attend(one, kernels), expected, f"{kernels}, {one.cache.keys.dtype}")


@heads_of
def test_codes_with_powers_of_two_have_the_bits_of_numbers_times_them(heads):
    call = coded(mixed(heads), 0.25, 8.0)
    got = attend(call)
    assert_same_bits(got, attend(upcast(call, 0.25, 8.0)), "codes")
    for wrong in ((8.0, 0.25), (1.0, 8.0), (0.25, 1.0), (0.25, 0.25)):
        assert not torch.equal(got, attend(upcast(call, *wrong))), wrong


@heads_of
def test_a_head_with_scales_of_its_own_has_the_bits_of_these_for_all(heads):
    scales, group = scales_of(heads, of_heads=True), heads.query // heads.kv
    call = coded(mixed(heads), *scales)
    for kernels in Kernels.candidates(AttentionShape.of(call), call.query.device):
        got = attend(call, kernels)
        for head, of_head in enumerate(zip(*scales, strict=True)):
            rows = slice(head * group, (head + 1) * group)
            for_all = attend(coded(mixed(heads), *of_head), kernels)
            assert_same_bits(got[:, rows], for_all[:, rows], f"{kernels}, head {head}")
            assert heads.kv == 1 or not torch.equal(got, for_all), "of the other heads"


@pytest.mark.parametrize("of_heads", [False, True], ids=["of all", "of heads"])
@heads_of
def test_a_row_has_the_same_bits_alone_among_others_by_chunks_and_by_decode(heads, of_heads):
    request, scales = Request(heads, 2600, 3), scales_of(heads, of_heads)
    newest = attend(coded([Chunk(request, 2000, 2600)], *scales))
    for count in (1, 2, 7, 64, 200):
        chunk = Chunk(request, 2600 - count, 2600)
        assert torch.equal(attend(coded([chunk], *scales)), newest[-count:]), count
        assert torch.equal(attend(coded([*mixed(heads), chunk], *scales))[-count:], newest[-count:]), count
        assert torch.equal(attend(coded([chunk], *scales, page_size=16)), newest[-count:]), count
        for kernels in Kernels.candidates(AttentionShape.of(coded([chunk], *scales)), newest.device):
            assert torch.equal(attend(coded([chunk], *scales), kernels), newest[-count:]), f"{count}, {kernels}"


OF_TOKENS = [heads for heads in SHAPES if heads.dtype != torch.float16]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 300, "logits_soft_cap": 2.0}], ids=str)
@pytest.mark.parametrize("heads", OF_TOKENS, ids=str)
def test_tokens_with_powers_of_two_have_the_bits_of_numbers_times_them(heads, options):
    """With slopes of 0, which have scores rounded before the largest is taken away, as scales of tokens have."""
    options = {"alibi_slopes": torch.zeros(heads.query)} | options
    call = coded_by_tokens(with_powers_of_two(mixed(heads)), **options)
    cache = call.cache
    got = attend(call)
    assert_same_bits(got, attend(upcast(call, cache.k_scale[..., None], cache.v_scale[..., None])), "codes")
    exchanged = replace(cache, k_scale=cache.v_scale, v_scale=cache.k_scale)
    assert not torch.equal(got, attend(replace(call, cache=exchanged)))


@pytest.mark.parametrize("heads", OF_TOKENS, ids=str)
def test_scales_of_tokens_leave_a_row_its_bits_by_chunks_and_by_decode(heads):
    request = Request(heads, 2600, 3)
    newest = attend(coded_by_tokens([Chunk(request, 2000, 2600)]))
    for count in (1, 2, 7, 64, 200):
        chunk = Chunk(request, 2600 - count, 2600)
        call = coded_by_tokens([chunk])
        assert torch.equal(attend(coded_by_tokens([*mixed(heads), chunk]))[-count:], newest[-count:]), count
        assert torch.equal(attend(coded_by_tokens([chunk], page_size=16)), newest[-count:]), count
        for kernels in Kernels.candidates(AttentionShape.of(call), newest.device):
            assert not kernels.sm90
            assert torch.equal(attend(call, kernels), newest[-count:]), f"{count}, {kernels}"


@pytest.mark.parametrize("heads", OF_TOKENS, ids=str)
def test_scales_of_tokens_are_near_float64(heads):
    """As below: each weight is rounded behind its value's scale, and without for the sum that divides."""
    call = coded_by_tokens(mixed(heads))
    expected, got = in_float64(call), attend(call).double()
    sizes = (call.cache.values.view(torch.uint8) & 127).view(E4M3)
    weighed = in_float64(replace(call, cache=replace(call.cache, values=sizes)))  # sum(w |v|)
    rounding, fp32 = torch.finfo(heads.dtype).eps / 2, 2**-12 if heads.dtype.itemsize == 2 else 2**-16
    bound = rounding * (weighed + 2 * expected.abs()) + fp32 * weighed
    worst = ((got - expected).abs() / bound).max()
    assert worst <= 1, f"{worst:.2f} of the bound"


def test_scales_of_tokens_are_refused_in_fp16():
    with pytest.raises(NotCovered, match="one scale a token and head in fp16"):
        attend(coded_by_tokens(mixed(Heads(6, 2, 80, torch.float16))))


def in_float64(call: PagedAttention) -> torch.Tensor:
    out = torch.empty_like(call.query, dtype=torch.float64)
    reference_attention(call, out, torch.float64)
    return out


@pytest.mark.parametrize("of_heads", [False, True], ids=["of all", "of heads"])
@heads_of
def test_any_scales_are_near_float64(heads, of_heads):
    """A weight w is rounded before it meets its value v and the sum that divides: with u half a step of the dtype at 1
    that moves a result o by at most u sum(w |v - o|), and its own rounding by u |o|. Dots, powers and sums in fp32 move
    weights by 2^-12 at most, where tensor cores add; else by 2^-16.
    """
    call = coded(mixed(heads), *scales_of(heads, of_heads))
    cache = call.cache
    expected, got = in_float64(call), attend(call).double()
    sizes = (cache.values.view(torch.uint8) & 127).view(E4M3)
    weighed = in_float64(replace(call, cache=replace(cache, values=sizes)))  # sum(w |v|)
    rounding, fp32 = torch.finfo(heads.dtype).eps / 2, 2**-12 if heads.dtype.itemsize == 2 else 2**-16
    bound = rounding * (weighed + 2 * expected.abs()) + fp32 * weighed
    worst = ((got - expected).abs() / bound).max()
    assert worst <= 1, f"{worst:.2f} of the bound"
    for wrong in ({"k_scale": 1.05 * cache.k_scale}, {"v_scale": 1.02 * cache.v_scale}):
        other = attend(replace(call, cache=replace(cache, **wrong))).double()
        assert ((other - expected).abs() > bound).double().mean() > 0.1, wrong


def test_a_graph_reads_the_scales_that_come_later():
    call = coded(mixed(SHAPES[0]), 0.25, 8.0)
    tokens, keys = len(call.query), call.cache.block_table.numel() * call.cache.page_size
    planner = Planner(AttentionShape.of(call), call.query.device, len(call.seq_lens), tokens, keys)
    plan, out = planner.plan(call.query_start_loc, call.seq_lens, tokens, tokens), torch.empty_like(call.query)
    paged_attention(call, out, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(call, out, plan)
    call.cache.k_scale.fill_(0.5)
    call.cache.v_scale.fill_(2.0)
    planner.plan(call.query_start_loc, call.seq_lens, tokens, tokens)
    graph.replay()
    assert torch.equal(out, attend(upcast(call, 0.5, 2.0)))


@pytest.mark.parametrize("of_tokens", [False, True], ids=["one scale", "of tokens"])
@pytest.mark.parametrize("heads", SHAPES[:2], ids=str)
def test_a_start_certifies_layers_over_codes(heads, of_tokens):
    shape = AttentionShape(heads.query, heads.kv, heads.size, heads.dtype, REDUCTION, E4M3, of_tokens)
    device = torch.device("cuda", torch.cuda.current_device())
    data = [make(shape, device, 64) for make in (certificate.by_scores, certificate.by_values)]
    assert all(one.cache.holds_codes and one.cache.scales_of_tokens == of_tokens for one in data)
    layers = [AttentionSpec(1.0), AttentionSpec(1.0, sliding_window=100)]
    candidates = [*Kernels.candidates(shape, device)]
    assert candidates[0].sm90 == (torch.cuda.get_device_capability() == (9, 0) and not of_tokens)
    for kernels in candidates:
        assert isinstance(certificate.compare(kernels, shape, data, layers), int), str(kernels)
