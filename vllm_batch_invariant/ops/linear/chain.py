"""Chooses among schedules that agree on every bit by timing a model's products for few rows one after the other.

What is fastest alone need not be in a layer. A kernel that asks for its weight before it waits gains where the one
before leaves it room, behind a norm most of all, and each begins as the programs of the one before end.
"""

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch

from ..common.gpu import Gpu
from ..common.graph_timer import GraphTimer, copies_beyond_cache
from ..norm.cuda import rms_norm
from .autotune import CHAINED, M_BUCKETS, Autotuner, TunedSchedule
from .problem import GemmProblem

logger = logging.getLogger("vllm.batch_invariant")

Choice = Mapping[GemmProblem, Any]
"""A schedule for each product; None is Triton's."""
Tuned = Mapping[GemmProblem, Mapping[int, TunedSchedule]]
"""Schedules by M bucket."""

_TURNS = 2
"""How often each product is looked at: what is best for one depends on its neighbours."""
_GAIN = 0.997
"""Another schedule must take less than this share of the time of what was chosen: so much is noise."""
_REPLAYS = 7
_MOST_COPIES = 16
"""Of the weights: layers of less are in the cache in part, and take little time."""
_NORM_LENGTH = 4096


def settled(
    problems: Sequence[GemmProblem], tuned: Tuned, chain: "Chain"
) -> dict[GemmProblem, dict[int, TunedSchedule]]:
    """What serves better in a row than what was chosen alone, for few rows.

    Args:
        problems: the products of a layer, in order.
        tuned: their schedules, with those that are near.
        chain: times them.
    """
    found: dict[GemmProblem, dict[int, TunedSchedule]] = {}
    for bucket in takewhile(lambda end: end <= CHAINED, M_BUCKETS):
        known = {problem: tuned[problem][bucket] for problem in problems if bucket in tuned[problem]}
        if len(known) < 2 or not any(one.near for one in known.values()):
            continue
        choice = {problem: one.schedule for problem, one in known.items()}
        seen: list[float] = []
        for problem in [*known] * _TURNS:
            options = list(dict.fromkeys((choice[problem], known[problem].schedule, *known[problem].near)))
            if len(options) == 1:
                continue
            times = chain.times(bucket, [choice | {problem: one} for one in options])
            best = min(range(len(times)), key=times.__getitem__)
            if times[best] < _GAIN * times[0]:
                choice[problem] = options[best]
            seen += times
        logger.debug("Up to %d rows a layer takes %.1f us; as chosen alone %.1f.", bucket, min(seen), seen[0])
        for problem, one in known.items():
            if choice[problem] != one.schedule:
                found.setdefault(problem, {})[bucket] = one.served_with(choice[problem])
    return found


class Chain:
    """Operands of a layer's products, with a norm before each but one behind a gated layer's launch.

    Args:
        problems: the products, in order, of one GPU.
        matmul_of: cuBLASLt's for a problem, or None.
    """

    def __init__(self, problems: Sequence[GemmProblem], matmul_of: Callable[[GemmProblem], Any]) -> None:
        self._tuners = {problem: Autotuner(problem, matmul_of(problem), CHAINED) for problem in problems}
        self._size = sum(tuner.b.numel() * tuner.b.element_size() for tuner in self._tuners.values())
        device = problems[0].device
        copies = min(copies_beyond_cache(self._size, Gpu.of(device).l2_bytes), _MOST_COPIES)
        self._weights = {
            problem: [tuner.b, *(tuner.b.t().clone().t() for _ in range(copies - 1))]
            for problem, tuner in self._tuners.items()
        }
        self._copies, self._device, self._timer = copies, torch.device("cuda", device), GraphTimer(device)

    def times(self, bucket: int, choices: Sequence[Choice]) -> list[float]:
        """Median microseconds of what each of some choices names, for the rows of an M bucket: of the first one, one
        row and the most, added.
        """
        ms = (1, bucket) if bucket == M_BUCKETS[0] else (bucket,)
        of_ms = [self._times(m, choices) for m in ms]
        return [sum(times) for times in zip(*of_ms, strict=True)]

    def _times(self, m: int, choices: Sequence[Choice]) -> list[float]:
        # Nothing is allocated while a graph is captured.
        rows = {problem: tuner.a[:m] for problem, tuner in self._tuners.items()}
        outs = {problem: tuner.new_out(None, m) for problem, tuner in self._tuners.items()}
        finished = {
            problem: outs[problem] if tuner.finished is tuner.product else tuner.a.new_empty(m, problem.columns)
            for problem, tuner in self._tuners.items()
        }
        norm = self._norm(m)

        def layer(choice: Choice, copy: int) -> Callable[[], None]:
            calls: list[Callable[[], Any]] = []
            before = None
            for problem, schedule in choice.items():
                tuner = self._tuners[problem]
                if before is None or not (before.spec.epilogue.gated and before.columns == problem.k):
                    calls.append(norm)
                weight = self._weights[problem][copy]
                calls.append(tuner.whole(schedule, rows[problem], weight, outs[problem], finished[problem]))
                before = problem
            return partial(_in_turn, calls)

        ways = [[layer(choice, copy) for copy in range(self._copies)] for choice in choices]
        samples = self._timer.time(ways, 4 * len(self._tuners) + self._size / 4e6, _REPLAYS)
        return [statistics.median(one) for one in samples]

    def _norm(self, m: int) -> Callable[[], Any]:
        x = torch.zeros(m, _NORM_LENGTH, dtype=torch.bfloat16, device=self._device)
        return partial(rms_norm, x, x.new_ones(_NORM_LENGTH), 1e-6, None, None, out=torch.empty_like(x))


def _in_turn(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()
