"""GEMMs on a GPU: by cuBLASLt where it is there and verified for the problem, else by Triton."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch

from ... import envs
from ...installing import how_to_install
from ..common.gpu import Gpu
from ..formats import Format
from . import autotune, autotune_cache, chain, triton_gemm
from .autotune import M_BUCKETS, TunedSchedule, m_bucket
from .k_slices import by_mm, in_slices
from .problem import ALIGNMENT, LARGEST_SIDE, GemmProblem, leading_dim, problem_of
from .reduction import LinearReduction
from .schedule import reads
from .spec import BIASED, PRODUCT, MatmulSpec, spec_of
from .triton_gemm import accumulate, accumulate_batch, bmm

try:
    from . import cublaslt
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] not in ("nvmath", "cuda"):
        raise
    cublaslt = None

__all__ = ["accumulate", "accumulate_batch", "bmm", "known", "matmul", "mm", "prepare", "settle", "tuned_schedules"]

logger = logging.getLogger("vllm.batch_invariant")

_USES_BEFORE_TUNING = 3
"""How often a GEMM runs in Triton before it is tuned: K of a gradient may follow the batch, and a problem that never
returns would be tuned for nothing.
"""
_TUNING_SECONDS = 5.0
"""How long the schedules of one problem are timed when a model is loaded; after that the heuristic's first choice
serves. A problem takes about 0.6 s on an H200.
"""
_MOST_PLANS = 4096


@dataclass(frozen=True)
class _Plan:
    """What is known of calls that compute the same of operands with the same dtypes and strides."""

    problem: GemmProblem | None
    """None where Triton alone serves them."""
    tuned: dict[int, TunedSchedule]
    """By M bucket; grows while the plan is in use."""
    reduction: LinearReduction | None = None
    columns: int = 0
    """Of what Gluon's kernel writes."""
    matmul: "cublaslt.Matmul | None" = None
    lda: int = 0
    ldb: int = 0
    behind: Callable[..., torch.Tensor] | None = None
    """What is run on a product of cuBLASLt's or Triton's."""
    behind_tile: Callable[..., torch.Tensor] | None = None
    """The same of Gluon's."""


_BY_TRITON = _Plan(None, {})
_by_triton = by_mm(lambda *operands: triton_gemm.mm(*operands))


