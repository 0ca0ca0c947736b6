"""vLLM's unquantised linear layers and output embeddings, with the operation in their place."""

import torch

from ..ops.devices import module_for
from ..ops.linear import linear
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


def install() -> None:
    """Put :func:`dispatch` and the operation in the place of vLLM's functions of that purpose."""
    seams.CPU_GEMM.put(dispatch)
    seams.CUDA_LINEAR.put(linear)
    seams.CUDA_EMBEDDING.put(linear)
