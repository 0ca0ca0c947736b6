"""A norm on a GPU adds what the layer before it leaves unadded: one operation in the place of two or three.

A decoder layer of the models here hands what its attention and its MLP give to the next norm, and to nothing else::

    hidden_states, residual = norm(row_parallel(x), residual)
    hidden_states, residual = norm(experts(x), residual)

So a row-parallel layer gives its rank's partial result, experts what each has made of a token, and the norm adds those
first. Of a long partial result some rows are on their way to other workers while the layer multiplies the rest. The
bits are those of the operations apart. Somebody has read which classes do so: with another class or another source the
operations stay apart, and so they do in a stage of a pipeline, and where a drafter reads hidden states between layers.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch

from ...ops.dispatch import module_for
from ..parallel import tensor_tree
from ..reviews import patch_points
from ..side_table import beside
from .code_fusion import codes_of
from .decoders import is_known, is_ours, kinds_of
from .experts import CudaExperts
from .fusion import Fusion, is_watched

logger = logging.getLogger("vllm.batch_invariant")


class _AddingNorms(Fusion):
    """Sums and the norms behind them."""

    def fuse_in(self, worker: Any) -> None:
        model, group = worker.get_model(), patch_points.TENSOR_PARALLEL.get()
        communicator = getattr(group, "device_communicator", None)
        ours = communicator and beside(communicator).all_reduce
        may_fuse = ours or (group.world_size == 1 and any(isinstance(part, CudaExperts) for part in model.modules()))
        if may_fuse and (count := fuse(model, ours)):
            logger.info("%d norms add what the layer before them gives.", count)
            if ours and ours.expect(_longest_message(worker.vllm_config)):
                logger.info("Long partial results are sent while they are multiplied.")


ADDING_NORMS = _AddingNorms()


def _longest_message(config: Any) -> int:
    """Bytes of the partial result of the most tokens of a step."""
    model = config.model_config
    return config.scheduler_config.max_num_batched_tokens * model.get_hidden_size() * model.dtype.itemsize


def fuse(model: torch.nn.Module, all_reduce: Any) -> int:
    """Fuse what is known of a model; returns how many norms add what is before them from now on.

    Args:
        model: as vLLM has loaded it.
        all_reduce: of the model's workers, an :class:`~...ops.all_reduce.cuda.AllReduce`; None where there is one.
    """
    fused = 0
    for decoder in model.modules():
        pairs = list(_pairs(decoder)) if is_known(decoder) else []
        found = [(layer, _experts_of(layer), norm) for layer, norm in pairs]
        if all_reduce is None:
            found = [(layer, experts, norm) for layer, experts, norm in found if experts and is_ours(norm)]
        elif not all((experts or _adds_ranks(layer)) and is_ours(norm) for layer, experts, norm in found):
            continue
        for layer, experts, norm in found:
            if experts is None:
                tensor_tree.defer_sum(layer)
            else:
                experts.defers_sum = True
                layer.moe_config.skip_final_all_reduce = all_reduce is not None
            norm._forward_method = _adding(norm, experts or _Sender(layer, all_reduce), all_reduce)
        fused += len(found)
    return fused


def _pairs(decoder: Any) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
    """Layers that give a sum, each with the norm behind it."""
    kinds, followers = kinds_of(decoder), [layer.input_layernorm for layer in decoder.layers[1:]]
    assert kinds is not None
    for layer, next_norm in zip(decoder.layers, [*followers, decoder.norm], strict=True):
        yield layer.self_attn.o_proj, layer.post_attention_layernorm
        block = getattr(layer, kinds.name)
        yield block.experts if hasattr(block, "experts") else block.down_proj, next_norm


def _adds_ranks(row: Any) -> bool:
    """Whether a layer gives the sum over ranks and nothing more; a tree adds the bias behind it."""
    return (
        type(row) is patch_points.ROW_PARALLEL.get()
        and row.reduce_results
        and row.return_bias
        and not row.skip_bias_add
        and row.tp_size == patch_points.TENSOR_PARALLEL.get().world_size > 1
        and not (tensor_tree.k_slices() > 1 and row.bias is not None)
    )


def _experts_of(layer: Any) -> CudaExperts | None:
    """What computes a layer of experts that gives their sum, or a worker's part of it, and nothing more."""
    if type(layer) is not patch_points.MOE_RUNNER.get() or layer.shared_experts is not None:
        return None
    method, config = layer.routed_experts.quant_method, layer.moe_config
    is_plain = layer.routed_output_transform is None and layer.routed_scaling_factor == 1
    spreads = config.is_sequence_parallel or config.skip_final_all_reduce or config.dp_size > 1 or config.pcp_size > 1
    is_ours = isinstance(method, CudaExperts) and not method.defers_sum
    return method if is_ours and is_plain and not spreads else None


class _Sender:
    """Stands as the forward method of a row-parallel layer: long partial results are sent part by part."""

    def __init__(self, layer: Any, all_reduce: Any) -> None:
        self._layer, self._multiply, self._all_reduce, self._deferred = layer, layer.forward, all_reduce, None
        layer.forward = self

    def __call__(self, input_: torch.Tensor) -> Any:
        """vLLM's method. Uninitialised where it sends, which it does not while somebody looks at what this gives."""
        self._deferred = None
        shape = *input_.shape[:-1], self._layer.output_size
        if len(shape) > 2 or not self._all_reduce.sends(*shape, input_.dtype) or is_watched(self._layer):
            return self._multiply(input_)
        self._deferred = self._all_reduce.send(lambda rows: self._multiply(rows)[0], input_)
        return input_.new_empty(()).expand(shape), None

    def take_deferred(self) -> Any:
        """What the norm adds, once; None where the partial result is there."""
        deferred, self._deferred = self._deferred, None
        return deferred


def _adding(norm: Any, layer: "CudaExperts | _Sender", all_reduce: Any) -> Any:
    """The forward method of a norm that is given partial results with a residual, or finds them with the layer before;
    what has no residual is no partial result, but the embedding of the first layer.
    """
    alone, add = norm._forward_method, all_reduce or module_for("moe", "cuda")

    def forward(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        deferred = layer.take_deferred()
        if residual is None or (deferred is None and all_reduce is None):
            return alone(x, residual)
        given = x if deferred is None else deferred, residual, norm.weight.data, norm.variance_epsilon
        codes = None if all_reduce else codes_of(norm)
        return add.add_and_norm(*given) if codes is None else add.add_and_norm(*given, codes)

    return forward
