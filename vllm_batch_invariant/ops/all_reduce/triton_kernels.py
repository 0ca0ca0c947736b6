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

    x = out + residual
    y = x * rsqrt(mean(x**2) + eps) * weight

A second kernel goes on with a one-shot sum: each CTA has whole rows, in the tiles that a norm alone has. What a rank's
experts have made of a token it adds first, as :mod:`..moe` does. A third one does so with rows that copy engines have
brought, as :mod:`.copies` says.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from ..common.dependent_launch import wait_for_kernel_before
from ..moe.triton_kernels import weighted_sum
from ..norm.triton_kernels import load_weight, norm_of


@triton.jit
def _wait(own_flags_ptr, rank, epoch, RANKS: tl.constexpr, TIMEOUT: tl.constexpr):
    """Until every other rank has signalled ``epoch`` or a later one. Epochs begin anew after 2^32, so their difference
    counts.

    Args:
        own_flags_ptr: [RANKS] int32: the epoch that each rank has reached.
    """
    peers = tl.arange(0, RANKS)
    if TIMEOUT > 0:
        start = globaltimer()
    while _least_ahead(own_flags_ptr + peers, peers != rank, epoch) < 0:
        if TIMEOUT > 0:
            tl.device_assert(globaltimer() - start <= TIMEOUT, "a tensor-parallel rank has ended, or does not come")


@triton.jit
def _least_ahead(flag_ptrs, is_other, epoch):
    """By how much the last of the other ranks is past an epoch."""
    reached = tl.atomic_add(flag_ptrs, 0, mask=is_other, sem="acquire", scope="sys")
    return tl.min(tl.where(is_other, reached - epoch, 0), 0)


@triton.jit
def _signal_and_wait(flag_ptrs, own_flags_ptr, rank, epoch, RANKS: tl.constexpr, TIMEOUT: tl.constexpr):
    """A barrier of this CTA and those of the same number on all ranks; what each wrote before, all read after it. A
    thread for each rank signals: one that signalled to all would wait for each of them to have it.

    Args:
        flag_ptrs: [RANKS], this rank's flag of this CTA on every rank.
        own_flags_ptr: [RANKS], what those have signalled.
    """
    tl.debug_barrier()
    is_other = tl.arange(0, RANKS) != rank
    tl.atomic_xchg(flag_ptrs, tl.full((RANKS,), epoch, tl.int32), mask=is_other, sem="release", scope="sys")
    _wait(own_flags_ptr, rank, epoch, RANKS, TIMEOUT)
    tl.debug_barrier()


@triton.jit
def _block(block, numel, BLOCK: tl.constexpr):
    """Offsets of a block's elements, and which of them there are."""
    offs = block * BLOCK + tl.arange(0, BLOCK)
    return offs, offs < numel


@triton.jit
def _add(partials, offs, mask, RANKS: tl.constexpr, ACCUMULATE: tl.constexpr, TREE: tl.constexpr):
    """Elements of a shape, in the dtype of the partials: rank 0 first, or as a tree."""
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
    """Elements of a shape, in the dtype of the partials: those of RANKS ranks from FIRST on, every sum rounded."""
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


