"""Products of codes of eight bits with scales: of int8 with the same bits on every device, of e4m3 with those of a kind
of tensor core.
"""

from collections.abc import Iterable

import torch

from ..dispatch import implementation, module_for
from .reduction import E4M3, EXACT, GROUP, LARGEST_K, WGMMA, ScaledLinearReduction

__all__ = ["E4M3", "EXACT", "GROUP", "LARGEST_K", "WGMMA", "ScaledLinearReduction", "prepare", "scaled_linear"]


def scaled_linear(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    mma: str | None = None,
    weight_is_constant: bool = False,
) -> torch.Tensor:
    """``(codes * scale) @ (weight * weight_scale).T + bias`` as :class:`ScaledLinearReduction` says; the dtype of the
    codes picks the arithmetic.

    Args:
        codes: [..., K] int8 or float8_e4m3fn, such as :func:`..quantise.quantise` gives.
        scale: fp32, of each row [...], or with e4m3 in blocks of 128 elements of each [..., ceil(K / 128)].
        weight: [N, K] of the codes' dtype.
        weight_scale: fp32, of each row of the weight [N], or of its blocks [ceil(N / 128), ceil(K / 128)].
        bias: [N] of ``dtype``, or None.
        dtype: of the result: fp32, bf16 or fp16.
        mma: what adds products of e4m3; None: what does on this device. A CPU also has the sums of a Hopper,
            :data:`WGMMA`, slowly.
        weight_is_constant: whether the weight is as it was when a launch last waited for all before it: then a GPU may
            read it while kernels before this one run.

    Returns:
        [..., N]. A row's bits depend on that row, its scales, the weight, its scales and the bias.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotCovered: more than :data:`LARGEST_K` elements of K in int8, or a dtype, a device or an ``mma`` without an
            implementation.
    """
    n, k = weight.shape
    in_blocks = codes.dtype == E4M3 and weight_scale.dim() == 2
    rows, groups = codes.shape[:-1], -(-k // GROUP)
    of_rows, of_weight = ((*rows, groups), (-(-n // GROUP), groups)) if in_blocks else (rows, (n,))
    shapes = codes.shape[-1] == k and scale.shape == of_rows and weight_scale.shape == of_weight
    if not shapes or (bias is not None and bias.shape != (n,)):
        given = [list(one.shape) for one in (codes, scale, weight, weight_scale, bias) if one is not None]
        wanted = "[..., K], [...], [N, K], [N]"
        if codes.dtype == E4M3:
            wanted += f" (or [..., K / {GROUP}] and [N / {GROUP}, K / {GROUP}] for the scales)"
        raise ValueError(f"scaled_linear takes {wanted} and a bias [N], got {given}")
    dtypes = [codes.dtype, weight.dtype, scale.dtype, weight_scale.dtype, dtype if bias is None else bias.dtype]
    of_codes = E4M3 if codes.dtype == E4M3 else torch.int8
    if dtypes != [of_codes, of_codes, torch.float32, torch.float32, dtype]:
        name = "e4m3" if of_codes == E4M3 else "int8"
        raise ValueError(f"scaled_linear takes {name}, {name}, fp32, fp32 and a bias of {dtype}, got {dtypes}")
    served = implementation("scaled_linear", codes, scale, weight, weight_scale, bias)
    reduction = ScaledLinearReduction.of(k, dtype, of_codes, in_blocks, mma or served.mma_of(codes))
    count = rows.numel()
    scales = scale.reshape(count, groups) if in_blocks else scale.reshape(count)
    out = served.scaled_linear(
        codes.reshape(count, k),
        scales,
        weight,
        weight_scale,
        bias,
        reduction,
        weight_is_constant=weight_is_constant,
    )
    return out.view(*rows, n)


def prepare(
    weight: torch.Tensor,
    dtype: torch.dtype,
    in_blocks: bool = False,
    has_bias: bool = False,
    max_m: int = 0,
    sizes: Iterable[int] = (),
) -> None:
    """See, when a weight [N, K] of codes is loaded, that it can be multiplied with results of ``dtype``, and what
    multiplies it on this machine. Errors as of :func:`scaled_linear`.

    Args:
        weight: of codes.
        dtype: of results.
        in_blocks: whether it has scales of blocks.
        has_bias: whether a bias is added.
        max_m: the most rows of codes, for which a GPU may find and verify a faster schedule; 0: it looks for none.
        sizes: numbers of rows that are verified in any case, such as those of CUDA graphs.
    """
    served = module_for("scaled_linear", weight.device.type)
    ScaledLinearReduction.of(weight.shape[1], dtype, weight.dtype, mma=served.mma_of(weight))
    served.prepare(weight, dtype, in_blocks, has_bias, max_m, sizes)
