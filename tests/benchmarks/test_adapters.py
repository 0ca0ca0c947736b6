"""What the benchmark of adapters makes of providers that keep their promise, break it, or fail."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import adapters
from benchmarks.adapters import Projection, Step, Sweep
from benchmarks.record import Setting
from benchmarks.shapes import MODELS
from tests.benchmarks.test_moe import SteadyTimer
from vllm_batch_invariant.ops.lora import reference

SMALL = Projection("small", 32, (16, 8))
Call = Callable[[torch.Tensor, Any], None]


def values(step: Step) -> torch.Tensor:
    return reference.add_adapters(step.y, step.x, *step.adapters[0], step.slots).bfloat16()


def exact(step: Step) -> Call:
    def call(y: torch.Tensor, adapter: Any) -> None:
        y.copy_(reference.add_adapters(y, step.x, *adapter, step.slots))

    return call


def varying(step: Step) -> Call:
    def call(y: torch.Tensor, adapter: Any) -> None:
        y.copy_(reference.add_adapters(y, step.x, *adapter, step.slots) + (len(y) == 3))

    return call


def failing(_: Step) -> Call:
    def call(y: torch.Tensor, adapter: Any) -> None:
        raise RuntimeError("no such kernel")

    return call


def sweep(prepare: adapters.Prepare, promises: bool = True) -> Sweep:
    run = Sweep(
        providers={"stock": (exact, False), "ours": (prepare, promises)},
        rows=(1, 3, 5),
        timer=SteadyTimer(),
        setting=Setting("none", "torch=0", "2026-01-31"),
        cache=1 << 10,
        device="cpu",
        expected=values,
    )
    run.measure(SMALL, 8, 2)
    return run


def test_every_case_has_a_time_beside_stock() -> None:
    run = sweep(exact)
    assert run.problems == 0
    times = [row for row in run.measurements if row.metric == "time"]
    assert [(row.provider, row.keys["M"], row.bits) for row in times] == [
        (provider, rows, bits) for rows in "135" for provider, bits in (("stock", "-"), ("ours", "equal"))
    ]
    assert {row.ratio for row in times if row.provider == "ours"} == {2.0}
    assert times[0].case == "projection=small M=1 N=24 K=32 slices=2 rank=8 adapters=2 dtype=bfloat16"


def test_bits_that_follow_the_batch_are_loud(capsys: pytest.CaptureFixture[str]) -> None:
    run = sweep(varying)
    assert run.problems == 1
    assert {row.keys["M"] for row in run.measurements if row.bits == "differ"} == {"3"}
    assert "BITS DIFFER: ours projection=small M=3" in capsys.readouterr().err


def test_a_call_that_fails_is_a_problem() -> None:
    run = sweep(failing, promises=False)
    assert run.problems == 3
    assert not run.measurements


def test_the_projections_are_those_of_the_model() -> None:
    model = next(one for one in MODELS if one.name == "Qwen3-8B")
    found = {one.name: (sum(one.columns), one.k) for one in Projection.of(model)}
    assert found == {name: size for name, size in model.projections(1).items() if name != "lm_head"}


def test_adapters_of_calls_are_more_than_the_cache_holds() -> None:
    step = Step.random(SMALL, 3, 8, 2, 1 << 12, "cpu")
    assert sum(one.nbytes for pair in step.adapters for part in pair for one in part) > 2 << 12
    assert step.slots.tolist() == [0, 1, 0]


def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    assert adapters.main([]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
