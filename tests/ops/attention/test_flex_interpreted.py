"""FlexAttention on a GPU's plan, on the CPU: the Triton kernels around it in Triton's interpreter, FlexAttention itself
uncompiled, which looks at no block mask, so that the blocks become a part of the mask.
"""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.attention.cases import Chunk, Heads, Request, exact, paged
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops import attention
from vllm_batch_invariant.ops.attention import AttentionReduction, paged_attention
from vllm_batch_invariant.ops.attention.flex import cuda as flex_cuda
from vllm_batch_invariant.ops.attention.flex import plan as flex_plan
from vllm_batch_invariant.ops.attention.flex.kernels import FLEX_BLOCK_NUM_SPLITS
from vllm_batch_invariant.ops.attention.flex.plan import FlexTile, KeyLayout, Planner
from vllm_batch_invariant.ops.attention.shapes import AttentionShape
from vllm_batch_invariant.ops.devices import DEVICES

HEADS = Heads(3, 1, 64)
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
REDUCTION = AttentionReduction(128, ((64, 256),))
PAGE = 64
ATOL = 2e-5
"""Of fp32: FlexAttention that is not compiled adds up in an order that follows the number of threads."""


def attend_to_listed_tiles(query, key, value, *, score_mod, block_mask, scale, return_aux, kernel_options):
    """``flex_attention`` for a mask whose blocks count."""
    rows, keys = block_mask.BLOCK_SIZE
    assert (rows, keys) == (kernel_options["BLOCK_M"], kernel_options["BLOCK_N"])
    counts, tiles = block_mask.kv_num_blocks[0, 0], block_mask.kv_indices[0, 0]
    listed = torch.zeros(len(counts), -(-key.shape[2] // keys), dtype=torch.bool)
    for item, count in enumerate(counts.tolist()):
        listed[item, tiles[item, :count].long()] = True
    unread = ~listed.any(0).repeat_interleave(keys)[: key.shape[2]]
    value = value.masked_fill(unread[:, None], 0)
    mask_mod = block_mask.mask_mod
    block_mask.mask_mod = lambda b, h, row, slot: listed[row // rows, slot // keys] & mask_mod(b, h, row, slot)
    # Rows that are not there hold anything.
    query = query.nan_to_num(0)
    return EAGER(query, key, value, score_mod=score_mod, block_mask=block_mask, scale=scale, return_aux=return_aux)


EAGER = flex_cuda.flex_attention


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for a GPU that FlexAttention serves in small tiles."""
    for name in ("device", "device_of"):
        monkeypatch.setattr(torch.cuda, name, lambda device: nullcontext())
    monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], attention="flex_cuda"))
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", (*attention.IMPLEMENTATIONS, "flex_cuda"))
    monkeypatch.setitem(attention._MODULES, "flex_cuda", ".flex.cuda")
    monkeypatch.setattr(flex_cuda, "flex_attention", attend_to_listed_tiles)
    monkeypatch.setattr(flex_cuda, "_compiled", lambda scores: scores.attend)
    monkeypatch.setattr(flex_plan, "tile_of", lambda shape: FlexTile(32, 32, 4, 1))


def newest(length: int, count: int, seed: int = 1, heads: Heads = HEADS) -> Chunk:
    return Chunk(Request(heads, length, seed), length - count, length)


def lay_out(chunks: list[Chunk], placement: int = 0, page: int = PAGE, by_heads: bool = False) -> list[torch.Tensor]:
    """The tensors of a call; what is not written is NaN. As vLLM does, keys beside their values, heads inside slots."""
    query, keys, values, *rest = paged(chunks, page, placement, math.nan)
    cache = torch.cat([keys, values], -1)
    if not by_heads:
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    return [query, *cache.chunk(2, -1), *rest]


def attend(chunks: list[Chunk], placement: int = 0, page: int = PAGE, by_heads: bool = False, **options):
    tensors = lay_out(chunks, placement, page, by_heads)
    out = torch.full_like(tensors[0], math.nan)
    scale = chunks[0].request.heads.size ** -0.5
    return paged_attention(*tensors, scale=scale, reduction=REDUCTION, implementation="flex_cuda", out=out, **options)


MIXED = [newest(150, 31), newest(333, 7, 2), newest(261, 1, 3), newest(20, 20, 4), newest(1, 1, 5)]
ALL = {"sliding_window": 100, "logits_soft_cap": 2.0, "alibi_slopes": torch.tensor([0.5, -0.25, 0.0])}


MANY_HEADS = Heads(40, 1, 64)


@pytest.mark.parametrize(
    ("chunks", "layout", "options"),
    [
        pytest.param(MIXED, {}, {}, id="plain"),
        pytest.param(MIXED, {"by_heads": True}, ALL, id="every feature, by heads"),
        pytest.param(
            [newest(length, 1, length) for length in (1, 32, 33, 64, 65, 256, 257, 385)],
            {"placement": 3, "page": 128},
            {"sliding_window": 33},
            id="borders, window, other pages",
        ),
        pytest.param(
            [newest(70, 3, 1, MANY_HEADS), newest(9, 1, 2, MANY_HEADS)],
            {},
            {},
            id="more heads in a group than rows in a block",
        ),
    ],
)
def test_features_layouts_and_page_sizes_are_near_float64(chunks, layout, options):
    assert (attend(chunks, **layout, **options).double() - exact(chunks, **options)).abs().max().item() < ATOL


def test_a_wave_at_a_time_is_only_a_schedule(monkeypatch):
    chunks = [newest(700, 8), newest(333, 20, 2)]
    whole = attend(chunks)
    monkeypatch.setattr(flex_cuda, "PARTIAL_BYTES", 1)
    assert_same_bits(attend(chunks), whole)


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("chunks", [MIXED, MIXED[2:3], [newest(300, 70)]], ids=["mixed", "decode", "chunk"])
def test_the_lists_have_room_for_all_items_and_little_more_and_the_tiles_of_each_ascend(chunks, window):
    query, keys, _, table, lengths, starts = lay_out(chunks)
    shape = AttentionShape(HEADS.query, HEADS.kv, HEADS.size, query.dtype, REDUCTION)
    planner = Planner(shape, KeyLayout.of(keys, 32), query.device, len(chunks), int(lengths.max()), (window,))
    plan = planner.plan(starts, lengths, table, decode=int(starts.diff().max()) == 1)
    masks = plan.masks[window]
    used = int(masks.blocks[:, FLEX_BLOCK_NUM_SPLITS.value].sum())
    room = len(masks.kv_num_blocks)
    assert used <= room
    assert room <= used + 2 or len(chunks) == 1
    assert (masks.kv_num_blocks[:used] > 0).all()
    assert (masks.kv_num_blocks[used:] == 0).all()
    counts = masks.kv_num_blocks[:used].tolist()
    firsts = [planner.first_keys[masks.kv_indices[i, :count].long()] for i, count in enumerate(counts)]
    assert all((first.diff() == 32).all() for first in firsts)


def test_a_plan_of_another_reduction_than_the_calls_is_refused():
    query, keys, values, table, seq_lens, starts = lay_out([newest(300, 1)])
    shape = AttentionShape(HEADS.query, HEADS.kv, HEADS.size, query.dtype, AttentionReduction(256, key_tile=32))
    planner = Planner(shape, KeyLayout.of(keys, 32), query.device, 8, 1000, (None,))
    plan = planner.plan(starts, seq_lens, table, decode=True)
    with pytest.raises(ValueError, match="does not fit a call"):
        paged_attention(
            query, keys, values, table, seq_lens, starts, plan=plan, scale=0.1, reduction=REDUCTION,
            implementation="flex_cuda",
        )  # fmt: skip


def test_one_plan_serves_every_step_of_decode():
    """What a CUDA graph does: calls made with one plan serve other steps with as many requests, planned later."""
    lengths = [1, 65, 257, 300]
    chunks = [newest(length, 1, seed) for seed, length in enumerate(lengths)]
    query, keys, values, table, seq_lens, starts = lay_out(chunks)
    shape = AttentionShape(HEADS.query, HEADS.kv, HEADS.size, query.dtype, REDUCTION)
    planner = Planner(shape, KeyLayout.of(keys, 32), query.device, 8, 1000, (None, 50))
    options = {"scale": 0.1, "reduction": REDUCTION, "implementation": "flex_cuda"}
    plan = planner.plan(starts, seq_lens, table, decode=True)
    for shorter, window in ((0, 50), (60, None)):
        now = (seq_lens - shorter).clamp(min=0)
        begins = torch.cat([starts[:1], (now > 0).cumsum(0).int()])
        planner.plan(begins, now, table, decode=True)
        out = torch.full_like(query, math.nan)
        call = query, keys, values, table, now, begins
        paged_attention(*call, plan=plan, out=out, sliding_window=window, **options)
        expected = paged_attention(*call, sliding_window=window, **options)
        rows = int(begins[-1])
        assert_same_bits(out[:rows], expected[:rows], f"{shorter} keys fewer, window {window}")
        assert out[rows:].isnan().all()


def test_a_page_behind_the_window_may_be_gone():
    tensors = lay_out([newest(400, 10)])
    options = {"scale": 0.25, "reduction": REDUCTION, "sliding_window": 50, "implementation": "flex_cuda"}
    kept = paged_attention(*tensors, **options)
    tensors[3][0, : (390 - 50) // PAGE] = -1
    assert_same_bits(paged_attention(*tensors, **options), kept)


@pytest.mark.parametrize(
    ("chunks", "layout"),
    [
        pytest.param(MIXED, {"page": 16}, id="pages of 16"),
        pytest.param([newest(3, 1, 1, Heads(1, 1, 272))], {}, id="a head of 272"),
    ],
)
def test_what_flexattention_cannot_read_is_refused(chunks, layout):
    with pytest.raises(NotCovered):
        attend(chunks, **layout)


def test_a_page_at_two_places_is_refused():
    query, keys, values, table, lengths, starts = lay_out([newest(70, 1), newest(130, 1, 2)])
    table[1, 2] = table[0, 0]
    with pytest.raises(ValueError, match="several places"):
        paged_attention(
            query, keys, values, table, lengths, starts, scale=1, reduction=REDUCTION, implementation="flex_cuda"
        )


SINKS = torch.tensor([-1.0, 2.0, 5.0])
WITH_SINKS = pytest.mark.parametrize("options", [{}, ALL], ids=["alone", "with every option"])


@WITH_SINKS
def test_sinks_are_near_float64_and_change_every_row(options):
    chunks = [newest(300, 20, 2), newest(261, 1, 3), newest(20, 20, 4)]
    got = attend(chunks, sinks=SINKS, **options)
    assert (got.double() - exact(chunks, sinks=SINKS, **options)).abs().max().item() < ATOL
    assert (got != attend(chunks, **options)).flatten(1).any(1).all()
    assert (attend(chunks[:1], sinks=SINKS, **options) - got[:20]).abs().max().item() < ATOL


@WITH_SINKS
def test_a_sink_is_added_once_however_many_waves_a_block_has(monkeypatch, options):
    chunks = [newest(700, 8), newest(300, 20, 2)]
    whole = attend(chunks, sinks=SINKS, **options)
    monkeypatch.setattr(flex_cuda, "PARTIAL_BYTES", 1)
    assert_same_bits(attend(chunks, sinks=SINKS, **options), whole)


def test_a_sink_without_weight_changes_no_bit():
    assert_same_bits(attend(MIXED, sinks=torch.full((3,), -math.inf)), attend(MIXED))
