"""Chooses how a kind of product is computed for each range of rows, and proves that its bits are those of the chain.

The proof: within a range one algorithm serves every M, so that M decides only how many programs run; it is run at both
ends of the range, in the middle, and at every M that the caller names, and compared bit for bit with the Triton chain
read through pointers, on operands that show the order of a sum (:mod:`.cancelling`). An algorithm that differs is not
used. The choice among those that agree is made by timing them, because it cannot move a bit.
"""

import json
import logging
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..common.compile_errors import reason
from ..common.graph_timer import GraphTimer, copies_beyond_cache
from . import triton_gemm
from .cancelling import cancelling
from .problem import Signature
from .schedule import NARROW_TILES, NarrowTile, gpu, narrow_tiles

if TYPE_CHECKING:
    from .cublaslt import Algorithm, Products

logger = logging.getLogger("vllm.batch_invariant")

LIMITS = (8, *(size for power in range(4, 31) for size in (2**power, 3 * 2 ** (power - 1))), 2**31)
"""Where ranges of rows end: up to 8, then 9 to 16, to 24, 32, 48, 64, ..."""
_ASKED = 8
_ASKED_UNTUNED = 3
_ASKED_FOR_FEWER = 2
_MOST_ROWS_OF_SMALL_TILES = 256
_OPAQUE = 64
"""Bytes of an algorithm of cuBLASLt."""
_REPLAYS = 5
_TRITON_GAIN = 0.97
"""Triton must be faster than this share of cuBLASLt's time to be chosen: its launch costs the host twice as much.
Gluon's kernels are launched by Triton.
"""

_uncompiled: set[tuple[NarrowTile, torch.dtype, bool]] = set()
"""Narrow tiles that could not be run, with the dtype and whether there was a bias: not tried again."""


def limit_of(rows: int) -> int:
    """The end of the range that a number of rows is in."""
    return LIMITS[bisect_left(LIMITS, rows)]


def _cost(schedule: "Algorithm | NarrowTile | None", microseconds: float) -> float:
    """What to choose a schedule by."""
    return microseconds * _TRITON_GAIN if library_of(schedule) == "cuBLASLt" else microseconds


class Inconsistent(RuntimeError):
    """The Triton chain itself has other bits at another number of rows: nothing can be built on it."""


@dataclass(frozen=True)
class Entry:
    """How products of one range of rows are computed."""

    algorithm: "Algorithm | None"
    """Of cuBLASLt; None is Triton's chain, or Gluon's where there is a ``tile``."""
    checked: tuple[int, ...]
    """The numbers of rows at which bits were compared."""
    refused: tuple[str, ...]
    """Algorithms and tiles whose bits differed from the chain's, or that did not run at every number of rows."""
    microseconds: dict[str, float]
    """Median time at the most rows by library, where it was measured."""
    tile: NarrowTile | None = None
    """Of Gluon's narrow kernel."""

    @property
    def served_by(self) -> str:
        """The library: cuBLASLt, Gluon or Triton."""
        return library_of(self.algorithm or self.tile)

    def to_json(self) -> dict[str, Any]:
        algorithm = self.algorithm
        return {
            "algorithm": algorithm and {"opaque": algorithm.opaque.hex(), "about": algorithm.about},
            "checked": self.checked,
            "refused": self.refused,
            "microseconds": self.microseconds,
            "tile": self.tile and asdict(self.tile),
        }

    @classmethod
    def from_json(cls, stored: Any) -> "Entry":
        """What :meth:`to_json` was made of.

        Raises:
            ValueError: it was made of something else.
        """
        try:
            algorithm, tile, microseconds = stored["algorithm"], stored["tile"], stored["microseconds"]
            if algorithm is not None:
                from .cublaslt import Algorithm

                algorithm = Algorithm(bytes.fromhex(algorithm["opaque"]), 1, algorithm["about"])
            tile = None if tile is None else NarrowTile(**tile)
            entry = cls(algorithm, tuple(stored["checked"]), tuple(stored["refused"]), microseconds, tile)
            known = json.loads(json.dumps(entry.to_json())) == stored and _sound(entry)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"an entry is of another shape: {error!r}") from error
        if not known:
            raise ValueError("an entry is of another shape")
        return entry


def entries_from_json(stored: Any) -> dict[int, Entry]:
    """The entries of a kind of product by the end of the range of rows, from what was stored.

    Raises:
        ValueError: something else was stored.
    """
    if not isinstance(stored, dict) or not set(stored) <= {str(limit) for limit in LIMITS}:
        raise ValueError("ranges of rows are others")
    return {int(limit): Entry.from_json(entry) for limit, entry in stored.items()}


