"""Paged attention on a GPU: work is planned on the GPU once a step and done by one kernel for decode-like and one for
prefill-like requests, so that a step needs nothing from the host and can be a CUDA graph.

The kernels in Gluon for Hopper serve where they know a layer's options and layout, the Triton kernel serves the rest,
prefill over keys and values in e4m3 among it, and whatever has a scale a token and head.
"""

import math

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ...errors import NotCovered
from ..common.kv_cache import is_aligned, scale_strides
from ..common.launch import launch
from ..common.nvidia_gpus import attends_by_tma, converts_e4m3
from ..common.rows import with_packed_rows
from ..quantise.cuda import NOT_QUANTISED, Quantised, quantised
from ..quantise.reduction import QuantiseReduction
from . import sm90
from .params import PackedKeys, PagedAttention
from .plan import Kernels, Plan, Planner
from .shapes import AttentionShape
from .triton_kernels import attention_kernel

SERVES = ("sliding_window", "logits_soft_cap", "alibi_slopes", "sinks", "causal")
READS_E4M3 = READS_PACKED = READS_LATENT = SEES_RANGES = True
_LOG2_E = math.log2(math.e)


def paged_attention(
    call: PagedAttention, out: torch.Tensor, plan: Plan | None = None, codes: QuantiseReduction | None = None
) -> None:
    """Write the attention of ``call`` to ``out``; see the operation's package for the contract.

    A request's own keys and values must be finite: a row weighs the later ones of its block by 0.

    Args:
        call: the batch and the layer.
        out: [tokens, query_heads, head_size].
        plan: of the step; None: it is made.
        codes: what the rows of all heads are quantised to next, which a step of decode keeps with the memory of ``out``
            where a group is a head; else it is not made.

    Raises:
        NotCovered: a head size above 512, or queries in fp16 over codes with a scale a token and head.
        ValueError: a plan of another reduction than the call's, or of another window.
    """
    if call.cache.scales_of_tokens and call.query.dtype == torch.float16:
        raise NotCovered(
            "a KV cache in fp8 with one scale a token and head in fp16",
            "weights times scales are smaller than what fp16 has precision for",
            "serve the model in bfloat16, or another KV cache",
        )
    plan = plan or plan_alone(call)
    planner = plan.planner
    if call.reduction != plan.reduction:
        raise ValueError(f"a plan for {plan.reduction!r} does not fit a call with {call.reduction!r}")
    window = call.spec.sliding_window
    if plan.window not in (None, window):
        raise ValueError(f"a plan for a window of {plan.window} keys does not fit a call with one of {window}")
    made = NOT_QUANTISED
    if codes is not None and _has_codes(call, out, plan, codes):
        made = quantised(out.flatten(1), codes)
    by_sm90 = planner.sm90 and call.ranges is None and sm90.takes(call, out) and plan.window == window
    if plan.prefill_ctas and by_sm90 and planner.prefills_by_sm90 and not call.cache.holds_codes:
        work = sm90.PrefillWork(
            planner.prefill_count,
            planner.prefill_work,
            planner.workspace,
            planner.semaphores,
            ctas=min(plan.prefill_ctas, planner.num_sms),
            merged=planner.merged,
        )
        sm90.launch_prefill(call, out, work, plan.reduction, sm90.PREFILL_SCHEDULES[planner.shape.padded_head_size])
    elif plan.prefill_ctas:
        _launch(call, out, plan, prefill_like=True)
    if plan.has_decode and by_sm90:
        partials = planner.partial_m, planner.partial_l, planner.partial_acc
        indptr = planner.work_indptr[: plan.cta_shares + 1]
        work = sm90.DecodeWork(indptr, planner.decode_work, partials, planner.semaphores, plan.partial_rows)
        schedule = sm90.decode_schedule(planner.shape, planner.decode_rows, plan.partial_rows)
        sm90.launch_decode(call, out, work, plan.reduction, schedule, made)
    elif plan.has_decode:
        _launch(call, out, plan, prefill_like=False, made=made)


def _has_codes(call: PagedAttention, out: torch.Tensor, plan: Plan, codes: QuantiseReduction) -> bool:
    """Whether a step's kernel writes codes: of every row, and of all of a memory."""
    is_whole = out.is_contiguous() and out.untyped_storage().nbytes() == out.nbytes
    return is_whole and not plan.prefill_ctas and codes.group == out.shape[-1] == call.query.shape[-1]


def plan_alone(call: PagedAttention, kernels: Kernels | None = None) -> Plan:
    """A plan for one call, with memory of its own; over keys without pages the Triton kernel serves unless ``kernels``
    say otherwise.
    """
    packed = isinstance(call.cache, PackedKeys)
    tokens = len(call.query)
    keys = len(call.cache.keys) if packed else call.cache.block_table.numel() * call.cache.page_size
    plain = not packed and sm90.knows(call.spec, call.cache.holds_codes) and call.ranges is None
    window = call.spec.sliding_window if call.spec.causal and call.ranges is None else None
    shape, requests, device = AttentionShape.of(call), len(call.seq_lens), call.query.device
    planner = Planner(shape, device, requests, tokens, keys, plain, kernels, window=window)
    starts, lengths = (tensor.to(device) for tensor in (call.query_start_loc, call.seq_lens))
    return planner.plan(starts, lengths, tokens, most_tokens=tokens)


