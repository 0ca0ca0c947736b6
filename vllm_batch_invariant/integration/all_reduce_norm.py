"""The all-reduce behind a row-parallel layer and the norm behind that as one operation, on GPUs.

A decoder layer of the models here hands what its attention and its MLP give to the next norm, and to nothing else::

    hidden_states, residual = norm(row_parallel(x), residual)

So the row-parallel layer gives its rank's partial result, and the norm adds those of all ranks first. The bits are
those of the two operations apart. Somebody has read which classes do so: with another class or another source the
operations stay apart, and so they do in a stage of a pipeline, and where a drafter reads hidden states between layers.
"""

import functools
import logging
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import patch_points, reviewed_sampling, tensor_tree
from .reviewed_sources import REVIEWED_DECODERS

logger = logging.getLogger("vllm.batch_invariant")


class Decoder(NamedTuple):
    """Classes of vLLM that make a decoder, each as "module.Class" of ``vllm.model_executor.models``."""

    model: str
    layer: str
    attention: str
    mlp: str


DECODERS = (
    Decoder("llama.LlamaModel", "llama.LlamaDecoderLayer", "llama.LlamaAttention", "llama.LlamaMLP"),
    Decoder("mistral.MistralModel", "mistral.MistralDecoderLayer", "mistral.MistralAttention", "llama.LlamaMLP"),
    Decoder("qwen2.Qwen2Model", "qwen2.Qwen2DecoderLayer", "qwen2.Qwen2Attention", "qwen2.Qwen2MLP"),
    Decoder("qwen3.Qwen3Model", "qwen3.Qwen3DecoderLayer", "qwen3.Qwen3Attention", "qwen2.Qwen2MLP"),
)
"""Those whose ``forward`` methods, in :data:`~.reviewed_sources.REVIEWED_DECODERS`, were read."""
_MODELS = "vllm.model_executor.models."


def look_after_loading(worker: type) -> None:
    """Have a class of workers fuse the all-reduces and norms of each model that it has loaded."""
    load = worker.load_model
    if getattr(load, "fuses", False):
        return

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **named: Any) -> None:
        load(self, *args, **named)
        group = patch_points.TENSOR_PARALLEL.get()
        ours = getattr(getattr(group, "device_communicator", None), "batch_invariant_all_reduce", None)
        if ours and (count := fuse(self.get_model(), ours)):
            logger.info("%d norms add the partial results of the workers themselves.", count)

    load_model.fuses = True
    worker.load_model = load_model


def fuse(model: torch.nn.Module, all_reduce: Any) -> int:
    """Fuse what is known of a model; returns how many norms add partial results from now on.

    Args:
        model: as vLLM has loaded it.
        all_reduce: of the model's workers, an :class:`~..ops.all_reduce.cuda.AllReduce`.
    """
    fused = 0
    for decoder in model.modules():
        pairs = list(_pairs(decoder)) if _is_known(decoder) else []
        if pairs and all(_adds_ranks(row) and _is_ours(norm) for row, norm in pairs):
            for row, norm in pairs:
                tensor_tree.leave_sum(row)
                norm._forward_method = _after_all_reduce(norm, all_reduce)
            fused += len(pairs)
    return fused


def _pairs(decoder: Any) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
    """Row-parallel layers, each with the norm behind it."""
    followers = [layer.input_layernorm for layer in decoder.layers[1:]]
    for layer, next_norm in zip(decoder.layers, [*followers, decoder.norm], strict=True):
        yield layer.self_attn.o_proj, layer.post_attention_layernorm
        yield layer.mlp.down_proj, next_norm


def _is_known(decoder: Any) -> bool:
    """Whether a module is a whole model of known classes, of which nobody reads the hidden states between layers."""
    kinds = next((kinds for kinds in DECODERS if _MODELS + kinds.model == _name(decoder)), None)
    if kinds is None or not was_read() or decoder.aux_hidden_state_layers:
        return False
    is_whole = (decoder.start_layer, decoder.end_layer) == (0, len(decoder.layers))
    wanted = [_MODELS + kind for kind in kinds[1:]]
    return is_whole and all(
        [_name(layer), _name(layer.self_attn), _name(layer.mlp)] == wanted for layer in decoder.layers
    )


def _name(module: torch.nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


@functools.cache
def was_read() -> bool:
    """Whether the installed vLLM has the sources that were read."""
    for name, functions in REVIEWED_DECODERS.items():
        found = reviewed_sampling.digests(Path(str(import_module(name).__file__)).read_text())
        if unread := [function for function, known in functions.items() if found.get(function) not in known]:
            logger.info("%s.%s is not the one known here: norms and all-reduces stay apart.", name, unread[0])
            return False
    return True


def _adds_ranks(row: Any) -> bool:
    """Whether a layer gives the sum over ranks and nothing more; a tree adds the bias behind it."""
    return (
        type(row) is patch_points.ROW_PARALLEL.get()
        and row.reduce_results
        and row.return_bias
        and not row.skip_bias_add
        and row.tp_size == patch_points.TENSOR_PARALLEL.get().world_size > 1
        and not (tensor_tree.is_used() and row.bias is not None)
    )


def _is_ours(norm: Any) -> bool:
    """Whether a norm is the mode's, of whole rows with a weight."""
    kind = patch_points.CUSTOM_OP.module().op_registry_oot.get("RMSNorm")
    return type(norm) is kind and norm.has_weight and not norm.variance_size_override


def _after_all_reduce(norm: Any, all_reduce: Any) -> Any:
    """The forward method of a norm that is given partial results with a residual; what has none is no partial result,
    but the embedding of the first layer.
    """
    alone = norm._forward_method

    def forward(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return alone(x)
        return all_reduce.add_and_norm(x, residual, norm.weight.data, norm.variance_epsilon)

    return forward
