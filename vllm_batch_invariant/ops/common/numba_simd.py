"""Sixteen fp32 lanes as a value of a numba kernel: the source, not the auto-vectoriser, says what is added when.

Each operation is one IEEE operation a lane, whatever register width the CPU has.
"""

from functools import partial

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

WIDTH = 16
_VECTOR = ir.VectorType(ir.FloatType(), WIDTH)
_INDEX = ir.IntType(32)
_WORDS = ir.VectorType(ir.IntType(32), WIDTH)
_HALVES = ir.VectorType(ir.IntType(16), WIDTH)
_BYTES = ir.VectorType(ir.IntType(8), WIDTH)
_PREFETCH = "llvm.prefetch.p0"


class Simd16(types.Type):
    """The numba type of sixteen fp32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="Float32x16")


SIMD16 = Simd16()


@register_model(Simd16)
class _Simd16Model(models.PrimitiveModel):
    def __init__(self, manager, lanes_type):
        super().__init__(manager, lanes_type, _VECTOR)


def pointer(context, builder, array_type, array, offset, vector):
    """To a vector of elements of an array from ``offset`` on, for code of intrinsics."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [offset]), vector.as_pointer())


def _shuffle(builder, a, b, indices):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INDEX, len(indices)), list(indices)))


def _halve(builder, op, lanes):
    """Lane i of the result is op(lane i, lane i + half)."""
    half = lanes.type.count // 2
    low = _shuffle(builder, lanes, lanes, list(range(half)))
    return op(low, _shuffle(builder, lanes, lanes, list(range(half, 2 * half))))


def _splat(builder, x):
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), x, _INDEX(0))
    return _shuffle(builder, one, one, [0] * WIDTH)


def _largest(builder):
    return lambda a, b: builder.select(builder.fcmp_ordered(">", b, a), b, a)


def fma_of(builder, vector):
    """LLVM's function for vectors of a type: a * b + c, rounded once."""
    name = f"llvm.fma.v{vector.count}{'f32' if vector.element == ir.FloatType() else 'f64'}"
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(vector, [vector] * 3), name=name)


def _words(lanes, value):
    return ir.Constant(ir.VectorType(ir.IntType(32), lanes), [value] * lanes)


def float_of_bfloat(builder, bits):
    """fp32 lanes of words that have bf16 in their low halves, and any bits in the high ones."""
    lanes = bits.type.count
    return builder.bitcast(builder.shl(bits, _words(lanes, 16)), ir.VectorType(ir.FloatType(), lanes))


def float_of_half(builder, bits):
    """fp32 lanes of words that have fp16 in their low halves and 0 in the high ones. By integers, because not every CPU
    that numba compiles for has the conversion.
    """
    lanes = bits.type.count
    vector, words = ir.VectorType(ir.FloatType(), lanes), partial(_words, lanes)
    size = builder.and_(bits, words(0x7FFF))
    normal = builder.add(builder.shl(size, words(13)), words(112 << 23))
    special = builder.add(normal, words(112 << 23))
    normal = builder.select(builder.icmp_unsigned(">=", size, words(0x7C00)), special, normal)
    scale = ir.Constant(vector, [2.0**-24] * lanes)
    subnormal = builder.bitcast(builder.fmul(builder.uitofp(size, vector), scale), bits.type)
    magnitude = builder.select(builder.icmp_unsigned("<", size, words(0x400)), subnormal, normal)
    sign = builder.shl(builder.and_(bits, words(0x8000)), words(16))
    return builder.bitcast(builder.or_(magnitude, sign), vector)


def _float_of_e4m3(builder, bits):
    """By integers; the format has no infinity, and one NaN of each sign."""
    words = partial(_words, WIDTH)
    size = builder.and_(bits, words(0x7F))
    normal = builder.add(builder.shl(size, words(20)), words(120 << 23))
    scale = ir.Constant(_VECTOR, [2.0**-9] * WIDTH)
    subnormal = builder.bitcast(builder.fmul(builder.uitofp(size, _VECTOR), scale), _WORDS)
    magnitude = builder.select(builder.icmp_unsigned("<", size, words(8)), subnormal, normal)
    magnitude = builder.select(builder.icmp_unsigned("==", size, words(0x7F)), words(0x7FC00000), magnitude)
    sign = builder.shl(builder.and_(bits, words(0x80)), words(24))
    return builder.bitcast(builder.or_(magnitude, sign), _VECTOR)


