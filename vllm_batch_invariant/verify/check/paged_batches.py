"""Requests whose keys and values are known, and the paged batches they can be put into."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Heads:
    """The attention shape of a model."""

    query: int
    kv: int
    size: int
    dtype: torch.dtype = torch.float32


@dataclass
class Request:
    """A request's queries, keys and values for ``length`` positions, drawn from its own seed."""

    heads: Heads
    length: int
    seed: int
    query: torch.Tensor = field(init=False)
    key: torch.Tensor = field(init=False)
    value: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        draw = [
            torch.randn(self.length, count, self.heads.size, generator=generator)
            for count in (self.heads.query, self.heads.kv, self.heads.kv)
        ]
        self.query, self.key, self.value = (tensor.to(self.heads.dtype) for tensor in draw)


@dataclass(frozen=True)
class Chunk:
    """A request's positions start to stop - 1, to be computed in one call."""

    request: Request
    start: int
    stop: int


def paged(
    chunks: list[Chunk], page_size: int = 16, placement: int = 0, filler: float = 7.0
) -> tuple[torch.Tensor, ...]:
    """The tensors of one call: caches laid out as in vLLM's CPU backend, ``filler`` where nothing is written."""
    heads = chunks[0].request.heads
    counts = [-(-chunk.stop // page_size) for chunk in chunks]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(placement))
    shape = (len(order), heads.kv, 2 * page_size, heads.size)
    key_cache, value_cache = torch.full(shape, filler, dtype=heads.dtype).chunk(2, dim=2)
    table = torch.full((len(chunks), max(counts) + 1), -1, dtype=torch.int32)
    taken = 0
    for row, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        pages = order[taken : taken + count]
        taken += count
        table[row, :count] = pages
        places = torch.arange(chunk.stop)
        at = pages[places // page_size], slice(None), places % page_size
        key_cache[at] = chunk.request.key[: chunk.stop]
        value_cache[at] = chunk.request.value[: chunk.stop]
    query = torch.cat([chunk.request.query[chunk.start : chunk.stop] for chunk in chunks])
    seq_lens = torch.tensor([chunk.stop for chunk in chunks], dtype=torch.int32)
    query_lens = torch.tensor([0] + [chunk.stop - chunk.start for chunk in chunks])
    return query, key_cache, value_cache, table, seq_lens, query_lens.cumsum(0).int()
