"""The sum over ranks on GPUs that read each other's memory, in Triton.

    out = round(((p[0] + p[1]) + p[2]) + ...)    p[r]: the partial result of rank r

Every rank first copies its partial result to where the others see it. One-shot: each rank then reads all of them and
adds everything. Two-shot: each adds the blocks that it owns, writes their sums where its partial results were, and
reads the other blocks' sums from their owners. An element is added in the same order either way, whoever adds it.

CTA i of a rank waits for CTA i of every other, and reads nothing but what those have written. A message lies in one of
two halves of the memory, in turn: when a rank writes a half again, every rank has begun the message between, and so is
done with the one before.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def _wait(flag_ptr, epoch, TIMEOUT: tl.constexpr):
    """Until a rank has signalled ``epoch`` or a later one. Epochs begin anew after 2^32, so their difference counts."""
    if TIMEOUT > 0:
        start = globaltimer()
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") - epoch < 0:
        if TIMEOUT > 0:  # noqa: SIM102 - known when it is compiled
            if globaltimer() - start > TIMEOUT:
                tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _signal_and_wait(flags, own_flags_ptr, rank, epoch, RANKS: tl.constexpr, TIMEOUT: tl.constexpr):
    """A barrier of this CTA and those of the same number on all ranks; what each wrote before, all read after it.

    Args:
        flags: of every rank, RANKS int32 of this CTA: the epoch that each rank has reached.
        own_flags_ptr: those of this rank.
    """
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        tl.atomic_xchg(flags[peer] + rank, epoch, sem="release", scope="sys")
    for peer in tl.static_range(RANKS):
        _wait(own_flags_ptr + peer, epoch, TIMEOUT)
    tl.debug_barrier()


@triton.jit
def _block(block, numel, BLOCK: tl.constexpr):
    """Offsets of a block's elements, and which of them there are."""
    offs = block * BLOCK + tl.arange(0, BLOCK)
    return offs, offs < numel


@triton.jit
def _add(partials, offs, mask, RANKS: tl.constexpr, ACCUMULATE: tl.constexpr):
    """[BLOCK], not yet rounded: rank 0 first."""
    acc = tl.load(partials[0] + offs, mask=mask, other=0.0, cache_modifier=".cg").to(ACCUMULATE)
    for peer in tl.static_range(1, RANKS):
        acc += tl.load(partials[peer] + offs, mask=mask, other=0.0, cache_modifier=".cg").to(ACCUMULATE)
    return acc


@triton.jit(do_not_specialize=["rank", "units"])
def all_reduce_kernel(
    x_ptr,
    out_ptr,
    addresses_ptr,
    epochs_ptr,
    rank,
    units,
    UNIT: tl.constexpr,
    RANKS: tl.constexpr,
    LARGEST: tl.constexpr,
    FLAG_BYTES: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    TIMEOUT: tl.constexpr,
):
    """Adds one message.

    Args:
        x_ptr, out_ptr: [units * UNIT], the rank's partial result, and the sum.
        addresses_ptr: [RANKS] int64: of each rank the address of FLAG_BYTES of flags and, behind them, of two halves of
            LARGEST bytes.
        epochs_ptr: [CTAs] int32, barriers that each CTA has passed. All ranks have the same CTAs, and call alike.
        rank: this one.
        UNIT: elements that are loaded at once.
        TIMEOUT: nanoseconds after which a rank that waits ends with an error; 0: it waits for ever.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    BARRIERS: tl.constexpr = 2 if TWO_SHOT else 1
    OWNERS: tl.constexpr = RANKS if TWO_SHOT else 1
    cta, ctas, numel = tl.program_id(0), tl.num_programs(0), units * UNIT
    epoch = tl.load(epochs_ptr + cta)
    half = (epoch >> (BARRIERS - 1)) & 1
    flags = ()
    partials = ()
    for peer in tl.static_range(RANKS):
        address = tl.load(addresses_ptr + peer)
        flags = flags + (address.to(tl.pointer_type(tl.int32)) + cta * RANKS,)  # noqa: RUF005
        partial_ptr = (address + FLAG_BYTES + half * LARGEST).to(tl.pointer_type(dtype))
        partials = partials + (tl.multiple_of(partial_ptr, 16),)  # noqa: RUF005
    address = tl.load(addresses_ptr + rank)
    own_flags_ptr = address.to(tl.pointer_type(tl.int32)) + cta * RANKS
    own_ptr = tl.multiple_of((address + FLAG_BYTES + half * LARGEST).to(tl.pointer_type(dtype)), 16)

    turns = tl.cdiv(tl.cdiv(numel, BLOCK), OWNERS)
    for turn in range(cta, turns, ctas):
        for owner in tl.static_range(OWNERS):
            offs, mask = _block(turn * OWNERS + owner, numel, BLOCK)
            tl.store(own_ptr + offs, tl.load(x_ptr + offs, mask=mask), mask=mask)
    _signal_and_wait(flags, own_flags_ptr, rank, epoch + 1, RANKS, TIMEOUT)
    if TWO_SHOT:
        for turn in range(cta, turns, ctas):
            offs, mask = _block(turn * OWNERS + rank, numel, BLOCK)
            tl.store(own_ptr + offs, _add(partials, offs, mask, RANKS, ACCUMULATE).to(dtype), mask=mask)
        _signal_and_wait(flags, own_flags_ptr, rank, epoch + 2, RANKS, TIMEOUT)
        for turn in range(cta, turns, ctas):
            for owner in tl.static_range(OWNERS):
                offs, mask = _block(turn * OWNERS + owner, numel, BLOCK)
                tl.store(out_ptr + offs, tl.load(partials[owner] + offs, mask=mask, cache_modifier=".cg"), mask=mask)
    else:
        for turn in range(cta, turns, ctas):
            offs, mask = _block(turn, numel, BLOCK)
            tl.store(out_ptr + offs, _add(partials, offs, mask, RANKS, ACCUMULATE).to(dtype), mask=mask)
    tl.store(epochs_ptr + cta, epoch + BARRIERS)
