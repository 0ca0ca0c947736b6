"""Decoders of vLLM that somebody has read: which of their layers gives what to which, and to nothing else."""

import functools
import logging
from typing import Any, NamedTuple

import torch

from ..reviews import patch_points, sources

logger = logging.getLogger("vllm.batch_invariant")


class Decoder(NamedTuple):
    """Classes of vLLM that make a decoder, each as "module.Class" of ``vllm.model_executor.models``; the last is the
    name that a layer has for its MLP or its experts.
    """

    model: str
    layer: str
    attention: str
    blocks: tuple[str, ...]
    name: str = "mlp"


DECODERS = (
    Decoder("llama.LlamaModel", "llama.LlamaDecoderLayer", "llama.LlamaAttention", ("llama.LlamaMLP",)),
    Decoder("mistral.MistralModel", "mistral.MistralDecoderLayer", "mistral.MistralAttention", ("llama.LlamaMLP",)),
    Decoder("qwen2.Qwen2Model", "qwen2.Qwen2DecoderLayer", "qwen2.Qwen2Attention", ("qwen2.Qwen2MLP",)),
    Decoder("qwen3.Qwen3Model", "qwen3.Qwen3DecoderLayer", "qwen3.Qwen3Attention", ("qwen2.Qwen2MLP",)),
    Decoder(
        "qwen3_moe.Qwen3MoeModel",
        "qwen3_moe.Qwen3MoeDecoderLayer",
        "qwen3_moe.Qwen3MoeAttention",
        ("qwen3_moe.Qwen3MoeMLP", "qwen3_moe.Qwen3MoeSparseMoeBlock"),
    ),
    Decoder(
        "mixtral.MixtralModel",
        "mixtral.MixtralDecoderLayer",
        "mixtral.MixtralAttention",
        ("mixtral.MixtralMoE",),
        "block_sparse_moe",
    ),
)
"""Those whose ``forward`` methods, in ``reviews/functions.toml``, were read."""
_MODELS = "vllm.model_executor.models."


def kinds_of(decoder: Any) -> Decoder | None:
    return next((kinds for kinds in DECODERS if _MODELS + kinds.model == _name(decoder)), None)


def is_known(decoder: Any) -> bool:
    """Whether a module is a whole model of known classes, of which nobody reads the hidden states between layers."""
    kinds = kinds_of(decoder)
    if kinds is None or not was_read() or getattr(decoder, "aux_hidden_state_layers", None):
        return False
    is_whole = (decoder.start_layer, decoder.end_layer) == (0, len(decoder.layers))
    return is_whole and all(
        [_name(layer), _name(layer.self_attn)] == [_MODELS + kinds.layer, _MODELS + kinds.attention]
        and _name(getattr(layer, kinds.name)) in [_MODELS + block for block in kinds.blocks]
        for layer in decoder.layers
    )


def _name(module: torch.nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


@functools.cache
def was_read() -> bool:
    """Whether the installed vLLM has the sources that were read."""
    unread = next(iter(sources.unread("decoders", sources.installed)), None)
    if unread:
        logger.info("%s is not the one known here: sums and norms stay apart.", unread)
    return unread is None


def is_ours(norm: Any) -> bool:
    """Whether a norm is the mode's, of whole rows with a weight."""
    kind = patch_points.CUSTOM_OP.module().op_registry_oot.get("RMSNorm")
    return type(norm) is kind and norm.has_weight and not norm.variance_size_override
