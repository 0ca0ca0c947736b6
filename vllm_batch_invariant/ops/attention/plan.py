"""The plan of a step of paged attention: its memory on the GPU, and which kernels serve.

A decode-like request, of few rows, and a prefill-like one, of many, get blocks of other sizes, and a CTA may walk all
splits of its rows or share them with others: a matter of speed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton

from ...errors import NotCovered
from ..common.launch import launch
from ..common.nvidia_gpus import has_tcgen05
from . import sm90
from .plan_kernels import plan_kernel
from .reduction import AttentionReduction
from .shapes import AttentionShape, Schedule
from .shared_memory import fitted, fitted_prefill
from .sm90.shapes import SEMAPHORE_INTS
from .work import WORK_SIZE

_LARGEST_HEAD = 512
DECODE_ROWS = 16
"""Rows, (token, query head of the KV head) pairs, up to which a request is decode-like: its rows are one block."""
WIDE_DECODE_ROWS = 32
"""The same for verify steps that have more rows a request than that and at most so many, by the Gluon kernels."""
PARTIAL_BYTES = 128 << 20
"""For partial results; with less than a step wants, CTAs walk all splits of their rows."""


def decode_schedule(head_size: int, dtype: torch.dtype, wide: bool = False, rows: int = DECODE_ROWS) -> Schedule:
    """For decode-like requests.

    Args:
        head_size: of the layers.
        dtype: of queries, keys and values.
        wide: whether a block of 16-bit operands has at least 64 rows, most of them empty, so that decode has the
            instruction of prefill: see :func:`.nvidia_gpus.has_tcgen05`.
        rows: up to which a request is decode-like; more than :data:`DECODE_ROWS` for 16-bit operands only.
    """
    if dtype == torch.float32:
        # A dot in fp32 holds whole rows of both operands in registers.
        return Schedule(16, num_warps=8, num_stages=1)
    if head_size > 256:  # prefill has no block of 64 rows, and so the same instruction everywhere
        return Schedule(max(rows, 16), num_warps=8, num_stages=3)
    if wide:  # with as many CTAs as shared memory and tensor memory have room for
        if head_size <= 128:
            return Schedule(64, num_warps=4, num_stages=3 if head_size <= 64 else 2, ctas_per_sm=2)
        return Schedule(64, num_warps=8, num_stages=2)
    return Schedule(max(rows, 16), num_warps=4, num_stages=3 if head_size <= 128 else 2, ctas_per_sm=2)


def prefill_schedule(head_size: int, dtype: torch.dtype, by_sm90: bool = False) -> Schedule:
    """For requests of more rows, in the blocks of the Gluon kernels where these serve what they know."""
    if dtype == torch.float32:
        return Schedule(16, num_warps=8, num_stages=1)
    if head_size > 256:  # more rows do not fit into registers
        return Schedule(32, num_warps=8, num_stages=1)
    if head_size > 128:
        return Schedule(128, num_warps=8, num_stages=2) if by_sm90 else Schedule(64, num_warps=8, num_stages=1)
    return Schedule(128, num_warps=8, num_stages=3 if head_size <= 64 else 2)


@dataclass(frozen=True)
class Kernels:
    """Which kernels serve attention: speed only, where :mod:`.certificate` has compared them."""

    sm90: bool
    """The Gluon kernels for Hopper, where they know a layer's options and layout; else the Triton kernel."""
    decode_rows: int = DECODE_ROWS
    """Rows up to which a request is decode-like; with 0 one block size serves all."""

    @classmethod
    def candidates(
        cls, shape: AttentionShape, device: torch.device, plain: bool = True, verify_len: int = 1
    ) -> Iterator["Kernels"]:
        """What could serve such layers, the fastest first.

        Args:
            shape: of the layers.
            device: the GPU.
            plain: as in :class:`Planner`.
            verify_len: tokens of a request in the longest verify step.
        """
        block_m, in_codes = prefill_schedule(shape.head_size, shape.dtype, True).block_m, shape.cache_dtype is not None
        if (
            plain
            and not shape.scales_of_tokens
            and not shape.tail
            and sm90.covers(shape.head_size, shape.dtype, shape.key_tile, block_m, device, in_codes)
        ):
            if not in_codes and DECODE_ROWS < verify_len * shape.queries_per_kv <= WIDE_DECODE_ROWS:
                yield cls(sm90=True, decode_rows=WIDE_DECODE_ROWS)
            yield cls(sm90=True)
        yield cls(sm90=False)
        yield cls(sm90=False, decode_rows=0)

    @classmethod
    def fastest(cls, shape: AttentionShape, device: torch.device, plain: bool = True) -> "Kernels":
        """The first of them that can be compiled; their bits are not compared."""
        found = cls.candidates(shape, device, plain)
        return next(one for one in found if not one.sm90 or sm90.compiles(shape, one.variants(shape), device))

    def partial_rows(self, shape: AttentionShape, most_tokens: int) -> int:
        """Rows of a decode-like block in its partial results, for requests of up to so many tokens."""
        rows = min(most_tokens * shape.queries_per_kv, self.decode_rows or DECODE_ROWS)
        if most_tokens == 1:
            return rows
        return DECODE_ROWS if rows <= DECODE_ROWS else self.decode_rows

    def variants(self, shape: AttentionShape) -> frozenset[int]:
        """All that :meth:`partial_rows` gives, each a variant of the kernel."""
        return frozenset(self.partial_rows(shape, tokens) for tokens in (1, 2, DECODE_ROWS, WIDE_DECODE_ROWS))

    def __str__(self) -> str:
        if self.sm90:
            return "the Gluon kernels" if self.decode_rows <= DECODE_ROWS else "the Gluon kernels with wide blocks"
        return "the Triton kernel" if self.decode_rows else "the Triton kernel with large blocks alone"


