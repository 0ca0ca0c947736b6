"""Chooses the schedule of a GEMM for each range of M, and verifies its bits on this GPU.

The verification: within a range (an M bucket) one schedule serves every M, so that M decides only how many programs
run; it is run at both ends of the range, in the middle, and at every M that the caller names, and compared bit for bit
with :func:`.triton_gemm.gemm_ptr`, which adds K sequentially, on operands that show the order of a sum
(:mod:`..common.cancelling`). A schedule that differs is not used. The choice among those that agree is made by timing
them, because it cannot move a bit.
"""

import json
import logging
import statistics
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.errors import TritonError

from ...errors import NotCovered
from ..common.compile_errors import reason
from ..common.gpu import Gpu
from ..common.graph_timer import GraphTimer, copies_beyond_cache
from . import triton_gemm
from .k_slices import Gemm, in_slices
from .problem import GemmProblem
from .schedule import GATED_TILES, NARROW_TILES, PACKED_TILES, NarrowTile, sm90_tiles
from .spec import MatmulSpec

if TYPE_CHECKING:
    from .cublaslt import Algorithm, Matmul

logger = logging.getLogger("vllm.batch_invariant")

M_BUCKETS = (8, *(size for power in range(4, 31) for size in (2**power, 3 * 2 ** (power - 1))), 2**31)
"""Where ranges of M end: up to 8, then 9 to 16, to 24, 32, 48, 64, ..."""
_ASKED = 8
_ASKED_UNTUNED = 3
_ASKED_FOR_FEWER = 2
_MAX_M_OF_SMALL_TILES = 256
_REPLAYS = 5
CHAINED = 64
"""Up to so many rows several schedules are kept, among which :mod:`.chain` chooses."""
_NEAR = 1.15
"""Times the shortest time, of a schedule that is kept beside the fastest."""
_TRITON_GAIN = 0.97
"""Triton must be faster than this share of cuBLASLt's time to be chosen: its launch costs the host twice as much.
Gluon's kernels are launched by Triton.
"""

_Key = tuple[NarrowTile, torch.dtype, MatmulSpec]
_uncompiled: set[_Key] = set()
"""Narrow tiles that could not be run, with what else a kernel is compiled for: not tried again."""


@lru_cache(maxsize=1 << 16)
def m_bucket(m: int) -> int:
    """The end of the range that M is in; kept, because every call of a GEMM asks."""
    return M_BUCKETS[bisect_left(M_BUCKETS, m)]


class Inconsistent(RuntimeError):
    """Triton's kernels themselves give a row other bits at another M: nothing can be built on them."""


@dataclass(frozen=True)
class TunedSchedule:
    """How a GEMM is computed in one range of M."""

    algorithm: "Algorithm | None"
    """Of cuBLASLt; None is Triton's, or Gluon's where there is a ``tile``."""
    checked: tuple[int, ...]
    """The values of M at which bits were compared."""
    refused: tuple[str, ...]
    """Algorithms and tiles whose bits differed, or that did not run at every M."""
    microseconds: dict[str, float]
    """Median time at the largest M by library, where it was measured."""
    tile: NarrowTile | None = None
    """Of Gluon's narrow kernel."""
    near: "tuple[Algorithm | NarrowTile | None, ...]" = field(default=(), compare=False)
    """Others that agree and took little more time. Not stored: known only where they have just been timed."""

    @property
    def schedule(self) -> "Algorithm | NarrowTile | None":
        """What serves; None is Triton's."""
        return self.algorithm or self.tile

    def served_with(self, schedule: "Algorithm | NarrowTile | None") -> "TunedSchedule":
        """The same with another schedule, and none near it."""
        is_tile = isinstance(schedule, NarrowTile)
        algorithm, tile = (None, schedule) if is_tile else (schedule, None)
        return replace(self, algorithm=algorithm, tile=tile, near=())

    @property
    def served_by(self) -> str:
        """The library: cuBLASLt, Gluon or Triton."""
        return library_of(self.schedule)

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
    def from_json(cls, stored: Any) -> "TunedSchedule":
        """What :meth:`to_json` was made of.

        Raises:
            ValueError: it was made of something else, or cuBLASLt's algorithm splits K.
        """
        try:
            algorithm, tile, microseconds = stored["algorithm"], stored["tile"], stored["microseconds"]
            if algorithm is not None:
                from .cublaslt import stored_algorithm

                algorithm = stored_algorithm(bytes.fromhex(algorithm["opaque"]), algorithm["about"])
            tile = None if tile is None else NarrowTile(**tile)
            tuned = cls(algorithm, tuple(stored["checked"]), tuple(stored["refused"]), microseconds, tile)
            known = json.loads(json.dumps(tuned.to_json())) == stored and _sound(tuned)
        except (LookupError, TypeError, AttributeError, ImportError) as error:
            raise ValueError(f"a tuned schedule is of another shape: {error!r}") from error
        if not known:
            raise ValueError("a tuned schedule is of another shape")
        return tuned


