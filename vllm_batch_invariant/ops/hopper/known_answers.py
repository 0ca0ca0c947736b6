"""A digest of what the definition makes of operands made of integers: whether it is still the one that was compared."""

import hashlib
from collections.abc import Iterator

import numpy as np
import torch

from ..exact.definition import Floats, bf16, fp32
from ..exact.known_answers import normal, with_outliers
from ..norm.reduction import NormReduction
from ..softmax.reduction import SoftmaxReduction
from . import definition, sampling
from .tables import Tables

_LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def digest(tables: Tables) -> str:
    """Of every operation, with such special functions: 16 hexadecimal digits."""
    found = hashlib.sha256()
    with np.errstate(all="ignore"):
        for answer in _answers(tables):
            found.update(np.where(np.isnan(answer), fp32(np.nan), answer).astype("<f4").tobytes())
    return found.hexdigest()[:16]


def _answers(tables: Tables) -> Iterator[Floats]:
    x, weight = with_outliers(1, 12, 520), with_outliers(2, 40, 520)
    yield definition.mma(x, weight)
    yield definition.linear(x, weight, normal(3, 40))
    yield definition.linear(normal(4, 5, 512), normal(5, 6, 512), k_slices=4)
    for length in (128, 576, 4096):
        rows, reduction = normal(6, 5, length), NormReduction.of_device("cuda", length, torch.bfloat16)
        yield from definition.rms_norm(rows, normal(7, length), 1e-6, normal(8, 5, length), reduction)
    yield definition.silu_and_mul(bf16(normal(9, 9, 512) * fp32(50)), tables)
    for length in (1000, 40_000):
        logits = bf16(normal(10, 2, length) * fp32(4))
        yield definition.log_softmax(logits, SoftmaxReduction.of_device("cuda", length, torch.float32), tables)
    for rows, keys in ((70, 300), (1, 2500)):
        q, k, v = normal(11, rows, 4, 64), normal(12, keys, 2, 64), normal(13, keys, 2, 64)
        yield definition.attention(q, k, v, 0.125, tables)
    for base, scaling in ((1e6, {}), (5e5, _LLAMA_3)):
        frequencies = definition.inverse_frequencies(128, base, scaling, tables)
        table = definition.rotary_table(3000, frequencies)
        yield frequencies
        yield table
        yield definition.rotate(normal(14, 9, 3, 128), table[-9:])
    yield sampling.noise(-5, 300, np.arange(40_000))
    yield sampling.top_k_top_p(normal(15, 4096) * fp32(3), 100, 0.9, tables)
