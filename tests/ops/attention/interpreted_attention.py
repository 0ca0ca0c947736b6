"""Runs the GPU's attention kernels in Triton's interpreter, on the CPU; a program of its own, because Triton reads the
setting when it is imported.

usage: TRITON_INTERPRET=1 python -m tests.ops.attention.interpreted_attention
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import torch

from tests.ops.attention.cases import Chunk, Heads, Request, exact, paged
from tests.ops.interpreted_checks import check
from vllm_batch_invariant.ops import attention
from vllm_batch_invariant.ops.attention import AttentionReduction, certificate, paged_attention
from vllm_batch_invariant.ops.attention.params import PagedAttention
from vllm_batch_invariant.ops.attention.plan import AttentionShape, Kernels, Plan, Planner

HEADS = Heads(2, 1, 64, torch.float16)
"""In bf16 the interpreter multiplies wrongly."""
REDUCTION = AttentionReduction.of_device("cuda")
PROCESSORS = 5
ATOL = 2e-3


def pretend_to_have_a_gpu() -> None:
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=PROCESSORS)
    torch.cuda.get_device_capability = lambda device: (8, 0)
    torch.cuda.device = torch.cuda.device_of = lambda device: nullcontext()
    attention.OF_DEVICE["cpu"] = "triton"


def newest(length: int, count: int, seed: int = 1) -> Chunk:
    return Chunk(Request(HEADS, length, seed), length - count, length)


def attend(chunks: list[Chunk], **options: object) -> torch.Tensor:
    tensors = paged(chunks, 16, 0, math.nan)
    out = torch.full_like(tensors[0], math.nan)
    scale = HEADS.size**-0.5
    return paged_attention(*tensors, scale=scale, reduction=REDUCTION, implementation="triton", out=out, **options)


def check_parts() -> None:
    """Every split of every head is in one part, and no part is much longer than another."""
    for kv_heads, lengths, tokens in (
        (1, [1, 256, 257, 2049, 2561], [1] * 5),
        (2, [40_000, 3, 0, 700], [1, 1, 0, 1]),
        (3, [1000, 5000, 64, 65, 2000], [1, 40, 2, 4, 1]),
        (8, [4096] * 3, [1] * 3),
    ):
        shape = AttentionShape(4 * kv_heads, kv_heads, 64, torch.float16, REDUCTION)
        planner = Planner(shape, torch.device("cpu"), len(lengths), sum(tokens), sum(lengths) + 64 * len(lengths))
        starts = torch.tensor([0, *tokens]).cumsum(0).int()
        planner.plan(starts, torch.tensor(lengths, dtype=torch.int32), sum(tokens), max(tokens) == 1)
        found, keys, whole = [], [], True
        for begin, end in pairwise(planner.work_indptr.tolist()):
            entries = [entry for entry in planner.decode_work[begin:end].tolist() if entry[3]]
            for request, head, split, count, slot, *_ in entries:
                found += [(request, head, number) for number in range(split, split + count)]
                whole &= (slot < 0) == (count == REDUCTION.split_of(lengths[request] - 1) + 1)
            keys.append(
                sum(
                    min(REDUCTION.start_of(split + count), lengths[request]) - REDUCTION.start_of(split)
                    for request, _, split, count, *_ in entries
                )
            )
        expected = [
            (request, head, split)
            for request, (length, new) in enumerate(zip(lengths, tokens, strict=True))
            if 0 < 4 * new <= 16
            for head in range(kv_heads)
            for split in range(REDUCTION.split_of(length - 1) + 1)
        ]
        equal = max(keys) <= sum(keys) / len(keys) + 2 * REDUCTION.split_size
        check(f"parts of {lengths}", whole and sorted(found) == expected and equal)


def check_order() -> None:
    """Every block of requests of many rows is listed once, those with the most keys first."""
    lengths, tokens = [900, 64, 0, 5000, 300, 2000], [900, 60, 0, 700, 1, 33]
    shape = AttentionShape(14, 2, 64, torch.float16, REDUCTION)
    planner = Planner(shape, torch.device("cpu"), len(lengths), sum(tokens), 2 * sum(lengths))
    starts = torch.tensor([0, *tokens]).cumsum(0).int()
    plan = planner.plan(starts, torch.tensor(lengths, dtype=torch.int32), sum(tokens), max(tokens) == 1)
    entries = planner.prefill_work[: int(planner.prefill_count)].tolist()
    rows, group = planner.prefill_schedule.block_m, shape.queries_per_kv
    expected = [
        (request, block * rows)
        for request, new in enumerate(tokens)
        if new * group > 16
        for block in range(-(-new * group // rows))
    ]
    keys = [min((first + rows - 1) // group, new - 1) + 1 + past for _, first, *_, new, past in entries]
    listed = sorted((request, first) for request, first, *_ in entries) == expected
    tiles = [-(-count // shape.key_tile) for count in keys]
    check("order", not plan.may_share_prefill and listed and tiles == sorted(tiles, reverse=True))


def check_shared_blocks() -> None:
    """The splits of few blocks are in parts, each split of each block in one, and the parts of a block about equal."""
    for kv_heads, lengths, tokens in (
        (1, [16_384], [60]),
        (1, [5000, 3, 2700], [33, 1, 20]),
        (2, [40_000, 0, 300], [17, 0, 20]),
        (1, [700, 2049], [90, 64]),
        (1, [3000], [20]),
    ):
        shape = AttentionShape(4 * kv_heads, kv_heads, 64, torch.float16, REDUCTION)
        planner = Planner(shape, torch.device("cpu"), len(lengths), sum(tokens), sum(lengths) + 64 * len(lengths))
        planner._prefill_ctas = 16
        starts = torch.tensor([0, *tokens]).cumsum(0).int()
        planner.plan(starts, torch.tensor(lengths, dtype=torch.int32), sum(tokens), max(tokens) == 1)
        entries = planner.prefill_work[: int(planner.prefill_count)].tolist()
        fits, slots = len(entries) * kv_heads <= planner._prefill_ctas, []
        for request, new in enumerate(tokens):
            rows = planner.prefill_schedule.block_m
            for block in range(-(-4 * new // rows) if new > 4 else 0):
                first, last = block * rows, (block + 1) * rows - 1
                keys = min(last // 4, new - 1) + 1 + lengths[request] - new
                parts = sorted(entry[2:5] for entry in entries if entry[:2] == [request, first])
                ends = [begin + count for begin, count, _ in parts]
                fits &= [begin for begin, *_ in parts] == [0, *ends[:-1]] and all(count > 0 for _, count, _ in parts)
                fits &= ends[-2:-1] < [REDUCTION.split_of(keys - 1) + 1] <= ends[-1:]
                longest = max(
                    min(REDUCTION.start_of(begin + count), keys) - REDUCTION.start_of(begin)
                    for begin, count, _ in parts
                )
                fits &= longest <= keys / len(parts) + REDUCTION.split_size
                if len(parts) > 1:
                    [slot] = {slot for *_, slot in parts}
                    slots += range(slot, slot + ends[-1])
                else:
                    fits &= parts[0][2] == -1
        fits &= len(set(slots)) == len(slots) and all(0 <= slot < planner._prefill_workspace for slot in slots)
        check(f"{len(entries)} entries of blocks of {lengths}", fits and (len(slots) > 0))


def check_values() -> None:
    """Every way to spread work, and every option, is near float64."""
    mixed = [newest(150, 150), newest(777, 7, 2), newest(2600, 1, 3)]
    borders = [newest(length, 1, length) for length in (1, 256, 257, 2049, 2561)]
    for name, chunks, options in (
        ("mixed", mixed, {}),
        ("window and soft-cap", mixed, {"sliding_window": 300, "logits_soft_cap": 2.0}),
        ("ALiBi", mixed[1:2], {"alibi_slopes": torch.linspace(-0.3, 0.5, HEADS.query)}),
        ("sinks", mixed[1:2], {"sinks": torch.linspace(-2, 6, HEADS.query)}),
        ("borders", borders, {}),
    ):
        error = (attend(chunks, **options).double() - exact(chunks, **options)).abs().max().item()
        check(f"{name}: off by {error:.1e}", error < ATOL)


def check_what_is_not_finite() -> None:
    """Of later tokens in a row's block: a key is masked; a value reaches the row, but not in decode (the contract)."""
    clean = attend([newest(150, 150)])
    for name, reached in (("key", False), ("value", True)):
        chunk = newest(150, 150)
        getattr(chunk.request, name)[140:] = math.inf
        dirty = attend([chunk])
        earlier = torch.equal(dirty[:128], clean[:128]) and not dirty[140:].isfinite().any()
        block = dirty[128:140].isnan().all() if reached else torch.equal(dirty[128:140], clean[128:140])
        decoded = torch.equal(attend([Chunk(chunk.request, 139, 140)])[0], clean[139])
        check(f"an infinite {name} of a later token", bool(earlier and block and decoded))


