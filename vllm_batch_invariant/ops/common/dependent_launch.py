"""Programmatic dependent launch: a kernel is launched while the programs of the one before end, and waits for them.

Each kernel that is launched so waits in all of its warps, so that one's end is the end of all before it, and it writes
nothing before it has waited. Some let the next one begin before they wait themselves (:func:`let_next_begin`), which
may then begin while several kernels run: behind a norm a matmul has its weights on their way as soon as the matmul in
front of the norm leaves room for them. So what a kernel reads before it waits is what no kernel writes behind the last
one that was launched without this: a step of an engine begins with such, and none of a step's kernels writes a weight.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .gpu import Gpu

LINE = tl.constexpr(128)
"""Bytes that are asked for at once."""
ASK_IN_PTX = tl.constexpr("{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }")
"""Has the line at an address brought to the L2 cache."""


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
def let_next_begin(OVERLAPS: tl.constexpr):
    """With OVERLAPS the next kernel may be launched, as soon as all programs of this one have been."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def ask_for_lines(ptrs):
    """Has the lines of some addresses brought to the L2 cache, which moves no value: also before the wait."""
    tl.inline_asm_elementwise(ASK_IN_PTX, "=r,l", [ptrs.to(tl.uint64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def ask_for(ptr, LENGTH: tl.constexpr, OVERLAPS: tl.constexpr):
    """With OVERLAPS the first program has so many elements brought to the L2 cache."""
    if OVERLAPS and tl.program_id(0) == 0:
        PER_LINE: tl.constexpr = LINE * 8 // ptr.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = (LENGTH + PER_LINE - 1) // PER_LINE
        line = tl.minimum(tl.arange(0, triton.next_power_of_2(LINES)), LINES - 1)
        ask_for_lines(ptr + line * PER_LINE)


@triton.jit
def wait_for_kernel_before(OVERLAPS: tl.constexpr):
    """With OVERLAPS the launch did not wait for the kernel before, whose results are there from here on; the next one
    may be launched.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
