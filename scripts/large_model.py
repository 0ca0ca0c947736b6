"""Weights of integers as :func:`~vllm_batch_invariant.ops.exact.known_answers.weight` has them, of models that are
larger than memory: each is drawn in bf16 by every core, and written.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numba import prange
from numpy.typing import NDArray

from vllm_batch_invariant.ops.common.numba_bf16 import rounded, widened
from vllm_batch_invariant.ops.common.numba_exact_math import hashed_key, uniform
from vllm_batch_invariant.ops.common.numba_rows import RowKernel
from vllm_batch_invariant.ops.exact import definition, known_answers

_SHARD = 3 << 30
"""Bytes from which on a file is full."""
Shapes = Mapping[str, tuple[int, ...]]


def _draw_kernel(keys, root, out):
    """out: [rows, K] uint16, the bits of bf16."""
    k = out.shape[1]
    a, b, c, d = hashed_key(keys[0]), hashed_key(keys[1]), hashed_key(keys[2]), hashed_key(keys[3])
    for row in prange(out.shape[0]):
        for i in range(k):
            token = np.uint64(row * k + i)
            total = (uniform(a, token) + uniform(b, token)) + (uniform(c, token) + uniform(d, token))
            normal = widened(rounded((total - np.float32(2)) * np.float32(1.7320508), out))
            out[row, i] = rounded(normal / root, out)


_draw = RowKernel(_draw_kernel)


def drawn(seed: int, *shape: int) -> NDArray[np.uint16]:
    """The bits of :func:`~vllm_batch_invariant.ops.exact.known_answers.weight`."""
    if len(shape) == 1:
        return definition.to_bits(known_answers.weight(seed, *shape))
    out = np.empty(shape, np.uint16)
    for own, part in known_answers.parts(seed, len(out)):
        keys = np.array([definition.key_of(own, number) for number in range(4)], np.uint64)
        _draw(out[part].size, keys, np.float32(math.sqrt(shape[1])), out[part])
    return out


def save(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the weights of a configuration, in files of safetensors."""
    shapes = known_answers.shapes(config)
    seeds = {name: seed for seed, name in enumerate(shapes)}
    shards = list(_shards(shapes))
    for number, shard in enumerate(shards, 1):
        with (folder / f"model-{number:05}-of-{len(shards):05}.safetensors").open("wb") as file:
            file.write(_header(shard))
            for name, shape in shard.items():
                file.write(drawn(seeds[name], *shape).data)


def _shards(shapes: Shapes) -> Iterator[Shapes]:
    shard: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        shard[name] = shape
        if sum(2 * math.prod(one) for one in shard.values()) >= _SHARD:
            yield shard
            shard = {}
    if shard:
        yield shard


def _header(shapes: Shapes) -> bytes:
    """Of a file of weights: eight bytes, the length of the JSON that follows, and that, with the place of each after it
    (https://huggingface.co/docs/safetensors).
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