def check_decode_against_prefill() -> None:
    prefill = attend([newest(600, 600)])
    for count in (1, 5, 64):
        check(f"the newest {count}", torch.equal(attend([newest(600, count)]), prefill[-count:]))


def check_one_plan_for_every_mix() -> None:
    """What a CUDA graph does: calls made with one plan serve other steps of its padded sizes, planned later."""
    tokens, most = 48, 47
    chunks = [newest(40 + 30 * seed, count, seed) for seed, count in enumerate((1, 1, 30, 2, 1, 12))]
    query, key, value, table, seq_lens, starts = paged(chunks)
    options = {"scale": 0.1, "reduction": REDUCTION, "implementation": "triton"}
    expected = paged_attention(query, key, value, table, seq_lens, starts, **options)
    planner = Planner(
        AttentionShape(HEADS.query, HEADS.kv, HEADS.size, query.dtype, REDUCTION), query.device, most, tokens, 9000
    )
    plan = planner.plan(torch.arange(most + 1), torch.ones(most), tokens, decode=False)
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
        planner.plan(begins, lengths, tokens, decode=False)
        out = out.to(query.dtype)
        paged_attention(padded_query, key, value, padded_table, lengths, begins, plan=plan, out=out, **options)
        same = torch.equal(out[: len(rows)], expected[rows])
        check(f"one plan for requests {mix}", same and bool(out[len(rows) :].isnan().all()))


