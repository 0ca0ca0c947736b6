"""The cache of compiled CPU kernels: taken where it is of these sources, and never in the way."""

import os
from collections.abc import Callable
from pathlib import Path

import numba
import pytest

from vllm_batch_invariant.ops.common import numba_rows
from vllm_batch_invariant.ops.common.numba_rows import compiled


def _twice(x):
    return x + x


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Compiles the kernel as a new process does, with a cache of its own; says how often the cache had it."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def run(parallel: bool = False) -> int:
        kernel = compiled(_twice, parallel)
        assert kernel(1.5) == 3.0
        return sum(kernel.stats.cache_hits.values())

    return run


BREAK: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:20]),
    "binary": lambda path: path.write_bytes(os.urandom(500)),
    "gone": lambda path: path.unlink(),
}


def test_a_kernel_is_compiled_once(hits: Callable[[], int], log: pytest.LogCaptureFixture) -> None:
    assert [hits() for _ in range(3)] == [0, 1, 1]
    assert log.records == []


@pytest.mark.filterwarnings("ignore::numba.NumbaPerformanceWarning")  # of a kernel without a loop
def test_code_for_one_thread_is_not_taken_for_many(hits: Callable[..., int]) -> None:
    assert [hits(False), hits(True), hits(False), hits(True)] == [0, 0, 1, 1]


def test_a_kernel_of_other_sources_is_not_taken(hits: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """numba itself looks only at the kernel's own file, not at those of the functions that are compiled into it."""
    assert [hits(), hits()] == [0, 1]
    monkeypatch.setattr(numba_rows.sources, "digest", lambda *_: "after a change of another file")
    assert [hits(), hits()] == [0, 1]
    monkeypatch.undo()
    below = Path(numba_rows.sources.__file__).parent / numba_rows._COMPILED
    assert {"numba_simd.py", "numba_math.py", "cpu_kernel.py"} <= {path.name for path in below.rglob("*.py")}


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("breaks", BREAK.values(), ids=BREAK)
def test_a_broken_file_is_compiled_again_and_mended(
    hits: Callable[[], int],
    tmp_path: Path,
    log: pytest.LogCaptureFixture,
    suffix: str,
    breaks: Callable[[Path], object],
) -> None:
    assert [hits(), hits()] == [0, 1]
    [path] = tmp_path.rglob(f"*{suffix}")
    breaks(path)
    assert [hits(), hits()] == [0, 1]
    warned = 0 if breaks is BREAK["gone"] else 1
    assert [record.levelname for record in log.records] == ["WARNING"] * warned
    assert all("The kernel _twice is compiled again, its cache in " in record.message for record in log.records)


def test_a_cache_that_cannot_be_written_is_a_warning(
    hits: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        assert hits() == 0
    [record] = log.records
    assert (record.levelname, "No space left on device" in record.message) == ("WARNING", True)
    assert list(tmp_path.rglob("*.nb?")) == []
    assert [hits(), hits()] == [0, 1]


def test_without_a_folder_for_the_cache_a_kernel_is_compiled_all_the_same(
    hits: Callable[[], int], monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(numba_rows, "_Cache", refuse)
    assert [hits(), hits()] == [0, 0]
    assert {record.levelname for record in log.records} == {"INFO"}
