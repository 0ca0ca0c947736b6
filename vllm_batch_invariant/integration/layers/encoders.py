"""Encoders of images and audio: their attention is ours, over the keys of each item's own sequences.

A tower is called with the patches or the frames of several items, one after the other, and says where each sequence
begins: an image, a frame of a video, a window of one (Qwen2.5-VL), or some seconds of sound. Sequences see none of each
other, and every other layer of a covered tower computes row by row by operations of the mode's. So an item's embedding
follows from its own patches and its grid, or from its own sound, whatever it shares a call with.
"""

from collections.abc import Sequence
from functools import lru_cache, partial, wraps
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from ... import envs
from ...errors import NotCovered
from ...ops.attention import AttentionReduction, AttentionSpec, PackedKeys, PagedAttention, attend
from ..reviews import encoding, patch_points, sources
from ..side_table import beside
from . import complex_rotary, convolution, relative_positions

HEAD_SIZES = (64, 72, 80, 88, 96, 128)
"""Of the towers of Qwen2.5-VL, Qwen3-VL, Gemma 3 and 4, Llama 4, Mistral 3, InternVL, GLM, Muse Glimmer, Qwen2-Audio,
Qwen3-ASR, GLM-ASR and Whisper.
"""
ON_CPUS_ALONE = (96,)
"""Those that no GPU has run."""
IN_TRANSFORMERS = "vllm_batch_invariant"
"""The name of our attention among Transformers' implementations."""
IN_BLOCKS = "vllm_batch_invariant_blocks"
"""The name there of masks whose elements say whether a key is seen, and of no attention."""
WITH_TERMS = "vllm_batch_invariant_terms"
"""The name there of our attention whose scores have terms (:mod:`.relative_positions`)."""
_WITH_TERMS = ("ParakeetEncoder",)
"""Towers that have such scores."""
_IN_BLOCKS = ("Gemma4AudioModel",)
"""Towers that attend in a class of their own under such masks, from each block of an item's rows to those near it: by
products and a softmax that are the mode's.
"""
_STEP = 16
"""Head sizes of the kernels are multiples of it: a head of 72 has zeros behind it, which add nothing to a score."""
_ONLY_ON = {"vllm.v1.worker.gpu.": "cuda", "vllm.v1.attention.backends.utils.": "cuda"}
"""How the names of functions begin that one device type alone uses: the second model runner's."""


def install() -> None:
    """Register the layers as the out-of-tree forms of vLLM's, so that every tower builds them instead."""
    if not patch_points.MM_ENCODER_ATTENTION.is_there():
        return
    patch_points.replace_layer(patch_points.CONV2D.get(), "BatchInvariant", _as_matmul)
    layer: Any = patch_points.MM_ENCODER_ATTENTION.get()

    def maybe_compute_seq_lens(cls: type, *args: Any, **named: Any) -> None:
        return None

    def maybe_recompute_cu_seqlens(
        cls: type, attn_backend: Any, cu_seqlens: Any, hidden_size: int, tp_size: int, device: Any, **named: Any
    ) -> torch.Tensor:
        """Where sequences begin, in rows: some of vLLM's backends want offsets of elements."""
        return torch.from_numpy(cu_seqlens).to(device)

    offsets: dict[str, Any] = {
        "maybe_compute_seq_lens": classmethod(maybe_compute_seq_lens),
        "maybe_recompute_cu_seqlens": classmethod(maybe_recompute_cu_seqlens),
    }
    patch_points.replace_layer(layer, "BatchInvariant", _forward, **offsets)