class MatmulDispatcher:
    """Serves the GEMMs of this process in three steps: look up the plan of such a call, look up or make the schedule
    for its M, launch.
    """

    def __init__(self) -> None:
        self._plans: dict[tuple, _Plan] = {}
        self._tuned: dict[GemmProblem, dict[int, TunedSchedule]] = {}
        self._inconsistent: dict[GemmProblem, autotune.Inconsistent] = {}
        self._uses: Counter[tuple[GemmProblem, int]] = Counter()
        self._prepared: Counter[GemmProblem] = Counter()
        self._lock = threading.RLock()

    def matmul(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        spec: MatmulSpec = PRODUCT,
        bias: torch.Tensor | None = None,
        b_is_constant: bool = False,
        scales: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """What ``spec`` says of a: [M, K] and b: [K, N], as :func:`..linear.matmul`, whose weight is turned here."""
        m = a.shape[0]
        addresses = a.data_ptr() | b.data_ptr()
        if bias is not None:
            addresses |= bias.data_ptr()
        key = (
            a.stride()[1] if m == 1 else a.stride(),
            0 < m <= LARGEST_SIDE,
            b.shape,
            b.stride(),
            bias is not None and bias.stride(),
            a.dtype,
            addresses % ALIGNMENT,
            a.get_device(),
            spec.name,
        )
        plan = self._plans.get(key) or self._make_plan(key, a, b, spec, bias)
        tuned = None
        if plan.problem is not None:
            tuned = plan.tuned.get(m_bucket(m)) or self._tune_if_often_used(plan, m)
        if tuned is None:
            return _by_triton(a, b, spec, bias, False, scales)
        if tuned.tile is not None:
            out, computed = a.new_empty((m, plan.columns)), plan.problem.spec
            product = triton_gemm.gemm_sm90_swap_ab(
                a, b, bias, out, plan.reduction, tuned.tile, b_is_constant, computed, scales
            )
            return product if plan.behind_tile is None else plan.behind_tile(product)
        product = self._launch(plan, tuned, a, spec.b_format.matrix(b, scales, a), bias, m)
        return product if plan.behind is None else plan.behind(product)

    def _make_plan(
        self, key: tuple, a: torch.Tensor, b: torch.Tensor, spec: MatmulSpec, bias: torch.Tensor | None
    ) -> _Plan:
        """The plan of calls that look like this one."""
        if torch.cuda.is_current_stream_capturing():  # no time for disks and handles
            return _BY_TRITON
        problem = problem_of(a, b, bias, spec) if _uses_cublaslt(a.device) else None
        plan = _BY_TRITON
        if problem is not None:
            behind = spec.epilogue.behind(a.device.type, problem.n)
            plan = _Plan(
                problem,
                self.tuned_schedules(problem),
                problem.reduction,
                problem.columns,
                _matmul_of(problem),
                leading_dim(a)[0],
                leading_dim(b)[0] if spec.b_format.decode is None else problem.k,
                behind,
                behind if problem.spec != spec else None,
            )
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
            self._uses.clear()
        self._plans[key] = plan
        return plan

    def _tune_if_often_used(self, plan: _Plan, m: int) -> TunedSchedule | None:
        """The schedule for M, tuned at the last of so many uses; None before."""
        if plan.problem in self._inconsistent:
            raise self._inconsistent[plan.problem]
        if torch.cuda.is_current_stream_capturing():
            return None
        problem, bucket = plan.problem, m_bucket(m)
        with self._lock:
            self._uses[problem, bucket] += 1
            if self._uses[problem, bucket] == _USES_BEFORE_TUNING:
                self._tune(problem, [bucket])
            return plan.tuned.get(bucket)

    def _launch(
        self, plan: _Plan, tuned: TunedSchedule, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, m: int
    ) -> torch.Tensor:
        """Run cuBLASLt's algorithm; Triton where the schedule has none, or where cuBLASLt refuses this M."""
        k_slices = plan.problem.spec.k_slices
        if tuned.algorithm is not None:

            def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
                plan.matmul.run(tuned.algorithm, a, b, bias, out, lda=plan.lda, ldb=plan.ldb)
                return out

            try:
                return in_slices(run, k_slices)(a, b, a.new_empty((m, plan.problem.n)))
            except cublaslt.Error:
                logger.debug("cuBLASLt refused %d rows of the GEMM %s", m, plan.problem)
        return _by_triton(a, b, spec_of(bias is not None, k_slices), bias)

    def prepare(
        self,
        weight: torch.Tensor,
        max_m: int,
        spec: MatmulSpec = PRODUCT,
        sizes: Iterable[int] = (),
        dtype: torch.dtype | None = None,
        repeats: bool = False,
    ) -> None:
        """Choose and verify the schedules of a matmul with such a weight: at once from disk, or by measuring; arguments
        as of :func:`..linear.prepare`. For more rows schedules are tuned when they are first needed, and each of
        ``sizes`` is verified.
        """
        sample = weight.new_empty(1, weight.shape[1] * spec.b_format.packing, dtype=dtype)
        bias = sample.new_empty(len(weight)) if spec.epilogue.has_bias else None
        LinearReduction.of_device("cuda", len(weight), sample.shape[1], sample.dtype)
        problem = problem_of(sample, weight.t(), bias, spec)
        if problem is None or max_m < 1:
            return
        with self._lock:
            self._prepared[problem] += repeats
            found, matmul, sizes = self.tuned_schedules(problem), _matmul_of(problem), sorted(set(sizes))
            missing = []
            for bucket in (bucket for bucket in M_BUCKETS if bucket <= m_bucket(min(max_m, LARGEST_SIDE))):
                tuned = found.get(bucket)
                in_bucket = {size for size in sizes if m_bucket(size) == bucket and size <= max_m}
                timed = tuned is not None and (tuned.microseconds or matmul is None or not _TUNING_SECONDS)
                if not timed or not in_bucket <= set(tuned.checked):
                    missing.append(bucket)
            if not missing:
                return
            started = time.monotonic()
            self._tune(problem, missing, sizes, _TUNING_SECONDS)
        served = Counter(found[bucket].served_by for bucket in missing if bucket in found)
        logger.info(
            "GEMM %s: %s, for ranges of up to %d rows, verified in %.1f s.",
            problem,
            " and ".join(f"{count} by {name}" for name, count in sorted(served.items())) or "Triton",
            max_m,
            time.monotonic() - started,
        )

    def settle(self) -> None:
        """Choose again, in a row, among the schedules of what has been prepared more than once, as layers are."""
        with self._lock:
            problems = [problem for problem, count in self._prepared.items() if count > 1]
            self._prepared.clear()
            tuned = {problem: self.tuned_schedules(problem) for problem in problems}
            if len(problems) < 2 or not any(one.near for found in tuned.values() for one in found.values()):
                return
            started, device = time.monotonic(), problems[0].device
            try:
                with torch.cuda.device(device), torch.no_grad():
                    better = chain.settled(problems, tuned, chain.Chain(problems, _matmul_of))
            except Exception as error:  # of memory, of a library or a compiler: what was chosen alone serves as well
                logger.warning("GEMMs are left as they were chosen alone: %s", error)
                return
            stored = {}
            for problem, found in tuned.items():
                found.update(better.get(problem, {}))
                found.update({bucket: replace(one, near=()) for bucket, one in found.items() if one.near})
                stored[str(problem)] = {str(bucket): one.to_json() for bucket, one in better.get(problem, {}).items()}
            autotune_cache.save(_environment(device), stored)
        logger.info(
            "GEMMs of %d shapes timed in a row: %d ranges of rows have another schedule, in %.1f s.",
            len(problems),
            sum(map(len, better.values())),
            time.monotonic() - started,
        )

    def tuned_schedules(self, problem: GemmProblem) -> dict[int, TunedSchedule]:
        """What is tuned for a problem, by M bucket; read from disk at the first call."""
        found = self._tuned.get(problem)
        if found is None:
            stored = _stored(problem.device).get(str(problem), {})
            found = self._tuned.setdefault(problem, _schedules_of(problem.device, stored))
        return found

    def _tune(
        self, problem: GemmProblem, buckets: list[int], sizes: Iterable[int] = (), tuning_seconds: float = 0.0
    ) -> None:
        try:
            new = autotune.tune(problem, _matmul_of(problem), buckets, sizes, tuning_seconds)
        except autotune.Inconsistent as error:
            self._inconsistent[problem] = error
            raise
        except torch.OutOfMemoryError:
            logger.warning("The GEMM %s is left to Triton: no memory to verify cuBLASLt with.", problem)
            return
        self.tuned_schedules(problem).update(new)
        stored = {str(bucket): tuned.to_json() for bucket, tuned in new.items()}
        autotune_cache.save(_environment(problem.device), {str(problem): stored})


dispatcher = MatmulDispatcher()
matmul, prepare, settle, tuned_schedules = (
    dispatcher.matmul,
    dispatcher.prepare,
    dispatcher.settle,
    dispatcher.tuned_schedules,
)


def mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[M, K] @ [K, N] + bias; see the operation's package for the contract."""
    return matmul(a, b, PRODUCT if bias is None else BIASED, bias)


def reads_as_stored(b_format: Format, k: int, dtype: torch.dtype, device: torch.device) -> bool:
    """As :func:`..linear.reads_as_stored`, on a GPU."""
    is_served = dtype.itemsize == 2 and _uses_cublaslt(device)
    return is_served and reads(b_format, k, Gpu.of(device.index or 0))


def known(device: int) -> tuple[dict[str, str], dict[str, dict[int, TunedSchedule]]]:
    """What a certificate on this machine is true for, and every schedule there is by the name of the problem."""
    environment = _environment(device)
    return environment, {name: _schedules_of(device, found) for name, found in autotune_cache.load(environment).items()}


def _schedules_of(device: int, stored: dict[str, Any]) -> dict[int, TunedSchedule]:
    """Schedules as they were stored; none where they cannot be read, and then the file is set aside."""
    try:
        return autotune.schedules_from_json(stored)
    except ValueError as error:
        autotune_cache.set_aside(_environment(device), error)
        return {}


@cache
def _environment(device: int) -> dict[str, str]:
    return autotune_cache.environment(
        device, cublaslt.version() if _uses_cublaslt(torch.device("cuda", device)) else "not used"
    )


@cache
def _uses_cublaslt(device: torch.device) -> bool:
    """Whether cuBLASLt serves GEMMs."""
    if envs.LINEAR.read() == "triton":
        return False
    if cublaslt is None:
        logger.warning(
            "GEMMs are Triton's, with the same bits, because nvmath-python is not installed; with it cuBLASLt saves, "
            "on an H200, 7 to 8%% of their time from 128 rows on: %s.",
            how_to_install("cuda"),
        )
        return False
    try:
        cublaslt.handle(device.index)
    except Exception as error:  # loading a library may raise anything
        logger.warning("GEMMs are Triton's, because cuBLASLt cannot be used: %s", error)
        return False
    return True


@lru_cache(maxsize=_MOST_PLANS)
def _matmul_of(problem: GemmProblem) -> "cublaslt.Matmul | None":
    return cublaslt.Matmul(problem) if _uses_cublaslt(torch.device("cuda", problem.device)) else None


@cache
def _stored(device: int) -> dict[str, dict[str, Any]]:
    return autotune_cache.load(_environment(device))
