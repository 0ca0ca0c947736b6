"""Compares two tensors, by their bits or by the accuracy that their dtype allows.

Both comparisons take tensors of any shape (empty and 0-dimensional too), strides and device, return a
:class:`Comparison` that says where they differ first, and have a form that asserts: :func:`assert_same_bits` and
:func:`assert_accuracy`.
"""

from dataclasses import dataclass

import torch

__all__ = [
    "EXACT",
    "TOLERANCES",
    "Comparison",
    "Mismatch",
    "Pair",
    "Tolerance",
    "accuracy_comparison",
    "assert_accuracy",
    "assert_same_bits",
    "bitwise_comparison",
]


@dataclass(frozen=True)
class Tolerance:
    """``|actual - expected| <= atol + rtol * |expected|``."""

    rtol: float
    atol: float

    def __post_init__(self) -> None:
        if not (self.rtol >= 0 and self.atol >= 0):
            raise ValueError(f"a tolerance is at least 0, got rtol={self.rtol} and atol={self.atol}")

    def __str__(self) -> str:
        return f"rtol={self.rtol:g} atol={self.atol:g}" if self != EXACT else "exact"


EXACT = Tolerance(0.0, 0.0)
TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float16: Tolerance(1e-3, 1e-3),
    torch.bfloat16: Tolerance(1e-3, 1e-3),
    torch.float32: Tolerance(1e-4, 1e-4),
    **dict.fromkeys(
        (
            torch.bool,
            *(torch.int8, torch.int16, torch.int32, torch.int64),
            *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        ),
        EXACT,
    ),
}
"""What :func:`accuracy_comparison` allows, by dtype; others need a tolerance of the caller's."""
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Pair:
    """Two elements at one place."""

    where: tuple[int, ...]
    """Coordinates: one for each dimension, none in a 0-dimensional tensor."""
    actual: float | bool | complex
    expected: float | bool | complex
    bits: tuple[str, str] | None = None
    """Both in hexadecimal, where bits were compared."""

    def __str__(self) -> str:
        actual, expected = (
            f"{value!r}{f' ({bits})' if bits else ''}"
            for value, bits in zip((self.actual, self.expected), self.bits or ("", ""), strict=True)
        )
        return f"at {self.where}: {actual} against {expected}"


@dataclass(frozen=True)
class Comparison:
    """What a comparison found. It is true when no element differs."""

    rule: str
    """How elements were compared: ``bits``, ``exact`` or the tolerance."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    elements: int
    different: int
    """Elements that break the rule."""
    largest_error: float
    """Largest ``|actual - expected|`` of all elements, those within a tolerance included; computed in float64. Infinite
    where one of two is NaN or another infinity, and 0 where both are NaN.
    """
    first: Pair | None
    """The first pair that breaks the rule, the last dimension running fastest."""

    def __bool__(self) -> bool:
        return self.different == 0

    def __str__(self) -> str:
        about = f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}, {self.rule}"
        if self:
            return f"all {self.elements} elements agree ({about}), largest error {self.largest_error:g}"
        return (
            f"{self.different} of {self.elements} elements differ ({about}), first {self.first}, "
            f"largest error {self.largest_error:g}"
        )


class Mismatch(AssertionError):
    """Two tensors are not what was asserted.

    Attributes:
        comparison: what was found.
    """

    def __init__(self, comparison: Comparison, what: str = "") -> None:
        super().__init__(f"{what}: {comparison}" if what else str(comparison))
        self.comparison = comparison


def bitwise_comparison(actual: torch.Tensor, expected: torch.Tensor, *, equal_nan: bool = False) -> Comparison:
    """Compare the bits of every element.

    So 0.0 and -0.0 differ, and a NaN is equal to a NaN of the same sign and payload only.

    Args:
        actual: any shape; any dtype of up to 8 bytes an element.
        expected: of the same shape and dtype, on any device.
        equal_nan: whether all NaNs are the same.

    Raises:
        ValueError: shapes differ.
        TypeError: dtypes differ, an element has more than 8 bytes, or an argument is no strided tensor.
    """
    actual, expected = _beside(actual, expected)
    bits = _bits(actual), _bits(expected)
    different = bits[0] != bits[1]
    if equal_nan and (actual.is_floating_point() or actual.is_complex()):
        different &= ~(actual.isnan() & expected.isnan())
    return _summary("bits", actual, expected, different, bits)


def accuracy_comparison(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = False,
) -> Comparison:
    """Compare values as their dtype allows, :data:`TOLERANCES`: fp16 and bf16, compared as fp32, to 1e-3; fp32 to 1e-4;
    integers and booleans exactly.

    0.0 and -0.0 are equal, and so are equal infinities.

    Args:
        actual: any shape; fp16, bf16, fp32, integer or bool.
        expected: of the same shape and dtype, on any device.
        rtol: instead of the dtype's relative tolerance.
        atol: instead of the dtype's absolute tolerance. With both, any real dtype can be compared.
        equal_nan: whether NaN is equal to NaN; otherwise it differs from everything.

    Raises:
        ValueError: shapes differ, or a tolerance is negative or NaN.
        TypeError: dtypes differ, there is no rule for the dtype, or an argument is no strided tensor.
    """
    actual, expected = _beside(actual, expected)
    tolerance = _tolerance(actual.dtype, rtol, atol)
    if tolerance == EXACT and not actual.is_floating_point():
        # By their bits, because not every device and dtype of unsigned integers has a comparison.
        different = _bits(actual) != _bits(expected)
    else:
        wide = _compared_as(actual.dtype)
        different = ~torch.isclose(
            actual.to(wide), expected.to(wide), rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=equal_nan
        )
    return _summary(str(tolerance), actual, expected, different)


def assert_same_bits(
    actual: torch.Tensor, expected: torch.Tensor, what: str = "", *, equal_nan: bool = False
) -> Comparison:
    """:func:`bitwise_comparison` that must find no difference; ``what`` begins the message.

    Raises:
        Mismatch: bits differ; and what the comparison raises.
    """
    return _asserted(bitwise_comparison(actual, expected, equal_nan=equal_nan), what)


def assert_accuracy(
    actual: torch.Tensor,
    expected: torch.Tensor,
    what: str = "",
    *,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = False,
) -> Comparison:
    """:func:`accuracy_comparison` that must find no difference; ``what`` begins the message.

    Raises:
        Mismatch: an element is too far off; and what the comparison raises.
    """
    return _asserted(accuracy_comparison(actual, expected, rtol=rtol, atol=atol, equal_nan=equal_nan), what)


def _asserted(comparison: Comparison, what: str) -> Comparison:
    if not comparison:
        raise Mismatch(comparison, what)
    return comparison


def _beside(actual: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both on one device and without their history."""
    for tensor in (actual, expected):
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
            kind = f"{tensor.layout} tensor" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"a comparison takes two plain tensors, got a {kind}")
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {list(actual.shape)} against {list(expected.shape)}")
    if actual.dtype != expected.dtype:
        raise TypeError(f"dtypes differ: {actual.dtype} against {expected.dtype}")
    actual, expected = actual.detach(), expected.detach()
    if actual.device == expected.device and actual.device.type in ("cpu", "cuda"):
        return actual, expected
    # Other devices lack comparisons of some dtypes, and what is being tested must not judge itself.
    return actual.cpu(), expected.cpu()


