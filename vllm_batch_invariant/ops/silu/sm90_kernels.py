"""What kernels in Gluon that activate share: :mod:`.triton_kernels` in the words of Gluon."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon


@gluon.jit
def rounded(x, DTYPE: gl.constexpr):
    """x as DTYPE has it, in fp32. Two at a time: one alone is converted where exponentials are computed."""
    if gl.bfloat16 == DTYPE:
        found = gl.inline_asm_elementwise(
            "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }",
            "=r,=r,r,r",
            [x],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        found = x.to(DTYPE).to(gl.float32)
    return found


@gluon.jit
def silu_and_mul(gate, up, DTYPE: gl.constexpr):
    """silu(gate) * up of two accumulators, rounded to DTYPE where the product that they are is, and after silu."""
    gate, up = rounded(gate, DTYPE), rounded(up, DTYPE)
    return (rounded(gate / (1.0 + gl.exp(-gate)), DTYPE) * up).to(DTYPE)
