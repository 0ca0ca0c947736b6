"""Attention on Hopper GPUs: the kernels of :mod:`.prefill` and :mod:`.decode` for a plan's two lists, the second of
which also reads keys and values in e4m3.

Gluon is imported when a kernel is first tried, so that a Triton without it, or with another one, serves all the same.
"""

import logging
import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton

from ...common.compile_errors import is_of_a_compiler, reason
from ...common.kv_cache import is_aligned, scale_strides
from ...common.launch import launch
from ...quantise.cuda import NOT_QUANTISED, Quantised
from ..params import AttentionSpec, PackedKeys, PagedAttention, PagedCache
from ..reduction import AttentionReduction
from ..shapes import AttentionShape
from .shapes import BLOCK_M, BLOCK_N, SEMAPHORE_INTS, SMALL_HEAD

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

logger = logging.getLogger("vllm.batch_invariant")

_LOG2_E = math.log2(math.e)
_TRIED_PAGE = 64
"""Keys in a page of an engine's cache unless its user says otherwise: what is tried is what it will launch."""


@dataclass(frozen=True)
class PrefillSchedule:
    """How the prefill kernel shares a multiprocessor: speed only."""

    num_stages: int
    """Tiles in each ring, or in the one of large heads."""
    max_spins: int = 4096
    """Looks of a CTA that shares a block for the others, about 0.5 us each: far more than they need if they run."""
    maxnreg: int = 168
    """Limit of a thread's registers, before the warps that copy give up theirs."""
    consumer_maxnreg: int = 240
    """Of a thread of the second warpgroup; what is left goes to the first."""


@dataclass(frozen=True)
class DecodeSchedule:
    """How the decode kernel shares a multiprocessor: speed only."""

    ctas_per_sm: int
    """CTAs on a multiprocessor."""
    num_stages: int
    """Tiles in the ring."""
    maxnreg: int
    """Limit of a thread's registers, before the warps that copy give up theirs."""


KNOWN = frozenset({"sliding_window", "sinks"})
"""What a layer may add to plain causal attention, where keys and values are no codes."""
PREFILL_SCHEDULES = {
    64: PrefillSchedule(num_stages=6),
    128: PrefillSchedule(num_stages=4),
    256: PrefillSchedule(num_stages=5),
}
"""By head size; what fits in shared memory."""
DECODE_SCHEDULES = {
    64: DecodeSchedule(ctas_per_sm=3, num_stages=4, maxnreg=80),
    128: DecodeSchedule(ctas_per_sm=2, num_stages=3, maxnreg=128),
    256: DecodeSchedule(ctas_per_sm=1, num_stages=3, maxnreg=240),
}
"""By head size, for blocks of up to 16 rows."""
_WIDE_DECODE_SCHEDULES = {
    64: DecodeSchedule(ctas_per_sm=2, num_stages=4, maxnreg=128),
    128: DecodeSchedule(ctas_per_sm=1, num_stages=6, maxnreg=200),
    256: DecodeSchedule(ctas_per_sm=1, num_stages=3, maxnreg=240),
}
"""The same for 32 rows, whose running results take more registers."""
CODES_DECODE_SCHEDULES = {
    64: DecodeSchedule(ctas_per_sm=5, num_stages=4, maxnreg=80),
    128: DecodeSchedule(ctas_per_sm=4, num_stages=3, maxnreg=96),
}
"""By head size, for keys and values in e4m3 and blocks of up to 8 rows: a tile is half as large, and CTAs are many,
since each waits for itself while it makes numbers of codes.
"""
_CODES_DECODE_SCHEDULES_OF_16_ROWS = {
    64: DecodeSchedule(ctas_per_sm=4, num_stages=5, maxnreg=96),
    128: DecodeSchedule(ctas_per_sm=3, num_stages=3, maxnreg=128),
}


def decode_schedule(shape: AttentionShape, decode_rows: int, partial_rows: int) -> DecodeSchedule:
    """For decode-like requests of up to so many rows, in a step whose blocks have ``partial_rows``."""
    if shape.cache_dtype is not None:
        return (CODES_DECODE_SCHEDULES if partial_rows <= 8 else _CODES_DECODE_SCHEDULES_OF_16_ROWS)[shape.head_size]
    return (DECODE_SCHEDULES if decode_rows <= 16 else _WIDE_DECODE_SCHEDULES)[shape.head_size]


@dataclass(frozen=True)
class PrefillWork:
    """A plan's prefill-like work, on the GPU."""

    count: torch.Tensor
    """[1] int32, work items, each for all KV heads."""
    items: torch.Tensor
    """[items, WORK_SIZE] int32."""
    workspace: torch.Tensor
    """[...] fp32, room for partial results."""
    semaphores: torch.Tensor
    """[...] int32, ``SEMAPHORE_INTS`` for each index of the workspace and KV head; 0 before and after."""
    ctas: int
    merged: torch.Tensor | None
    """[CTAs, BLOCK_M, head_size] fp32, or more, room for merged splits: see :func:`keeps_merged`."""


