"""Evaluates PTX of registers alone, as kernels have it inline, on a CPU: of many threads at once."""

import re
from collections.abc import Callable

import torch

_MASK = 0xFFFF_FFFF
_PAIRS = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}
_INTEGERS: dict[str, Callable[..., torch.Tensor]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "mul.lo.u32": lambda a, b: a * b,
    "lop3.b32": lambda a, b, c, table: _looked_up(a, b, c, int(table)),
    "prmt.b32": lambda a, b, selector: _permuted(a, b, selector),
}
_FLOATS: dict[str, Callable[..., torch.Tensor]] = {
    "mul": lambda a, b: a * b,
    "sub": lambda a, b: _sum(a, -b),
    "fma": lambda a, b, c: _sum(a * b, c),
}


def evaluated(ptx: str, **operands: torch.Tensor | int) -> dict[str, torch.Tensor]:
    """All registers at the end, int64 [...] from 0 to 2^32 - 1.

    Args:
        ptx: a block, whose operands are $0, $1 and so on.
        operands: int64 [...] by names as ``_2``, of $2.

    Raises:
        KeyError: an instruction that is not known here, or a register that nothing has written.
        ValueError: a result of floating-point numbers that fp32 does not have, which would be rounded twice here, as
            NaN and sums that float64 does not have are said to be.
    """
    registers = {name.replace("_", "$"): torch.as_tensor(one) & _MASK for name, one in operands.items()}
    for line in re.findall(r"([a-z][\w.]*) ([^;]+);", re.sub(r"\.reg[^;]*;", "", ptx)):
        name, (target, *sources) = line[0], (one.strip() for one in line[1].split(","))
        given = [torch.tensor(int(one, 0)) if one[0].isdigit() else registers[one] for one in sources]
        registers[target] = _result(name, given) & _MASK
    return registers


def halves(register: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The low half and the high one, as numbers of 16 bits."""
    low, high = (_as(part, dtype) for part in (register, register >> 16))
    return low, high


def _as(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    bits = bits & 0xFFFF
    return torch.where(bits < 1 << 15, bits, bits - (1 << 16)).to(torch.int16).view(dtype)


def _result(name: str, given: list[torch.Tensor]) -> torch.Tensor:
    if name in _INTEGERS:
        return _INTEGERS[name](*given)
    operation, _, pair = name.split(".")
    dtype = _PAIRS[pair]
    made = []
    for parts in zip(*(halves(one, dtype) for one in given), strict=True):
        exact = _FLOATS[operation](*(part.double() for part in parts))
        if not bool(((exact.float() == exact) | exact.float().isinf()).all()):
            raise ValueError(f"{name}: rounded twice")
        made.append(exact.float().to(dtype).view(torch.int16).long() & 0xFFFF)
    return made[0] | made[1] << 16


def _sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """NaN where float64 does not have it: what is lost is found by subtractions (Knuth's two-sum)."""
    total = a + b
    of_b = total - a
    lost = (a - (total - of_b)) + (b - of_b)
    return torch.where(lost == 0, total, torch.nan)


def _looked_up(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: int) -> torch.Tensor:
    found = torch.zeros_like(a | b | c)
    for place in range(8):
        if table >> place & 1:
            chosen = [one if place & bit else ~one for one, bit in ((a, 4), (b, 2), (c, 1))]
            found = found | (chosen[0] & chosen[1] & chosen[2])
    return found


def _permuted(a: torch.Tensor, b: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    both, made = a | b << 32, torch.zeros_like(a | b | selector)
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = both >> 8 * (nibble & 7) & 255
        byte = torch.where(nibble > 7, (byte >> 7) * 255, byte)
        made = made | byte << 8 * place
    return made
