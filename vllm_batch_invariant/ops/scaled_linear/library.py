"""cuBLASLt for products of e4m3 in blocks: a schedule that serves many rows where it has the bits of the kernels here.

Its algorithms are asked for, compared and timed as those of GEMMs of 16 bits are (:mod:`..linear.autotune`), each for a
range of M: that PyTorch's ``_scaled_mm``, which picks one for every M, had equal bits at some M would say nothing of
others. The library wants the scales of x with rows side by side, columns of which begin at multiples of 16 bytes, and
so M is a multiple of 4: codes that lie in memory for some rows more are multiplied with these, whose products nobody
reads. It wants rows of the weight's scales that do, so K is a multiple of 512. Of more rows than were compared, parts
are multiplied one after the other. Numbers of rows at which DeepGEMM is faster are its (:mod:`.deep_gemm`). Other
products, those with a bias and those of few rows are left to the tiles here.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from ..common.cancelling import cancelling
from ..common.gpu import Gpu
from ..common.graph_timer import GraphTimer, copies_beyond_cache
from ..linear import autotune, autotune_cache
from ..linear import cuda as gemms
from ..linear.autotune import M_BUCKETS, TunedSchedule, Tuner, m_bucket
from ..linear.problem import ALIGNMENT, LARGEST_SIDE, ScaledProblem
from ..quantise.cuda import ROWS, filled_up, side_by_side
from .deep_gemm import LEAST_M as LEAST_OF_DEEP_GEMM
from .deep_gemm import deep_gemm
from .reduction import E4M3, GROUP

if TYPE_CHECKING:
    from ..linear.cublaslt import Algorithm, Matmul

logger = logging.getLogger("vllm.batch_invariant")

LEAST_M = 256
"""Rows from which the library is asked: on an H100 the tiles here took 0.94 of CUTLASS's time with 256, and more than
all of it with 1024.
"""
STEP_K = 4 * GROUP
_STEP_N = 16
_LARGEST_M = 8192
_LONG = 2048
"""The most tokens of a graph but of small models."""
"""Rows of the operands that bits are compared of, and of what is multiplied at once."""
_TRIED_STEP = 64
_ASKED = 8
_TUNING_SECONDS = 5.0
Run = Callable[..., torch.Tensor]
"""Multiplies codes, scales, a weight and its scales into a result [M, N]."""


def problem_of(n: int, k: int, dtype: torch.dtype, device: torch.device, has_bias: bool) -> ScaledProblem | None:
    """The problem of which a product in blocks is a case; None if the library is not asked."""
    fits = k % STEP_K == 0 and n % _STEP_N == 0 and max(n, k) <= LARGEST_SIDE
    if not fits or has_bias or dtype.itemsize != 2 or not gemms._uses_cublaslt(device):
        return None
    return ScaledProblem(n, k, dtype, device.index or 0)


def _with_rows_behind(codes: torch.Tensor) -> torch.Tensor | None:
    """Packed codes [M, K] and what is theirs in memory behind them, up to a multiple of 4 rows; None if it is less."""
    m, k = codes.shape
    rows = filled_up(m)
    if codes.storage_offset() + rows * k > codes.untyped_storage().nbytes():
        return None
    return codes.as_strided((rows, k), (k, 1))


class ScaledTuner(Tuner):
    """Operands of a product, and what is run on them.

    Args:
        problem: which product.
        matmul: the library's.
        max_m: rows of x.
        own: the tiles here.
    """

    def __init__(self, problem: ScaledProblem, matmul: "Matmul | None", max_m: int, own: Run) -> None:
        self.problem, self.matmul, self.max_m, self._own = problem, matmul, max_m, own
        given = operand_sets(problem, max_m, torch.device("cuda", problem.device))
        self._sets = [(*one, own(*one, self._new_out(one[0]))) for one in given]

    def step_of_m(self) -> int:
        return ROWS

    def cases(self, m: int, finishes: bool) -> Iterator[tuple[Any, torch.Tensor]]:  # noqa: ARG002 - it has no epilogue
        for codes, scale, weight, weight_scale, expected in self._sets:
            first = self.max_m - m
            yield (codes[first:], scale[first:], weight, weight_scale), expected[first:]

    def name_of(self, schedule: Any) -> str:
        return "Gluon" if schedule is None else "cuBLASLt"

    def _new_out(self, codes: torch.Tensor) -> torch.Tensor:
        return torch.empty(len(codes), self.problem.n, dtype=self.problem.dtype, device=codes.device)

    def run_base(self, rows: Any) -> torch.Tensor:
        return self._own(*rows, self._new_out(rows[0]))

    def runner(self, schedule: "Algorithm") -> Callable[..., torch.Tensor]:
        def run(rows: Any) -> torch.Tensor:
            return run_library(self.matmul, schedule, *rows, self._new_out(rows[0]))

        return run

    def candidates(self, m: int, tuning: bool) -> list[Any]:
        if self.matmul is None or not tuning:
            return []
        (codes, scale, _, weight_scale), _ = next(self.cases(m, False))
        addresses = side_by_side(scale).data_ptr(), weight_scale.data_ptr()
        return self.matmul.algorithms(len(codes), _ASKED, scales=addresses)

    def times(self, m: int, schedules: Sequence[Any], timer: GraphTimer) -> dict[Any, float]:
        rows, _ = next(self.cases(m, False))
        ways = {one: partial(run_library, self.matmul, one) for one in schedules}
        runs = {one: way for one, way in ways.items() if self._runs(way, (*rows, self._new_out(rows[0])))}
        return self.times_of(m, {None: self._own, **runs}, timer)

    def times_of(self, m: int, ways: dict[Any, Run], timer: GraphTimer | None = None) -> dict[Any, float]:
        """Median microseconds of ways to multiply m rows, of scales side by side, with weights that no cache holds."""
        p, ((codes, scale, weight, weight_scale), _) = self.problem, next(self.cases(m, False))
        # allocated before a graph is captured
        scale, out = side_by_side(scale), torch.empty(filled_up(m), p.n, dtype=p.dtype, device=codes.device)
        copies = min(copies_beyond_cache(weight.numel(), Gpu.of(p.device).l2_bytes), 64)
        weights = [weight, *(weight.clone() for _ in range(copies - 1))]
        runs = {
            way: [partial(run, codes, scale, one, weight_scale, out) for one in weights] for way, run in ways.items()
        }
        expected = 2 + (p.n * p.k + m * (2 * p.n + p.k)) / 4e6 + 2 * m * p.n * p.k / 1.3e9
        return self.median_times(runs, expected, timer or GraphTimer(p.device))

    @staticmethod
    def _runs(run: Run, given: tuple[torch.Tensor, ...]) -> bool:
        from ..linear.cublaslt import Error

        try:
            run(*given)
        except Error:
            return False
        return True


def operand_sets(problem: ScaledProblem, m: int, device: torch.device) -> Iterator[tuple[torch.Tensor, ...]]:
    """Codes, scales, weights and their scales by which other sums show in bf16: operands that cancel, with one scale
    for all groups of a row, no power of two (another order of scales, of groups, of instructions); random ones with
    scales of their own (a scale of another group); and those of one sign (no promotion).
    """
    p, groups = problem, problem.k // GROUP
    draw = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device=device, dtype=torch.float32)

    def codes(x: torch.Tensor) -> torch.Tensor:
        return (x * 64).clamp(-448, 448).to(E4M3)

    def scales(rows: int, columns: int) -> torch.Tensor:
        return drawn(rows, columns).abs() * 0.02 + 1e-3

    blocks = -(-p.n // GROUP)
    x, weight = cancelling(m, p.n, p.k, torch.float32, device)
    of_x, of_weight = (scales(rows, 1).expand(-1, groups).contiguous() for rows in (m, blocks))
    yield codes(x), of_x, codes(weight), of_weight
    yield codes(drawn(m, p.k)), scales(m, groups), codes(drawn(p.n, p.k)), scales(blocks, groups)
    yield codes(drawn(m, p.k).abs()), scales(m, groups), codes(drawn(p.n, p.k).abs()), scales(blocks, groups)


def run_library(
    matmul: "Matmul | None",
    algorithm: "Algorithm",
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """A product by an algorithm of cuBLASLt.

    Args:
        matmul: of the problem.
        algorithm: which.
        codes: [M, K], packed, M a multiple of 4.
        scale: [M, K / 128], or of up to three rows less, behind which there is memory, if they lie side by side.
        weight: [N, K], packed.
        weight_scale: [ceil(N / 128), K / 128], packed.
        out: [M, N].

    Raises:
        Error: of :mod:`..linear.cublaslt`: the library refuses it for this M; nothing of the product was launched.
    """
    assert matmul is not None
    scale = side_by_side(scale)
    matmul.run(algorithm, codes, weight.t(), None, out, scales=(scale.data_ptr(), weight_scale.data_ptr()))
    return out


class Library:
    """What is tuned in this process, of every product."""

    def __init__(self) -> None:
        self._tuned: dict[ScaledProblem, dict[int, TunedSchedule]] = {}

    def product(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """A product in blocks without a bias, of packed operands; None where the tiles here are to serve.

        Args:
            out: what is written, of M rows filled up to a multiple of 4; None: new memory.
        """
        m = len(codes)
        if not self._tuned or m < LEAST_OF_DEEP_GEMM or codes.data_ptr() % ALIGNMENT:
            return None
        problem = ScaledProblem(len(weight), codes.shape[1], dtype, codes.get_device())
        tuned = self._tuned.get(problem)
        are_packed = all(one.is_contiguous() for one in (codes, weight, weight_scale))
        if tuned is None or not are_packed or weight.data_ptr() % ALIGNMENT:
            return None
        ways = _ways(problem, tuned, m)
        if ways is None:
            return None
        if any(way is not None for _, way in ways):
            codes = _with_rows_behind(codes)
            if codes is None:
                return None
        from ..linear import cublaslt

        out = torch.empty(filled_up(m), problem.n, dtype=dtype, device=codes.device) if out is None else out
        try:
            for part, algorithm in ways:
                if algorithm is None:
                    deep_gemm.run(codes[part], scale[part], weight, weight_scale, out[part])
                    continue
                filled = slice(part.start, part.start + filled_up(part.stop - part.start))
                given = codes[filled], scale[part], weight, weight_scale, out[filled]
                run_library(_matmul_of(problem), algorithm, *given)
        except cublaslt.Error:
            logger.debug("cuBLASLt refused %d rows of the product %s", m, problem)
            return None
        return out[:m]

    def found(self, problem: ScaledProblem) -> tuple[dict[int, TunedSchedule], tuple[int, ...]]:
        """What is tuned of a problem, by M bucket, and the numbers of rows that are DeepGEMM's."""
        tuned = self._tuned.get(problem)
        return ({}, ()) if tuned is None else (tuned, deep_gemm.rows(problem))

    def prepare(self, problem: ScaledProblem, max_m: int, sizes: Iterable[int], own: Run) -> None:
        """Choose and verify schedules for up to so many rows: at once from disk, or by measuring.

        Raises:
            Inconsistent: the tiles here give a row other bits at another M.
        """
        sizes = tuple(sizes)
        self._prepare_library(problem, max_m, sizes, own)

        def served(*given: torch.Tensor) -> torch.Tensor:
            *operands, out = given
            found = self.product(*operands, problem.dtype, out)
            return own(*given) if found is None else found

        def tuner(most: int) -> ScaledTuner:
            return ScaledTuner(problem, None, most, own)

        full = [_LARGEST_M] * (max_m >= _LARGEST_M)
        most = min(max_m, _LARGEST_M)  # of a part
        sizes = {one for one in sizes if one <= most and _is_tried(one)} - {*full}
        asked = (*full, *sorted(sizes, key=_rank))
        deep_gemm.prepare(problem, asked, served, tuner)

    def _prepare_library(self, problem: ScaledProblem, max_m: int, sizes: Iterable[int], own: Run) -> None:
        known = self._tuned.get(problem)
        if known is None:
            known = self._tuned[problem] = _stored(problem)
        most = min(max_m, _LARGEST_M)
        asked = [bucket for bucket in M_BUCKETS if LEAST_M <= bucket <= m_bucket(most)] if most >= LEAST_M else []
        missing = [bucket for bucket in asked if bucket not in known or not known[bucket].microseconds]
        if not missing:
            return
        started = time.monotonic()

        def kind(*arguments: Any) -> ScaledTuner:
            return ScaledTuner(*arguments, own)

        try:
            new = autotune.tune(problem, _matmul_of(problem), missing, sizes, _TUNING_SECONDS, kind)
        except torch.OutOfMemoryError:
            logger.warning("The product %s is left to the tiles here: no memory to verify cuBLASLt with.", problem)
            return
        known.update(new)
        stored = {str(bucket): tuned.to_json() for bucket, tuned in new.items()}
        autotune_cache.save(_environment(problem.device), {str(problem): stored})
        by = Counter("Gluon" if tuned.algorithm is None else "cuBLASLt" for tuned in new.values())
        logger.info(
            "Product %s: %s, for ranges of %d to %d rows, verified in %.1f s.",
            problem,
            " and ".join(f"{count} by {name}" for name, count in sorted(by.items())),
            LEAST_M,
            most,
            time.monotonic() - started,
        )


