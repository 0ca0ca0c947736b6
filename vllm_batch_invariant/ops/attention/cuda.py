"""Paged attention on a GPU, in Triton: work is planned on the GPU once a step and done by one kernel for prefill and
decode, so that a step needs nothing from the host and can be a CUDA graph.

A request of few rows (decode) and one of many (prefill) get blocks of other sizes, and a block may walk all its splits
or leave each to a program of its own: a matter of speed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ...errors import NotCovered
from . import sm90
from .params import PagedAttention
from .plan_kernels import plan_kernel
from .reduction import AttentionReduction
from .shared_memory import fitted
from .sm90.shapes import SEMAPHORE_INTS
from .triton_kernels import attention_kernel
from .work import WORK_SIZE

_LOG2_E = math.log2(math.e)
_LARGEST_HEAD = 256
FEW_ROWS = 16
"""Rows, (token, head of the group) pairs, up to which a request gets a small block."""
PARTIAL_BYTES = 128 << 20
"""For partial results; with less than a step wants, programs walk all splits of their rows."""
_PLANNED_AT_ONCE = 256


@dataclass(frozen=True)
class Blocks:
    """How a program holds its query rows: speed only."""

    rows: int
    warps: int
    stages: int
    resident: int = 1
    """Programs that fit on a multiprocessor."""
    registers: int | None = None
    """Limit for a thread, to make them fit."""


def key_tile(dtype: torch.dtype, split_size: int) -> int:
    """Keys taken in one step of the online softmax; a part of the reduction."""
    return min(32 if dtype == torch.float32 else 64, split_size)


def small_blocks(head_size: int, dtype: torch.dtype) -> Blocks:
    """The block for a request of up to :data:`FEW_ROWS` rows."""
    if dtype == torch.float32:
        # Products in fp32 hold whole rows of both operands in registers.
        return Blocks(16, warps=8, stages=1)
    return Blocks(16, warps=4, stages=3 if head_size <= 128 else 2, resident=2)


def large_blocks(head_size: int, dtype: torch.dtype) -> Blocks:
    """The block for a request of more rows."""
    if dtype == torch.float32:
        return Blocks(16, warps=8, stages=1)
    return Blocks(128, warps=8, stages=3 if head_size <= 64 else 2) if head_size <= 128 else Blocks(64, 8, 1)


@dataclass(frozen=True)
class Shape:
    """What a plan depends on, apart from the batch."""

    heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    reduction: AttentionReduction

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.heads} query heads over {self.kv_heads} KV heads of size {self.head_size} in {dtype}"

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def padded_size(self) -> int:
        return triton.next_power_of_2(self.head_size)

    @property
    def tile(self) -> int:
        return key_tile(self.dtype, self.reduction.smallest)


@dataclass(frozen=True)
class Kernels:
    """Which kernels serve attention: speed only, where :mod:`.certificate` has compared them."""

    hopper: bool
    """The Gluon kernels for Hopper, where they know a layer's options and layout; else the Triton kernel."""
    few_rows: int = FEW_ROWS
    """Rows up to which a request gets a small block; with 0 one block size serves all."""

    @classmethod
    def candidates(cls, shape: Shape, device: torch.device, plain: bool = True) -> Iterator["Kernels"]:
        """What could serve such layers, the fastest first; ``plain`` as in :class:`Planner`."""
        block_rows = large_blocks(shape.head_size, shape.dtype).rows
        if plain and sm90.covers(shape.head_size, shape.dtype, shape.tile, block_rows, device):
            yield cls(hopper=True)
        yield cls(hopper=False)
        yield cls(hopper=False, few_rows=0)

    @classmethod
    def fastest(cls, shape: Shape, device: torch.device, plain: bool = True) -> "Kernels":
        """The first of them that can be compiled; their bits are not compared."""
        found = cls.candidates(shape, device, plain)
        return next(one for one in found if not one.hopper or sm90.compiles(shape, FEW_ROWS, device))

    def __str__(self) -> str:
        if self.hopper:
            return "the Gluon kernels"
        return "the Triton kernel" if self.few_rows else "the Triton kernel with large blocks alone"


@dataclass(frozen=True)
class Plan:
    """One step's work, on the GPU: what every layer of the step does."""

    planner: "Planner"
    small: bool
    """Whether a request can have few rows."""
    large_programs: int
    """Programs for requests of many rows; 0 if there can be none."""
    may_share_large: bool
    """Whether programs may share the splits of large blocks: if there are few of them on the GPU."""
    kept_rows: int
    """Rows of a small block whose partial results are kept."""