def _sound(entry: Entry) -> bool:
    """Whether every value is of a kind that can be served with."""
    return (
        (entry.algorithm is None or (len(entry.algorithm.opaque) == _OPAQUE and isinstance(entry.algorithm.about, str)))
        and (entry.tile is None or entry.tile in NARROW_TILES)
        and all(type(count) is int and count > 0 for count in entry.checked)
        and all(isinstance(about, str) for about in entry.refused)
        and all(type(time) in (int, float) for time in entry.microseconds.values())
    )


def library_of(schedule: "Algorithm | NarrowTile | None") -> str:
    """Whose schedule it is: cuBLASLt's, Gluon's, or with None Triton's."""
    if schedule is None:
        return "Triton"
    return "Gluon" if isinstance(schedule, NarrowTile) else "cuBLASLt"


@dataclass
class Certifier:
    """Operands of one kind of product, and what is run on them."""

    signature: Signature
    products: "Products | None"
    """None where cuBLASLt is absent."""
    most: int
    """Rows of a."""

    def __post_init__(self) -> None:
        s = self.signature
        device = torch.device("cuda", s.device)
        a, weight = cancelling(self.most, s.columns, s.depth, s.dtype, device)
        self.a = a if s.a_by_rows else a.t().contiguous().t()
        self.b = weight.t() if s.b_by_columns else weight.t().contiguous()
        # As small as the rounding error that it is added to, so that its own rounding shows.
        noise = torch.randn(s.columns, generator=torch.Generator(device).manual_seed(1), device=device)
        self.bias = (noise * 2**-24 * s.depth).to(s.dtype) if s.bias else None
        self.chain = triton_gemm.by_pointers(self.a[None], self.b[None], self.bias, s.dtype)[0]

    def counts(self, limit: int, sizes: Iterable[int]) -> tuple[int, ...]:
        """The numbers of rows to check for the range that ends at ``limit``, ``sizes`` of the caller among them."""
        index = LIMITS.index(limit)
        first = LIMITS[index - 1] + 1 if index else 1
        found = {first, (first + limit) // 2 | 1, limit, *(size for size in sizes if first <= size <= limit)}
        if not self.signature.a_by_rows:  # rows side by side: other counts and places are not aligned
            found = {-(-count // 8) * 8 for count in found}
        return tuple(sorted(count for count in found if count <= self.most))

    def agrees(self, run: Callable[[torch.Tensor], torch.Tensor], counts: Sequence[int]) -> bool:
        """Whether ``run`` gives the last rows of a, in these numbers, the bits that the chain gives them."""
        differs = torch.zeros((), dtype=torch.bool, device=self.a.device)
        for count in counts:
            out, expected = run(self.a[self.most - count :]), self.chain[self.most - count :]
            differs |= (out.view(torch.int16) != expected.view(torch.int16)).any()
        return not differs.item()

    def by_triton(self, a: torch.Tensor) -> torch.Tensor:
        return triton_gemm.mm(a, self.b, self.bias)

    def by(
        self, schedule: "Algorithm | NarrowTile", workspace: torch.Tensor | None = None
    ) -> Callable[..., torch.Tensor]:
        def run(a: torch.Tensor, b: torch.Tensor = self.b, out: torch.Tensor | None = None) -> torch.Tensor:
            if isinstance(schedule, NarrowTile):
                return triton_gemm.by_narrow_tile(a, b, self.bias, schedule, out)
            out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device) if out is None else out
            self.products.run(schedule, a, b, self.bias, out, workspace)
            return out

        return run

    def passes(self, schedule: "Algorithm | NarrowTile", counts: Sequence[int]) -> bool:
        """Whether a schedule runs at these numbers of rows with the bits of the chain."""
        from .cublaslt import Error

        try:
            return self.agrees(self.by(schedule), counts)
        except Error:
            return False

    def certify(self, limit: int, sizes: Iterable[int], timer: GraphTimer | None) -> Entry:
        """The entry for the range that ends at ``limit``: the fastest schedule that passes if there is a timer, else
        the first that passes of cuBLASLt's heuristic.

        Raises:
            Inconsistent: the Triton chain gives other bits at another number of rows.
        """
        counts = self.counts(limit, sizes)
        if not self.agrees(self.by_triton, counts):
            raise Inconsistent(
                f"the product {self.signature} has other bits at one of {counts} rows than at {self.most}, with a "
                "schedule that should not matter: this GPU or this Triton cannot be used"
            )
        rows = min(limit, self.most)
        schedules = [*self._candidates(rows, tuning=timer is not None), None]
        times: dict[Any, float] = {}
        if timer and len(schedules) > 1:
            times = self._times(rows, schedules[:-1], timer)
            schedules = sorted((one for one in schedules if one in times), key=lambda one: _cost(one, times[one]))
        refused = []
        for schedule in schedules:
            if schedule is None or self.passes(schedule, counts):
                break
            refused.append(schedule)
            logger.warning(
                "%s's %s is not used for %s, up to %d rows.",
                library_of(schedule),
                schedule.about,
                self.signature,
                limit,
            )
        known: dict[str, float] = {}
        for one in sorted(times.keys() - set(refused), key=times.get):
            known.setdefault(library_of(one).lower(), times[one])
        is_tile = isinstance(schedule, NarrowTile)
        return Entry(
            None if is_tile else schedule,
            counts,
            tuple(one.about for one in refused),
            known,
            schedule if is_tile else None,
        )

    def _candidates(self, rows: int, tuning: bool) -> list["Algorithm | NarrowTile"]:
        """Schedules worth trying: the heuristic's for this number of rows and, to time, its favourites for fewer and
        the narrow tiles.

        Smaller tiles than the heuristic would take keep more multiprocessors busy where N is small: (1280, 8192) at
        128 rows.
        """
        if self.products is None:
            return []
        if not tuning:
            return self.products.algorithms(rows, _ASKED_UNTUNED)
        s, found = self.signature, self.products.algorithms(rows, _ASKED)
        if rows <= _MOST_ROWS_OF_SMALL_TILES:
            for fewer in (limit for limit in LIMITS if rows / 8 <= limit < rows):
                found += self.products.algorithms(fewer, _ASKED_FOR_FEWER)
        if s.a_by_rows and s.b_by_columns:
            tiles = narrow_tiles(rows, s.columns, gpu(s.device))
            found += [tile for tile in tiles if (tile, s.dtype, s.bias) not in _uncompiled]
        return list(dict.fromkeys(found))

    def _times(self, rows: int, schedules: Sequence["Algorithm | NarrowTile"], timer: GraphTimer) -> dict[Any, float]:
        """Median microseconds of those schedules that run, and under None of Triton."""
        a, s = self.a[:rows], self.signature
        weights = [self.b, *(self.b.t().clone().t() for _ in range(self._copies() - 1))]
        # Nothing is allocated while a graph is captured: under vLLM's allocator settings for loading weights
        # that was an error.
        out = torch.empty(rows, s.columns, dtype=a.dtype, device=a.device)
        ways = {None: [lambda b=b: triton_gemm.mm(a, b, self.bias, out) for b in weights]}
        for schedule in schedules:
            if self._runs(schedule, a, out):
                run = self.by(schedule)
                ways[schedule] = [lambda b=b, run=run: run(a, b, out) for b in weights]
        bytes_moved = a.element_size() * (s.columns * s.depth + rows * (s.columns + s.depth))
        expected = 2 + bytes_moved / 4e6 + 2 * rows * s.columns * s.depth / 7e8  # roughly, on a large GPU
        replays = _REPLAYS if expected < 1000 else 2
        samples = timer.time(list(ways.values()), expected, replays)
        return dict(zip(ways, map(statistics.median, samples), strict=True))

    def _runs(self, schedule: "Algorithm | NarrowTile", a: torch.Tensor, out: torch.Tensor) -> bool:
        """Whether a schedule can be run here at all."""
        from .cublaslt import Error

        s = self.signature
        try:
            self.by(schedule)(a, self.b, out)
        except Error:
            return False
        except Exception as error:  # whatever a compiler makes of a kernel, or an API that moved
            if not isinstance(schedule, NarrowTile):
                raise
            _uncompiled.add((schedule, s.dtype, s.bias))
            logger.warning("Gluon's %s is left out, first for %s: %s", schedule.about, s, reason(error))
            return False
        return True

    def _copies(self) -> int:
        size = self.b.numel() * self.b.element_size()
        return min(copies_beyond_cache(size, gpu(self.signature.device).l2_bytes), 64)


def certify(
    signature: Signature,
    products: "Products | None",
    limits: Sequence[int],
    sizes: Iterable[int] = (),
    tuning_seconds: float = 0,
) -> dict[int, Entry]:
    """Entries for the ranges that end at ``limits``.

    Args:
        signature: the kind of product.
        products: cuBLASLt's, or None.
        limits: of :data:`LIMITS`.
        sizes: numbers of rows that must be among those checked, such as the sizes of CUDA graphs.
        tuning_seconds: no more ranges are timed after that long; the small ones come first.

    Raises:
        Inconsistent: see :meth:`Certifier.certify`.
        torch.OutOfMemoryError: the operands do not fit beside what is on the GPU.
    """
    with torch.cuda.device(signature.device), torch.no_grad():
        started = time.monotonic()
        certifier = Certifier(signature, products, max(limits))
        timer = GraphTimer(signature.device) if tuning_seconds > 0 else None
        entries = {}
        for limit in sorted(limits):
            tuning = timer if time.monotonic() - started < tuning_seconds else None
            entries[limit] = certifier.certify(limit, sizes, tuning)
        return entries