def _tolerance(dtype: torch.dtype, rtol: float | None, atol: float | None) -> Tolerance:
    rule = TOLERANCES.get(dtype)
    if rule is None:
        if rtol is None or atol is None or dtype.is_complex:
            known = ", ".join(str(known).removeprefix("torch.") for known in TOLERANCES)
            hint = "" if dtype.is_complex else "; give both rtol and atol"
            raise TypeError(f"there is no rule for the accuracy of {dtype}, only for {known}{hint}")
        return Tolerance(rtol, atol)
    return Tolerance(rule.rtol if rtol is None else rtol, rule.atol if atol is None else atol)


def _compared_as(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point and dtype.itemsize <= 4 else torch.float64


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integer = _INTEGER_OF_SIZE.get(tensor.dtype.itemsize)
    if integer is None:
        raise TypeError(f"bits of {tensor.dtype} cannot be compared: an element has more than 8 bytes")
    return tensor.view(integer)


def _summary(
    rule: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    different: torch.Tensor,
    bits: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Comparison:
    count = int(different.count_nonzero())
    exact = rule in ("bits", str(EXACT))
    return Comparison(
        rule=rule,
        dtype=actual.dtype,
        shape=tuple(actual.shape),
        elements=actual.numel(),
        different=count,
        largest_error=0.0 if exact and not count else _largest_error(actual, expected),
        first=_first(actual, expected, different, bits) if count else None,
    )


def _largest_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.numel() == 0:
        return 0.0
    wide = torch.complex128 if actual.is_complex() else torch.float64
    actual, expected = actual.to(wide), expected.to(wide)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    error = (actual - expected).abs().masked_fill(same, 0)
    return float(error.nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def _first(
    actual: torch.Tensor,
    expected: torch.Tensor,
    different: torch.Tensor,
    bits: tuple[torch.Tensor, torch.Tensor] | None,
) -> Pair:
    index = int(different.flatten().to(torch.uint8).argmax())  # the first of several maxima
    where = tuple(int(coordinate) for coordinate in torch.unravel_index(torch.tensor(index), different.shape))
    digits = None if bits is None else (_hexadecimal(bits[0][where]), _hexadecimal(bits[1][where]))
    return Pair(where, actual[where].item(), expected[where].item(), digits)


def _hexadecimal(element: torch.Tensor) -> str:
    size = element.dtype.itemsize
    return f"0x{element.item() % (1 << 8 * size):0{2 * size}x}"