@intrinsic
def splat(typing_context, x):
    """All lanes x."""

    def codegen(context, builder, signature, arguments):
        return _splat(builder, arguments[0])

    return SIMD16(types.float32), codegen


@intrinsic
def load(typing_context, array, offset):
    """Elements offset to offset + 15 of a contiguous fp32 array, unchecked."""

    def codegen(context, builder, signature, arguments):
        return builder.load(pointer(context, builder, signature.args[0], *arguments, _VECTOR), align=4)

    return SIMD16(array, types.intp), codegen


@intrinsic
def load_fp32(typing_context, data, offset):
    """Sixteen fp32 elements from byte ``offset`` of a uint8 array on; unchecked."""

    def codegen(context, builder, signature, arguments):
        return builder.load(pointer(context, builder, signature.args[0], *arguments, _VECTOR), align=4)

    return SIMD16(data, types.intp), codegen


@intrinsic
def load_bf16(typing_context, data, offset):
    """Sixteen bf16 elements from byte ``offset`` of a uint8 array on, widened exactly; unchecked."""

    def codegen(context, builder, signature, arguments):
        bits = builder.load(pointer(context, builder, signature.args[0], *arguments, _HALVES), align=2)
        return float_of_bfloat(builder, builder.zext(bits, _WORDS))

    return SIMD16(data, types.intp), codegen


@intrinsic
def load_fp16(typing_context, data, offset):
    """Sixteen fp16 elements from byte ``offset`` of a uint8 array on, widened exactly; unchecked."""

    def codegen(context, builder, signature, arguments):
        bits = builder.load(pointer(context, builder, signature.args[0], *arguments, _HALVES), align=2)
        return float_of_half(builder, builder.zext(bits, _WORDS))

    return SIMD16(data, types.intp), codegen


@intrinsic
def load_e4m3(typing_context, data, offset):
    """Sixteen e4m3 elements from byte ``offset`` of a uint8 array on, widened exactly; unchecked."""

    def codegen(context, builder, signature, arguments):
        bits = builder.load(pointer(context, builder, signature.args[0], *arguments, _BYTES), align=1)
        return _float_of_e4m3(builder, builder.zext(bits, _WORDS))

    return SIMD16(data, types.intp), codegen


@intrinsic
def load_splat(typing_context, array, offset):
    """All lanes element ``offset`` of a contiguous fp32 array, unchecked."""

    def codegen(context, builder, signature, arguments):
        x = builder.load(pointer(context, builder, signature.args[0], *arguments, ir.FloatType()))
        return _splat(builder, x)

    return SIMD16(array, types.intp), codegen


@intrinsic
def prefetch(typing_context, data, offset):
    """Ask for the cache line with byte ``offset`` of a uint8 array into the second-level cache."""

    def codegen(context, builder, signature, arguments):
        address = pointer(context, builder, signature.args[0], *arguments, ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [address.type, _INDEX, _INDEX, _INDEX])
        function = builder.module.globals.get(_PREFETCH) or ir.Function(builder.module, kind, name=_PREFETCH)
        to_read, locality, is_data = 0, 2, 1
        builder.call(function, [address, _INDEX(to_read), _INDEX(locality), _INDEX(is_data)])
        return context.get_dummy_value()

    return types.void(data, types.intp), codegen


@intrinsic
def store(typing_context, lanes, array, offset):
    """Write the lanes to elements offset to offset + 15 of a contiguous fp32 array, unchecked."""

    def codegen(context, builder, signature, arguments):
        lanes, array, offset = arguments
        builder.store(lanes, pointer(context, builder, signature.args[1], array, offset, _VECTOR), align=4)
        return context.get_dummy_value()

    return types.void(SIMD16, array, types.intp), codegen


@intrinsic
def add(typing_context, a, b):
    """a + b."""

    def codegen(context, builder, signature, arguments):
        return builder.fadd(*arguments)

    return SIMD16(SIMD16, SIMD16), codegen


