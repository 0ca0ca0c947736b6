"""Triton kernels of a mixture of experts. A pair p = token * TOP_K + place is a token and one of its experts::

    h[p] = round(gate_up[expert(p)] @ x[token(p)] + bias)
    a[p] = round(round(silu(gate)) * up)                        gate, up: the halves of h[p]
    d[p] = down[expert(p)] @ a[p] + bias                        in fp32
    y[t] = round(((0 + g[t, 0] d[t, 0]) + g[t, 1] d[t, 1]) + ...)

Pairs are grouped by expert into blocks of BLOCK_M. Where a pair lies follows the other tokens; what is computed of it
is a row of its own, one accumulator an element that adds K upwards, as in :mod:`..linear.triton_kernels`.
"""

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-(2**31))
"""Below the order of every score."""


@triton.jit
def _order_of(scores):
    """int32 in the order of fp32 numbers, of which NaN is the highest and zeros are equal."""
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(scores != scores, 0x7FFFFFFF, order)


@triton.jit
def route_kernel(
    scores_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    num_experts,
    scale,
    HAS_BIAS: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_TOP_K: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
):
    """The TOP_K highest scores [num_experts] of a token, of equal ones the lowest expert first."""
    token = tl.program_id(0).to(tl.int64)
    experts, places = tl.arange(0, PADDED_EXPERTS), tl.arange(0, PADDED_TOP_K)
    mask = experts < num_experts
    scores = tl.load(scores_ptr + token * num_experts + experts, mask=mask, other=0.0)  # [PADDED_EXPERTS]
    compared = scores + tl.load(bias_ptr + experts, mask=mask, other=0.0) if HAS_BIAS else scores
    order = tl.where(mask, _order_of(compared), _LOWEST)
    chosen, ids = tl.zeros((PADDED_TOP_K,), tl.float32), tl.zeros((PADDED_TOP_K,), tl.int64)
    total = 0.0
    for place in tl.static_range(TOP_K):
        expert = tl.min(tl.where(order == tl.max(order, 0), experts, PADDED_EXPERTS), 0)
        order = tl.where(experts == expert, _LOWEST, order)
        score = tl.sum(tl.where(experts == expert, scores, 0.0), 0)
        total += score
        chosen, ids = tl.where(places == place, score, chosen), tl.where(places == place, expert, ids)
    if RENORMALISE:
        chosen = tl.div_rn(chosen, tl.full((PADDED_TOP_K,), 1.0, tl.float32) * total)
    if HAS_SCALE:
        chosen *= scale
    tl.store(weights_ptr + token * TOP_K + places, chosen, mask=places < TOP_K)
    tl.store(ids_ptr + token * TOP_K + places, ids, mask=places < TOP_K)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def count_kernel(
    ids_ptr, next_ptr, expert_of_block_ptr, num_pairs, num_blocks,
    PADDED_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, BLOCKS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Where the first pair of each expert goes, and whose pairs are in each block; -1 for nobody's."""
    experts = tl.arange(0, PADDED_EXPERTS)
    counts = tl.zeros((PADDED_EXPERTS,), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < num_pairs
        ids = tl.load(ids_ptr + offs, mask=mask, other=0).to(tl.int32)
        counts += tl.histogram(ids, PADDED_EXPERTS, mask=mask)
    blocks = tl.cdiv(counts, BLOCK_M)
    stop = tl.cumsum(blocks, 0)
    tl.store(next_ptr + experts, (stop - blocks) * BLOCK_M)
    for start in range(0, num_blocks, BLOCKS_AT_ONCE):
        block = start + tl.arange(0, BLOCKS_AT_ONCE)
        expert = tl.sum((stop[None, :] <= block[:, None]).to(tl.int32), 1)
        expert = tl.where(expert < PADDED_EXPERTS, expert, -1)
        tl.store(expert_of_block_ptr + block, expert, mask=block < num_blocks)


@triton.jit(do_not_specialize=["num_pairs"])
def place_kernel(ids_ptr, next_ptr, pairs_ptr, num_pairs, BLOCK: tl.constexpr):
    """Writes each pair into a block of its expert. Those of one expert come in any order: it decides no bits."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pair < num_pairs
    expert = tl.load(ids_ptr + pair, mask=mask, other=0)
    place = tl.atomic_add(next_ptr + expert, 1, mask=mask)
    tl.store(pairs_ptr + place, pair, mask=mask)


@triton.jit
def grouped_gemm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    pairs_ptr,
    expert_of_block_ptr,
    N,
    K,
    PAIRS_OF_A_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x: [rows, K], weight: [experts, N, K], bias: [experts, N] or None, out: [pairs, N], all packed; the row of a pair
    is pair // PAIRS_OF_A_ROW. A block of few pairs is computed transposed: the tensor core's long side takes N.
    """
    SWAP_AB: tl.constexpr = BLOCK_M < 64
    tiles_n = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0) // tiles_n
    expert = tl.load(expert_of_block_ptr + block).to(tl.int64)
    if expert < 0:
        return
    pairs = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)  # [BLOCK_M]
    offs_n = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m, mask_n = pairs >= 0, offs_n < N
    rows = tl.where(mask_m, pairs, 0) // PAIRS_OF_A_ROW
    x_ptrs = x_ptr + rows[:, None] * K + offs_k[None, :]
    weight_ptrs = weight_ptr + expert * N * K + offs_n[:, None].to(tl.int64) * K + offs_k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N), tl.float32)
    for start_k in range(0, K, BLOCK_K):
        if EVEN_K:
            x_mask, weight_mask = mask_m[:, None], mask_n[:, None]
        else:
            mask_k = offs_k[None, :] < K - start_k
            x_mask, weight_mask = mask_m[:, None] & mask_k, mask_n[:, None] & mask_k
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)  # [BLOCK_M, BLOCK_K]
        weight = tl.load(weight_ptrs, mask=weight_mask, other=0.0)  # [BLOCK_N, BLOCK_K]
        if SWAP_AB:
            acc = tl.dot(weight, x.T, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(x, weight.T, acc, input_precision=PRECISION)
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * N + offs_n, mask=mask_n, other=0.0).to(tl.float32)  # [BLOCK_N]
        acc += bias[:, None] if SWAP_AB else bias[None, :]
    out = (acc.T if SWAP_AB else acc).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + pairs[:, None] * N + offs_n[None, :], out, mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def silu_and_mul_kernel(hidden_ptr, out_ptr, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """hidden: [pairs, 2 * LENGTH], gate first; out: [pairs, LENGTH]. SiLU is rounded before it is multiplied."""
    pair = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < LENGTH
    gate = tl.load(hidden_ptr + pair * 2 * LENGTH + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(hidden_ptr + pair * 2 * LENGTH + LENGTH + offs, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + pair * LENGTH + offs, (silu * up).to(dtype), mask=mask)


@triton.jit
def combine_kernel(down_ptr, weights_ptr, out_ptr, LENGTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """down: [tokens, TOP_K, LENGTH] fp32, weights: [tokens, TOP_K] fp32, out: [tokens, LENGTH]."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < LENGTH
    acc = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        acc += tl.load(weights_ptr + pair) * tl.load(down_ptr + pair * LENGTH + offs, mask=mask, other=0.0)
    tl.store(out_ptr + token * LENGTH + offs, acc.to(out_ptr.dtype.element_ty), mask=mask)
