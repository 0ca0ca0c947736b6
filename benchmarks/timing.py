"""Times calls in CUDA graphs where they can be captured, and by events around single calls where they cannot. On a CPU,
which has no events, by its clock.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from vllm_batch_invariant.ops.common.graph_timer import Calls, GraphTimer


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call, several times."""

    samples: list[float]
    in_graph: bool
    """Otherwise the time includes what the host does before it has launched everything."""


class Timer:
    """One object serves a whole run on one type of device."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        self.graphs = GraphTimer() if device == "cuda" else None

    def time(self, ways: Mapping[str, Calls], expectedmicroseconds: float, samples: int) -> dict[str, Timing]:
        """Time each way; those that can be captured take turns. Every way must have been called before."""
        alone = {name for name, calls in ways.items() if self.graphs is None or waits_for_the_gpu(calls[0])}
        together = [name for name in ways if name not in alone]
        timings = {}
        if together:
            found = self.graphs.time([ways[name] for name in together], expectedmicroseconds, samples)
            timings = {name: Timing(times, in_graph=True) for name, times in zip(together, found, strict=True)}
        return {
            name: timings.get(name) or Timing(self._time_single_calls(calls, samples), in_graph=False)
            for name, calls in ways.items()
        }

    def _time_single_calls(self, calls: Calls, samples: int) -> list[float]:
        for call in calls:  # after a whole round, no call finds its inputs in the cache
            call()
        return [microseconds(calls[turn % len(calls)], self.device) for turn in range(samples)]


def waits_for_the_gpu(call: Callable[[], object]) -> bool:
    """Whether the host waits inside a call, so that no graph can hold it. Makes the call, up to that point."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def microseconds(call: Callable[[], object], device: str) -> float:
    if device == "cpu":
        begin = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - begin)
    module = torch.get_device_module(device)
    start, stop = (module.Event(enable_timing=True) for _ in range(2))
    module.synchronize()
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return 1e3 * start.elapsed_time(stop)
