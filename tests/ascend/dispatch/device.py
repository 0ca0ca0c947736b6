"""An NPU made of Python: tensors at PrivateUse1 whose values are CPU tensors, with a log of what computed them.

As in torch_npu, matmuls and reductions have kernels of the device's own, also those that PyTorch composes of others
elsewhere, and fused operators live in a namespace "npu"; here each computes on the CPU. Importing this renames
PrivateUse1 for the process.
"""

from collections.abc import Callable

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("npu")

LOG: list[str] = []
"""What ran, in order: "native NAME" for a kernel of the device, "fallback NAME" for an operator without one."""


_raw: dict[int, torch.Tensor] = {}
"""The values by the address of the storage: what autograd saves is another object with the same storage."""


class NpuTensor(torch.Tensor):
    """A contiguous tensor on the device; ``raw`` holds the values."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> "NpuTensor":
        tensor = torch._C._acc.create_empty_tensor(tuple(raw.shape), raw.dtype)
        tensor.__class__ = NpuTensor
        return tensor

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw = _raw[self.untyped_storage()._cdata] = raw.detach().contiguous()

    def __repr__(self) -> str:
        return f"NpuTensor({tuple(self.shape)})"


def wrap(value: object) -> object:
    return NpuTensor(value) if isinstance(value, torch.Tensor) and not isinstance(value, NpuTensor) else value


def unwrap(value: object) -> object:
    if isinstance(value, torch.device) and value.type == "npu":
        return torch.device("cpu")
    if isinstance(value, NpuTensor):
        return value.raw
    if isinstance(value, torch.Tensor) and value.device.type == "npu":
        return _raw[value.untyped_storage()._cdata].view(value.shape)
    return value


def on_raw(function: Callable[..., object]) -> Callable[..., object]:
    """A function of CPU tensors as a function of the device's."""

    def call(*args: object, **kwargs: object) -> object:
        with torch.no_grad():
            return tree_map(wrap, function(*tree_map(unwrap, args), **tree_map(unwrap, kwargs)))

    return call


def _fallback(operator: torch._ops.OpOverload, *args: object, **kwargs: object) -> object:
    name = operator.name().removeprefix("aten::")
    LOG.append(f"fallback {name}")
    if name == "_copy_from":
        source, target = args[:2]
        unwrap(target).copy_(unwrap(source))
        return target
    if name == "as_strided":  # a view of a raw tensor starts where that starts
        x, size, stride, *offset = args
        start = x.raw.storage_offset() + (offset[0] or 0 if offset else 0)
        return NpuTensor(x.raw.as_strided(size, stride, start))
    return on_raw(operator)(*args, **kwargs)


# fmt: off
NATIVE = [
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "mm.out", "addmm.out", "bmm.out",
    "baddbmm.out", "mv.out", "addmm_", "baddbmm_", "mm.dtype", "matmul", "matmul.out", "softmax.int",
    "scaled_dot_product_attention", "l1_loss", "kl_div", "sum", "sum.dim_IntList", "sum.IntList_out", "mean",
    "mean.dim", "mean.out", "nansum", "trace", "cumsum", "cumsum.out", "cumsum_", "logsumexp", "logsumexp.out",
    "_softmax", "_softmax.out", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
    "var.correction", "std.correction", "var_mean.correction", "std_mean.correction", "linalg_vector_norm",
    "native_layer_norm", "prod", "convolution", "matmul_backward", "mse_loss",
]
# fmt: on
"""Operators with a kernel of the device's own."""
SILENT = ["_unsafe_view", "alias", "detach", "abs", "amax", "amin", "all", "all.dim"]
"""What would lose its values or shape on its way through C++: views, an elementwise function, and maxima, which are
exact in any order.
"""
FUSED = {
    "npu_rms_norm": "(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_gemma_rms_norm": "(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_add_rms_norm": "(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)",
    "npu_linear": "(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor",
    "npu_bmmV2": "(Tensor input, Tensor mat2, int[] output_sizes) -> Tensor",
    "npu_fusion_attention": "(Tensor query, Tensor key, Tensor value) -> Tensor",
    "npu_swiglu": "(Tensor self) -> Tensor",
}
"""Operators in the namespace "npu", with their schemas."""


def _operator(name: str) -> torch._ops.OpOverload:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _native(name: str) -> Callable[..., object]:
    operator = _operator(name)

    def kernel(*args: object, **kwargs: object) -> object:
        exact = not any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in args)
        LOG.append(f"native {name}" + " of integers" * exact)
        if "mm.dtype" in name:  # the CPU has no such overload
            return on_raw(torch.mm)(*args[:2])
        return on_raw(operator)(*args, **kwargs)

    return kernel


def _fused(name: str) -> Callable[..., object]:
    def kernel(x: torch.Tensor, *args: object, **kwargs: object) -> object:
        LOG.append(f"native {name}")
        results = FUSED[name].split("->")[1].count("Tensor")
        return NpuTensor(x.raw.clone()) if results == 1 else tuple(NpuTensor(x.raw.clone()) for _ in range(results))

    return kernel


def _matmul_autograd(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As torch_npu's: it records a backward pass of the device's own, so the parts of a matmul would not be seen."""
    LOG.append("native matmul autograd")
    with torch._C._AutoDispatchBelowAutograd():
        return torch.matmul(a, b)


_libraries = [torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")]
_libraries.append(torch.library.Library("npu", "DEF"))
_libraries[0].fallback(_fallback, "PrivateUse1")
for _name in NATIVE:
    _libraries[1].impl(_name, _native(_name), "PrivateUse1")
_libraries[1].impl("matmul", _matmul_autograd, "AutogradPrivateUse1")
for _name in SILENT:
    _libraries[1].impl(_name, on_raw(_operator(_name)), "PrivateUse1")
for _name, _schema in FUSED.items():
    _libraries[2].define(_name + _schema)
    _libraries[2].impl(_name, _fused(_name), "PrivateUse1")
