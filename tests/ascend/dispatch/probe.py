"""Runs every variant on the Python-only NPU, without and with the mode, and prints what computed it as JSON.

A process of its own, because the device renames PrivateUse1 for good.
"""

import json
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tests.ascend.dispatch import implementations
from tests.ascend.dispatch.device import LOG, NATIVE, NpuTensor, unwrap
from tests.ascend.op_variants import MATMULS, REDUCTIONS, Operands, OpVariant
from vllm_batch_invariant import aten, batch_invariant_mode
from vllm_batch_invariant.errors import NotCovered

ON_THE_CPU = Operands(lambda tensor: tensor)
npu = torch.ops.npu

FUSED: dict[str, OpVariant] = {
    "npu_rms_norm": lambda o: npu.npu_rms_norm(o.x, o.v, 1e-6)[0],
    "npu_rms_norm, scale": lambda o: npu.npu_rms_norm(o.x, o.v, 1e-6)[1],
    "npu_gemma_rms_norm": lambda o: npu.npu_gemma_rms_norm(o.x, o.v, 1e-6)[0],
    "npu_add_rms_norm": lambda o: npu.npu_add_rms_norm(o.x, o.x, o.v, 1e-6)[0],
    "npu_add_rms_norm, residual": lambda o: npu.npu_add_rms_norm(o.x, o.x, o.v, 1e-6)[2],
    "npu_linear": lambda o: npu.npu_linear(o.x, o.weight, o.bias),
    "npu_bmmV2": lambda o: npu.npu_bmmV2(o.x3, o.w3, []),
}
REFERENCES: dict[str, OpVariant] = {
    "npu_rms_norm": lambda o: F.rms_norm(o.x, (16,), o.v, 1e-6),
    "npu_rms_norm, scale": lambda o: 1 / (o.x.square().mean(-1, keepdim=True) + 1e-6).sqrt(),
    "npu_gemma_rms_norm": lambda o: F.rms_norm(o.x, (16,), 1 + o.v, 1e-6),
    "npu_add_rms_norm": lambda o: F.rms_norm(2 * o.x, (16,), o.v, 1e-6),
    "npu_add_rms_norm, residual": lambda o: 2 * o.x,
    "npu_linear": lambda o: F.linear(o.x, o.weight, o.bias),
    "npu_bmmV2": lambda o: o.x3 @ o.w3,
}
REFUSED: dict[str, Callable[[Operands], object]] = {
    "aten::prod": lambda o: o.x.prod(),
    "aten::convolution": lambda o: torch.ops.aten.convolution(o.x3, o.x3, None, [1], [0], [1], False, [0], 1),
    "aten::mse_loss with a reduction": lambda o: F.mse_loss(o.x, o.x),
    "npu::npu_fusion_attention": lambda o: npu.npu_fusion_attention(o.x, o.x, o.x),
}
GRADIENTS: dict[str, OpVariant] = {
    "@": MATMULS["@"],
    "matmul, 3-d": MATMULS["matmul, 3-d"],
    "linear, 3-d, bias": MATMULS["linear, 3-d, bias"],
    "attention": MATMULS["attention"],
    "softmax": REDUCTIONS["softmax"],
    "log_softmax": REDUCTIONS["log_softmax"],
    "rms_norm": REDUCTIONS["rms_norm"],
}


def error(actual: torch.Tensor, reference: torch.Tensor) -> float | str:
    """The largest difference relative to the largest element, or what else is wrong with a result."""
    raw = unwrap(actual)
    if actual.device.type != "npu" or raw.shape != reference.shape or raw.dtype != reference.dtype:
        return f"{raw.dtype} of shape {list(raw.shape)} on {actual.device}"
    return float((raw - reference).abs().max() / reference.abs().max().clamp(min=1))


def observe(variant: OpVariant, reference: torch.Tensor) -> dict[str, object]:
    """What computed a variant, and how far from the reference its result is."""
    operands = Operands(NpuTensor)
    with torch.inference_mode():
        LOG.clear()
        try:
            wrong = error(variant(operands), reference)
        except Exception as failure:
            wrong = f"{type(failure).__name__}: {failure}"
    return {"error": wrong, "log": list(LOG)}


def observe_gradient(variant: OpVariant) -> dict[str, object]:
    """The same for a backward pass, to the operand that every variant here has."""

    def gradient(operands: Operands) -> torch.Tensor:
        name = next(name for name in ("heads", "x3", "x") if name in touched)
        getattr(operands, name).requires_grad_()
        out = variant(operands)
        (out * out).sum().backward()
        return getattr(operands, name).grad

    probe = Operands(lambda tensor: tensor)
    variant(probe)
    touched = vars(probe)
    reference = gradient(Operands(lambda tensor: tensor))
    LOG.clear()
    try:
        wrong = error(gradient(Operands(NpuTensor)), reference)
    except Exception as failure:
        wrong = f"{type(failure).__name__}: {failure}"
    return {"error": wrong, "log": list(LOG)}


def refusal(call: Callable[[Operands], object]) -> str:
    try:
        call(Operands(NpuTensor))
    except NotCovered as error:
        return str(error)
    return "accepted"


def kernels() -> dict[str, str]:
    """Which function the dispatcher would call for each operator that the mode replaces, at both keys."""
    names = [*NATIVE, "linear"]
    keys = ("PrivateUse1", "AutogradPrivateUse1")
    found = {}
    for name in names:
        for key in keys:
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
                found[f"{name} {key}"] = repr(torch.library.get_kernel(f"aten::{name}", key))
    return found


def main() -> None:
    implementations.install()
    variants = MATMULS | REDUCTIONS | FUSED
    references = {name: REFERENCES.get(name, variant)(ON_THE_CPU) for name, variant in variants.items()}
    found: dict[str, object] = {}
    before = kernels()
    found["off"] = {name: observe(variants[name], references[name]) for name in variants}
    with batch_invariant_mode():
        found["on"] = {name: observe(variants[name], references[name]) for name in variants}
        found["gradients"] = {name: observe_gradient(variant) for name, variant in GRADIENTS.items()}
        found["refusals"] = {name: refusal(call) for name, call in REFUSED.items()}
        LOG.clear()
        integers = NpuTensor(torch.arange(12).view(3, 4))
        found["integers"] = [unwrap(integers.sum()).item(), unwrap(integers @ integers.t()).tolist()]
        found["losses"] = error(F.mse_loss(integers.float(), integers.float() + 1, reduction="none"), torch.ones(3, 4))
        found["deterministic"] = torch.are_deterministic_algorithms_enabled()
        found["elementwise"] = error(npu.npu_swiglu(NpuTensor(torch.ones(2, 2))), torch.ones(2, 2))
        changed = kernels()
    found["replaced"] = [name for name in before if changed[name] != before[name]]
    found["put back"] = kernels() == before and not torch.are_deterministic_algorithms_enabled()
    found["off again"] = {name: observe(variants[name], references[name]) for name in ("@", "mean()", "npu_rms_norm")}
    aten.enable_batch_invariant_mode(["mm", "matmul"])
    kept = ("mm", "mm, out", "@", "matmul, out", "linear", "bmm")
    found["external_ops"] = {name: observe(variants[name], references[name])["log"] for name in kept}
    aten.disable_batch_invariant_mode()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
