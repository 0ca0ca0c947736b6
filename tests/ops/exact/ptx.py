"""Which instructions of PTX exact arithmetic may have: those on floating-point numbers that IEEE 754 defines."""

import re
from collections.abc import Iterator

INSTRUCTION = re.compile(r"^\s*(?:\{\s*)?(?:@!?%\w+\s+)?([a-z][a-z0-9_]*(?:(?:\.|::)\w+)+)", re.MULTILINE)
FORBIDDEN = re.compile(
    r"\.approx|\.ftz|^div\.full|^(?:ex2|lg2|rsqrt|tanh|sin|cos|fma|copysign|testp)\.|^mad\.\S*f\d|^(?:atom|red)\.\S*f\d"
)
"""Approximations, flushes of subnormal numbers, fused operations, and sums in the order in which programs end."""
ROUNDED = re.compile(r"^(?:add|sub|mul|div|sqrt|rcp)\.(?!\w+\.(?:u|s|b)\d)\S*f(?:16|32|64)")
"""Operations that round: without ``.rn`` the assembler may fuse a product with an addition."""
NARROWING = re.compile(r"^cvt\.\S*f32\.f64")
"""Rounds a second time what was rounded to fp64, but for the one logarithm that the definition has in fp64."""
MAY_NARROW = "softmax_kernel"


def forbidden(ptx: str, kernel: str) -> Iterator[str]:
    """The instructions of a kernel that exact arithmetic must not have."""
    for instruction in dict.fromkeys(INSTRUCTION.findall(ptx)):
        if (
            FORBIDDEN.search(instruction)
            or (ROUNDED.search(instruction) and ".rn" not in instruction)
            or (NARROWING.search(instruction) and kernel != MAY_NARROW)
        ):
            yield instruction
