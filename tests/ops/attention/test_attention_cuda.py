"""Attention on a GPU: a token has the same bits by prefill, by a chunk of any size and by decode, in any batch."""

import math
from dataclasses import replace

import pytest
import torch

from tests.ops.attention.cases import Chunk, Heads, Request, exact, features, paged
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.attention import AttentionReduction, paged_attention

SMALL = Heads(4, 2, 64, torch.bfloat16)
GROUP_OF_SEVEN = Heads(14, 2, 64, torch.bfloat16)
GROUP_OF_FOUR = Heads(32, 8, 128, torch.bfloat16)
TOLERANCE = {torch.float32: (2e-6, 8e-6), torch.bfloat16: (2**-7, 8e-3), torch.float16: (2**-10, 1e-3)}
"""Relative and absolute: one rounding of each weight and one of the result, fp32 sums of terms of size one."""

PAGE_SIZES = {"triton": (16, 1, 7, 64, 512), "flex": (64, 128, 512)}
"""Keys in a page, the usual number first."""

by_both = pytest.mark.parametrize("implementation", PAGE_SIZES)


def attend(
    chunks: list[Chunk],
    reduction: AttentionReduction | None = None,
    page_size: int | None = None,
    placement: int = 0,
    filler: float = math.nan,
    implementation: str = "triton",
    **features: object,
) -> list[torch.Tensor]:
    """The output rows of each chunk, computed together; what is not written is NaN."""
    reduction = reduction or AttentionReduction.of_device("cuda", implementation)
    page_size = page_size or PAGE_SIZES[implementation][0]
    tensors = [tensor.cuda() for tensor in paged(chunks, page_size, placement, filler)]
    scale = 1 / math.sqrt(chunks[0].request.heads.size)
    out = torch.full_like(tensors[0], math.nan)
    paged_attention(*tensors, scale=scale, reduction=reduction, implementation=implementation, out=out, **features)
    return list(out.split([chunk.stop - chunk.start for chunk in chunks]))


def whole(request: Request) -> Chunk:
    return Chunk(request, 0, request.length)


def newest(request: Request, count: int = 1) -> Chunk:
    return Chunk(request, request.length - count, request.length)


def assert_near_exact(chunks: list[Chunk], implementation: str = "triton", **options: object) -> None:
    rtol, atol = TOLERANCE[chunks[0].request.heads.dtype]
    got = torch.cat(attend(chunks, implementation=implementation, **options)).cpu()
    torch.testing.assert_close(got.double(), exact(chunks, **options), rtol=rtol, atol=atol)


@by_both
@features
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_feature_is_near_float64(options, dtype, implementation):
    heads = Heads(4, 2, 64, dtype)
    chunks = [Chunk(Request(heads, 300, 1), 250, 300), newest(Request(heads, 520, 2)), whole(Request(heads, 20, 3))]
    assert_near_exact(chunks, implementation, **options)


@by_both
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("query", "kv", "size"),
    [(4, 4, 64), (6, 2, 80), (5, 1, 96), (16, 8, 128), (6, 2, 192), (2, 1, 256), (14, 2, 64), (71, 1, 64)],
)
def test_every_head_shape_and_dtype_is_near_float64_and_decodes_to_its_prefill(query, kv, size, dtype, implementation):
    heads = Heads(query, kv, size, dtype)
    request = Request(heads, 330, 1)
    assert_near_exact([whole(request), newest(Request(heads, 17, 2))], implementation)
    prefill = attend([whole(request)], implementation=implementation)[0]
    for stop in (1, 2, 64, 65, 255, 256, 257, 330):
        decode = attend([Chunk(request, stop - 1, stop)], implementation=implementation)[0]
        assert torch.equal(decode, prefill[stop - 1 : stop]), stop


@by_both
@features
def test_chunks_of_any_size_equal_prefill(options, implementation):
    request = Request(SMALL, 600, 1)
    options = options | {"implementation": implementation}
    prefill = attend([whole(request)], **options)[0]
    for size in (1, 3, 7, 9, 16, 31, 33, 64, 100, 255, 256, 257):
        begin, end = (0, request.length) if size > 8 else (240, 300)
        chunks = [Chunk(request, at, min(at + size, end)) for at in range(begin, end, size)]
        together = torch.cat([attend([chunk], **options)[0] for chunk in chunks])
        assert torch.equal(together, prefill[begin:end]), size


