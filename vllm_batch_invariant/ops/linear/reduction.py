"""What decides the bits of a GEMM."""

from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from ..common.dtypes import accumulate
from ..devices import reduction_of

_accumulate = partial(accumulate, operation="a matmul")
_CUDA_K_STEP = {torch.bfloat16: 16, torch.float16: 16, torch.float32: 1}
_CUDA_K_STEP_IN_TF32 = 8
_CPU_BLOCK_M = 32
_CPU_ALIGNMENT = 64


@dataclass(frozen=True)
class LinearReduction:
    """The reduction of ``x @ weight.T + bias`` on a device: a function of the weight alone, never of the rows of x.

    Operands are converted exactly to ``accumulate``, summed over K in one order, the bias is added in ``accumulate``,
    and the result is rounded once to ``dtype``. A field is None where it decides nothing on the device.

    - On a CUDA GPU one accumulator an element adds K upwards in steps of ``k_step``, and operands of fp32 are
      multiplied in ``precision``; or one for each of ``k_slices`` equal parts of K, which are rounded to ``dtype`` and
      added as a tree whose nodes are rounded, too. That this has the same bits for every tile and instruction is a
      measurement (docs/contract.md) which agrees with models of the tensor core: Khattak and Mikaitis, "Accurate models
      of NVIDIA tensor cores" (arXiv:2512.07004).
    - On a CPU the order is what the BLAS does, running on ``threads``, for ``block_m`` rows and ``columns``, at
      addresses that are multiples of ``alignment``.
    """

    n: int
    k: int
    dtype: torch.dtype
    accumulate: torch.dtype
    precision: str | None = None
    """How fp32 is multiplied: "tf32" where PyTorch's setting allows it (``torch.set_float32_matmul_precision``,
    ``torch.backends.cuda.matmul.fp32_precision``), else "ieee". Other dtypes are multiplied exactly.
    """
    k_step: int | None = None
    """Elements of K that are added at once: on a CUDA GPU by one instruction, in every tile. None for fp64 there, where
    the compiler chooses it, and has one tile to do so for.
    """
    enable_fp_fusion: bool | None = None
    """Whether a product is added to the accumulator with one rounding: on a CUDA GPU of fp32 and fp64, which have no
    instruction that adds several at once. What tensor cores do is theirs, and nothing else here is a product.
    """
    block_m: int | None = None
    block_n: int | None = None
    alignment: int | None = None
    """Bytes."""
    threads: int | None = None
    k_slices: int = 1
    """On a CPU a tree's slices are problems of their own."""

    @property
    def columns(self) -> int:
        """Of the matrix [K, columns] that a CPU multiplies by, each row of which is aligned: N, and zeros. For other
        numbers MKL gives a row other bits at other places of a tile on a Zen 4 (N of 5, 6, 7 and 9 to 11 in fp32, most
        odd N in fp64).
        """
        each = self.alignment // self.accumulate.itemsize
        return -(-self.n // each) * each

    @classmethod
    def of_device(cls, device_type: str, n: int, k: int, dtype: torch.dtype, k_slices: int = 1) -> "LinearReduction":
        """The reduction in force on a device for a weight [N, K]; ``k_slices`` on a CUDA GPU.

        Raises:
            NotCovered: a dtype without a reduction.
        """
        if device_type == "cuda":
            tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
            return _on_cuda(n, k, dtype, "tf32" if tf32 else "ieee", k_slices)
        joined = reduction_of("linear", device_type)
        return joined(n, k, dtype) if joined else _on_cpu(n, k, dtype, torch.get_num_threads())


@lru_cache(maxsize=4096)
def _on_cuda(n: int, k: int, dtype: torch.dtype, precision: str, k_slices: int) -> LinearReduction:
    k_step = _CUDA_K_STEP_IN_TF32 if precision == "tf32" else _CUDA_K_STEP.get(dtype)
    fuses = precision == "ieee" and dtype.itemsize >= 4
    acc = _accumulate(dtype)
    return LinearReduction(
        n, k, dtype, acc, precision=precision, k_step=k_step, enable_fp_fusion=fuses, k_slices=k_slices
    )


@lru_cache(maxsize=4096)
def _on_cpu(n: int, k: int, dtype: torch.dtype, threads: int) -> LinearReduction:
    return LinearReduction(
        n, k, dtype, _accumulate(dtype), block_m=_CPU_BLOCK_M, alignment=_CPU_ALIGNMENT, threads=threads
    )
