"""Who computes attention in its benchmark."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import torch
from torch.nn import functional

from benchmarks.attention_batch import Batch, Layer
from benchmarks.attention_cases import Request
from vllm_batch_invariant.ops.attention import (
    AttentionReduction,
    AttentionSpec,
    PackedKeys,
    PagedAttention,
    paged_attention,
)
from vllm_batch_invariant.ops.attention import attend as attend_to

_MOST_SPLITS_IN_A_GRAPH = 32
"""vLLM's default of ``flash_attn_max_num_splits_for_cuda_graph``."""
_MOST_TOKENS_IN_A_GRAPH = 512
"""vLLM's default of ``max_cudagraph_capture_size``."""
_STEP = 16
"""Elements of heads, of which encoders' are padded to a multiple, as an engine does."""
_KEYS_OF_A_FLEX_TILE = AttentionReduction.of_device("cuda", "flex").key_tile


def _window_of(batch: Batch) -> list[int]:
    """Keys before a token and behind it that it sees, as FlashAttention counts them; -1 for all."""
    return [batch.layer.window - 1, 0] if batch.layer.window else [-1, -1]


class Absent(Exception):
    """A provider that the installed packages or the GPU do not have."""


@dataclass(frozen=True)
class Provider:
    """One way to compute attention."""

    name: str
    attend: Callable[..., object]
    """Called as ``attend(batch, out, **plan(batch))``, once a layer; out as the batch's query."""
    plan: Callable[[Batch], dict[str, object]] = lambda _: {}
    """What is made once a step and serves all layers; its time does not count."""
    promises_bits: bool = False
    """Whether a row's bits shall not depend on its batch."""
    observed: bool = True
    """Whether the bits of a provider that promises nothing are looked at."""
    covers: Callable[[Sequence[Request]], bool] = lambda _: True
    """Whether it can compute a batch of such requests."""
    serves: Callable[[Layer], bool] = lambda layer: not layer.encodes
    """Whether it can compute such a layer."""
    page_multiple: int = 1
    """It takes pages of a multiple of so many keys."""

    def run(self, batch: Batch) -> torch.Tensor:
        """Plan and attend once; what is not written is NaN."""
        out = torch.full_like(batch.query, torch.nan)
        self.attend(batch, out, **self.plan(batch))
        return out


def _ours(implementation: str, reduction: AttentionReduction, **options: object) -> Provider:
    def attend(batch: Batch, out: torch.Tensor, plan: object = None) -> None:
        if batch.layer.encodes:
            qkv = batch.query, batch.keys[:, 0], batch.values[:, 0]
            if batch.head_size % _STEP:
                qkv = tuple(functional.pad(one, (0, -batch.head_size % _STEP)) for one in qkv)
            cache = PackedKeys.of(*qkv[1:], batch.query_start_loc)
            spec = AttentionSpec(batch.scale, **batch.layer.added)
            call = PagedAttention(qkv[0], cache, batch.seq_lens, batch.query_start_loc, spec, reduction)
            padded = out if qkv[0] is batch.query else torch.empty_like(qkv[0])
            attend_to(call, implementation, padded, plan)
            if padded is not out:
                out.copy_(padded[..., : batch.head_size])
            return
        paged_attention(
            batch.query,
            batch.keys.transpose(1, 2),
            batch.values.transpose(1, 2),
            batch.table,
            batch.seq_lens,
            batch.query_start_loc,
            *_scales(batch),
            scale=batch.scale,
            reduction=reduction,
            implementation=implementation,
            out=out,
            plan=plan,
            **batch.layer.added,
        )

    return Provider(f"ours-{implementation}", attend, promises_bits=True, **options)


def _scales(batch: Batch) -> tuple[torch.Tensor, ...]:
    """Of keys and of values, where they are codes."""
    return (torch.ones((), device=batch.query.device),) * 2 * batch.in_codes


