"""Products of codes on a GPU, in Triton, and of e4m3 on a Hopper in Gluon."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import triton

from ...errors import NotCovered
from ..common.gpu import Gpu
from ..common.launch import launch
from ..common.triton_rows import aligned
from ..linear.autotune import TunedSchedule
from ..linear.problem import ScaledProblem
from .library import library, problem_of
from .reduction import E4M3, ScaledLinearReduction
from .schedule import ScaledLinearSchedule, e4m3_schedule, scaled_linear_schedule
from .sm90_schedule import Sm90Schedule, serves, sm90_schedule
from .triton_kernels import scaled_linear_e4m3_kernel, scaled_linear_kernel


def scaled_linear(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: ScaledLinearReduction,
    schedule: ScaledLinearSchedule | Sm90Schedule | None = None,
    weight_is_constant: bool = False,
) -> torch.Tensor:
    """See the operation's package; codes [M, K] and scales [M], or [M, groups] of blocks. ``schedule`` is chosen by M,
    N and K if it is None.

    Raises:
        NotCovered: the sums of another tensor core.
    """
    (m, k), n = codes.shape, len(weight)
    gpu = Gpu.of(codes.device.index)
    is_e4m3 = reduction.codes == E4M3
    if is_e4m3 and reduction.mma != gpu.fp8_mma:
        raise NotCovered(
            f"sums of e4m3 of {reduction.mma} on {gpu.name}", f"it has those of {gpu.fp8_mma}", "use those of the GPU"
        )
    in_gluon = is_e4m3 and not triton.knobs.runtime.interpret
    if schedule is None and in_gluon and serves(codes, weight, weight_scale, gpu):
        if reduction.in_blocks and bias is None:
            found = library.product(codes, scale, weight, weight_scale, reduction.dtype)
            if found is not None:
                return found
        schedule = sm90_schedule(m, n, k, gpu)
    out = torch.empty(m, n, dtype=reduction.dtype, device=codes.device)
    if out.numel() == 0:
        return out
    if isinstance(schedule, Sm90Schedule):
        from . import sm90_kernel  # Gluon is needed for this kernel alone

        return sm90_kernel.scaled_gemm_sm90(codes, scale, weight, weight_scale, bias, out, schedule, weight_is_constant)
    choose = e4m3_schedule if is_e4m3 else scaled_linear_schedule
    tile = schedule or choose(m, n, gpu)
    of_x = scale.stride() if reduction.in_blocks else (0, 0)
    operands = [
        aligned(codes),
        scale if reduction.in_blocks else aligned(scale),
        *(of_x if is_e4m3 else ()),
        *(None if one is None else aligned(one) for one in (weight, weight_scale, bias)),
    ]
    constants = {"IN_BLOCKS": reduction.in_blocks, "SWAP_AB": tile.swap_ab} if is_e4m3 else {}
    launch(
        scaled_linear_e4m3_kernel if is_e4m3 else scaled_linear_kernel,
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
        **constants,
    )
    return out


def mma_of(codes: torch.Tensor) -> str | None:
    """What adds products of e4m3 on the GPU of a tensor; None where nothing does."""
    return Gpu.of(codes.device.index).fp8_mma


def prepare(
    weight: torch.Tensor, dtype: torch.dtype, in_blocks: bool, has_bias: bool, max_m: int, sizes: Iterable[int]
) -> None:
    """See whether cuBLASLt has schedules with the same bits, on a Hopper; no tile here moves a bit."""
    problem = _problem_of(weight, dtype, in_blocks, has_bias)
    if problem is None:
        return
    (n, k), gpu = weight.shape, Gpu.of(weight.device.index)

    def own(
        codes: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        from . import sm90_kernel

        tile = sm90_schedule(len(codes), n, k, gpu)
        return sm90_kernel.scaled_gemm_sm90(codes, scale, weight, weight_scale, None, out, tile)

    library.prepare(problem, max_m, sizes, own)


class Serving(NamedTuple):
    """What multiplies codes with a weight."""

    tiles: str
    """The kernels here: in "Gluon" or "Triton"."""
    tuned: Mapping[int, TunedSchedule]
    """Where cuBLASLt was compared with them, by the last M of each range."""
    by_deep_gemm: tuple[int, ...]
    """Numbers of rows that are DeepGEMM's, which was compared with them there."""


def serving(
    weight: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype, in_blocks: bool, has_bias: bool
) -> Serving:
    """What multiplies with a weight [N, K] for which schedules have been looked for."""
    in_gluon = weight.dtype == E4M3 and serves(weight[:1], weight, weight_scale, Gpu.of(weight.device.index))
    problem = _problem_of(weight, dtype, in_blocks, has_bias) if in_gluon else None
    return Serving("Gluon" if in_gluon else "Triton", *(({}, ()) if problem is None else library.found(problem)))


def _problem_of(weight: torch.Tensor, dtype: torch.dtype, in_blocks: bool, has_bias: bool) -> ScaledProblem | None:
    gpu = Gpu.of(weight.device.index)
    if weight.dtype != E4M3 or not in_blocks or not gpu.has_wgmma or not weight.is_contiguous():
        return None
    return problem_of(*weight.shape, dtype, weight.device, has_bias)
