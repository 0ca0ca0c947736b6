"""Attention layers of vLLM: the KV cache is written first, then one path serves prefill and decode, in fixed splits.
Layers of encoders have no cache: all tokens of a sequence come in one step, and see each other. Those of cross
attention have a cache of what an encoder gave, which every token of the decoder sees from its first step on. Those of
a draft model that drafts all tokens at once (DFlash) have a cache, and a step's tokens of a request see each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, AttentionType
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec

from ... import envs
from ...errors import NotCovered
from ...ops import kv_cache as cache_operation
from ...ops.attention import (
    NO_RANGE,
    AttentionReduction,
    AttentionSpec,
    PackedKeys,
    PagedAttention,
    PagedCache,
    attend,
)
from ...ops.common.kv_cache import E4M3, CacheSlots
from ..coverage import DTYPES, ENCODER_HEAD_SIZES, HEAD_SIZES, SIZES
from ..reviews import claims, patch_points
from ..reviews.schemes import FP8_CACHES, OF_HEADS, OF_TOKENS, ONE_SCALE, TOKEN_CACHE

_CUTS = "mm_prefix_clamp_sliding_window"
"""What vLLM's layers call it that their window cuts images, too."""


@dataclass
class Metadata:
    """One batch: which request each row belongs to, and where its keys lie."""

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    plans: dict[tuple[int | None, ...], Any] = field(default_factory=dict)
    """The step's plan, by what layers ask that decides it, as their query heads and window: a drafter's may ask other
    things than the model's. Empty where calls need no plan.
    """
    ranges: torch.Tensor | None = None
    """[tokens, 2] int32, the first and the last position that a token sees of the image that it belongs to, or
    NO_RANGE; None where no token sees what is behind it.
    """
    causal: bool = True
    """Whether a decoder's tokens see none after them, as the layers that are called with it must."""

    @property
    def num_decode_tokens(self) -> int:
        """Tokens that vLLM's latent attention takes as it takes those of decode: all."""
        return self.num_actual_tokens


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Takes what it needs from vLLM's common metadata; nothing is planned by the batch."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._of_encoder = isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)
        self._sees_all = isinstance(kv_cache_spec, EncoderOnlyAttentionSpec | CrossAttentionSpec)
        layers = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", {})
        self._sees_images, self._window = _of_images(layer_names, layers)
        of_group = [layers[name] for name in layer_names if name in layers]
        self._of_blocks = any(getattr(getattr(layer, "impl", None), "is_of_block", False) for layer in of_group)
        for layer in of_group:
            if reads_another_cache(layer):
                layer.impl.writer = layers[layer.kv_sharing_target_layer_name]

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        causal = common_attn_metadata.causal
        if causal is not True and not (causal is False and (self._sees_all or self._of_blocks)):
            raise _not_causal()
        return Metadata(
            common_attn_metadata.num_actual_tokens,
            common_attn_metadata.query_start_loc,
            common_attn_metadata.seq_lens,
            common_attn_metadata.block_table_tensor,
            ranges=ranges_of(common_attn_metadata, self._window) if self._sees_images else None,
            causal=causal,
        )


def _not_causal() -> NotCovered:
    return NotCovered(
        "attention that is not causal over a KV cache",
        "a row may see a key that is not there yet",
        "serve a decoder-only text model, or an encoder",
    )


def _is_of_block() -> bool:
    """Whether vLLM makes layers of a draft model whose tokens see those after them, which its configuration says then.
    The gate refuses that of any other model.
    """
    try:
        config = patch_points.CURRENT_CONFIG.get()()
    except AssertionError:  # none is at hand, so that vLLM makes no model
        return False
    return bool(getattr(getattr(config, "attention_config", None), "use_non_causal", False))


def _of_images(layer_names: list[str], layers: Mapping[str, Any]) -> tuple[bool, int | None]:
    """Whether tokens of an image see all of it in some layers, and how many keys behind which they see nothing of it.
    Layers of a model with a window that images are cut by (Gemma 4's) do, its others do not, nor do those of a drafter
    that read their caches; in other models all do, whatever their windows.
    """
    if not any(getattr(layer, _CUTS, False) for layer in layers.values()):
        return True, None
    of_model = [layers[name] for name in layer_names if not reads_another_cache(layers[name])]
    if not of_model:
        return False, None
    [cuts] = {getattr(layer, _CUTS, False) for layer in of_model}
    return cuts, of_model[0].impl.spec.sliding_window if cuts else None


