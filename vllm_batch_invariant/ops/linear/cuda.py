"""Products on a GPU: by cuBLASLt where it is there and certified for the weight's shape, else by Triton."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from ... import envs
from . import autotune, autotune_cache, triton_gemm
from .autotune import LIMITS, Entry, limit_of
from .problem import Signature, signature_of
from .reduction import LinearReduction
from .triton_gemm import ALIGNMENT, LARGEST_SIDE, accumulate, accumulate_batch, bmm, major_stride

try:
    from . import cublaslt
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] not in ("nvmath", "cuda"):
        raise
    cublaslt = None

__all__ = ["accumulate", "accumulate_batch", "bmm", "entries", "known", "mm", "prepare"]

logger = logging.getLogger("vllm.batch_invariant")

_USES_BEFORE_CERTIFIED = 3
"""How often a kind of product runs in Triton before it is certified: K of a gradient may follow the batch, and a kind
that never returns would be certified for nothing.
"""
_TUNING_SECONDS = 5.0
"""How long the schedules of one kind of product are timed when a model is loaded; after that the heuristic's first
choice serves. A kind takes about 0.6 s on an H200.
"""
_MOST_PLANS = 4096

_certified: dict[Signature, dict[int, Entry]] = {}
_inconsistent: dict[Signature, autotune.Inconsistent] = {}
_uses: Counter[tuple[Signature, int]] = Counter()
_lock = threading.RLock()


@dataclass(frozen=True)
class _Plan:
    """What is known of calls with operands of the same dtypes, strides and weight."""

    signature: Signature
    entries: dict[int, Entry]
    products: "cublaslt.Products"
    a_stride: int
    b_stride: int


_plans: dict[tuple, _Plan | None] = {}


def mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[M, K] @ [K, N] + bias; see the operation's package for the contract."""
    rows, addresses = a.shape[0], a.data_ptr() | b.data_ptr()
    if bias is not None:
        addresses |= bias.data_ptr()
    key = (
        a.stride(1) if rows == 1 else a.stride(),
        0 < rows <= LARGEST_SIDE,
        b.shape,
        b.stride(),
        bias is not None and bias.stride(),
        a.dtype,
        addresses % ALIGNMENT,
        a.device,
    )
    plan = _plans.get(key, _plans)
    if plan is _plans:
        plan = _plan(key, a, b, bias)
    if plan is not None:
        entry = plan.entries.get(limit_of(rows)) or _first_use(plan, rows)
        if entry is not None and entry.tile is not None:
            return triton_gemm.by_narrow_tile(a, b, bias, entry.tile)
        if entry is not None and entry.algorithm is not None:
            out = torch.empty((rows, b.shape[1]), dtype=a.dtype, device=a.device)
            try:
                plan.products.run(entry.algorithm, a, b, bias, out, a_stride=plan.a_stride, b_stride=plan.b_stride)
            except cublaslt.Error:
                logger.debug("cuBLASLt refused %d rows of the product %s", rows, plan.signature)
            else:
                return out
    return triton_gemm.mm(a, b, bias)


