"""Ascend NPUs: the device "npu", which joins by an entry point as a device of another distribution does
(:mod:`vllm_batch_invariant.ops.devices`). No other module of the package knows this folder.
"""

from ..ops.devices import Device

DEVICE = Device(
    "npu",
    "PrivateUse1",
    None,
    False,
    name="an NPU",
    title="Ascend NPU",
    aten=f"{__name__}.aten",
    vllm=f"{__name__}.integration.device",
    operations={name: f"{__name__}.ops.{name}" for name in ("linear", "norm", "reduce", "softmax")},
    reductions=f"{__name__}.ops.reductions",
    coverage=f"{__name__}.integration.coverage",
    patch_points=f"{__name__}.integration.patch_points",
    packages=("torch-npu", "triton-ascend"),
)
