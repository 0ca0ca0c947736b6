"""vLLM's unquantised linear layers and output embeddings, with the operation in their place."""

from typing import Any

import torch

from ..ops.devices import module_for
from ..ops.linear import operator, prepare
from . import seams


def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Give a layer whose weight is loaded its product; stands for vLLM's own choice among packed and oneDNN kernels.

    The weight is prepared once (bf16 and fp16 become fp32). ``remove_weight`` says that nothing else reads the
    original.
    """
    if layer.weight.is_meta or layer.weight.ndim != 2:
        layer.cpu_linear = torch.nn.functional.linear
        return
    cpu = module_for("linear", "cpu")
    prepared = cpu.prepare_weight(layer.weight)
    layer.cpu_linear = lambda x, weight, bias: cpu.prepared_linear(x, prepared, bias)  # noqa: ARG005 - vLLM's signature
    if remove_weight and prepared.data_ptr() != layer.weight.data_ptr():
        layer.weight = torch.nn.Parameter(torch.empty(0, dtype=layer.weight.dtype), requires_grad=False)


def install(device_type: str) -> None:
    """Put the operation in the place of vLLM's functions of that purpose."""
    if device_type == "cpu":
        seams.CPU_GEMM.put(dispatch)
        return
    seams.CUDA_LINEAR.put(operator.linear)
    seams.CUDA_EMBEDDING.put(operator.linear)
    for method in (seams.LINEAR_METHOD.get(), seams.EMBEDDING_METHOD.get()):
        _prepare_after_loading(method)


def _prepare_after_loading(method: type) -> None:
    """Have the schedules of each weight's products chosen and certified as soon as the weight is there."""
    process = method.process_weights_after_loading

    def process_weights_after_loading(self: object, layer: torch.nn.Module) -> None:
        process(self, layer)
        if layer.weight.is_cuda and layer.weight.ndim == 2:
            config = seams.CURRENT_CONFIG.get()()
            adds_bias = getattr(layer, "bias", None) is not None and not getattr(layer, "skip_bias_add", False)
            sizes = tuple(config.compilation_config.cudagraph_capture_sizes or ())
            prepare(layer.weight, _most_rows(layer, config.scheduler_config), adds_bias, sizes)

    method.process_weights_after_loading = process_weights_after_loading


def _most_rows(layer: torch.nn.Module, scheduler: Any) -> int:
    """The most rows that a layer multiplies in a step: tokens, or for an output embedding requests."""
    if isinstance(layer, seams.VOCABULARY_LAYER.get()):
        return min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    return scheduler.max_num_batched_tokens