@pytest.mark.parametrize("heads", [GROUP_OF_SEVEN, GROUP_OF_FOUR, Heads(16, 8, 128, torch.float16)], ids=str)
@pytest.mark.parametrize("length", [1000, 4097])
@pytest.mark.parametrize("reduction", [AttentionReduction(), None], ids=str)
@by_both
def test_the_newest_tokens_have_the_bits_of_a_prefill(heads, length, reduction, implementation):
    options = {"reduction": reduction, "implementation": implementation}
    request = Request(heads, length, 1)
    prefill = attend([whole(request)], **options)[0]
    for count in (1, 2, 5, 7, 64, 200):
        assert torch.equal(attend([newest(request, count)], **options)[0], prefill[-count:]), count


@by_both
def test_decode_equals_prefill_around_page_tile_and_split_borders(implementation):
    request = Request(GROUP_OF_SEVEN, 600, 1)
    prefill = attend([whole(request)], implementation=implementation)[0]
    for border in (16, 64, 128, 256, 272, 320, 512):
        for length in (border - 1, border, border + 1):
            decode = attend([Chunk(request, length - 1, length)], implementation=implementation)[0]
            assert torch.equal(decode[0], prefill[length - 1]), length


@by_both
@features
def test_pages_and_their_size_move_no_bit(options, implementation):
    request, options = Request(SMALL, 300, 1), options | {"implementation": implementation}
    sizes = PAGE_SIZES[implementation]
    for chunk in (newest(request, 10), whole(request)):
        first = attend([chunk], **options)[0]
        for placement, page_size in enumerate((sizes[0], *sizes), 1):
            again = attend([chunk], page_size=page_size, placement=placement, **options)[0]
            assert torch.equal(again, first), page_size


@pytest.mark.parametrize("heads", [SMALL, GROUP_OF_FOUR, Heads(4, 2, 80, torch.float16)], ids=str)
def test_blocks_are_only_a_schedule(heads, monkeypatch):
    from vllm_batch_invariant.ops.attention import plan

    chunks = [whole(Request(heads, 400, 1)), newest(Request(heads, 777, 2), 7), newest(Request(heads, 513, 3))]
    expected = torch.cat(attend(chunks))
    for sizes in ((16, 1, 2), (16, 8, 1), (32, 4, 2), (64, 4, 1), (64, 8, 2), (128, 8, 2)):
        monkeypatch.setattr(plan, "decode_schedule", lambda *_, sizes=sizes: plan.Schedule(*sizes))
        monkeypatch.setattr(plan, "prefill_schedule", lambda *_, sizes=sizes: plan.Schedule(*sizes))
        assert torch.equal(torch.cat(attend(chunks)), expected), sizes


@pytest.mark.parametrize("heads", [SMALL, GROUP_OF_FOUR, Heads(4, 2, 80, torch.float16)], ids=str)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 300, "logits_soft_cap": 2.0}], ids=str)
@pytest.mark.parametrize("reduction", [AttentionReduction(), AttentionReduction.of_device("cuda")], ids=str)
def test_splits_shared_out_to_programs_have_the_bits_of_splits_walked_by_one(reduction, options, heads, monkeypatch):
    from vllm_batch_invariant.ops.attention import plan

    few = [newest(Request(heads, 5_000, 1), 60), newest(Request(heads, 777, 2), 7), newest(Request(heads, 3_000, 3))]
    for chunks in (few, [*few, whole(Request(heads, 1100, 4))]):
        shared = torch.cat(attend(chunks, reduction=reduction, **options))
        with monkeypatch.context() as patched:
            patched.setattr(plan, "PARTIAL_BYTES", 0)
            assert torch.equal(torch.cat(attend(chunks, reduction=reduction, **options)), shared)


