"""Programmatic dependent launch: a kernel is launched while the programs of the one before end, and waits for them."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .gpu import Gpu


@dataclass(frozen=True)
class LaunchSchedule:
    """How kernels follow one another.

    Attributes:
        overlaps: whether one is launched while the programs of the one before end, and waits for them itself.
    """

    overlaps: bool

    @classmethod
    def of(cls, device: torch.device) -> "LaunchSchedule":
        """Such launches came with the tensor memory accelerator; the interpreter has none."""
        return cls(not triton.knobs.runtime.interpret and Gpu.of(device.index).has_tma)

    @property
    def options(self) -> dict[str, bool]:
        """Of a launch whose kernel waits, as :func:`wait_for_kernel_before` does."""
        return {"OVERLAPS": self.overlaps, **({"launch_pdl": True} if self.overlaps else {})}


@triton.jit
def wait_for_kernel_before(OVERLAPS: tl.constexpr):
    """With OVERLAPS the launch did not wait for the kernel before, whose results are there from here on; the next one
    may be launched.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
