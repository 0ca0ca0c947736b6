"""What decides the bits of a row that is reduced: in which order a device adds its elements.

Launchers take every number here from an operation's reduction, and receipts print them: none is computed elsewhere.
"""

from dataclasses import dataclass

import torch

LANES = 64
"""Partial sums that walk a row side by side on a CPU."""
REDUCTIONS_KEPT = 1 << 12
"""How many reductions an operation remembers: a launch looks its own up and computes nothing."""
_SMALLEST_GPU_BLOCK = 32
_ELEMENTS_OF_A_WARP = 512
_EXP = {"cpu": "numba_math.exp32", "cuda": "triton.language.exp"}


@dataclass(frozen=True, kw_only=True)
class RowReduction:
    """The reduction of one row: a function of its length, its dtype, the device and the operation, never of other rows.

    - CPU: element i is added to lane i % ``lanes``, ascending. The lanes are added by halving: lane i takes lane
      i + 32, then i + 16, and so on.
    - GPU: element i is added to accumulator i % ``block``, ascending. Of the accumulators 8 adjacent ones are added by
      a tree, then those half a block apart until each thread has one, then those of a warp's lanes, then those of
      warps: so ``num_warps`` decides bits, too, and ``dtype``, which decides the lane that an element lies in.

    Attributes:
        length: elements of the row.
        dtype: of the row as the kernel loads it.
        accumulate: the dtype of every addition.
        lanes: on a CPU, partial sums that walk the row side by side.
        block: on a GPU, elements that a program holds at a time.
        num_warps: on a GPU, warps that share a block.
        chunk: elements of the row that one program adds, counted from the row's start; None where it adds them all.
        enable_fp_fusion: on a GPU, whether the compiler may fuse a product with an addition, and round once. It would
            do so for some elements only, and what it does unasked follows its version.
    """

    length: int
    dtype: torch.dtype
    accumulate: torch.dtype = torch.float32
    lanes: int | None = None
    block: int | None = None
    num_warps: int | None = None
    chunk: int | None = None
    enable_fp_fusion: bool | None = None

    @property
    def num_chunks(self) -> int:
        """Programs that share the row."""
        return 1 if self.chunk is None else max(1, -(-self.length // self.chunk))


def next_power_of_two(number: int) -> int:
    """The least power of two of at least ``number``."""
    return 1 << max(number - 1, 0).bit_length()


def gpu_block(length: int, largest: int) -> int:
    """A block that holds ``length`` elements, or the ``largest`` one."""
    return min(max(next_power_of_two(length), _SMALLEST_GPU_BLOCK), largest)


def gpu_warps(block: int, fewest: int, most: int) -> int:
    """Warps for a block: one for every 512 elements, within bounds."""
    return min(max(block // _ELEMENTS_OF_A_WARP, fewest), most)


def exp_of(device_type: str) -> str:
    """The function that computes exp: additions and multiplications in a fixed order on a CPU, Triton's elsewhere."""
    return _EXP[device_type]
