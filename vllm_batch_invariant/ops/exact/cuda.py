"""Exact arithmetic on a GPU, in Triton: kernels whose bits are the definition's, made of instructions that IEEE 754 and
integer arithmetic define.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from ...errors import NotCovered
from ..attention.params import PagedAttention, PagedCache
from ..attention.plan import Kernels, Plan, Planner
from ..attention.reduction import AttentionReduction
from ..attention.shapes import AttentionShape, Schedule
from ..common.dependent_launch import LaunchSchedule
from ..common.gpu import Gpu
from ..common.launch import launch
from ..common.rows import normalise_dims, rows_back
from ..common.triton_rows import ALIGNMENT, aligned, aligned_rows
from ..top_k_top_p.cuda import top_k_top_p as top_k_top_p_of_floats
from . import triton_kernels
from .definition import KEY_TILE, LOG2_E, MEAN_BITS, SPLITS, THREE_DIGITS, TWO_DIGITS, segments
from .limits import LEAVE_IT, check_k, check_whole_rows
from .schedule import HOPPER_SCHEDULES, HopperSchedule, hopper_schedule
from .triton_attention import exact_attention_kernel
from .triton_cache import write_cache_kernel
from .triton_linear import linear_kernel

SERVES = ("sliding_window", "logits_soft_cap")
"""Of attention: what the definition has."""
LONGEST_ROW = 16_384
"""Elements of a row whose squares one program adds."""
MASK_BITS = 64
"""Bits that say where a segment has third digits."""
_NORM_TILE = 2048
_CHUNK = 8192
"""Logits of a program."""


@dataclass(frozen=True)
class QuantizeSchedule:
    """How a program puts a part of a row on its grid.

    Attributes:
        block: elements at a time.
        mask_step: elements of a bit of the mask, a power of two; a part has no more than 64 bits.
        num_warps: of the program.
    """

    block: int
    mask_step: int
    num_warps: int

    @classmethod
    def of(cls, length: int) -> "QuantizeSchedule":
        """For parts of ``length`` elements."""
        block = min(triton.next_power_of_2(length), 4096)
        mask_step = max(128, triton.next_power_of_2(-(-length // MASK_BITS)))
        return cls(block, min(mask_step, block), 4 if block <= 2048 else 8)


@dataclass(frozen=True)
class LinearSchedule:
    """A tile of a product in Triton.

    Attributes:
        block_m: rows of x.
        block_n: rows of the weight.
        block_k: elements of K in one step, a power of two of at most 128.
        num_warps: of a program.
        num_stages: of the loop over K.
        int8: digits are multiplied by the tensor cores' int8 instructions; else by those of fp16, where int8 is slow.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    int8: bool = True


_FEW_ROWS = LinearSchedule(16, 32, 128, 4, 4)
_SOME_ROWS = LinearSchedule(64, 64, 32, 8, 3)
_MANY_ROWS = LinearSchedule(128, 64, 64, 8, 3)


def linear_schedules(parts: int) -> tuple[LinearSchedule, ...]:
    """The tiles for a weight of so many segments, of ascending size: the tree of segments takes registers."""
    return (_FEW_ROWS, _SOME_ROWS, _MANY_ROWS) if parts == 1 else (_FEW_ROWS, _SOME_ROWS)


def linear_schedule(m: int, parts: int) -> LinearSchedule:
    """The tile in Triton for so many rows of x."""
    schedules = linear_schedules(parts)
    return schedules[0] if m <= 32 else schedules[1] if m <= 512 else schedules[-1]


def _by_wgmma(device: torch.device, k: int, parts: int) -> bool:
    """Whether such products on a device are :mod:`.sm90_linear`'s."""
    if device.type != "cuda" or not Gpu.of(device.index).has_wgmma:
        return False
    from .sm90_linear import covers  # Gluon is of no use elsewhere

    return covers(k, parts)


