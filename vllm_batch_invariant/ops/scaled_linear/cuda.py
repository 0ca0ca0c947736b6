"""Products of codes on a GPU, in Triton."""

import torch

from ..common.gpu import Gpu
from ..common.launch import launch
from ..common.triton_rows import aligned
from .reduction import ScaledLinearReduction
from .schedule import ScaledLinearSchedule, scaled_linear_schedule
from .triton_kernels import scaled_linear_kernel


def scaled_linear(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: ScaledLinearReduction,
    schedule: ScaledLinearSchedule | None = None,
) -> torch.Tensor:
    """See the operation's package; codes [M, K] and scales [M]. ``schedule`` is chosen by M and N if it is None."""
    (m, k), n = codes.shape, len(weight)
    out = torch.empty(m, n, dtype=reduction.dtype, device=codes.device)
    if out.numel() == 0:
        return out
    tile = schedule or scaled_linear_schedule(m, n, Gpu.of(codes.device.index))
    operands = [None if one is None else aligned(one) for one in (codes, scale, weight, weight_scale, bias)]
    launch(
        scaled_linear_kernel,
        -(-m // tile.block_m) * -(-n // tile.block_n),
        (*operands, out, m, n, k),
        on=out,
        HAS_BIAS=bias is not None,
        EVEN_K=k % tile.block_k == 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def prepare(weight: torch.Tensor) -> None:
    """Nothing has to be found out: no tile moves a bit."""
