"""DeepGEMM for products of e4m3 in blocks: a schedule that serves the numbers of rows at which it has been compiled,
compared and timed.

It promotes each 128 of K as the tiles here do, and chooses a kernel by M, N and K, which it compiles when it meets it.
So it serves the sizes of CUDA graphs, whose kernels are captured, and parts of as many rows as a long prompt is cut
into; a kernel for other numbers might be compiled while requests wait.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any, Protocol

import torch

from ..common.compile_errors import reason
from ..linear import autotune_cache
from ..linear.problem import ScaledProblem
from ..quantise.cuda import side_by_side
from .reduction import GROUP

logger = logging.getLogger("vllm.batch_invariant")

LEAST_M = 32
"""Rows from which it is asked: fewer are 16 to the tiles here, which are the bytes of the weight then."""
_SECONDS = 20.0
"""After which no more numbers of rows of a problem are tried in one start; the next goes on with them."""
_STEP_N = 64
Library = Callable[[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor], torch.Tensor], Any]
"""``(codes, scale), (weight, weight_scale), out``, with fp32 scales as they are."""
Run = Callable[..., torch.Tensor]


class Operands(Protocol):
    """What products are compared and timed on."""

    problem: ScaledProblem

    def cases(self, m: int, finishes: bool) -> Iterator[tuple[Any, torch.Tensor]]:
        """The last m rows of operands, and the product that is expected of them."""

    def times_of(self, m: int, ways: dict[Any, Run]) -> dict[Any, float]:
        """Median microseconds of ways to multiply so many."""


class SizedLibrary:
    """A library that serves some sizes of problems, and what has been found of them in this process.

    Attributes:
        code: folders whose sources decide what was compared and measured.
    """

    code: tuple[str, ...] = ("ops/scaled_linear", "ops/quantise")

    def __init__(self) -> None:
        self._run: Any = None
        self._version = ""
        self._serves: dict[Any, set[int]] = {}
        self._seen: dict[Any, set[int]] = {}

    def use(self, run: Any, version: str) -> None:
        """Have a library, with what tells its versions apart."""
        self._run, self._version = run, version

    def serve(self, problem: Any, size: int) -> None:
        """Have it compute this size."""
        self._serves.setdefault(problem, set()).add(size)

    def serves(self, problem: Any, size: int) -> bool:
        """Whether it is to compute this size."""
        return size in self._serves.get(problem, ())

    def choose(
        self,
        problem: Any,
        sizes: Iterable[int],
        measured: Callable[[int], dict[str, Any]],
        loads: Callable[[int], bool],
    ) -> None:
        """Choose the sizes that it serves, of those given: at once from disk, or by comparing and measuring.

        Args:
            problem: what is computed; its text is its name on disk.
            sizes: of it, the most useful first.
            measured: whether a size ``serves``, and what else is to be kept of it.
            loads: has the library load its kernels for a size that is known to serve.
        """
        if self._run is None:
            return
        seen = self._seen.setdefault(problem, set())
        asked = [size for size in dict.fromkeys(sizes) if size not in seen]
        if not asked:
            return
        seen.update(asked)
        stored = autotune_cache.load(self._environment(problem)).get(str(problem), {})
        started, found = time.monotonic(), {}
        for size in asked:
            try:
                known = stored.get(str(size))
                if isinstance(known, dict) and isinstance(known.get("serves"), bool):  # what else is there is measured
                    serves = known["serves"] and loads(size)
                elif time.monotonic() - started < _SECONDS:
                    found[str(size)] = measured(size)
                    serves = found[str(size)]["serves"]
                else:
                    continue
            except torch.OutOfMemoryError:
                continue
            except Exception as error:  # it compiles on this machine, by a compiler that may be absent
                logger.warning("DeepGEMM is left out: %s", reason(error))
                self._run = None
                self._serves.clear()
                return
            if serves:
                self.serve(problem, size)
        if found:
            autotune_cache.save(self._environment(problem), {str(problem): found})
        logger.info(
            "Product %s: DeepGEMM for %d of %d numbers of rows, after %.1f s.",
            problem,
            len(self._serves.get(problem, ())),
            len(asked),
            time.monotonic() - started,
        )

    def _environment(self, problem: Any) -> dict[str, str]:
        return autotune_cache.environment(problem.device, f"DeepGEMM of {self._version}", *self.code)


class DeepGemm(SizedLibrary):
    """That of products of matrices; a size is a number of rows."""

    _run: Library | None

    def rows(self, problem: ScaledProblem) -> tuple[int, ...]:
        """All numbers of rows that it is to multiply."""
        return tuple(sorted(self._serves.get(problem, ())))

    def run(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """A product into the first M rows of ``out``; scales [M, groups] have rows side by side, or are copied."""
        assert self._run is not None
        self._run((codes, side_by_side(scale)), (weight, weight_scale), out[: len(codes)])
        return out

    def prepare(
        self, problem: ScaledProblem, rows: Iterable[int], served: Run, operands: Callable[[int], Operands]
    ) -> None:
        """Choose the numbers of rows that it serves, of those given.

        Args:
            problem: which product.
            rows: numbers of them, the most useful first.
            served: what multiplies without it, as :meth:`run` does.
            operands: makes those of so many rows.
        """
        asked = [m for m in dict.fromkeys(rows) if m >= LEAST_M]
        if problem.dtype != torch.bfloat16 or problem.n % _STEP_N or not asked:
            return
        made = cache(operands)

        def measured(m: int) -> dict[str, Any]:
            return self._measured(made(max(asked)), m, served)

        self.choose(problem, asked, measured, partial(self._loads, problem))

    def _loads(self, problem: ScaledProblem, m: int) -> bool:
        """Have it load its kernel for so many rows, of zeros."""
        device = torch.device("cuda", problem.device)
        codes, weight = (torch.zeros(rows, problem.k, device=device, dtype=problem.operands) for rows in (m, problem.n))
        scales = [
            torch.zeros(rows, problem.k // GROUP, device=device, dtype=torch.float32)
            for rows in (m, -(-problem.n // GROUP))
        ]
        self.run(codes, scales[0], weight, scales[1], codes.new_empty(m, problem.n, dtype=problem.dtype))
        return True

    def _measured(self, given: Operands, m: int, served: Run) -> dict[str, Any]:
        """Whether it has the bits that are expected of m rows, and is faster than what serves now, in microseconds."""
        if not all(self._agrees(*case) for case in given.cases(m, False)):
            logger.warning("DeepGEMM is not used for %d rows of %s: it has other bits.", m, given.problem)
            return {"serves": False, "microseconds": {}}
        ways = {"without": served, "DeepGEMM": self.run}
        times = given.times_of(m, ways)
        return {"serves": times["DeepGEMM"] < times["without"], "microseconds": times}

    def _agrees(self, given: tuple[torch.Tensor, ...], expected: torch.Tensor) -> bool:
        codes, scale, weight, weight_scale = given
        out = torch.full_like(expected, float("nan"))
        self.run(codes, scale, weight, weight_scale, out)
        return bool((out.view(torch.int16) == expected.view(torch.int16)).all())


deep_gemm = DeepGemm()
