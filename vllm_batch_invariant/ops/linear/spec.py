"""What a matmul computes, whatever its operands are: the format of its weight, the order of K and what follows."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch

from ..common.cancelling import cancelling, cancelling_gated
from ..dispatch import module_for
from ..formats import FORMATS, PLAIN, Format


@dataclass(frozen=True)
class Epilogue:
    """What is made of a product [M, N]."""

    name: str
    has_bias: bool = False
    """Whether a bias [N] is added to the accumulator, by every kernel."""
    gated: bool = False
    """Whether the product is [gate, up], of which the result has half the columns."""
    operation: tuple[str, str] | None = None
    """In the table of operations, and its function: makes the result of a rounded product; None: that is it."""
    definition: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.double
    """Makes it in float64."""
    cancelling: Callable[..., tuple[torch.Tensor, torch.Tensor]] = cancelling
    """Draws operands whose results show the order of a sum."""

    def columns(self, n: int) -> int:
        """Of the result."""
        return n // 2 if self.gated else n

    def behind(self, device_type: str, n: int) -> Callable[..., torch.Tensor] | None:
        """What makes the result of a rounded product where the kernel that multiplies does not; None: nothing.

        Raises:
            ValueError: a gated product has no halves.
        """
        if self.operation is None:
            return None
        if self.gated and n % 2:
            raise ValueError(f"gated_linear takes x [..., K] and weight [2 * N, K], got a weight with {n} rows")
        operation, function = self.operation
        return getattr(module_for(operation, device_type), function)


def _swiglu(product: torch.Tensor) -> torch.Tensor:
    gate, up = product.double().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


NONE = Epilogue("")
BIAS = Epilogue("bias", has_bias=True)
SWIGLU = Epilogue(
    "gated", gated=True, operation=("silu", "silu_and_mul"), definition=_swiglu, cancelling=cancelling_gated
)
EPILOGUES = NONE, BIAS, SWIGLU


@dataclass(frozen=True)
class MatmulSpec:
    """What is computed of x [M, K] and a weight that stands for a matrix [N, K]. K is added upwards as a whole, or in
    slices, each rounded and added to its neighbour, and their sums to their neighbours, until there is one.
    """

    epilogue: Epilogue = NONE
    k_slices: int = 1
    """Parts of K of equal length that are added as a tree: a power of two."""
    b_format: Format = PLAIN
    """Of the weight."""
    name: str = field(init=False, compare=False)
    """Tells it from every other one."""
    cuts_k: bool = field(init=False, compare=False)
    """Whether not every K will do."""

    def __post_init__(self) -> None:
        in_slices = f"in {self.k_slices} slices" if self.k_slices > 1 else ""
        object.__setattr__(self, "name", " ".join(filter(None, (self.b_format.name, self.epilogue.name, in_slices))))
        object.__setattr__(self, "cuts_k", self.k_slices * self.b_format.group > 1)
        if NAMED.setdefault(self.name, self) != self:
            raise ValueError(f"two kinds of matmuls are called {self.name!r}")

    def __str__(self) -> str:
        return self.name or "a product"

    def check_k(self, k: int) -> None:
        """Refuse what cannot be cut.

        Raises:
            ValueError: K is no whole number of slices, or a slice no whole number of groups.
        """
        if self.k_slices & (self.k_slices - 1) or k % self.k_slices:
            raise ValueError(f"a tree has a power of two of slices of equal length, got {self.k_slices} of K = {k}")
        if k // self.k_slices % self.b_format.group:
            raise ValueError(f"{self.name} takes groups of {self.b_format.group} elements of K, got K = {k}")


NAMED: dict[str, MatmulSpec] = {}
"""Every one that this process has made, by its name, which an operator of PyTorch's can be given."""
SPECS = tuple(MatmulSpec(epilogue, 1, b_format) for b_format in FORMATS for epilogue in EPILOGUES)
"""Every one of a chain of K."""
PRODUCT, BIASED, GATED = SPECS[:3]


@cache
def spec_of(has_bias: bool, k_slices: int = 1, b_format: Format = PLAIN) -> MatmulSpec:
    """Of a linear layer; the bias of one in slices is added to their sum, by the caller."""
    return MatmulSpec(BIAS if has_bias and k_slices == 1 else NONE, k_slices, b_format)