def ranges_of(batch: Any, window: int | None = None) -> torch.Tensor | None:
    """:attr:`Metadata.ranges` of a step, on the host, from what vLLM's model runner says of the images of its requests.

    Args:
        batch: vLLM's common metadata.
        window: a token sees that many keys of its image, itself and those before it, at most, and all behind it.

    Raises:
        RuntimeError: an image is cut: its first tokens would not see its last ones.
    """
    asked = getattr(batch, "mm_req_doc_ranges", None) or {}
    if not any(asked.values()):
        return None
    # What runs ahead of sampling knows no more of a length than the most that it may be, but of a prompt all.
    starts, lengths, found = batch.query_start_loc_cpu.tolist(), batch.seq_lens_cpu_upper_bound.tolist(), None
    for request, images in asked.items():
        start, stop, length = starts[request], starts[request + 1], lengths[request]
        first = length - (stop - start)  # position of the request's first row
        for low, high in images:
            if high < first or low >= length:
                continue
            if high >= length:
                raise RuntimeError(f"a step ends at position {length} inside an image of positions {low} to {high}")
            if found is None:
                found = torch.tensor([NO_RANGE], dtype=torch.int32).repeat(batch.num_actual_tokens, 1)
            tokens = torch.arange(max(low, first), high + 1, dtype=torch.int32)
            seen = torch.full_like(tokens, low) if window is None else (tokens - window + 1).clamp(min=low)
            found[start + tokens - first] = torch.stack([seen, torch.full_like(tokens, high)], 1)
    return found


_SCALE_BYTES = torch.float32.itemsize
_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def split_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value cache [pages, KV heads, page, head size], of vLLM's [pages, KV heads, page, 2 * head size]; behind
    the head size of both are the bytes of a scale, where each token has one.
    """
    return kv_cache.split(kv_cache.shape[-1] // 2, dim=-1)


def cache_of(layer: torch.nn.Module) -> torch.Tensor:
    """What :func:`split_cache` takes, as an engine has given it to an attention layer of vLLM."""
    held = layer.kv_cache
    return held[0] if isinstance(held, list) else held


def reads_another_cache(layer: torch.nn.Module) -> bool:
    """Whether keys and values are those of another layer, which writes them: a drafter's are told so when they exist
    already.
    """
    return getattr(layer, "kv_sharing_target_layer_name", None) is not None


def key_cache_of(layer: torch.nn.Module) -> torch.Tensor:
    """Its keys, [pages, KV heads, page, head size]; of codes their bytes. A latent cache has no dimension of heads."""
    held = cache_of(layer)
    return pages_of(held) if held.dim() == 3 else split_cache(held)[0]


def refuse_quantised(*scales: torch.Tensor | None) -> None:
    """Refuse an output that has one of these.

    Raises:
        NotCovered: it has.
    """
    if any(scale is not None for scale in scales):
        raise NotCovered(
            "attention with quantised output", "its scale may follow the batch", "serve the unquantised model"
        )


def pages_of(kv_cache: torch.Tensor) -> torch.Tensor:
    """The latent cache [pages, 1, page, latent + turned size] of vLLM's [pages, page, ...]."""
    return kv_cache.unsqueeze(1)


