"""Whether attention is right: near its definition in float64, and with the same bits in any batch."""

from collections.abc import Callable, Iterator

import torch

from benchmarks.attention_batch import Batch
from benchmarks.attention_cases import Request
from vllm_batch_invariant.ops.common.dtypes import E4M3

_LONGEST_PREFILL = 8192
_NEIGHBOUR_BEFORE, _NEIGHBOUR_AFTER = Request(199, 199), Request(1, 1001)
"""What shares a batch with a request: odd lengths, and more new tokens than a decode has."""


def _places(batch: Batch) -> list[int]:
    """The requests that are looked at."""
    return sorted({0, len(batch.requests) // 2, len(batch.requests) - 1})


class Exact:
    """Some rows of a batch by the definition, in float64."""

    def __init__(self, batch: Batch) -> None:
        rows = [
            (place, row)
            for place in _places(batch)
            for tokens in (batch.requests[place].tokens,)
            for row in sorted({0, tokens // 2, tokens - 1})
        ]
        self._rows = [batch.rows[place].start + row for place, row in rows]
        self._values = torch.stack([self._row(batch, place, row) for place, row in rows])

    def error(self, out: torch.Tensor) -> float:
        """The distance of an output from this, relative to its length."""
        distance = torch.linalg.vector_norm(out[self._rows].double() - self._values)
        return float(distance / torch.linalg.vector_norm(self._values))

    @staticmethod
    def _row(batch: Batch, place: int, row: int) -> torch.Tensor:
        """[heads, head_size]"""
        request = batch.requests[place]
        layer = batch.layer
        end = request.context if layer.encodes else request.context - request.tokens + row + 1
        query = batch.query[batch.rows[place].start + row].double().unflatten(0, (batch.kv_heads, -1))
        cache = _numbers(batch.cache, batch.pages(place)).flatten(0, 1)[max(0, end - (layer.window or end)) : end]
        keys, values = (part.double() for part in cache.split(batch.head_size, dim=-1))
        scores = torch.einsum("hgd,khd->hgk", query, keys) * batch.scale
        if layer.sinks is not None:
            scores = torch.cat([scores, layer.sinks.double().view(*scores.shape[:2], 1)], -1)
        weights = torch.softmax(scores, dim=-1)[..., : len(keys)]
        return torch.einsum("hgk,khd->hgd", weights, values).flatten(0, 1)


def cancel(batch: Batch) -> None:
    """Give every page of a request a counterpart, with its keys and minus its values: the sum of all is then zero but
    for rounding errors, which no change of order leaves alone. Counterparts lie in opposite order.
    """
    for place in range(len(batch.requests)):
        pages = batch.pages(place)
        half = len(pages) // 2
        if half:
            opposite = _numbers(batch.cache, pages[:half].flip(0))
            opposite[..., batch.head_size :].neg_()
            _bits(batch.cache)[pages[-half:]] = _bits(opposite.to(batch.cache.dtype))


def _bits(cache: torch.Tensor) -> torch.Tensor:
    """Of e4m3, which PyTorch does not index."""
    return cache.view(torch.uint8) if cache.dtype == E4M3 else cache


def _numbers(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Of some pages: bf16."""
    return _bits(cache)[pages].view(cache.dtype).to(torch.bfloat16)


def other_bits(
    run: Callable[[Batch], torch.Tensor], covers: Callable[[tuple[Request, ...]], bool], batch: Batch
) -> list[str]:
    """Where rows of a batch have other bits than in it.

    Args:
        run: [tokens, heads, head_size] of a batch.
        covers: whether such requests can be computed.
        batch: what to look at.

    Returns:
        The first of these that differ for each request: empty where all bits are equal.
    """
    whole = run(batch)
    found = []
    if len(batch.requests) > 1:
        opposite = batch.pick(range(len(batch.requests))[::-1])
        parts = run(opposite).split([request.tokens for request in opposite.requests])
        if not torch.equal(torch.cat(parts[::-1]), whole):
            found.append("in opposite order")
    for place in _places(batch):
        for name, other, rows, expected in _elsewhere(batch, place, whole[batch.rows[place]]):
            if covers(other.requests) and not torch.equal(run(other)[rows], expected):
                found.append(f"request {place} {name}")
                break
    return found


def _elsewhere(batch: Batch, place: int, expected: torch.Tensor) -> Iterator[tuple[str, Batch, slice, torch.Tensor]]:
    """(what, a batch with a request of another, its rows there, what they shall be)"""
    request, query, table = batch.requests[place], batch.query[batch.rows[place]], batch.table[place]
    tokens, context = request.tokens, request.context

    def with_request(*requests: Request) -> Batch:
        """The request's pages with other numbers of new tokens; ``request`` has its own queries at the end."""
        parts = []
        for one in requests:
            own = query[-one.tokens :] if one.context == context else query[:0]
            parts += [_random_like(query, one.tokens - len(own)), own]
        return batch.with_requests(requests, torch.cat(parts), table.repeat(len(requests), 1))

    if batch.layer.encodes:
        yield "alone", batch.pick([place]), slice(None), expected
        return
    yield "alone", with_request(request), slice(None), expected
    before, after = _at_most(_NEIGHBOUR_BEFORE, context), _at_most(_NEIGHBOUR_AFTER, context)
    inside = slice(before.tokens, before.tokens + tokens)
    yield "among others", with_request(before, request, after), inside, expected
    if tokens > 1:
        yield "by decode", with_request(Request(1, context)), slice(None), expected[-1:]
    if tokens < context <= _LONGEST_PREFILL:
        yield "by prefill", with_request(Request(context, context)), slice(context - tokens, None), expected


def _at_most(request: Request, context: int) -> Request:
    return Request(min(request.tokens, context), min(request.context, context))


def _random_like(query: torch.Tensor, tokens: int) -> torch.Tensor:
    generator = torch.Generator(query.device).manual_seed(tokens)
    return torch.randn(tokens, *query.shape[1:], generator=generator, dtype=query.dtype, device=query.device)
