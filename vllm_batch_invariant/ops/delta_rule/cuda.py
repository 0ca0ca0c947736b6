"""The gated delta rule and Mamba-2's state space on a GPU, in Triton."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton

from ..common.gpu import Gpu
from ..common.launch import launch
from ..common.rows import with_packed_rows
from ..common.triton_rows import ALIGNMENT, aligned
from .params import Convolution, DeltaStates
from .reduction import DeltaRuleReduction
from .triton_kernels import (
    chunk_matrices_kernel,
    convolved_inputs_kernel,
    decode_delta_rule_kernel,
    gdn_inputs_kernel,
    mamba2_gates_kernel,
    prefill_delta_rule_kernel,
    verify_delta_rule_kernel,
    write_rows_kernel,
)


@dataclass(frozen=True)
class DeltaSchedule:
    """Speed only: a value's products with the state and with the rows of its chunk are the same in every block."""

    block: int
    """Values of a program, a multiple of 16."""
    num_warps: int
    """Of 64 values 4 at most: where two warpgroups had the same rows of a chain of wgmmas, as Triton lays them out,
    results on an H200 were wrong, or a program ended in an illegal address.
    """
    num_stages: int = 1
    """More than one may compile to wrong code for a Hopper, where operands of wgmma lie in registers."""


@dataclass(frozen=True)
class DeltaSchedules:
    """Those of a kind of gates.

    Attributes:
        prefill: in one step for all requests.
        decode: from so many requests on.
        verify: decode with drafts, of few requests and of many.
        matrices: warps of a program that makes X and M.
        one_instruction: where a tile of 64 rows gets tcgen05.mma and smaller ones mma.sync, which nobody has compared.
    """

    prefill: DeltaSchedule
    decode: Mapping[int, DeltaSchedule]
    verify: tuple[DeltaSchedule, DeltaSchedule]
    matrices: int
    one_instruction: DeltaSchedule

    def of_requests(self, count: int, has_drafts: bool) -> DeltaSchedule:
        """Of a step of decode of so many requests, padded ones among them: a CUDA graph has one number of them."""
        if has_drafts:
            return self.verify[count >= _MANY]
        return self.decode[max(least for least in self.decode if least <= max(count, 1))]

    def sizes(self, has_drafts: bool) -> tuple[int, ...]:
        """The least number of requests of each schedule of decode."""
        return (1, _MANY) if has_drafts else tuple(self.decode)

    @property
    def every(self) -> tuple[DeltaSchedule, ...]:
        """Each of decode."""
        return *self.decode.values(), *self.verify, self.one_instruction


SCHEDULES = {
    "head": DeltaSchedules(
        DeltaSchedule(64, 4),
        {1: DeltaSchedule(32, 2), 4: DeltaSchedule(32, 1), 16: DeltaSchedule(64, 1)},
        (DeltaSchedule(32, 4), DeltaSchedule(64, 4)),
        matrices=1,
        one_instruction=DeltaSchedule(32, 2),
    ),
    "channel": DeltaSchedules(
        DeltaSchedule(64, 4),
        {1: DeltaSchedule(64, 4)},
        (DeltaSchedule(32, 4), DeltaSchedule(64, 4)),
        matrices=4,
        one_instruction=DeltaSchedule(32, 4),
    ),
}
"""By :data:`.reduction.GATES`. The first decode as the fastest of seven at 1, 8, 64 and 256 requests on an H200; the
second, which has not been timed, with the fewest registers spilled where they are compiled for one.
"""
_MANY = 8
"""Requests."""
FUSED = 16
"""New tokens of a request, with no more of which one launch convolves and makes what follows."""
_KEYS = 128
"""Elements for which the schedules are: of longer keys a program has fewer values."""


