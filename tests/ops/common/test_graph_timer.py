"""How often something is timed, and what an error in a capture is."""

import pytest
import torch

from vllm_batch_invariant.ops.common.graph_timer import GraphTimer, copies_beyond_cache, launches

MIB = 1 << 20


@pytest.mark.parametrize("size", [1 * MIB, 7 * MIB, 50 * MIB, 100 * MIB, 101 * MIB, 2000 * MIB])
def test_copies_are_more_than_twice_the_cache(size: int) -> None:
    copies = copies_beyond_cache(size, cache=50 * MIB)
    assert copies * size > 100 * MIB
    assert (copies - 1) * size <= 100 * MIB


def test_copies_of_a_tiny_input_are_not_endless() -> None:
    assert copies_beyond_cache(1, cache=50 * MIB) == 128


@pytest.mark.parametrize(
    ("microseconds", "calls", "expected"),
    [(5, 1, 20), (5, 7, 21), (5, 60, 60), (40, 3, 12), (1000, 1, 2), (3000, 3, 3)],
)
def test_a_graph_holds_whole_rounds(microseconds: float, calls: int, expected: int) -> None:
    assert launches(microseconds, calls) == expected


def test_an_error_of_a_call_is_not_hidden_by_the_end_of_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def capture_begin(self, *_: object, **__: object) -> None:
            pass

        def capture_end(self) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    def call() -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    timer = GraphTimer.__new__(GraphTimer)
    timer._pool = (0, 0)
    with pytest.raises(torch.OutOfMemoryError):
        timer._capture([call])
    with pytest.raises(RuntimeError, match="previous error"):
        timer._capture([])