def _plan(key: tuple, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> _Plan | None:
    """What is known of such calls; None if Triton alone serves them."""
    if torch.cuda.is_current_stream_capturing():  # no time for disks and handles
        return None
    signature = signature_of(a, b, bias) if _library(a.device) else None
    plan = None
    if signature is not None:
        strides = major_stride(a)[0], major_stride(b)[0]
        plan = _Plan(signature, entries(signature), _products(signature), *strides)
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
        _uses.clear()
    _plans[key] = plan
    return plan


def _first_use(plan: _Plan, rows: int) -> Entry | None:
    """Certify a range of rows that is used again and again."""
    if plan.signature in _inconsistent:
        raise _inconsistent[plan.signature]
    if torch.cuda.is_current_stream_capturing():
        return None
    signature, limit = plan.signature, limit_of(rows)
    with _lock:
        _uses[signature, limit] += 1
        if _uses[signature, limit] == _USES_BEFORE_CERTIFIED:
            _certify(signature, [limit])
        return plan.entries.get(limit)


def prepare(weight: torch.Tensor, rows: int, bias: bool = False, sizes: Iterable[int] = ()) -> None:
    """Choose and certify the schedules of ``linear`` with such a weight: at once from disk, or by measuring.

    Args:
        weight: [N, K], as it will be used; its values do not matter.
        rows: the most rows of x to expect; for more, schedules are certified when they are first needed.
        bias: whether a bias is added.
        sizes: numbers of rows that will be common, such as those of CUDA graphs: checked one by one.
    """
    LinearReduction(*weight.shape, weight.dtype)
    sample = weight.new_empty(1, weight.shape[1])
    signature = signature_of(sample, weight.t(), weight.new_empty(weight.shape[0]) if bias else None)
    if signature is None or rows < 1:
        return
    with _lock:
        found, products, sizes = entries(signature), _products(signature), sorted(set(sizes))
        missing = []
        for limit in (limit for limit in LIMITS if limit <= limit_of(min(rows, LARGEST_SIDE))):
            entry = found.get(limit)
            of_range = {size for size in sizes if limit_of(size) == limit and size <= rows}
            timed = entry is not None and (entry.microseconds or products is None or not _TUNING_SECONDS)
            if not timed or not of_range <= set(entry.checked):
                missing.append(limit)
        if not missing:
            return
        started = time.monotonic()
        _certify(signature, missing, sizes, _TUNING_SECONDS)
    served = Counter(found[limit].served_by for limit in missing if limit in found)
    logger.info(
        "Product %s: %s, for ranges of up to %d rows, checked in %.1f s.",
        signature,
        " and ".join(f"{count} by {name}" for name, count in sorted(served.items())) or "Triton",
        rows,
        time.monotonic() - started,
    )


def entries(signature: Signature) -> dict[int, Entry]:
    """What is certified for a kind of product, by the end of the range of rows; read from disk at the first call."""
    found = _certified.get(signature)
    if found is None:
        stored = _stored(signature.device).get(str(signature), {})
        found = _certified.setdefault(signature, _entries_of(signature.device, stored))
    return found


def known(device: int) -> tuple[dict[str, str], dict[str, dict[int, Entry]]]:
    """What a certificate on this machine is true for, and every one there is by the name of the signature."""
    environment = _environment(device)
    return environment, {name: _entries_of(device, found) for name, found in autotune_cache.load(environment).items()}


def _entries_of(device: int, stored: dict[str, Any]) -> dict[int, Entry]:
    """Entries as they were stored; none where they cannot be read, and then the file is set aside."""
    try:
        return autotune.entries_from_json(stored)
    except ValueError as error:
        autotune_cache.set_aside(_environment(device), error)
        return {}


def _certify(signature: Signature, limits: list[int], sizes: Iterable[int] = (), tuning_seconds: float = 0.0) -> None:
    try:
        new = autotune.certify(signature, _products(signature), limits, sizes, tuning_seconds)
    except autotune.Inconsistent as error:
        _inconsistent[signature] = error
        raise
    except torch.OutOfMemoryError:
        logger.warning("The product %s is left to Triton: no memory to certify cuBLASLt with.", signature)
        return
    entries(signature).update(new)
    stored = {str(limit): entry.to_json() for limit, entry in new.items()}
    autotune_cache.save(_environment(signature.device), {str(signature): stored})


@cache
def _environment(device: int) -> dict[str, str]:
    return autotune_cache.environment(
        device, cublaslt.version() if _library(torch.device("cuda", device)) else "not used"
    )


@cache
def _library(device: torch.device) -> bool:
    """Whether cuBLASLt serves products."""
    if envs.LINEAR.read() == "triton":
        return False
    if cublaslt is None:
        logger.warning(
            "Products are Triton's, with the same bits, because nvmath-python is not installed; with it cuBLASLt "
            "saves, on an H200, 7 to 8%% of their time from 128 rows on: pip install 'vllm-batch-invariant[cuda]'."
        )
        return False
    try:
        cublaslt.handle(device.index)
    except Exception as error:  # whatever a library that cannot be loaded makes of it
        logger.warning("Products are Triton's, because cuBLASLt cannot be used: %s", error)
        return False
    return True


@lru_cache(maxsize=_MOST_PLANS)
def _products(signature: Signature) -> "cublaslt.Products | None":
    return cublaslt.Products(signature) if _library(torch.device("cuda", signature.device)) else None


@cache
def _stored(device: int) -> dict[str, dict[str, Any]]:
    return autotune_cache.load(_environment(device))
