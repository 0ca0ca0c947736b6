"""cuBLASLt for products of e4m3 in blocks: a schedule that serves many rows where it has the bits of the kernels here.

Its algorithms are asked for, compared and timed as those of GEMMs of 16 bits are (:mod:`..linear.autotune`), each for a
range of M: that PyTorch's ``_scaled_mm``, which picks one for every M, had equal bits at some M would say nothing of
others. The library wants the scales of x with rows side by side, columns of which begin at multiples of 16 bytes, and
so M is a multiple of 4: codes that lie in memory for some rows more are multiplied with these, whose products nobody
reads. It wants rows of the weight's scales that do, so K is a multiple of 512. Of more rows than were compared, parts
are multiplied one after the other. Other products, those with a bias and those of few rows are left to the tiles here.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from ..common.cancelling import cancelling
from ..common.gpu import Gpu
from ..common.graph_timer import GraphTimer, copies_beyond_cache
from ..linear import autotune, autotune_cache
from ..linear import cuda as gemms
from ..linear.autotune import M_BUCKETS, TunedSchedule, Tuner, m_bucket
from ..linear.problem import ALIGNMENT, LARGEST_SIDE, ScaledProblem
from ..quantise.cuda import ROWS, filled_up
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
"""Rows of the operands that bits are compared of, and of what is multiplied at once."""
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


def side_by_side(scale: torch.Tensor) -> torch.Tensor:
    """Memory for scales [M, groups] with rows side by side: [groups, M], packed, M filled up to a multiple of 4."""
    return scale.new_empty(scale.shape[1], filled_up(len(scale)))


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
            return run_library(self.matmul, schedule, *rows, self._new_out(rows[0]), side_by_side(rows[1]))

        return run

    def candidates(self, m: int, tuning: bool) -> list[Any]:
        if self.matmul is None or not tuning:
            return []
        (codes, scale, _, weight_scale), _ = next(self.cases(m, False))
        addresses = side_by_side(scale).data_ptr(), weight_scale.data_ptr()
        return self.matmul.algorithms(len(codes), _ASKED, scales=addresses)

    def times(self, m: int, schedules: Sequence[Any], timer: GraphTimer) -> dict[Any, float]:
        (codes, scale, weight, weight_scale), _ = next(self.cases(m, False))
        p, out, of_x = self.problem, self._new_out(codes), side_by_side(scale)  # allocated before a graph is captured
        copies = min(copies_beyond_cache(weight.numel(), Gpu.of(p.device).l2_bytes), 64)
        weights = [weight, *(weight.clone() for _ in range(copies - 1))]

        def by(schedule: Any) -> Callable[[torch.Tensor], torch.Tensor]:
            if schedule is None:
                return lambda one: self._own(codes, scale, one, weight_scale, out)
            return lambda one: run_library(self.matmul, schedule, codes, scale, one, weight_scale, out, of_x)

        runs = [one for one in schedules if self._runs(by(one), weight)]
        ways = {one: [partial(by(one), other) for other in weights] for one in (None, *runs)}
        expected = 2 + (p.n * p.k + m * (2 * p.n + p.k)) / 4e6 + 2 * m * p.n * p.k / 1.3e9
        return self.median_times(ways, expected, timer)

    @staticmethod
    def _runs(run: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor) -> bool:
        from ..linear.cublaslt import Error

        try:
            run(weight)
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
    of_x: torch.Tensor,
) -> torch.Tensor:
    """A product by an algorithm of cuBLASLt.

    Args:
        matmul: of the problem.
        algorithm: which.
        codes: [M, K], packed, M a multiple of 4.
        scale: [M, K / 128], or of up to three rows less.
        weight: [N, K], packed.
        weight_scale: [ceil(N / 128), K / 128], packed.
        out: [M, N].
        of_x: of :func:`side_by_side`, written.

    Raises:
        Error: of :mod:`..linear.cublaslt`: the library refuses it for this M; nothing of the product was launched.
    """
    assert matmul is not None
    of_x[:, : len(scale)].copy_(scale.t())
    matmul.run(algorithm, codes, weight.t(), None, out, scales=(of_x.data_ptr(), weight_scale.data_ptr()))
    return out


class Library:
    """What is tuned in this process, of every product."""

    def __init__(self) -> None:
        self._tuned: dict[ScaledProblem, dict[int, TunedSchedule]] = {}

    def product(
        self, codes: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, dtype: Any
    ) -> torch.Tensor | None:
        """A product in blocks without a bias, of packed operands; None where the tiles here are to serve."""
        m = len(codes)
        if not self._tuned or m < LEAST_M or codes.data_ptr() % ALIGNMENT:
            return None
        problem = ScaledProblem(len(weight), codes.shape[1], dtype, codes.get_device())
        tuned = self._tuned.get(problem)
        are_packed = all(one.is_contiguous() for one in (codes, weight, weight_scale))
        if not tuned or not are_packed or weight.data_ptr() % ALIGNMENT:
            return None
        codes = _with_rows_behind(codes)
        if codes is None:
            return None
        most = filled_up(-(-m // -(-m // _LARGEST_M)))
        parts = [slice(start, min(start + most, len(codes))) for start in range(0, m, most)]
        chosen = [tuned.get(m_bucket(part.stop - part.start)) for part in parts]
        if not all(one is not None and one.algorithm is not None for one in chosen):
            return None
        from ..linear import cublaslt

        try:
            out = torch.empty(len(codes), problem.n, dtype=dtype, device=codes.device)
            for part, one in zip(parts, chosen, strict=True):
                given = codes[part], scale[part], weight, weight_scale, out[part]
                run_library(_matmul_of(problem), one.algorithm, *given, side_by_side(scale[part]))
            return out[:m]
        except cublaslt.Error:
            logger.debug("cuBLASLt refused %d rows of the product %s", m, problem)
            return None

    def prepare(self, problem: ScaledProblem, max_m: int, sizes: Iterable[int], own: Run) -> None:
        """Choose and verify schedules for up to so many rows: at once from disk, or by measuring.

        Raises:
            Inconsistent: the tiles here give a row other bits at another M.
        """
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
