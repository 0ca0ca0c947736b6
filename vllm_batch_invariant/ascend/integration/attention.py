"""The attention backend on NPUs: a library's batch-invariant kernel over the paged cache, for the rows of decodes and
of prefills in calls of their own.

vllm-ascend calls its kernel once for all rows of a step, and gives it the step's own keys where no request has a cache:
the kernel of a request would follow the concurrent requests.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionType

from ...errors import NotCovered
from . import patch_points as ascend_patch_points
from .library import attention_library

LARGEST_WINDOW = 2147483647
_Attention: Any = ascend_patch_points.ATTENTION.get()
_Backend: Any = ascend_patch_points.BACKEND.get()


@dataclass(frozen=True)
class Part:
    """Rows of a step that share a call.

    Attributes:
        rows: their indices in the step's rows.
        requests: the indices of their requests in the step.
        ends: where each request's rows end, counted from the part's first row.
    """

    rows: slice
    requests: slice
    ends: list[int]

    @property
    def longest(self) -> int:
        """The most rows that a request has."""
        return max(end - start for start, end in zip([0, *self.ends], self.ends, strict=False))


def parts(metadata: Any) -> Iterator[Part]:
    """The decodes of a step, which come first, and its prefills; a kind without requests is left out."""
    ends, decodes, rows = metadata.actual_seq_lengths_q, metadata.num_decodes, metadata.num_decode_tokens
    if decodes:
        yield Part(slice(0, rows), slice(0, decodes), ends[:decodes])
    if decodes < len(ends):
        yield Part(slice(rows, ends[-1]), slice(decodes, len(ends)), [end - rows for end in ends[decodes:]])


class SplitPrefillDecodeAttention(_Attention):
    """One attention layer; subclasses say which kernel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.attn_type != AttentionType.DECODER:
            raise NotCovered(
                f"{self.attn_type} attention", "only causal decoder attention is known", "serve a decoder-only model"
            )
        unknown = {
            "attention sinks": self.sinks is not None,
            "ALiBi": self.alibi_slopes is not None,
            "layers that share a KV cache": self.kv_sharing_target_layer_name is not None,
            "soft-capped attention logits": bool(kwargs.get("logits_soft_cap")),
        }
        for name, used in unknown.items():
            if used:
                raise NotCovered(f"{name} on an NPU", "the kernels have not been seen with it", "serve another model")

    def forward_impl(
        self,
        query: torch.Tensor,
        key: torch.Tensor,  # read from the cache, where they are by now
        value: torch.Tensor,
        kv_cache: tuple[torch.Tensor],
        attn_metadata: Any,
        output: torch.Tensor,
    ) -> torch.Tensor:
        for part in parts(attn_metadata):
            rows = self.attend(query[part.rows], part, attn_metadata)
            output[part.rows] = rows.view(-1, self.num_heads, self.head_size)
        return output

    def attend(self, query: torch.Tensor, part: Part, metadata: Any) -> torch.Tensor:
        """Attention of [rows, heads, head size] over the pages of the part's requests."""
        raise NotImplementedError


class AscendCAttention(SplitPrefillDecodeAttention):
    """By the operator that AscendC's library puts in the place of npu_fused_infer_attention_score."""

    OPERATOR = "npu_fused_infer_attention_score_batch_invariant"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        import batch_invariant_ops  # noqa: F401 - registers the operator

        if not hasattr(torch.ops.batch_invariant_ops, self.OPERATOR):  # another project's package has this name, too
            raise NotCovered(
                "attention by the installed batch_invariant_ops",
                f"it has no {self.OPERATOR}",
                "install AscendC's, or uninstall it and install flash_attn_npu_v3",
            )
        self._kernel = getattr(torch.ops.batch_invariant_ops, self.OPERATOR)

    def attend(self, query: torch.Tensor, part: Part, metadata: Any) -> torch.Tensor:
        pages, page_size = self.key_cache.shape[:2]
        window = self.sliding_window
        out, _ = self._kernel(
            query=query,
            key=self.key_cache.view(pages, page_size, -1),
            value=self.value_cache.view(pages, page_size, -1),
            atten_mask=metadata.attn_mask,
            block_table=metadata.block_tables[part.requests],
            input_layout="TND",
            block_size=page_size,
            actual_seq_lengths=part.ends,
            actual_seq_lengths_kv=metadata.seq_lens_list[part.requests],
            num_key_value_heads=self.num_kv_heads,
            num_heads=self.num_heads,
            scale=self.scale,
            pre_tokens=LARGEST_WINDOW if window is None else window,
            next_tokens=LARGEST_WINDOW if window is None else 0,
            sparse_mode=3 if window is None else 4,
        )
        return out


class FlashAttention3(SplitPrefillDecodeAttention):
    """By flash_attn_npu_v3, whose keys stay in one piece."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.sliding_window is not None:
            raise NotCovered(
                "a sliding window with flash_attn_npu_v3", "the package has none", "install batch_invariant_ops"
            )

    def attend(self, query: torch.Tensor, part: Part, metadata: Any) -> torch.Tensor:
        from flash_attn_npu_v3 import flash_attn_with_kvcache

        numbers: dict[str, Any] = {"dtype": torch.int32, "device": query.device}
        scale = {} if self.scale == self.head_size**-0.5 else {"softmax_scale": self.scale}
        return flash_attn_with_kvcache(
            query,
            self.key_cache,
            self.value_cache,
            cache_seqlens=torch.tensor(metadata.seq_lens_list[part.requests], **numbers),
            page_table=metadata.block_tables[part.requests],
            cu_seqlens_q=torch.tensor([0, *part.ends], **numbers),
            max_seqlen_q=part.longest,
            causal=part.longest > 1,
            num_splits=1,
            **scale,
        )


IMPLEMENTATIONS = {"batch_invariant_ops": AscendCAttention, "flash_attn_npu_v3": FlashAttention3}


class Backend(_Backend):
    """vllm-ascend's backend, its cache and metadata, with another kernel."""

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type[SplitPrefillDecodeAttention]:
        library = attention_library()
        assert library is not None  # the start-up check has refused to go on without one
        return IMPLEMENTATIONS[library]