@dataclass(frozen=True)
class DecodeWork:
    """A plan's decode-like work, on the GPU."""

    indptr: torch.Tensor
    """[CTAs + 1] int32, the first work item of each CTA, and the end."""
    items: torch.Tensor
    """[items, WORK_SIZE] int32."""
    partials: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Row maxima [rows], row sums [rows] and values [rows, head_size], fp32: room for partial results."""
    semaphores: torch.Tensor
    """[...] int32, one for each index of the workspace and KV head; 0 before and after."""
    partial_rows: int
    """Rows of a block in its partial results."""


def covers(
    head_size: int, dtype: torch.dtype, key_tile: int, block_m: int, device: torch.device, in_codes: bool = False
) -> bool:
    """Whether the kernels can serve attention of such a shape there, with the bits of the Triton kernel."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    schedules = CODES_DECODE_SCHEDULES if in_codes else DECODE_SCHEDULES
    fits = head_size in schedules and dtype.itemsize == 2 and key_tile == BLOCK_N
    return fits and (block_m == BLOCK_M or not prefills(head_size))


def prefills(head_size: int) -> bool:
    """Whether the kernel of prefill has such heads; else Triton's serves it."""
    return head_size in PREFILL_SCHEDULES


def keeps_merged(head_size: int) -> bool:
    """Whether the kernel of prefill keeps merged splits in global memory."""
    return head_size > SMALL_HEAD and prefills(head_size)


def covers_packed(shape: AttentionShape, block_m: int, device: torch.device) -> bool:
    """Whether the kernel of prefill can serve attention over keys without pages there, of heads that need not be a
    power of two.
    """
    size, in_codes = shape.padded_head_size, shape.cache_dtype is not None
    is_small = prefills(size) and not keeps_merged(size)
    return is_small and not in_codes and covers(size, shape.dtype, shape.key_tile, block_m, device)


def knows(spec: AttentionSpec, in_codes: bool) -> bool:
    """Whether the kernels have all that a layer adds to plain causal attention."""
    return KNOWN.issuperset(spec.added) if not in_codes else not spec.added


def knows_packed(spec: AttentionSpec) -> bool:
    """The same over keys without pages: a row sees all of its request's."""
    return spec.added == ("causal",)


@cache
def compiles(shape: AttentionShape, partial_rows: frozenset[int], device: torch.device) -> bool:
    """Whether the kernels can be compiled and loaded for layers of such a shape there; tried once in a process, by
    launching them with nothing to do. If not, a warning says why.

    The Triton kernel gives a row the same bits, so that the answer decides about speed alone.

    Args:
        shape: one that :func:`covers`.
        partial_rows: of decode-like blocks in their partial results, all that there may be.
        device: the GPU.

    Raises:
        torch.OutOfMemoryError: no memory for some KB of tensors; nothing is known then.
    """
    try:
        _launch_without_work(shape, partial_rows, device)
    except Exception as error:
        if not is_of_a_compiler(error):
            raise
        logger.warning(
            "The Hopper kernels of attention cannot be used with Triton %s for %s heads of size %d (%d for keys and "
            "values): the Triton kernel serves, with the same bits, slower. %s",
            triton.__version__,
            shape.heads,
            shape.head_size,
            shape.kv_heads,
            reason(error),
        )
        return False
    return True


def _launch_without_work(shape: AttentionShape, partial_rows: frozenset[int], device: torch.device) -> None:
    """Launch each variant that an engine's plans need."""

    def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    query = zeros(1, shape.heads, shape.head_size, dtype=shape.dtype)
    stored = shape.cache_dtype or shape.dtype
    caches = [zeros(1, shape.kv_heads, _TRIED_PAGE, shape.head_size, dtype=stored) for _ in range(2)]
    scales = [] if shape.cache_dtype is None else [zeros(1, dtype=torch.float32)[0] for _ in range(2)]
    cache = PagedCache(*caches, zeros(1, 1), None, *scales)
    call = PagedAttention(query, cache, zeros(1), zeros(2), AttentionSpec(1.0), shape.reduction)
    items, semaphores, [m, l, acc] = zeros(8), zeros(SEMAPHORE_INTS), [zeros(4, dtype=torch.float32) for _ in range(3)]
    if shape.cache_dtype is None and prefills(shape.head_size):
        merged = m if keeps_merged(shape.head_size) else None
        work = PrefillWork(zeros(1), items, m, semaphores, 1, merged)
        launch_prefill(call, query, work, shape.reduction, PREFILL_SCHEDULES[shape.head_size])
    for rows in sorted(partial_rows):
        work = DecodeWork(zeros(2), items, (m, l, acc), semaphores, rows)
        launch_decode(call, query, work, shape.reduction, decode_schedule(shape, max(partial_rows), rows))


