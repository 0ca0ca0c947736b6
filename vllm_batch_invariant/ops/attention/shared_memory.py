"""How many stages of the Triton kernel's loop a GPU's shared memory has room for: speed only."""

from dataclasses import replace

import torch

from ..common.nvidia_gpus import attends_by_tma
from .shapes import AttentionShape, Schedule

LEAST = 101_376
"""Bytes that a CTA may have on every GPU of compute capability 8.0 and above."""
_BARRIERS = 1024


_LATENT_PREFILL = 106_496
"""Bytes that a block of 32 rows over keys of 512 and a tail of 64 elements takes, of prefill-like work."""


def decode_bytes(
    block_m: int,
    num_stages: int,
    key_tile: int,
    padded_head_size: int,
    tma: bool,
    holds_codes: bool = False,
    padded_tail: int = 0,
) -> int:
    """Shared memory that a block of decode-like work takes with two or more stages, or up to 4 KiB more; queries of 16
    bits.

    All stages but one hold a tile of keys and one of values. Of the last, the compiler holds what it loads by the
    tensor memory accelerator or what it turns for the tensor cores; or the numbers of both tiles' codes. The rows and
    their weights lie there, too.

    Args:
        block_m: rows of the block.
        num_stages: of the loop over tiles of keys.
        key_tile: keys.
        padded_head_size: elements of a head, a power of two.
        tma: whether tiles may be loaded by the tensor memory accelerator.
        holds_codes: whether they are codes of eight bits.
        padded_tail: elements of a key behind its value, a power of two: all stages then hold one tile, which is both.
    """
    if padded_tail:
        tiles = num_stages * 2 * key_tile * (padded_head_size + padded_tail)
        return tiles + 2 * block_m * (padded_head_size + key_tile) + _BARRIERS
    pair = 2 * 2 * key_tile * padded_head_size
    turned = pair // 4 if padded_head_size <= 256 else pair // 2  # larger heads have more warps, of which none has all
    stored, last = (pair // 2, pair) if holds_codes else (pair, pair // 2 if tma else turned)
    return (num_stages - 1) * stored + last + 2 * block_m * (padded_head_size + key_tile) + _BARRIERS


def fitted(schedule: Schedule, shape: AttentionShape, device: torch.device) -> Schedule:
    """A schedule of decode-like work with as many of its stages as there is room for on a GPU.

    Prefill-like work has as many stages as the GPUs with the least memory have room for: see :func:`fitted_prefill`.
    """

    def needed(num_stages: int, tma: bool) -> int:
        holds_codes = shape.cache_dtype is not None
        return decode_bytes(
            schedule.block_m, num_stages, shape.key_tile, shape.padded_head_size, tma, holds_codes, shape.padded_tail
        )

    if schedule.num_stages == 1 or needed(schedule.num_stages, True) <= LEAST:
        return schedule
    gpu = torch.cuda.get_device_properties(device)
    num_stages = schedule.num_stages
    while num_stages > 1 and needed(num_stages, attends_by_tma(gpu.major)) > gpu.shared_memory_per_block_optin:
        num_stages -= 1
    return replace(schedule, num_stages=num_stages)


def fitted_prefill(schedule: Schedule, shape: AttentionShape, device: torch.device) -> Schedule:
    """One of prefill-like work, with half as many rows where a GPU has no room for a tail of keys beside them."""
    if not shape.tail or schedule.block_m <= 16 or shape.padded_head_size <= 256:
        return schedule
    room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return schedule if room >= _LATENT_PREFILL else replace(schedule, block_m=schedule.block_m // 2)