@pytest.mark.parametrize("heads", [SMALL, GROUP_OF_FOUR, Heads(8, 1, 128, torch.bfloat16), GROUP_OF_SEVEN], ids=str)
@pytest.mark.parametrize("length", [1_100, 5_000, 40_000])
def test_a_few_new_tokens_behind_many_have_the_bits_of_a_prefill(heads, length):
    """Their blocks are cut into parts that programs share, those of the prefill are not."""
    request = Request(heads, length, 1)
    prefill = attend([whole(request)])[0]
    for count in (20, 60, 300):
        for _ in range(2):  # semaphores of the first time are cleared
            assert torch.equal(attend([newest(request, count)])[0], prefill[-count:]), count


def test_programs_that_do_not_wait_for_each_other_merge_the_same_bits(monkeypatch):
    """The last one merges all, as where the others have no multiprocessor yet."""
    from vllm_batch_invariant.ops.attention import sm90

    chunk = newest(Request(GROUP_OF_FOUR, 9_000, 1), 100)
    together = attend([chunk])[0]
    size = GROUP_OF_FOUR.size
    monkeypatch.setitem(sm90.PREFILL_SCHEDULES, size, replace(sm90.PREFILL_SCHEDULES[size], max_spins=0))
    for _ in range(2):
        assert torch.equal(attend([chunk])[0], together)


def test_two_streams_that_share_blocks_at_the_same_time_end_with_the_same_bits():
    """Each may hold multiprocessors that programs of the other wait for."""
    from vllm_batch_invariant.ops.attention.plan import Planner
    from vllm_batch_invariant.ops.attention.shapes import AttentionShape

    heads, length, tokens = GROUP_OF_FOUR, 9_000, 100
    chunk = newest(Request(heads, length, 1), tokens)
    tensors = [tensor.cuda() for tensor in paged([chunk])]
    query, (lengths, starts) = tensors[0], tensors[4:]
    options = {"scale": 1 / math.sqrt(heads.size), "reduction": AttentionReduction.of_device("cuda")}
    shape = AttentionShape(heads.query, heads.kv, heads.size, heads.dtype, options["reduction"])
    alone = paged_attention(*tensors, **options)
    streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1)]
    outs, graphs = [torch.empty_like(query) for _ in streams], [torch.cuda.CUDAGraph() for _ in streams]
    plans = [Planner(shape, query.device, 1, tokens, length).plan(starts, lengths, tokens, tokens) for _ in streams]
    for out, graph, plan in zip(outs, graphs, plans, strict=True):
        with torch.cuda.graph(graph):
            for _ in range(50):
                paged_attention(*tensors, out=out, plan=plan, **options)
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, alone) for out in outs)


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("heads", [GROUP_OF_FOUR, GROUP_OF_SEVEN], ids=str)
def test_pages_read_by_descriptor_have_the_bits_of_pages_read_by_pointer(heads, page_size, monkeypatch):
    from vllm_batch_invariant.ops.attention import cuda

    chunks = [whole(Request(heads, 1500, 1)), newest(Request(heads, 777, 2), 70), newest(Request(heads, 3_000, 3))]
    described = torch.cat(attend(chunks, page_size=page_size, filler=math.nan))
    monkeypatch.setattr(cuda, "_tensor_descriptor", lambda *_: None)
    assert torch.equal(torch.cat(attend(chunks, page_size=page_size, filler=math.nan)), described)


@pytest.mark.parametrize("heads", [GROUP_OF_FOUR, GROUP_OF_SEVEN], ids=str)
def test_a_graph_of_decode_follows_the_lengths_and_has_the_bits_of_eager_calls(heads):
    from vllm_batch_invariant.ops.attention.plan import Planner
    from vllm_batch_invariant.ops.attention.shapes import AttentionShape

    reduction = AttentionReduction.of_device("cuda")
    lengths = [1, 255, 256, 257, 2047, 2048, 2049, 3000]
    chunks = [newest(Request(heads, length, seed)) for seed, length in enumerate(lengths)]
    query, key, value, table, seq_lens, starts = (tensor.cuda() for tensor in paged(chunks))
    shape = AttentionShape(heads.query, heads.kv, heads.size, heads.dtype, reduction)
    planner = Planner(shape, query.device, 16, 64, 20_000)
    options = {"scale": 0.1, "reduction": reduction}
    out = torch.empty_like(query)
    plan = planner.plan(starts, seq_lens, len(query), 1)
    paged_attention(query, key, value, table, seq_lens, starts, plan=plan, out=out, **options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(query, key, value, table, seq_lens, starts, plan=plan, out=out, **options)
    for shorter in (0, 1, 300, 0):
        now = (seq_lens - shorter).clamp(min=1)
        planner.plan(starts, now, len(query), 1)
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, paged_attention(query, key, value, table, now, starts, **options)), shorter


