"""Weights of four bits on their way to Hopper's wgmma, in Gluon: decoded in the registers that it reads.

A warpgroup's block of codes is int32 [ROWS, BLOCK_K / 8] in shared memory, as a weight's rows are stored, the low
nibble first along K. wgmma's first operand is given in registers, where in 16 elements of K a thread has those at 2t,
2t + 1, 2t + 8 and 2t + 9, t its place of four, of two rows: a byte of each of two words. The four threads read the same
words, and what they decode lies where wgmma wants it: nothing is exchanged::

    pair = byte t of a word                                # two codes q
    pair = 128 + q                                         # bf16: its bits are 0x4300 | q; of fp16 1024 + q, 0x6400 | q
    pair = round((pair - (128 + zero)) * scale)            # the difference is exact

so a code, zero point and scale make the same 16 bits as where the matrix is decoded to memory.

Experts (:mod:`..moe.sm90_packed`) have K in another order in each 16 elements, x too. A code of e2m1 is moved to sign,
exponent and mantissa of bf16, and its products with powers of two are exact::

    pair = sign << 12 | bits << 6, of each code            # bf16, 2^126 times too small
    pair = pair * 2^126 * 2^(scale - 127)

Of NVFP4 by steps it becomes a power of two, which is multiplied with one of two numbers of its group.
"""

import triton
import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from ..common.dependent_launch import ASK_IN_PTX, LINE
from ..common.triton_names import aggregate, value

