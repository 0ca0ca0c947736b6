"""Times calls on a GPU in CUDA graphs, where neither Python nor a warm cache is part of the result."""

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

_GRAPH_MICROSECONDS = 400.0
"""How much work a graph should hold: then its own start does not count."""
_FEWEST_LAUNCHES, _MOST_LAUNCHES = 2, 20
_MOST_COPIES = 128

Calls = Sequence[Callable[[], object]]
"""The same work on different copies of its inputs, used in turn."""


def copies_beyond_cache(size: int, cache: int) -> int:
    """How many copies of an input of ``size`` bytes are more than twice the cache: a round of them evicts each."""
    return min(2 * cache // size + 1, _MOST_COPIES)


def launches(expected_microseconds: float, calls: int) -> int:
    """Calls in a graph: whole rounds of the ``calls``, so that every one finds the cache as the others left it."""
    wanted = min(max(int(_GRAPH_MICROSECONDS / expected_microseconds), _FEWEST_LAUNCHES), _MOST_LAUNCHES)
    return -(-wanted // calls) * calls


class GraphTimer:
    """Times calls on a stream of its own; one object serves a whole run."""

    def __init__(self, device: int | None = None) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._stream):
            # PyTorch closes a memory pool with its last graph; this graph keeps it open for those to come.
            self._keeper = self._capture([lambda: torch.zeros(1, device=self._stream.device)])

    def time(self, ways: Sequence[Calls], expected_microseconds: float, replays: int) -> list[list[float]]:
        """Microseconds of one call, ``replays`` samples for each way; the ways take turns, so that a GPU that grows
        hot or slow does so for all of them.

        Args:
            ways: what to compare.
            expected_microseconds: roughly what a call takes; decides how often it is made.
            replays: samples for each.
        """
        torch.cuda.synchronize()  # the inputs come from another stream
        with torch.cuda.stream(self._stream):
            graphs = []
            for calls in ways:
                for call in calls:  # compiles, creates handles and workspaces: none of that may be captured
                    call()
                torch.cuda.synchronize()
                count = launches(expected_microseconds, len(calls))
                graphs.append((count, self._capture([calls[turn % len(calls)] for turn in range(count)])))
            graphs[0][1].replay()  # keeps the GPU busy while the replays that count are queued
            events = [
                [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)] for _ in graphs
            ]
            for replay in range(replays):
                for (_, graph), pairs in zip(graphs, events, strict=True):
                    pairs[replay][0].record()
                    graph.replay()
                    pairs[replay][1].record()
            torch.cuda.synchronize()
        return [
            [1e3 * start.elapsed_time(stop) / count for start, stop in pairs]
            for (count, _), pairs in zip(graphs, events, strict=True)
        ]

    def _capture(self, calls: Calls) -> torch.cuda.CUDAGraph:
        """Capture the current stream. Unlike ``torch.cuda.graph``, does not collect garbage and empty the allocator's
        cache each time, which would take most of a run.
        """
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        except Exception:
            with suppress(Exception):  # a capture that an error has ended fails to end, and would hide it
                graph.capture_end()
            raise
        graph.capture_end()
        return graph
