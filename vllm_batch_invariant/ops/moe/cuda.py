"""Mixtures of experts on a GPU: (token, expert) pairs are grouped by expert on the GPU, and each block of them is
multiplied by its expert's weights. Nothing waits for the host, so a step may be a CUDA graph.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton

from ...errors import NotCovered
from ..common.triton_rows import on_device_of
from ..linear import triton_gemm
from ..linear.cancelling import cancelling
from ..linear.reduction import LinearReduction
from ..softmax import softmax
from .reduction import MoeReduction
from .routes import route_by
from .triton_kernels import (
    combine_kernel,
    count_kernel,
    grouped_gemm_kernel,
    place_kernel,
    route_kernel,
    silu_and_mul_kernel,
)

_PAIRS_AT_ONCE = 32_768
"""Whose products are held in memory until they are added; a power of two."""
_SWIGLUOAI_ALPHA, _SWIGLUOAI_LIMIT = 1.702, 7.0


@dataclass(frozen=True)
class GroupedSchedule:
    """A tile of a grouped product; no bits follow it.

    Attributes:
        block_m: pairs of one expert.
        block_n: rows of the weight.
        block_k: elements of K in one step of the loop.
        num_warps: of a program.
        num_stages: of the loop.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


_SCHEDULES = {
    2: (
        GroupedSchedule(16, 64, 128, 4, 4),
        GroupedSchedule(32, 128, 64, 4, 4),
        GroupedSchedule(64, 128, 64, 4, 4),
        GroupedSchedule(128, 128, 64, 8, 3),
    ),
    4: (GroupedSchedule(16, 32, 32, 4, 2), GroupedSchedule(64, 64, 32, 8, 2)),
}
"""By bytes of an element, of ascending size."""


@dataclass(frozen=True)
class WalkSchedule:
    """How the other kernels walk; powers of two.

    Attributes:
        block: pairs, or elements of a row, at a time.
        blocks_at_once: blocks of pairs whose expert is looked for at a time.
    """

    block: int
    blocks_at_once: int = 64

    @classmethod
    def of(cls, length: int) -> "WalkSchedule":
        """For rows of ``length`` elements."""
        return cls(min(1024, triton.next_power_of_2(length)))


_COUNTING, _PLACING = WalkSchedule(1024), WalkSchedule(256)


def grouped_schedule(pairs: int, experts: int, dtype: torch.dtype) -> GroupedSchedule:
    """The tile for so many pairs: the smallest that would hold an expert's share of them, if all had the same."""
    schedules = _SCHEDULES[dtype.itemsize]
    return next((one for one in schedules if one.block_m * experts >= pairs), schedules[-1])


@dataclass(frozen=True)
class Groups:
    """Pairs grouped by expert.

    Attributes:
        pairs: [blocks * block_m] int32, -1 where there is none.
        expert_of_block: [blocks] int32, -1 for a block without pairs.
    """

    pairs: torch.Tensor
    expert_of_block: torch.Tensor


def group(ids: torch.Tensor, experts: int, block_m: int) -> Groups:
    """Group the pairs of ids [tokens, top_k] into blocks of one expert each. Their number follows the shape alone: some
    may be without pairs.
    """
    num_pairs = ids.numel()
    num_blocks = min(num_pairs, experts) + num_pairs // block_m
    ints = {"dtype": torch.int32, "device": ids.device}
    pairs, expert_of_block = torch.full((num_blocks * block_m,), -1, **ints), torch.empty(num_blocks, **ints)
    following = torch.empty(triton.next_power_of_2(experts), **ints)
    with on_device_of(ids):
        count_kernel[(1,)](
            ids,
            following,
            expert_of_block,
            num_pairs,
            num_blocks,
            PADDED_EXPERTS=len(following),
            BLOCK_M=block_m,
            BLOCK=_COUNTING.block,
            BLOCKS_AT_ONCE=_COUNTING.blocks_at_once,
            num_warps=8,
            enable_fp_fusion=False,
        )
        place_kernel[(triton.cdiv(num_pairs, _PLACING.block),)](
            ids, following, pairs, num_pairs, BLOCK=_PLACING.block, num_warps=4, enable_fp_fusion=False
        )
    return Groups(pairs, expert_of_block)


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: Groups,
    pairs: int,
    dtype: torch.dtype,
    schedule: GroupedSchedule,
) -> torch.Tensor:
    """Each pair's row of x times its expert's weight: [pairs, N].

    Args:
        x: [rows, K], packed; a row has pairs // rows pairs, one after the other.
        weight: [experts, N, K], packed.
        bias: [experts, N], or None.
        groups: of the schedule's ``block_m``.
        pairs: how many there are.
        dtype: of the result.
        schedule: decides the speed.
    """
    _, n, k = weight.shape
    reduction = LinearReduction.of_device("cuda", n, k, x.dtype)
    out = torch.empty(pairs, n, dtype=dtype, device=x.device)
    with on_device_of(x):
        grouped_gemm_kernel[(len(groups.expert_of_block) * triton.cdiv(n, schedule.block_n),)](
            x,
            weight,
            bias,
            out,
            groups.pairs,
            groups.expert_of_block,
            n,
            k,
            PAIRS_OF_A_ROW=pairs // len(x),
            HAS_BIAS=bias is not None,
            EVEN_K=k % schedule.block_k == 0,
            BLOCK_M=schedule.block_m,
            BLOCK_N=schedule.block_n,
            BLOCK_K=schedule.block_k,
            PRECISION=reduction.precision,
            num_warps=schedule.num_warps,
            num_stages=schedule.num_stages,
            enable_fp_fusion=reduction.enable_fp_fusion,
        )
    return out


