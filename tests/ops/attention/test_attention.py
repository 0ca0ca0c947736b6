import itertools
import math
import subprocess
import sys
from dataclasses import fields

import pytest
import torch

from tests.ops.attention.cases import Chunk, Heads, Request, attend, call_of, exact, features, in_chunks, paged
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.attention import AttentionReduction, AttentionSpec, paged_attention
from vllm_batch_invariant.ops.attention.merge import merge_splits
from vllm_batch_invariant.ops.attention.params import ADDED

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = Heads(query=4, kv=2, size=16)
GROUP_OF_SEVEN = Heads(query=14, kv=2, size=64, dtype=torch.bfloat16)
TOLERANCE = {torch.float32: (2e-6, 4e-6), torch.bfloat16: (2**-8, 1e-4), torch.float16: (2**-11, 1e-5)}
"""Relative and absolute: one rounding to the dtype, and fp32 sums of a few hundred terms of size one."""

both = pytest.mark.parametrize("implementation", ["numba", "flex"])


def whole(request: Request) -> Chunk:
    return Chunk(request, 0, request.length)


def newest(request: Request) -> Chunk:
    return Chunk(request, request.length - 1, request.length)


def assert_near_exact(chunks: list[Chunk], implementation: str, **options: object) -> None:
    rtol, atol = TOLERANCE[chunks[0].request.heads.dtype]
    got = torch.cat(attend(chunks, implementation, **options))
    torch.testing.assert_close(got.double(), exact(chunks, **options), rtol=rtol, atol=atol)


@both
@features
def test_every_feature_is_near_float64(implementation, options):
    chunks = [Chunk(Request(SMALL, 300, 1), 250, 300), newest(Request(SMALL, 520, 2)), whole(Request(SMALL, 20, 3))]
    assert_near_exact(chunks, implementation, **options)


@both
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("query", "kv", "size"),
    [(4, 4, 64), (6, 2, 80), (5, 1, 96), (16, 8, 128), (2, 1, 256), (3, 1, 512), (14, 2, 64), (1, 1, 16), (3, 1, 48)],
)
def test_every_head_shape_and_dtype_is_near_float64(implementation, query, kv, size, dtype):
    heads = Heads(query, kv, size, dtype)
    assert_near_exact([Chunk(Request(heads, 270, 1), 263, 270), newest(Request(heads, 17, 2))], implementation)


def test_fp16_caches_are_widened_exactly():
    heads = Heads(1, 1, 16, torch.float16)
    every_number = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = every_number[every_number.isfinite()].view(-1, 1, 16)
    for values in finite[::64].split(1):
        request = Request(heads, 1, 0)
        request.value = values
        assert torch.equal(attend([whole(request)])[0], values)


@features
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 31, 32, 33, 64, 100, 255, 256, 257])
def test_chunks_of_any_size_equal_prefill(size, options):
    request = Request(SMALL, 600, 1)
    start = max(0, 600 - 150 * size)
    assert torch.equal(in_chunks(request, size, start, **options), attend([whole(request)], **options)[0][start:])


@pytest.mark.parametrize(
    "heads",
    [GROUP_OF_SEVEN, Heads(16, 8, 128, torch.bfloat16), Heads(3, 3, 80, torch.float16), Heads(3, 1, 512)],
    ids=str,
)
def test_decode_equals_prefill(heads):
    request = Request(heads, 530, 1)
    assert torch.equal(in_chunks(request, 1, start=240), attend([whole(request)])[0][240:])


def unrounded(chunks: list[Chunk], split_size: int, page_size: int = 16, **options: object) -> torch.Tensor:
    """Rows in fp32 of requests in bf16, whose rounding hides what moves their last bits."""
    from vllm_batch_invariant.ops.attention.cpu import paged_attention as by_numba

    scale = chunks[0].request.heads.size ** -0.5
    call = call_of(paged(chunks, page_size, 0, math.nan), AttentionReduction(split_size), scale=scale, **options)
    call.check()
    out = torch.empty(call.out_shape)
    by_numba(call, out)
    return out