@dataclass(frozen=True)
class RowSchedule:
    """How many rows a program has, of how many elements each; powers of two."""

    rows_per_program: int
    block: int
    num_warps: int

    @classmethod
    def of(cls, length: int) -> "RowSchedule":
        """For rows of ``length`` elements."""
        block = triton.next_power_of_2(length)
        return cls(max(1, _NORM_TILE // block), block, 4 if block <= 2048 else 8)


@dataclass(frozen=True)
class RotateSchedule:
    """Heads of a token that a program turns, and elements of half a head; powers of two."""

    heads_per_program: int
    block: int


@dataclass(frozen=True)
class VocabularySchedule:
    """How a row of logits is shared out: chunks of ``block`` logits, and the power of two that holds their number."""

    num_chunks: int
    padded_chunks: int
    block: int
    num_warps: int = 8

    @classmethod
    def of(cls, length: int) -> "VocabularySchedule":
        """For rows of ``length`` logits."""
        chunks = -(-length // _CHUNK)
        return cls(chunks, triton.next_power_of_2(chunks), min(_CHUNK, triton.next_power_of_2(length)))


@dataclass(frozen=True)
class ExactWeight:
    """A weight on its rows' grids: integers w1 * 2**8 + w0.

    Attributes:
        digits: [2, N, K] int8, w1 and w0; K in segments one after the other.
        scale: [N, segments] fp32, powers of two.
    """

    digits: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class Activations:
    """Rows of activations on their grids: integers x2 * 2**16 + x1 * 2**8 + x0.

    Attributes:
        digits: [2, M, K] int8, x1 and x0.
        third: [M, K] int8, x2. None where two digits are all.
        high_digit_mask: [M, segments] int64, bit b for an x2 among the elements b * mask_step and on of the segment;
            or None.
        scale: [M, segments] fp32.
    """

    digits: torch.Tensor
    third: torch.Tensor | None
    high_digit_mask: torch.Tensor | None
    scale: torch.Tensor


def _packed_rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, N], each packed, the first aligned."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 and rows.data_ptr() % ALIGNMENT == 0 else aligned(rows)


def quantize(x: torch.Tensor, parts: int, activations: bool) -> Activations:
    """Put rows [M, K], packed along K, in segments on grids as :func:`.definition.activations` or, without third digits
    and the mask, as :func:`.definition.two_digits`.
    """
    rows, k = x.shape
    schedule = QuantizeSchedule.of(k // parts)
    digits = torch.empty(2, rows, k, dtype=torch.int8, device=x.device)
    third = torch.empty(rows, k, dtype=torch.int8, device=x.device) if activations else None
    high_digit_mask = torch.empty(rows, parts, dtype=torch.int64, device=x.device) if activations else None
    scale = torch.empty(rows, parts, dtype=torch.float32, device=x.device)
    if rows:
        launch(
            triton_kernels.quantize_kernel,
            rows * parts,
            (x, digits, third, high_digit_mask, scale, rows, x.stride(0)),
            on=x,
            waits=True,
            PARTS=parts,
            LENGTH=k // parts,
            ACTIVATIONS=activations,
            BLOCK=schedule.block,
            MASK_STEP=schedule.mask_step,
            num_warps=schedule.num_warps,
        )
    return Activations(digits, third, high_digit_mask, scale)


def prepare(weight: torch.Tensor, parts: int = 1) -> ExactWeight:
    """Put a weight [N, K] on its rows' grids, in ``parts`` equal segments of K (:func:`.definition.segments`).

    Raises:
        NotCovered: a segment of more than :data:`.definition.LARGEST_K`.
    """
    check_k(weight.shape[1] // parts)
    rows = quantize(_packed_rows(weight), parts, activations=False)
    return ExactWeight(rows.digits, rows.scale)


def linear(x: torch.Tensor, weight: ExactWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias as :func:`.definition.linear`: [..., K] bf16 to [..., N] bf16; bias [N] bf16."""
    (_, n, k), parts = weight.digits.shape, weight.scale.shape[1]
    rows = quantize(_packed_rows(x), parts, activations=True)
    m = len(rows.scale)
    if _by_wgmma(x.device, k, parts):
        schedule = hopper_schedule(m, n, parts, Gpu.of(x.device.index).num_sms)
    else:
        schedule = linear_schedule(m, parts)
    return product(rows, weight, bias, schedule, overlaps=True).view(*x.shape[:-1], n)


def product(
    x: Activations,
    weight: ExactWeight,
    bias: torch.Tensor | None,
    schedule: LinearSchedule | HopperSchedule,
    overlaps: bool = False,
) -> torch.Tensor:
    """:func:`linear` of activations on their grids, [M, N] bf16.

    Args:
        x: the activations.
        weight: the weight.
        bias: [N], or None.
        schedule: the tile.
        overlaps: on a Hopper, whether weights are read while the kernel that was launched last still runs. What wrote
            them must have ended before that one began.

    Raises:
        ValueError: rows of another length, or in other segments, than the weight's.
    """
    (_, n, k), (m, parts) = weight.digits.shape, x.scale.shape
    if (x.digits.shape[2], parts) != (k, weight.scale.shape[1]):
        raise ValueError(
            f"rows of {x.digits.shape[2]} in {parts} segments do not fit a weight of {k} in {weight.scale.shape[1]}"
        )
    out = torch.empty(m, n, dtype=torch.bfloat16, device=x.digits.device)
    bias, mask_step = None if bias is None else aligned(bias), QuantizeSchedule.of(k // parts).mask_step
    operands = x.digits, x.third, x.high_digit_mask, x.scale, weight.digits, weight.scale, bias, out
    if out.numel() and isinstance(schedule, HopperSchedule):
        from .sm90_linear import linear_sm90

        linear_sm90(*operands, mask_step, schedule, LaunchSchedule(overlaps))
    elif out.numel():
        launch(
            linear_kernel,
            -(-m // schedule.block_m) * -(-n // schedule.block_n),
            (*operands, m, n, k),
            on=out,
            PARTS=parts,
            LENGTH=k // parts,
            HAS_BIAS=bias is not None,
            EVEN_K=k // parts % schedule.block_k == 0,
            MASK_STEP=mask_step,
            INT8=schedule.int8,
            BLOCK_M=schedule.block_m,
            BLOCK_N=schedule.block_n,
            BLOCK_K=schedule.block_k,
            num_warps=schedule.num_warps,
            num_stages=schedule.num_stages,
        )
    return out


def _strided(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """The tensor, or an aligned copy, and how its rows are reached: the size of the inner row index, both strides."""
    if x.stride(-1) == 1 and x.dim() in (2, 3) and x.data_ptr() % ALIGNMENT == 0:
        return (x, 1, x.stride(0), 0) if x.dim() == 2 else (x, x.shape[1], *x.stride()[:2])
    return aligned(x), 1, x.shape[-1], 0


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    variance_size: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As :func:`.definition.rms_norm`, of [..., N] bf16; with a residual, also x + residual in bf16. No copy is made of
    [rows, N] or [rows, heads, N] that are packed along N.

    Raises:
        NotCovered: another ``variance_size`` than N, or a longer row than :data:`LONGEST_ROW`.
    """
    length = x.shape[-1]
    check_whole_rows(variance_size, length)
    if length > LONGEST_ROW:
        raise NotCovered(f"the norm of rows of {length}", f"the kernel has rows up to {LONGEST_ROW}", LEAVE_IT)
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    residual_out = None if residual is None else torch.empty_like(out)
    rows, schedule = x.numel() // length, RowSchedule.of(length)
    if rows:
        x, *x_rows = _strided(x)
        residual, *residual_rows = (None, 1, 0, 0) if residual is None else _strided(residual)
        launch(
            triton_kernels.rms_norm_kernel,
            -(-rows // schedule.rows_per_program),
            (
                x,
                residual,
                None if weight is None else aligned(weight),
                out,
                residual_out,
                rows,
                *x_rows,
                *residual_rows,
                eps,
            ),
            on=out,
            LENGTH=length,
            HAS_RESIDUAL=residual is not None,
            HAS_WEIGHT=weight is not None,
            ROWS_PER_PROGRAM=schedule.rows_per_program,
            BLOCK=schedule.block,
            num_warps=schedule.num_warps,
        )
    return out if residual_out is None else (out, residual_out)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """As :func:`.definition.silu_and_mul`: [..., 2 N] bf16 to [..., N] bf16."""
    return _gate_and_mul(x, gelu=False)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """As :func:`.definition.gelu_and_mul`: [..., 2 N] bf16 to [..., N] bf16."""
    return _gate_and_mul(x, gelu=True)


def _gate_and_mul(x: torch.Tensor, gelu: bool) -> torch.Tensor:
    rows, length = _packed_rows(x), x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], length, dtype=torch.bfloat16, device=x.device)
    schedule = RowSchedule(1, min(triton.next_power_of_2(length), 1024), 4)
    if out.numel():
        launch(
            triton_kernels.gate_and_mul_kernel,
            len(rows) * -(-length // schedule.block),
            (rows, out, rows.stride(0)),
            on=out,
            GELU=gelu,
            LENGTH=length,
            BLOCK=schedule.block,
            num_warps=schedule.num_warps,
        )
    return out


def capped(x: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """As :func:`.definition.capped`, of [..., N] bf16 and rounded to bf16."""
    x, block = aligned(x), 1024
    out = torch.empty_like(x)
    if out.numel():
        launch(
            triton_kernels.capped_kernel,
            -(-x.numel() // block),
            (x, out, float(np.float32(soft_cap)), x.numel()),
            on=out,
            BLOCK=block,
        )
    return out


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """As :func:`.definition.rotate`: x [tokens, heads, head_size] bf16, table [tokens, head_size] bf16."""
    (tokens, heads, size), block = x.shape, triton.next_power_of_2(x.shape[-1] // 2)
    x, table = (one if one.stride(-1) == 1 and one.data_ptr() % ALIGNMENT == 0 else aligned(one) for one in (x, table))
    schedule = RotateSchedule(min(triton.next_power_of_2(heads), max(1, _NORM_TILE // block)), block)
    out = torch.empty(tokens, heads, size, dtype=torch.bfloat16, device=x.device)
    if out.numel():
        launch(
            triton_kernels.rotate_kernel,
            tokens * -(-heads // schedule.heads_per_program),
            (x, table, out, *x.stride()[:2], table.stride(0)),
            on=out,
            NUM_HEADS=heads,
            HALF=size // 2,
            HEADS_PER_PROGRAM=schedule.heads_per_program,
            BLOCK=schedule.block,
        )
    return out


def softmax(x: torch.Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """As :func:`.definition.softmax`, computed in fp32 and rounded to ``dtype`` or x's own."""
    return _over_rows(x, dim, dtype, log=False)


def log_softmax(x: torch.Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """As :func:`.definition.log_softmax`; arguments as for :func:`softmax`."""
    return _over_rows(x, dim, dtype, log=True)


def _over_rows(x: torch.Tensor, dim: int, dtype: torch.dtype | None, log: bool) -> torch.Tensor:
    dims = normalise_dims(dim, x.dim())
    rows = aligned_rows(x, dims, torch.float32)
    out = torch.empty_like(rows)
    if out.numel():
        num_rows, length = out.shape
        schedule = VocabularySchedule.of(length)
        keys = torch.empty(num_rows, schedule.num_chunks, dtype=torch.int32, device=x.device)
        masses = torch.empty(num_rows, schedule.num_chunks, dtype=torch.int64, device=x.device)
        tile, padded, grid = _tile(schedule), {"PADDED_CHUNKS": schedule.padded_chunks}, (keys.numel(),)
        launch(triton_kernels.chunk_top_kernel, grid, (rows, keys, length), on=out, **tile)
        launch(triton_kernels.chunk_mass_kernel, grid, (rows, keys, masses, length), on=out, **tile, **padded)
        launch(
            triton_kernels.softmax_kernel, grid, (rows, keys, masses, out, length), on=out, LOG=log, **tile, **padded
        )
    return rows_back(out, x, dims).to(dtype or x.dtype)


def _tile(schedule: VocabularySchedule) -> dict[str, int]:
    return {"NUM_CHUNKS": schedule.num_chunks, "BLOCK": schedule.block, "num_warps": schedule.num_warps}


def top_k_top_p(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """As :func:`.definition.top_k_top_p`, in place: logits [rows, vocabulary] fp32, k and p [rows] or None."""
    return top_k_top_p_of_floats(logits, k, p, exact=True)


def draw(logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor | None = None) -> torch.Tensor:
    """[rows] int64, the tokens with the largest logit and noise of :func:`.definition.gumbel`.

    Args:
        logits: [rows, vocabulary] fp32, -inf for tokens that cannot be drawn.
        keys: [rows] int64, what each row's noise is made of beside the token.
        temperatures: [rows] fp32; a row whose temperature is 0 has no noise. None: all have.
    """
    rows, length = logits.shape
    schedule = VocabularySchedule.of(length)
    best = torch.empty(rows, schedule.num_chunks, dtype=torch.int64, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        launch(
            triton_kernels.chunk_draw_kernel,
            best.numel(),
            (aligned(logits), aligned(keys), None if temperatures is None else aligned(temperatures), best, length),
            on=logits,
            MAY_BE_GREEDY=temperatures is not None,
            **_tile(schedule),
        )
        launch(
            triton_kernels.draw_kernel,
            rows,
            (best, tokens),
            on=logits,
            NUM_CHUNKS=schedule.num_chunks,
            PADDED_CHUNKS=schedule.padded_chunks,
            num_warps=1,
        )
    return tokens


def heat(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Divide logits [rows, vocabulary] fp32 by each row's temperature [rows] fp32, in place; 0 leaves a row alone.

    PyTorch divides two tensors as IEEE 754 says; vLLM's kernel, in Triton, does not.
    """
    return logits.div_(torch.where(temperatures == 0, 1, temperatures).unsqueeze(1))


def min_p(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """As :func:`.definition.min_p`, in place: logits [rows, vocabulary] fp32, p [rows] fp32; 0 takes nothing away.

    A largest element, one product and a comparison: no order and no second rounding.
    """
    probability = softmax(logits)
    least = probability.amax(-1, keepdim=True) * p.unsqueeze(1)
    return logits.masked_fill_(probability < least, -torch.inf)


def penalise(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """As :func:`.definition.penalised`, in place, each operation by a kernel of PyTorch's of its own: together, a
    compiler would fuse products with sums.

    Args:
        logits: [rows, vocabulary] fp32.
        in_prompt: [rows, vocabulary] bool.
        counts: [rows, vocabulary] integers.
        repetition: [rows] fp32, as the other two.
    """
    repetition, frequency, presence = (one.unsqueeze(1) for one in (repetition, frequency, presence))
    factor = torch.where(in_prompt | (counts > 0), repetition, torch.ones_like(repetition))
    logits.mul_(torch.where(logits > 0, torch.ones_like(factor) / factor, factor))
    logits.sub_(frequency * counts.to(torch.float32))
    return logits.sub_(presence * (counts > 0).to(torch.float32))


REDUCTION = AttentionReduction(SPLITS[-1][1], tuple((size, end) for (_, size), (end, _) in pairwise(SPLITS)), KEY_TILE)
"""The splits and tiles of the definition."""


@dataclass(frozen=True)
class CacheSchedule:
    """How a program writes keys and values to the cache.

    Attributes:
        rows: tokens of a KV head.
        num_warps: of the program.
    """

    rows: int = 16
    num_warps: int = 4


@dataclass(frozen=True)
class Cache:
    """Keys and values on the grids of their rows: :mod:`.triton_cache` has their layout.

    Attributes:
        digits: int8 [pages, bytes of a page].
        exponents: int8 [pages, kv_heads, 2, page_size].
        head_size: of a key, and of a value.
    """

    digits: torch.Tensor
    exponents: torch.Tensor
    head_size: int

    @classmethod
    def in_memory_of(cls, kv_cache: torch.Tensor) -> "Cache":
        """A cache whose digits lie in the bytes of one in bf16, to be written before it is read.

        Args:
            kv_cache: bf16 [pages, kv_heads, page_size, 2 * head_size], in any order within a page.

        Raises:
            ValueError: a page that does not lie in one piece, or its size is no multiple of 16.
        """
        (pages, kv_heads, page_size, width), page = kv_cache.shape, kv_cache[0]
        if page_size % 16 or _extent(page) != page.numel() or page.stride(-1) != 1:
            raise ValueError(
                f"a page of an exact cache lies in one piece and has a multiple of 16 slots, got {list(page.shape)} "
                f"with strides {list(page.stride())}"
            )
        digits = kv_cache.as_strided((pages, page.numel()), (kv_cache.stride(0), 1)).view(torch.int8)
        exponents = torch.empty(pages, kv_heads, 2, page_size, dtype=torch.int8, device=kv_cache.device)
        return cls(digits, exponents, width // 2)

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Put keys and values on their grids, and write them.

        Args:
            keys: bf16 [tokens, kv_heads, head_size], or more tokens.
            values: as ``keys``.
            slots: [tokens] int64, page * page_size + slot; negative for padding, which is not written.
        """
        _, kv_heads, _, page_size = self.exponents.shape
        keys, values = (one if one.stride(-1) == 1 else one.contiguous() for one in (keys, values))
        schedule = CacheSchedule()
        grid = triton.cdiv(len(slots), schedule.rows), kv_heads
        if len(slots):
            launch(
                write_cache_kernel,
                grid,
                (
                    keys,
                    values,
                    slots,
                    self.digits,
                    self.exponents,
                    len(slots),
                    *keys.stride()[:2],
                    *values.stride()[:2],
                    self.digits.stride(0),
                ),
                on=keys,
                NUM_KV_HEADS=kv_heads,
                PAGE_SIZE=page_size,
                HEAD_DIM=self.head_size,
                PADDED_HEAD_DIM=_padded(self.head_size),
                ROWS=schedule.rows,
                num_warps=schedule.num_warps,
            )


def _extent(x: torch.Tensor) -> int:
    """Elements from the first of a tensor to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _padded(head_size: int) -> int:
    return max(32, triton.next_power_of_2(head_size))


class ExactPlanner(Planner):
    """A :class:`.Planner` with memory for partial results of exact attention, which have a second exponent, and for
    those of unfinished blocks.

    Args:
        shape: of the layers, in bf16, with :data:`REDUCTION`.
        device: the GPU.
        max_requests: in a step.
        max_tokens: in a step.
        max_keys: of all requests of a step together.
        int8: see :class:`LinearSchedule`.
    """

    def __init__(
        self, shape: AttentionShape, device: torch.device, max_requests: int, max_tokens: int, max_keys: int,
        int8: bool = True,
    ) -> None:  # fmt: skip
        large = shape.head_size > 128
        # Four warps have 16 rows each: maxima and sums of rows stay in a warp, and two programs fit.
        prefill = Schedule(64, 4, num_stages=2, ctas_per_sm=2)
        if large or not int8:
            prefill = Schedule(32, 8, num_stages=1)
        schedules = Schedule(16, 8, num_stages=1 if large else 2), prefill
        super().__init__(
            shape, device, max_requests, max_tokens, max_keys, kernels=Kernels(sm90=False), schedules=schedules
        )
        self.int8 = int8
        self.partial_e = torch.empty_like(self.partial_m)
        self.prefill_programs = prefill.ctas_per_sm * self.num_sms
        rows = max(self.prefill_programs * prefill.block_m, (len(self.work_indptr) - 1) * schedules[0].block_m)
        self.spilled_acc = torch.empty(rows, _padded(shape.head_size), device=device)
        """[rows, padded head size], weighted values of unfinished blocks."""


def paged_attention(call: PagedAttention, out: torch.Tensor, plan: Plan | None = None) -> None:
    """Write the attention of ``call`` to ``out``, as :func:`.definition.attention` for each request.

    Args:
        call: in bf16; its reduction must be :data:`REDUCTION`. Its keys and values are stored in a :class:`Cache`, or
            they are put on their grids now, which waits for the device.
        out: [tokens, heads, head_size] bf16, packed along the last.
        plan: of an :class:`ExactPlanner`; by default one is made.

    Raises:
        NotCovered: another dtype.
        ValueError: another reduction than the definition's.
    """
    if call.query.dtype != torch.bfloat16:
        raise NotCovered(f"attention in {call.query.dtype}", "exact arithmetic is of bf16", LEAVE_IT)
    if call.reduction != REDUCTION:
        raise ValueError(f"exact attention has {REDUCTION}, got {call.reduction}")
    if call.cache.stored is None:
        call = _on_grids(call)
    plan = plan or _plan_alone(call)
    if plan.prefill_ctas:
        _attend(call, out, plan, prefill_like=True)
    if plan.has_decode:
        _attend(call, out, plan, prefill_like=False)


def _on_grids(call: PagedAttention) -> PagedAttention:
    """The call with pages of a cache of its own: those that its requests have."""
    table, page_size = call.cache.table, call.cache.page_size
    held = np.arange(table.shape[1]) < -(-call.lengths[:, None] // page_size)
    held &= (table >= 0) & (table < call.cache.num_pages)  # those behind a sliding window may be gone
    used = np.unique(table[held])
    keys, values = (one[torch.from_numpy(used).to(one.device)] for one in (call.cache.keys, call.cache.values))
    cache = Cache.in_memory_of(torch.empty_like(torch.cat((keys, values), -1), memory_format=torch.contiguous_format))
    slots = torch.arange(len(used) * page_size, device=keys.device)
    cache.write(*(one.transpose(1, 2).flatten(0, 1) for one in (keys, values)), slots)
    places = np.where(held, np.searchsorted(used, table), 0).astype(np.int32)
    return replace(call, cache=PagedCache(keys, values, torch.from_numpy(places), cache))


def _plan_alone(call: PagedAttention) -> Plan:
    """A plan for one call, with memory of its own."""
    tokens, keys = len(call.query), call.cache.block_table.numel() * call.cache.page_size
    planner = ExactPlanner(AttentionShape.of(call), call.query.device, len(call.seq_lens), tokens, keys)
    starts, lengths = (tensor.to(call.query.device) for tensor in (call.query_start_loc, call.seq_lens))
    return planner.plan(starts, lengths, tokens, most_tokens=tokens)


def _attend(call: PagedAttention, out: torch.Tensor, plan: Plan, prefill_like: bool) -> None:
    """Write the attention of one of a plan's two lists of work."""
    planner, shape, spec, cache = plan.planner, plan.planner.shape, call.spec, call.cache.stored
    if prefill_like:
        schedule, partial_rows = planner.prefill_schedule, planner.prefill_schedule.block_m
        ctas = min(plan.prefill_ctas, planner.prefill_programs)
        work_indptr, work = planner.prefill_count, planner.prefill_work
    else:
        schedule, ctas, partial_rows = planner.decode_schedule, plan.cta_shares, plan.partial_rows
        work_indptr, work = planner.work_indptr, planner.decode_work
    query = call.query if call.query.stride(-1) == 1 else call.query.contiguous()
    table = call.cache.block_table.to(call.query.device)
    table = table if table.stride(-1) == 1 else table.contiguous()
    launch(
        exact_attention_kernel,
        ctas,
        (
            query,
            cache.digits,
            cache.exponents,
            out,
            table,
            work_indptr,
            work,
            planner.partial_m,
            planner.partial_l,
            planner.partial_e,
            planner.partial_acc,
            planner.spilled_acc,
            planner.semaphores,
            float(np.float32(spec.scale) * (LOG2_E if spec.logits_soft_cap is None else np.float32(1))),
            float(np.float32(spec.logits_soft_cap or 0)),
            spec.sliding_window or 0,
            table.stride(0),
            *query.stride()[:2],
            cache.digits.stride(0),
            *out.stride()[:2],
        ),
        on=query,
        USE_SOFT_CAP=spec.logits_soft_cap is not None,
        USE_WINDOW=spec.sliding_window is not None,
        INT8=planner.int8,
        PREFILL_LIKE=prefill_like,
        MAY_SHARE=not prefill_like or plan.may_share_prefill,
        NUM_KV_HEADS=shape.kv_heads,
        QUERIES_PER_KV=shape.queries_per_kv,
        HEAD_DIM=shape.head_size,
        PADDED_HEAD_DIM=_padded(shape.head_size),
        PAGE_SIZE=call.cache.page_size,
        SPLIT_SEGMENTS=REDUCTION.split_segments,
        KEY_TILE=KEY_TILE,
        BLOCK_M=schedule.block_m,
        PARTIAL_ROWS=partial_rows,
        PARTIAL_BLOCK=triton.next_power_of_2(partial_rows),
        num_warps=schedule.num_warps,
        num_stages=schedule.num_stages,
    )


def certify(n: int, k: int, shared: bool, device: torch.device, int8: bool = True) -> int:
    """Compare products for a weight [N, K] with integers, in every tile: of operands at their bounds, and of ones whose
    large products cancel but for one element, which shows each product of digits. There is only one right answer.

    Args:
        n: of the weight.
        k: of the weight.
        shared: as for :func:`.definition.segments`.
        device: the GPU.
        int8: see :class:`LinearSchedule`.

    Returns:
        How many results were compared.

    Raises:
        ArithmeticError: a result differs; this GPU or compiler is no engine of exact arithmetic.
        NotCovered: a segment of more than :data:`.definition.LARGEST_K`.
    """
    parts, compared = segments(k, shared), 0
    check_k(k // parts)
    x, w = _certificate_rows(k // parts)
    right = torch.from_numpy(x @ w.T).to(torch.float32).to(torch.bfloat16)
    columns = torch.arange(n, device="cpu") % len(w)
    tiles = linear_schedules(parts)
    if int8 and _by_wgmma(device, k, parts):
        tiles = HOPPER_SCHEDULES
    for number, schedule in enumerate(tiles):
        rows = torch.arange(schedule.block_m + len(x), device="cpu") % len(x)
        part = number % parts  # the other segments are 0
        held = _held(x, rows, part, parts, device), _held(w, columns, part, parts, device)
        weight = ExactWeight(held[1].digits, held[1].scale)
        if isinstance(schedule, LinearSchedule):
            schedule = replace(schedule, int8=int8)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what wrote the weight has ended
        found = product(held[0], weight, None, schedule, overlaps=True)
        if not torch.equal(found, right[rows][:, columns].to(device)):
            raise ArithmeticError(f"products of {k} elements in {schedule} are not exact on {device}")
        compared += found.numel()
    return compared


def _certificate_rows(length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Integers of activations and of weights, [rows, length] each. A row with third digits has few large elements: the
    definition leaves it no larger mean magnitude.
    """
    draw, half = np.random.default_rng(length), length // 2
    signs = np.where(np.arange(length) % 2 == 0, 1, -1)
    two, three = np.full(length, TWO_DIGITS), np.zeros(length, np.int64)
    count = max(1, (length << (MEAN_BITS + 1)) // THREE_DIGITS)
    three[np.linspace(0, length - 1, count).astype(np.int64)] = THREE_DIGITS
    x, w = [two, -two, signs * two, three, -three, signs * three], [two, -two, signs * two]
    rest = np.zeros(length - 2 * half, np.int64)

    def large(digits: int) -> NDArray[np.int64]:
        """Of digits whose sums of products grow fast; in another order they grow by other steps."""
        return draw.integers(120, 128, (digits, half)).T @ (256 ** np.arange(digits))

    for place in range(3):
        a = large(2 if place < 2 else 1)
        if place == 2:
            a[half // 3] += 125 * 256**2
        a[half // 2] = 3 * 256**place
        x.append(np.concatenate((a, a[::-1], rest)))
    for place in range(2):
        b = large(2)
        b[half // 2] = 0
        w.append(np.concatenate((b, -b[::-1], rest)))
        w[-1][half // 2] = 256**place
    return np.stack(x).astype(np.int64), np.stack(w).astype(np.int64)


def _held(integers: NDArray[np.int64], rows: torch.Tensor, part: int, parts: int, device: torch.device) -> Activations:
    """Rows of integers as one segment of activations whose scales are 1; the other segments are 0."""
    length = integers.shape[1]
    schedule = QuantizeSchedule.of(length)
    digits, third = np.zeros((3, len(integers), parts, length), np.int8), integers
    for place in (2, 1, 0):
        digits[place, :, part] = (third + 128) % 256 - 128
        third = (third - digits[place, :, part]) // 256
    high_digit_mask = np.zeros((len(integers), parts), np.int64)
    for row, element in np.argwhere(digits[0, :, part]):
        high_digit_mask[row, part] |= np.int64(1) << np.int64(element // schedule.mask_step)
    planes = torch.from_numpy(digits).flatten(2)[:, rows].to(device)
    held = torch.from_numpy(high_digit_mask)[rows].to(device)
    scale = torch.ones(held.shape, dtype=torch.float32, device=device)  # where a model is loaded, bf16 is the default
    return Activations(planes[1:].contiguous(), planes[0].contiguous(), held, scale)
