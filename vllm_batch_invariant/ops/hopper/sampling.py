"""How vLLM's second model runner draws a token with a seed on a Hopper, by this package's top-k and top-p: in numpy."""

import numpy as np
from numpy.typing import NDArray

from ..exact.definition import Floats, fp32
from ..top_k_top_p.reduction import TopKTopPReduction
from . import definition
from .tables import Tables

_REDUCTION = TopKTopPReduction.of_device("cuda")


def _rotated(value: NDArray[np.uint32], shift: int) -> NDArray[np.uint32]:
    return value << np.uint32(shift) | value >> np.uint32(32 - shift)


def _mixed(h: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    key = _rotated(key * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotated(h ^ key, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def hashed(seed: int, position: int, tokens: NDArray[np.integer]) -> NDArray[np.uint32]:
    """MurmurHash3 of 32 bits (Appleby) of seed, position and each of some tokens, as vLLM 0.32 and later have it."""
    h = np.zeros(1, np.uint32)
    for key in (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, position & 0xFFFFFFFF):
        h = _mixed(h, np.full(1, key, np.uint32))
    h = _mixed(h, tokens.astype(np.uint32)) ^ np.uint32(16)
    h = (h ^ h >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    h = (h ^ h >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return h ^ h >> np.uint32(16)


def noise(seed: int, position: int, tokens: NDArray[np.integer]) -> Floats:
    """Gumbel noise -ln(-ln(1 - u)) of each token, u from its hash; below 1/4, -ln(1 - u) is a series of u.

    Args:
        seed: of the request.
        position: of the last token before the one that is drawn, counted from the prompt's first.
        tokens: whose noise is computed.
    """
    u = ((hashed(seed, position, tokens).astype(np.float64) + 0.5) * 2.0**-32).astype(fp32)
    series = np.full_like(u, 0.125)
    for term in range(7, 0, -1):
        series = definition.fma(u, series, fp32(1 / term))
    direct = definition.ln(np.maximum(fp32(1) - u, fp32(2.0**-24)))
    return -definition.ln(np.where(u < fp32(0.25), u * series, -direct))


def largest(x: Floats, count: int) -> NDArray[np.intp]:
    """Where the first ``count`` numbers of a row are, the largest first, of equal ones the first; NaN is the last."""
    if not 0 < count < len(x):
        return np.argsort(-x, kind="stable")[:count]
    less = -x
    some = np.flatnonzero(~(less > np.partition(less, count - 1)[count - 1]))
    return some[np.argsort(less[some], kind="stable")][:count]


def top_k_top_p(logits: Floats, k: int, p: float, tables: Tables) -> Floats:
    """A row of logits with -inf for all but the first k (0: all), and of these for all but the fewest that have p of
    their weight: the largest first, of equal ones the lowest token.
    """
    order = largest(logits, k or len(logits))
    if p < 1:
        difference = logits[order] - logits.max()
        mass = (definition.exp(difference, tables) * fp32(1 / _REDUCTION.unit)).astype(np.int64)
        mass = np.where(difference > fp32(_REDUCTION.weightless), mass, 0)
        mass = np.where(difference == 0, 1 << _REDUCTION.unit_bits, mass)
        total = int(mass.sum())
        wanted = min(max(int(np.ceil(np.float64(fp32(p)) * np.float64(total))), 1), total)
        order = order[mass.cumsum() - mass < wanted]
    out = np.full_like(logits, -np.inf)
    out[order] = logits[order]
    return out


def draw(logits: Floats, temperature: np.float32, k: int, p: float, seed: int, position: int, tables: Tables) -> int:
    """The token that a request with a seed takes.

    Args:
        logits: [vocabulary].
        temperature: above 0.
        k: see :func:`top_k_top_p`.
        p: see :func:`top_k_top_p`.
        seed: see :func:`noise`.
        position: see :func:`noise`.
        tables: of special functions.
    """
    heated = logits if temperature == 1 else definition.divide(logits, temperature, tables)
    kept = heated if k == 0 and p == 1 else top_k_top_p(heated, k, p, tables)
    some = np.flatnonzero(kept != -np.inf)
    return int(some[(kept[some] + noise(seed, position, some)).argmax()]) if len(some) else 0
