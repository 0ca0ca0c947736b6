"""The GPU's attention kernels in Triton's interpreter, on the CPU."""

import math
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.attention.cases import (
    Chunk,
    Heads,
    Request,
    by_tokens,
    call_of,
    exact,
    packed,
    paged,
    with_powers_of_two,
)
from tests.ops.attention.test_ranges import ranges_of
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.attention import (
    NO_RANGE,
    AttentionReduction,
    AttentionSpec,
    PagedCache,
    certificate,
    paged_attention,
)
from vllm_batch_invariant.ops.attention.cuda import paged_attention as attention_on_gpu
from vllm_batch_invariant.ops.attention.params import PagedAttention
from vllm_batch_invariant.ops.attention.plan import Kernels, Plan, Planner
from vllm_batch_invariant.ops.attention.reference import paged_attention as reference_attention
from vllm_batch_invariant.ops.attention.shapes import AttentionShape
from vllm_batch_invariant.ops.common.kv_cache import E4M3, codes_of, scales_of
from vllm_batch_invariant.ops.devices import DEVICES
from vllm_batch_invariant.ops.quantise import QuantiseReduction, quantise
from vllm_batch_invariant.ops.quantise.kept import kept

HEADS = Heads(2, 1, 64, torch.float16)
"""In bf16 the interpreter multiplies wrongly."""
REDUCTION = AttentionReduction.of_device("cuda")
PROCESSORS = 5
ATOL = 2e-3


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The CPU passes for an A100; returns what it says of itself."""
    properties = SimpleNamespace(multi_processor_count=PROCESSORS, major=8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for name in ("device", "device_of"):
        monkeypatch.setattr(torch.cuda, name, lambda device: nullcontext())
    monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], attention="triton"))
    return properties


def newest(length: int, count: int, seed: int = 1) -> Chunk:
    return Chunk(Request(HEADS, length, seed), length - count, length)


OF_TOKENS = "of tokens"
Codes = tuple[Any, Any] | str | None


def attend(chunks: list[Chunk], codes: Codes = None, **options: object) -> torch.Tensor:
    """Over numbers, or over codes with these scales, or with those of tokens."""
    tensors = paged(chunks, 16, 0, math.nan)
    if codes:
        numbers = PagedCache(*tensors[1:4])
        cache = by_tokens(numbers) if codes == OF_TOKENS else numbers.coded(*codes)
        tensors = (tensors[0], cache.keys, cache.values, *tensors[3:], cache.k_scale, cache.v_scale)
    out = torch.full_like(tensors[0], math.nan)
    scale = HEADS.size**-0.5
    return paged_attention(*tensors, scale=scale, reduction=REDUCTION, implementation="triton", out=out, **options)


@pytest.mark.parametrize(
    ("kv_heads", "lengths", "tokens"),
    [
        (1, [1, 256, 257, 2049, 2561], [1] * 5),
        (2, [40_000, 3, 0, 700], [1, 1, 0, 1]),
        (3, [1000, 5000, 64, 65, 2000], [1, 40, 2, 4, 1]),
        (8, [4096] * 3, [1] * 3),
    ],
)
@pytest.mark.parametrize("window", [None, 1, 700, 2500])
def test_every_split_of_every_head_is_in_one_part_and_no_part_is_much_longer_than_another(
    kv_heads, lengths, tokens, window
):
    """Of the splits that some token sees."""
    shape = AttentionShape(4 * kv_heads, kv_heads, 64, torch.float16, REDUCTION)
    sizes = len(lengths), sum(tokens), sum(lengths) + 64 * len(lengths)
    planner = Planner(shape, torch.device("cpu"), *sizes, window=window)
    firsts = [
        max(0, length - new - (window or length) + 1) if new else 0 for length, new in zip(lengths, tokens, strict=True)
    ]
    starts = torch.tensor([0, *tokens]).cumsum(0).int()
    planner.plan(starts, torch.tensor(lengths, dtype=torch.int32), sum(tokens), max(tokens))
    found, keys, whole = [], [], True
    for begin, end in pairwise(planner.work_indptr.tolist()):
        entries = [entry for entry in planner.decode_work[begin:end].tolist() if entry[3]]
        for request, head, split, count, slot, *_ in entries:
            found += [(request, head, number) for number in range(split, split + count)]
            seen = REDUCTION.splits(firsts[request], lengths[request] - 1)
            whole &= (slot < 0) == (count == len(seen))
        keys.append(
            sum(
                min(REDUCTION.start_of(split + count), lengths[request])
                - max(REDUCTION.start_of(split), firsts[request])
                for request, _, split, count, *_ in entries
            )
        )
    expected = [
        (request, head, split)
        for request, (length, new) in enumerate(zip(lengths, tokens, strict=True))
        if 0 < 4 * new <= 16
        for head in range(kv_heads)
        for split in REDUCTION.splits(firsts[request], length - 1)
    ]
    assert whole
    assert sorted(found) == expected
    assert max(keys) <= sum(keys) / len(keys) + 2 * REDUCTION.split_size


def test_every_block_of_requests_of_many_rows_is_listed_once_those_with_the_most_keys_first():
    lengths, tokens = [900, 64, 0, 5000, 300, 2000], [900, 60, 0, 700, 1, 33]
    shape = AttentionShape(14, 2, 64, torch.float16, REDUCTION)
    planner = Planner(shape, torch.device("cpu"), len(lengths), sum(tokens), 2 * sum(lengths))
    starts = torch.tensor([0, *tokens]).cumsum(0).int()
    plan = planner.plan(starts, torch.tensor(lengths, dtype=torch.int32), sum(tokens), max(tokens))
    entries = planner.prefill_work[: int(planner.prefill_count)].tolist()
    rows, group = planner.prefill_schedule.block_m, shape.queries_per_kv
    expected = [
        (request, block * rows)
        for request, new in enumerate(tokens)
        if new * group > 16
        for block in range(-(-new * group // rows))
    ]
    keys = [min((first + rows - 1) // group, new - 1) + 1 + past for _, first, *_, new, past in entries]
    assert not plan.may_share_prefill
    assert sorted((request, first) for request, first, *_ in entries) == expected
    tiles = [-(-count // shape.key_tile) for count in keys]
    assert tiles == sorted(tiles, reverse=True)


@pytest.mark.parametrize(
    ("kv_heads", "lengths", "tokens"),
    [
        (1, [16_384], [60]),
        (1, [5000, 3, 2700], [33, 1, 20]),
        (2, [40_000, 0, 300], [17, 0, 20]),
        (1, [700, 2049], [90, 64]),
        (1, [3000], [20]),
    ],
)
@pytest.mark.parametrize("window", [None, 1, 700, 2500])
def test_the_splits_of_few_blocks_are_in_parts_and_the_parts_of_a_block_are_about_equal(
    kv_heads, lengths, tokens, window
):
    """Each split of each block that some of its rows sees is in one part."""
    shape = AttentionShape(4 * kv_heads, kv_heads, 64, torch.float16, REDUCTION)
    sizes = len(lengths), sum(tokens), sum(lengths) + 64 * len(lengths)
    planner = Planner(shape, torch.device("cpu"), *sizes, window=window)
    planner._prefill_ctas = 16
    starts = torch.tensor([0, *tokens]).cumsum(0).int()
    planner.plan(starts, torch.tensor(lengths, dtype=torch.int32), sum(tokens), max(tokens))
    entries = planner.prefill_work[: int(planner.prefill_count)].tolist()
    assert len(entries) * kv_heads <= planner._prefill_ctas
    slots = []
    for request, new in enumerate(tokens):
        rows = planner.prefill_schedule.block_m
        for block in range(-(-4 * new // rows) if new > 4 else 0):
            first, last = block * rows, (block + 1) * rows - 1
            keys = min(last // 4, new - 1) + 1 + lengths[request] - new
            parts = sorted(entry[2:5] for entry in entries if entry[:2] == [request, first])
            ends = [begin + count for begin, count, _ in parts]
            first_key = max(0, lengths[request] - new + first // 4 + 1 - (window or 1_000_000))
            begin = REDUCTION.split_of(first_key) if len(parts) > 1 else parts[0][0]
            assert [begin for begin, *_ in parts] == [begin, *ends[:-1]]
            assert begin <= REDUCTION.split_of(first_key)
            assert all(count > 0 for _, count, _ in parts)
            assert ends[-2:-1] < [REDUCTION.split_of(keys - 1) + 1] <= ends[-1:]
            longest = max(
                min(REDUCTION.start_of(begin + count), keys) - max(REDUCTION.start_of(begin), first_key)
                for begin, count, _ in parts
            )
            assert longest <= (keys - first_key) / len(parts) + REDUCTION.split_size
            if len(parts) > 1:
                [slot] = {slot for *_, slot in parts}
                slots += range(slot, slot + ends[-1])
            else:
                assert parts[0][2] == -1
    assert slots or window
    assert len(set(slots)) == len(slots)
    assert all(0 <= slot < planner._prefill_workspace for slot in slots)


MIXED = [newest(150, 150), newest(777, 7, 2), newest(2600, 1, 3)]


@pytest.mark.parametrize(
    ("chunks", "options"),
    [
        pytest.param(MIXED, {}, id="mixed"),
        pytest.param(MIXED, {"sliding_window": 300, "logits_soft_cap": 2.0}, id="window and soft-cap"),
        pytest.param(MIXED[1:2], {"alibi_slopes": torch.linspace(-0.3, 0.5, HEADS.query)}, id="ALiBi"),
        pytest.param(MIXED[1:2], {"sinks": torch.linspace(-2, 6, HEADS.query)}, id="sinks"),
        pytest.param([newest(length, 1, length) for length in (1, 256, 257, 2049, 2561)], {}, id="borders"),
    ],
)
def test_every_way_to_spread_work_and_every_option_is_near_float64(chunks, options):
    assert (attend(chunks, **options).double() - exact(chunks, **options)).abs().max().item() < ATOL


@pytest.mark.parametrize("room", [0, 1 << 20], ids=["one stage", "all stages"])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}], ids=str)
def test_heads_of_512_are_near_float64_and_decode_to_their_prefill(options, room, gpu, monkeypatch):
    heads = Heads(3, 1, 512, torch.float16)
    gpu.shared_memory_per_block_optin = room
    monkeypatch.setattr("tests.ops.attention.test_attention_interpreted.HEADS", heads)
    prefill = newest(330, 330)
    whole = attend([prefill], **options)
    assert (whole.double() - exact([prefill], **options)).abs().max().item() < ATOL
    for count in (1, 5, 6, 40):
        assert_same_bits(attend([newest(330, count)], **options), whole[-count:], f"the newest {count}")
    among = attend([newest(150, 20), newest(330, 1), newest(40, 1)], **options)
    assert_same_bits(among[20:21], whole[-1:], "among others")


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 40}, {"sliding_window": 40, "logits_soft_cap": 2.0}], ids=str
)
def test_sequences_that_see_both_sides_have_the_same_bits_alone_and_among_others(options):
    """Over keys without pages and over pages, of blocks that are whole and of such that programs share."""
    asked = [Request(HEADS, length, length) for length in (150, 3, 1, 330, 65)]
    together = packed(asked, "triton", reduction=REDUCTION, **options)
    for number in (3, 0, 1):
        alone = packed([asked[number]], "triton", reduction=REDUCTION, **options)[0]
        assert_same_bits(alone, together[number], f"{asked[number].length} tokens")
    in_pages = attend([Chunk(one, 0, one.length) for one in asked], causal=False, **options)
    assert_same_bits(in_pages, torch.cat(together), "in pages")
    expected = torch.cat(packed(asked, "reference", reduction=REDUCTION, **options))
    assert (in_pages.double() - expected.double()).abs().max().item() < ATOL


def test_rows_that_see_more_keys_than_there_are_rows_have_the_same_bits_alone_and_among_others():
    """What cross attention asks: few rows of text see all that an encoder gave, and a longer text has more of them."""
    sounds = [Request(HEADS, length, length) for length in (330, 65, 700)]
    of_all = torch.cat([attend([Chunk(one, 0, one.length)], causal=False) for one in sounds])
    whole = dict(zip((330, 65, 700), of_all.split([330, 65, 700]), strict=True))
    for counts in ((1, 1, 1), (40, 1, 7), (300, 65, 2), (1, 20, 200)):
        rows = [Chunk(one, one.length - count, one.length) for one, count in zip(sounds, counts, strict=True)]
        found = attend(rows, causal=False).split(counts)
        for one, count, given in zip(sounds, counts, found, strict=True):
            assert_same_bits(given, whole[one.length][-count:], f"{count} rows over {one.length} keys")
            assert_same_bits(attend([Chunk(one, one.length - count, one.length)], causal=False), given, "alone")
    assert not torch.equal(attend([Chunk(sounds[0], 290, 330)]), whole[330][290:])


def test_tokens_that_see_all_of_their_image_have_the_same_bits_in_chunks_and_among_others():
    options = {"sliding_window": 40}
    request, images = Request(HEADS, 330, 7), ((5, 7), (60, 140), (200, 329))

    def rows(chunks: list[Chunk], of_text: tuple[int, int] | None = None) -> torch.Tensor:
        ranges = torch.cat([ranges_of(one.stop, images)[one.start :] for one in chunks])
        if of_text:
            ranges[ranges.diff(dim=1)[:, 0] == 0] = torch.tensor(of_text, dtype=torch.int32)
        return attend(chunks, ranges=ranges, **options)

    whole = rows([Chunk(request, 0, 330)])
    for start, stop in ((0, 8), (60, 330), (200, 330)):
        among = [newest(150, 150), Chunk(request, start, stop), newest(65, 1)]
        found = rows(among, of_text=NO_RANGE)[150:-1]
        assert_same_bits(found, whole[start:stop], f"{start} to {stop} among others")
        assert_same_bits(rows(among[1:2]), found, f"{start} to {stop} alone")
    call = call_of(paged([Chunk(request, 0, 330)]), REDUCTION, scale=HEADS.size**-0.5, **options)
    expected = torch.empty_like(whole, dtype=torch.float64)
    reference_attention(replace(call, ranges=ranges_of(330, images)), expected, torch.float64)
    assert (whole.double() - expected).abs().max().item() < ATOL


def of_codes(chunk: Chunk, k_factor: float, v_factor: float) -> Chunk:
    """A request whose keys and values are the numbers of codes with these scales, powers of two."""
    request = copy(chunk.request)
    for name, scale in (("key", k_factor), ("value", v_factor)):
        codes = (getattr(request, name).float() / scale).to(E4M3)
        setattr(request, name, (codes.float() * scale).to(HEADS.dtype))
    return replace(chunk, request=request)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 8.0)])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 300, "logits_soft_cap": 2.0}], ids=str)
def test_codes_have_the_bits_of_their_numbers(options, scales):
    """Times scales that are powers of two: no sum meets a scale, and neither is in the place of the other."""
    chunks = [newest(150, 150), newest(600, 7, 2), newest(2100, 1, 3)]
    got = attend(chunks, scales, **options)
    assert_same_bits(got, attend([of_codes(one, *scales) for one in chunks], **options), "codes")
    if scales == (1.0, 1.0):
        scales = (1.0, 2.0)
    other = attend([of_codes(one, *reversed(scales)) for one in chunks], **options)
    assert not torch.equal(got, other), "with the scales exchanged"


@pytest.mark.parametrize("room", [0, 1 << 20], ids=["one stage", "all stages"])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}], ids=str)
def test_codes_of_heads_of_512_have_the_bits_of_their_numbers_and_decode_to_their_prefill(
    options, room, gpu, monkeypatch
):
    gpu.shared_memory_per_block_optin = room
    monkeypatch.setattr("tests.ops.attention.test_attention_interpreted.HEADS", Heads(3, 1, 512, torch.float16))
    scales, prefill = (0.25, 8.0), newest(330, 330)
    whole = attend([prefill], scales, **options)
    assert_same_bits(whole, attend([of_codes(prefill, *scales)], **options), "codes")
    assert not torch.equal(whole, attend([of_codes(prefill, *reversed(scales))], **options)), "scales exchanged"
    for count in (1, 5, 6, 40):
        assert_same_bits(attend([newest(330, count)], scales, **options), whole[-count:], f"the newest {count}")
    among = attend([newest(150, 20), newest(330, 1), newest(40, 1)], scales, **options)
    assert_same_bits(among[20:21], whole[-1:], "among others")


OF_HEADS = [0.013, 0.4], [0.021, 0.0007]
"""Scales of keys and of values, no powers of two."""


@pytest.mark.parametrize("options", [{}, {"sliding_window": 300, "logits_soft_cap": 2.0}], ids=str)
def test_a_head_with_scales_of_its_own_has_the_bits_of_these_for_all(options):
    heads = Heads(4, 2, 64, torch.float16)
    lengths = (150, 150), (600, 7), (2100, 1)
    chunks = [Chunk(Request(heads, length, 1), length - count, length) for length, count in lengths]
    got, group = attend(chunks, OF_HEADS, **options), heads.query // heads.kv
    for head, scales in enumerate(zip(*OF_HEADS, strict=True)):
        rows = slice(head * group, (head + 1) * group)
        for_all = attend(chunks, scales, **options)
        assert_same_bits(got[:, rows], for_all[:, rows], f"head {head}")
        assert not torch.equal(got, for_all), "of the other head"


WIDE = Heads(4, 2, 64, torch.float32)


def of_wide(*lengths: tuple[int, int]) -> list[Chunk]:
    """Requests of so many keys, and the newest of their tokens."""
    return [Chunk(Request(WIDE, length, seed), length - count, length) for seed, (length, count) in enumerate(lengths)]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 300, "logits_soft_cap": 2.0}], ids=str)
def test_tokens_with_powers_of_two_have_the_bits_of_numbers_times_them(options):
    """With slopes of 0, which have scores rounded before the largest is taken away, as scales of tokens have."""
    options = {"alibi_slopes": torch.zeros(4)} | options
    chunks = with_powers_of_two(of_wide((150, 150), (600, 7), (2100, 1)))
    got = attend(chunks, OF_TOKENS, **options)
    rounded = []
    for chunk in chunks:
        request = copy(chunk.request)
        for name in ("key", "value"):
            x = getattr(request, name)
            of_each = scales_of(x)[..., None]
            setattr(request, name, (codes_of(x, of_each).float() * of_each).to(x.dtype))
        rounded.append(replace(chunk, request=request))
    assert_same_bits(got, attend(rounded, **options), "codes")
    assert_same_bits(got, attend(chunks, OF_TOKENS, **options | {"alibi_slopes": None}), "without slopes")
    assert not torch.equal(got, attend(chunks, (1.0, 1.0), **options)), "with other codes"


@pytest.mark.parametrize("options", [{}, {"sliding_window": 300, "logits_soft_cap": 2.0}], ids=str)
def test_scales_of_tokens_leave_a_row_its_bits_by_chunks_and_by_decode(options):
    prefill = attend(of_wide((600, 600)), OF_TOKENS, **options)
    for count in (1, 7, 64):
        assert_same_bits(attend(of_wide((600, count)), OF_TOKENS, **options), prefill[-count:], f"{count} alone")
        among = attend(of_wide((600, count), (777, 70), (33, 1)), OF_TOKENS, **options)[:count]
        assert_same_bits(among, prefill[-count:], f"{count} among others")
    call = call_of(paged(of_wide((600, 600)), 16, 0, math.nan), REDUCTION, scale=HEADS.size**-0.5, **options)
    expected = torch.empty_like(prefill, dtype=torch.float64)
    reference_attention(replace(call, cache=by_tokens(call.cache)), expected, torch.float64)
    assert (prefill.double() - expected).abs().max().item() < 1e-5 * expected.abs().max().item()


def test_scales_of_tokens_are_refused_in_fp16():
    with pytest.raises(NotCovered, match="one scale a token and head in fp16"):
        attend([newest(20, 1)], OF_TOKENS)


def test_codes_of_the_newest_tokens_have_the_bits_of_a_prefill():
    prefill = attend([newest(600, 600)], (0.013, 0.021))
    for count in (1, 64):
        assert_same_bits(attend([newest(600, count)], (0.013, 0.021)), prefill[-count:], f"the newest {count}")


def test_decode_in_blocks_of_64_rows_as_on_a_datacenter_blackwell_is_near_float64(gpu):
    """Whether a request is alone, so that its splits are shared, or among others."""
    gpu.major = 10
    shape = AttentionShape(HEADS.query, HEADS.kv, HEADS.size, HEADS.dtype, REDUCTION)
    assert Planner(shape, torch.device("cpu"), 1, 1, 1000).decode_schedule.block_m == 64
    for chunks in (MIXED, MIXED[2:], [newest(length, 1, length) for length in (1, 257, 2049)]):
        assert (attend(chunks).double() - exact(chunks)).abs().max().item() < ATOL


@pytest.mark.parametrize(("name", "reached"), [("key", False), ("value", True)])
def test_an_infinite_key_of_a_later_token_is_masked_and_a_value_reaches_the_rows_of_its_block(name, reached):
    """But not in decode (the contract)."""
    clean = attend([newest(150, 150)])
    chunk = newest(150, 150)
    getattr(chunk.request, name)[140:] = math.inf
    dirty = attend([chunk])
    assert torch.equal(dirty[:128], clean[:128])
    assert not dirty[140:].isfinite().any()
    assert dirty[128:140].isnan().all() if reached else torch.equal(dirty[128:140], clean[128:140])
    assert torch.equal(attend([Chunk(chunk.request, 139, 140)])[0], clean[139])


def test_the_newest_tokens_have_the_bits_of_a_prefill():
    prefill = attend([newest(600, 600)])
    for count in (1, 5, 64):
        assert_same_bits(attend([newest(600, count)]), prefill[-count:], f"the newest {count}")


def test_one_plan_serves_every_mix_of_requests():
    """What a CUDA graph does: calls made with one plan serve other steps of its padded sizes, planned later."""
    tokens, most = 48, 47
    chunks = [newest(40 + 30 * seed, count, seed) for seed, count in enumerate((1, 1, 30, 2, 1, 12))]
    query, key, value, table, seq_lens, starts = paged(chunks)
    options = {"scale": 0.1, "reduction": REDUCTION, "implementation": "triton"}
    expected = paged_attention(query, key, value, table, seq_lens, starts, **options)
    planner = Planner(
        AttentionShape(HEADS.query, HEADS.kv, HEADS.size, query.dtype, REDUCTION), query.device, most, tokens, 9000
    )
    plan = planner.plan(torch.arange(most + 1), torch.ones(most), tokens, tokens)
    for mix in ([2, 0, 1, 3], [5, 4]):
        rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in mix])
        counts = torch.tensor([starts[i + 1] - starts[i] for i in mix])
        padded_query, out = query.new_zeros(tokens, *query.shape[1:]), torch.full((tokens, *query.shape[1:]), math.nan)
        padded_query[: len(rows)] = query[rows]
        lengths, begins = seq_lens.new_zeros(most), starts.new_full((most + 1,), len(rows))
        lengths[: len(mix)] = seq_lens[mix]
        begins[0] = 0
        begins[1 : len(mix) + 1] = counts.cumsum(0)
        padded_table = table.new_zeros(most, table.shape[1])
        padded_table[: len(mix)] = table[mix]
        planner.plan(begins, lengths, tokens, tokens)
        out = out.to(query.dtype)
        paged_attention(padded_query, key, value, padded_table, lengths, begins, plan=plan, out=out, **options)
        assert_same_bits(out[: len(rows)], expected[rows], f"requests {mix}")
        assert out[len(rows) :].isnan().all()


@pytest.mark.parametrize("most_tokens", [1, 5, 20])
def test_a_step_of_padding_alone_has_no_work(most_tokens):
    """What a draft model's CUDA graph is captured with."""
    query, key, value, table, _, _ = paged([newest(300, 20)])
    planner = Planner(
        AttentionShape(HEADS.query, HEADS.kv, HEADS.size, query.dtype, REDUCTION), query.device, 4, 20, 9000
    )
    starts, lengths = torch.zeros(5, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    for work in (planner.work_indptr, planner.prefill_count):
        work.fill_(7)
    plan = planner.plan(starts, lengths, 20, most_tokens)
    assert not planner.work_indptr.any()
    assert not planner.prefill_count.any()
    options = {
        "scale": 0.1,
        "reduction": REDUCTION,
        "implementation": "triton",
        "out": torch.full_like(query, math.nan),
    }
    out = paged_attention(query, key, value, table.repeat(4, 1), lengths, starts, plan=plan, **options)
    assert out.isnan().all()


def test_a_plan_of_another_reduction_is_refused():
    """Splits of the two would be merged as if they were the same."""
    query, key, value, table, seq_lens, starts = paged([newest(300, 1)])
    shape = AttentionShape(HEADS.query, HEADS.kv, HEADS.size, query.dtype, REDUCTION)
    planner = Planner(shape, query.device, 1, 1, 1000)
    plan = planner.plan(starts, seq_lens, 1, 1)
    options = {"scale": 0.1, "implementation": "triton", "plan": plan}
    for other in (AttentionReduction(), replace(REDUCTION, key_tile=32)):
        with pytest.raises(ValueError, match="does not fit a call"):
            paged_attention(query, key, value, table, seq_lens, starts, reduction=other, **options)


def test_a_plan_zeroes_the_counters_whatever_a_sleeping_engines_memory_came_back_with():
    shape = AttentionShape(4, 1, 64, torch.float16, REDUCTION)
    planner = Planner(shape, torch.device("cpu"), 3, 60, 50_000)
    for starts, lengths in (([0, 60], [16_384]), ([0, 1, 2, 3], [900, 3, 5000])):
        planner.semaphores.fill_(7)
        begins, lengths = torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
        planner.plan(begins, lengths, starts[-1], starts[1])
        assert len(planner.semaphores) > 0
        assert not planner.semaphores.any()


def decode_call(heads: Heads, lengths: list[int], tokens: int, codes: Codes = None) -> PagedAttention:
    """Requests of so many keys, the newest ``tokens`` of which are asked for."""
    chunks = [Chunk(Request(heads, length, seed), length - tokens, length) for seed, length in enumerate(lengths)]
    call = call_of(paged(chunks, 16, 0, math.nan), REDUCTION, scale=heads.size**-0.5)
    return replace(call, cache=call.cache.coded(*codes)) if codes else call


TO_CODES = QuantiseReduction.of_dtype(torch.float16, E4M3, 128)


@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.parametrize(
    ("heads", "tokens", "lengths", "codes"),
    [
        (Heads(4, 2, 128, torch.float16), 1, [1, 65, 2600], None),
        (Heads(2, 2, 128, torch.float16), 3, [3, 900], (0.25, 8.0)),
        (Heads(8, 1, 128, torch.float16), 1, [900, 40], None),
    ],
    ids=str,
)
def test_decode_keeps_the_codes_that_its_rows_are_quantised_to(heads, tokens, lengths, codes):
    """Of heads that one program has, and of those that several share; also of zeros and of what is not finite."""
    call = decode_call(heads, lengths, tokens, codes)
    call.query[0, 0] = math.nan
    for keys in (0, 3):
        call.cache.values[call.cache.block_table[0, 0], 0, keys] = 0
    alone, made = (torch.empty_like(call.query) for _ in range(2))
    attention_on_gpu(call, alone)
    attention_on_gpu(call, made, codes=TO_CODES)
    assert_same_bits(made, alone)
    assert kept(alone.flatten(1), TO_CODES) is None
    found = kept(made.flatten(1), TO_CODES)
    assert found is not None
    for one, other in zip(found, quantise(alone.flatten(1), codes=E4M3, group=128), strict=True):
        assert one.shape == other.shape
        assert_same_bits(*(each.view(torch.uint8) if each.dtype == E4M3 else each for each in (one, other)))


def test_no_codes_are_kept_of_rows_that_a_kernel_of_decode_has_not_all():
    """Of a prefill, of heads that are no group, and of a part of a memory."""
    heads, of_small = Heads(4, 2, 128, torch.float16), Heads(4, 2, 64, torch.float16)
    for call in (decode_call(heads, [300], 200), decode_call(of_small, [300], 1)):
        out = torch.empty_like(call.query)
        attention_on_gpu(call, out, codes=TO_CODES)
        assert kept(out.flatten(1), TO_CODES) is None
    call = decode_call(heads, [300, 20], 1)
    part, by_heads = (torch.empty(3, 4, 128, dtype=torch.float16)[:2], torch.empty(4, 2, 128, dtype=torch.float16))
    for out in (part, by_heads.transpose(0, 1)):
        attention_on_gpu(call, out, codes=TO_CODES)
        assert kept(out.flatten(1), TO_CODES) is None


@pytest.fixture
def small_certificate(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> SimpleNamespace:
    """A certificate of few keys: its shape, data, and ``compare``."""
    monkeypatch.setattr(certificate, "_LENGTH", 700)
    monkeypatch.setattr(certificate, "_PREFILL", 200)
    monkeypatch.setattr(certificate, "_BORDERS", (1, 64, 65, 257, 513, 700))
    stored = getattr(request, "param", None)
    shape = AttentionShape(HEADS.query, HEADS.kv, HEADS.size, HEADS.dtype, REDUCTION, stored)
    data = [certificate.by_scores(shape, torch.device("cpu"), 16)]

    def ways(queries_per_kv: int, decode_rows: int) -> list[tuple[str, list[certificate.Chunk]]]:
        return [
            ("by decode", [certificate.Chunk(stop, 1) for stop in certificate._BORDERS]),
            ("in a chunk", [certificate.Chunk(700, 20)]),
        ]

    monkeypatch.setattr(certificate, "ways", ways)
    return SimpleNamespace(
        shape=shape,
        compare=lambda kernels, *more, causal=True: certificate.compare(
            kernels, shape, data, [AttentionSpec(1.0, causal=causal)], *more
        ),
    )


@pytest.mark.parametrize("small_certificate", [None, E4M3], indirect=True, ids=["numbers", "codes"])
@pytest.mark.parametrize("kernels", [Kernels(sm90=False), Kernels(sm90=False, decode_rows=0)])
def test_kernels_that_agree_are_certified(kernels, small_certificate):
    assert small_certificate.compare(kernels) == (5 + 20) * HEADS.query * HEADS.size
    assert small_certificate.compare(kernels, True) == 2 * (5 + 20) * HEADS.query * HEADS.size
    assert small_certificate.compare(kernels, causal=False) == (1 + 20) * HEADS.query * HEADS.size


@pytest.mark.parametrize("causal", [True, False])
def test_a_decode_of_other_splits_is_not_certified(causal, small_certificate, monkeypatch):
    computed = certificate.paged_attention
    shape = replace(small_certificate.shape, reduction=AttentionReduction(32))
    other = Planner(shape, torch.device("cpu"), 9, 900, 9_000)

    def with_other_splits(call: PagedAttention, out: torch.Tensor, plan: Plan) -> None:
        if call.tokens == len(certificate._BORDERS):
            plan = other.plan(call.query_start_loc, call.seq_lens, call.tokens, 1)
            call = replace(call, reduction=other.shape.reduction)
        computed(call, out, plan)

    monkeypatch.setattr(certificate, "paged_attention", with_other_splits)
    found = small_certificate.compare(Kernels(sm90=False), causal=causal)
    assert "other bits by decode than by prefill" in str(found)