def _schedule(device: torch.device, of: DeltaSchedule, schedules: DeltaSchedules) -> DeltaSchedule:
    if triton.knobs.runtime.interpret or of.num_warps < schedules.one_instruction.num_warps:
        return of
    return schedules.one_instruction if Gpu.of(device.index).has_tcgen05 else of


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: DeltaStates,
    reduction: DeltaRuleReduction,
    skip: torch.Tensor | None = None,
    prefill: DeltaSchedule | None = None,
    decode: DeltaSchedule | None = None,
) -> torch.Tensor:
    """See the operation's package."""
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    requests, key_heads, value_heads = len(states.pages), k.shape[1], v.shape[1]
    schedules = SCHEDULES[reduction.gates]
    if not requests or not len(v):
        return out
    pages = reduction.pages(states.states, key_heads, value_heads, states.rows)
    q, k, g, beta = aligned(q), aligned(k), g.contiguous(), beta.contiguous()
    v = v if v.data_ptr() % ALIGNMENT == v.stride(0) * v.itemsize % ALIGNMENT == 0 else aligned(v)
    steps = states.pages, states.starts, states.context_lens
    planes, ring = pages[:3], pages[3:7]
    has_drafts, has_x = reduction.drafts(states.rows) > 0, pages.x.numel() > 0
    ring_x = pages.x if has_x else None
    strides = pages.high.stride(0), pages.k.stride(0), pages.beta.stride(0)
    heads = {"KEY_HEADS": key_heads, "VALUE_HEADS": value_heads}
    sizes = {"KEY_SIZE": reduction.key_size, "VALUE_SIZE": reduction.value_size, "ROWS": states.rows} | heads
    channels = {"CHANNELS": math.prod(reduction.of_gates) if reduction.has_channels else 0}
    chunk = {"CHUNK": reduction.chunk, "SOLVE": reduction.solve} | channels
    skip = None if skip is None else skip.contiguous()

    def block_of(schedule: DeltaSchedule) -> int:
        return min(schedule.block * _KEYS // max(reduction.key_size, _KEYS), reduction.value_size)

    def of(schedule: DeltaSchedule) -> dict[str, int]:
        block = block_of(schedule)
        num_warps = min(schedule.num_warps, max(block, 64) // 16)
        options = {"BLOCK": block, "num_warps": num_warps, "num_stages": schedule.num_stages}
        return options | {"HAS_SKIP": skip is not None} | sizes | chunk

    def grid(schedule: DeltaSchedule) -> tuple[int, int, int]:
        return triton.cdiv(reduction.value_size, block_of(schedule)), value_heads, requests

    if states.longest <= 1 + reduction.drafts(states.rows):
        decode = decode or _schedule(v.device, schedules.of_requests(requests, has_drafts), schedules)
        launch(
            verify_delta_rule_kernel if has_drafts else decode_delta_rule_kernel,
            grid(decode),
            (
                *(q, k, v, g, beta, *planes, *ring, *(() if has_drafts else (ring_x,)), *steps),
                *(skip, out, reduction.scale, v.stride(0), *strides),
            ),
            on=v,
            waits=True,
            **of(decode),
        )
        return out
    prefill = prefill or _schedule(v.device, schedules.prefill, schedules)
    slots = len(v) // reduction.chunk + requests * (states.rows // reduction.chunk + 2)
    chunks = triton.cdiv(states.longest + states.rows - 1, reduction.chunk)
    tiles = (1 + reduction.solve, slots, value_heads, reduction.chunk, reduction.chunk)
    *x, m = torch.empty(tiles, dtype=k.dtype, device=k.device)
    matrices = x[0] if x else None, m
    gates = torch.empty(slots, value_heads, math.prod(reduction.of_gates) + 1, reduction.chunk, device=k.device)
    launch(
        chunk_matrices_kernel,
        (chunks, value_heads, requests),
        (
            *(q, k, g, beta, pages.borders, pages.k, pages.total, pages.beta, ring_x, *steps),
            *(*matrices, gates, *strides[1:]),
        ),
        on=v,
        waits=True,
        num_warps=schedules.matrices,
        HAS_X=has_x,
        **sizes,
        **chunk,
    )
    launch(
        prefill_delta_rule_kernel,
        grid(prefill),
        (q, k, v, *planes, *ring[:2], *steps, *matrices, gates, skip, out, reduction.scale, v.stride(0), *strides),
        on=v,
        waits=True,
        **of(prefill),
    )
    launch(
        write_rows_kernel,
        (min(states.longest, states.rows), value_heads, requests),
        (k, v, beta, gates, *ring, *steps, v.stride(0), *strides[1:]),
        on=v,
        waits=True,
        num_warps=1,
        CHUNK=reduction.chunk,
        **sizes,
        **channels,
    )
    return out


def convolved_inputs(
    mixed: torch.Tensor,
    convolution: Convolution,
    gates: tuple[torch.Tensor, ...],
    key_heads: int,
    key_size: int,
    solve: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``gdn_inputs`` and, without ``solve``, ``mamba2_inputs`` of the operation's package: in one launch the parts
    of the channels in their order, and gates made of a, b, a_log and dt_bias, or of dt, dt, A and dt_bias.
    """
    a, b, a_log, dt_bias = gates
    weight, bias, states = convolution
    (tokens, value_heads), held, keys = a.shape, states.states, key_heads * key_size
    values = mixed.shape[1] - 2 * keys
    out = torch.empty(mixed.numel(), dtype=mixed.dtype, device=mixed.device)
    g, beta = torch.empty(2, tokens, value_heads, device=mixed.device)
    if tokens and len(states.pages):
        a, b = with_packed_rows(a), with_packed_rows(b)
        launch(
            convolved_inputs_kernel,
            (len(states.pages), 2 * key_heads + triton.cdiv(values, key_size) + 1),
            (
                *(mixed, weight.contiguous(), bias, held, states.pages, states.starts, states.context_lens),
                *(a, b, a_log.contiguous(), dt_bias.contiguous(), out, g, beta),
                *(tokens, mixed.stride(0), *held.stride(), a.stride(0), b.stride(0)),
            ),
            on=mixed,
            waits=True,
            num_warps=1,
            KEY_HEADS=key_heads,
            VALUE_HEADS=value_heads,
            PADDED_HEADS=triton.next_power_of_2(value_heads),
            KEY_SIZE=key_size,
            VALUE_SIZE=values // value_heads,
            SOLVE=solve,
            WIDTH=weight.shape[1],
            ROWS=held.shape[1],
            HAS_BIAS=bias is not None,
        )
    widths = (keys, keys, values) if solve else (values, keys, keys)
    parts = out.split([tokens * width for width in widths])
    sizes = (
        values // value_heads if width == values and at == 2 * solve else key_size for at, width in enumerate(widths)
    )
    x, y, z = (part.view(tokens, -1, size) for part, size in zip(parts, sizes, strict=True))
    return x, y, z, g, beta


def gdn_inputs(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    key_heads: int,
    key_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the operation's package: without v."""
    return _inputs(mixed, a, b, a_log, dt_bias, key_heads, key_size, 0, None)


def kda_inputs(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    key_size: int,
    least: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the operation's package: without v."""
    return _inputs(mixed, a, b, a_log, dt_bias, b.shape[1], key_size, key_size, least)


def _inputs(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    key_heads: int,
    key_size: int,
    channels: int,
    least: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, value_heads = b.shape
    q, k = torch.empty(2, tokens, key_heads, key_size, dtype=mixed.dtype, device=mixed.device)
    of_channels = (channels,) if channels else ()
    g = torch.empty(tokens, value_heads, *of_channels, device=mixed.device)
    beta = torch.empty(tokens, value_heads, device=mixed.device)
    if tokens:
        a, b = with_packed_rows(a), with_packed_rows(b)
        launch(
            gdn_inputs_kernel,
            (tokens, 2 * key_heads + (value_heads if channels else 1)),
            (
                *(mixed, a, b, a_log.contiguous(), dt_bias.contiguous()),
                *(q, k, g, beta, 0.0 if least is None else least, mixed.stride(0), a.stride(0), b.stride(0)),
            ),
            on=mixed,
            waits=True,
            num_warps=1,
            KEY_HEADS=key_heads,
            VALUE_HEADS=value_heads,
            PADDED_HEADS=triton.next_power_of_2(value_heads),
            KEY_SIZE=key_size,
            CHANNELS=channels,
            HAS_LEAST=least is not None,
        )
    return q, k, g, beta


def mamba2_gates(dt: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``mamba2_inputs`` of the operation's package: decays and time steps."""
    tokens, heads = dt.shape
    g, steps = torch.empty(2, tokens, heads, device=dt.device)
    if tokens:
        dt = with_packed_rows(dt)
        launch(
            mamba2_gates_kernel,
            (tokens,),
            (dt, a.contiguous(), dt_bias.contiguous(), g, steps, dt.stride(0)),
            on=dt,
            waits=True,
            num_warps=1,
            VALUE_HEADS=heads,
            PADDED_HEADS=triton.next_power_of_2(heads),
        )
    return g, steps