@dataclass(frozen=True)
class Plan:
    """One step's work, on the GPU: what every layer of the step does."""

    planner: "Planner"
    has_decode: bool
    """Whether a request can be decode-like."""
    prefill_ctas: int
    """CTAs for prefill-like requests; 0 if there can be none."""
    may_share_prefill: bool
    """Whether CTAs may share the splits of prefill-like blocks: if there are few of them on the GPU."""
    partial_rows: int
    """Rows of a decode-like block in its partial results."""
    window: int | None = None
    """Keys that a token sees, its own among them; of others nothing is planned. None: all."""

    @property
    def reduction(self) -> AttentionReduction:
        return self.planner.shape.reduction

    @property
    def cta_shares(self) -> int:
        """CTAs for decode-like requests."""
        return self.planner.cta_shares(self.partial_rows)


class Planner:
    """The memory of plans, made once so that its addresses can be part of a CUDA graph; a plan replaces the last.

    Args:
        shape: of the layers.
        device: the GPU.
        max_requests: in a step.
        max_tokens: in a step.
        max_keys: of all requests of a step together.
        plain: a layer may have none of the options that :mod:`.sm90` does not know.
        kernels: what serves; by default :meth:`Kernels.fastest`.
        schedules: of decode-like and of prefill-like work, for a kernel that is not of this package.
        window: keys that a token of all layers sees, its own among them; None: all, in one of them at least.

    Raises:
        NotCovered: a head size above 512.
    """

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device,
        max_requests: int,
        max_tokens: int,
        max_keys: int,
        plain: bool = True,
        kernels: Kernels | None = None,
        schedules: tuple[Schedule, Schedule] | None = None,
        window: int | None = None,
    ) -> None:
        if shape.head_size > _LARGEST_HEAD:
            raise NotCovered(
                f"attention heads of size {shape.head_size}",
                f"the kernel has sizes up to {_LARGEST_HEAD}",
                "serve another model",
            )
        self.shape, self.device, self.window = shape, device, window
        gpu = torch.cuda.get_device_properties(device)
        self.num_sms = gpu.multi_processor_count
        kernels = kernels or Kernels.fastest(shape, device, plain)
        self.sm90, self.decode_rows, self._kernels = kernels.sm90, kernels.decode_rows, kernels
        self.prefills_by_sm90 = self.sm90 and sm90.prefills(shape.padded_head_size)
        if schedules:
            self.decode_schedule, self.prefill_schedule = schedules
        else:
            schedule = prefill_schedule(shape.head_size, shape.dtype, self.prefills_by_sm90)
            self.prefill_schedule = fitted_prefill(schedule, shape, device)
            schedule = decode_schedule(shape.head_size, shape.dtype, has_tcgen05(gpu.major), self.decode_rows)
            self.decode_schedule = fitted(schedule, shape, device)
        block_m, kv_heads = self.prefill_schedule.block_m, shape.kv_heads
        # Prefill-like blocks are shared only while they are few.
        self._prefill_ctas = self.num_sms if self.prefills_by_sm90 else 4 * self.num_sms
        most_shares = max(map(self.cta_shares, kernels.variants(shape)))

        self.work_indptr = torch.zeros(most_shares + 1, dtype=torch.int32, device=device)
        """[shares + 1] int32, the first item of ``decode_work`` of each CTA of a plan, and the end."""
        self.decode_work = self._list_of_work(max_requests * kv_heads + most_shares)
        """[items, WORK_SIZE] int32."""
        self.prefill_count = torch.zeros(1, dtype=torch.int32, device=device)
        """[1] int32, items of ``prefill_work``."""
        blocks = self._max_prefill_blocks(max_tokens, max_requests)
        self.prefill_work = self._list_of_work(max(blocks, self._prefill_ctas // kv_heads))
        """[items, WORK_SIZE] int32, each for all KV heads."""

        self._max_splits = max_keys // shape.reduction.smallest + max_requests
        self._max_partial_rows = PARTIAL_BYTES // (4 * (shape.padded_head_size + 2))
        max_shared = self._prefill_ctas // 2 // kv_heads
        self._prefill_workspace = min(max_shared * self._max_splits, self._max_partial_rows // (kv_heads * block_m))
        rows = kv_heads * max(self._max_splits * max(kernels.variants(shape)), self._prefill_workspace * block_m)
        # A multiple of 4, for copies of 16 bytes.
        rows = -(-min(self._max_partial_rows, rows) // 4) * 4
        self.workspace = torch.empty(rows * (shape.padded_head_size + 2), device=device)
        self.partial_m, self.partial_l, acc = self.workspace.split([rows, rows, rows * shape.padded_head_size])
        self.partial_acc = acc.view(rows, shape.padded_head_size)
        keeps_merged = self.prefills_by_sm90 and sm90.keeps_merged(shape.head_size)
        size = (self.num_sms, block_m, shape.head_size)
        self.merged = torch.empty(size, device=device) if keeps_merged else None
        """[CTAs, block_m, head_size] fp32, merged splits that a multiprocessor's shared memory has no room for."""
        semaphores = max(self._decode_workspace(1), SEMAPHORE_INTS * self._prefill_workspace) * kv_heads
        self.semaphores = torch.zeros(semaphores, dtype=torch.int32, device=device)
        """[semaphores] int32, finished splits of what CTAs share; 0 between the layers of a step."""

    def cta_shares(self, partial_rows: int) -> int:
        """CTAs that work on decode-like requests at the same time, in a step whose blocks have so many rows."""
        schedule = self.decode_schedule
        if self.sm90 and self.decode_rows:
            schedule = sm90.decode_schedule(self.shape, self.decode_rows, partial_rows)
        return schedule.ctas_per_sm * self.num_sms

    def _list_of_work(self, items: int) -> torch.Tensor:
        return torch.empty(items, WORK_SIZE.value, dtype=torch.int32, device=self.device)

    def _max_prefill_blocks(self, tokens: int, requests: int) -> int:
        """Blocks that prefill-like requests of so many tokens together may have: the last of each may be partly
        empty.
        """
        rows = tokens * self.shape.queries_per_kv
        return rows // self.prefill_schedule.block_m + min(requests, rows // (self.decode_rows + 1))

    def _decode_workspace(self, partial_rows: int) -> int:
        """Partial results of all KV heads that there is room for."""
        return min(self._max_splits, self._max_partial_rows // (self.shape.kv_heads * partial_rows))

    def plan(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        tokens: int,
        most_tokens: int,
        has_ranges: bool = False,
    ) -> Plan:
        """Plan a step; launches one kernel and reads nothing back.

        What it decides on the host depends on ``tokens``, the number of requests and ``most_tokens``, which a CUDA
        graph fixes: calls that were captured with one plan serve every other step with these three.

        Args:
            query_start_loc: [requests + 1] on the GPU.
            seq_lens: [requests] on the GPU.
            tokens: rows of the query, or more. A request may have all of them, whatever the number of requests.
            most_tokens: of a request, or more: 1 in a step of decode, ``tokens`` where nothing is known.
            has_ranges: whether a token may see keys behind its window.
        """
        window = None if has_ranges else self.window
        requests, shape = len(seq_lens), self.shape
        has_decode = shape.queries_per_kv <= self.decode_rows
        has_prefill = most_tokens * shape.queries_per_kv > self.decode_rows
        partial_rows = self._kernels.partial_rows(shape, most_tokens)
        blocks = self._max_prefill_blocks(tokens, requests) if has_prefill else 0
        # With the kernels for Hopper it costs nothing that they may.
        may_share = self.prefills_by_sm90 or 0 < blocks * shape.kv_heads <= self._prefill_ctas // 2
        if requests:
            launch(
                plan_kernel,
                requests,
                (
                    query_start_loc,
                    seq_lens,
                    self.work_indptr,
                    self.decode_work,
                    self.prefill_count,
                    self.prefill_work,
                    self.semaphores,
                    requests,
                    len(self.semaphores),
                    self._decode_workspace(partial_rows),
                    self._prefill_workspace if may_share else -1,
                    self.cta_shares(partial_rows),
                    self._prefill_ctas,
                ),
                on=self.semaphores,
                NUM_KV_HEADS=shape.kv_heads,
                PADDED_KV_HEADS=triton.next_power_of_2(shape.kv_heads),
                QUERIES_PER_KV=shape.queries_per_kv,
                SPLIT_SEGMENTS=shape.reduction.split_segments,
                KEY_TILE=shape.key_tile,
                DECODE_ROWS=self.decode_rows,
                BLOCK_M=self.prefill_schedule.block_m,
                WINDOW=window or 0,
            )
        prefill_ctas = blocks * shape.kv_heads
        if prefill_ctas and may_share:
            prefill_ctas = max(prefill_ctas, 2 * self.num_sms)
        return Plan(self, has_decode, prefill_ctas, may_share, partial_rows, window)