@pytest.mark.parametrize("heads", [GROUP_OF_FOUR, GROUP_OF_SEVEN], ids=str)
@pytest.mark.parametrize("window", [None, 300])
def test_a_flex_graph_of_decode_follows_the_lengths_and_has_the_bits_of_eager_calls(heads, window):
    from vllm_batch_invariant.ops.attention.flex.plan import KeyLayout, Planner
    from vllm_batch_invariant.ops.attention.shapes import AttentionShape

    reduction = AttentionReduction.of_device("cuda", "flex")
    chunks = [newest(Request(heads, length, length)) for length in (1, 511, 512, 513, 2047, 2048, 2049, 3000)]
    query, key, value, table, seq_lens, starts = (tensor.cuda() for tensor in paged(chunks, 64, filler=math.nan))
    shape = AttentionShape(heads.query, heads.kv, heads.size, heads.dtype, reduction)
    planner = Planner(shape, KeyLayout.of(key, 64), query.device, 16, 5000, (window,))
    options = {"scale": 0.1, "reduction": reduction, "implementation": "flex", "sliding_window": window}
    out = torch.empty_like(query)
    plan = planner.plan(starts, seq_lens, table, decode=True)
    paged_attention(query, key, value, table, seq_lens, starts, plan=plan, out=out, **options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(query, key, value, table, seq_lens, starts, plan=plan, out=out, **options)
    for shorter in (0, 1, 300, 0):
        now = (seq_lens - shorter).clamp(min=1)
        planner.plan(starts, now, table, decode=True)
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, paged_attention(query, key, value, table, now, starts, **options)), shorter


@pytest.mark.parametrize("heads", [SMALL, GROUP_OF_FOUR, Heads(4, 2, 80, torch.float16)], ids=str)
def test_flex_computed_in_waves_has_the_bits_of_one(heads, monkeypatch):
    from vllm_batch_invariant.ops.attention.flex import cuda as flex_cuda

    chunks = [whole(Request(heads, 1100, 1)), newest(Request(heads, 777, 2), 7), newest(Request(heads, 6_000, 3))]
    whole_step = torch.cat(attend(chunks, implementation="flex"))
    monkeypatch.setattr(flex_cuda, "PARTIAL_BYTES", 0)
    assert torch.equal(torch.cat(attend(chunks, implementation="flex")), whole_step)


def test_flex_refuses_pages_that_hold_no_whole_tile():
    with pytest.raises(NotCovered, match="pages of 16 keys"):
        attend([newest(Request(SMALL, 20, 1))], page_size=16, implementation="flex")


