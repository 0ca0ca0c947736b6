"""Proves on the GPU at hand that the kernels which serve a model's attention give a row the same bits.

That tensor cores give a row the same bits in a block of 8, 16, 64 or 128 rows, on either side of the instruction and
by whatever instruction a compiler chooses for the block, is a measurement, so it is made where the model is served. One
request is computed as a prefill, in chunks and by decode, alone (CTAs share its splits then) and among
others, and the rows at borders of tiles, pages and splits are compared as bits. The operands show the order of every
sum: either the scores or the weighted values cancel, so that the result is rounding error.
"""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch

from ... import kept_file
from ...compare import bitwise_comparison
from ...errors import NotCovered
from ..common.cancelling import cancelling
from ..common.compile_errors import is_of_a_compiler, reason
from ..common.gpu_environment import gpu_environment, kept_path
from ..common.kv_cache import codes_of
from . import sm90
from .cuda import paged_attention
from .params import NO_RANGE, AttentionSpec, PackedKeys, PagedAttention, PagedCache
from .plan import DECODE_ROWS, WIDE_DECODE_ROWS, Kernels, Planner, prefill_schedule
from .shapes import AttentionShape

logger = logging.getLogger("vllm.batch_invariant")

_LENGTH = 2629
"""Keys: ten splits and a part of one, of two sizes, and no whole number of tiles or pages."""
_PREFILL = 640
"""Newest tokens of each prefill: two splits and a half."""
_BORDERS = tuple(
    sorted({1, _LENGTH} | {border + off for border in (64, 256, 320, 512, 2048, 2304, 2560) for off in (-1, 0, 1)})
)
"""Lengths at which a token is looked at."""
_PACKED_LENGTHS = (1, 5, 17, 64, 65, 129, 640, 1708)
"""Of requests that lie one after the other; together they have :data:`_LENGTH` rows."""
_WINDOW = 1500
"""Keys of a window that some lie behind here; a longer one would reach beyond the first key."""
_NOISE = 2.0**20
"""Factor of scores whose exact value is 0: it makes their rounding errors as large as scores are."""


_COSTS = {
    Kernels(sm90=True, decode_rows=WIDE_DECODE_ROWS): "Blocks of 16 rows serve; verify steps of more are prefills.",
    Kernels(sm90=True): "Triton's serves: decode has the same speed, long prefills take up to twice as long.",
    Kernels(sm90=False): "One size of blocks serves all: decode computes a whole block of rows for each request.",
    Kernels(sm90=False, decode_rows=0): "",
}
"""What it costs that kernels are not used."""


@dataclass(frozen=True)
class Certificate:
    """Which kernels serve, and what was compared."""

    kernels: Kernels
    elements: int
    """Of outputs, compared as bits."""
    refused: tuple[str, ...]
    """Kernels that gave a row other bits, or did not run, and where."""


@dataclass(frozen=True)
class Chunk:
    """The newest ``query_len`` tokens of a request of ``kv_len`` keys."""

    kv_len: int
    query_len: int


@dataclass(frozen=True)
class Operands:
    """One request's queries and pages; requests of other lengths begin like it and share its pages."""

    query: torch.Tensor
    """[_LENGTH, heads, elements of a key]"""
    cache: PagedCache
    """Strided as an engine's; of one request."""
    scale: float


