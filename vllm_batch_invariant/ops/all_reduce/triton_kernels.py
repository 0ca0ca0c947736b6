"""The sum over ranks on GPUs that write into each other's memory, in Triton.

    out = round(((p[0] + p[1]) + p[2]) + ...)                p[r]: the partial result of rank r
    out = round(round(p[0] + p[1]) + round(p[2] + p[3]))     as a tree

One-shot: each rank writes its partial result to all others, and adds everything. Two-shot: it writes each block to the
rank that owns it, which adds the block and writes the sum to all. An element is added in the same order either way,
whoever adds it. Writes need no answer from the other GPU, which reads would wait for.

CTA i of a rank waits for CTA i of every other, and reads nothing but what those have written: each has a region of the
memory of its own, so that short messages may have fewer CTAs. A message lies in one of two halves of the memory, in
turn: when a rank writes into a half again, every rank has begun the message between, and so is done with the one
before.
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
        if TIMEOUT > 0:
            tl.device_assert(globaltimer() - start <= TIMEOUT, "a tensor-parallel rank has ended, or does not come")


@triton.jit
def _signal_and_wait(flags, own_flags_ptr, rank, epoch, RANKS: tl.constexpr, TIMEOUT: tl.constexpr):
    """A barrier of this CTA and those of the same number on all ranks; what each wrote before, all read after it.

    Args:
        flags: of every rank, RANKS int32 of this CTA: the epoch that each rank has reached.
        own_flags_ptr: those of this rank.
    """
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        if peer != rank:
            tl.atomic_xchg(flags[peer] + rank, epoch, sem="release", scope="sys")
    for peer in tl.static_range(RANKS):
        if peer != rank:
            _wait(own_flags_ptr + peer, epoch, TIMEOUT)
    tl.debug_barrier()


@triton.jit
def _block(block, numel, BLOCK: tl.constexpr):
    """Offsets of a block's elements, and which of them there are."""
    offs = block * BLOCK + tl.arange(0, BLOCK)
    return offs, offs < numel


@triton.jit
def _add(partials, offs, mask, RANKS: tl.constexpr, ACCUMULATE: tl.constexpr, TREE: tl.constexpr):
    """[BLOCK] in the dtype of the partials: rank 0 first, or as a tree."""
    if TREE:
        total = _add_subtree(partials, offs, mask, 0, RANKS, ACCUMULATE)
    else:
        acc = tl.load(partials[0] + offs, mask=mask, other=0.0, cache_modifier=".cg").to(ACCUMULATE)
        for peer in tl.static_range(1, RANKS):
            acc += tl.load(partials[peer] + offs, mask=mask, other=0.0, cache_modifier=".cg").to(ACCUMULATE)
        total = acc.to(partials[0].dtype.element_ty)
    return total