class FixedSplitAttention(AttentionImpl[Metadata]):
    """One attention layer."""

    reduction = AttentionReduction.of_device("cpu")
    attn_types: ClassVar[tuple[str, ...]] = (AttentionType.DECODER,)
    """Kinds of layers that it serves."""
    serves_encoders: ClassVar[tuple[str, ...]] = ()
    """Implementations whose rows may see keys after them."""
    supports_quant_query_input = False
    """Else vLLM would quantise queries beside a cache in fp8."""
    _scales: tuple[torch.Tensor, torch.Tensor] | None = None
    is_of_block = False
    """Whether a step's tokens of a request see each other, and all keys before them in a cache."""
    _takes_causal: bool | None = None
    """:attr:`Metadata.causal` of the steps that it takes; None: any."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unknown: object,
    ) -> None:
        if attn_type not in self.attn_types:
            raise NotCovered(
                f"{attn_type} attention",
                f"the mode has {' and '.join(self.attn_types)} attention here",
                "serve a decoder-only model",
            )
        self.is_of_encoder = attn_type == AttentionType.ENCODER_ONLY
        """Whether all tokens of a sequence see each other, without a cache."""
        is_decoder = attn_type == AttentionType.DECODER
        self.is_of_block = is_decoder and _is_of_block()
        causal = is_decoder and not self.is_of_block
        self._takes_causal = causal if is_decoder else None
        if head_size not in self.head_sizes:
            raise NotCovered(
                f"attention heads of size {head_size}", f"the kernels have sizes {SIZES}", "serve another model"
            )
        used = {name: value for name, value in unknown.items() if value not in (None, False, -1)}
        if used:
            raise NotCovered(
                f"the attention option {next(iter(used))}", "it is not in the reduction", "serve another model"
            )
        # Sinks are a parameter of the model, whose values come later.
        self._slopes, slopes = alibi_slopes, None
        if alibi_slopes is not None:
            slopes = torch.tensor(alibi_slopes, dtype=torch.float32)
        self.spec = AttentionSpec(float(scale), sliding_window, logits_soft_cap or None, slopes, sinks, causal=causal)
        """What the layer asks."""
        self.num_heads, self.head_size, self.scale = num_heads, head_size, self.spec.scale
        self.num_kv_heads = num_kv_heads or num_heads
        if kv_cache_dtype not in ("auto", *DTYPES, *FP8_CACHES):
            raise NotCovered(
                f"a KV cache in {kv_cache_dtype}", "the kernels do not read it", "pass --kv-cache-dtype fp8 or auto"
            )
        if not is_decoder and kv_cache_dtype in FP8_CACHES:
            raise NotCovered(
                f"{attn_type} attention with a KV cache in {kv_cache_dtype}",
                "an encoder has no KV cache, and of what it gave none has been run in fp8",
                "leave --kv-cache-dtype out",
            )
        self.kv_cache_dtype = kv_cache_dtype
        self.writer: Any = None
        """The layer that writes the cache that this one reads, if it is another's."""
        self.implementation = envs.ATTENTION.read()
        if not causal and self.implementation not in ("auto", *self.serves_encoders):
            raise NotCovered(
                f"{attn_type} attention with {envs.ATTENTION.name}={self.implementation}",
                "that implementation sees no keys after a token",
                f"leave {envs.ATTENTION.name} out",
            )

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Those that such a layer may have."""
        return ENCODER_HEAD_SIZES if self.is_of_encoder else HEAD_SIZES

    @property
    def tail(self) -> int:
        """Elements of a key behind those that are its value, too."""
        return 0

    def restore_after_sleep(self) -> None:
        """Write again what lies beside the weights and vLLM does not know: sleep of level 2 lets it go."""
        if self.spec.alibi_slopes is not None:
            self.spec.alibi_slopes.copy_(torch.tensor(self._slopes, dtype=torch.float32, device="cpu"))

    @property
    def holds_codes(self) -> bool:
        """Whether the cache holds codes in e4m3."""
        return self.kv_cache_dtype in FP8_CACHES

    @property
    def scales_tokens(self) -> bool:
        """Whether these codes have a scale a token and head, which lie beside them."""
        return self.kv_cache_dtype == TOKEN_CACHE

    def kind_of_scales(self, layer: Any) -> str:
        """What has a scale of its own in the cache, of :data:`..reviews.schemes.CACHE_SCALES`; empty without codes."""
        if not self.holds_codes:
            return ""
        given = ONE_SCALE if layer._k_scale.numel() == 1 else OF_HEADS
        return OF_TOKENS if self.scales_tokens else given

    def scales_of(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Those of the keys' codes and of the values', fp32, one number each or one a head, in memory that stays: a
        CUDA graph reads it. New weights may come with new tensors, whose numbers are copied. None of a cache without
        codes, and of one that has its own. Of another layer's cache those are read by which that layer writes: its own
        are none of a checkpoint's.
        """
        if not self.holds_codes or self.scales_tokens:
            return None, None
        if self.writer is not None:
            return self.writer.impl.scales_of(self.writer)
        if self._scales is None:
            self._scales = layer._k_scale, layer._v_scale
        for name, held in zip(("_k_scale", "_v_scale"), self._scales, strict=True):
            given = getattr(layer, name)
            if given is not held:
                held.copy_(given.reshape(held.shape))
                setattr(layer, name, held)
        return self._scales

    def _parts(self, layer: Any, kv_cache: torch.Tensor) -> _Parts:
        """Keys, values and the scales of both, as operations take them."""
        if not self.scales_tokens:
            keys, values = split_cache(kv_cache.view(E4M3) if self.holds_codes else kv_cache)
            return keys, values, *self.scales_of(layer)
        halves = split_cache(kv_cache.view(torch.uint8))
        keys, values = (half[..., :-_SCALE_BYTES].view(E4M3) for half in halves)
        k_scale, v_scale = (half[..., -_SCALE_BYTES:].view(torch.float32)[..., 0] for half in halves)
        return keys, values, k_scale, v_scale

    def _slots(self, layer: torch.nn.Module, kv_cache: torch.Tensor, slots: torch.Tensor) -> CacheSlots:
        keys, values, *scales = self._parts(layer, kv_cache)
        return CacheSlots(keys, values, slots, *scales)

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the step's keys and values to their pages, before anything reads them. A negative slot is padding. An
        encoder has no pages.
        """
        if self.is_of_encoder:
            return
        cache_operation.write(key, value, self._slots(layer, kv_cache, slot_mapping))

    def slots_of_step(self, layer: torch.nn.Module) -> CacheSlots | None:  # of some devices
        """Where the step's keys and values go, for an operation that writes them before the layer is called, which then
        gets none; None where the layer has to write them.
        """
        return None

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,  # read from the cache, but for an encoder's
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the step's rows over their requests' pages, an encoder's over each other; a warm-up passes no
        metadata.
        """
        refuse_quantised(output_scale, output_block_scale)
        if attn_metadata is None:
            return output
        if self._takes_causal not in (None, attn_metadata.causal):
            raise _not_causal()
        rows = attn_metadata.num_actual_tokens
        if self.is_of_encoder:
            cache: PagedCache = PackedKeys.of(key[:rows], value[:rows], attn_metadata.query_start_loc)
        else:
            cache = self._cache_of_step(layer, kv_cache, attn_metadata)
        self._attend(layer, query[:rows], cache, attn_metadata, output[:rows])
        return output

    def _cache_of_step(self, layer: torch.nn.Module, kv_cache: torch.Tensor, batch: Metadata) -> PagedCache:
        keys, values, *scales = self._parts(layer, kv_cache)
        return PagedCache(keys, values, batch.block_table, None, *scales)

    def _attend(
        self, layer: torch.nn.Module, query: torch.Tensor, cache: PagedCache, batch: Metadata, out: torch.Tensor
    ) -> None:
        attend(self._call(query, cache, batch), self.implementation, out, batch.plans.get(self.planned_as))

    @property
    def planned_as(self) -> tuple[int, int | None, bool]:
        """Which of a step's plans is this layer's."""
        return self.num_heads, self.spec.sliding_window, self.spec.causal

    def _call(self, query: torch.Tensor, cache: PagedCache, batch: Metadata) -> PagedAttention:
        self.spec = self.spec.to(query.device)  # once: a CUDA graph cannot copy from the host
        lengths, starts = batch.seq_lens, batch.query_start_loc
        return PagedAttention(query, cache, lengths, starts, self.spec, self.reduction, batch.ranges)