@cache
def certify(
    shape: AttentionShape,
    device: torch.device,
    page_size: int,
    layers: tuple[AttentionSpec, ...],
    verify_len: int = 1,
    sees_ranges: bool = False,
) -> Certificate:
    """The fastest kernels that give every row of such layers the same bits; compared once for a GPU, a driver, a
    PyTorch, a Triton and a version of this code.

    Args:
        shape: of the layers.
        device: the GPU.
        page_size: keys in a page.
        layers: one of each kind. Their scale counts for nothing, and what is compared has sinks of its own.
        verify_len: tokens of a request in the longest verify step, 1 without speculative decoding.
        sees_ranges: whether some steps come with ranges of their tokens, for which the Triton kernel serves whatever
            is in the step, and others without.

    Raises:
        NotCovered: no kernel gives a row the same bits by prefill, by chunks and by decode; or it cannot be compared.
    """
    environment = _environment(device.index or 0)
    known = any(sm90.knows(layer, shape.cache_dtype is not None) for layer in layers)
    candidates = tuple(Kernels.candidates(shape, device, known, verify_len))
    key = (
        f"{shape}; {shape.reduction} in steps of {shape.key_tile}; pages of {page_size}; {'; '.join(_by_kind(layers))}"
        f"{'; verify steps with wide blocks' * (candidates[0].decode_rows > DECODE_ROWS)}"
        f"{'; steps with ranges' * sees_ranges}"
    )
    kept = _load(environment).get(key)
    if kept is not None:
        logger.info("Attention is served by %s, which an earlier start compared on this GPU.", kept.kernels)
        return kept
    try:
        found = _certify(shape, device, page_size, layers, candidates, sees_ranges)
    except torch.OutOfMemoryError as error:
        raise NotCovered(
            f"attention of {shape} that cannot be compared",
            "the comparison does not fit into the GPU's memory beside the KV cache",
            "lower --gpu-memory-utilization",
        ) from error
    if not found.refused:  # else every start says so again
        _save(environment, key, found)
    return found


def _certify(
    shape: AttentionShape,
    device: torch.device,
    page_size: int,
    layers: tuple[AttentionSpec, ...],
    candidates: tuple[Kernels, ...],
    sees_ranges: bool,
) -> Certificate:
    refused, started = [], time.perf_counter()
    with torch.cuda.device(device):
        data = [by_scores(shape, device, page_size), by_values(shape, device, page_size)]
        for kernels in candidates:
            found = compare(kernels, shape, data, layers, sees_ranges)
            if isinstance(found, int):
                logger.info(
                    "Attention is served by %s: %d outputs of %s have the same bits by prefill, chunks and decode "
                    "(compared in %.1f s).", kernels, found, shape, time.perf_counter() - started,
                )  # fmt: skip
                return Certificate(kernels, found, tuple(refused))
            refused.append(f"{kernels}: {found}")
            logger.warning("Attention is not served by %s. %s", refused[-1], _COSTS[kernels])
    raise NotCovered(
        f"attention of {shape} on {torch.cuda.get_device_name(device)}",
        f"its kernels give a row other bits by prefill than by decode ({'; '.join(refused)})",
        "use another GPU or another version of Triton",
    )


@cache
def _environment(device: int) -> dict[str, str]:
    return gpu_environment(device, "ops/attention", "ops/common")


def _path(environment: dict[str, str]) -> Path | None:
    return kept_path("attention", environment)


def known(device: int) -> dict[str, Certificate]:
    """What earlier starts have compared on a GPU, by what was compared in words."""
    return _load(_environment(device))


