"""Runs FlexAttention on a GPU's plan on the CPU: the Triton kernels around it in Triton's interpreter, FlexAttention
itself uncompiled, which looks at no block mask, so that the blocks become a part of the mask. A program of its own,
because Triton reads the setting when it is imported.

usage: TRITON_INTERPRET=1 python -m tests.ops.attention.interpreted_flex
"""

import math
import warnings
from contextlib import nullcontext

import torch

from tests.ops.attention.cases import Chunk, Heads, Request, exact, paged
from tests.ops.interpreted_checks import check
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops import attention
from vllm_batch_invariant.ops.attention import AttentionReduction, paged_attention
from vllm_batch_invariant.ops.attention.flex import cuda as flex_cuda
from vllm_batch_invariant.ops.attention.flex import plan as flex_plan
from vllm_batch_invariant.ops.attention.flex.kernels import FLEX_BLOCK_NUM_SPLITS
from vllm_batch_invariant.ops.attention.flex.plan import FlexTile, KeyLayout, Planner
from vllm_batch_invariant.ops.attention.plan import AttentionShape

HEADS = Heads(3, 1, 64)
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


def pretend_to_have_a_gpu() -> None:
    torch.cuda.device = torch.cuda.device_of = lambda device: nullcontext()
    attention.OF_DEVICE["cpu"] = "flex_cuda"
    attention.IMPLEMENTATIONS = (*attention.IMPLEMENTATIONS, "flex_cuda")
    attention._MODULES["flex_cuda"] = ".flex.cuda"
    flex_cuda.flex_attention = attend_to_listed_tiles
    flex_cuda._compiled = lambda scores: scores.attend
    flex_plan.tile_of = lambda shape: FlexTile(32, 32, 4, 1)


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


def check_values() -> None:
    """Features, layouts and page sizes are near float64."""
    borders = [newest(length, 1, length) for length in (1, 32, 33, 64, 65, 256, 257, 385)]
    many_heads = Heads(40, 1, 64)
    cases = [
        ("plain", MIXED, {}),
        ("every feature, by heads", MIXED, ALL | {"by_heads": True}),
        ("borders, window, other pages", borders, {"sliding_window": 33, "placement": 3, "page": 128}),
        ("more heads in a group than rows in a block", [newest(70, 3, 1, many_heads), newest(9, 1, 2, many_heads)], {}),
    ]
    for name, chunks, options in cases:
        features = {key: value for key, value in options.items() if key not in ("placement", "page", "by_heads")}
        error = (attend(chunks, **options).double() - exact(chunks, **features)).abs().max().item()
        check(f"{name}: off by {error:.1e}", error < ATOL)


def check_waves() -> None:
    """A wave at a time is only a schedule."""
    chunks, most = [newest(700, 8), newest(333, 20, 2)], flex_cuda.PARTIAL_BYTES
    whole = attend(chunks)
    flex_cuda.PARTIAL_BYTES = 1
    check("waves", torch.equal(attend(chunks), whole))
    flex_cuda.PARTIAL_BYTES = most


def check_that_no_item_is_too_many() -> None:
    """The lists have room for all items, and little more; the tiles of each ascend."""
    for window in (None, 1, 100):
        for chunks in (MIXED, MIXED[2:3], [newest(300, 70)]):
            query, keys, _, table, lengths, starts = lay_out(chunks)
            shape = AttentionShape(HEADS.query, HEADS.kv, HEADS.size, query.dtype, REDUCTION)
            planner = Planner(shape, KeyLayout.of(keys, 32), query.device, len(chunks), int(lengths.max()), (window,))
            plan = planner.plan(starts, lengths, table, decode=int(starts.diff().max()) == 1)
            masks = plan.masks[window]
            used = int(masks.blocks[:, FLEX_BLOCK_NUM_SPLITS.value].sum())
            room = len(masks.kv_num_blocks)
            check(f"{used} items in {room}, window {window}", used <= room and (room <= used + 2 or len(chunks) == 1))
            check(
                "all have keys",
                bool((masks.kv_num_blocks[:used] > 0).all() and (masks.kv_num_blocks[used:] == 0).all()),
            )
            counts = masks.kv_num_blocks[:used].tolist()
            firsts = [planner.first_keys[masks.kv_indices[i, :count].long()] for i, count in enumerate(counts)]
            check("tiles ascend", all(bool((first.diff() == 32).all()) for first in firsts))


def check_one_plan_for_every_step_of_decode() -> None:
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
        same = torch.equal(out[:rows], expected[:rows]) and bool(out[rows:].isnan().all())
        check(f"one plan, {shorter} keys fewer, window {window}", same)


def check_that_a_page_behind_the_window_may_be_gone() -> None:
    tensors = lay_out([newest(400, 10)])
    options = {"scale": 0.25, "reduction": REDUCTION, "sliding_window": 50, "implementation": "flex_cuda"}
    kept = paged_attention(*tensors, **options)
    tensors[3][0, : (390 - 50) // PAGE] = -1
    check("pages behind the window", torch.equal(paged_attention(*tensors, **options), kept))


def check_refusals() -> None:
    for name, error, chunks, options in (
        ("pages of 16", NotCovered, MIXED, {"page": 16}),
        ("a head of 272", NotCovered, [newest(3, 1, 1, Heads(1, 1, 272))], {}),
    ):
        try:
            attend(chunks, **options)
        except error as refused:
            check(f"{name}: {refused}", True)
        else:
            check(name, False)
    query, keys, values, table, lengths, starts = lay_out([newest(70, 1), newest(130, 1, 2)])
    table[1, 2] = table[0, 0]
    try:
        paged_attention(
            query, keys, values, table, lengths, starts, scale=1, reduction=REDUCTION, implementation="flex_cuda"
        )
    except ValueError as refused:
        check(str(refused), "several places" in str(refused))
    else:
        check("a page at two places", False)


def check_sinks() -> None:
    """Near float64 alone and with all options; the same bits in waves, by decode and among others; -inf is none."""
    sinks = torch.tensor([-1.0, 2.0, 5.0])
    chunks = [newest(300, 20, 2), newest(261, 1, 3), newest(20, 20, 4)]
    for name, options in (("alone", {}), ("with every option", ALL)):
        options = options | {"sinks": sinks}
        got = attend(chunks, **options)
        error = (got.double() - exact(chunks, **options)).abs().max().item()
        check(f"sinks {name}: off by {error:.1e}", error < ATOL)
        plain = attend(chunks, **options | {"sinks": None})
        check(f"sinks {name} change every row", bool((got != plain).flatten(1).any(1).all()))
        most, flex_cuda.PARTIAL_BYTES = flex_cuda.PARTIAL_BYTES, 1
        check(f"sinks {name} in waves", torch.equal(attend(chunks, **options), got))
        flex_cuda.PARTIAL_BYTES = most
        decode = attend([newest(300, 1, 2)], **options)[0]
        error = (decode - got[19]).abs().max().item()
        check(f"sinks {name} by decode: off by {error:.1e}", error < ATOL)
    none = attend(chunks, sinks=torch.full((3,), -math.inf))
    check("a sink without weight changes no bit", torch.equal(none, attend(chunks)))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    pretend_to_have_a_gpu()
    check_values()
    check_waves()
    check_that_no_item_is_too_many()
    check_one_plan_for_every_step_of_decode()
    check_that_a_page_behind_the_window_may_be_gone()
    check_refusals()
    check_sinks()
