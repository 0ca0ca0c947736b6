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


_PACKED = (1, 1024), (8, 1024), (1, 4096), (1, 16384)
"""Sequences of an encoder, and tokens of each."""
_OF_LAYERS = (1, 1024), (8, 8192), (64, 1024), (64, 8192), (1, 32768)
"""Requests and contexts of decode in layers that add something to plain causal attention."""


@dataclass(frozen=True)
class Shape:
    """The attention heads of a model on one tensor-parallel worker."""

    name: str
    heads: int
    kv_heads: int
    head_size: int
    windows: tuple[int, ...] = ()
    """Of its layers with a sliding window."""
    sinks: bool = False
    """Whether all its layers have sinks."""
    encodes: bool = False
    """Whether tokens see all of their sequence, whose keys lie in no cache."""


@dataclass(frozen=True)
class Request:
    """A request's part in one step."""

    tokens: int
    """Its new tokens."""
    context: int
    """Its keys, those of the new tokens included."""

    @property
    def pairs(self) -> int:
        """(query, key it sees) pairs of causal attention."""
        return self.tokens * (self.context - self.tokens) + self.tokens * (self.tokens + 1) // 2

    def pairs_in(self, window: int) -> int:
        """The same of tokens that see so many keys at most, their own among them."""
        before = Request(self.tokens, self.context - window) if self.context - self.tokens >= window else None
        if before is None:
            rest = max(0, self.context - window)
            return self.pairs - rest * (rest + 1) // 2
        return self.pairs - before.pairs


@dataclass(frozen=True)
class Case:
    """One step of an engine."""

    shape: Shape
    phase: str
    requests: tuple[Request, ...]
    in_codes: bool = False
    """Whether keys and values are e4m3."""
    window: int | None = None
    """Keys that a token sees, its own among them; None: all before it."""

    @cached_property
    def work(self) -> Work:
        """Keys and values are read once for each request, all query heads of a group together."""
        size = self.shape.head_size
        rows = sum(request.tokens for request in self.requests) * self.shape.heads
        pairs = sum(map(self._pairs, self.requests)) * self.shape.heads
        seen = self._bytes(sum(self._keys(request) for request in self.requests))
        return Work(seen + 2 * rows * size * _ELEMENT_SIZE, 4 * size * pairs)

    def _pairs(self, request: Request) -> int:
        if self.shape.encodes:
            return request.tokens**2
        return request.pairs if self.window is None else request.pairs_in(self.window)

    def _keys(self, request: Request) -> int:
        """That are read of a request."""
        return request.context if self.window is None else min(request.context, self.window + request.tokens - 1)

    def _bytes(self, keys: int) -> int:
        return 2 * keys * self.shape.kv_heads * self.shape.head_size * (1 if self.in_codes else _ELEMENT_SIZE)

    @property
    def cache_bytes(self) -> int:
        """Keys and values of all requests."""
        return self._bytes(sum(request.context for request in self.requests))

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
            **({"window": self.window} if self.window else {}),
            **({"sinks": "yes"} if self.shape.sinks else {}),
        )


SHAPES = (
    Shape("qwen3-8b", 32, 8, 128),
    Shape("llama-70b-tp8", 8, 1, 128),
    Shape("qwen2.5-0.5b", 14, 2, 64),
)
LAYERS = (
    Shape("mistral-7b", 32, 8, 128, windows=(4096,)),
    Shape("gpt-oss-20b", 64, 8, 64, windows=(128,), sinks=True),
    Shape("gemma-3-12b", 16, 8, 256, windows=(1024,)),
    Shape("gemma-4-31b-global", 32, 4, 512),
    Shape("phi-3-mini", 32, 32, 96),
    Shape("qwen3-vl-tower", 16, 16, 72, encodes=True),
    Shape("qwen2.5-vl-tower", 16, 16, 80, encodes=True),
    Shape("internvl-tower", 16, 16, 64, encodes=True),
    Shape("glm-4v-tower", 12, 12, 128, encodes=True),
    Shape("eva-clip-e-tower", 16, 16, 112, encodes=True),
)
"""Shapes of which some layers, or all, add something to plain causal attention, or have heads of other sizes."""


def shape_name(keys: Mapping[str, str]) -> str:
    """The shape of a case that was read, by its name, or by its heads where it has none."""
    heads = tuple(int(keys[key]) for key in ("heads", "kv_heads", "head"))
    names = {(shape.heads, shape.kv_heads, shape.head_size): shape.name for shape in reversed((*SHAPES, *LAYERS))}
    return names.get(heads, "/".join(map(str, heads)))


def _layers(shape: Shape) -> Iterator[Case]:
    """Steps of layers with a window, and of the others where these have sinks, or heads of other sizes than
    :data:`SHAPES`; of encoders their own.
    """
    if shape.encodes:
        yield from (Case(shape, "encode", (Request(tokens, tokens),) * count) for count, tokens in _PACKED)
        return
    plain = (None,) if shape.sinks or shape.head_size not in {one.head_size for one in SHAPES} else ()
    for window in (*plain, *shape.windows):
        for batch, context in _OF_LAYERS:
            yield Case(shape, "decode", (Request(1, context),) * batch, window=window)
        for tokens in (1024, 4096, 16384):
            yield Case(shape, "prefill", (Request(tokens, tokens),), window=window)
        yield Case(shape, "chunk", (Request(512, 16384),), window=window)


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
LAYER_CASES = tuple(case for shape in LAYERS for case in _layers(shape))


def cases_of(filters: Sequence[str]) -> tuple[Case, ...]:
    """The cases that have every word of one of ``filters``: a shape's name, a phase, a pair such as ``batch=8``; with
    ``cache=fp8`` keys and values are e4m3.
    """
    wanted = [set(text.split()) for text in filters]
    every = *CASES, *(replace(case, in_codes=True) for case in CASES), *LAYER_CASES
    return tuple(
        case
        for case in every
        if any(
            words <= {case.shape.name, case.phase, *case.text(0).split()} and case.in_codes == ("cache=fp8" in words)
            for words in wanted
        )
    )