def check_counters() -> None:
    """A plan zeroes the counters, whatever a sleeping engine's memory came back with."""
    shape = AttentionShape(4, 1, 64, torch.float16, REDUCTION)
    planner = Planner(shape, torch.device("cpu"), 3, 60, 50_000)
    for starts, lengths in (([0, 60], [16_384]), ([0, 1, 2, 3], [900, 3, 5000])):
        planner.semaphores.fill_(7)
        begins, lengths = torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
        planner.plan(begins, lengths, starts[-1], decode=len(lengths) == 3)
        check(f"{len(planner.semaphores)} counters of {len(lengths)} requests", not planner.semaphores.any())


def check_certificate() -> None:
    """Kernels that agree pass; a decode of other splits does not."""
    certificate._LENGTH, certificate._PREFILL, certificate._BORDERS = 700, 200, (1, 64, 65, 257, 513, 700)
    shape = AttentionShape(HEADS.query, HEADS.kv, HEADS.size, HEADS.dtype, REDUCTION)
    data = [certificate.by_scores(shape, torch.device("cpu"), 16)]
    certificate.ways = lambda group: [
        ("by decode", [certificate.Chunk(stop, 1) for stop in certificate._BORDERS]),
        ("in a chunk", [certificate.Chunk(700, 20)]),
    ]
    for kernels in (Kernels(sm90=False), Kernels(sm90=False, decode_rows=0)):
        found = certificate.compare(kernels, shape, data, [certificate.Options()])
        check(f"certificate of {kernels}: {found}", found == (5 + 20) * HEADS.query * HEADS.size)
    computed = certificate.paged_attention
    other = Planner(replace(shape, reduction=AttentionReduction(32)), torch.device("cpu"), 9, 900, 9_000)

    def with_other_splits(call: PagedAttention, out: torch.Tensor, plan: Plan) -> None:
        if call.tokens == len(certificate._BORDERS):
            plan = other.plan(call.query_start_loc, call.seq_lens, call.tokens, decode=True)
            call = replace(call, reduction=other.shape.reduction)
        computed(call, out, plan)

    certificate.paged_attention = with_other_splits
    found = certificate.compare(Kernels(sm90=False), shape, data, [certificate.Options()])
    check(f"certificate of other splits: {found}", "other bits by decode than by prefill" in str(found))


if __name__ == "__main__":
    pretend_to_have_a_gpu()
    check_parts()
    check_order()
    check_shared_blocks()
    check_values()
    check_what_is_not_finite()
    check_decode_against_prefill()
    check_one_plan_for_every_mix()
    check_counters()
    check_certificate()
