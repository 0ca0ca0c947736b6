"""A Hopper's tensor core for sixteen columns at a time, as values of a numba kernel: instructions that differ in how
many products they add, and in the bits that they keep.

A product of two bf16 values, or of two of e4m3, is exact in fp32. Multiplied by 2**(fraction - e) and converted to an
integer, which cuts towards 0, it is what the tensor core adds.
"""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from .numba_simd import SIMD16, WIDTH, pointer

_LOWEST, _HIGHEST = -90, 120
"""Exponents between which products and sums are exact in fp32, or far below what is added."""
ZERO, NO_NUMBER, _NOTHING = -8000, 14000, -1000
"""Exponents of operands that are 0 and that are no number; below the last a product is 0."""
_INT, _LONG = ir.IntType(32), ir.IntType(64)
_FLOATS, _DOUBLES = ir.VectorType(ir.FloatType(), WIDTH), ir.VectorType(ir.DoubleType(), WIDTH)
_WORDS, _LONGS = ir.VectorType(_INT, WIDTH), ir.VectorType(_LONG, WIDTH)
_SHORTS = ir.VectorType(ir.IntType(16), WIDTH)


class Exponents16(types.Type):
    """The numba type of sixteen exponents, int32."""

    def __init__(self) -> None:
        super().__init__(name="Int32x16")


EXPONENTS16 = Exponents16()


@register_model(Exponents16)
class _Exponents16Model(models.PrimitiveModel):
    def __init__(self, manager, lanes_type):
        super().__init__(manager, lanes_type, _WORDS)


def _all(vector, value):
    return ir.Constant(vector, [value] * WIDTH)


def _spread(builder, value, vector):
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _INT(0))
    return builder.shuffle_vector(one, one, ir.Constant(_WORDS, [0] * WIDTH))


def _larger(builder, a, b):
    return builder.select(builder.icmp_signed(">", a, b), a, b)


@intrinsic
def are_usual(typing_context, exponents):
    """Whether fp32 holds what these exponents need, in every column."""

    def codegen(context, builder, signature, arguments):
        [e] = arguments
        above = builder.icmp_signed(">", e, _all(_WORDS, _HIGHEST))
        below = builder.icmp_signed("<", e, _all(_WORDS, _LOWEST))
        below = builder.and_(below, builder.icmp_signed(">", e, _all(_WORDS, _NOTHING)))
        flags = builder.bitcast(builder.or_(above, below), ir.IntType(WIDTH))
        return builder.icmp_unsigned("==", flags, ir.Constant(ir.IntType(WIDTH), 0))

    return types.boolean(EXPONENTS16), codegen


def _operands(context, builder, arrays, k, a, at, b, panel, lanes, align):
    """Element ``at`` + k of a in every lane, and row ``panel`` + k of a panel b [K, 16]; ``arrays`` are their types."""
    of_a, of_b = arrays
    data = context.make_array(of_a)(context, builder, a).data
    one = builder.load(builder.gep(data, [builder.add(at, at.type(k))]))
    row = builder.mul(builder.add(panel, panel.type(k)), panel.type(WIDTH))
    place = pointer(context, builder, of_b, b, row, lanes)
    return _spread(builder, one, lanes), builder.load(place, align=align)


class Instruction(NamedTuple):
    """Functions of a kernel that add products as one instruction does."""

    largest_exponents: Any
    """Of ``c, a_exponents, at, b_exponents, panel``."""
    add_products: Any
    """Of ``c, exponents, a, at, b, panel``."""


def instruction(k_step: int, fraction: int, kept: int) -> Instruction:
    """Those of an instruction.

    Args:
        k_step: products that it adds at once.
        fraction: bits behind the largest exponent that each of them is cut to.
        kept: bits behind the first that a sum is cut to.
    """

    @intrinsic
    def largest_exponents(typing_context, c, a_exponents, at, b_exponents, panel):
        """The largest exponent of c and of an instruction's products, in each of sixteen columns: those of a from
        ``at`` on, with those of a panel [K, 16] from row ``panel`` on.
        """

        def codegen(context, builder, signature, arguments):
            c, a, at, b, panel = arguments
            arrays, top = (signature.args[1], signature.args[3]), None
            for k in range(k_step):
                both = builder.add(*_operands(context, builder, arrays, k, a, at, b, panel, _SHORTS, 2))
                top = both if top is None else _larger(builder, top, both)
            bits = builder.bitcast(c, _WORDS)
            field = builder.and_(builder.lshr(bits, _all(_WORDS, 23)), _all(_WORDS, 255))
            own = builder.sub(_larger(builder, field, _all(_WORDS, 1)), _all(_WORDS, 127))
            is_zero = builder.icmp_signed("==", builder.shl(bits, _all(_WORDS, 1)), _all(_WORDS, 0))
            own = builder.select(is_zero, _all(_WORDS, ZERO), own)
            return _larger(builder, builder.sext(top, _WORDS), own)

        return EXPONENTS16(SIMD16, a_exponents, types.intp, b_exponents, types.intp), codegen

    @intrinsic
    def add_products(typing_context, c, exponents, a, at, b, panel):
        """c and an instruction's products in each column."""

        def codegen(context, builder, signature, arguments):
            c, e, a, at, b, panel = arguments
            arrays = signature.args[2], signature.args[4]
            e = _larger(builder, e, _all(_WORDS, _LOWEST))
            scale = builder.shl(builder.sub(_all(_WORDS, fraction + 127), e), _all(_WORDS, 23))
            scale = builder.bitcast(scale, _FLOATS)
            sums = [builder.fptosi(builder.fmul(c, scale), _WORDS), None, None]  # half of the products stay below 2**31
            for k in range(k_step):
                product = builder.fmul(*_operands(context, builder, arrays, k, a, at, b, panel, _FLOATS, 4))
                term = builder.fptosi(builder.fmul(product, scale), _WORDS)
                which = 1 + k % 2
                sums[which] = term if sums[which] is None else builder.add(sums[which], term)
            total = None
            for part in sums:
                part = builder.sitofp(part, _DOUBLES)
                total = part if total is None else builder.fadd(total, part)
            unit = builder.sext(builder.add(e, _all(_WORDS, 1023 - fraction)), _LONGS)
            unit = builder.bitcast(builder.shl(unit, _all(_LONGS, 52)), _DOUBLES)
            found = builder.bitcast(builder.fmul(total, unit), _LONGS)
            cut = builder.and_(found, _all(_LONGS, -(1 << 52 - kept)))
            return builder.fptrunc(builder.bitcast(cut, _DOUBLES), _FLOATS)

        return SIMD16(SIMD16, EXPONENTS16, a, types.intp, b, types.intp), codegen

    return Instruction(largest_exponents, add_products)
