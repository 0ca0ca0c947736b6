"""Encoders of images and audio: their attention is ours, over the keys of each item's own sequences.

A tower is called with the patches or the frames of several items, one after the other, and says where each sequence
begins: an image, a frame of a video, a window of one (Qwen2.5-VL), or some seconds of sound. Sequences see none of each
other, and every other layer of a covered tower computes row by row by operations of the mode's. So an item's embedding
follows from its own patches and its grid, or from its own sound, whatever it shares a call with.
"""

from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F

from ... import envs
from ...errors import NotCovered
from ...ops.attention import AttentionReduction, AttentionSpec, PackedKeys, PagedAttention, attend
from ..reviews import encoding, patch_points, ran, sources
from . import convolution

HEAD_SIZES = (64, 72, 80)
"""Of the towers of Qwen2.5-VL, Qwen3-VL, Gemma 3, Mistral 3, Qwen3-ASR and Whisper."""
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
    """A convolution whose patches do not overlap, which vLLM leaves to cuDNN on a GPU."""
    return self._forward_mulmat(x)


def problem_of(layer: Any) -> str | None:
    """Why a layer of a loaded model is refused, if it is one of those here; vLLM makes them of text models, too."""
    replaced, chosen = patch_points.CUSTOM_OP.module().op_registry_oot, envs.ATTENTION.read()
    if type(layer) is replaced.get(patch_points.CONV2D.attribute):
        return None if layer.enable_linear else "it is a convolution that is not a matmul"
    if isinstance(layer, convolution.Conv1d | convolution.Conv2d):
        return convolution.problem_of(layer)
    if patch_points.MM_ENCODER_ATTENTION.attribute not in [base.__name__ for base in type(layer).__mro__]:
        return None
    if layer.head_size not in HEAD_SIZES:
        return f"encoders have heads of size {', '.join(map(str, HEAD_SIZES))}, and this one of {layer.head_size}"
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
        cu_seqlens = torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=query.device)
    if padding := -size % _STEP:
        flat = [F.pad(one, (0, padding)) for one in flat]
    spec = AttentionSpec(float(self.scale), causal=False)
    implementation = envs.ATTENTION.read()
    reduction = AttentionReduction.of_device(query.device.type, implementation)
    cache = PackedKeys.of(flat[1], flat[2], cu_seqlens)
    out = attend(PagedAttention(flat[0], cache, cu_seqlens.diff(), cu_seqlens, spec, reduction), implementation)
    return out[..., :size].reshape(query.shape)


def prepare(model: Any) -> None:
    """Have the encoders of audio of a loaded model multiply where they convolve, attend by ours in classes of their
    own, too, and see what is theirs alone.
    """
    if "audio" not in ran().encoded.get(type(model).__name__, ()):
        return
    for name in getattr(model, "_tower_model_names", ()):
        tower = model.get_submodule(name)
        convolution.replace_in(tower)
        _attend_by_ours(tower)
        if hasattr(tower, "conv_chunksize"):
            _fill_chunks(tower)


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