def schedules_from_json(stored: Any) -> dict[int, TunedSchedule]:
    """The schedules of a GEMM by M bucket, from what was stored.

    Raises:
        ValueError: something else was stored.
    """
    if not isinstance(stored, dict) or not set(stored) <= {str(bucket) for bucket in M_BUCKETS}:
        raise ValueError("M buckets are others")
    return {int(bucket): TunedSchedule.from_json(tuned) for bucket, tuned in stored.items()}


def _sound(tuned: TunedSchedule) -> bool:
    """Whether every value is of a kind that can be served with."""
    return (
        (tuned.algorithm is None or isinstance(tuned.algorithm.about, str))
        and (tuned.tile is None or tuned.tile in NARROW_TILES + GATED_TILES + PACKED_TILES)
        and all(type(m) is int and m > 0 for m in tuned.checked)
        and all(isinstance(about, str) for about in tuned.refused)
        and all(type(time) in (int, float) for time in tuned.microseconds.values())
    )


def library_of(schedule: "Algorithm | NarrowTile | None") -> str:
    """Whose schedule it is: cuBLASLt's, Gluon's, or with None Triton's."""
    if schedule is None:
        return "Triton"
    return "Gluon" if isinstance(schedule, NarrowTile) else "cuBLASLt"


def cancelling_operands(problem: GemmProblem, m: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """a [M, K] and a weight [N, K] whose results show the order of every sum of a problem."""
    p, k_slices, exponents = problem, problem.spec.k_slices, problem.spec.b_format.exponents
    draw = partial(problem.spec.epilogue.cancelling, m, p.n, p.k // k_slices, p.dtype, device, exponents=exponents)
    of_slices = [draw(seed=seed) for seed in range(k_slices)]
    a, weight = (torch.cat(operands, 1) for operands in zip(*of_slices, strict=True))
    if k_slices > 1:  # where slices are rounding error, few of their sums are rounded: of half the columns they are not
        weight[1::2] = weight[1::2].roll(1, 1)
    return a, weight


class Tuner(ABC):
    """Chooses and verifies schedules of one problem; what is run, on which operands, is a subclass's.

    Attributes:
        problem: whose name is its ``str``.
        max_m: rows that there are operands of.
        most_near: schedules that are kept beside the one that is chosen, for few rows.
    """

    problem: Any
    max_m: int
    most_near = 0

    @abstractmethod
    def cases(self, m: int, finishes: bool) -> Iterator[tuple[Any, torch.Tensor]]:
        """The last m rows of operands, as what runs a schedule takes them, and what is expected of them."""

    @abstractmethod
    def run_base(self, rows: Any) -> torch.Tensor:
        """What a schedule gives that serves where nothing else does, and that others are compared with."""

    @abstractmethod
    def runner(self, schedule: Any) -> Callable[..., torch.Tensor]:
        """What runs a schedule on some rows."""

    @abstractmethod
    def candidates(self, m: int, tuning: bool) -> list[Any]:
        """Schedules worth trying for M rows, the most promising first."""

    @abstractmethod
    def times(self, m: int, schedules: Sequence[Any], timer: GraphTimer) -> dict[Any, float]:
        """Median microseconds of those schedules that run, and under None of the base."""

    def compile(self, buckets: Sequence[int]) -> None:  # noqa: B027 - of some
        """Run what is compiled, so that compiling takes no time from the timing."""

    def finishes(self, schedule: Any) -> bool:  # noqa: ARG002 - of some
        """Whether a schedule gives what is expected behind an epilogue; behind others that is run."""
        return False

    def name_of(self, schedule: Any) -> str:
        """The library whose schedule it is; None is the base."""
        return library_of(schedule)

    def cost(self, schedule: Any, microseconds: float) -> float:  # noqa: ARG002 - of some
        """What to choose a schedule by."""
        return microseconds

    def ms_to_verify(self, bucket: int, sizes: Iterable[int]) -> tuple[int, ...]:
        """The values of M to verify for a bucket, ``sizes`` of the caller among them."""
        index = M_BUCKETS.index(bucket)
        first = M_BUCKETS[index - 1] + 1 if index else 1
        found = {first, (first + bucket) // 2 | 1, bucket, *(size for size in sizes if first <= size <= bucket)}
        if step := self.step_of_m():
            found = {-(-m // step) * step for m in found}
        return tuple(sorted(m for m in found if m <= self.max_m))

    def step_of_m(self) -> int:
        """Of what M is a multiple where a schedule is run; 0: of nothing."""
        return 0

    def verify_bitwise(self, run: Callable[[Any], torch.Tensor], ms: Sequence[int], finishes: bool = False) -> bool:
        """Whether ``run`` gives the last rows of operands, so many of them, the bits that are expected of their
        product, or behind the epilogue if it ``finishes``.
        """
        differs: torch.Tensor | bool = False
        for m in ms:
            for rows, expected in self.cases(m, finishes):
                differs = differs | (run(rows).view(torch.int16) != expected.view(torch.int16)).any()
        return not bool(differs)

    def runs_and_verifies(self, schedule: Any, ms: Sequence[int]) -> bool:
        """Whether a schedule runs at these values of M with the bits that are expected."""
        from .cublaslt import Error

        try:
            return self.verify_bitwise(self.runner(schedule), ms, self.finishes(schedule))
        except Error:
            return False

    def tune(self, bucket: int, sizes: Iterable[int], timer: GraphTimer | None) -> TunedSchedule:
        """The schedule for a bucket: the fastest that verifies if there is a timer, else the first that verifies of
        cuBLASLt's heuristic.

        Raises:
            Inconsistent: the base gives a row other bits at another M.
        """
        ms = self.ms_to_verify(bucket, sizes)
        if not self.verify_bitwise(self.run_base, ms):
            raise Inconsistent(
                f"the GEMM {self.problem} has other bits at one of {ms} rows than at {self.max_m}, with a schedule "
                "that should not matter: this GPU or this Triton cannot be used"
            )
        m = min(bucket, self.max_m)
        schedules = [*self.candidates(m, tuning=timer is not None), None]
        times: dict[Any, float] = {}
        if timer and len(schedules) > 1:
            times = self.times(m, schedules[:-1], timer)
            schedules = sorted((one for one in schedules if one in times), key=lambda one: self.cost(one, times[one]))
        refused = []
        for schedule in schedules:
            if schedule is None or self.runs_and_verifies(schedule, ms):
                break
            refused.append(schedule)
            logger.warning(
                "%s's %s is not used for %s, up to %d rows.",
                library_of(schedule),
                schedule.about,
                self.problem,
                bucket,
            )
        known: dict[str, float] = {}
        for one in sorted(times.keys() - set(refused), key=times.get):
            known.setdefault(self.name_of(one).lower(), times[one])
        near = self._near(schedule, [one for one in schedules if one not in refused], times, ms)
        return replace(
            TunedSchedule(None, ms, tuple(one.about for one in refused), known).served_with(schedule), near=near
        )

    def _near(
        self, chosen: Any, schedules: Sequence[Any], times: dict[Any, float], ms: Sequence[int]
    ) -> tuple[Any, ...]:
        """Schedules of few rows that took little more time than the one that is chosen, and agree."""
        if not times or ms[-1] > CHAINED:
            return ()
        others = [one for one in schedules if one != chosen and times[one] <= _NEAR * times[chosen]]
        return tuple(one for one in others[: self.most_near] if one is None or self._agrees(one, ms))

    def _agrees(self, schedule: Any, ms: Sequence[int]) -> bool:
        """Whether a schedule that need not serve agrees, and is compiled for all of these values of M."""
        try:
            return self.runs_and_verifies(schedule, ms)
        except TritonError:
            return False

    def median_times(
        self, ways: dict[Any, list[Callable[[], Any]]], expected: float, timer: GraphTimer
    ) -> dict[Any, float]:
        """Median microseconds of ways to run the same, of which each should take about so many."""
        samples = timer.time(list(ways.values()), expected, _REPLAYS if expected < 1000 else 2)
        return dict(zip(ways, map(statistics.median, samples), strict=True))


@dataclass
class Autotuner(Tuner):
    """Operands of one GEMM, and what is run on them."""

    problem: GemmProblem
    matmul: "Matmul | None"
    """cuBLASLt's; None where it is absent."""
    max_m: int
    """Rows of a."""
    workspace: torch.Tensor | None = None
    """Memory for what slices of K give, if there are several."""
    most_near = 4

    def __post_init__(self) -> None:
        p, b_format = self.problem, self.problem.spec.b_format
        device = torch.device("cuda", p.device)
        a, weight = cancelling_operands(p, self.max_m, device)
        if p.spec.k_slices > 1:
            self.workspace = a.new_empty(p.spec.k_slices * self.max_m * p.n)
        self.a = a if p.a_k_major else a.t().contiguous().t()
        weight, *self.scales = b_format.stored(weight)
        self.b = weight.t() if p.b_k_major else weight.t().contiguous()
        self.bias = None
        if p.spec.epilogue.has_bias:  # as small as the rounding error that it is added to, so that its rounding shows
            noise = torch.randn(p.n, generator=torch.Generator(device).manual_seed(1), device=device)
            self.bias = (noise * 2**-24 * p.k).to(p.dtype)

        def by_pointers(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
            return triton_gemm.mm_ptr(a, b, self.bias, out)

        self.matrix = self.b
        if b_format.decode is not None:  # by the definition, which kernels that decode are compared with
            self.matrix = b_format.decode((self.b.t(), *self.scales), a.new_empty(p.n, p.k)).t()
        self.product = self._in_slices(by_pointers)(self.a, self.matrix, None)
        self.finished = self._finish(self.product)

    def _in_slices(self, gemm: Gemm) -> Gemm:
        return in_slices(gemm, self.problem.spec.k_slices, self.workspace)

    def _finish(self, product: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """What the epilogue makes of a product, in new memory or in ``out``; itself where it makes nothing."""
        behind = self.problem.spec.epilogue.behind(product.device.type, product.shape[1])
        return product if behind is None else behind(product) if out is None else behind(product, out)

    def step_of_m(self) -> int:
        return 0 if self.problem.a_k_major else 8  # M is the contiguous side: other values are not aligned

    def cases(self, m: int, finishes: bool) -> Iterator[tuple[Any, torch.Tensor]]:
        yield self.a[self.max_m - m :], (self.finished if finishes else self.product)[self.max_m - m :]

    def finishes(self, schedule: "Algorithm | NarrowTile | None") -> bool:
        """Whether a schedule gives what is expected behind the epilogue; behind others it is run."""
        return isinstance(schedule, NarrowTile)

    def new_out(self, schedule: "Algorithm | NarrowTile | None", m: int) -> torch.Tensor:
        """Memory for m rows of a schedule's result."""
        return self.a.new_empty(m, self.problem.columns if self.finishes(schedule) else self.problem.n)

    def run_base(self, a: torch.Tensor, b: torch.Tensor | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        def by_triton(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
            return triton_gemm.mm(a, b, self.bias, out)

        return self._in_slices(by_triton)(a, self._matrix(self.b if b is None else b), out)

    def _matrix(self, b: torch.Tensor) -> torch.Tensor:
        """What is multiplied with, by schedules that do not read a weight as it is stored."""
        return self.problem.spec.b_format.matrix(b, self.scales, self.a, self.matrix.t())

    def runner(
        self, schedule: "Algorithm | NarrowTile", workspace: torch.Tensor | None = None
    ) -> Callable[..., torch.Tensor]:
        """What runs a schedule on some rows of a."""
        reduction, spec = self.problem.reduction, self.problem.spec

        def by_cublaslt(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
            self.matmul.run(schedule, a, b, self.bias, out, workspace)
            return out

        def run(a: torch.Tensor, b: torch.Tensor = self.b, out: torch.Tensor | None = None) -> torch.Tensor:
            out = self.new_out(schedule, len(a)) if out is None else out
            if isinstance(schedule, NarrowTile):  # as a layer's matmul is launched
                return triton_gemm.gemm_sm90_swap_ab(a, b, self.bias, out, reduction, schedule, True, spec, self.scales)
            return self._in_slices(by_cublaslt)(a, self._matrix(b), out)

        return run

    def cost(self, schedule: "Algorithm | NarrowTile | None", microseconds: float) -> float:
        """What to choose a schedule by. What is run behind cuBLASLt's launch is Triton's."""
        is_cheap = library_of(schedule) == "cuBLASLt" and self.finished is self.product
        return microseconds * _TRITON_GAIN if is_cheap else microseconds

    def compile(self, buckets: Sequence[int]) -> None:
        """Run every narrow tile that buckets may be timed with, so that compiling takes no time from the timing."""
        rows = {tile: m for m in sorted({min(one, self.max_m) for one in buckets}) for tile in self._narrow_tiles(m)}
        for tile, m in rows.items():
            self._runs(tile, self.a[:m], self.new_out(tile, m))

    def _narrow_tiles(self, m: int) -> list[NarrowTile]:
        """Those to time at this M."""
        if self.matmul is None:
            return []
        tiles = sm90_tiles(self.problem, m, Gpu.of(self.problem.device))
        return [tile for tile in tiles if self._key(tile) not in _uncompiled]

    def candidates(self, m: int, tuning: bool) -> list["Algorithm | NarrowTile"]:
        """Schedules worth trying: the heuristic's for this M and, to time, its favourites for smaller ones and the
        narrow tiles.

        Smaller tiles than the heuristic would take keep more multiprocessors busy where N is small: N=1280 K=8192
        at M=128.
        """
        if self.matmul is None:
            return []
        if not tuning:
            return self.matmul.algorithms(m, _ASKED_UNTUNED)
        found = self.matmul.algorithms(m, _ASKED)
        if m <= _MAX_M_OF_SMALL_TILES:
            for fewer in (bucket for bucket in M_BUCKETS if m / 8 <= bucket < m):
                found += self.matmul.algorithms(fewer, _ASKED_FOR_FEWER)
        return list(dict.fromkeys([*found, *self._narrow_tiles(m)]))

    def _key(self, tile: NarrowTile) -> _Key:
        """What a kernel is compiled for."""
        return tile, self.problem.dtype, self.problem.spec

    def times(self, m: int, schedules: Sequence["Algorithm | NarrowTile"], timer: GraphTimer) -> dict[Any, float]:
        """Median microseconds of those schedules that run, and under None of Triton, with what is behind them."""
        a, p = self.a[:m], self.problem
        weights = [self.b, *(self.b.t().clone().t() for _ in range(self._copies() - 1))]
        # Nothing is allocated while a graph is captured: under vLLM's allocator settings for loading weights
        # that was an error.
        out = self.new_out(None, m)
        finished = out if self.finished is self.product else a.new_empty(m, p.columns)
        runs = [one for one in schedules if self._runs(one, a, finished if self.finishes(one) else out)]
        ways = {one: [self.whole(one, a, b, out, finished) for b in weights] for one in (None, *runs)}
        bytes_moved = a.element_size() * (p.n * p.k + m * (p.n + p.k))
        expected = 2 + bytes_moved / 4e6 + 2 * m * p.n * p.k / 7e8  # roughly, on a large GPU
        return self.median_times(ways, expected, timer)

    def whole(
        self,
        schedule: "Algorithm | NarrowTile | None",
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        finished: torch.Tensor,
    ) -> Callable[[], torch.Tensor]:
        """What runs a schedule, by way of ``out`` [M, N], with what is behind it, into ``finished``."""
        run = self.run_base if schedule is None else self.runner(schedule)
        if self.finishes(schedule):
            return lambda: run(a, b, finished)
        return lambda: self._finish(run(a, b, out), finished)

    def _runs(self, schedule: "Algorithm | NarrowTile", a: torch.Tensor, out: torch.Tensor) -> bool:
        """Whether a schedule can be run here at all."""
        from .cublaslt import Error

        p = self.problem
        try:
            self.runner(schedule)(a, self.b, out)
        except Error:
            return False
        except Exception as error:  # whatever a compiler makes of a kernel, or an API that moved
            if not isinstance(schedule, NarrowTile):
                raise
            _uncompiled.add(self._key(schedule))
            logger.warning("Gluon's %s is left out, first for %s: %s", schedule.about, p, reason(error))
            return False
        return True

    def _copies(self) -> int:
        size = self.b.numel() * self.b.element_size()
        return min(copies_beyond_cache(size, Gpu.of(self.problem.device).l2_bytes), 64)


def tune(
    problem: Any,
    matmul: "Matmul | None",
    buckets: Sequence[int],
    sizes: Iterable[int] = (),
    tuning_seconds: float = 0,
    kind: Callable[..., Tuner] | None = None,
) -> dict[int, TunedSchedule]:
    """Schedules by M bucket.

    Args:
        problem: the GEMM.
        matmul: cuBLASLt's, or None.
        buckets: of :data:`M_BUCKETS`.
        sizes: values of M that must be among those verified, such as the sizes of CUDA graphs.
        tuning_seconds: no more buckets are timed after that long. The largest comes first, because long prompts have
            it, and then the small ones.
        kind: of tuner, made of the problem, cuBLASLt's matmul and the largest M; None: a GEMM's.

    Raises:
        Inconsistent: see :meth:`Tuner.tune`.
        NotCovered: Triton's own kernels cannot be compiled for this GPU, or do not fit into it.
        torch.OutOfMemoryError: the operands do not fit beside what is on the GPU.
    """
    try:
        return _tune(problem, matmul, buckets, sizes, tuning_seconds, kind or Autotuner)
    except TritonError as error:
        raise NotCovered(
            f"the GEMM {problem} on {Gpu.of(problem.device).name}",
            f"Triton {triton.__version__} makes no kernel of it for this GPU: {reason(error)}",
            "use another GPU or another version of Triton",
        ) from error


def _tune(
    problem: Any,
    matmul: "Matmul | None",
    buckets: Sequence[int],
    sizes: Iterable[int],
    tuning_seconds: float,
    kind: Callable[..., Tuner],
) -> dict[int, TunedSchedule]:
    with torch.cuda.device(problem.device), torch.no_grad():
        autotuner = kind(problem, matmul, max(buckets))
        timer = GraphTimer(problem.device) if tuning_seconds > 0 else None
        if timer:
            autotuner.compile(buckets)
        started = time.monotonic()
        schedules = {}
        for bucket in (max(buckets), *sorted(buckets)[:-1]):
            tuning = timer if time.monotonic() - started < tuning_seconds else None
            schedules[bucket] = autotuner.tune(bucket, sizes, tuning)
        return schedules
