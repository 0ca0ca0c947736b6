"""Digests of what the definition makes of operands made of integers: whether it is still the one that was compared."""

import hashlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from ..exact.definition import Floats, bf16, expert_sum, fp32, scaled
from ..exact.known_answers import normal, with_outliers
from ..norm.reduction import NormReduction
from ..quantise import quantise
from ..scaled_linear import E4M3, GROUP, WGMMA, scaled_linear
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


def digests(tables: Tables, operations: Iterable[str]) -> dict[str, str]:
    """Of those of some operations that have known answers, with such special functions: 16 hexadecimal digits."""
    found = {}
    with np.errstate(all="ignore"):
        for operation in _ANSWERS.keys() & {*operations}:
            digest = hashlib.sha256()
            for answer in _ANSWERS[operation](tables):
                digest.update(np.where(np.isnan(answer), fp32(np.nan), answer).astype("<f4").tobytes())
            found[operation] = digest.hexdigest()[:16]
    return found


def _matmuls(_: Tables) -> Iterator[Floats]:
    x, weight = with_outliers(1, 12, 520), with_outliers(2, 40, 520)
    yield definition.mma(x, weight)
    yield definition.linear(x, weight, normal(3, 40))
    yield definition.linear(normal(4, 5, 512), normal(5, 6, 512), k_slices=4)


def _norms(adds_one: bool) -> Iterator[Floats]:
    for length in (128, 576, 4096):
        rows, reduction = normal(6, 5, length), NormReduction.of_device("cuda", length, torch.bfloat16)
        yield from definition.rms_norm(rows, normal(7, length), 1e-6, normal(8, 5, length), reduction, adds_one)


def _logits() -> Iterator[tuple[Floats, SoftmaxReduction]]:
    for length in (1000, 40_000):
        reduction = SoftmaxReduction.of_device("cuda", length, torch.float32)
        yield bf16(normal(10, 2, length) * fp32(4)), reduction


def _attention(tables: Tables, **how: float) -> Iterator[Floats]:
    for rows, keys in ((70, 300), (1, 2500)):
        q, k, v = normal(11, rows, 4, 64), normal(12, keys, 2, 64), normal(13, keys, 2, 64)
        yield definition.attention(q, k, v, 0.125, tables, **how)


def _large_heads(tables: Tables) -> Iterator[Floats]:
    q, k, v = normal(16, 9, 2, 256), normal(17, 300, 1, 256), normal(18, 300, 1, 256)
    yield definition.attention(q, k, v, 0.0625, tables)


def _frequencies(tables: Tables) -> Iterator[Floats]:
    for base, scaling in ((1e6, {}), (5e5, _LLAMA_3)):
        yield definition.inverse_frequencies(128, base, scaling, tables)


def _rotary_tables(tables: Tables) -> Iterator[Floats]:
    for frequencies in _frequencies(tables):
        yield frequencies
        yield definition.rotary_table(3000, frequencies)


def _rotations(tables: Tables) -> Iterator[Floats]:
    for frequencies in _frequencies(tables):
        yield definition.rotate(normal(14, 9, 3, 128), definition.rotary_table(3000, frequencies)[-9:])


def _routes(tables: Tables) -> Iterator[Floats]:
    for experts, top_k, renormalise in ((64, 8, True), (60, 4, False)):
        reduction = SoftmaxReduction.of_device("cuda", experts, torch.float32)
        logits = bf16(normal(20, 9, experts) * fp32(3))
        weights, ids = definition.route(logits, top_k, renormalise, reduction, tables)
        yield from (weights, ids.astype(fp32))


def _codes(seed: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in e4m3 and the scales of their groups."""
    return quantise(torch.from_numpy(normal(seed, *shape)).to(torch.bfloat16), codes=E4M3, group=GROUP)


def _quantised(_: Tables) -> Iterator[Floats]:
    codes, scales = _codes(23, 9, 640)
    yield from (codes.float().numpy(), scales.numpy())


def _products_of_codes(_: Tables) -> Iterator[Floats]:
    weight, rows = _codes(24, 128, 640)
    scales = rows[:1].clone()  # of the block of so many rows
    made = scaled_linear(*_codes(25, 5, 640), weight, scales, None, torch.bfloat16, mma=WGMMA)
    yield made.float().numpy()


_ANSWERS: dict[str, Callable[[Tables], Iterable[Floats]]] = {
    "matmul": _matmuls,
    "rms_norm": lambda _: _norms(False),
    "norm_plus_one": lambda _: _norms(True),
    "silu_and_mul": lambda tables: [definition.silu_and_mul(bf16(normal(9, 9, 512) * fp32(50)), tables)],
    "gelu_and_mul": lambda tables: [definition.gelu_and_mul(normal(9, 9, 512) * fp32(4), tables)],
    "log_softmax": lambda tables: (definition.log_softmax(*logits, tables) for logits in _logits()),
    "capped_logits": lambda tables: (definition.capped(logits, 5.0, tables) for logits, _ in _logits()),
    "attention": _attention,
    "windows": lambda tables: _attention(tables, window=100),
    "capped_scores": lambda tables: _attention(tables, soft_cap=2.0),
    "heads_of_256": _large_heads,
    "rotary_table": _rotary_tables,
    "rotate": _rotations,
    "linear_angles": lambda tables: (definition.rotary_table(3000, one, 8.0) for one in _frequencies(tables)),
    "scaled_embeddings": lambda _: [scaled(normal(19, 9, 64), 45.25)],
    "route": _routes,
    "experts": lambda _: [expert_sum(normal(22, 5, 3, 64), np.abs(normal(26, 5, 3)))],
    "quantise": _quantised,
    "scaled_linear": _products_of_codes,
    "noise": lambda _: [sampling.noise(-5, 300, np.arange(40_000))],
    "top_k_top_p": lambda tables: [sampling.top_k_top_p(normal(15, 4096) * fp32(3), 100, 0.9, tables)],
}
"""By operation, what the definition makes of operands."""
