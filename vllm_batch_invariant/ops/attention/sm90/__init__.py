"""Attention on Hopper GPUs: the kernels of :mod:`.hopper_prefill` and :mod:`.hopper_decode` for a plan's two lists.

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
from ..params import PagedAttention
from .shapes import ACCOUNTS, ROWS, TILE

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from ..plan import AttentionShape

logger = logging.getLogger("vllm.batch_invariant")

_LOG2_E = math.log2(math.e)
_TRIED_PAGE = 64
"""Keys in a page of an engine's cache unless its user says otherwise: what is tried is what it will launch."""

PREFILL_STAGES = {64: 6, 128: 4}
"""Tiles in each ring of the prefill kernel by head size; what fits in shared memory."""
MOST_WAITS = 4096
"""Looks of a program that shares a block for the others, about 0.5 us each: far more than they need if they run."""


@dataclass(frozen=True)
class Decoding:
    """How the decode kernel shares a multiprocessor: speed only."""

    resident: int
    """Programs on a multiprocessor."""
    stages: int
    """Tiles in the ring."""
    registers: int
    """Limit for a thread, before the warps that copy give up theirs."""


DECODING = {64: Decoding(resident=3, stages=4, registers=80), 128: Decoding(resident=2, stages=3, registers=128)}
"""By head size."""


def covers(head_size: int, dtype: torch.dtype, tile: int, block_rows: int, device: torch.device) -> bool:
    """Whether the kernel can serve attention of such a shape there, with the bits of the Triton kernel."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return head_size in PREFILL_STAGES and dtype.itemsize == 2 and (tile, block_rows) == (TILE, ROWS)


@cache
def compiles(shape: "AttentionShape", decode_rows: int, device: torch.device) -> bool:
    """Whether the kernels can be compiled and loaded for layers of such a shape there; tried once in a process, by
    launching them with nothing to do. If not, a warning says why.

    The Triton kernel gives a row the same bits, so that the answer decides about speed alone.

    Args:
        shape: one that :func:`covers`.
        decode_rows: rows up to which a request gets a small block.
        device: the GPU.

    Raises:
        torch.OutOfMemoryError: no memory for some KB of tensors; nothing is known then.
    """
    try:
        _launch_without_work(shape, decode_rows, device)
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


def _launch_without_work(shape: "AttentionShape", decode_rows: int, device: torch.device) -> None:
    """Launch each variant that an engine's plans need."""

    def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    query = zeros(1, shape.heads, shape.head_size, dtype=shape.dtype)
    caches = [zeros(1, shape.kv_heads, _TRIED_PAGE, shape.head_size, dtype=shape.dtype) for _ in range(2)]
    call = PagedAttention(query, *caches, zeros(1, 1), zeros(1), zeros(2), 1.0, shape.reduction, None, None, None)
    work, accounts, partials = zeros(8), zeros(ACCOUNTS), [zeros(4, dtype=torch.float32) for _ in range(3)]
    with torch.cuda.device_of(query):
        launch_prefill(call, query, zeros(1), work, partials[0], accounts, 1)
        for kept_rows in {min(shape.queries_per_kv, decode_rows), decode_rows}:
            launch_decode(call, query, zeros(2), work, tuple(partials), accounts, kept_rows)


def is_plain(attention: Any) -> bool:
    """Whether a call, or an engine's layer, has none of the options that the kernels do not know."""
    options = attention.sliding_window, attention.logits_soft_cap, attention.alibi_slopes, attention.sinks
    return all(option is None for option in options)


def takes(call: PagedAttention, out: torch.Tensor) -> bool:
    """Whether the kernel serves a call, whose options and memory layout it has to know."""
    caches = call.key_cache, call.value_cache
    return (
        is_plain(call)
        and call.page_size >= 16
        and call.page_size & (call.page_size - 1) == 0
        and call.block_table.device == call.query.device
        and all(tensor.stride(-1) == 1 for tensor in (call.query, call.block_table, out))
        and all(cache.stride(-1) == 1 and cache.data_ptr() % 16 == 0 for cache in caches)
        and all(stride * cache.element_size() % 16 == 0 for cache in caches for stride in cache.stride()[:3])
        # Triton knows of 16 elements that they are a multiple of as many bytes, and copies 16 bytes at once.
        and call.query.data_ptr() % 16 == 0
        and all(stride % 16 == 0 for stride in call.query.stride()[:2])
    )


def _describe(cache: torch.Tensor) -> "TensorDescriptor":
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .common import cache_layout, page_part

    part, head_size = page_part(cache.shape[2]), cache.shape[3]
    block = [1, 1, part, head_size]
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), block, cache_layout(head_size))


def launch_prefill(
    call: PagedAttention,
    out: torch.Tensor,
    count: torch.Tensor,
    work: torch.Tensor,
    partials: torch.Tensor,
    accounts: torch.Tensor,
    programs: int,
) -> None:
    """Write the attention of the blocks in ``work`` to ``out``."""
    from .prefill import prefill_kernel

    table = call.block_table
    head_size, kv_heads = call.query.shape[2], call.key_cache.shape[1]
    reduction = call.reduction
    prefill_kernel[(programs,)](
        call.query,
        _describe(call.key_cache),
        _describe(call.value_cache),
        out,
        table,
        count,
        work,
        partials,
        accounts,
        call.scale * _LOG2_E,
        table.stride(0),
        *call.query.stride()[:2],
        *out.stride()[:2],
        kv_heads=kv_heads,
        group=call.query.shape[1] // kv_heads,
        head_size=head_size,
        page_size=call.page_size,
        levels=reduction.split_segments,
        stages=PREFILL_STAGES[head_size],
        most_waits=MOST_WAITS,
        consumer_registers=240,
        num_warps=4,
        maxnreg=168,
        enable_fp_fusion=False,
    )


def launch_decode(
    call: PagedAttention,
    out: torch.Tensor,
    first_entries: torch.Tensor,
    work: torch.Tensor,
    partials: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    accounts: torch.Tensor,
    kept_rows: int,
) -> None:
    """Write the attention of the parts in ``work`` to ``out``."""
    from .decode import decode_kernel

    table = call.block_table
    head_size, kv_heads = call.query.shape[2], call.key_cache.shape[1]
    reduction = call.reduction
    decode_kernel[(len(first_entries) - 1,)](
        call.query,
        _describe(call.key_cache),
        _describe(call.value_cache),
        out,
        table,
        first_entries,
        work,
        *partials,
        accounts,
        call.scale * _LOG2_E,
        table.stride(0),
        *call.query.stride()[:2],
        *out.stride()[:2],
        kv_heads=kv_heads,
        group=call.query.shape[1] // kv_heads,
        head_size=head_size,
        page_size=call.page_size,
        levels=reduction.split_segments,
        kept_rows=kept_rows,
        kept_block=triton.next_power_of_2(kept_rows),
        stages=DECODING[head_size].stages,
        num_warps=4,
        maxnreg=DECODING[head_size].registers,
        enable_fp_fusion=False,
    )