library = Library()


def _is_tried(size: int) -> bool:
    """Whether DeepGEMM compiles kernels for a size of graphs, which takes seconds: of all no start would wait for."""
    return size.bit_count() == 1 or size % _TRIED_STEP == 0


def _rank(size: int) -> tuple[bool, bool, int]:
    """By which sizes of graphs are tried: those of any model first, of them powers of two, and of each the largest."""
    return size > _LONG, size.bit_count() > 1, -size


def _ways(
    problem: ScaledProblem, tuned: dict[int, TunedSchedule], m: int
) -> "list[tuple[slice, Algorithm | None]] | None":
    """The parts of m rows, and who multiplies each: an algorithm of cuBLASLt, or DeepGEMM; None where neither can."""
    rest = m % _LARGEST_M
    if deep_gemm.serves(problem, _LARGEST_M) and (rest == 0 or rest >= LEAST_M):
        counts = [_LARGEST_M] * (m // _LARGEST_M) + [rest] * (rest > 0)
    else:
        most = filled_up(-(-m // -(-m // _LARGEST_M)))
        counts = [min(most, m - start) for start in range(0, m, most)]
    ways: list[tuple[slice, Algorithm | None]] = []
    for count, stop in zip(counts, accumulate(counts), strict=True):
        if deep_gemm.serves(problem, count):
            ways.append((slice(stop - count, stop), None))
            continue
        one = tuned.get(m_bucket(filled_up(count)))
        if count < LEAST_M or one is None or one.algorithm is None:
            return None
        ways.append((slice(stop - count, stop), one.algorithm))
    return ways


@lru_cache(maxsize=1 << 10)
def _matmul_of(problem: ScaledProblem) -> "Matmul":
    from ..linear import cublaslt

    return cublaslt.Matmul(problem)


@cache
def _environment(device: int) -> dict[str, str]:
    from ..linear import cublaslt

    return autotune_cache.environment(device, cublaslt.version(), "ops/scaled_linear")


def _stored(problem: ScaledProblem) -> dict[int, TunedSchedule]:
    try:
        return autotune.schedules_from_json(autotune_cache.load(_environment(problem.device)).get(str(problem), {}))
    except ValueError as error:
        autotune_cache.set_aside(_environment(problem.device), error)
        return {}