@pytest.mark.parametrize("heads", [GROUP_OF_FOUR, GROUP_OF_SEVEN], ids=str)
def test_a_graph_serves_every_mix_of_requests_with_its_padded_sizes(heads):
    from vllm_batch_invariant.ops.attention.plan import Planner
    from vllm_batch_invariant.ops.attention.shapes import AttentionShape

    reduction, tokens, most = AttentionReduction.of_device("cuda"), 64, 63
    chunks = [newest(Request(heads, 40 + 90 * seed, seed), count) for seed, count in enumerate((1, 1, 30, 2, 1, 20))]
    mixes = [[2, 0, 1, 3], [5, 4, 0], [2, 5, 0, 1, 4], [3, 0, 1, 4], [2]]
    query, key, value, table, seq_lens, starts = (tensor.cuda() for tensor in paged(chunks))
    planner = Planner(
        AttentionShape(heads.query, heads.kv, heads.size, heads.dtype, reduction), query.device, most, tokens, 9000
    )
    options = {"scale": 0.1, "reduction": reduction}

    padded_query, out = query.new_zeros(tokens, *query.shape[1:]), query.new_zeros(tokens, *query.shape[1:])
    padded_table = table.new_zeros(most, table.shape[1])
    lengths, begins = seq_lens.new_ones(most), torch.arange(most + 1, dtype=starts.dtype, device="cuda")
    begins[-1], lengths[-1] = tokens, 2
    plan = planner.plan(begins, lengths, tokens, tokens)
    call = padded_query, key, value, padded_table, lengths, begins
    paged_attention(*call, plan=plan, out=out, **options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(*call, plan=plan, out=out, **options)
    for mix in mixes:
        counts = torch.tensor([chunks[i].stop - chunks[i].start for i in mix], device="cuda")
        rows = torch.cat([torch.arange(starts[i], starts[i + 1], device="cuda") for i in mix])
        padded_query[: len(rows)] = query[rows]
        lengths.zero_()
        lengths[: len(mix)] = seq_lens[mix]
        padded_table[: len(mix)] = table[mix]
        begins.fill_(len(rows))
        begins[0] = 0
        begins[1 : len(mix) + 1] = counts.cumsum(0)
        planner.plan(begins, lengths, tokens, tokens)
        out.fill_(math.nan)
        graph.replay()
        expected = paged_attention(query, key, value, table, seq_lens, starts, **options)[rows]
        assert torch.equal(out[: len(rows)], expected), mix
        assert out[len(rows) :].isnan().all()


def test_a_padded_step_leaves_the_rows_of_no_request_alone():
    from vllm_batch_invariant.ops.attention.plan import Planner
    from vllm_batch_invariant.ops.attention.shapes import AttentionShape

    reduction = AttentionReduction.of_device("cuda")
    query, key, value, table, seq_lens, starts = (t.cuda() for t in paged([newest(Request(GROUP_OF_FOUR, 700, 1))]))
    planner = Planner(AttentionShape(32, 8, 128, query.dtype, reduction), query.device, 4, 8, 4_000)
    options = {"scale": 0.1, "reduction": reduction}
    alone = paged_attention(query, key, value, table, seq_lens, starts, **options)
    padded = query.repeat(4, 1, 1)
    table, seq_lens = table.repeat(4, 1), torch.cat([seq_lens, seq_lens.new_zeros(3)])
    starts = torch.cat([starts, starts[-1:].repeat(3)])
    out = torch.full_like(padded, 5.0)
    plan = planner.plan(starts, seq_lens, 4, 1)
    paged_attention(padded, key, value, table, seq_lens, starts, plan=plan, out=out, **options)
    assert torch.equal(out[:1], alone)
    assert (out[1:] == 5.0).all()


def test_sinks_take_weight_and_have_no_value():
    chunks = [whole(Request(GROUP_OF_FOUR, 700, 1)), newest(Request(GROUP_OF_FOUR, 900, 2))]
    sinks = torch.linspace(-2, 6, GROUP_OF_FOUR.query)
    got = torch.cat(attend(chunks, sinks=sinks.cuda()))
    expected = exact(chunks, sinks=sinks)
    assert (got.cpu().double() - expected).norm() < 0.01 * expected.norm()
    assert not torch.equal(got, torch.cat(attend(chunks)))


@by_both
@pytest.mark.parametrize("filler", [0.0, math.inf, 1e30])
def test_what_is_not_written_never_leaks(filler, implementation):
    chunks = [Chunk(Request(SMALL, 300, 1), 250, 300), newest(Request(SMALL, 33, 2))]
    held = [attend(chunks, filler=held, implementation=implementation) for held in (math.nan, filler)]
    for clean, dirty in zip(*held, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("tokens", [0, 1, 5, 9, 10, 11, 64, 700, 3000])
def test_a_long_decode_of_seven_heads_a_group_is_not_moved_by_a_neighbour(tokens, long_decode):
    chunk, alone, implementation = long_decode
    neighbour = Request(GROUP_OF_SEVEN, max(tokens, 8), 2)
    beside = Chunk(neighbour, neighbour.length - tokens, neighbour.length)
    assert torch.equal(attend([beside, chunk], implementation=implementation)[1], alone)
    assert torch.equal(attend([chunk, beside, chunk], implementation=implementation)[2], alone)


@pytest.fixture(scope="module", params=PAGE_SIZES)
def long_decode(request):
    chunk = newest(Request(GROUP_OF_SEVEN, 19_760, 1))
    return chunk, attend([chunk], implementation=request.param)[0], request.param


@pytest.mark.parametrize("count", [2, 8, 43, 44, 45, 46, 64, 129, 257, 300])
def test_any_number_of_requests_in_any_order_moves_no_bit(count, singles):
    chunks, alone, implementation = singles
    order = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(count))[:count].tolist()
    together = attend([chunks[i] for i in order], placement=count, implementation=implementation)
    assert torch.equal(torch.cat(together), torch.cat([alone[i] for i in order]))


@pytest.fixture(scope="module", params=PAGE_SIZES)
def singles(request):
    """300 requests at different stages, each computed alone."""
    chunks = []
    for seed in range(300):
        one = Request(SMALL, 1 + 7 * seed % 401, seed)
        chunks.append(newest(one, min(one.length, (1, 1, 1, 5, 40)[seed % 5])))
    return chunks, [attend([chunk], implementation=request.param)[0] for chunk in chunks], request.param


def test_a_freed_page_behind_the_window_may_be_gone():
    tensors = [tensor.cuda() for tensor in paged([newest(Request(SMALL, 700, 1), 10)])]
    options = {"scale": 0.25, "reduction": AttentionReduction(), "sliding_window": 50}
    kept = paged_attention(*tensors, **options)
    tensors[3][0, : (690 - 50) // 16] = -1
    assert torch.equal(paged_attention(*tensors, **options), kept)


def test_padded_rows_of_out_are_left_alone():
    query, *rest = [tensor.cuda() for tensor in paged([newest(Request(SMALL, 20, 1)), newest(Request(SMALL, 30, 2))])]
    padded = torch.cat([query, query * math.nan])
    out = torch.full_like(padded, 5.0)
    paged_attention(padded, *rest, scale=0.25, reduction=AttentionReduction(), out=out)
    assert out[:2].isfinite().all()
    assert (out[2:] == 5.0).all()


def test_strides_move_no_bit():
    tensors = [tensor.cuda() for tensor in paged([Chunk(Request(SMALL, 300, 1), 260, 300)])]
    options = {"scale": 0.25, "reduction": AttentionReduction()}
    first = paged_attention(*tensors, **options)
    for layout in ((0, 1, 2, 3), (2, 1, 0, 3), (3, 2, 1, 0)):
        back = [layout.index(axis) for axis in range(4)]
        caches = [cache.permute(layout).contiguous().permute(back) for cache in tensors[1:3]]
        query = tensors[0].transpose(0, 2).contiguous().transpose(0, 2)
        assert torch.equal(paged_attention(query, *caches, *tensors[3:], **options), first)


@by_both
def test_a_nan_of_its_own_is_not_hidden(implementation):
    request = Request(SMALL, 5, 1)
    request.query[2] = math.nan
    got = attend([whole(request)], implementation=implementation)[0]
    assert got[2].isnan().all()
    assert got[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize(("implementation", "size"), [("triton", 528), ("flex", 272)])
def test_larger_heads_are_refused_by_name(implementation, size):
    with pytest.raises(NotCovered, match=f"size {size}"):
        attend([whole(Request(Heads(1, 1, size), 4, 1))], implementation=implementation)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"logits_soft_cap": 30.0}], ids=str)
@pytest.mark.parametrize(("query", "kv"), [(4, 1), (8, 2), (40, 1), (3, 3)])
def test_heads_of_512_are_near_float64_and_have_the_bits_of_a_prefill(query, kv, options, dtype):
    """By the Triton kernel, whatever Gluon kernels a GPU has."""
    heads = Heads(query, kv, 512, dtype)
    request = Request(heads, 600, 1)
    assert_near_exact([Chunk(request, 530, 600), newest(Request(heads, 17, 2))], "triton", **options)
    prefill = attend([whole(request)], **options)[0]
    for count in (1, 2, 5, 64):
        assert torch.equal(attend([newest(request, count)], **options)[0], prefill[-count:]), count
    for stop in (1, 15, 16, 17, 31, 32, 33, 255, 256, 257, 512, 513):
        assert torch.equal(attend([Chunk(request, stop - 1, stop)], **options)[0], prefill[stop - 1 : stop]), stop