@triton.jit
def _places(addresses_ptr, rank, start, DTYPE: tl.constexpr, RANKS: tl.constexpr, SOURCE: tl.constexpr):
    """Where this CTA reads and writes.

    Args:
        start: bytes from a rank's address to the region of this CTA that rank 0 writes.
        SOURCE: elements between the regions that two ranks write.

    Returns:
        [RANKS], of every rank this rank's flag of this CTA; those of this rank; of every rank what this rank writes;
        what every rank has written here.
    """
    own_address = tl.load(addresses_ptr + rank)
    own_flags_ptr = own_address.to(tl.pointer_type(tl.int32)) + tl.program_id(0) * RANKS
    own_ptr = tl.multiple_of((own_address + start).to(tl.pointer_type(DTYPE)), 16)
    addresses = tl.load(addresses_ptr + tl.arange(0, RANKS))
    flag_ptrs = addresses.to(tl.pointer_type(tl.int32)) + tl.program_id(0) * RANKS + rank
    written = ()
    inboxes = ()
    for peer in tl.static_range(RANKS):
        address = tl.load(addresses_ptr + peer)
        peer_ptr = tl.multiple_of((address + start).to(tl.pointer_type(DTYPE)), 16)
        written = written + (peer_ptr + rank * SOURCE,)  # noqa: RUF005
        inboxes = inboxes + (own_ptr + peer * SOURCE,)  # noqa: RUF005
    return flag_ptrs, own_flags_ptr, written, inboxes


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
    start = FLAG_BYTES + ((epoch >> (BARRIERS - 1)) & 1) * HALF_BYTES + cta * REGION_BYTES
    flag_ptrs, own_flags_ptr, written, inboxes = _places(addresses_ptr, rank, start, dtype, RANKS, SOURCE)
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
    _signal_and_wait(flag_ptrs, own_flags_ptr, rank, epoch + 1, RANKS, TIMEOUT)
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
        _signal_and_wait(flag_ptrs, own_flags_ptr, rank, epoch + 2, RANKS, TIMEOUT)
        for turn in range(cta, turns, ctas):
            place, _ = _block(turn // ctas, numel, BLOCK)
            for owner in tl.static_range(OWNERS):
                offs, mask = _block(turn * OWNERS + owner, numel, BLOCK)
                total = tl.load(inboxes[owner] + RANKS * SOURCE + place, mask=mask, cache_modifier=".cg")
                tl.store(out_ptr + offs, total, mask=mask)
    tl.store(epochs_ptr + cta, epoch + BARRIERS)


@triton.jit
def _rows(turn, num_rows, row_units, NORM: tl.constexpr):
    """Offsets of the elements of a tile of packed rows, [rows_per_program, block], and which of them there are.

    Args:
        row_units: a row's length in units. As of a stride of a norm alone, the compiler knows nothing else of it: so
            elements lie in the same threads.
    """
    row, offs = turn * NORM.rows_per_program + tl.arange(0, NORM.rows_per_program), tl.arange(0, NORM.block)
    place = row[:, None] * row_units * NORM.stride_unit + offs[None, :]
    return place, (row < num_rows)[:, None] & (offs < NORM.length)[None, :]


# 14 arguments: a kernel takes no structure of pointers.
@triton.jit(do_not_specialize=["rank", "num_rows", "row_units"])
def all_reduce_norm_kernel(
    x_ptr,
    weights_ptr,
    ids_ptr,
    places_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    addresses_ptr,
    epochs_ptr,
    rank,
    num_rows,
    row_units,
    eps,
    TOP_K: tl.constexpr,
    IS_PART: tl.constexpr,
    NORM: tl.constexpr,
    RANKS: tl.constexpr,
    FLAG_BYTES: tl.constexpr,
    HALF_BYTES: tl.constexpr,
    REGION_BYTES: tl.constexpr,
    REGIONS: tl.constexpr,
    TREE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    TIMEOUT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Adds one message in one shot, rounds the sum, adds the residual, and normalises rows.

    Args:
        x_ptr, residual_ptr, out_ptr, residual_out_ptr: [num_rows, N], the rank's partial result, what is added to
            the rounded sum, the normalised rows, and the sum with the residual, rounded. With TOP_K ``x_ptr`` is
            [num_rows, TOP_K, N], of experts, with ``weights_ptr``, ``ids_ptr`` and ``places_ptr``.
        weight_ptr: [N]
        addresses_ptr, epochs_ptr, rank, TIMEOUT: as of :func:`all_reduce_kernel`, whose memory it is.
        row_units: N / stride_unit.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    SOURCE: tl.constexpr = REGIONS * REGION_BYTES * 8 // dtype.primitive_bitwidth
    wait_for_kernel_before(OVERLAPS)  # while other ranks are waited for, the next kernel loads its weights
    cta, ctas, turns = tl.program_id(0), tl.num_programs(0), tl.cdiv(num_rows, NORM.rows_per_program)
    epoch = tl.load(epochs_ptr + cta)
    start = FLAG_BYTES + (epoch & 1) * HALF_BYTES + cta * REGION_BYTES
    flag_ptrs, own_flags_ptr, written, inboxes = _places(addresses_ptr, rank, start, dtype, RANKS, SOURCE)

    for turn in range(cta, turns, ctas):
        place, _ = _rows(turn // ctas, num_rows, row_units, NORM)
        offs, mask = _rows(turn, num_rows, row_units, NORM)
        if TOP_K > 0:
            row = turn * NORM.rows_per_program + tl.arange(0, NORM.rows_per_program)[:, None]
            token, columns = tl.minimum(row, num_rows - 1).to(tl.int64), tl.arange(0, NORM.block)[None, :]
            length, of_row = row_units * NORM.stride_unit, tl.broadcast_to(columns, mask.shape)
            total = weighted_sum(
                x_ptr, weights_ptr, ids_ptr, places_ptr, token, length, of_row, mask, TOP_K, IS_PART
            )  # fmt: skip
            x = total.to(dtype)
        else:
            x = tl.load(x_ptr + offs, mask=mask)
        for peer in tl.static_range(RANKS):
            tl.store(written[peer] + place, x, mask=mask)
    # What no other rank decides is on its way before they are waited for.
    offs, mask = _rows(cta, num_rows, row_units, NORM)
    residual = tl.load(residual_ptr + offs, mask=mask, other=0.0)
    columns = tl.arange(0, NORM.block)
    weight = load_weight(weight_ptr, columns, tl.broadcast_to((columns < NORM.length)[None, :], mask.shape))
    _signal_and_wait(flag_ptrs, own_flags_ptr, rank, epoch + 1, RANKS, TIMEOUT)
    for turn in range(cta, turns, ctas):
        place, _ = _rows(turn // ctas, num_rows, row_units, NORM)
        offs, mask = _rows(turn, num_rows, row_units, NORM)
        x = _add(inboxes, place, mask, RANKS, ACCUMULATE, TREE).to(tl.float32) + residual.to(tl.float32)
        next_offs, next_mask = _rows(turn + ctas, num_rows, row_units, NORM)
        residual = tl.load(residual_ptr + next_offs, mask=next_mask, other=0.0)
        norm_of(x, weight, columns, out_ptr, residual_out_ptr, offs, 0, mask, eps, NORM.length, True, True, NORM)
    tl.store(epochs_ptr + cta, epoch + 1)


# 14 arguments, as above.
@triton.jit(do_not_specialize=["rank", "part", "epoch", "start", "inbox_bytes", "num_rows", "row_units"])
def add_copies_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    addresses_ptr,
    rank,
    part,
    epoch,
    start,
    inbox_bytes,
    num_rows,
    row_units,
    eps,
    NORM: tl.constexpr,
    RANKS: tl.constexpr,
    TREE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    TIMEOUT: tl.constexpr,
):
    """Adds a part of a message as soon as the other ranks' copies are here, rounds the sum, adds the residual, and
    normalises rows.

    Args:
        x_ptr, residual_ptr, weight_ptr, out_ptr, residual_out_ptr: as of :func:`all_reduce_norm_kernel`, of that part.
        addresses_ptr: [RANKS] int64: of each rank the address of flags, [parts, RANKS] int32: the last message of which
            a rank has sent that part.
        rank: this one.
        part, epoch: of the message, and its number.
        start: bytes from this rank's address to that part of what the first of the other ranks has sent.
        inbox_bytes: from there to what the next one has.
        TIMEOUT: as of :func:`all_reduce_kernel`.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    offs, mask = _rows(tl.program_id(0), num_rows, row_units, NORM)
    residual = tl.load(residual_ptr + offs, mask=mask, other=0.0)
    columns = tl.arange(0, NORM.block)
    weight = load_weight(weight_ptr, columns, tl.broadcast_to((columns < NORM.length)[None, :], mask.shape))
    own_address, own_partial = tl.load(addresses_ptr + rank), x_ptr.to(tl.int64)
    own_flags_ptr = own_address.to(tl.pointer_type(tl.int32)) + part * RANKS
    partials = ()
    for peer in tl.static_range(RANKS):
        inbox = own_address + start + tl.where(peer > rank, peer - 1, peer) * inbox_bytes.to(tl.int64)
        address = tl.where(peer == rank, own_partial, inbox)
        partials = partials + (tl.multiple_of(address.to(tl.pointer_type(dtype)), 16),)  # noqa: RUF005
    _wait(own_flags_ptr, rank, epoch, RANKS, TIMEOUT)
    tl.debug_barrier()
    x = _add(partials, offs, mask, RANKS, ACCUMULATE, TREE).to(tl.float32) + residual.to(tl.float32)
    norm_of(x, weight, columns, out_ptr, residual_out_ptr, offs, 0, mask, eps, NORM.length, True, True, NORM)