CODES = gl.constexpr(8)
"""Of an element of int32."""
CHUNK_K = gl.constexpr(64)
"""Elements of K that are decoded at once."""
LONG_SIDE = gl.constexpr(64)
"""Rows of wgmma's first operand, which are columns of b."""
_WORDS = gl.constexpr(CHUNK_K.value // CODES.value)
_SYMMETRIC = gl.constexpr(8)
"""The zero point of codes that have none stored."""


@aggregate
class Scales:
    """What is stored beside the codes of a weight [N, K]."""

    scales_ptr: value
    """[N, K / GROUP] of the dtype of a; of MXFP4 int16 [N, K / 64], the codes of two scales each; of NVFP4 int32, two
    steps each"""
    zeros_ptr: value
    """8 bits each, of the same shape; or None"""
    stride: value
    """Between rows of both."""
    GROUP: gl.constexpr
    """Elements of K with one scale, a power of two from 16 on, also above K; 0 where a weight is stored itself."""


@triton.constexpr_function
def codes_layout(BLOCK_K):
    """Of a block of codes in shared memory: rows of BLOCK_K / 2 bytes."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, BLOCK_K // 2), element_bitwidth=32, rank=2)


@triton.constexpr_function
def _warp_bases(rows):
    """Four warps have 16 rows of 64 each, or 8 of 32, whose second row is zero."""
    first = 16 if rows >= LONG_SIDE.value else 8
    return [[first << bit, 0, 0] for bit in range((rows // first).bit_length() - 1)]


@triton.constexpr_function
def _second_row(rows):
    """Of a thread, eight below its first."""
    return [[8, 0, 0]] if rows >= LONG_SIDE.value else []


@triton.constexpr_function
def _nibbles_layout(ROWS, WORDS=_WORDS.value):
    """Of [ROWS, WORDS, CODES]: as [ROWS, K] it is that of wgmma's first operand in registers."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], *_second_row(ROWS), *([0, 1 << bit, 0] for bit in range(WORDS.bit_length() - 1))],
        lane_bases=[[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=_warp_bases(ROWS),
        block_bases=[],
        shape=[ROWS, WORDS, CODES.value],
    )


@triton.constexpr_function
def _groups_layout(ROWS, GROUPS):
    """The same of [ROWS, GROUPS, words of a group], the same for every code of a word."""
    words = _WORDS.value // GROUPS

    def word(bit):
        return [0, 0, bit] if bit < words else [0, bit // words, 0]

    return gl.DistributedLinearLayout(
        reg_bases=[*_second_row(ROWS), word(1), word(2), word(4)],
        lane_bases=[[0, 0, 0], [0, 0, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=_warp_bases(ROWS),
        block_bases=[],
        shape=[ROWS, GROUPS, words],
    )


@triton.constexpr_function
def rows_layout(ROWS, GROUP):
    """Of the rows of codes whose scales a thread loads."""
    return gl.SliceLayout(1, gl.SliceLayout(2, _groups_layout(ROWS, _groups_of_chunk(GROUP))))


@triton.constexpr_function
def _groups_of_chunk(GROUP):
    return max(1, CHUNK_K.value // GROUP)


@triton.constexpr_function
def _decode_in_ptx(DTYPE):
    """Of a word twice, the byte to take of it twice, two zero points and two scales."""
    bits, kind = ("0x43004300", "bf16x2") if DTYPE.is_bf16() else ("0x64006400", "f16x2")
    return f"""{{
    .reg .b32 pair;
    prmt.b32 pair, $1, 0, $3;
    mul.lo.u32 pair, pair, 0x1001;
    lop3.b32 pair, pair, 0x000f000f, {bits}, 0xea;
    sub.rn.{kind} pair, pair, $5;
    mul.rn.{kind} $0, pair, $6;
    }}"""


@gluon.jit
def rows_of(scales, first_n, N, GATED: gl.constexpr, IN_TURN: gl.constexpr, ROWS: gl.constexpr):
    """Where the scales of a warpgroup's rows of codes begin [ROWS], and which of them there are. Gated, the rows of
    [gate, up] come in turn.
    """
    row = gl.arange(0, ROWS, rows_layout(ROWS, scales.GROUP))
    if GATED:
        of_half = first_n // 2 + row // (2 * IN_TURN) * IN_TURN + row % IN_TURN
        offs_n = of_half + row // IN_TURN % 2 * (N // 2)
        mask_n = of_half < N // 2
    else:
        offs_n = first_n + row
        mask_n = offs_n < N
    return offs_n.to(gl.int64) * scales.stride, mask_n


@triton.constexpr_function
def _of_16_in_ptx(DTYPE, KIND):
    """Of two words, the bytes to take of them, a zero point and a scale twice each, four times each: the low nibbles
    of both bytes, and the high ones. Of "e2m1" the scale is 2^126 times as large, of "wide e2m1" it is not. Of "steps"
    there are in the place of a zero point the step in the low half, and in the high one what :func:`_with_more` says:
    a power of two times the step, and where the number is 1.5 times that power, the half of it that is more times that.
    """
    numbers = """prmt.b32 both, $2, $3, $6;
        and.b32 low, both, 0x000f000f;
        and.b32 high, both, 0x00f000f0;
        mul.lo.u32 low, low, 0x1040;
        mul.lo.u32 high, high, 0x104;
        and.b32 low, low, 0x81c081c0;
        and.b32 high, high, 0x81c081c0;"""  # codes of e2m1 where bf16 has its sign, exponent and mantissa
    if KIND == "steps":
        multiplied = "\n".join(
            f"""mul.rn.bf16x2 {half}, {half}, factor;
        and.b32 power, {half}, 0xff80ff80;
        sub.rn.bf16x2 {half}, {half}, power;
        mul.rn.bf16x2 power, power, step;
        fma.rn.bf16x2 {result}, {half}, more, power;"""
            for half, result in (("low", "$0"), ("high", "$1"))
        )
        return f"""{{
        .reg .b32 both, low, high, step, more, power, factor;
        {numbers}
        prmt.b32 step, $10, $10, 0x1010;
        prmt.b32 more, $10, $10, 0x3232;
        mov.b32 factor, 0x7e807e80;
        {multiplied}
        }}"""
    if KIND.endswith("e2m1"):
        factor = """mov.b32 both, 0x7e807e80;
        mul.rn.bf16x2 low, low, both;
        mul.rn.bf16x2 high, high, both;"""
        return f"""{{
        .reg .b32 both, low, high;
        {numbers}
        {factor if KIND.startswith("wide") else ""}
        mul.rn.bf16x2 $0, low, $10;
        mul.rn.bf16x2 $1, high, $10;
        }}"""
    bits, kind = ("0x43004300", "bf16x2") if DTYPE.is_bf16() else ("0x64006400", "f16x2")
    return f"""{{
    .reg .b32 both, low, high;
    prmt.b32 both, $2, $3, $6;
    shr.u32 high, both, 4;
    lop3.b32 low, both, 0x000f000f, {bits}, 0xea;
    lop3.b32 high, high, 0x000f000f, {bits}, 0xea;
    sub.rn.{kind} low, low, $10;
    sub.rn.{kind} high, high, $10;
    mul.rn.{kind} $0, low, $14;
    mul.rn.{kind} $1, high, $14;
    }}"""


@triton.constexpr_function
def spread_layout(ROWS, CHUNKS):
    """Of the pairs of scales of two or four chunks [ROWS, CHUNKS]: four threads have the same rows of codes, and each
    loads others of them.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[] if CHUNKS == 2 else [[8, 0]],
        lane_bases=[*([[0, 1], [8, 0]] if CHUNKS == 2 else [[0, 1], [0, 2]]), [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << bit, 0] for bit in range((ROWS // 16).bit_length() - 1)],
        block_bases=[],
        shape=[ROWS, CHUNKS],
    )


@triton.constexpr_function
def _gathered_layout(ROWS, CHUNKS):
    """The same, where each of the four has them all."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0], *([0, 1 << bit] for bit in range(CHUNKS.bit_length() - 1))],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << bit, 0] for bit in range((ROWS // 16).bit_length() - 1)],
        block_bases=[],
        shape=[ROWS, CHUNKS],
    )


@gluon.jit
def load_pairs(scales, offs, mask_n, k, K, CHUNKS: gl.constexpr):
    """Of MXFP4 the codes of both scales of each chunk from k on, int16 [ROWS, CHUNKS]."""
    ROWS: gl.constexpr = offs.shape[0]
    chunk = k // CHUNK_K + gl.arange(0, CHUNKS, gl.SliceLayout(0, spread_layout(ROWS, CHUNKS)))
    mask = mask_n[:, None] & (chunk * CHUNK_K < K)[None, :]
    return gl.load(scales.scales_ptr + offs[:, None] + chunk[None, :], mask=mask, other=0)


@gluon.jit
def gathered(pairs):
    """Those pairs where they are needed: a tensor [ROWS] of each chunk."""
    ROWS: gl.constexpr = pairs.shape[0]
    CHUNKS: gl.constexpr = pairs.shape[1]
    of_rows: gl.constexpr = rows_layout(ROWS, 32)
    pairs = gl.convert_layout(pairs, _gathered_layout(ROWS, CHUNKS))
    if CHUNKS == 2:
        first, second = pairs.split()
        found = (gl.convert_layout(first, of_rows), gl.convert_layout(second, of_rows))
    else:
        even, odd = pairs.reshape([ROWS, 2, 2]).split()
        first, third = even.split()
        second, fourth = odd.split()
        found = (
            gl.convert_layout(first, of_rows), gl.convert_layout(second, of_rows),
            gl.convert_layout(third, of_rows), gl.convert_layout(fourth, of_rows),
        )  # fmt: skip
    return found


@gluon.jit
def _powers_of(pairs, ROWS: gl.constexpr, IS_WIDE: gl.constexpr):
    """2^(code - 1) of codes below 128, or 2^(code - 127) of all, as bf16 in both halves of int32 [ROWS, 2]."""
    in_chunk = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, _groups_layout(ROWS, 2))))
    codes = (pairs.to(gl.int32)[:, None] >> (8 * in_chunk)[None, :]) & 255
    return gl.maximum(codes * 0x00800080, 0x00400040) if IS_WIDE else codes * 0x00800080 + 0x3F003F00


@gluon.jit
def _load_scale(scales, offs, mask_n, k, K, ROWS: gl.constexpr, DTYPE: gl.constexpr):
    """Scales of the chunk at k and what is subtracted from codes, [ROWS, groups of a chunk] each."""
    GROUPS: gl.constexpr = _groups_of_chunk(scales.GROUP)
    in_chunk = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, _groups_layout(ROWS, GROUPS))))
    group = k // scales.GROUP + in_chunk
    offs, mask = offs[:, None] + group[None, :], mask_n[:, None] & (group * scales.GROUP < K)[None, :]
    scale = gl.load(scales.scales_ptr + offs, mask=mask, other=0.0)
    BASE: gl.constexpr = 0x4300 if DTYPE.is_bf16() else 0x6400
    if scales.zeros_ptr is None:
        zero = gl.full(scale.shape, _SYMMETRIC | BASE, gl.int16, scale.type.layout)
    else:
        zero = gl.load(scales.zeros_ptr + offs, mask=mask, other=0).to(gl.int16) | BASE
    return scale, zero.to(DTYPE, bitcast=True)


