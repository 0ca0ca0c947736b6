"""The benchmark of layers with a state: what it tells is near float64, and it finds bits that follow the calls."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import state_accuracy
from benchmarks.record import read
from tests.hf.models import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="it compares with vLLM's kernels for a CPU")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few tokens of one case a layer, and one thread for what is small."""
    for name, number in {"TOKENS": 150, "LAST": 90, "_ALONE": 20, "_CHUNK": 48}.items():
        monkeypatch.setattr(state_accuracy, name, number)
    firsts = {name.split()[0]: (name, of) for name, of in reversed(state_accuracy.CASES.items())}
    monkeypatch.setattr(state_accuracy, "CASES", dict(firsts.values()))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("few")
def test_results_of_each_layer_are_near_float64_and_the_modes_have_the_same_bits_in_any_calls(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    assert state_accuracy.main(["--out", str(out)]) == 0
    rows = read(out)
    assert {row.keys["layer"] for row in rows} == {"delta-net", "mamba2", "short-convolution"}
    assert all(0.001 < row.p50 < 0.012 for row in rows)
    assert {row.bits for row in rows if row.provider == "ours"} == {"equal"}
    assert {row.bits for row in rows if row.provider == "stock" and row.keys["layer"] == "delta-net"} == {"differ"}


@pytest.mark.usefixtures("few")
def test_a_layer_that_is_computed_in_the_calls_own_chunks_ends_in_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty() -> state_accuracy.Case:
        case = state_accuracy.convolution()
        ours: Callable[[list[int]], torch.Tensor] = case.ours
        return state_accuracy.Case(case.exact, lambda cuts: ours(cuts) * (1 + (len(cuts) > 1) * 2**-7), case.plain)

    monkeypatch.setitem(state_accuracy.CASES, "layer=short-convolution", faulty)
    assert state_accuracy.main(["--out", str(tmp_path / "rows.csv"), "--only", "layer=short-convolution"]) == 1