@features
@pytest.mark.parametrize("heads", [Heads(4, 2, 48, torch.bfloat16), Heads(4, 1, 80, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("split_size", [16, 256])
def test_a_token_that_reads_bf16_from_the_cache_equals_prefill(heads, options, split_size):
    """By itself, and between tokens of other requests, with pages of any size."""
    requests = [Request(heads, length, seed) for seed, length in enumerate((513, 130, 1, 300))]
    expected = torch.cat([unrounded([whole(request)], split_size, **options)[-1:] for request in requests])
    tokens = [newest(request) for request in requests]
    for page_size in (1, 7, 128):
        assert torch.equal(unrounded(tokens, split_size, page_size, **options), expected)
        for token, row in zip(tokens, expected, strict=True):
            assert torch.equal(unrounded([token], split_size, page_size, **options)[0], row)
    assert not torch.equal(unrounded(tokens, 64, **options), expected), "splits do move bits"


@pytest.mark.parametrize("size", [1, 7, 33])
def test_chunks_equal_prefill_by_flex(size):
    options = {"implementation": "flex", "split_size": 32, "sliding_window": 40}
    request = Request(SMALL, 70, 1)
    assert torch.equal(in_chunks(request, size, start=29, **options), attend([whole(request)], **options)[0][29:])


@pytest.mark.parametrize("split_size", [16, 64, 256])
def test_decode_equals_prefill_around_page_and_split_borders(split_size):
    request = Request(SMALL, 2 * split_size + 18, 1)
    prefill = attend([whole(request)], split_size=split_size)[0]
    for border in (16, split_size, split_size + 16, 2 * split_size):
        for length in (border - 1, border, border + 1):
            decode = attend([Chunk(request, length - 1, length)], split_size=split_size)[0]
            assert torch.equal(decode[0], prefill[length - 1]), length


@both
def test_a_sink_is_added_once_however_many_splits_a_row_has(implementation):
    """Its weight in closed form: equal scores, so a row that sees n keys keeps n / (n + exp(sink)) of the value."""
    request = Request(Heads(1, 1, 16), 600, 1)
    request.query[:], request.value[:] = 0.0, 1.0
    for rows in (Chunk(request, 590, 600), Chunk(request, 0, 7)):
        (got,) = attend([rows], implementation, sinks=torch.tensor([3.0]))
        seen = torch.arange(rows.start + 1, rows.stop + 1, dtype=torch.float64)
        torch.testing.assert_close(got[:, 0, 0].double(), seen / (seen + math.exp(3.0)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1, 7, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_with_sinks_has_the_same_bits_by_prefill_by_chunks_and_among_others(size, dtype):
    heads = Heads(4, 2, 64, dtype)
    for implementation, options in (("numba", {}), ("flex", {"split_size": 32, "sliding_window": 40})):
        options = {"implementation": implementation, "sinks": torch.tensor([-1.0, 0.5, 3.0, 6.0])} | options
        request, other = Request(heads, 70, 1), Request(heads, 90, 2)
        prefill = attend([whole(request)], **options)[0]
        assert torch.equal(in_chunks(request, size, start=29, **options), prefill[29:])
        beside = attend([Chunk(other, 80, 90), Chunk(request, 70 - size, 70), newest(other)], **options)[1]
        assert torch.equal(beside, prefill[70 - size :])


@both
def test_sinks_reach_every_row_and_those_of_no_weight_change_no_bit_of_it(implementation):
    chunks = [Chunk(Request(SMALL, 300, 1), 250, 300), newest(Request(SMALL, 520, 2)), whole(Request(SMALL, 20, 3))]
    plain = torch.cat(attend(chunks, implementation))
    with_sinks = torch.cat(attend(chunks, implementation, sinks=torch.full((4,), 2.0)))
    assert (plain != with_sinks).any(-1).all()
    assert torch.equal(torch.cat(attend(chunks, implementation, sinks=torch.full((4,), -math.inf))), plain)


def test_a_sink_in_each_split_does_move_bits():
    """What these tests look for exists: a sink that is one of the first split's scores gives a row other bits."""
    request = Request(Heads(1, 1, 64), 600, 1)
    got = attend([whole(request)], sinks=torch.tensor([1.0]))[0]
    with_sink_first = Request(Heads(1, 1, 64), 601, 1)
    with_sink_first.query[1:], with_sink_first.key[1:] = request.query, request.key
    with_sink_first.value[1:], with_sink_first.value[0] = request.value, 0.0
    # The key of a score of 1 for the newest row.
    newest_query = request.query[-1, 0]
    with_sink_first.key[0, 0] = newest_query * 8 / newest_query.square().sum()
    other = attend([newest(with_sink_first)])[0]
    torch.testing.assert_close(other[0], got[-1], rtol=1e-5, atol=1e-5)
    assert not torch.equal(other[0], got[-1])


@both
@features
def test_pages_and_their_size_move_no_bit(implementation, options):
    request = Request(SMALL, 300, 1)
    chunk = Chunk(request, 290, 300)
    first = attend([chunk], implementation, **options)[0]
    for page_size, placement in ((16, 1), (16, 2), (1, 3), (7, 4), (128, 5), (512, 6)):
        again = attend([chunk], implementation, page_size=page_size, placement=placement, **options)[0]
        assert torch.equal(again, first), page_size


@both
@pytest.mark.parametrize("filler", [math.nan, math.inf])
def test_what_is_not_written_never_leaks(implementation, filler):
    chunks = [Chunk(Request(SMALL, 300, 1), 250, 300), newest(Request(SMALL, 33, 2))]
    for clean, dirty in zip(attend(chunks, implementation), attend(chunks, implementation, filler=filler), strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, dirty)


@features
@pytest.mark.parametrize(
    ("dtype", "filler"), [(torch.float32, math.nan), (torch.bfloat16, -math.inf), (torch.float16, math.inf)]
)
def test_later_keys_and_values_of_the_same_request_never_leak(filler, dtype, options):
    request = Request(Heads(4, 2, 16, dtype), 120, 1)
    clean = attend([whole(request)], **options)[0]
    for later in (request.key, request.value):
        later[71:] = filler
    dirty = attend([whole(request)], **options)[0]
    assert torch.equal(dirty[:71], clean[:71])
    assert not dirty[71:].isfinite().any(), "nor are they hidden from who sees them"
    assert torch.equal(in_chunks(request, 7, start=50, **options)[:21], clean[50:71])


def test_a_later_value_that_is_not_finite_reaches_earlier_rows_of_its_chunk_by_flex():
    """What the contract excepts: FlexAttention weighs it by 0, and 0 * inf is NaN. A later key is masked."""
    request = Request(SMALL, 120, 1)
    clean = attend([whole(request)], "flex")[0]
    before = request.key.clone()
    request.key[71:] = math.inf
    assert torch.equal(attend([whole(request)], "flex")[0][:71], clean[:71])
    request.key = before
    request.value[71:] = math.inf
    assert attend([whole(request)], "flex")[0][70].isnan().all()
    assert torch.equal(attend([Chunk(request, 0, 71)], "flex")[0], clean[:71]), "in a chunk that ends before it"


def test_a_freed_page_behind_the_window_may_be_gone():
    chunk = Chunk(Request(SMALL, 700, 1), 690, 700)
    tensors = list(paged([chunk]))
    options = {"scale": 0.25, "reduction": AttentionReduction(), "sliding_window": 50}
    kept = paged_attention(*tensors, **options)
    tensors[3][0, : (690 - 50) // 16] = -1
    for implementation in ("numba", "flex"):
        expected = paged_attention(*tensors, implementation=implementation, **options)
        torch.testing.assert_close(expected, kept)
    assert torch.equal(paged_attention(*tensors, **options), kept)


@pytest.mark.parametrize("tokens", [0, 1, 5, 9, 10, 64, 700, 3000])
def test_a_neighbour_of_any_length_moves_no_bit(tokens):
    heads = Heads(4, 2, 64, torch.bfloat16)
    request = Request(heads, 400, 1)
    chunks = [newest(request), Chunk(request, 300, 333)]
    alone = [attend([chunk])[0] for chunk in chunks]
    neighbour = Request(heads, max(tokens, 8), 2)
    beside = Chunk(neighbour, neighbour.length - tokens, neighbour.length)
    for batch in ([*chunks, beside], [beside, *chunks], [chunks[0], beside, chunks[1]]):
        results = dict(zip(map(id, batch), attend(batch), strict=True))
        for chunk, bits in zip(chunks, alone, strict=True):
            assert torch.equal(results[id(chunk)], bits)


def test_a_long_decode_of_seven_heads_a_group_is_not_moved_by_prefills():
    request = Request(GROUP_OF_SEVEN, 19_800, 1)
    alone = attend([newest(request)])[0]
    for tokens in (5, 300):
        beside = whole(Request(GROUP_OF_SEVEN, tokens, tokens))
        assert torch.equal(attend([beside, newest(request)])[1], alone)


def test_a_neighbour_moves_no_bit_by_flex():
    options = {"implementation": "flex", "split_size": 32}
    request = Request(SMALL, 70, 1)
    alone = attend([newest(request)], **options)[0]
    for tokens in (0, 1, 9, 64, 200):
        beside = Request(SMALL, max(tokens, 1), 2)
        batch = [Chunk(beside, beside.length - tokens, beside.length), newest(request)]
        assert torch.equal(attend(batch, **options)[1], alone), tokens


@pytest.mark.parametrize("count", [2, 3, 8, 43, 44, 45, 46, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300])
def test_any_number_of_requests_in_any_order_moves_no_bit(count, singles):
    chunks, alone = singles
    for seed in range(2):
        order = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(count + seed))[:count].tolist()
        together = attend([chunks[i] for i in order], placement=seed)
        assert torch.equal(torch.cat(together), torch.cat([alone[i] for i in order]))


@pytest.fixture(scope="module")
def singles():
    """300 requests at different stages, each computed alone."""
    chunks = []
    for seed in range(300):
        request = Request(SMALL, 1 + 7 * seed % 401, seed)
        chunks.append(Chunk(request, max(0, request.length - (1, 1, 1, 5, 40)[seed % 5]), request.length))
    return chunks, [attend([chunk])[0] for chunk in chunks]


@both
def test_the_number_of_threads_moves_no_bit(implementation):
    chunks = [Chunk(Request(SMALL, 400, 1), 300, 400), newest(Request(SMALL, 600, 2))]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(torch.cat(attend(chunks, implementation)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_tiles_are_only_a_schedule(monkeypatch):
    from vllm_batch_invariant.ops.attention import cpu as schedule

    chunks = [Chunk(Request(SMALL, 400, 1), 300, 400), newest(Request(SMALL, 300, 2))]
    first = torch.cat(attend(chunks, sliding_window=77))
    for rows, keys in ((1, 4), (7, 16), (200, 256)):
        monkeypatch.setattr(schedule, "BLOCK_M", rows)
        monkeypatch.setattr(schedule, "BLOCK_N", keys)
        assert torch.equal(torch.cat(attend(chunks, sliding_window=77)), first)


def test_strides_move_no_bit():
    tensors = paged([Chunk(Request(SMALL, 100, 1), 60, 100)])
    options = {"scale": 0.25, "reduction": AttentionReduction()}
    first = paged_attention(*tensors, **options)
    for layout in ((0, 1, 2, 3), (2, 1, 0, 3), (3, 2, 1, 0)):
        back = [layout.index(axis) for axis in range(4)]
        caches = [cache.permute(layout).contiguous().permute(back) for cache in tensors[1:3]]
        query = tensors[0].transpose(0, 2).contiguous().transpose(0, 2)
        assert torch.equal(paged_attention(query, *caches, *tensors[3:], **options), first)


@pytest.mark.parametrize("implementation", ["numba", "flex", "reference"])
def test_padded_rows_of_out_are_left_alone(implementation):
    query, *rest = paged([newest(Request(SMALL, 20, 1)), newest(Request(SMALL, 30, 2))])
    padded = torch.cat([query, torch.full_like(query, math.nan)])
    out = torch.full_like(padded, 5.0)
    options = {"scale": 0.25, "reduction": AttentionReduction(), "implementation": implementation}
    assert paged_attention(padded, *rest, out=out, **options) is out
    assert torch.equal(out[:2], paged_attention(query, *rest, **options))
    assert (out[2:] == 5.0).all()


@pytest.mark.parametrize("implementation", ["numba", "flex", "reference"])
def test_a_batch_without_a_token_is_no_work(implementation):
    request = Request(SMALL, 20, 1)
    (rows,) = attend([Chunk(request, 20, 20)], implementation)
    assert rows.shape == (0, 4, 16)


def test_a_nan_of_its_own_is_not_hidden():
    request = Request(SMALL, 5, 1)
    request.query[2] = math.nan
    got = attend([whole(request)])[0]
    assert got[2].isnan().all()
    assert got[[0, 1, 3, 4]].isfinite().all()


def test_an_absent_split_weighs_exactly_nothing():
    outputs = torch.randn(3, 5, 16)
    lses = torch.randn(3, 5)
    absent = torch.zeros(1, 5, 16), torch.full((1, 5), -math.inf)
    alone = merge_splits(outputs, lses)
    for place in range(4):
        padded = [
            torch.cat([part[:place], gap, part[place:]]) for part, gap in zip((outputs, lses), absent, strict=True)
        ]
        assert torch.equal(merge_splits(*padded), alone)
    assert torch.equal(merge_splits(*absent), torch.zeros(5, 16))


def test_splits_that_follow_the_length_do_move_bits():
    """What these tests look for exists: a reduction that sees the length fails the comparison that ours passes."""
    request = Request(SMALL, 600, 1)

    def rows(split_of_length):
        chunks = [Chunk(request, at, at + 1) for at in range(500, 600)]
        return torch.cat([attend([chunk], split_size=split_of_length(chunk.stop))[0] for chunk in chunks])

    prefill = attend([whole(request)])[0][500:]
    assert torch.equal(rows(lambda length: 256), prefill)
    assert not torch.equal(rows(lambda length: 64 if length < 550 else 256), prefill)


def test_pytorch_attention_does_move_bits():
    """The same token by prefill and by decode through PyTorch's own attention."""
    request = Request(Heads(4, 4, 64), 600, 1)
    query, key, value = (tensor.transpose(0, 1) for tensor in (request.query, request.key, request.value))
    attention = torch.nn.functional.scaled_dot_product_attention
    prefill = attention(query[None], key[None], value[None], is_causal=True)[0]
    decode = [
        attention(query[None, :, at : at + 1], key[None, :, : at + 1], value[None, :, : at + 1])[0]
        for at in range(500, 600)
    ]
    assert not torch.equal(torch.cat(decode, dim=1), prefill[:, 500:])
    assert torch.equal(in_chunks(request, 1, start=500), attend([whole(request)])[0][500:])


def test_importing_the_operation_needs_neither_numba_nor_flex():
    code = (
        "import sys, torch; known = set(sys.modules); import vllm_batch_invariant.ops.attention;"
        "new = set(sys.modules) - known; assert not new & {'numba', 'torch.nn.attention.flex_attention'}, new"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def _with(place, change):
    """Arguments of a valid call of two requests with one of them changed."""
    tensors = list(paged([newest(Request(SMALL, 20, 1)), newest(Request(SMALL, 40, 2))]))
    tensors[place] = change(tensors[place].clone())
    return tensors


def _set(index, value):
    def change(tensor):
        tensor[index] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, lambda q: q[0], "query \\[tokens, heads, head_size\\]"),
        (0, lambda q: q.half(), "all be fp32, bf16 or fp16"),
        (0, lambda q: q.double(), "all be fp32, bf16 or fp16"),
        (0, lambda q: q[..., :8], "head_size"),
        (0, lambda q: q[:, :3], "multiple of KV heads"),
        (1, lambda k: k[:, :1], "key and value caches"),
        (3, lambda t: t[:1], "block_table"),
        (3, lambda t: t.float(), "block_table must be int32"),
        (3, _set((1, 2), 10_000), "block_table\\[1, 2\\] is 10000"),
        (3, _set((0, 1), -1), "block_table\\[0, 1\\] is -1"),
        (4, _set(0, 0), "request 0 has seq_len 0"),
        (4, _set(1, -3), "request 1 has seq_len -3"),
        (4, _set(1, 10_000), "request 1 has seq_len 10000"),
        (5, _set(2, 3), "query_start_loc"),
        (5, _set(1, -1), "query_start_loc"),
        (5, _set(0, 1), "query_start_loc"),
    ],
)
@pytest.mark.parametrize("implementation", ["numba", "flex", "reference"])
def test_bad_tensors_are_refused_in_one_line(implementation, place, change, message):
    with pytest.raises(ValueError, match=message) as error:
        paged_attention(*_with(place, change), scale=1.0, reduction=AttentionReduction(), implementation=implementation)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 0}, "sliding_window"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap"),
        ({"alibi_slopes": torch.ones(3)}, "alibi_slopes"),
        ({"sinks": torch.ones(3)}, "sinks"),
        ({"implementation": "fast"}, "implementation"),
        ({"out": torch.empty(1, 4, 16)}, "out must be"),
    ],
)
def test_bad_options_are_refused(options, message):
    tensors = paged([newest(Request(SMALL, 20, 1)), newest(Request(SMALL, 40, 2))])
    with pytest.raises(ValueError, match=message):
        paged_attention(*tensors, scale=1.0, reduction=AttentionReduction(), **options)


def test_what_an_implementation_does_not_compute_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(ADDED) == [field.name for field in fields(AttentionSpec) if field.name != "scale"]
    chunks = [newest(Request(SMALL, 40, 1))]
    for name, implementation in (
        ("sinks", "exact"),
        ("alibi_slopes", "exact"),
        ("sliding_window", "numba"),
        ("causal", "flex"),
        ("causal", "exact"),
    ):
        monkeypatch.setattr("vllm_batch_invariant.ops.attention.cpu.SERVES", ("sinks", "logits_soft_cap"))
        value = ADDED[name].example(4)
        with pytest.raises(
            NotCovered, match=rf"attention with {ADDED[name].words.format(value)} by '{implementation}'"
        ):
            paged_attention(
                *paged(chunks),
                scale=1.0,
                reduction=AttentionReduction(),
                implementation=implementation,
                **{name: value},
            )


@pytest.mark.parametrize("size", [0, 8, 48, 100])
def test_a_split_size_is_a_power_of_two(size):
    with pytest.raises(ValueError, match="power of two"):
        AttentionReduction(size)


@pytest.mark.parametrize("early", [((256, 300),), ((256, 512), (512, 256)), ((256, 256), (512, 768)), ((256, 0),)])
def test_splits_of_a_size_begin_where_both_sizes_do(early):
    with pytest.raises(ValueError, match="cannot end at"):
        AttentionReduction(512, early)


@pytest.mark.parametrize("early", [(), ((64, 512),), ((64, 256), (128, 1024), (256, 2048))], ids=str)
def test_every_position_is_in_the_split_that_begins_before_it(early):
    reduction = AttentionReduction(512, early)
    starts = [reduction.start_of(split) for split in range(40)]
    assert starts == sorted(set(starts))
    for position in range(starts[-1]):
        split = reduction.split_of(position)
        assert starts[split] <= position < starts[split + 1]
    assert {end for _, end in early} <= set(starts)
    sizes = {after - before for before, after in itertools.pairwise(starts)}
    assert sizes == {512, *(size for size, _ in early)}