@triton.jit
def _add_subtree(partials, offs, mask, FIRST: tl.constexpr, RANKS: tl.constexpr, ACCUMULATE: tl.constexpr):
    """[BLOCK] in the dtype of the partials: those of RANKS ranks from FIRST on, every sum rounded."""
    if RANKS == 1:
        total = tl.load(partials[FIRST] + offs, mask=mask, other=0.0, cache_modifier=".cg")
    else:
        left = _add_subtree(partials, offs, mask, FIRST, RANKS // 2, ACCUMULATE)
        right = _add_subtree(partials, offs, mask, FIRST + RANKS // 2, RANKS // 2, ACCUMULATE)
        total = (left.to(ACCUMULATE) + right.to(ACCUMULATE)).to(partials[0].dtype.element_ty)
    return total


@triton.jit(do_not_specialize=["units"])
def add_ranks_kernel(
    partials_ptr,
    out_ptr,
    units,
    UNIT: tl.constexpr,
    RANKS: tl.constexpr,
    TREE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Adds partial results that lie on one GPU.

    Args:
        partials_ptr: [RANKS, units * UNIT]
        out_ptr: [units * UNIT]
        UNIT: elements that are loaded at once.
    """
    numel = units.to(tl.int64) * UNIT
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < numel
    partials = ()
    for rank in tl.static_range(RANKS):
        partials = partials + (partials_ptr + rank * numel,)  # noqa: RUF005
    tl.store(out_ptr + offs, _add(partials, offs, mask, RANKS, ACCUMULATE, TREE), mask=mask)


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
    FLAG_BYTES: tl.constexpr,
    HALF_BYTES: tl.constexpr,
    REGION_BYTES: tl.constexpr,
    REGIONS: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    TREE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    TIMEOUT: tl.constexpr,
):
    """Adds one message.

    Args:
        x_ptr, out_ptr: [units * UNIT], the rank's partial result, and the sum.
        addresses_ptr: [RANKS] int64: of each rank the address of FLAG_BYTES of flags and, behind them, of two halves of
            HALF_BYTES: [RANKS, REGIONS] regions of REGION_BYTES, of what each rank has written there for each CTA, and
            two-shot as many of sums.
        epochs_ptr: [REGIONS] int32, barriers that each CTA has passed. All ranks have the same CTAs, and call alike.
        rank: this one.
        UNIT: elements that are loaded at once.
        TIMEOUT: nanoseconds after which a rank that waits ends with an error; 0: it waits for ever.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    BARRIERS: tl.constexpr = 2 if TWO_SHOT else 1
    OWNERS: tl.constexpr = RANKS if TWO_SHOT else 1
    SOURCE: tl.constexpr = REGIONS * REGION_BYTES * 8 // dtype.primitive_bitwidth
    cta, ctas, numel = tl.program_id(0), tl.num_programs(0), units * UNIT
    epoch = tl.load(epochs_ptr + cta)
    half = (epoch >> (BARRIERS - 1)) & 1
    start = FLAG_BYTES + half * HALF_BYTES + cta * REGION_BYTES
    own_address = tl.load(addresses_ptr + rank)
    own_flags_ptr = own_address.to(tl.pointer_type(tl.int32)) + cta * RANKS
    own_ptr = tl.multiple_of((own_address + start).to(tl.pointer_type(dtype)), 16)
    flags = ()
    written = ()
    inboxes = ()
    for peer in tl.static_range(RANKS):
        address = tl.load(addresses_ptr + peer)
        flags = flags + (address.to(tl.pointer_type(tl.int32)) + cta * RANKS,)  # noqa: RUF005
        peer_ptr = tl.multiple_of((address + start).to(tl.pointer_type(dtype)), 16)
        written = written + (peer_ptr + rank * SOURCE,)  # noqa: RUF005
        inboxes = inboxes + (own_ptr + peer * SOURCE,)  # noqa: RUF005

    turns = tl.cdiv(tl.cdiv(numel, BLOCK), OWNERS)
    for turn in range(cta, turns, ctas):
        place, _ = _block(turn // ctas, numel, BLOCK)
        for owner in tl.static_range(OWNERS):
            offs, mask = _block(turn * OWNERS + owner, numel, BLOCK)
            x = tl.load(x_ptr + offs, mask=mask)
            if TWO_SHOT:
                tl.store(written[owner] + place, x, mask=mask)
            else:
                for peer in tl.static_range(RANKS):
                    tl.store(written[peer] + place, x, mask=mask)
    _signal_and_wait(flags, own_flags_ptr, rank, epoch + 1, RANKS, TIMEOUT)
    for turn in range(cta, turns, ctas):
        place, _ = _block(turn // ctas, numel, BLOCK)
        offs, mask = _block(turn * OWNERS + (rank if TWO_SHOT else 0), numel, BLOCK)
        total = _add(inboxes, place, mask, RANKS, ACCUMULATE, TREE)
        if TWO_SHOT:
            for peer in tl.static_range(RANKS):
                tl.store(written[peer] + RANKS * SOURCE + place, total, mask=mask)
        else:
            tl.store(out_ptr + offs, total, mask=mask)
    if TWO_SHOT:
        _signal_and_wait(flags, own_flags_ptr, rank, epoch + 2, RANKS, TIMEOUT)
        for turn in range(cta, turns, ctas):
            place, _ = _block(turn // ctas, numel, BLOCK)
            for owner in tl.static_range(OWNERS):
                offs, mask = _block(turn * OWNERS + owner, numel, BLOCK)
                total = tl.load(inboxes[owner] + RANKS * SOURCE + place, mask=mask, cache_modifier=".cg")
                tl.store(out_ptr + offs, total, mask=mask)
    tl.store(epochs_ptr + cta, epoch + BARRIERS)
