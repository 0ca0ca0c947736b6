"""Compiles kernels for a Hopper that is not there, and says whether the compiler still does what the definition of its
arithmetic has written down; a program of its own, as :mod:`..compiled_kernels` is.

usage: python -m tests.ops.hopper.compiled
"""

import re
from collections import Counter

import torch

from tests.ops import compiled_kernels
from tests.ops.compiled_kernels import (
    Compiled,
    Heads,
    check,
    compile_instead_of_running,
    decode_and_prefill,
    launch_on,
    norm,
    silu,
    sm90_attention,
    softmax,
    turned_heads,
)

_SHUFFLES = {"rows of 4096": [16, 8, 4, 2, 1, 4, 2, 1], "rows of 576": [*[16, 8, 4, 2, 1] * 2, *[2, 1] * 2]}
"""Lanes that are added, and then warps: of the one row that a program has, and of its two."""
_INSTRUCTION = re.compile(r"^\s+(?:@\S+ )?((?:ex2|div|rcp|sqrt|rsqrt|lg2|fma|mma|wgmma)\.[a-z0-9_.]+)", re.MULTILINE)


def ptx(one: Compiled) -> str:
    return one.kernel.asm["ptx"]


def arithmetic(one: Compiled) -> Counter[str]:
    """How often each instruction that rounds in a way of its own stands in a kernel, without integers' divisions."""
    return Counter(name for name in _INSTRUCTION.findall(ptx(one)) if not re.search(r"\.[su](32|64)$", name))


def normalise(length: int) -> None:
    x = torch.zeros(4, length, dtype=torch.bfloat16)
    norm.rms_norm(x, x[0], 1e-6, x, None)


def logprobs(length: int) -> None:
    softmax.log_softmax(torch.zeros(2, length), -1, dtype=torch.float32)


def check_rows() -> None:
    for name, shuffles in _SHUFFLES.items():
        [made] = launch_on(90, normalise, int(name.split()[-1]))
        found = [int(lane) for lane in re.findall(r"shfl\.sync\.bfly\.b32\s+\S+ \S+ (\d+),", ptx(made))]
        check(f"the norm of {name} adds lanes and warps by {found}", found == shuffles)
        kinds = set(arithmetic(made))
        check(f"the norm of {name} divides as IEEE says: {kinds}", kinds == {"div.rn.f32", "sqrt.rn.f32"})
    for made in launch_on(90, turned_heads, 2):
        kinds = set(arithmetic(made))
        check(f"a rotation fuses nothing: {kinds}", kinds <= {"div.rn.f32", "sqrt.rn.f32"})
    for length in (4096, 32_000):
        for made in launch_on(90, logprobs, length):
            kinds = set(arithmetic(made)) - {"fma.rn.ftz.f32"}  # of libdevice's logarithm
            check(f"{made.name} of {length} has powers of two alone: {kinds}", kinds == {"ex2.approx.f32"})
    [made] = launch_on(90, silu.silu_and_mul, torch.zeros(2, 2 * 1536, dtype=torch.bfloat16))
    kinds = set(arithmetic(made))
    check(f"SiLU divides by a reciprocal: {kinds}", kinds == {"ex2.approx.f32", "div.full.f32"})


def check_attention() -> None:
    kernels = [
        one for one in launch_on(90, sm90_attention, Heads(8, 2, 128, torch.bfloat16), 16) if "plan" not in one.name
    ]
    check(f"{len(kernels)} kernels of attention", len(kernels) > 1)
    for made in kernels:
        found = arithmetic(made)
        of_tensor_core = [name for name in found if name.startswith("wgmma.mma_async")]
        others = set(found) - {*of_tensor_core} - {name for name in found if name.startswith("wgmma")}
        steps = all(re.search(r"m64n\d+k16\.f32\.bf16\.bf16", name) for name in of_tensor_core)
        check(f"{made.name} multiplies in steps of 16", bool(of_tensor_core) and steps)
        check(f"{made.name} has {others}", others == {"ex2.approx.ftz.f32", "fma.rn.f32", "div.full.f32"})


def check_triton_attention() -> None:
    """Of heads of 256, and with what changes scores."""
    heads, options = Heads(8, 2, 256, torch.bfloat16), {"logits_soft_cap": 50.0, "sliding_window": 100}
    kernels = [one for one in launch_on(90, decode_and_prefill, heads, 16, **options) if "plan" not in one.name]
    check(f"{len(kernels)} kernels of attention with a soft cap and a window", len(kernels) > 1)
    for made in kernels:
        found = arithmetic(made)
        of_tensor_core = [name for name in found if re.match(r"wgmma\.mma_async|mma\.sync", name)]
        steps = all("k16.f32.bf16.bf16" in name or "m16n8k16" in name for name in of_tensor_core)
        check(f"{made.name} with a soft cap multiplies in steps of 16", bool(of_tensor_core) and steps)
        others = {name for name in found if not name.startswith(("wgmma", "mma"))}
        check(
            f"{made.name} with a soft cap has {others}", others == {"ex2.approx.ftz.f32", "fma.rn.f32", "div.full.f32"}
        )


if __name__ == "__main__":
    compile_instead_of_running()
    assert not compiled_kernels.compiled
    check_rows()
    check_attention()
    check_triton_attention()