class ExactAttention(FixedSplitAttention):
    """One attention layer in exact arithmetic."""

    reduction = AttentionReduction.of_device("cpu", "exact")

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.implementation = "exact"
        if self.spec.alibi_slopes is not None or self.spec.sinks is not None or not self.spec.causal:
            raise NotCovered(
                "attention with ALiBi, sinks or tokens that see later ones in exact arithmetic",
                "it has no definition there",
                f"serve another model, or leave {envs.ARITHMETIC.name} out",
            )


def _not_supported(cls: type, *args: object, **named: object) -> bool:  # whatever is asked
    return False


class FixedSplitBackendMixin:
    """What a backend of ours says of itself; cache layout and page sizes it takes from vLLM's for its device."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *FP8_CACHES]

    def __init_subclass__(cls) -> None:
        """Take back what the backend of vLLM's claims that it inherits from, and this project has not proven."""
        super().__init_subclass__()
        for name in dir(cls):
            if name.startswith("supports_") and claims().verdict(name) != "known":
                setattr(cls, name, classmethod(_not_supported) if callable(getattr(cls, name)) else False)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return sorted({*ENCODER_HEAD_SIZES, *HEAD_SIZES})  # which of them a layer may have is checked where it is made

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """A layer's part of a page: vLLM's, but for a scale behind the keys of a token and head and one behind its
        values, where each has one. As vLLM's Triton backend has it, on every device.
        """
        if spec.kv_quant_mode.name.lower() != TOKEN_CACHE:
            return spec
        return replace(spec, state_content_bytes=spec.head_size + spec.head_size_v + 2 * _SCALE_BYTES)

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Of layers of a draft model: those of a target are refused when it is loaded."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True  # where they have run is asked before

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in cls.get_impl_cls().attn_types

    @staticmethod
    def get_impl_cls() -> type[FixedSplitAttention]:
        return FixedSplitAttention

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder
