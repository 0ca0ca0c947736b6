"""Numbers as codes of eight bits in e4m3 (Micikevicius et al. 2022, arXiv:2209.05433), in Triton on every GPU.

Before compute capability 8.9 a GPU has no instruction for them, and Triton refuses the type there, so that codes are
bytes: uint8.
"""

import triton
import triton.language as tl


@triton.jit
def from_e4m3(codes, DTYPE: tl.constexpr, CONVERTS_E4M3: tl.constexpr):
    """The numbers of codes uint8, exactly, in DTYPE: fp32, bf16 or fp16.

    Args:
        CONVERTS_E4M3: the GPU has an instruction for it. Without one the bits of a code are put where fp16 has them,
            whose exponents are 8 less, subnormal numbers included.
    """
    if CONVERTS_E4M3:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:
        bits = codes.to(tl.int16)
        halves = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True) * 256.0
        numbers = tl.where((bits & 127) == 127, float("nan"), halves).to(DTYPE)
    return numbers


@triton.jit
def as_loaded(numbers):
    """Numbers [M, N] of 16 bits, their bits unchanged, for a dot that adds their products in the order in which it adds
    those of numbers that are loaded as they are.

    Triton looks what an operand of mma.sync was loaded as. From bytes a thread gets four adjacent elements along K and
    not two, and with registers 0 and 2 for the first step of 16 products and 1 and 3 for the second, both steps add
    other products. It does not look behind a sum: this one has a single term.
    """
    bits = tl.reshape(numbers.to(tl.int16, bitcast=True), (numbers.shape[0], numbers.shape[1], 1))
    return tl.sum(bits, 2, dtype=tl.int16).to(numbers.dtype, bitcast=True)


@triton.jit
def to_e4m3(numbers):
    """The nearest codes, uint8, of two the even one, of numbers fp32 of at most 448, and 127 of any NaN, whose sign
    follows the processor.
    """
    bits = numbers.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Bits that are lost are rounded off by integers; below 2^-6 by an addition, whose last place is 2^-9.
    normal = (size - (120 << 23) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    subnormal = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    codes = tl.where(size < (121 << 23), subnormal, normal)
    return tl.where(size > 0x7F800000, 127, codes | ((bits >> 24) & 128)).to(tl.uint8)
