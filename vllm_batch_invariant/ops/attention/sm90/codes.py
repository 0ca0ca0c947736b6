"""Keys and values in e4m3 for the decode kernel: codes in shared memory, and the numbers that they stand for in the
registers that are wgmma's first operand.

A thread takes two bytes that lie side by side as one element of 16 bits, and the even and the odd bytes of a pair of
these become a register each, with three or four instructions. So of every 16 elements along the bytes the 8 even ones
come first and the 8 odd ones behind them. Along keys' elements that is the order of a dot's products, of which wgmma
adds 16 in one step, whatever their order; the query's elements are stored in the same order. Along values' elements it
is the order of the result's rows.

Codes of NaN stand for 480 and -480 here: an operation's own keys and values must be finite, and what unwritten slots
hold is weighed by 0.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from ...common.gluon_names import reinterpret
from .common import BLOCK_N

_GROUP = gl.constexpr(16)


@gluon.constexpr_function
def _pairs_smem_layout(HEAD_DIM):
    """Of a tile of codes, two as one element of 16 bits."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, HEAD_DIM), element_bitwidth=16, rank=2)


@gluon.constexpr_function
def _values_layout(HEAD_DIM):
    """Of pairs of codes [HEAD_DIM / 2, BLOCK_N]: of every 8 of them the even codes and the odd ones are 16 rows of one
    warp.
    """
    more = [[1 << bit, 0] for bit in range(5, (HEAD_DIM // 2).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8], [0, 16], [0, 32], *more],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[HEAD_DIM // 2, 64],
    )


@gluon.constexpr_function
def _decode_in_ptx(dtype):
    """Of two pairs of codes, the numbers of both even ones and of both odd ones. A code without its sign is put where
    the dtype has the last bit of its exponent and what follows, and the difference of exponents is multiplied in, which
    is exact for subnormal numbers too.
    """
    is_bf16 = dtype.name == "bf16"
    shift, kind, factor = (4, "bf16x2", "0x7B807B80") if is_bf16 else (1, "f16x2", "0x5C005C00")  # 2^120, 2^8
    one = """
        and.b32 size, {codes}, 0x7F007F00;
        shr.b32 size, size, {shift};
        lop3.b32 size, size, {codes}, 0x80008000, 0xF8;
        mul.{kind} {out}, size, factor;"""
    made = "".join(
        one.format(codes=codes, out=out, shift=shift, kind=kind) for codes, out in (("even", "$0"), ("$2", "$1"))
    )
    return f"{{ .reg .b32 even, size, factor; mov.b32 factor, {factor}; shl.b32 even, $2, 8; {made} }}"


@gluon.jit
def _decoded(pairs, DTYPE: gl.constexpr):
    """The numbers of the even codes and of the odd ones, both of the shape of the pairs."""
    return gl.inline_asm_elementwise(
        _decode_in_ptx(DTYPE), "=r,=r,r", [pairs], dtype=(DTYPE.value, DTYPE.value), is_pure=True, pack=2
    )


@gluon.jit
def _loaded(smem, stage, TRANSPOSED: gl.constexpr, layout: gl.constexpr):
    """Pairs of codes of a tile, as registers have them."""
    HEAD_DIM: gl.constexpr = smem.shape[4]
    STAGES: gl.constexpr = smem.shape[0]
    pairs = reinterpret(smem, gl.int16, [STAGES, BLOCK_N, HEAD_DIM // 2], _pairs_smem_layout(HEAD_DIM)).index(stage)
    if TRANSPOSED:
        pairs = pairs.permute([1, 0])
    return pairs.load(layout)


@gluon.jit
def load_keys(k_smem, stage, acc_layout: gl.constexpr, DTYPE: gl.constexpr):
    """A tile of keys as the first operand of a product [BLOCK_N, HEAD_DIM] @ [HEAD_DIM, rows] whose result has a
    layout; elements as of :func:`by_halves`.
    """
    HEAD_DIM: gl.constexpr = k_smem.shape[4]
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)  # also of pairs of codes
    even, odd = _decoded(_loaded(k_smem, stage, False, operand), DTYPE)
    k = by_halves(gl.join(even, odd).reshape([BLOCK_N, HEAD_DIM]))
    return gl.convert_layout(k, operand, assert_trivial=True)


@gluon.jit
def load_values(v_smem, stage, acc_layout: gl.constexpr, DTYPE: gl.constexpr):
    """A tile of values as the first operand of a product [HEAD_DIM, BLOCK_N] @ [BLOCK_N, rows]; rows of the result as
    elements of :func:`by_halves`.
    """
    HEAD_DIM: gl.constexpr = v_smem.shape[4]
    even, odd = _decoded(_loaded(v_smem, stage, True, _values_layout(HEAD_DIM)), DTYPE)
    v = gl.join(even, odd).reshape([HEAD_DIM // _GROUP, _GROUP // 2, BLOCK_N, 2]).permute([0, 3, 1, 2])
    return gl.convert_layout(v.reshape([HEAD_DIM, BLOCK_N]), gl.DotOperandLayout(0, acc_layout, 2), assert_trivial=True)


@gluon.jit
def by_halves(x):
    """[rows, HEAD_DIM] with the even elements of every 16 before the odd ones."""
    ROWS: gl.constexpr = x.shape[0]
    HEAD_DIM: gl.constexpr = x.shape[1]
    return x.reshape([ROWS, HEAD_DIM // _GROUP, _GROUP // 2, 2]).permute([0, 1, 3, 2]).reshape([ROWS, HEAD_DIM])


@gluon.jit
def in_order(x):
    """What was [rows, HEAD_DIM] before :func:`by_halves`."""
    ROWS: gl.constexpr = x.shape[0]
    HEAD_DIM: gl.constexpr = x.shape[1]
    return x.reshape([ROWS, HEAD_DIM // _GROUP, 2, _GROUP // 2]).permute([0, 1, 3, 2]).reshape([ROWS, HEAD_DIM])


@gluon.jit
def elements_by_halves(offs_d):
    """Which elements those of :func:`by_halves` at some places were."""
    return offs_d // _GROUP * _GROUP + offs_d % (_GROUP // 2) * 2 + offs_d // (_GROUP // 2) % 2