def _tensor_descriptor(cache: torch.Tensor, key_tile: int, padded_head_size: int) -> TensorDescriptor | None:
    """The cache for the tensor memory accelerator, if it can read a tile of keys at once."""
    if cache.shape[2] % key_tile or not is_aligned(cache) or cache.dtype == torch.float32:
        return None
    if not attends_by_tma(torch.cuda.get_device_capability(cache.device)[0]):
        return None
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [1, 1, key_tile, padded_head_size])


def _launch(
    call: PagedAttention, out: torch.Tensor, plan: Plan, prefill_like: bool, made: Quantised = NOT_QUANTISED
) -> None:
    """Write the attention of one of a plan's two lists of work, by the Triton kernel."""
    planner, shape, device = plan.planner, plan.planner.shape, call.query.device
    spec, cache = call.spec, call.cache
    if prefill_like:
        schedule, ctas, partial_rows = planner.prefill_schedule, plan.prefill_ctas, planner.prefill_schedule.block_m
        work_indptr, work = planner.prefill_count, planner.prefill_work
    else:
        schedule, ctas, partial_rows = planner.decode_schedule, plan.cta_shares, plan.partial_rows
        work_indptr, work = planner.work_indptr, planner.decode_work
    paged, query = not isinstance(cache, PackedKeys), with_packed_rows(call.query)
    block_table = with_packed_rows(cache.block_table.to(device)) if paged else None
    key_cache, value_cache = with_packed_rows(cache.keys), with_packed_rows(cache.values)
    if cache.tail:
        key_cache, value_cache = key_cache.split([shape.head_size, shape.tail], dim=-1)[::-1]
    if cache.holds_codes:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    descriptors = [
        _tensor_descriptor(key_cache, shape.key_tile, shape.padded_tail or shape.padded_head_size),
        _tensor_descriptor(value_cache, shape.key_tile, shape.padded_head_size),
    ]
    use_tma = paged and None not in descriptors
    alibi_slopes = None if spec.alibi_slopes is None else spec.alibi_slopes.to(device, torch.float32) * _LOG2_E
    written = out if out.stride(-1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    launch(
        attention_kernel,
        ctas,
        (
            query,
            *(descriptors if use_tma else (key_cache, value_cache)),
            written,
            block_table,
            work_indptr,
            work,
            planner.partial_m,
            planner.partial_l,
            planner.partial_acc,
            planner.semaphores,
            alibi_slopes,
            None if spec.sinks is None else spec.sinks.to(device),
            cache.k_scale,
            cache.v_scale,
            *scale_strides(cache.k_scale),
            None if call.ranges is None else call.ranges.contiguous(),
            spec.scale * _LOG2_E,
            (spec.logits_soft_cap or 0.0) * _LOG2_E,
            spec.sliding_window or 0,
            0 if block_table is None else block_table.stride(0),
            *query.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            *written.stride()[:2],
            *made.operands,
        ),
        on=query,
        USE_TMA=use_tma,
        PAGED=paged,
        HOLDS_CODES=cache.holds_codes,
        CONVERTS_E4M3=cache.holds_codes and converts_e4m3(torch.cuda.get_device_capability(device)),
        SCALES_OF_TOKENS=cache.scales_of_tokens,
        USE_SOFT_CAP=spec.logits_soft_cap is not None,
        USE_ALIBI=alibi_slopes is not None,
        USE_WINDOW=spec.sliding_window is not None,
        USE_SINKS=spec.sinks is not None,
        CAUSAL=spec.causal,
        PREFILL_LIKE=prefill_like,
        MAY_SHARE=not prefill_like or plan.may_share_prefill,
        NUM_KV_HEADS=shape.kv_heads,
        QUERIES_PER_KV=shape.queries_per_kv,
        HEAD_DIM=shape.head_size,
        PADDED_HEAD_DIM=shape.padded_head_size,
        TAIL_DIM=shape.tail,
        PADDED_TAIL_DIM=shape.padded_tail,
        PAGE_SIZE=cache.page_size,
        SPLIT_SEGMENTS=shape.reduction.split_segments,
        KEY_TILE=shape.key_tile,
        BLOCK_M=schedule.block_m,
        PARTIAL_ROWS=partial_rows,
        PARTIAL_BLOCK=triton.next_power_of_2(partial_rows),
        **made.constants,
        num_warps=schedule.num_warps,
        num_stages=schedule.num_stages,
        maxnreg=schedule.maxnreg,
    )
    if written is not out:
        out.copy_(written)
