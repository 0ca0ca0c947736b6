"""RMSNorm on a GPU, in Triton: a program has one row, or several short ones.

y = x * rsqrt(mean(x[:variance_size]**2) + eps) * weight, of x + residual where there is one
"""

import torch
import triton
import triton.language as tl

from ...errors import NotCovered
from ..common.dependent_launch import ask_for, let_next_begin, wait_for_kernel_before
from ..common.launch import launch
from ..common.triton_rows import ALIGNMENT, aligned, row_sums
from ..quantise import cuda as quantising
from ..quantise.reduction import QuantiseReduction
from ..quantise.triton_kernels import store_codes
from .reduction import NormReduction
from .triton_kernels import function_of_gate, load_weight, norm_of, normalised, rstd_of, weighted

DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
ADDS_ONE = True
"""The norm takes weights as Gemma's are, and adds 1 where it loads them."""
_MOST_ROWS = 2**31 - 1 - 2048
"""The kernel counts the rows of its last program, too, in 32 bits."""


@triton.jit
def _load_rows(x_ptr, residual_ptr, x_starts, residual_starts, offs, mask, HAS_RESIDUAL: tl.constexpr):
    """x + residual of some rows, unrounded: [rows_per_program, block] fp32."""
    x = tl.load(x_ptr + x_starts[:, None] + offs[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_offs = residual_starts[:, None] + offs[None, :]
        x += tl.load(residual_ptr + residual_offs, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _row_starts(row, inner_size, stride_outer, stride_inner, STRIDE_UNIT: tl.constexpr):
    """Where rows start whose two indices have a stride each, in units: [rows_per_program] int64."""
    outer, inner = (row // inner_size).to(tl.int64), (row % inner_size).to(tl.int64)
    return (outer * stride_outer + inner * stride_inner) * STRIDE_UNIT


# Two strided tensors need 18 parameters: a kernel takes no structure of pointers and strides.
@triton.jit(
    do_not_specialize=[
        "scale_rows",
        "num_rows",
        "x_inner_size",
        "stride_x_outer",
        "stride_x_inner",
        "residual_inner_size",
        "stride_residual_outer",
        "stride_residual_inner",
    ]
)
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    codes_ptr,
    scale_ptr,
    scale_rows,
    num_rows,
    x_inner_size,
    stride_x_outer,
    stride_x_inner,
    residual_inner_size,
    stride_residual_outer,
    stride_residual_inner,
    eps,
    VARIANCE_SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    GROUP: tl.constexpr,
    QUANTISE: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    let_next_begin(OVERLAPS)
    if HAS_WEIGHT:
        ask_for(weight_ptr, NORM.length, OVERLAPS)
    wait_for_kernel_before(OVERLAPS)
    row = tl.program_id(0) * NORM.rows_per_program + tl.arange(0, NORM.rows_per_program)
    row_mask = row[:, None] < num_rows  # [rows_per_program, 1]
    x_starts = _row_starts(row, x_inner_size, stride_x_outer, stride_x_inner, NORM.stride_unit)
    residual_starts = x_starts
    if HAS_RESIDUAL:
        residual_starts = _row_starts(
            row, residual_inner_size, stride_residual_outer, stride_residual_inner, NORM.stride_unit
        )
    out_starts = row.to(tl.int64)[:, None] * NORM.length
    # Where the tile stays in registers, every load is on its way before the first one is waited for.
    if NORM.length <= NORM.block:
        offs = tl.arange(0, NORM.block)
        mask = row_mask & (offs < NORM.length)[None, :]
        weight = None
        if HAS_WEIGHT:
            weight = load_weight(weight_ptr, offs, mask, ADDS_ONE)  # [rows_per_program, block]
        x = _load_rows(x_ptr, residual_ptr, x_starts, residual_starts, offs, mask, HAS_RESIDUAL)
        y = norm_of(
            x, weight, offs, out_ptr, residual_out_ptr, out_starts, offs[None, :], mask, eps,
            VARIANCE_SIZE, HAS_RESIDUAL, HAS_WEIGHT, NORM,
        )  # fmt: skip
        if QUANTISE is not None:
            store_codes(y, row, row < num_rows, 0, codes_ptr, scale_ptr, scale_rows, NORM.length, GROUP, QUANTISE)
    else:
        # Triton 3.6 takes no tuple of plain numbers.
        acc = tl.zeros((tl.constexpr(NORM.rows_per_program), tl.constexpr(NORM.block)), tl.float32)
        for start in range(0, VARIANCE_SIZE, NORM.block):
            offs = start + tl.arange(0, NORM.block)
            mask = row_mask & (offs < VARIANCE_SIZE)[None, :]
            x = _load_rows(x_ptr, residual_ptr, x_starts, residual_starts, offs, mask, HAS_RESIDUAL)
            acc += x * x
        rstd = rstd_of(row_sums(acc, 32 * NORM.num_warps), VARIANCE_SIZE, eps)[:, None]
        for start in range(0, NORM.length, NORM.block):
            offs = start + tl.arange(0, NORM.block)
            mask = row_mask & (offs < NORM.length)[None, :]
            x = _load_rows(x_ptr, residual_ptr, x_starts, residual_starts, offs, mask, HAS_RESIDUAL)
            if HAS_RESIDUAL:
                tl.store(
                    residual_out_ptr + out_starts + offs[None, :], x.to(residual_out_ptr.dtype.element_ty), mask=mask
                )
            x *= rstd
            if HAS_WEIGHT:
                x = weighted(x, load_weight(weight_ptr, offs, mask, ADDS_ONE))
            tl.store(out_ptr + out_starts + offs[None, :], x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "x_inner_size",
        "stride_x_outer",
        "stride_x_inner",
        "gate_inner_size",
        "stride_gate_outer",
        "stride_gate_inner",
    ]
)
def _gated_rms_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    x_inner_size,
    stride_x_outer,
    stride_x_inner,
    gate_inner_size,
    stride_gate_outer,
    stride_gate_inner,
    eps,
    GATE: tl.constexpr,
    NORM_BEFORE_GATE: tl.constexpr,
    GROUPS: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_kernel_before(OVERLAPS)
    row = tl.program_id(0) * NORM.rows_per_program + tl.arange(0, NORM.rows_per_program)
    x_starts = _row_starts(row, x_inner_size, stride_x_outer, stride_x_inner, NORM.stride_unit)
    gate_starts = _row_starts(row, gate_inner_size, stride_gate_outer, stride_gate_inner, NORM.stride_unit)
    offs = tl.arange(0, NORM.block)
    mask = (row[:, None] < num_rows) & (offs < NORM.length)[None, :]
    if GROUPS == 1:
        weight = load_weight(weight_ptr, offs, mask).to(tl.float32)  # [rows_per_program, block]
    else:
        of_groups = weight_ptr + (row % GROUPS * NORM.length)[:, None] + offs[None, :]
        weight = tl.load(of_groups, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + gate_starts[:, None] + offs[None, :], mask=mask, other=0.0).to(tl.float32)
    x = _load_rows(x_ptr, x_ptr, x_starts, x_starts, offs, mask, False)
    if NORM_BEFORE_GATE:
        y = normalised(x, offs, eps, NORM.length, NORM) * weight * function_of_gate(gate, GATE)
    else:
        y = normalised(x * function_of_gate(gate, GATE), offs, eps, NORM.length, NORM) * weight
    out_starts = row.to(tl.int64)[:, None] * NORM.length
    tl.store(out_ptr + out_starts + offs[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


def _indexed(x: torch.Tensor, stride_unit: int) -> tuple[torch.Tensor, int, int, int]:
    """The tensor, or an aligned copy where the kernel cannot take it as it is, and how its rows are reached: the size
    of the inner row index, and the strides of both in units.
    """
    strides = x.stride()
    if strides[-1] == 1 and len(strides) in (2, 3) and x.data_ptr() % ALIGNMENT == 0:
        outer, inner, inner_size = (strides[0], 0, 1) if len(strides) == 2 else (*strides[:2], x.shape[1])
        if outer % stride_unit == 0 and inner % stride_unit == 0:
            return x, inner_size, outer // stride_unit, inner // stride_unit
    return aligned(x), 1, x.shape[-1] // stride_unit, 0


def quantised(out: torch.Tensor, norm: NormReduction, codes: QuantiseReduction | None) -> quantising.Quantised:
    """What a kernel writes beside ``out`` [..., N], which from then on is kept with it; nothing without ``codes``, and
    where a program has no whole row, or no whole groups, in its tile.
    """
    if codes is None or codes.group is None or norm.length > norm.block or norm.block % codes.group:
        return quantising.NOT_QUANTISED
    return quantising.quantised(out, codes)


def _checked_rows(x: torch.Tensor, *others: torch.Tensor | None) -> int:
    """The number of rows of x, which is refused like dtypes that the kernels do not have."""
    for tensor in (x, *others):
        if tensor is not None and tensor.dtype not in DTYPES:
            raise NotCovered(f"RMSNorm in {tensor.dtype}", "its accumulator is fp32", "use fp32, bf16 or fp16")
    num_rows = x.numel() // x.shape[-1]
    if num_rows > _MOST_ROWS:
        raise NotCovered(f"RMSNorm of {num_rows} rows", "the kernel counts them in 32 bits", "normalise them in parts")
    return num_rows


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    variance_size: int | None,
    adds_one: bool = False,
    codes: QuantiseReduction | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package. No copy is made of tensors [rows, N] or [rows, heads, N] that are packed along N and
    start every row at a multiple of 16 bytes. ``out`` is memory for the result, packed.

    With ``codes`` the kernel also quantises the normalised rows, and keeps that with them (:func:`..quantise.kept`), if
    a program has a whole row and its groups in a tile.
    """
    length, num_rows = x.shape[-1], _checked_rows(x, weight, residual)
    reduction = NormReduction.of_device("cuda", length, x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    residual_out = None if residual is None else torch.empty_like(out)
    if num_rows:
        x, *x_rows = _indexed(x, reduction.stride_unit)
        residual_rows, made = [1, 0, 0], quantised(out, reduction, codes)
        if residual is not None:
            residual, *residual_rows = _indexed(residual, reduction.stride_unit)
        launch(
            _rms_norm_kernel,
            -(-num_rows // reduction.rows_per_program),
            (
                x,
                residual,
                None if weight is None else aligned(weight),
                out,
                residual_out,
                *made.operands,
                num_rows,
                *x_rows,
                *residual_rows,
                eps,
            ),
            on=x,
            waits=True,
            VARIANCE_SIZE=variance_size or length,
            HAS_RESIDUAL=residual is not None,
            HAS_WEIGHT=weight is not None,
            ADDS_ONE=adds_one,
            **made.constants,
            **reduction.options,
        )
    return out if residual_out is None else (out, residual_out)


def gated_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, gate: torch.Tensor, activation: str, norm_before_gate: bool
) -> torch.Tensor:
    """See the operation's package. No copy is made of tensors as :func:`rms_norm` takes them.

    Raises:
        NotCovered: rows longer than a program holds.
    """
    length, num_rows = x.shape[-1], _checked_rows(x, weight, gate)
    reduction = NormReduction.of_device("cuda", length, x.dtype, False, activation, norm_before_gate)
    if length > reduction.block:
        raise NotCovered(
            f"RMSNorm with a gate of rows of {length}",
            f"a program holds {reduction.block} elements of one",
            "normalise heads or groups",
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows:
        x, *x_rows = _indexed(x, reduction.stride_unit)
        gate, *gate_rows = _indexed(gate, reduction.stride_unit)
        launch(
            _gated_rms_norm_kernel,
            -(-num_rows // reduction.rows_per_program),
            (x, gate, aligned(weight), out, num_rows, *x_rows, *gate_rows, eps),
            on=x,
            waits=True,
            GATE=reduction.gate,
            NORM_BEFORE_GATE=reduction.norm_before_gate,
            GROUPS=1 if weight.dim() == 1 else len(weight),
            **reduction.options,
        )
    return out
