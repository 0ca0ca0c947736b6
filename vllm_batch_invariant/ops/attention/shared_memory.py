"""How many stages of the Triton kernel's loop a GPU's shared memory has room for: speed only."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .cuda import Blocks, Shape

LEAST = 101_376
"""Bytes that a program may have on every GPU of compute capability 8.0 and above."""
_BARRIERS = 1024


def bytes_of_small_block(rows: int, stages: int, tile: int, padded_size: int, descriptors: bool) -> int:
    """Shared memory that a block of few rows takes with two or more stages, or up to 4 KiB more; 16-bit elements.

    All stages but one hold a tile of keys and one of values. Of the last, the compiler holds what it loads by the
    tensor memory accelerator or what it turns for the tensor cores. The rows and their weights lie there, too.

    Args:
        rows: of the block.
        stages: of the loop over tiles of keys.
        tile: keys.
        padded_size: elements of a head, a power of two.
        descriptors: whether tiles may be loaded by the tensor memory accelerator.
    """
    pair = 2 * 2 * tile * padded_size
    last = pair // 2 if descriptors else pair // 4
    return (stages - 1) * pair + last + 2 * rows * (padded_size + tile) + _BARRIERS


def fitted(blocks: "Blocks", shape: "Shape", device: torch.device) -> "Blocks":
    """A small block with as many of its stages as there is room for on a GPU.

    Blocks of many rows need no such care: they have as many stages as the GPUs with the least memory have room for.
    """

    def needed(stages: int, descriptors: bool) -> int:
        return bytes_of_small_block(blocks.rows, stages, shape.tile, shape.padded_size, descriptors)

    if blocks.stages == 1 or needed(blocks.stages, True) <= LEAST:
        return blocks
    gpu = torch.cuda.get_device_properties(device)
    stages = blocks.stages
    while stages > 1 and needed(stages, gpu.major >= 9) > gpu.shared_memory_per_block_optin:
        stages -= 1
    return replace(blocks, stages=stages)
