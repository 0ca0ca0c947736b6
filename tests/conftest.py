"""Every test runs with uninitialised memory made visible."""

import logging
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from vllm_batch_invariant import envs

_ON_AN_NPU = Path(__file__).parent / "ascend" / "hardware"


_OPS = Path(__file__).parent / "ops"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets every kernel of this process, on the CPU: it reads the variable when it is imported."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive", action="store_true", help="run also what make test has no time for; as on a GPU, and by -m core"
    )


def pytest_configure(config: pytest.Config) -> None:
    """An engine of a Python without the plugin would have vLLM's own mode, which has other bits. On a CPU engines are
    forked from a process that has imported vLLM; on a GPU nobody may fork who has looked at it.
    """
    if find_spec("vllm") is None or config.option.markexpr == "npu":
        return
    from tests import fork_server  # not every environment has what they import
    from vllm_batch_invariant.verify.harness import mode, worker

    if (found := mode.of_started({envs.FLAG: "1"})) != mode.OURS:
        raise pytest.UsageError(f"engines would run {found}")
    if not torch.cuda.is_available():
        worker.start_process = fork_server.start


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m npu``, tests of other devices are not imported: Ascend's Triton has not all that they need. In
    Triton's interpreter, only tests of operations are, and without an NVIDIA GPU those of files that need one are not.
    """
    if collection_path.is_dir():
        return None
    if config.option.markexpr == "npu":
        return _ON_AN_NPU not in collection_path.parents or None
    stem = collection_path.stem
    if stem.endswith("_cuda") and not torch.cuda.is_available():
        return True
    if INTERPRETED:
        return _OPS not in collection_path.parents or None
    return (stem.endswith("_interpreted") and find_spec("triton") is None) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files whose names end with ``_cuda.py`` need an NVIDIA GPU, those with ``_interpreted.py`` Triton's interpreter,
    which has a process of its own.
    """
    for item in items:
        if item.path.stem.endswith("_cuda"):
            item.add_marker(pytest.mark.gpu)
        if item.path.stem.endswith("_interpreted"):
            item.add_marker(pytest.mark.interpreted)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if item.get_closest_marker("interpreted") and not INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1, and a process of its own"))
    if config.option.markexpr != "core":
        _deselect(config, items, [item for item in items if item.path.stem == "test_core"])
    if not (config.option.exhaustive or config.option.markexpr == "core" or torch.cuda.is_available()):
        _deselect(config, items, [item for item in items if item.get_closest_marker("exhaustive")])
        if not _named(config):
            _deselect(config, items, _repeated(items))
    if INTERPRETED:
        _deselect(config, items, [item for item in items if not item.get_closest_marker("interpreted")])


def _named(config: pytest.Config) -> bool:
    """Whether somebody asks for tests by name, and so for all of their parameters."""
    return bool(config.option.keyword) or any("::" in argument for argument in config.args)


def _repeated(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Tests that repeat others of the same function: of several lists of parameters every entry is in a test that runs,
    and not every combination of entries.
    """
    functions: dict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if len(_entries(item)) > 1 and not item.get_closest_marker("skip"):
            functions[item.path, item.nodeid.partition("[")[0]].append(item)
    repeated = []
    for left in functions.values():
        seen: set[tuple[int, str]] = set()
        while left and (new := _entries(best := max(left, key=lambda item: len(_entries(item) - seen))) - seen):
            seen |= new
            left.remove(best)
        repeated += left
    return repeated


def _entries(item: pytest.Item) -> set[tuple[int, str]]:
    """Which entry of each list: its name."""
    return set(enumerate(item.callspec._idlist)) if hasattr(item, "callspec") else set()


def _deselect(config: pytest.Config, items: list[pytest.Item], others: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=others)
    left_out = set(others)
    items[:] = [item for item in items if item not in left_out]


def _poisoned(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = function(*args, **kwargs)
        with torch.no_grad():
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    return allocate


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``torch.empty`` and its relatives return NaN, so that a read of what nobody wrote changes the result."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
    yield


@pytest.fixture(autouse=True)
def flag() -> Iterator[None]:
    """The flag is what it was: commands that a test calls in this process set it, and a later test that makes engine
    arguments would load the plugin with the mode on.
    """
    before = os.environ.get(envs.FLAG)
    yield
    os.environ.pop(envs.FLAG, None)
    if before is not None:
        os.environ[envs.FLAG] = before


@pytest.fixture(scope="session", autouse=True)
def logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The logs of engines and servers that fail, as tests have them do, are in pytest's folder."""
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("logs"))
    yield
    tempfile.tempdir = before


@pytest.fixture(autouse=True, scope="session")
def rows_alone_where_triton_interprets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED and find_spec("triton"):
            from triton.runtime.interpreter import InterpreterBuilder

            from tests import interpreted_calls, interpreted_dot

            interpreted_calls.install(patch.setattr)
            patch.setattr(InterpreterBuilder, "create_dot", interpreted_dot.of_rows(InterpreterBuilder.create_dot))
        yield


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """The project's log, also where vLLM keeps it from the root."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.DEBUG, "vllm.batch_invariant"):
        yield caplog


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def one_thread_beside_others() -> None:
    """Threads of several pytest workers, each with as many as there are cores, wait for each other."""
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_available():
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small trained model in bf16, downloaded once: SmolLM2-135M-Instruct. Where no registry is reached its tests are
    skipped, unless REAL_MODEL=required, as in continuous integration.
    """
    from vllm_batch_invariant.verify.outcome import NoTestError
    from vllm_batch_invariant.verify.real_model import make_real_checkpoint

    try:
        return make_real_checkpoint(tmp_path_factory.mktemp("real") / "smollm2")
    except NoTestError as error:
        if os.environ.get("REAL_MODEL") == "required":
            raise
        pytest.skip(f"no real model: {error}")


@pytest.fixture
def sm90() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured on a GPU is read from and written to a folder of this run."""
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.is_available():
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No GEMM is tuned, neither in memory nor on disk, and none will be timed."""
    from vllm_batch_invariant.ops.linear import cuda

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("_tuned", "_plans", "_inconsistent"):
        monkeypatch.setattr(cuda.dispatcher, name, {})
    monkeypatch.setattr(cuda.dispatcher, "_uses", Counter())
    monkeypatch.setattr(cuda, "_TUNING_SECONDS", 0.0)
    cuda._stored.cache_clear()
    yield
    cuda._stored.cache_clear()


@pytest.fixture
def without_cublaslt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The setting that leaves all GEMMs to Triton."""
    from vllm_batch_invariant.ops.linear import cuda

    monkeypatch.setenv("VLLM_BATCH_INVARIANT_LINEAR", "triton")
    monkeypatch.setattr(cuda.dispatcher, "_plans", {})
    caches = (cuda._uses_cublaslt, cuda._environment, cuda._matmul_of, cuda._stored)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
