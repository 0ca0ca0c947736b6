"""What decides the bits of a GEMM."""

from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from ..common.dtypes import accumulate
from ..devices import reduction_of

_accumulate = partial(accumulate, operation="a matmul")
_CUDA_K_STEP = {torch.bfloat16: 16, torch.float16: 16, torch.float32: 1}
_CUDA_K_STEP_IN_TF32 = 8


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
    - On a CPU one accumulator an element adds K upwards, one element a step, by fused multiply-adds that begin with 0.
      A tree's slices are problems of their own there.
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
    """Elements of K that are added at once: 1 on a CPU, on a CUDA GPU by one instruction, in every tile. None for fp64
    there, where the compiler chooses it, and has one tile to do so for.
    """
    enable_fp_fusion: bool | None = None
    """Whether a product is added to the accumulator with one rounding: on a CPU, and on a CUDA GPU of fp32 and fp64,
    which have no instruction that adds several at once. What tensor cores do is theirs, and nothing else here is a
    product.
    """
    block_m: int | None = None
    block_n: int | None = None
    k_slices: int = 1

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
        return joined(n, k, dtype) if joined else _on_cpu(n, k, dtype)


@lru_cache(maxsize=4096)
def _on_cuda(n: int, k: int, dtype: torch.dtype, precision: str, k_slices: int) -> LinearReduction:
    k_step = _CUDA_K_STEP_IN_TF32 if precision == "tf32" else _CUDA_K_STEP.get(dtype)
    fuses = precision == "ieee" and dtype.itemsize >= 4
    acc = _accumulate(dtype)
    return LinearReduction(
        n, k, dtype, acc, precision=precision, k_step=k_step, enable_fp_fusion=fuses, k_slices=k_slices
    )


@lru_cache(maxsize=4096)
def _on_cpu(n: int, k: int, dtype: torch.dtype) -> LinearReduction:
    return LinearReduction(n, k, dtype, _accumulate(dtype), k_step=1, enable_fp_fusion=True)