@intrinsic
def add_product(typing_context, total, a, b):
    """a * b + total, rounded once."""

    def codegen(context, builder, signature, arguments):
        total, a, b = arguments
        return builder.call(fma_of(builder, _VECTOR), [a, b, total])

    return SIMD16(SIMD16, SIMD16, SIMD16), codegen


@intrinsic
def larger(typing_context, a, b):
    """b where b > a, else a."""

    def codegen(context, builder, signature, arguments):
        return _largest(builder)(*arguments)

    return SIMD16(SIMD16, SIMD16), codegen


@intrinsic
def largest_lane(typing_context, lanes):
    """The largest lane, fp32."""

    def codegen(context, builder, signature, arguments):
        lanes = arguments[0]
        while lanes.type.count > 1:
            lanes = _halve(builder, _largest(builder), lanes)
        return builder.extract_element(lanes, _INDEX(0))

    return types.float32(SIMD16), codegen


@intrinsic
def sum_lanes(typing_context, lanes):
    """The sum of the lanes by halving: lane i takes lane i + 8, then i + 4, i + 2 and i + 1."""

    def codegen(context, builder, signature, arguments):
        lanes = arguments[0]
        while lanes.type.count > 1:
            lanes = _halve(builder, builder.fadd, lanes)
        return builder.extract_element(lanes, _INDEX(0))

    return types.float32(SIMD16), codegen


@intrinsic
def store_four_sums(typing_context, a, b, c, d, array, offset):
    """Write :func:`sum_lanes` of a, b, c and d to four neighbouring elements of a contiguous fp32 array, unchecked."""

    def fold(builder, pair, half):
        """Groups of 2 * half lanes of both vectors, each folded to half lanes, side by side."""
        lanes = range(2 * WIDTH)
        low = _shuffle(builder, *pair, [lane for lane in lanes if lane % (2 * half) < half])
        return builder.fadd(low, _shuffle(builder, *pair, [lane for lane in lanes if lane % (2 * half) >= half]))

    def codegen(context, builder, signature, arguments):
        a, b, c, d, array, offset = arguments
        four = fold(builder, (fold(builder, (a, b), 8), fold(builder, (c, d), 8)), 4)
        for half in (2, 1):
            lanes = range(four.type.count)
            low = _shuffle(builder, four, four, [lane for lane in lanes if lane % (2 * half) < half])
            four = builder.fadd(
                low, _shuffle(builder, four, four, [lane for lane in lanes if lane % (2 * half) >= half])
            )
        builder.store(four, pointer(context, builder, signature.args[4], array, offset, four.type), align=4)
        return context.get_dummy_value()

    return types.void(SIMD16, SIMD16, SIMD16, SIMD16, array, types.intp), codegen


@intrinsic
def store_sixteen_sums(typing_context, vectors, array, offset, stride):
    """Write :func:`sum_lanes` of sixteen vectors to a contiguous fp32 array, unchecked: of the first four to four
    neighbouring elements from ``offset`` on, of the next four ``stride`` elements behind those, and so on.
    """

    def codegen(context, builder, signature, arguments):
        vectors, array, offset, stride = arguments
        folded, half = [builder.extract_value(vectors, i) for i in range(WIDTH)], WIDTH // 2
        while half:
            # Each vector has groups of lanes, one of each vector that it was made of, and a fold halves every group.
            low = [lane for lane in range(2 * WIDTH) if lane % (2 * half) < half]
            high = [lane + half for lane in low]
            folded = [
                builder.fadd(_shuffle(builder, *pair, low), _shuffle(builder, *pair, high))
                for pair in zip(folded[::2], folded[1::2], strict=True)
            ]
            half //= 2
        for first in range(0, WIDTH, 4):
            four = _shuffle(builder, folded[0], folded[0], range(first, first + 4))
            builder.store(four, pointer(context, builder, signature.args[1], array, offset, four.type), align=4)
            offset = builder.add(offset, stride)
        return context.get_dummy_value()

    return types.void(types.UniTuple(SIMD16, WIDTH), array, types.intp, types.intp), codegen
