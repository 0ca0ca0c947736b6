"""Triton kernels of a mixture of experts. A pair p = token * TOP_K + place is a token and one of its experts::

    h[p] = round(gate_up[expert(p)] @ x[token(p)] + bias)
    a[p] = activation(gate, up)                                 the halves of h[p], or its even and odd elements
    d[p] = round(down[expert(p)] @ a[p] + bias)
    y[t] = round(((0 + g[t, 0] d[t, 0]) + g[t, 1] d[t, 1]) + ...)

where the activations are, with s(x) = 1 / (1 + exp(-x))::

    silu, gelu      round(round(f(gate)) * up)                  gelu by erf; by tanh it is gate * s(1.6 (gate + ...))
    swigluoai       round((up + 1) * (gate * s(1.702 gate)))    gate of at most 7, up of -7 to 7
    relu2_no_mul    round(max(h, 0) ** 2)                       of h that has no gate

Pairs are grouped by expert into blocks of BLOCK_M. Where a pair lies follows the other tokens; what is computed of it
is a row of its own, one accumulator an element that adds K upwards, as in :mod:`..linear.triton_kernels`. Codes of e4m3
are multiplied as in :mod:`..scaled_linear.triton_kernels`: each 128 elements of K are a sum of the tensor core from
zero, which is added in fp32, scaled in blocks before, with scales of rows at the end. A tile of the first product has
the same columns of gate and up, so that h stays in registers.
"""

import triton
import triton.language as tl

from ..common.dependent_launch import wait_for_kernel_before
from ..common.triton_rows import row_sum
from ..formats.triton_decode import decoded_tile
from ..norm.triton_kernels import load_weight, norm_of
from ..quantise.triton_kernels import store_codes
from ..silu.triton_kernels import silu_times

_LOWEST = tl.constexpr(-(2**31))
"""Below the order of every score."""
_LOWEST_SCORE = tl.constexpr(-(2**31) + 0x7FFFFF)
"""The order of -inf."""
_SWIGLUOAI_ALPHA, _SWIGLUOAI_LIMIT = tl.constexpr(1.702), tl.constexpr(7.0)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_TWICE_SQRT_2_BY_PI, _GELU_CUBIC = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)
"""tanh(z) is 2 s(2 z) - 1."""


@triton.jit
def _order_of(scores):
    """int32 in the order of fp32 numbers, of which NaN is the highest and zeros are equal."""
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(scores != scores, 0x7FFFFFFF, order)


@triton.jit
def _score_of(order):
    """The score of an order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _first_of(order, numbers, AXIS: tl.constexpr, BLOCK: tl.constexpr):
    """The highest order along an axis, and the lowest number that has it."""
    highest = tl.max(order, AXIS, keep_dims=True)
    return highest, tl.min(tl.where(order == highest, numbers, BLOCK), AXIS, keep_dims=True)


@triton.jit
def _in_best_groups(
    order, experts, num_experts, SUMS_TWO: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Whether each expert [BLOCK] is in one of the TOP_GROUPS best groups, of equal ones the lowest. A group stands for
    the score of its best expert, or for the sum of its best two.
    """
    group_of = experts // (num_experts // GROUPS)  # [BLOCK]; beyond the experts it is no group
    groups = tl.arange(0, PADDED_GROUPS)
    own = tl.where(group_of[None, :] == groups[:, None], order[None, :], _LOWEST)  # [PADDED_GROUPS, BLOCK]
    best, expert = _first_of(own, experts[None, :], 1, BLOCK)
    total = 0.0 + _score_of(best)
    if SUMS_TWO:
        own = tl.where(experts[None, :] == expert, _LOWEST, own)
        total += _score_of(tl.max(own, 1, keep_dims=True))
    of_group = tl.where(groups < GROUPS, _order_of(tl.reshape(total, (PADDED_GROUPS,))), _LOWEST)
    found = group_of < 0
    for _ in tl.static_range(TOP_GROUPS):
        _, group = _first_of(of_group, groups, 0, PADDED_GROUPS)
        of_group = tl.where(groups == group, _LOWEST, of_group)
        found = found | (group_of == group)
    return found


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)), rounded after each operation."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))