class Planner:
    """The memory of plans, made once so that its addresses can be part of a CUDA graph; a plan replaces the last.

    Args:
        shape: of the layers.
        device: the GPU.
        most_requests: in a step.
        most_tokens: in a step.
        most_keys: of all requests of a step together.
        plain: a layer may have none of the options that :mod:`.hopper` does not know.
        kernels: what serves; by default :meth:`Kernels.fastest`.
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        most_requests: int,
        most_tokens: int,
        most_keys: int,
        plain: bool = True,
        kernels: Kernels | None = None,
    ) -> None:
        if shape.head_size > _LARGEST_HEAD:
            raise NotCovered(
                f"attention heads of size {shape.head_size}",
                f"the kernel has sizes up to {_LARGEST_HEAD}",
                "serve another model",
            )
        self.shape, self.device = shape, device
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.small, self.large = (
            fitted(small_blocks(shape.head_size, shape.dtype), shape, device),
            large_blocks(shape.head_size, shape.dtype),
        )
        kernels = kernels or Kernels.fastest(shape, device, plain)
        self.hopper, self.few_rows = kernels.hopper, kernels.few_rows
        splits = most_keys // shape.reduction.smallest + most_requests
        blocks = self._most_blocks(most_tokens, most_requests)
        self._partial_rows = PARTIAL_BYTES // (4 * (shape.padded_size + 2))
        self._slots = splits
        # Large blocks are shared only while they are few.
        self._items = self.processors if self.hopper else 4 * self.processors
        most_shared = self._items // 2 // shape.kv_heads
        self._room_large = min(most_shared * splits, self._partial_rows // (shape.kv_heads * self.large.rows))
        resident = sm90.DECODING[shape.head_size].resident if self.hopper else self.small.resident
        self.parts = resident * self.processors
        self.first_entries = torch.zeros(self.parts + 1, dtype=torch.int32, device=device)
        entries = most_requests * shape.kv_heads + self.parts
        self.small_list = torch.empty(entries, WORK_SIZE.value, dtype=torch.int32, device=device)
        self.large_count = torch.zeros(1, dtype=torch.int32, device=device)
        shared = self._items // shape.kv_heads
        self.large_list = torch.empty(max(blocks, shared), WORK_SIZE.value, dtype=torch.int32, device=device)
        rows = shape.kv_heads * max(splits * FEW_ROWS, self._room_large * self.large.rows)
        # A multiple of 4, for copies of 16 bytes.
        kept = -(-min(self._partial_rows, rows) // 4) * 4
        self.partials = torch.empty(kept * (shape.padded_size + 2), device=device)
        self.top, self.weight, acc = self.partials.split([kept, kept, kept * shape.padded_size])
        self.acc = acc.view(kept, shape.padded_size)
        arrivals = max(self._room_small(1), SEMAPHORE_INTS * self._room_large) * shape.kv_heads
        self.arrived = torch.zeros(arrivals, dtype=torch.int32, device=device)

    def _most_blocks(self, tokens: int, requests: int) -> int:
        """Large blocks that requests of so many tokens together may have: the last of each may be partly empty."""
        rows = tokens * self.shape.group
        return rows // self.large.rows + min(requests, rows // (self.few_rows + 1))

    def _room_small(self, kept_rows: int) -> int:
        return min(self._slots, self._partial_rows // (self.shape.kv_heads * kept_rows))

    def plan(self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, tokens: int, decode: bool) -> Plan:
        """Plan a step; launches one kernel and reads nothing back.

        What it decides on the host depends on ``tokens``, the number of requests and ``decode``, which a CUDA graph
        fixes: calls that were captured with one plan serve every other step with these three.

        Args:
            query_start_loc: [requests + 1] on the GPU.
            seq_lens: [requests] on the GPU.
            tokens: rows of the query, or more. A request may have all of them, whatever the number of requests.
            decode: no request has more than one token.
        """
        requests, shape = len(seq_lens), self.shape
        small = shape.group <= self.few_rows
        large = (1 if decode else tokens) * shape.group > self.few_rows
        kept_rows = shape.group if decode and small else FEW_ROWS
        blocks = self._most_blocks(tokens, requests) if large else 0
        # On Hopper it costs nothing that they may.
        may_share = self.hopper or 0 < blocks * shape.kv_heads <= self._items // 2
        if requests:
            with torch.cuda.device(self.device):
                plan_kernel[(requests,)](
                    query_start_loc,
                    seq_lens,
                    self.first_entries,
                    self.small_list,
                    self.large_count,
                    self.large_list,
                    self.arrived,
                    requests,
                    len(self.arrived),
                    self._room_small(kept_rows),
                    self._room_large if may_share else -1,
                    self.parts,
                    self._items,
                    kv_heads=shape.kv_heads,
                    padded_kv_heads=triton.next_power_of_2(shape.kv_heads),
                    group=shape.group,
                    levels=shape.reduction.split_segments,
                    tile=shape.tile,
                    few=self.few_rows,
                    block_rows=self.large.rows,
                    step=_PLANNED_AT_ONCE,
                )
        large_programs = blocks * shape.kv_heads
        if large_programs and may_share:
            large_programs = max(large_programs, 2 * self.processors)
        return Plan(self, small, large_programs, may_share, kept_rows)


def paged_attention(call: PagedAttention, out: torch.Tensor, plan: Plan | None = None) -> None:
    """Write the attention of ``call`` to ``out``; see the operation's package for the contract.

    A request's own keys and values must be finite: a row weighs the later ones of its block by 0.

    Raises:
        NotCovered: a head size above 256.
    """
    plan = plan or _plan_alone(call)
    planner = plan.planner
    on_hopper = planner.hopper and sm90.takes(call, out)
    with torch.cuda.device_of(call.query):
        if plan.large_programs and on_hopper:
            programs = min(plan.large_programs, planner.processors)
            sm90.launch_prefill(
                call, out, planner.large_count, planner.large_list, planner.partials, planner.arrived, programs
            )
        elif plan.large_programs:
            _launch(call, out, plan, planner.large, False, plan.large_programs)
        if plan.small and on_hopper:
            partials = planner.top, planner.weight, planner.acc
            sm90.launch_decode(
                call, out, planner.first_entries, planner.small_list, partials, planner.arrived, plan.kept_rows
            )
        elif plan.small:
            _launch(call, out, plan, planner.small, True, planner.parts)


def _plan_alone(call: PagedAttention) -> Plan:
    """A plan for one call, with memory of its own."""
    (tokens, heads, head_size), kv_heads = call.query.shape, call.key_cache.shape[1]
    shape = Shape(heads, kv_heads, head_size, call.query.dtype, call.reduction)
    requests = len(call.seq_lens)
    keys = requests * call.block_table.shape[1] * call.page_size
    planner = Planner(shape, call.query.device, requests, tokens, keys, sm90.is_plain(call))
    starts, lengths = (tensor.to(call.query.device) for tensor in (call.query_start_loc, call.seq_lens))
    return planner.plan(starts, lengths, tokens, decode=tokens <= 1)


def _describe(cache: torch.Tensor, tile: int, padded_size: int) -> TensorDescriptor | None:
    """The cache for the tensor memory accelerator, if it can read a tile of keys at once."""
    aligned = cache.data_ptr() % 16 == 0 and all(
        stride * cache.element_size() % 16 == 0 for stride in cache.stride()[:3]
    )
    if cache.shape[2] % tile or not aligned or cache.dtype == torch.float32:
        return None
    if torch.cuda.get_device_capability(cache.device) < (9, 0):
        return None
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [1, 1, tile, padded_size])


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _launch(call: PagedAttention, out: torch.Tensor, plan: Plan, blocks: Blocks, small: bool, programs: int) -> None:
    """The requests of one of the two lists."""
    planner, shape, device = plan.planner, plan.planner.shape, call.query.device
    table, query = _packed(call.block_table.to(device)), _packed(call.query)
    key_cache, value_cache = _packed(call.key_cache), _packed(call.value_cache)
    kept_rows = plan.kept_rows if small else blocks.rows
    described = [_describe(cache, shape.tile, shape.padded_size) for cache in (key_cache, value_cache)]
    by_descriptor = None not in described
    slopes = None if call.alibi_slopes is None else call.alibi_slopes.to(device, torch.float32) * _LOG2_E
    sinks = None if call.sinks is None else call.sinks.to(device, torch.float32) * _LOG2_E
    written = out if out.stride(-1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    attention_kernel[(programs,)](
        query,
        *(described if by_descriptor else (key_cache, value_cache)),
        written,
        table,
        planner.first_entries if small else planner.large_count,
        planner.small_list if small else planner.large_list,
        planner.top,
        planner.weight,
        planner.acc,
        planner.arrived,
        slopes,
        sinks,
        call.scale * _LOG2_E,
        (call.logits_soft_cap or 0.0) * _LOG2_E,
        call.sliding_window or 0,
        table.stride(0),
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *written.stride()[:2],
        by_descriptor=by_descriptor,
        has_soft_cap=call.logits_soft_cap is not None,
        has_slopes=slopes is not None,
        has_window=call.sliding_window is not None,
        has_sinks=sinks is not None,
        many_rows=not small,
        may_keep=small or plan.may_share_large,
        kv_heads=shape.kv_heads,
        group=shape.group,
        head_size=shape.head_size,
        padded_size=shape.padded_size,
        page_size=call.page_size,
        levels=shape.reduction.split_segments,
        tile=shape.tile,
        block_rows=blocks.rows,
        kept_rows=kept_rows,
        kept_block=triton.next_power_of_2(kept_rows),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        maxnreg=blocks.registers,
        enable_fp_fusion=False,
    )
    if written is not out:
        out.copy_(written)
