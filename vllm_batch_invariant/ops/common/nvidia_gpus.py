"""NVIDIA GPUs by compute capability."""

COMPILED_FOR = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))
"""Compute capabilities that every kernel has been compiled for (docs/gpus.md); the mode refuses all others."""

FP8_MMA = {
    (8, 9): "sm89 mma.sync",
    (9, 0): "sm90 wgmma",
    (10, 0): "sm100 tcgen05",
    (10, 3): "sm103 tcgen05",
    (12, 0): "sm120 mma.sync",
}
"""By compute capability, the tensor core's instruction that multiplies codes of e4m3; the GPUs before have none. Sums
of each are others (MMA-Sim, github.com/microsoft/MMA-Sim, has models of some): a name is a kind of bits.
"""


def has_tcgen05(major: int) -> bool:
    """Whether tensor cores have two kinds of instruction: tcgen05.mma, which takes 64 rows or more, and mma.sync.

    That they give a row the same bits is known of no GPU. Triton takes the former where a tile has 64 rows, so that
    schedules for such a GPU have no smaller ones for operands of 16 bits.

    Args:
        major: of the compute capability; 12 has mma.sync alone.
    """
    return major == 10


def converts_e4m3(capability: tuple[int, int]) -> bool:
    """Whether there are instructions that convert e4m3 to all 16-bit floats, and Triton knows the type: speed only. An
    8.9 has one for fp16 alone, and Triton 3.6 asks its assembler for another.

    Args:
        capability: compute capability.
    """
    return capability >= (9, 0)


def attends_by_tma(major: int) -> bool:
    """Whether attention in Triton reads keys and values by the tensor memory accelerator: speed only.

    A 12.x has one, too, but half the shared memory: there the assembler is short of registers for prefill (552 bytes of
    a thread's stack with heads of 128 and Triton 3.9, and 248 where pointers are read).

    Args:
        major: of the compute capability.
    """
    return major in (9, 10)