def route(
    logits: torch.Tensor, reduction: MoeReduction, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    logits = logits.to(reduction.accumulate)
    scores = softmax(logits) if reduction.scoring == "softmax" else torch.sigmoid(logits)
    if reduction.groups > 1:
        return route_by(scores, reduction, bias)
    tokens, (top_k, experts) = len(scores), (reduction.top_k, reduction.num_experts)
    weights = torch.empty(tokens, top_k, dtype=scores.dtype, device=scores.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=scores.device)
    if tokens:
        with on_device_of(scores):
            route_kernel[(tokens,)](
                scores.contiguous(),
                None if bias is None else bias.to(scores.dtype).contiguous(),
                weights,
                ids,
                experts,
                reduction.scale,
                HAS_BIAS=bias is not None,
                RENORMALISE=reduction.renormalise,
                HAS_SCALE=reduction.scale != 1,
                TOP_K=top_k,
                PADDED_TOP_K=triton.next_power_of_2(top_k),
                PADDED_EXPERTS=triton.next_power_of_2(experts),
                num_warps=1,
                enable_fp_fusion=False,
            )
    return weights, ids


def moe(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    reduction: MoeReduction,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    places: torch.Tensor | None,
) -> torch.Tensor:
    """See the operation's package.

    Raises:
        NotCovered: a part of the experts.
    """
    if places is not None:
        raise NotCovered(
            "a part of the experts on a GPU", "it has not been written there", "give all experts to one worker"
        )
    at_once = _PAIRS_AT_ONCE // reduction.top_k
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for start in range(0, len(x), at_once):
        part = slice(start, start + at_once)
        experts = (gate_up, down, reduction, gate_up_bias, down_bias)
        _moe(x[part].contiguous(), weights[part].contiguous(), ids[part].contiguous(), *experts, out[part])
    return out


def _moe(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    reduction: MoeReduction,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    (count, hidden, _), pairs = down.shape, ids.numel()
    schedule = grouped_schedule(pairs, count, x.dtype)
    groups = group(ids, count, schedule.block_m)
    projected = grouped_gemm(x, gate_up, gate_up_bias, groups, pairs, x.dtype, schedule)
    activated = _activated(projected, reduction.activation)
    made = grouped_gemm(activated, down, down_bias, groups, pairs, reduction.accumulate, schedule)
    walk = WalkSchedule.of(hidden)
    with on_device_of(x):
        combine_kernel[(len(x), triton.cdiv(hidden, walk.block))](
            made,
            weights,
            out,
            LENGTH=hidden,
            TOP_K=reduction.top_k,
            BLOCK=walk.block,
            num_warps=4,
            enable_fp_fusion=False,
        )


def _activated(hidden: torch.Tensor, activation: str) -> torch.Tensor:
    """[pairs, intermediate] of [pairs, 2 * intermediate]."""
    if activation == "swigluoai":
        gate = hidden[:, ::2].float().clamp(max=_SWIGLUOAI_LIMIT)
        up = hidden[:, 1::2].float().clamp(-_SWIGLUOAI_LIMIT, _SWIGLUOAI_LIMIT)
        return ((up + 1) * (gate * torch.sigmoid(gate * _SWIGLUOAI_ALPHA))).to(hidden.dtype)
    if activation != "silu":
        gate, up = hidden.chunk(2, dim=1)
        return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
    pairs, length = len(hidden), hidden.shape[1] // 2
    walk = WalkSchedule.of(length)
    out = torch.empty(pairs, length, dtype=hidden.dtype, device=hidden.device)
    with on_device_of(hidden):
        silu_and_mul_kernel[(pairs, triton.cdiv(length, walk.block))](
            hidden,
            out,
            LENGTH=length,
            BLOCK=walk.block,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def certify(n: int, k: int, dtype: torch.dtype, device: torch.device) -> int:
    """Compare every tile with the dense product of the same rows, of operands whose sums cancel.

    Args:
        n: rows of an expert's weight, of which some are enough.
        k: their length.
        dtype: of both.
        device: a GPU.

    Returns:
        How many elements were compared.

    Raises:
        NotCovered: a tile has other bits.
    """
    compared, n = 0, min(n, 512)
    for number, schedule in enumerate(_SCHEDULES[dtype.itemsize]):
        for rows, ids, x, weight in _certificate_cases(schedule, n, k, dtype, device):
            groups = group(ids, len(weight), schedule.block_m)
            for out in (dtype, torch.float32):
                found = grouped_gemm(x, weight, None, groups, ids.numel(), out, schedule)
                for expert, of_expert in enumerate(weight):
                    pairs = (ids.flatten() == expert).nonzero().squeeze(1)
                    dense = triton_gemm.accumulate(x[pairs // ids.shape[1]], of_expert.t()).to(out)
                    if not torch.equal(found[pairs], dense):
                        raise NotCovered(
                            f"experts of {k} inputs in {dtype} on {torch.cuda.get_device_name(device)}",
                            f"tile {number} of {rows} rows has other bits than a dense layer",
                            "serve a dense model, or serve on a CPU",
                        )
                    compared += dense.numel()
    return compared


def _certificate_cases(
    schedule: GroupedSchedule, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(rows, ids, x, weight) of few and many tokens of three experts, of which one has none."""
    for rows in (1, schedule.block_m + 3):
        x, weight = cancelling(rows, 2 * n, k - k % 2, dtype, device, seed=rows)
        x, weight = (F.pad(one, (0, k % 2)) for one in (x, weight))
        ids = torch.tensor([[0, 2], [2, 0]], device=device).repeat(-(-rows // 2), 1)[:rows]
        weight = torch.stack((weight[:n], weight[:n], weight[n:]))
        yield rows, ids, x, weight
