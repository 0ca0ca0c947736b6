"""Where the Hopper kernels of attention cannot be compiled the Triton kernel serves, and the log says so."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_batch_invariant.ops.attention import AttentionReduction

pytest.importorskip("triton")

from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from vllm_batch_invariant.ops.attention import plan, sm90
from vllm_batch_invariant.ops.common.compile_errors import reason

SHAPE = plan.AttentionShape(32, 8, 128, torch.bfloat16, AttentionReduction.of_device("cuda"))


@pytest.fixture(autouse=True)
def an_sm90(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that would have such a GPU, where nothing has been tried yet."""
    properties = SimpleNamespace(multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    monkeypatch.setattr(sm90, "covers", lambda *_: True)
    sm90.compiles.cache_clear()
    yield
    sm90.compiles.cache_clear()


def planner() -> plan.Planner:
    return plan.Planner(SHAPE, torch.device("cpu"), 8, 512, 8192)


class Launches(list):
    """Takes the place of the kernels: what they were launched with, after which the ``error`` is raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.error: BaseException | None = None
        for name in ("launch_prefill", "launch_decode"):
            monkeypatch.setattr(sm90, name, lambda call, out, *rest, of=name: self.launch(of, *rest))

    def launch(self, name: str, *rest: Any) -> None:
        self.append((name, rest))
        if self.error is not None:
            raise self.error


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def compilation_error() -> CompilationError:
    """As Triton raises it: with the source of every caller around what is wrong."""
    import ast

    inner = CompilationError("def f():\n    gl.moved()", ast.parse("gl.moved()").body[0], "no attribute 'moved'")
    outer = CompilationError("def g():\n    f()", ast.parse("f()").body[0], None)
    outer.__cause__ = inner
    return outer


FAILURES = {
    "a function that is not there": (compilation_error, "CompilationError: no attribute 'moved'"),
    "shared memory": (
        lambda: OutOfResources(240_000, 232_448, "shared memory"),
        "OutOfResources: out of resource: shared memory, Required: 240000, Hardware limit: 232448",
    ),
    "an attribute": (lambda: AttributeError("no 'warpgroup_mma'"), "AttributeError: no 'warpgroup_mma'"),
    "the compiler's passes": (lambda: RuntimeError("PassManager::run failed\nmuch"), "RuntimeError: PassManager"),
    "a module of Gluon": (lambda: ImportError("no module", name="triton.experimental.gluon"), "ImportError: no module"),
}


@pytest.mark.parametrize(("error", "said"), FAILURES.values(), ids=FAILURES.keys())
def test_the_triton_kernel_serves_where_a_trial_fails_and_one_warning_says_why(error, said, launches, log) -> None:
    launches.error = error()
    first, second = planner(), planner()
    assert (first.sm90, second.sm90) == (False, False)
    [record] = [record for record in log.records if record.levelno == logging.WARNING]
    assert record.name == "vllm.batch_invariant"
    message = record.getMessage()
    assert "the Triton kernel serves, with the same bits" in message
    assert said in message
    assert "\n" not in message
    # As on a GPU that never had those kernels.
    assert first.cta_shares(4) == first.decode_schedule.ctas_per_sm * 132
    assert len(launches) == 1


def test_a_trial_has_the_variants_of_an_engine_and_no_work_and_is_made_once(launches, log) -> None:
    assert planner().sm90
    assert planner().sm90
    [prefill, *decodes] = launches
    assert [name for name, _ in launches] == ["launch_prefill", "launch_decode", "launch_decode"]
    work, *_ = prefill[1]
    assert (work.count.item(), work.ctas) == (0, 1)
    assert {work.partial_rows for _, (work, *_) in decodes} == {SHAPE.queries_per_kv, plan.DECODE_ROWS}
    for _, (work, *_) in decodes:
        assert work.indptr.tolist() == [0, 0]
    assert not log.records


def test_a_certificate_is_offered_kernels_that_fail_a_trial_so_that_it_says_why_and_keeps_nothing(launches) -> None:
    launches.error = AttributeError("no 'warpgroup_mma'")
    [first, *_] = plan.Kernels.candidates(SHAPE, torch.device("cpu"))
    assert first.sm90
    assert not launches
    assert not plan.Kernels.fastest(SHAPE, torch.device("cpu")).sm90


def test_layers_with_options_that_the_kernels_lack_try_nothing(launches) -> None:
    assert not plan.Planner(SHAPE, torch.device("cpu"), 8, 512, 8192, plain=False).sm90
    assert not launches


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), ImportError("a bug", name=sm90.__name__)], ids=["memory", "a bug"]
)
def test_what_is_not_a_failure_of_triton_is_raised(error, launches) -> None:
    launches.error = error
    with pytest.raises(type(error)):
        planner()
    launches.error = None
    assert planner().sm90


def test_an_error_without_a_message_has_a_reason() -> None:
    assert reason(ValueError()) == "ValueError: no message"


def test_attention_needs_no_gluon_where_there_is_no_hopper() -> None:
    """A Triton that has no Gluon at all, with a GPU that has no use for it."""
    program = """
import sys
from importlib.abc import MetaPathFinder
class Absent(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("triton.experimental"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import torch
from types import SimpleNamespace
from vllm_batch_invariant.ops.attention import AttentionReduction, cuda, plan, sm90
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=108, major=8)
shape = plan.AttentionShape(32, 8, 128, torch.bfloat16, AttentionReduction.of_device("cuda"))
assert not plan.Planner(shape, torch.device("cpu"), 8, 512, 8192).sm90
assert not [name for name in sys.modules if name.startswith("triton.experimental")]
assert not sm90.compiles(shape, frozenset((4, 16)), torch.device("cpu"))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "ModuleNotFoundError: No module named 'triton.experimental" in ended.stderr