def _load(environment: dict[str, str]) -> dict[str, Certificate]:
    content = kept_file.read(_path(environment))
    if content is None:
        return {}
    try:
        if content["environment"] != environment:
            raise ValueError("it is of another environment")
        return {
            key: Certificate(Kernels(**kept["kernels"]), int(kept["elements"]), ())
            for key, kept in content["certificates"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        kept_file.set_aside(_path(environment), error)
        return {}


def _save(environment: dict[str, str], key: str, found: Certificate) -> None:
    kept = {"kernels": asdict(found.kernels), "elements": found.elements}

    def added(content: Any) -> dict[str, Any]:
        before = content["certificates"] if content is not None else {}
        return {"environment": environment, "certificates": before | {key: kept}}

    kept_file.update(_path(environment), added)


def _by_kind(layers: Sequence[AttentionSpec]) -> dict[str, AttentionSpec]:
    """One layer of each kind, by what it is in words."""

    def words(layer: AttentionSpec) -> str:
        if layer.alibi_slopes is None:
            return str(layer)
        digest = sha256(repr(tuple(layer.alibi_slopes.tolist())).encode()).hexdigest()[:8]
        return str(layer).replace("ALiBi", f"ALiBi {digest}")

    return {words(layer): layer for layer in layers}


def compare(
    kernels: Kernels,
    shape: AttentionShape,
    data: Sequence[Operands],
    layers: Sequence[AttentionSpec],
    sees_ranges: bool = False,
) -> int | str:
    """The number of elements compared, or in words where a row has other bits, or what did not run."""
    try:
        elements = 0
        for kind, layer in _by_kind(layers).items():
            for window in _windows_of(layer):
                planner, compared = _planner(kernels, shape, data[0], window), replace(layer, sliding_window=window)
                for operands in data:
                    found = _compare_ways(planner, operands, compared, sees_ranges)
                    if isinstance(found, str):
                        return f"{kind} attention has other bits {found}"
                    elements += found
    except Exception as error:
        if not is_of_a_compiler(error):
            raise
        return reason(error)
    return elements


def _windows_of(layer: AttentionSpec) -> list[int | None]:
    """The window of a layer, for which a kernel may be compiled, and if it is longer than what is compared one that
    keys lie behind.
    """
    window = layer.sliding_window
    return [window] if window is None or window <= _WINDOW else [window, _WINDOW]


def _compare_ways(planner: Planner, operands: Operands, layer: AttentionSpec, sees_ranges: bool) -> int | str:
    """As :func:`compare`, for one kind of layer and one request. Where rows see all of its keys, those of shorter ones
    are company.
    """
    known = operands.query.new_empty((*operands.query.shape[:2], operands.cache.value_size))
    for chunk in (Chunk(_PREFILL, _PREFILL), Chunk(_LENGTH, _PREFILL)):
        known[chunk.kv_len - chunk.query_len : chunk.kv_len] = _attend(planner, operands, [chunk], layer, False)
    elements = 0
    steps = (False, True) if sees_ranges else (False,)
    every_way = product(steps, ways(planner.shape.queries_per_kv, planner.decode_rows))
    for has_ranges, (name, chunks) in every_way:
        rows = torch.cat([torch.arange(one.kv_len - one.query_len, one.kv_len) for one in chunks])
        kept = (rows < _PREFILL) | (rows >= _LENGTH - _PREFILL)
        if not layer.causal:
            kept = torch.cat([torch.full((one.query_len,), one.kv_len == _LENGTH) for one in chunks])
        kept = kept.nonzero()[:, 0]
        found = bitwise_comparison(_attend(planner, operands, chunks, layer, has_ranges)[kept], known[rows[kept]])
        if not found:
            first, way = int(rows[kept][found.first.where[0]]), f"{name}{' beside ranges' * has_ranges}"
            return f"{way} than by prefill: {found.different} of {found.elements} elements, first at {first}"
        elements += found.elements
    return elements


def ways(queries_per_kv: int, decode_rows: int = DECODE_ROWS) -> Iterator[tuple[str, list[Chunk]]]:
    """How the rows of a prefill are computed otherwise, in words and as a batch of chunks.

    Args:
        queries_per_kv: query heads of a KV head.
        decode_rows: rows up to which a request is decode-like.
    """
    decode_len = max(max(decode_rows, DECODE_ROWS) // queries_per_kv, 1)
    decode = [Chunk(kv_len, 1) for kv_len in _BORDERS]
    yield "by decode", decode
    yield "by decode alone", decode[-1:]
    yield "by decode in pairs", [decode[-1], decode[len(decode) // 2]]
    if decode_len > 1:
        yield f"in chunks of {decode_len}", [Chunk(kv_len, decode_len) for kv_len in _BORDERS if kv_len >= decode_len]
        yield f"in a chunk of {decode_len} alone", [Chunk(_LENGTH, decode_len)]
    for query_len in (decode_len + 1, 64, 200):
        yield f"in a chunk of {query_len} alone", [Chunk(_LENGTH, query_len)]
    yield "in chunks among others", [*decode[::3], Chunk(_LENGTH, 77), Chunk(513, 130), *decode[1::3], Chunk(2049, 40)]


def _planner(kernels: Kernels, shape: AttentionShape, operands: Operands, window: int | None) -> Planner:
    batches = [chunks for _, chunks in ways(shape.queries_per_kv, kernels.decode_rows)]
    requests = max(map(len, batches))
    tokens = max(_PREFILL, *(sum(chunk.query_len for chunk in chunks) for chunks in batches))
    sizes = requests, tokens, requests * _LENGTH
    return Planner(shape, operands.query.device, *sizes, kernels=kernels, window=window)


def _attend(
    planner: Planner, operands: Operands, chunks: Sequence[Chunk], layer: AttentionSpec, has_ranges: bool
) -> torch.Tensor:
    """[tokens of all chunks, heads, the values' size]; NaN where no kernel wrote. Ranges are of no position."""
    device = operands.query.device
    query = torch.cat([operands.query[one.kv_len - one.query_len : one.kv_len] for one in chunks])
    lengths = torch.tensor([one.kv_len for one in chunks], dtype=torch.int32, device=device)
    starts = list(accumulate((one.query_len for one in chunks), initial=0))
    starts = torch.tensor(starts, dtype=torch.int32, device=device)
    cache = replace(operands.cache, block_table=operands.cache.block_table.repeat(len(chunks), 1))
    sinks = None if layer.sinks is None else torch.linspace(-2, 4, query.shape[1], dtype=torch.float32).to(device)
    spec = replace(layer.to(device), scale=operands.scale, sinks=sinks)
    ranges = torch.tensor([NO_RANGE], dtype=torch.int32, device=device).repeat(len(query), 1) if has_ranges else None
    call = PagedAttention(query, cache, lengths, starts, spec, planner.shape.reduction, ranges)
    out = query.new_full(call.out_shape, math.nan)
    plan = planner.plan(starts, lengths, len(query), max(one.query_len for one in chunks), has_ranges)
    paged_attention(call, out, plan)
    return out


@cache
def kernels_of_packed(shape: AttentionShape, device: torch.device) -> Kernels:
    """What serves rows that see all keys of their request, which have no pages: the Gluon kernel, if it can be compiled
    and gives the bits of Triton's, compared once in a process; all rows are prefill-like then.
    """
    by_triton, by_sm90 = Kernels(sm90=False), Kernels(sm90=True, decode_rows=0)
    block_m = prefill_schedule(shape.head_size, shape.dtype).block_m
    if not sm90.covers_packed(shape, block_m, device):
        return by_triton
    try:
        with torch.cuda.device(device):
            found = [_differs_packed(shape, numbers, by_triton, by_sm90) for numbers in (_scores, _values)]
        problem = next(filter(None, found), None)
    except Exception as error:
        if not is_of_a_compiler(error):
            raise
        problem = reason(error)
    if problem is None:
        return by_sm90
    logger.warning("Attention of %s to all keys of a request is not served by %s: %s", shape, by_sm90, problem)
    return by_triton


def _differs_packed(shape: AttentionShape, draw: Any, *kernels: Kernels) -> str | None:
    """Where kernels differ over the same keys, which are one request's and several ones'; None: nowhere."""
    device = torch.device("cuda", torch.cuda.current_device())
    query, keys, values, scale = draw(shape, device)
    spec = AttentionSpec(scale, causal=False)
    for lengths in (_LENGTH,), _PACKED_LENGTHS:
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        cache = PackedKeys.of(keys, values, starts)
        call = PagedAttention(query, cache, starts.diff(), starts, spec, shape.reduction)
        results = []
        for one in kernels:
            planner = Planner(shape, device, len(lengths), _LENGTH, _LENGTH, plain=False, kernels=one)
            results.append(torch.full_like(query, math.nan))
            paged_attention(call, results[-1], planner.plan(starts, starts.diff(), _LENGTH, _LENGTH))
        found = bitwise_comparison(results[1], results[0])
        if not found:
            return f"{found.different} of {found.elements} elements are other than those of {kernels[0]}"
    return None


def by_scores(shape: AttentionShape, device: torch.device, page_size: int) -> Operands:
    """Every score is exactly 0 but for rounding errors, which the scale makes as large as scores are: the order of the
    dots of queries and keys decides the weights.
    """
    return _paged(shape, *_scores(shape, device), page_size)


def by_values(shape: AttentionShape, device: torch.device, page_size: int) -> Operands:
    """Every weight is 1, and the values of a tile of keys have their negatives in the tile: the order in which they are
    added decides the result.
    """
    return _paged(shape, *_values(shape, device), page_size)


Numbers = tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]
"""Queries [_LENGTH, heads, elements of a key], keys and values [_LENGTH, kv_heads, ...], and the scale of scores."""


def _scores(shape: AttentionShape, device: torch.device) -> Numbers:
    """Those of :func:`by_scores`."""
    heads, size = shape.heads, shape.head_size + shape.tail
    query, keys = cancelling(_LENGTH * heads, _LENGTH * shape.kv_heads, size, shape.dtype, device)
    values = torch.randn(_LENGTH, shape.kv_heads, size, generator=_generator(device), device=device).to(shape.dtype)
    return query.view(_LENGTH, heads, size), keys.view(_LENGTH, -1, size), values, _NOISE


def _values(shape: AttentionShape, device: torch.device) -> Numbers:
    """Those of :func:`by_values`."""
    size, tile = shape.head_size, shape.key_tile
    generator = _generator(device)
    tiles = -(-_LENGTH // tile)
    half = torch.randn(tiles, tile // 2, shape.kv_heads, size, generator=generator, device=device).to(shape.dtype)
    order = torch.randperm(tile // 2, generator=generator, device=device)
    values = torch.cat([half, -half[:, order]], 1).flatten(0, 1)[:_LENGTH]
    query = torch.zeros(_LENGTH, shape.heads, size + shape.tail, dtype=shape.dtype, device=device)
    keys = torch.ones_like(values)
    if shape.tail:
        keys = torch.cat([values, values[..., :1].expand(-1, -1, shape.tail)], -1)
    return query, keys, values, 1.0


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _paged(
    of: AttentionShape, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, page_size: int
) -> Operands:
    """Keys and values [_LENGTH, kv_heads, head_size] side by side in pages that lie in any order, as vLLM has them;
    keys with a tail alone.

    Codes of equal and of opposite numbers are equal and opposite, so that what cancels still does.
    """
    device, pages = query.device, -(-_LENGTH // page_size)
    both = keys if of.tail else torch.cat([keys, values], -1)
    shape = pages + 1, page_size, *both.shape[1:]
    cache = torch.full(shape, math.nan, dtype=query.dtype, device=device)
    order = torch.randperm(pages + 1, generator=_generator(device), device=device)[:pages]
    places = torch.arange(_LENGTH, device=device)
    cache[order[places // page_size], places % page_size] = both
    scales = []
    if of.cache_dtype is not None:
        each = (len(cache), keys.shape[1], page_size) if of.scales_of_tokens else ()
        scales = [torch.ones(each, dtype=torch.float32, device=device) for _ in "kv"]
        cache = codes_of(cache, torch.ones((), device=device))
    if of.tail:
        return Operands(query, PagedCache.latent(cache.transpose(1, 2), of.head_size, order[None].int()), scale)
    split = cache.transpose(1, 2).split(keys.shape[-1], dim=-1)
    return Operands(query, PagedCache(*split, order[None].int(), None, *scales), scale)
