"""The driver of an engine on a CPU that computes in exact arithmetic by the GPU's kernels, in Triton's interpreter: all
but vLLM's worker, its second sampler and CUDA graphs is as on a GPU. Its process has TRITON_INTERPRET=1.
"""

import sys
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace

import torch

from vllm_batch_invariant.integration.layers import exact, linear
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.ops import attention, dispatch
from vllm_batch_invariant.verify.harness import worker_main


def install() -> None:
    """Stands for what a worker on a CPU installs."""
    exact.install_layers()
    sampler = patch_points.TOP_K_TOP_P_SAMPLER.get()
    sampler.forward_cpu = sampler.forward_native = exact._draw


def main(descriptor: int) -> None:
    """Execute commands in an engine's process."""
    from vllm_batch_invariant.integration.devices import cpu
    from vllm_batch_invariant.ops.exact import cuda

    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=3, major=8)
    torch.cuda.device = torch.cuda.device_of = lambda device: nullcontext()
    exact.install_cpu, exact.operations = install, lambda device_type="cpu": cuda
    linear.ExactLinear = linear.ExactCudaLinear
    linear._certify = lambda *weight: None  # minutes; its interpreted test has other shapes
    attention._MODULES["exact"] = "..exact.cuda"
    for operation in ("norm", "softmax", "top_k_top_p"):
        dispatch.MODULES[operation, "exact", "cpu"] = dispatch.MODULES[operation, "exact", "cuda"]
    cpu.ExactCpu.compile_kernels = lambda self: None
    worker_main.main(descriptor)


if __name__ == "__main__":
    # imported by name, so that workers in other processes find the functions of these modules
    import_module("tests.engine.exact_interpreted").main(int(sys.argv[1]))
