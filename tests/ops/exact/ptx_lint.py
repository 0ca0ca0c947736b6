"""Compiles the kernels of exact arithmetic for GPUs that are not here, and looks at their instructions: every operation
on floating-point numbers must be one that IEEE 754 defines. A program of its own, as :mod:`..compiled_kernels` is.

usage: python -m tests.ops.exact.ptx_lint          one variant of each kernel, for a Hopper
       python -m tests.ops.exact.ptx_lint --all    every variant, for every GPU: minutes
"""

import argparse
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import CUDABackend

from tests.ops.compiled_kernels import SHARED_MEMORY, Compiled, check, compile_instead_of_running, launch_on
from tests.ops.exact.launches import EVERY_KIND, KINDS
from tests.ops.exact.ptx import forbidden


def found_in(kernels: list[Compiled]) -> list[str]:
    """What is wrong with kernels that were compiled."""
    return [
        f"{one.name} for sm_{one.gpu} has {instruction}"
        for one in kernels
        for instruction in forbidden(one.kernel.asm["ptx"], one.name)
    ]


@triton.jit
def _injected_kernel(x_ptr, FAULT: tl.constexpr):  # noqa: N803
    """What a kernel may easily be written with."""
    x = tl.load(x_ptr + tl.arange(0, 32))
    if FAULT == "exp2":
        x = tl.exp2(x)
    elif FAULT == "log":
        x = tl.log(x)
    elif FAULT == "quotient":
        x = 1.0 / x
    elif FAULT == "rsqrt":
        x = tl.rsqrt(x)
    elif FAULT == "floor":
        x = tl.floor(x)
    elif FAULT == "fma":
        x = tl.fma(x, x, x)
    elif FAULT == "fusion":
        x = x * x + x
    elif FAULT == "fp64":
        x = (x.to(tl.float64) * 1.1).to(tl.float32)
    else:
        x = tl.div_rn(tl.sqrt_rn(x * x + x), x - 1.0)
    tl.store(x_ptr + tl.arange(0, 32), x)


FAULTS = ("exp2", "log", "quotient", "rsqrt", "floor", "fma", "fusion", "fp64")


def check_injected_faults() -> None:
    """Every fault is found, and nothing is found in a kernel without one."""

    def launch(fault: str) -> Callable[[], None]:
        return lambda: _injected_kernel[(1,)](torch.zeros(32), FAULT=fault, enable_fp_fusion=fault == "fusion")

    for fault in FAULTS:
        found = found_in(launch_on(90, launch(fault)))
        check(f"an injected {fault} is found: {'; '.join(found)}", bool(found))
    check("nothing is found in a kernel without a fault", not found_in(launch_on(90, launch(""))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every variant, for every GPU")
    every = parser.parse_args().all
    compile_instead_of_running()
    CUDABackend.make_cubin = lambda *_: b""  # its instructions are in PTX, and the assembler takes most of the time
    check_injected_faults()
    for gpu in SHARED_MEMORY if every else (90,):
        for name, launch in (EVERY_KIND if every else KINDS).items():
            kernels = launch_on(gpu, launch)
            wrong = found_in(kernels)
            names = ", ".join(sorted({one.name for one in kernels}))
            check(f"{name} for sm_{gpu}: {'; '.join(wrong) or names}", bool(kernels) and not wrong)


if __name__ == "__main__":
    main()
