"""The device types that operations have implementations for, a record each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """What operations and PyTorch's dispatcher know of a device type.

    Attributes:
        type: PyTorch's name of it, and that of the module of each operation that implements it.
        dispatch_key: where PyTorch's dispatcher keeps its kernels.
        attention: the implementation of attention that "auto" picks; None if there is none here.
        exact_fp64_softmax: whether PyTorch's own softmax of fp64 computes each row from itself alone.
    """

    type: str
    dispatch_key: str
    attention: str | None
    exact_fp64_softmax: bool

    @property
    def is_present(self) -> bool:
        """Whether tensors can be on such a device in this process; imports no device library to find out."""
        import torch  # here, because the table of what is covered is printed where there is no PyTorch

        module = getattr(torch, self.type, None)
        return module is not None and module.is_available()


DEVICES = {
    device.type: device
    for device in (
        Device("cpu", "CPU", "numba", True),
        Device("cuda", "CUDA", "triton", True),
        Device("npu", "PrivateUse1", None, False),
    )
}
"""By type."""
