"""What the attention benchmark measures: the heads of real models, and steps that an engine makes with them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from benchmarks.record import case_text
from benchmarks.roofline import Work

_ELEMENT_SIZE = 2
_BATCHES = 1, 8, 64, 256
_CONTEXTS = 1024, 8192, 32768, 131072
_PREFILLS = 512, 1024, 4096, 16384, 32768
_CHUNKS = (512, 16384), (64, 32768)
_MOST_CACHE_BYTES = 24e9


@dataclass(frozen=True)
class Shape:
    """The attention heads of a model on one tensor-parallel worker."""

    name: str
    heads: int
    kv_heads: int
    head_size: int


@dataclass(frozen=True)
class Request:
    """A request's part in one step."""

    tokens: int
    """Its new tokens."""
    context: int
    """Its keys, those of the new tokens included."""

    @property
    def pairs(self) -> int:
        """(query, key it sees) pairs."""
        return self.tokens * (self.context - self.tokens) + self.tokens * (self.tokens + 1) // 2


@dataclass(frozen=True)
class Case:
    """One step of an engine."""

    shape: Shape
    phase: str
    requests: tuple[Request, ...]
    in_codes: bool = False
    """Whether keys and values are e4m3."""

    @cached_property
    def work(self) -> Work:
        """Keys and values are read once for each request, all query heads of a group together."""
        size = self.shape.head_size
        rows = sum(request.tokens for request in self.requests) * self.shape.heads
        pairs = sum(request.pairs for request in self.requests) * self.shape.heads
        return Work(self.cache_bytes + 2 * rows * size * _ELEMENT_SIZE, 4 * size * pairs)

    @property
    def cache_bytes(self) -> int:
        """Keys and values of all requests."""
        keys = sum(request.context for request in self.requests)
        return 2 * keys * self.shape.kv_heads * self.shape.head_size * (1 if self.in_codes else _ELEMENT_SIZE)

    @property
    def decode_only(self) -> bool:
        """Whether every request has one new token."""
        return all(request.tokens == 1 for request in self.requests)

    def text(self, page_size: int) -> str:
        """The case as the data names it; ``tokens`` and ``context`` are the largest of a request."""
        return case_text(
            phase=self.phase,
            batch=len(self.requests),
            tokens=max(request.tokens for request in self.requests),
            context=max(request.context for request in self.requests),
            heads=self.shape.heads,
            kv_heads=self.shape.kv_heads,
            head=self.shape.head_size,
            page=page_size,
            dtype="bf16",
            **({"cache": "fp8"} if self.in_codes else {}),
        )


SHAPES = (
    Shape("qwen3-8b", 32, 8, 128),
    Shape("llama-70b-tp8", 8, 1, 128),
    Shape("qwen2.5-0.5b", 14, 2, 64),
)


def shape_name(keys: Mapping[str, str]) -> str:
    """The shape of a case that was read, by its name, or by its heads where it has none."""
    heads = tuple(int(keys[key]) for key in ("heads", "kv_heads", "head"))
    names = {(shape.heads, shape.kv_heads, shape.head_size): shape.name for shape in SHAPES}
    return names.get(heads, "/".join(map(str, heads)))


def _cases(shape: Shape) -> Iterator[Case]:
    for batch, context in product(_BATCHES, _CONTEXTS):
        case = Case(shape, "decode", (Request(1, context),) * batch)
        if case.cache_bytes < _MOST_CACHE_BYTES:
            yield case
    for tokens in _PREFILLS:
        yield Case(shape, "prefill", (Request(tokens, tokens),))
    yield Case(shape, "prefill", (Request(1024, 1024),) * 8)
    for tokens, context in _CHUNKS:
        yield Case(shape, "chunk", (Request(tokens, context),))
    yield Case(shape, "mixed", (Request(2048, 2048), *(Request(1, 4096),) * 64))


CASES = tuple(case for shape in SHAPES for case in _cases(shape))


def cases_of(filters: Sequence[str]) -> tuple[Case, ...]:
    """The cases that have every word of one of ``filters``: a shape's name, a phase, a pair such as ``batch=8``; with
    ``cache=fp8`` keys and values are e4m3.
    """
    wanted = [set(text.split()) for text in filters]
    every = *CASES, *(replace(case, in_codes=True) for case in CASES)
    return tuple(
        case
        for case in every
        if any(
            words <= {case.shape.name, case.phase, *case.text(0).split()} and case.in_codes == ("cache=fp8" in words)
            for words in wanted
        )
    )