def ours_by(kernels: object = None) -> Provider:
    """Our attention on a GPU.

    Args:
        kernels: what serves, of :class:`vllm_batch_invariant.ops.attention.plan.Kernels`; by default the fastest.
    """
    reduction = AttentionReduction.of_device("cuda")

    def plan(batch: Batch) -> dict[str, object]:
        planning = import_module("vllm_batch_invariant.ops.attention.plan")
        heads = batch.heads, batch.kv_heads, -(-batch.head_size // _STEP) * _STEP
        stored = batch.cache.dtype if batch.in_codes else None
        shape = planning.AttentionShape(*heads, batch.query.dtype, reduction, stored)
        tokens, keys = len(batch.query), sum(request.context for request in batch.requests)
        spec = AttentionSpec(batch.scale, **batch.layer.added)
        known = planning.sm90.knows(spec, batch.in_codes)
        sizes, serving = (len(batch.requests), tokens, keys), kernels
        if batch.layer.encodes and serving is None:
            certificate = import_module("vllm_batch_invariant.ops.attention.certificate")
            serving = certificate.kernels_of_packed(shape, batch.query.device)
        planner = planning.Planner(
            shape, batch.query.device, *sizes, known, kernels=serving, window=spec.sliding_window
        )
        return {"plan": planner.plan(batch.query_start_loc, batch.seq_lens, tokens, batch.most_tokens)}

    return _ours("triton", reduction, plan=plan, serves=lambda _: True)


def _ours_flex() -> Provider:
    reduction = AttentionReduction.of_device("cuda", "flex")

    def plan(batch: Batch) -> dict[str, object]:
        flex = import_module("vllm_batch_invariant.ops.attention.flex.plan")
        planning = import_module("vllm_batch_invariant.ops.attention.plan")
        shape = planning.AttentionShape(batch.heads, batch.kv_heads, batch.head_size, batch.query.dtype, reduction)
        layout = flex.KeyLayout.of(batch.keys.transpose(1, 2), _KEYS_OF_A_FLEX_TILE)
        requests, device = len(batch.requests), batch.query.device
        planner = flex.Planner(shape, layout, device, requests, batch.longest_context)
        on_host = tuple(
            np.array(numbers)
            for numbers in (
                [rows.start for rows in batch.rows] + [batch.rows[-1].stop],
                [request.context for request in batch.requests],
            )
        )
        lengths = batch.query_start_loc, batch.seq_lens
        return {"plan": planner.plan(*lengths, batch.table, batch.most_tokens == 1, on_host)}

    multiple = {"page_multiple": _KEYS_OF_A_FLEX_TILE}
    return _ours("flex", reduction, plan=plan, serves=lambda layer: layer == Layer(), **multiple)


def _flash_attention(name: str, most_splits: Callable[[Batch], int]) -> Provider:
    """As ``FlashAttentionMetadataBuilder.build`` and ``FlashAttentionImpl.forward`` of vLLM 0.26 call it."""
    try:
        from vllm.v1.attention.backends.fa_utils import (
            flash_attn_varlen_func,
            get_flash_attn_version,
            get_scheduler_metadata,
        )
    except ImportError as error:
        raise Absent(f"vLLM's FlashAttention: {error}") from error
    if get_flash_attn_version() != 3:
        raise Absent("FlashAttention 3 does not run on this GPU")

    def plan(batch: Batch) -> dict[str, object]:
        splits = most_splits(batch)
        if batch.layer.encodes:
            return {}
        metadata = get_scheduler_metadata(
            batch_size=len(batch.requests),
            max_seqlen_q=batch.most_tokens,
            max_seqlen_k=batch.longest_context,
            num_heads_q=batch.heads,
            num_heads_kv=batch.kv_heads,
            headdim=batch.head_size,
            cache_seqlens=batch.seq_lens,
            qkv_dtype=batch.cache.dtype,
            cu_seqlens_q=batch.query_start_loc,
            page_size=batch.page_size,
            causal=True,
            window_size=_window_of(batch),
            num_splits=splits,
        )
        query = batch.query.to(batch.cache.dtype)  # vLLM quantises queries, too, which is not timed
        return {"scheduler_metadata": metadata, "num_splits": splits, "unscaled": _unscaled(batch), "query": query}

    def encode(batch: Batch, out: torch.Tensor) -> None:
        """As ``vit_flash_attn_wrapper`` calls it."""
        starts, longest = batch.query_start_loc, batch.most_tokens
        flash_attn_varlen_func(
            q=batch.query,
            k=batch.keys[:, 0],
            v=batch.values[:, 0],
            out=out,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=batch.scale,
            causal=False,
            fa_version=3,
        )

    def attend(
        batch: Batch,
        out: torch.Tensor,
        scheduler_metadata: torch.Tensor | None = None,
        num_splits: int = 0,
        unscaled: torch.Tensor | None = None,
        query: torch.Tensor | None = None,
    ) -> None:
        if batch.layer.encodes:
            encode(batch, out)
            return
        flash_attn_varlen_func(
            q=query,
            k=batch.keys,
            v=batch.values,
            out=out,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.most_tokens,
            seqused_k=batch.seq_lens,
            max_seqlen_k=batch.longest_context,
            softmax_scale=batch.scale,
            causal=True,
            window_size=_window_of(batch),
            s_aux=batch.layer.sinks,
            block_table=batch.table,
            softcap=0,
            scheduler_metadata=scheduler_metadata,
            fa_version=3,
            q_descale=unscaled,
            k_descale=unscaled,
            v_descale=unscaled,
            num_splits=num_splits,
        )

    return Provider(name, attend, plan, serves=lambda layer: name == "stock" or not layer.encodes)


def _unscaled(batch: Batch) -> torch.Tensor:
    return torch.ones((), device=batch.query.device).expand(len(batch.requests), batch.kv_heads)


def _stock() -> Provider:
    def most_splits(batch: Batch) -> int:
        in_a_graph = batch.query.shape[0] <= _MOST_TOKENS_IN_A_GRAPH
        return _MOST_SPLITS_IN_A_GRAPH if in_a_graph else 0

    return _flash_attention("stock", most_splits)


def _one_split() -> Provider:
    return _flash_attention("fa3-one-split", lambda _: 1)


def _native_triton() -> Provider:
    """As ``TritonAttentionMetadataBuilder`` and ``TritonAttentionImpl.forward`` of vLLM 0.26 call it."""
    try:
        from vllm.v1.attention.backends.triton_attn import MIN_LAUNCH_GRID_SIZE_2D, NUM_PAR_SOFTMAX_SEGMENTS
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ImportError as error:
        raise Absent(f"vLLM's Triton attention: {error}") from error

    def plan(batch: Batch) -> dict[str, object]:
        most_requests = MIN_LAUNCH_GRID_SIZE_2D // batch.kv_heads
        partials = most_requests, batch.heads, NUM_PAR_SOFTMAX_SEGMENTS
        padded = 1 << (batch.head_size - 1).bit_length()
        device = batch.query.device
        unscaled = _unscaled(batch)
        return {
            "k_descale": unscaled,
            "v_descale": unscaled,
            "seq_threshold_3D": most_requests,
            "num_par_softmax_segments": NUM_PAR_SOFTMAX_SEGMENTS,
            "softmax_segm_output": torch.empty(*partials, padded, dtype=torch.float32, device=device),
            "softmax_segm_max": torch.empty(partials, dtype=torch.float32, device=device),
            "softmax_segm_expsum": torch.empty(partials, dtype=torch.float32, device=device),
        }

    def attend(batch: Batch, out: torch.Tensor, **planned: object) -> None:
        unified_attention(
            q=batch.query,
            k=batch.keys,
            v=batch.values,
            out=out,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.most_tokens,
            seqused_k=batch.seq_lens,
            max_seqlen_k=batch.longest_context,
            softmax_scale=batch.scale,
            causal=True,
            window_size=_window_of(batch),
            sinks=batch.layer.sinks,
            block_table=batch.table,
            softcap=0,
            q_descale=None,
            **planned,
        )

    # Triton compiles it anew for one request, for multiples of 16 and for other numbers: not for checks' sake.
    return Provider("native-triton", attend, plan, observed=False)


_LOADERS: dict[str, Callable[[], Provider]] = {
    "stock": _stock,
    "fa3-one-split": _one_split,
    "native-triton": _native_triton,
    "ours-triton": ours_by,
    "ours-flex": _ours_flex,
}
NAMES = tuple(_LOADERS)


def load(name: str) -> Provider:
    """The provider of one of :data:`NAMES`.

    Raises:
        Absent: it is not part of what is installed, or not for this GPU.
    """
    return _LOADERS[name]()