@triton.jit
def route_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    num_experts,
    scale,
    SCORING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    SUMS_TWO: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The TOP_K highest scores [num_experts] of a token, of equal ones the lowest expert first; with GROUPS those of
    the best groups. A softmax is computed as :mod:`..softmax` does.
    """
    wait_for_kernel_before(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    experts, places = tl.arange(0, BLOCK), tl.arange(0, PADDED_TOP_K)
    mask = experts < num_experts
    x = tl.load(logits_ptr + token * num_experts + experts, mask=mask, other=-float("inf")).to(tl.float32)  # [BLOCK]
    if SCORING == "softmax":
        p = tl.exp(x - tl.max(x))
        scores = p / row_sum(p, 32 * NUM_WARPS)
    else:
        scores = _sigmoid(x)
    compared = scores + tl.load(bias_ptr + experts, mask=mask, other=0.0) if HAS_BIAS else scores
    order = tl.where(mask, _order_of(compared), _LOWEST)
    if GROUPS > 1:
        found = _in_best_groups(order, experts, num_experts, SUMS_TWO, GROUPS, TOP_GROUPS, PADDED_GROUPS, BLOCK)
        order = tl.where(mask, tl.where(found, order, _LOWEST_SCORE), _LOWEST)
    bits = scores.to(tl.int32, bitcast=True)  # a warp adds integers in one instruction
    chosen, ids = tl.zeros((PADDED_TOP_K,), tl.float32), tl.zeros((PADDED_TOP_K,), tl.int64)
    total = 0.0
    for place in tl.static_range(TOP_K):
        expert = tl.min(tl.where(order == tl.max(order, 0), experts, BLOCK), 0)
        order = tl.where(experts == expert, _LOWEST, order)
        score = tl.sum(tl.where(experts == expert, bits, 0), 0).to(tl.float32, bitcast=True)
        total += score
        chosen, ids = tl.where(places == place, score, chosen), tl.where(places == place, expert, ids)
    if RENORMALISE:
        chosen = tl.div_rn(chosen, tl.full((PADDED_TOP_K,), 1.0, tl.float32) * total)
    if HAS_SCALE:
        chosen *= scale
    tl.store(weights_ptr + token * TOP_K + places, chosen, mask=places < TOP_K)
    tl.store(ids_ptr + token * TOP_K + places, ids, mask=places < TOP_K)


@triton.jit
def _experts_of(ids_ptr, places_ptr, pairs, mask, IS_PART: tl.constexpr):
    """Where the weights of pairs' experts lie, int32; -1 without a pair or, if only a part of the experts is here, if
    its own is not.
    """
    expert = tl.load(ids_ptr + pairs, mask=mask, other=-1).to(tl.int32)
    if IS_PART:
        expert = tl.load(places_ptr + expert, mask=expert >= 0, other=-1).to(tl.int32)
    return expert


@triton.jit
def _expert_of(ids_ptr, places_ptr, pair, IS_PART: tl.constexpr):
    """The same of one pair that there is."""
    expert = tl.load(ids_ptr + pair).to(tl.int32)
    if IS_PART:
        expert = tl.load(places_ptr + expert).to(tl.int32)
    return expert


@triton.jit
def _write_blocks(
    expert_of_block_ptr, first, blocks, num_blocks, PADDED_EXPERTS: tl.constexpr, BLOCKS_AT_ONCE: tl.constexpr
):
    """Writes whose pairs are in each block, if experts have so many from a first one on, -1 for nobody's."""
    experts = tl.arange(0, PADDED_EXPERTS)
    for number in range(tl.max(blocks, 0)):
        tl.store(expert_of_block_ptr + first + number, experts, mask=number < blocks)
    for start in range(tl.sum(blocks, 0), num_blocks, BLOCKS_AT_ONCE):
        block = start + tl.arange(0, BLOCKS_AT_ONCE)
        tl.store(expert_of_block_ptr + block, tl.full((BLOCKS_AT_ONCE,), -1, tl.int32), mask=block < num_blocks)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(
    ids_ptr, places_ptr, counts_ptr, num_pairs,
    PADDED_EXPERTS: tl.constexpr, IS_PART: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """counts: int32 [programs, PADDED_EXPERTS], how many of a program's BLOCK pairs each expert has."""
    wait_for_kernel_before(OVERLAPS)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = _experts_of(ids_ptr, places_ptr, offs, offs < num_pairs, IS_PART)
    counts = tl.histogram(tl.maximum(expert, 0), PADDED_EXPERTS, mask=expert >= 0)
    tl.store(counts_ptr + tl.program_id(0) * PADDED_EXPERTS + tl.arange(0, PADDED_EXPERTS), counts)


@triton.jit(do_not_specialize=["num_pairs", "num_counts", "num_blocks"])
def place_kernel(
    ids_ptr, places_ptr, counts_ptr, stop_ptr, expert_of_block_ptr, pairs_ptr, num_pairs, num_counts, num_blocks,
    PADDED_EXPERTS: tl.constexpr, IS_PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
    COUNTS: tl.constexpr, COUNTED_AT_ONCE: tl.constexpr, BLOCKS_AT_ONCE: tl.constexpr, PAIRS_AT_ONCE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Writes a program's BLOCK pairs into blocks of their experts, in order: as far behind an expert's first pair as
    there are others of it before, in programs before and in its own. With COUNTS those of other programs are in
    ``counts``, otherwise it counts them itself. The first program also writes where the pairs of an expert end, and
    whose pairs are in each block.
    """
    wait_for_kernel_before(OVERLAPS)
    program, experts = tl.program_id(0), tl.arange(0, PADDED_EXPERTS)
    begin, in_block = program * BLOCK, tl.arange(0, BLOCK)
    total, earlier = tl.zeros((PADDED_EXPERTS,), tl.int32), tl.zeros((PADDED_EXPERTS,), tl.int32)
    if COUNTS:
        for start in range(0, num_counts, COUNTS):
            row = (start + tl.arange(0, COUNTS))[:, None]
            counts = tl.load(counts_ptr + row * PADDED_EXPERTS + experts[None, :], mask=row < num_counts, other=0)
            total += tl.sum(counts, 0)  # of [COUNTS, PADDED_EXPERTS]
            earlier += tl.sum(tl.where(row < program, counts, 0), 0)
    else:
        for start in range(0, num_pairs, COUNTED_AT_ONCE):
            offs = start + tl.arange(0, COUNTED_AT_ONCE)
            expert = _experts_of(ids_ptr, places_ptr, offs, offs < num_pairs, IS_PART)
            total += tl.histogram(tl.maximum(expert, 0), PADDED_EXPERTS, mask=expert >= 0)
            earlier += tl.histogram(tl.maximum(expert, 0), PADDED_EXPERTS, mask=(expert >= 0) & (offs < begin))
    blocks = tl.cdiv(total, BLOCK_M)
    first = tl.cumsum(blocks, 0) - blocks
    if program == 0:
        _write_blocks(expert_of_block_ptr, first, blocks, num_blocks, PADDED_EXPERTS, BLOCKS_AT_ONCE)
        tl.store(stop_ptr + experts, first * BLOCK_M + total)
    expert = _experts_of(ids_ptr, places_ptr, begin + in_block, begin + in_block < num_pairs, IS_PART)
    before = tl.gather(first * BLOCK_M + earlier, tl.maximum(expert, 0), 0)
    for start in range(0, BLOCK, PAIRS_AT_ONCE):
        others = start + tl.arange(0, PAIRS_AT_ONCE)
        of_others = _experts_of(ids_ptr, places_ptr, begin + others, begin + others < num_pairs, IS_PART)
        same = (of_others[None, :] == expert[:, None]) & (others[None, :] < in_block[:, None])  # [BLOCK, PAIRS_AT_ONCE]
        before += tl.sum(same.to(tl.int32), 1)
    tl.store(pairs_ptr + before, begin + in_block, mask=expert >= 0)


@triton.jit
def pairs_of_few(
    ids_ptr, places_ptr, block, num_pairs, IS_PART: tl.constexpr, FEW_PAIRS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """The expert of pair number ``block``, and the pairs [BLOCK_M] that begin with it: every BLOCK_M-th of an expert's
    pairs begins a block. -1 where there is none.
    """
    offs = tl.arange(0, FEW_PAIRS)
    expert = _expert_of(ids_ptr, places_ptr, block, IS_PART)
    same = (_experts_of(ids_ptr, places_ptr, offs, offs < num_pairs, IS_PART) == expert).to(tl.int32)
    rank = tl.cumsum(same, 0) - 1  # [FEW_PAIRS]
    first = tl.sum(tl.where(offs < block, same, 0), 0)
    ranks = first + tl.arange(0, BLOCK_M)
    found = (rank[None, :] == ranks[:, None]) & (same[None, :] > 0)  # [BLOCK_M, FEW_PAIRS]
    pairs = tl.max(tl.where(found, offs[None, :], -1), 1)
    return tl.where(first % BLOCK_M == 0, expert, -1), pairs


@triton.jit
def first_of_few(
    ids_ptr, places_ptr, block, num_pairs, IS_PART: tl.constexpr, FEW_PAIRS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """The pair with which block number ``block`` begins, where blocks are numbered by that pair; -1 where there are
    fewer: for a grid of as many programs as there may be blocks, where :func:`pairs_of_few` has one for each pair.
    """
    offs = tl.arange(0, FEW_PAIRS)
    expert = _experts_of(ids_ptr, places_ptr, offs, offs < num_pairs, IS_PART)
    before = (expert[None, :] == expert[:, None]) & (offs[None, :] < offs[:, None])  # [FEW_PAIRS, FEW_PAIRS]
    begins = (expert >= 0) & (tl.sum(before.to(tl.int32), 1) % BLOCK_M == 0)
    number = tl.cumsum(begins.to(tl.int32), 0) - 1
    return tl.max(tl.where(begins & (number == block), offs, -1), 0)


@triton.jit
def pairs_of_block(pairs_ptr, next_ptr, expert, block, BLOCK_M: tl.constexpr):
    """The pairs [BLOCK_M] of a block of an expert that :func:`place_kernel` has grouped, and which of them there are.

    Args:
        next_ptr: where the pairs of each expert end.
    """
    slots = block * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = slots < tl.load(next_ptr + expert)
    return tl.load(pairs_ptr + slots, mask=mask, other=0), mask


@triton.jit
def _round(x, DTYPE: tl.constexpr):
    """x as DTYPE has it, in fp32."""
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _activated(gate, up, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """Of fp32 that DTYPE has, too, of one that is not gated twice the same. NaN stays NaN."""
    if ACTIVATION == "relu2_no_mul":
        out = tl.where(up < 0.0, 0.0, up)
        out *= out
    elif ACTIVATION == "swigluoai":
        gate = tl.where(gate > _SWIGLUOAI_LIMIT, _SWIGLUOAI_LIMIT, gate)
        up = tl.where(up > _SWIGLUOAI_LIMIT, _SWIGLUOAI_LIMIT, tl.where(up < -_SWIGLUOAI_LIMIT, -_SWIGLUOAI_LIMIT, up))
        out = (up + 1.0) * (gate * _sigmoid(gate * _SWIGLUOAI_ALPHA))
    elif ACTIVATION == "silu":
        out = silu_times(gate, up, DTYPE)
    elif ACTIVATION == "gelu":
        out = _round(0.5 * gate * (1.0 + tl.erf(gate * _SQRT_HALF)), DTYPE) * up
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        out = _round(gate * _sigmoid((gate + gate * gate * gate * _GELU_CUBIC) * _TWICE_SQRT_2_BY_PI), DTYPE) * up
    return out.to(DTYPE)


@triton.jit
def _dot(x, weight, acc, SWAP_AB: tl.constexpr, PRECISION: tl.constexpr):
    """acc + x @ weight.T, or its transpose: x [BLOCK_M, BLOCK_K], weight [BLOCK_N, BLOCK_K]."""
    if SWAP_AB:
        acc = tl.dot(weight, x.T, acc, input_precision=PRECISION)
    else:
        acc = tl.dot(x, weight.T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _promoted(x, weight, total, scale, SWAP_AB: tl.constexpr, GROUP: tl.constexpr):
    """fma(scale, x @ weight.T, total), or its transpose: codes x [BLOCK_M, GROUP] and weight [BLOCK_N, GROUP], scale
    [BLOCK_M] of both, or 1.
    """
    # All of GROUP in the tensor core: a smaller number would promote sooner, and 0 have the addition in it.
    if SWAP_AB:
        sums = tl.dot(weight, x.T, max_num_imprecise_acc=GROUP)
    else:
        sums = tl.dot(x, weight.T, max_num_imprecise_acc=GROUP)
    scale = tl.broadcast_to(scale[None, :] if SWAP_AB else scale[:, None], total.shape)
    return tl.fma(scale, sums, total)


@triton.jit
def _times_scales(
    total, of_x, scales_ptr, rows, mask_n, SWAP_AB: tl.constexpr, ROWS_OF_A_SCALE: tl.constexpr
):  # fmt: skip
    """total * of_x * scales, from left to right: of_x [BLOCK_M] of pairs, scales of the weight's rows [BLOCK_N]."""
    scales = tl.load(scales_ptr + rows // ROWS_OF_A_SCALE, mask=mask_n, other=0.0)
    return total * of_x[None, :] * scales[:, None] if SWAP_AB else total * of_x[:, None] * scales[None, :]


@triton.jit
def _add_bias(acc, bias_ptr, offs_n, mask_n, SWAP_AB: tl.constexpr):
    bias = tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)  # [BLOCK_N]
    return acc + (bias[:, None] if SWAP_AB else bias[None, :])


@triton.jit
def _tile(
    x_ptr, x_scales_ptr, x_scales_strides, weight, scales_ptr, zeros_ptr, bias_ptr, out_ptr, pairs, mask_m, expert,
    first_n, N, K, PAIRS_OF_A_ROW: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BY_TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP_AB: tl.constexpr,
    PRECISION: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, IN_BLOCKS: tl.constexpr,
    ROWS_OF_A_SCALE: tl.constexpr,
):  # fmt: skip
    """One tile of :func:`grouped_gemm_kernel`: pairs [BLOCK_M] of an expert, BLOCK_N columns from ``first_n`` on."""
    GATED: tl.constexpr = (ACTIVATION != "") & (ACTIVATION != "relu2_no_mul")
    IN_TURN: tl.constexpr = ACTIVATION == "swigluoai"
    offs_n = first_n + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_n = offs_n < N
    first = expert * (2 * N if GATED else N)  # of the expert's rows of the weight
    rows, up_row = (2 * offs_n, 1) if IN_TURN else (offs_n, N)  # of the gate, and how far behind those of up are
    x_ptrs = x_ptr + (pairs // PAIRS_OF_A_ROW)[:, None] * K + offs_k[None, :]
    if GROUP:  # BLOCK_K is that
        x_scales_ptr += pairs // PAIRS_OF_A_ROW * x_scales_strides[0]
    if IN_BLOCKS:  # and BLOCK_N a divisor of it
        groups = tl.cdiv(K, GROUP)
        blocks = tl.cdiv(2 * N if GATED else N, GROUP)  # of rows that share a scale, of an expert
        scales_ptr += (expert * blocks + first_n // GROUP) * groups
    row = ((expert * N if IN_TURN else first) + first_n).to(tl.int32)
    offs_weight = (first + rows)[:, None] * K + offs_k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N), tl.float32)
    up = acc
    for start_k in range(0, K, BLOCK_K):
        if EVEN_K:
            x_mask, weight_mask = mask_m[:, None], mask_n[:, None]
        else:
            mask_k = offs_k[None, :] < K - start_k
            x_mask, weight_mask = mask_m[:, None] & mask_k, mask_n[:, None] & mask_k
        x = tl.load(x_ptrs + start_k, mask=x_mask, other=0.0)  # [BLOCK_M, BLOCK_K]
        if FORMAT is not None:
            tile = decoded_tile(
                weight, scales_ptr, zeros_ptr, first + rows, mask_n, start_k, K, FORMAT, EVEN_K, BLOCK_N, BLOCK_K,
                x_ptr.dtype.element_ty,
            )  # fmt: skip
        elif BY_TMA and IN_TURN:
            tile = weight.load([0, row, start_k]).reshape(BLOCK_N, BLOCK_K)
        elif BY_TMA:
            tile = weight.load([row, start_k])  # [BLOCK_N, BLOCK_K]
        else:
            tile = tl.load(weight + offs_weight + start_k, mask=weight_mask, other=0.0)
        if IN_BLOCKS:
            of_x = tl.load(x_scales_ptr + start_k // GROUP * x_scales_strides[1], mask=mask_m, other=0.0)  # [BLOCK_M]
            acc = _promoted(x, tile, acc, of_x * tl.load(scales_ptr + start_k // GROUP), SWAP_AB, GROUP)
        elif GROUP:
            acc = _promoted(x, tile, acc, tl.full((BLOCK_M,), 1.0, tl.float32), SWAP_AB, GROUP)
        else:
            acc = _dot(x, tile, acc, SWAP_AB, PRECISION)
        if GATED:
            if FORMAT is not None:
                tile = decoded_tile(
                    weight, scales_ptr, zeros_ptr, first + rows + up_row, mask_n, start_k, K, FORMAT, EVEN_K, BLOCK_N,
                    BLOCK_K, x_ptr.dtype.element_ty,
                )  # fmt: skip
            elif BY_TMA and IN_TURN:
                tile = weight.load([1, row, start_k]).reshape(BLOCK_N, BLOCK_K)
            elif BY_TMA:
                tile = weight.load([row + N, start_k])
            else:
                tile = tl.load(weight + offs_weight + (up_row * K + start_k), mask=weight_mask, other=0.0)
            if IN_BLOCKS:
                of_up = tl.load(scales_ptr + N // GROUP * groups + start_k // GROUP)
                up = _promoted(x, tile, up, of_x * of_up, SWAP_AB, GROUP)
            elif GROUP:
                up = _promoted(x, tile, up, tl.full((BLOCK_M,), 1.0, tl.float32), SWAP_AB, GROUP)
            else:
                up = _dot(x, tile, up, SWAP_AB, PRECISION)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if (GROUP > 0) & (not IN_BLOCKS):
        of_pairs = tl.load(x_scales_ptr, mask=mask_m, other=0.0)  # [BLOCK_M]
        acc = _times_scales(acc, of_pairs, scales_ptr, first + rows, mask_n, SWAP_AB, ROWS_OF_A_SCALE)
        if GATED:
            up = _times_scales(up, of_pairs, scales_ptr, first + rows + up_row, mask_n, SWAP_AB, ROWS_OF_A_SCALE)
    if HAS_BIAS:
        acc = _add_bias(acc, bias_ptr + first, rows, mask_n, SWAP_AB)
        if GATED:
            up = _add_bias(up, bias_ptr + first + up_row, rows, mask_n, SWAP_AB)
    if GATED:
        out = _activated(_round(acc, dtype), _round(up, dtype), ACTIVATION, dtype)
    elif ACTIVATION == "":
        out = acc.to(dtype)
    else:
        acc = _round(acc, dtype)
        out = _activated(acc, acc, ACTIVATION, dtype)
    if SWAP_AB:
        out = out.T
    tl.store(out_ptr + pairs[:, None] * N + offs_n[None, :], out, mask=mask_m[:, None] & mask_n[None, :])


@triton.jit(do_not_specialize=["x_scales_row", "x_scales_group", "num_pairs"])
def grouped_gemm_kernel(
    x_ptr,
    x_scales_ptr,
    x_scales_row,
    x_scales_group,
    weight,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    pairs_ptr,
    places_ptr,
    next_ptr,
    expert_of_block_ptr,
    num_pairs,
    N,
    K,
    PAIRS_OF_A_ROW: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_PART: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    FEW_PAIRS: tl.constexpr,
    BY_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    PRECISION: tl.constexpr,
    HALVES: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    ROWS_OF_A_SCALE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """x: [rows, K], weight: [experts, N, K], bias: [experts, N] or None, out: [pairs, N], all packed; the row of a pair
    is pair // PAIRS_OF_A_ROW. With FORMAT, a :class:`..formats.triton_decode.PackedTile`, ``weight`` has the codes of
    that format, and there are scales, and zero points or None. With GROUP both x and weight are codes of e4m3, with
    x_scales [rows] and scales [experts, N / ROWS_OF_A_SCALE], or IN_BLOCKS [rows, ceil(K / GROUP)] and [experts,
    ceil(N / GROUP), ceil(K / GROUP)]; those of x are of these strides.

    With ACTIVATION weight and bias have 2 N rows, those of the gate and those of up, or for "swigluoai" one of each in
    turn, and out is the activation of both; without a gate they have N. With FEW_PAIRS ``pairs`` has each pair's
    expert, and a program looks for the pairs of its block. With BY_TMA ``weight`` is a descriptor of [experts * N, K],
    or of rows in turn as [2, experts * N, K]: columns beyond N are another expert's, and are not written. With HALVES a
    block of at most half as many pairs is a tile of half as many rows.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0) // tiles_n
    first_n = (tl.program_id(0) % tiles_n) * BLOCK_N
    wait_for_kernel_before(OVERLAPS)
    if FEW_PAIRS:
        expert, pairs = pairs_of_few(pairs_ptr, places_ptr, block, num_pairs, IS_PART, FEW_PAIRS, BLOCK_M)
        if expert < 0:
            return
        mask_m = pairs >= 0
    else:
        expert = tl.load(expert_of_block_ptr + block)
        if expert < 0:
            return
        pairs, mask_m = pairs_of_block(pairs_ptr, next_ptr, expert, block, BLOCK_M)
    expert = expert.to(tl.int64)
    pairs = tl.where(mask_m, pairs, 0).to(tl.int64)
    x_scales_strides = x_scales_row, x_scales_group
    if HALVES:  # noqa: SIM102 - decided when the kernel is compiled
        if tl.sum(mask_m.to(tl.int32)) <= BLOCK_M // 2:
            half = block * BLOCK_M + tl.arange(0, BLOCK_M // 2)
            mask_half = half < tl.load(next_ptr + expert)
            pairs_of_half = tl.load(pairs_ptr + half, mask=mask_half, other=0).to(tl.int64)
            _tile(
                x_ptr, x_scales_ptr, x_scales_strides, weight, scales_ptr, zeros_ptr, bias_ptr, out_ptr, pairs_of_half,
                mask_half, expert, first_n, N, K, PAIRS_OF_A_ROW, ACTIVATION, HAS_BIAS, EVEN_K, BY_TMA, BLOCK_M // 2,
                BLOCK_N, BLOCK_K, SWAP_AB, PRECISION, FORMAT, GROUP, IN_BLOCKS, ROWS_OF_A_SCALE,
            )  # fmt: skip
            return
    _tile(
        x_ptr, x_scales_ptr, x_scales_strides, weight, scales_ptr, zeros_ptr, bias_ptr, out_ptr, pairs, mask_m, expert,
        first_n, N, K, PAIRS_OF_A_ROW, ACTIVATION, HAS_BIAS, EVEN_K, BY_TMA, BLOCK_M, BLOCK_N, BLOCK_K, SWAP_AB,
        PRECISION, FORMAT, GROUP, IN_BLOCKS, ROWS_OF_A_SCALE,
    )  # fmt: skip


@triton.jit
def activation_kernel(hidden_ptr, out_ptr, LENGTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """hidden: [pairs, 2 * LENGTH], gate first, or for "swigluoai" one of each in turn; without a gate [pairs, LENGTH].
    out: [pairs, LENGTH].
    """
    GATED: tl.constexpr = ACTIVATION != "relu2_no_mul"
    pair = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < LENGTH
    offs_gate, to_up = (2 * offs, 1) if ACTIVATION == "swigluoai" else (offs, LENGTH)
    gate_ptrs = hidden_ptr + pair * (2 * LENGTH if GATED else LENGTH) + offs_gate
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + to_up, mask=mask, other=0.0).to(tl.float32) if GATED else gate
    out = _activated(gate, up, ACTIVATION, out_ptr.dtype.element_ty)
    tl.store(out_ptr + pair * LENGTH + offs, out, mask=mask)


@triton.jit
def weighted_sum(
    expert_out_ptr, weights_ptr, ids_ptr, places_ptr, token, length, offs, mask,
    TOP_K: tl.constexpr, IS_PART: tl.constexpr, slots_ptr=None,
):  # fmt: skip
    """fp32 of a shape: of a token, or of each [ROWS_PER_PROGRAM, 1], the elements ``offs`` of that shape, of rows of
    ``length``. What an expert gives that is not here is 0. With slots the row of pair p is ``slots[p]``.
    """
    acc = tl.zeros(offs.shape, tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        weight, used = tl.load(weights_ptr + pair), mask
        if IS_PART:
            is_here = _expert_of(ids_ptr, places_ptr, pair, IS_PART) >= 0
            weight, used = tl.where(is_here, weight, 0.0), mask & (tl.zeros_like(offs) < is_here.to(tl.int32))
        row = pair if slots_ptr is None else tl.load(slots_ptr + pair).to(tl.int64)
        expert_out = tl.load(expert_out_ptr + row * length + offs, mask=used, other=0.0, eviction_policy="evict_first")
        acc += weight * expert_out.to(tl.float32)
    return acc


@triton.jit
def combine_kernel(
    expert_out_ptr, slots_ptr, weights_ptr, ids_ptr, places_ptr, out_ptr,
    LENGTH: tl.constexpr, TOP_K: tl.constexpr, IS_PART: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """expert_out: [tokens, TOP_K, LENGTH], or with slots [tokens, TOP_K] the row of each pair; weights and ids:
    [tokens, TOP_K], out: [tokens, LENGTH]. Programs one after the other read what lies side by side.
    """
    wait_for_kernel_before(OVERLAPS)
    PARTS: tl.constexpr = (LENGTH + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    offs = (tl.program_id(0) % PARTS) * BLOCK + tl.arange(0, BLOCK)
    mask = tl.full((BLOCK,), True, tl.int1) if LENGTH % BLOCK == 0 else offs < LENGTH
    acc = weighted_sum(
        expert_out_ptr, weights_ptr, ids_ptr, places_ptr, token, LENGTH, offs, mask, TOP_K, IS_PART, slots_ptr
    )
    tl.store(out_ptr + token * LENGTH + offs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["scale_rows", "num_rows", "row_units"])
def combine_norm_kernel(
    expert_out_ptr, weights_ptr, ids_ptr, places_ptr, residual_ptr, norm_weight_ptr, out_ptr, residual_out_ptr,
    codes_ptr, scale_ptr, scale_rows, num_rows, row_units, eps,
    TOP_K: tl.constexpr, IS_PART: tl.constexpr, GROUP: tl.constexpr, QUANTISE: tl.constexpr, NORM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The sums of :func:`combine_kernel`, rounded, with a residual added, and normalised in the tiles that a norm alone
    has::

        x = round(sum) + residual,  residual_out = round(x),  out = x * rsqrt(mean(x**2) + eps) * norm_weight

    residual, out, residual_out: [num_rows, N], norm_weight: [N]; row_units: N / stride_unit, of which
    the compiler knows as little as of a norm's strides. With QUANTISE also codes of out, and their scales.
    """
    wait_for_kernel_before(OVERLAPS)
    row = tl.program_id(0) * NORM.rows_per_program + tl.arange(0, NORM.rows_per_program)
    columns = tl.arange(0, NORM.block)
    mask = (row < num_rows)[:, None] & (columns < NORM.length)[None, :]  # [rows_per_program, block]
    token = tl.minimum(row, num_rows - 1)[:, None].to(tl.int64)
    length = row_units * NORM.stride_unit
    offs = row[:, None].to(tl.int64) * length + columns[None, :]
    norm_weight = load_weight(norm_weight_ptr, columns, mask)
    residual = tl.load(residual_ptr + offs, mask=mask, other=0.0)
    of_row = tl.broadcast_to(columns[None, :], mask.shape)
    total = weighted_sum(expert_out_ptr, weights_ptr, ids_ptr, places_ptr, token, length, of_row, mask, TOP_K, IS_PART)
    x = _round(total, out_ptr.dtype.element_ty) + residual.to(tl.float32)
    y = norm_of(x, norm_weight, columns, out_ptr, residual_out_ptr, offs, 0, mask, eps, NORM.length, True, True, NORM)
    if QUANTISE is not None:
        store_codes(y, row, row < num_rows, 0, codes_ptr, scale_ptr, scale_rows, NORM.length, GROUP, QUANTISE)


@triton.jit(do_not_specialize=["stride_scale_row", "stride_scale_group", "scale_rows"])
def gather_kernel(
    codes_ptr, scale_ptr, stride_scale_row, stride_scale_group, pairs_ptr, stop_ptr, expert_of_block_ptr,
    gathered_ptr, gathered_scale_ptr, expert_of_slot_ptr, slots_ptr, scale_rows,
    K: tl.constexpr, GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr, PAIRS_OF_A_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Rows of codes [rows, K] in the slots of their pairs [blocks * BLOCK_M], with scales [GROUPS, scale_rows] whose
    rows lie side by side, the expert of each slot, -1 without a pair, and the slot of each pair. Slots without a pair
    are not written. A program has ROWS slots of one block.
    """
    wait_for_kernel_before(OVERLAPS)
    slots = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.load(expert_of_block_ptr + tl.program_id(0) * ROWS // BLOCK_M)
    mask = slots < tl.load(stop_ptr + expert, mask=expert >= 0, other=0)
    pairs = tl.load(pairs_ptr + slots, mask=mask, other=0)
    tl.store(expert_of_slot_ptr + slots, tl.where(mask, expert, -1))
    tl.store(slots_ptr + pairs, slots, mask=mask)
    rows, of_slot = (pairs // PAIRS_OF_A_ROW).to(tl.int64), slots.to(tl.int64)
    for start in tl.static_range(0, K, BLOCK):
        offs = (start + tl.arange(0, BLOCK))[None, :]
        used = mask[:, None] & (offs < K)
        codes = tl.load(codes_ptr + rows[:, None] * K + offs, mask=used, other=0)
        tl.store(gathered_ptr + of_slot[:, None] * K + offs, codes, mask=used)
    groups = tl.arange(0, PADDED_GROUPS)[None, :]
    used = mask[:, None] & (groups < GROUPS)
    scale = tl.load(scale_ptr + rows[:, None] * stride_scale_row + groups * stride_scale_group, mask=used, other=0.0)
    tl.store(gathered_scale_ptr + groups * scale_rows + slots[:, None], scale, mask=used)