def _as_matmul(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A convolution, which vLLM leaves to cuDNN on a GPU, and where its windows overlap to oneDNN on a CPU."""
    if self.enable_linear:
        return self._forward_mulmat(x)
    return convolution.convolve(x, self.weight, self.bias, self.stride, self.padding, self.groups)


def problem_of(layer: Any) -> str | None:
    """Why a layer of a loaded model is refused, if it is one of those here; vLLM makes them of text models, too."""
    replaced, chosen = patch_points.CUSTOM_OP.module().op_registry_oot, envs.ATTENTION.read()
    if type(layer) is replaced.get(patch_points.CONV2D.attribute):
        return None if layer.enable_linear else convolution.problem_of(layer)
    if isinstance(layer, convolution.Conv1d | convolution.Conv2d):
        return convolution.problem_of(layer)
    if patch_points.MM_ENCODER_ATTENTION.attribute not in [base.__name__ for base in type(layer).__mro__]:
        return None
    if problem := _of_size(layer.head_size):
        return problem
    return None if chosen in encoding.ATTENTION else f"encoders have not been run with {envs.ATTENTION.name}={chosen}"


def _forward(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: torch.Tensor | None = None,
    sequence_lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each row over all keys of its sequence.

    Args:
        query: [batch, rows, query heads, head size], or the last two as one.
        key: the same with KV heads.
        value: as ``key``.
        cu_seqlens: [sequences + 1], where each begins, of all rows of the batch; None if each of the batch is one.
        max_seqlen: not read: no schedule follows the longest sequence of a call.
        sequence_lengths: not read.
    """
    batch, rows, size = query.shape[0], query.shape[1], self.head_size
    flat = [one.reshape(batch * rows, -1, size) for one in (query, key, value)]
    if cu_seqlens is None:
        cu_seqlens = _starts_of(batch, rows, query.device)
    return attend_within(flat, cu_seqlens, float(self.scale)).reshape(query.shape)


@lru_cache(maxsize=2)
def _starts_of(items: int, rows: int, device: torch.device) -> torch.Tensor:
    """Where items of as many rows each begin: the same tensor for every layer of a tower, since a plan is kept beside
    it (:func:`_plan_of`).
    """
    return torch.arange(0, (items + 1) * rows, rows, dtype=torch.int32, device=device)


def attend_within(qkv: Sequence[torch.Tensor], starts: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of each row over the keys of its sequence.

    Args:
        qkv: queries [rows, query heads, head size], and keys and values [rows, KV heads, head size].
        starts: [sequences + 1], where each begins.
        scale: of scores.
    """
    size, implementation = qkv[0].shape[-1], envs.ATTENTION.read()
    query, key, value = (F.pad(one, (0, -size % _STEP)) if size % _STEP else one for one in qkv)
    spec = AttentionSpec(scale, causal=False)
    reduction = AttentionReduction.of_device(query.device.type, implementation)
    call = PagedAttention(query, PackedKeys.of(key, value, starts), starts.diff(), starts, spec, reduction)
    return attend(call, implementation, plan=_plan_of(call, starts, implementation))[..., :size]


def _plan_of(call: PagedAttention, starts: torch.Tensor, implementation: str) -> Any:
    """The plan of the first layer that attends to these sequences serves the others: a plan asks the host for lengths,
    which waits for all that the GPU has to do. None on a CPU, and where another implementation serves.
    """
    if not starts.is_cuda or implementation not in ("auto", "triton"):
        return None
    from ...ops.attention.certificate import kernels_of_packed
    from ...ops.attention.cuda import plan_alone
    from ...ops.attention.shapes import AttentionShape

    shape = AttentionShape.of(call)
    kept, key = beside(starts), (_version(starts), len(call.query), shape)
    if kept.plan is None or kept.plan[0] != key or torch.cuda.is_current_stream_capturing():
        call.check()
        plan = plan_alone(call, kernels_of_packed(shape, starts.device))
        kept.plan = key, plan
        return plan
    return kept.plan[1]


def attend_in_transformers(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a tower that is Transformers' class (Qwen2-Audio's, Gemma 4's), over the first keys of each item.

    Args:
        module: not read.
        query: [items, heads, rows, head size].
        key: the same with KV heads.
        value: as ``key``.
        attention_mask: [items, 1, rows or 1, rows], 0 at keys that are seen, which are the first of an item, and else
            minus infinity, or whether they are; None where all are.
        scaling: of scores.
        named: not read.

    Returns:
        [items, rows, heads, head size], 0 in rows behind those that are seen, which nobody reads; and no weights.
    """
    items, heads, rows, size = query.shape
    flat = [one.transpose(1, 2).flatten(0, 1) for one in (query, key, value)]
    if attention_mask is None:
        starts = _starts_of(items, rows, query.device)
        return attend_within(flat, starts, scaling).view(items, rows, heads, size), None
    seen, starts = _seen_rows(attention_mask)
    out = query.new_zeros(items * rows, heads, size)
    out[seen] = attend_within([one[seen] for one in flat], starts, scaling)
    return out.view(items, rows, heads, size), None


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was written to, as far as PyTorch counts: not in inference mode, where towers make theirs anew
    for each call.
    """
    return 0 if tensor.is_inference() else tensor._version


def _seen_rows(attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows of all items a mask shows, and where each item begins among them: once for all layers, because the
    host waits for their number.
    """
    kept = beside(attention_mask)
    if kept.seen is None or kept.seen[0] != _version(attention_mask):
        mask = attention_mask[:, 0, 0]
        mask = mask if mask.dtype == torch.bool else mask == 0
        starts = F.pad(mask.sum(-1).cumsum(0, dtype=torch.int32), (1, 0))
        kept.seen = _version(attention_mask), mask.flatten().nonzero()[:, 0], starts
    return kept.seen[1:]


def mask_in_transformers(*sizes: Any, attention_mask: torch.Tensor | None = None, **named: Any) -> torch.Tensor | None:
    """What :func:`attend_in_transformers` is given as a mask, where Transformers makes one: without a function of its
    own for that, it would give none, and padding would be seen.

    Args:
        sizes: not read.
        attention_mask: [items, rows], whether a row is no padding; None where none is.
        named: not read.
    """
    return None if attention_mask is None else attention_mask[:, None, None]


def problem_of_tower(tower: Any) -> str | None:
    """Why a tower is refused as a whole: it attends under a mask, or is Transformers' class and attends by another
    implementation.
    """
    if getattr(tower, "apply_encoder_attention_mask", False):
        return "its attention has a mask"
    if not _is_in_transformers(tower):
        return None
    chosen, ours = tower.config._attn_implementation, _attention_of(tower)
    if chosen != ours:
        return f"Transformers' attention is {chosen}"
    if ours != IN_TRANSFORMERS:
        return None
    sizes = (layer.head_dim for layer in tower.modules() if hasattr(layer, "head_dim"))
    return next((problem for size in sizes if (problem := _of_size(size))), None)


def problem_of_heads(tower: Any) -> str | None:
    """Why a tower is refused on a GPU, where none has run heads of its size."""
    if envs.starts_untried() or not any(weight.is_cuda for weight in tower.parameters()):
        return None
    untried = {getattr(layer, "head_size", 0) for layer in tower.modules()} & {*ON_CPUS_ALONE}
    return f"no GPU has run heads of {', '.join(map(str, untried))}" if untried else None


def problem_of_attention(layer: Any) -> str | None:
    """Why a layer of a class of Transformers' is refused: attention that its configuration names is neither vLLM's,
    which is looked at where it is, nor ours.
    """
    chosen = getattr(getattr(layer, "config", None), "_attn_implementation", None)
    is_known = chosen in (None, "vllm", IN_TRANSFORMERS, IN_BLOCKS, WITH_TERMS) or not _is_in_transformers(layer)
    return None if is_known else f"Transformers' attention is {chosen}"


def _of_size(size: int) -> str | None:
    """Why heads of a size are refused."""
    known = ", ".join(map(str, HEAD_SIZES))
    return None if size in HEAD_SIZES else f"encoders have heads of size {known}, and this one of {size}"


def towers(model: Any) -> dict[str, Any]:
    """What a loaded multimodal model encodes with, by its names: what vLLM notes when it builds that, of which it keeps
    the last alone where a model has one for images and one for audio (Gemma 4), and classes of Transformers', also
    inside of what it notes (Nemotron 3 Nano Omni's of sounds).
    """
    noted = {name: model.get_submodule(name) for name in getattr(model, "_tower_model_names", ())}
    own = {name: part for name, part in model.named_children() if _is_in_transformers(part)} if noted else {}
    inside = {
        f"{name}.{held}": part
        for name, tower in noted.items()
        if not _is_in_transformers(tower)
        for held, part in tower.named_children()
        if _is_in_transformers(part) and hasattr(part, "config")
    }
    return noted | own | inside


def prepare(model: Any) -> None:
    """Have the encoders of a loaded model multiply complex numbers as real ones; those that are Transformers' classes
    attend by ours; and those of audio multiply where they convolve, attend by ours in classes of their own, too, and
    see what is theirs alone. Of Idefics 3 a square of zeros is encoded like any other: vLLM leaves it out, and cannot
    tell whose rows those behind it are.
    """
    kinds = encoding.encoded_by(type(model))
    parts: Any = getattr(model, "model", None)
    if kinds and hasattr(parts, "image_pixels_to_features"):
        parts.image_pixels_to_features = partial(parts.image_pixels_to_features, remove_padding=False)
    for tower in towers(model).values() if kinds else ():
        complex_rotary.replace_in(tower)
        relative_positions.replace_in(tower)
        if _is_in_transformers(tower):
            from transformers import AttentionInterface, AttentionMaskInterface
            from transformers.masking_utils import sdpa_mask

            AttentionInterface.register(IN_TRANSFORMERS, attend_in_transformers)
            AttentionMaskInterface.register(IN_TRANSFORMERS, mask_in_transformers)
            AttentionMaskInterface.register(IN_BLOCKS, sdpa_mask)
            AttentionInterface.register(WITH_TERMS, relative_positions.attend_in_transformers)
            tower.config._attn_implementation = _attention_of(tower)
        if "audio" in kinds:
            convolution.replace_in(tower)
            _attend_by_ours(tower)
            if hasattr(tower, "conv_chunksize"):
                _fill_chunks(tower)
            if type(tower).__name__ in _WITH_TERMS:
                _encode_one_by_one(tower)
        if type(tower).__name__ in _IN_BLOCKS:
            _keep_axes(model)


def _attention_of(tower: Any) -> str:
    """The name of the attention that a tower of Transformers' is given."""
    kind = type(tower).__name__
    return IN_BLOCKS if kind in _IN_BLOCKS else WITH_TERMS if kind in _WITH_TERMS else IN_TRANSFORMERS


def _is_in_transformers(tower: Any) -> bool:
    return type(tower).__module__.startswith("transformers.")


def _attend_by_ours(tower: torch.nn.Module) -> None:
    """Have attention in a class that a model derives from vLLM's (Whisper's) be ours, too."""
    base: Any = patch_points.MM_ENCODER_ATTENTION.get()
    for layer in tower.modules():
        kind = type(layer)
        if isinstance(layer, base) and kind.__module__.partition(".")[0] != __package__.partition(".")[0]:
            layer.__class__ = type(f"BatchInvariant{kind.__name__}", (kind,), {"__module__": __name__})
            layer._forward_method = MethodType(_forward, layer)


def _fill_chunks(tower: Any) -> None:
    """Have a tower that convolves sound in chunks (Qwen3-ASR's) fill the last of an item as far as a whole one. vLLM
    fills all of a call to the longest of them, and what stands behind an item decides its last row.
    """
    encode = tower.forward

    @wraps(encode)
    def forward(input_features: torch.Tensor, feature_lens: torch.Tensor, aftercnn_lens: torch.Tensor) -> torch.Tensor:
        size = 2 * tower.n_window
        if bool((feature_lens >= size).any()):
            return encode(input_features, feature_lens, aftercnn_lens)
        silence, whole = input_features.new_zeros(input_features.shape[0], size), feature_lens.new_tensor([size])
        rows = encode(
            torch.cat([input_features, silence], 1),
            torch.cat([feature_lens, whole]),
            torch.cat([aftercnn_lens, tower._get_cnn_output_lengths(whole)]),
        )
        return rows[: int(aftercnn_lens.sum())]

    tower.forward = forward


def _encode_one_by_one(tower: Any) -> None:
    """Have a tower that is given sounds filled to the longest of a call (Parakeet) encode each by itself, without what
    stands behind it: softmax adds a row in an order that follows its length on a GPU, and there the longest of the call
    would decide that.
    """
    encode = tower.forward

    @wraps(encode)
    def forward(input_features: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        lengths = attention_mask.sum(-1).tolist()
        made = [encode(one[None, :length]) for one, length in zip(input_features, lengths, strict=True)]
        rows = pad_sequence([one.last_hidden_state[0] for one in made], batch_first=True)
        return type(made[0])(last_hidden_state=rows)

    tower.forward = forward


def _keep_axes(model: Any) -> None:
    """Have a model whose sounds are filled to the longest of a call (Gemma 4) get them one by one. Where all have one
    frame, vLLM takes the axis of frames for one that it does not need, and its encoder refuses what is left.
    """
    parse = model._parse_and_validate_audio_input

    @wraps(parse)
    def _parse_and_validate_audio_input(**given: Any) -> Any:
        names = "input_features_padded", "input_features_mask"
        return parse(**given | {name: [*given[name]] for name in names if name in given})

    model._parse_and_validate_audio_input = _parse_and_validate_audio_input


def clear_before_each_step(model: Any) -> None:
    """Have a loaded model let go of features that its tower adds to the first layers (Qwen3-VL's deepstack) before it
    embeds the tokens of a step. vLLM does so behind the model's forward, which a replayed CUDA graph does not run: the
    features of an image's last token, in a step of one token a request, would be added to other requests' tokens.
    """
    clear = getattr(model, "_clear_deepstack_input_embeds", None)
    if clear is None:
        return
    embed = model.embed_input_ids

    @wraps(embed)
    def embed_input_ids(*args: Any, **named: Any) -> torch.Tensor:
        clear(getattr(model, "deepstack_input_embeds_num_tokens", 0))
        return embed(*args, **named)

    model.embed_input_ids = embed_input_ids


def check(device_type: str) -> None:
    """Refuse an installed vLLM with a function that encodes, or that hands on what was encoded, and was not reviewed.

    Raises:
        NotCovered: with the names of the first three.
    """
    unread = sources.unread("encoding", sources.installed)
    names = [
        name
        for name in unread
        if all(only == device_type for start, only in _ONLY_ON.items() if name.startswith(start))
    ]
    if names:
        raise NotCovered(
            f"images and audio in vLLM {patch_points.installed_version()}",
            f"nobody has reviewed its {', '.join(names[:3])}{' and others' * (len(names) > 3)}",
            "serve text only, with --language-model-only",
        )