def takes(call: PagedAttention, out: torch.Tensor) -> bool:
    """Whether the kernels serve a call: a layer and a memory layout that they know; decode's alone where keys and
    values are codes, whose scales are given, and prefill's alone where keys have no pages.
    """
    cache, page_size = call.cache, call.cache.page_size
    in_pages = page_size >= 16 and page_size & (page_size - 1) == 0 and cache.block_table.device == call.query.device
    is_packed = isinstance(cache, PackedKeys)
    return (
        (knows_packed(call.spec) if is_packed else in_pages and knows(call.spec, cache.holds_codes))
        and (call.spec.sinks is None or (call.spec.sinks.is_contiguous() and call.spec.sinks.device == out.device))
        and not cache.scales_of_tokens
        and not cache.tail
        and all(tensor.stride(-1) == 1 for tensor in (call.query, cache.block_table, out))
        and all(one.stride(-1) == 1 and is_aligned(one) for one in (cache.keys, cache.values))
        # Triton knows of 16 elements that they are a multiple of as many bytes, and copies 16 bytes at once.
        and call.query.data_ptr() % 16 == 0
        and all(stride % 16 == 0 for stride in call.query.stride()[:2])
    )


def _gluon_descriptor(cache: torch.Tensor, is_packed: bool = False) -> "TensorDescriptor":
    """Of keys or values; codes as bytes. Those without pages are one page of as many keys as there are."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .common import get_cache_layout, keys_per_copy

    head_dim = triton.next_power_of_2(cache.shape[3])
    if cache.dtype.itemsize == 1:
        cache = cache.view(torch.uint8)
    layout = get_cache_layout(head_dim, 8 * cache.dtype.itemsize)
    block = [1, 1, BLOCK_N if is_packed else keys_per_copy(cache.shape[2]), head_dim]
    if is_packed:
        cache = cache.transpose(0, 2)
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), block, layout)


def _layer_constexprs(call: PagedAttention, reduction: AttentionReduction) -> dict[str, Any]:
    kv_heads = call.cache.kv_heads
    return {
        "NUM_KV_HEADS": kv_heads,
        "QUERIES_PER_KV": call.query.shape[1] // kv_heads,
        "HEAD_DIM": triton.next_power_of_2(call.query.shape[2]),
        "PAGE_SIZE": 0 if isinstance(call.cache, PackedKeys) else call.cache.page_size,
        "SPLIT_SEGMENTS": reduction.split_segments,
        "WINDOW": call.spec.sliding_window or 0,
    }


def launch_prefill(
    call: PagedAttention,
    out: torch.Tensor,
    work: PrefillWork,
    reduction: AttentionReduction,
    schedule: PrefillSchedule,
) -> None:
    """Write the attention of the blocks in ``work`` to ``out``, by splits of ``reduction``, that of the plan."""
    from .prefill import prefill_kernel

    block_table, is_packed = call.cache.block_table, isinstance(call.cache, PackedKeys)
    launch(
        prefill_kernel,
        work.ctas,
        (
            call.query,
            _gluon_descriptor(call.cache.keys, is_packed),
            _gluon_descriptor(call.cache.values, is_packed),
            out,
            block_table,
            work.count,
            work.items,
            work.workspace,
            work.semaphores,
            work.merged,
            call.spec.sinks,
            call.spec.scale * _LOG2_E,
            block_table.stride(0),
            *call.query.stride()[:2],
            *out.stride()[:2],
        ),
        on=out,
        **_layer_constexprs(call, reduction),
        HEAD_SIZE=call.query.shape[2],
        CAUSAL=call.spec.causal,
        NUM_STAGES=schedule.num_stages,
        MAX_SPINS=schedule.max_spins,
        CONSUMER_MAXNREG=schedule.consumer_maxnreg,
        maxnreg=schedule.maxnreg,
    )


def launch_decode(
    call: PagedAttention,
    out: torch.Tensor,
    work: DecodeWork,
    reduction: AttentionReduction,
    schedule: DecodeSchedule,
    made: Quantised = NOT_QUANTISED,
) -> None:
    """Write the attention of the parts in ``work`` to ``out``, by splits of ``reduction``, that of the plan, and codes
    of heads of 128 as ``made`` says.
    """
    from .decode import decode_kernel

    block_table = call.cache.block_table
    launch(
        decode_kernel,
        len(work.indptr) - 1,
        (
            call.query,
            _gluon_descriptor(call.cache.keys),
            _gluon_descriptor(call.cache.values),
            out,
            block_table,
            work.indptr,
            work.items,
            *work.partials,
            work.semaphores,
            call.cache.k_scale,
            call.cache.v_scale,
            scale_strides(call.cache.k_scale)[1],
            call.spec.sinks,
            call.spec.scale * _LOG2_E,
            block_table.stride(0),
            *call.query.stride()[:2],
            *out.stride()[:2],
            *made.operands,
        ),
        on=out,
        waits=True,
        **_layer_constexprs(call, reduction),
        PARTIAL_ROWS=work.partial_rows,
        PARTIAL_BLOCK=triton.next_power_of_2(work.partial_rows),
        **made.constants,
        NUM_STAGES=schedule.num_stages,
        maxnreg=schedule.maxnreg,
    )
