"""Devices that operations are tested on, and a machine with a GPU that need not be there."""

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.assertions import ROW_COUNTS
from tests.conftest import INTERPRETED
from tests.fakes.cublaslt import Library, sequential_k
from vllm_batch_invariant.ops import dispatch as dispatch_table
from vllm_batch_invariant.ops import linear
from vllm_batch_invariant.ops.common.gpu import Gpu


@dataclass(frozen=True)
class Device:
    """Where an operation is tested.

    Attributes:
        name: "cpu", "cuda", or "interpreted": the GPU's module on the CPU, in Triton's interpreter.
        type: PyTorch's type of the device where tensors lie.
        row_counts: batch sizes; the last is the largest. The interpreter takes milliseconds a row.
    """

    name: str
    type: str
    row_counts: tuple[int, ...] = ROW_COUNTS

    @property
    def is_interpreted(self) -> bool:
        return self.name == "interpreted"

    def supports(self, dtype: torch.dtype | None) -> bool:
        """The interpreter truncates to bf16, where a GPU rounds."""
        return not (self.is_interpreted and dtype == torch.bfloat16)

    def draw(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
        """Normally distributed numbers, the same on every device."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.type, dtype)

    def module(self, operation: str) -> ModuleType:
        """The module that serves."""
        return dispatch_table.module_for(operation, self.type)


LONGEST_INTERPRETED = 66_000
"""Elements of a row: one more than what one program adds, on a GPU."""
DEVICES = {
    "cpu": Device("cpu", "cpu"),
    "cuda": Device("cuda", "cuda"),
    "interpreted": Device("interpreted", "cpu", (1, 2, 8, 9)),
}


ON_GPU = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test with a ``dtype`` that its device does not support, or a ``length`` that takes it too long, is skipped."""
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("device") != "interpreted":
            continue
        if not DEVICES["interpreted"].supports(parameters.get("dtype")):
            item.add_marker(pytest.mark.skip(reason="the interpreter's bf16 is not a GPU's"))
        elif parameters.get("length", 0) > LONGEST_INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="takes the interpreter seconds a row"))


@pytest.fixture(
    params=[pytest.param("interpreted", marks=pytest.mark.interpreted)] if INTERPRETED else ["cpu", *ON_GPU]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Each device in turn; where Triton interprets, the GPU's modules serve tensors of the CPU."""
    device = DEVICES[request.param]
    if device.is_interpreted:
        module_for = dispatch_table.module_for
        monkeypatch.setattr(dispatch_table, "module_for", lambda operation, _: module_for(operation, "cuda"))
    return device


HOPPER = Gpu("Hopper", 132, 232_448, True, 60 << 20, True)


@pytest.fixture
def cublaslt(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module on a cuBLASLt that works on the CPU, its ``lt``."""
    pytest.importorskip("triton")
    nvmath, bindings, library = ModuleType("nvmath"), ModuleType("nvmath.bindings"), Library()
    bindings.cublasLt = library
    monkeypatch.setitem(sys.modules, "nvmath", nvmath)
    monkeypatch.setitem(sys.modules, "nvmath.bindings", bindings)
    name = "vllm_batch_invariant.ops.linear.cublaslt"
    # What the import sets in both places is put back afterwards.
    monkeypatch.setattr(linear, "cublaslt", None, raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]
    module = importlib.import_module(name)
    handle = library.create()
    monkeypatch.setattr(module, "handle", lambda device: handle)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu").index)
    monkeypatch.setattr(Gpu, "of", lambda index: HOPPER)
    yield module


@pytest.fixture
def dispatch(cublaslt: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """The module ``cuda`` for tensors of the CPU, where nothing is tuned yet and tuning always chooses cuBLASLt; the
    values of M for which Triton was ``launched``; and what was ``tuned``.
    """
    from vllm_batch_invariant.ops.linear import autotune, autotune_cache, cuda, triton_gemm

    launched, tuned = [], []

    def mm(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        launched.append(len(a))
        total = sequential_k(a, b, bias)
        return total if out is None else out.copy_(total)

    def tune(problem, matmul, buckets, sizes=(), tuning_seconds=0.0):
        tuned.append((tuple(buckets), tuple(sizes), tuning_seconds))
        [algorithm] = matmul.algorithms(8, 1)
        return {bucket: autotune.TunedSchedule(algorithm, (bucket,), (), {"cublaslt": 1.0}) for bucket in buckets}

    monkeypatch.setattr(triton_gemm, "mm", mm)
    monkeypatch.setattr(autotune, "tune", tune)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    environment, matmuls = {"gpu": "made up"}, {}
    for attribute, value in {"_tuned": {}, "_plans": {}, "_uses": Counter(), "_inconsistent": {}}.items():
        monkeypatch.setattr(cuda.dispatcher, attribute, value)
    for attribute, value in {
        "cublaslt": cublaslt,
        "_stored": lambda device: autotune_cache.load(environment),
        "_uses_cublaslt": lambda device: True,
        "_environment": lambda device: environment,
        "_matmul_of": lambda problem: matmuls.setdefault(problem, cublaslt.Matmul(problem)),
    }.items():
        monkeypatch.setattr(cuda, attribute, value)
    return SimpleNamespace(cuda=cuda, launched=launched, tuned=tuned, library=cublaslt.lt, environment=environment)