@gluon.jit
def load_scales(scales, offs, mask_n, k, K, CHUNKS: gl.constexpr, ROWS: gl.constexpr, DTYPE: gl.constexpr):
    """Those of CHUNKS chunks from k on, a pair of tensors of each."""
    found = ()
    for chunk in gl.static_range(CHUNKS):
        if chunk * CHUNK_K % scales.GROUP == 0:
            of_chunk = _load_scale(scales, offs, mask_n, k + chunk * CHUNK_K, K, ROWS, DTYPE)
        found = found + (of_chunk,)  # noqa: RUF005 - Triton has no starred ones
    return found


@triton.constexpr_function
def steps_layout(ROWS, CHUNKS):
    """Of the steps of two or four chunks [ROWS, 4 * CHUNKS]: four threads have the same rows of codes, and each loads
    one group in four.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0], *([0, 4 << bit] for bit in range(CHUNKS.bit_length() - 1))],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << bit, 0] for bit in range((ROWS // 16).bit_length() - 1)],
        block_bases=[],
        shape=[ROWS, 4 * CHUNKS],
    )


@gluon.jit
def load_steps(scales, offs, mask_n, k, K, CHUNKS: gl.constexpr):
    """Of NVFP4 both steps of each group of CHUNKS chunks from k on, int32 [ROWS, 4 * CHUNKS]."""
    ROWS: gl.constexpr = offs.shape[0]
    group = k // 16 + gl.arange(0, 4 * CHUNKS, gl.SliceLayout(0, steps_layout(ROWS, CHUNKS)))
    mask = mask_n[:, None] & (group * 16 < K)[None, :]
    return gl.load(scales.scales_ptr + offs[:, None] + group[None, :], mask=mask, other=0)


_WITH_MORE_IN_PTX = gl.constexpr("""{
    .reg .b32 of_y, of_x, factor;
    mov.b32 factor, 0x40003f80;
    mul.rn.bf16x2 of_y, $1, factor;
    mov.b32 factor, 0xc000c000;
    shl.b32 of_x, $1, 16;
    fma.rn.bf16x2 $0, of_x, factor, of_y;
    }""")
"""Of steps x, in the low half, and y: x, and -2 x + 2 y."""


@gluon.jit
def _with_more(steps):
    """Pairs of a step x and that of 1.5 times as much y, both bf16 in an int32: x and 2 * (y - x), which is exact, as
    each is less than twice the other.
    """
    return gl.inline_asm_elementwise(
        _WITH_MORE_IN_PTX,
        "=r,r",
        [steps],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def steps_of_chunks(steps):
    """A tensor [ROWS, 4] of each chunk, still spread, of what :func:`_with_more` makes."""
    ROWS: gl.constexpr = steps.shape[0]
    steps = _with_more(steps)
    if steps.shape[1] == 8:
        found = steps.reshape([ROWS, 2, 4]).permute([0, 2, 1]).split()
    else:
        first, last = steps.reshape([ROWS, 2, 2, 4]).permute([0, 3, 2, 1]).split()
        found = first.split() + last.split()
    return found


@gluon.jit
def gathered_steps(of_chunk):
    """Those of a chunk where they are needed."""
    return gl.convert_layout(of_chunk, gl.SliceLayout(2, _groups_layout(of_chunk.shape[0], 4)))


@gluon.jit
def load_words(codes, chunk: gl.constexpr, ROWS: gl.constexpr):
    """A chunk of codes in shared memory [ROWS, BLOCK_K / CODES], as the threads that decode it want it."""
    layout: gl.constexpr = gl.SliceLayout(2, _nibbles_layout(ROWS))
    return codes.slice(chunk * _WORDS, _WORDS, dim=1).load(layout)


@gluon.jit
def load_words_at(codes_ptr, offs, mask_n, k, ROWS: gl.constexpr):
    """The same of the chunk at k, from memory: rows begin at ``offs`` and are there by ``mask_n``, both [ROWS]."""
    layout: gl.constexpr = gl.SliceLayout(2, _nibbles_layout(ROWS))
    of_row: gl.constexpr = gl.SliceLayout(1, layout)
    word = gl.arange(0, _WORDS, gl.SliceLayout(0, layout))
    offs, mask = gl.convert_layout(offs, of_row), gl.convert_layout(mask_n, of_row)
    return gl.load(codes_ptr + offs[:, None] + (k // CODES + word)[None, :], mask=mask[:, None], other=0)


@gluon.jit
def _quarter_of(words, QUARTER: gl.constexpr):
    """Those of a chunk for one of its four steps of wgmma: [ROWS, _WORDS / 4]."""
    ROWS: gl.constexpr = words.shape[0]
    first, second = words.reshape([ROWS, 2, _WORDS // 2]).permute([0, 2, 1]).split()
    half = first if QUARTER < 2 else second
    first, second = half.reshape([ROWS, 2, _WORDS // 4]).permute([0, 2, 1]).split()
    return first if QUARTER % 2 == 0 else second


@gluon.jit
def _for_every_word(of_groups, PART: gl.constexpr, PARTS: gl.constexpr):
    """What a chunk has by group, for the words of a part of it: [ROWS, words, 1]."""
    ROWS: gl.constexpr = of_groups.shape[0]
    WORDS: gl.constexpr = _WORDS // PARTS
    layout: gl.constexpr = gl.SliceLayout(2, _nibbles_layout(ROWS, WORDS))
    if of_groups.shape[1] == 2 and PARTS == 4:
        first, second = of_groups.split()
        of_groups = gl.expand_dims(first if PART < 2 else second, 1)
    GROUPS: gl.constexpr = of_groups.shape[1]
    by_word = gl.expand_dims(of_groups, 2).broadcast_to(ROWS, GROUPS, WORDS // GROUPS)
    return gl.expand_dims(gl.convert_layout(by_word.reshape([ROWS, WORDS]), layout, assert_trivial=True), 2)


@gluon.jit
def decoded(words, of_chunk, PART: gl.constexpr, PARTS: gl.constexpr, layout: gl.constexpr):
    """One of 1 or 4 parts of a chunk's words as wgmma's first operand [ROWS, CHUNK_K / PARTS], for an accumulator with
    a layout.
    """
    scale, zero = of_chunk
    ROWS: gl.constexpr = words.shape[0]
    nibbles: gl.constexpr = _nibbles_layout(ROWS, _WORDS.value // PARTS)
    if PARTS == 4:
        words = gl.convert_layout(_quarter_of(words, PART), gl.SliceLayout(2, nibbles), assert_trivial=True)
    code = gl.arange(0, CODES, gl.SliceLayout(0, gl.SliceLayout(1, nibbles)))
    byte = gl.expand_dims(gl.expand_dims(code // 2 | 0x4440, 0), 1)  # and bytes of zeros above it
    made = gl.inline_asm_elementwise(
        _decode_in_ptx(scale.dtype),
        "=r,r,r,r,r,r,r",
        [gl.expand_dims(words, 2), byte, _for_every_word(zero, PART, PARTS), _for_every_word(scale, PART, PARTS)],
        dtype=scale.dtype,
        is_pure=True,
        pack=2,
    )
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    if ROWS < LONG_SIDE:  # every eight rows of codes are followed by eight of zeros
        of_warps = made.reshape([LONG_SIDE // 16, 8, CHUNK_K // PARTS])
        nothing = gl.full(of_warps.shape, 0.0, of_warps.dtype, of_warps.type.layout)
        made = gl.join(of_warps, nothing).permute([0, 3, 1, 2])
    return gl.convert_layout(made.reshape([max(ROWS, LONG_SIDE), CHUNK_K // PARTS]), operand, assert_trivial=True)


@triton.constexpr_function
def _by_16_layout(ROWS):
    """Of [ROWS, CHUNK_K / 16, 2, 4, 2]: as [ROWS, CHUNK_K] it is that of wgmma's first operand in registers, but for
    the order of a thread's registers.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 0, 1], [0, 0, 1, 0, 0], [8, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0]],
        lane_bases=[[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]],
        warp_bases=[[16 << bit, 0, 0, 0, 0] for bit in range((ROWS // 16).bit_length() - 1)],
        block_bases=[],
        shape=[ROWS, CHUNK_K.value // 16, 2, 4, 2],
    )


@gluon.jit
def in_order_of_16(x):
    """x [M, CHUNK_K] with each 16 elements of K in the order of :func:`decoded_by_16`: 0, 8, 2, 10, 4, 12, 6, 14, and
    those behind them.
    """
    M: gl.constexpr = x.shape[0]
    return x.reshape([M, CHUNK_K // 16, 2, 4, 2]).permute([0, 1, 4, 3, 2]).reshape([M, CHUNK_K])


@gluon.jit
def _for_every_16(of_groups):
    """What chunks have by group, for [ROWS, CHUNK_K / 16, 1, 1, 1]."""
    GROUPS: gl.constexpr = of_groups.shape[1]
    ROWS: gl.constexpr = of_groups.shape[0]
    PARTS: gl.constexpr = CHUNK_K // 16
    layout: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, _by_16_layout(ROWS))))
    of_parts = gl.expand_dims(of_groups, 2).broadcast_to(ROWS, GROUPS, PARTS // GROUPS).reshape([ROWS, PARTS])
    found = gl.convert_layout(of_parts, layout)
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(found, 2), 3), 4)


@gluon.jit
def decoded_by_16(words, of_chunk, layout: gl.constexpr, DTYPE: gl.constexpr, KIND: gl.constexpr):
    """As :func:`decoded`, with an order of each 16 elements of K in which fewer instructions decode them: a thread has
    a byte each of two words, and the same nibbles of both side by side. wgmma adds 16 products in one step, whatever
    their order.
    """
    ROWS: gl.constexpr = words.shape[0]
    by_16: gl.constexpr = _by_16_layout(ROWS)
    of_words: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, by_16))
    pair = gl.convert_layout(words.reshape([ROWS, CHUNK_K // 16, 2]), of_words)
    pair = gl.expand_dims(gl.expand_dims(pair, 2), 3).broadcast_to(ROWS, CHUNK_K // 16, 2, 4, 2)
    place = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, by_16)))))
    place = (place * 0x1111 + 0x4400)[None, None, None, :, None]  # bytes of the first word, and of the second
    if KIND != "int4":
        of_groups = of_chunk if KIND == "steps" else _powers_of(of_chunk, ROWS, KIND == "wide e2m1")
        given = [pair, place, _for_every_16(of_groups)]
        made = gl.inline_asm_elementwise(
            _of_16_in_ptx(DTYPE, KIND),
            "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r",
            given,
            dtype=DTYPE.value,
            is_pure=True,
            pack=4,
        )
    else:
        scale, zero = of_chunk
        given = [pair, place, _for_every_16(_twice(zero)), _for_every_16(_twice(scale))]
        made = gl.inline_asm_elementwise(
            _of_16_in_ptx(DTYPE, KIND),
            "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            given,
            dtype=DTYPE.value,
            is_pure=True,
            pack=4,
        )
    return gl.convert_layout(made.reshape([ROWS, CHUNK_K]), gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def _twice(of_16_bits):
    """int32 with both halves the same."""
    return (of_16_bits.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x10001


@gluon.jit
def ask_for_scales(scales, first_n, N, ROWS: gl.constexpr, GATED: gl.constexpr):
    """One warp: has those of ROWS rows brought to the L2 cache, half of them of gate and half of up if gated."""
    if GATED:
        half, first_up = N // 2, first_n // 2 + N // 2
        ask_for_rows(scales, first_n // 2, gl.minimum(ROWS // 2, half - first_n // 2), 1)
        ask_for_rows(scales, first_up, gl.minimum(ROWS // 2, N - first_up), 1)
    else:
        ask_for_rows(scales, first_n, gl.minimum(ROWS, N - first_n), 1)


@gluon.jit
def ask_for_rows(scales, first, rows, WARPS: gl.constexpr):
    """A partition of so many warps: has the scales of some rows brought to the L2 cache."""
    PER_LINE: gl.constexpr = LINE * 8 // scales.scales_ptr.dtype.element_ty.primitive_bitwidth
    lane = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    begin, count = first.to(gl.int64) * scales.stride, rows * scales.stride
    for at in range(0, count, 32 * WARPS * PER_LINE):
        offs = begin + gl.minimum(at + lane * PER_LINE, count - 1)
        _ask_for(scales.scales_ptr + offs)
        if scales.zeros_ptr is not None:
            _ask_for(scales.zeros_ptr + offs)


@gluon.jit
def _ask_for(ptrs):
    gl.inline_asm_elementwise(
        ASK_IN_PTX,
        "=r,l",
        [ptrs.to(gl.uint64, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
