"""GEMMs on a GPU: by cuBLASLt where it is there and verified for the problem, else by Triton."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from ... import envs
from ...installing import how_to_install
from ..silu.cuda import silu_and_mul
from . import autotune, autotune_cache, triton_gemm
from .autotune import M_BUCKETS, TunedSchedule, m_bucket
from .leaves import in_leaves
from .problem import ALIGNMENT, LARGEST_SIDE, GemmProblem, leading_dim, problem_of
from .reduction import LinearReduction
from .triton_gemm import accumulate, accumulate_batch, bmm

try:
    from . import cublaslt
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] not in ("nvmath", "cuda"):
        raise
    cublaslt = None

__all__ = [
    "accumulate", "accumulate_batch", "bmm", "gated_mm", "known", "mm", "mm_in_leaves", "prepare", "prepare_gated",
    "prepare_in_leaves", "tuned_schedules",
]  # fmt: skip

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
    """What is known of calls with operands of the same dtypes, strides and weight."""

    problem: GemmProblem | None
    """None where Triton alone serves them."""
    tuned: dict[int, TunedSchedule]
    """By M bucket; grows while the plan is in use."""
    reduction: LinearReduction | None = None
    matmul: "cublaslt.Matmul | None" = None
    lda: int = 0
    ldb: int = 0


_BY_TRITON = _Plan(None, {})


class MatmulDispatcher:
    """Serves the GEMMs of this process in three steps: look up the plan of such a call, look up or make the schedule
    for its M, launch.
    """

    def __init__(self) -> None:
        self._plans: dict[tuple, _Plan] = {}
        self._tuned: dict[GemmProblem, dict[int, TunedSchedule]] = {}
        self._inconsistent: dict[GemmProblem, autotune.Inconsistent] = {}
        self._uses: Counter[tuple[GemmProblem, int]] = Counter()
        self._lock = threading.RLock()

    def mm(
        self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, b_is_constant: bool = False
    ) -> torch.Tensor:
        """[M, K] @ [K, N] + bias; see the operation's package for the contract."""
        return self._mm(a, b, bias, 1, b_is_constant)

    def mm_in_leaves(self, a: torch.Tensor, b: torch.Tensor, leaves: int, b_is_constant: bool = False) -> torch.Tensor:
        """[M, K] @ [K, N] with K in so many leaves, which are added as a tree."""
        return self._mm(a, b, None, leaves, b_is_constant)

    def gated_mm(self, a: torch.Tensor, b: torch.Tensor, b_is_constant: bool = False) -> torch.Tensor:
        """silu(a @ gate) * (a @ up) of b = [gate, up]."""
        return self._mm(a, b, None, 1, b_is_constant, True)

    def _mm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        leaves: int,
        b_is_constant: bool,
        gated: bool = False,
    ) -> torch.Tensor:
        m = a.shape[0]
        plan = self._look_up_plan(a, b, bias, m, leaves, gated)
        tuned = None
        if plan.problem is not None:
            tuned = plan.tuned.get(m_bucket(m)) or self._tune_if_often_used(plan, m)
        if tuned is not None and tuned.tile is not None:
            activates, reduction = plan.problem.gated, plan.reduction
            out = a.new_empty((m, plan.problem.n // 2 if activates else plan.problem.n))
            out = triton_gemm.gemm_sm90_swap_ab(a, b, bias, out, reduction, tuned.tile, b_is_constant, activates)
            return silu_and_mul(out) if gated and not activates else out
        found = _by_triton(a, b, bias, leaves) if tuned is None else self._launch(plan, tuned, a, b, bias, m)
        return silu_and_mul(found) if gated else found

    def _look_up_plan(
        self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, m: int, leaves: int, gated: bool
    ) -> _Plan:
        """The plan of calls that look like this one."""
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
            leaves,
            gated,
        )
        return self._plans.get(key) or self._make_plan(key, a, b, bias, leaves, gated)

    def _make_plan(
        self, key: tuple, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, leaves: int, gated: bool
    ) -> _Plan:
        if torch.cuda.is_current_stream_capturing():  # no time for disks and handles
            return _BY_TRITON
        problem = problem_of(a, b, bias, leaves, gated) if _uses_cublaslt(a.device) else None
        plan = _BY_TRITON
        if problem is not None:
            plan = _Plan(
                problem,
                self.tuned_schedules(problem),
                problem.reduction,
                _matmul_of(problem),
                leading_dim(a)[0],
                leading_dim(b)[0],
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
        leaves = plan.problem.leaves
        if tuned.algorithm is not None:

            def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
                plan.matmul.run(tuned.algorithm, a, b, bias, out, lda=plan.lda, ldb=plan.ldb)
                return out

            try:
                return in_leaves(run, leaves)(a, b, a.new_empty((m, plan.problem.n)))
            except cublaslt.Error:
                logger.debug("cuBLASLt refused %d rows of the GEMM %s", m, plan.problem)
        return _by_triton(a, b, bias, leaves)

    def prepare(self, weight: torch.Tensor, max_m: int, bias: bool = False, sizes: Iterable[int] = ()) -> None:
        """Choose and verify the schedules of ``linear`` with such a weight: at once from disk, or by measuring.

        Args:
            weight: [N, K], as it will be used; its values do not matter.
            max_m: the most rows of x to expect; for more, schedules are tuned when they are first needed.
            bias: whether a bias is added.
            sizes: values of M that will be common, such as those of CUDA graphs: verified one by one.
        """
        self._prepare(weight, max_m, bias, sizes, 1)

    def prepare_gated(self, weight: torch.Tensor, max_m: int, sizes: Iterable[int]) -> None:
        """The same of ``gated_linear``; weight: [gate, up]."""
        self._prepare(weight, max_m, False, sizes, 1, True)

    def prepare_in_leaves(self, weight: torch.Tensor, max_m: int, sizes: Iterable[int], leaves: int) -> None:
        """The same where K is added in leaves."""
        self._prepare(weight, max_m, False, sizes, leaves)

    def _prepare(
        self, weight: torch.Tensor, max_m: int, bias: bool, sizes: Iterable[int], leaves: int, gated: bool = False
    ) -> None:
        LinearReduction.of_device("cuda", *weight.shape, weight.dtype)
        sample = weight.new_empty(1, weight.shape[1])
        problem = problem_of(sample, weight.t(), weight.new_empty(weight.shape[0]) if bias else None, leaves, gated)
        if problem is None or max_m < 1:
            return
        with self._lock:
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


def _by_triton(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, leaves: int) -> torch.Tensor:
    return triton_gemm.mm(a, b, bias) if leaves == 1 else in_leaves(triton_gemm.mm_into, leaves)(a, b, None)


dispatcher = MatmulDispatcher()
mm, prepare, tuned_schedules = dispatcher.mm, dispatcher.prepare, dispatcher.tuned_schedules
mm_in_leaves, prepare_in_leaves = dispatcher.mm_in_leaves, dispatcher.prepare_in_leaves
gated_mm, prepare_gated = dispatcher.gated_mm, dispatcher.prepare_gated


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
