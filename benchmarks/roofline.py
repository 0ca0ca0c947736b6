"""What the GPU can do at best, and how long a GEMM must take at least."""

from dataclasses import dataclass, replace

import torch

from benchmarks.spread import Spread
from vllm_batch_invariant.ops.common.graph_timer import GraphTimer

_COPY_BYTES = 2 << 30
_COPY_MICROSECONDS = 1000.0
_GEMM_SIDE = 8192
_GEMM_MICROSECONDS = 1500.0
_REPLAYS = 7
_WARM_UP_GEMMS = 100
"""Takes an idle GPU to its working clock."""


@dataclass(frozen=True)
class Work:
    """What an operation cannot avoid."""

    moved_bytes: int
    """Every input read once, every output written once."""
    operations: int
    """Floating-point additions and multiplications."""

    @classmethod
    def of_gemm(cls, m: int, n: int, k: int, element_size: int = 2, weight_size: int | None = None) -> "Work":
        """[M, K] @ [K, N], whose elements of the second have another size if one is given."""
        of_weight = n * k * (element_size if weight_size is None else weight_size)
        return cls((m * k + m * n) * element_size + of_weight, 2 * m * n * k)


@dataclass(frozen=True)
class Ceilings:
    """The rates that a GPU reaches on the kindest work."""

    bytes_per_microsecond: float
    operations_per_microsecond: float

    def with_arithmetic(self, speed: int) -> "Ceilings":
        """Of tensor cores that are so many times as fast as those measured."""
        return replace(self, operations_per_microsecond=speed * self.operations_per_microsecond)

    def bound_by_memory(self, work: Work) -> bool:
        """Whether moving the bytes takes longer than the arithmetic."""
        return work.moved_bytes / self.bytes_per_microsecond > work.operations / self.operations_per_microsecond

    def floor(self, work: Work) -> float:
        """The microseconds that ``work`` takes at these rates."""
        return max(work.moved_bytes / self.bytes_per_microsecond, work.operations / self.operations_per_microsecond)

    def __str__(self) -> str:
        return (
            f"copy {self.bytes_per_microsecond / 1e3:.0f} GB/s (read and written), "
            f"{_GEMM_SIDE}^3 bf16 GEMM {self.operations_per_microsecond / 1e6:.0f} TFLOP/s"
        )


def measure_ceilings(timer: GraphTimer) -> Ceilings:
    """Measure a large copy, by a kernel, and a large GEMM of random bf16 matrices on the current GPU."""
    a, b = (torch.randn(_GEMM_SIDE, _GEMM_SIDE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for _ in range(_WARM_UP_GEMMS):
        torch.mm(a, b)
    [gemm] = timer.time([[lambda: torch.mm(a, b)]], _GEMM_MICROSECONDS, _REPLAYS)
    source = torch.randn(_COPY_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    [copy] = timer.time([[lambda: torch.neg(source, out=target)]], _COPY_MICROSECONDS, _REPLAYS)
    return Ceilings(2 * _COPY_BYTES / Spread.of(copy).p50, 2 * _GEMM_SIDE**3 / Spread.of(gemm).p50)
