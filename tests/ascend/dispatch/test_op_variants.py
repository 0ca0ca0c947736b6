"""On tensors of an NPU every variant of a matmul or reduction reaches the operations, and everything is put back.

The device is made of Python and the operations compute on the CPU: this proves where calls go, not what an NPU gives.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ascend.op_variants import MATMULS, REDUCTIONS

ROOT = Path(__file__).parents[3]
FUSED = (
    "npu_rms_norm",
    "npu_rms_norm, scale",
    "npu_gemma_rms_norm",
    "npu_add_rms_norm",
    "npu_add_rms_norm, residual",
    "npu_linear",
    "npu_bmmV2",
)
ONLY_ELEMENTWISE = {"cumsum", "cumsum, dim 0", "cumsum, out", "cumsum_"}
"""Variants whose sums are elementwise additions in a fixed order."""
# fmt: off
HARMLESS = {
    "_copy_from", "_to_copy", "add", "as_strided", "cat", "clamp_min", "div", "empty", "empty_strided", "eq",
    "exp", "fill_", "isnan", "isneginf", "log", "logical_not", "masked_fill_", "mul", "ne", "neg", "pow",
    "reciprocal", "rsqrt", "sqrt", "sub", "tril", "view", "where", "xlogy",
}
# fmt: on
"""Operators without a kernel on the device that may serve a part of a variant: copies and elementwise functions."""


@pytest.fixture(scope="module")
def found() -> dict:
    process = subprocess.run(
        [sys.executable, "-m", "tests.ascend.dispatch.probe"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout.strip().splitlines()[-1])


def natives(log: list[str]) -> list[str]:
    return [line for line in log if line.startswith("native ") and not line.endswith("of integers")]


def foreign(log: list[str]) -> set[str]:
    """Operators that fell through to no kernel of anybody and are not known to be harmless."""
    names = {line.removeprefix("fallback ").partition(".")[0] for line in log if line.startswith("fallback ")}
    return names - HARMLESS


@pytest.mark.parametrize("variant", [*MATMULS, *REDUCTIONS, *FUSED])
def test_a_variant_reaches_the_operation_and_without_the_mode_a_native_kernel(found: dict, variant: str) -> None:
    with_mode, without = found["on"][variant], found["off"][variant]
    assert natives(without["log"]), "the device has no kernel that this could show the replacement of"
    assert natives(with_mode["log"]) == []
    assert foreign(with_mode["log"]) == set()
    assert variant in ONLY_ELEMENTWISE or any(line.startswith("ours ") for line in with_mode["log"])
    assert isinstance(with_mode["error"], float), with_mode["error"]
    assert with_mode["error"] < 1e-5


def test_gradients_reach_the_operations_too(found: dict) -> None:
    for variant, observed in found["gradients"].items():
        assert natives(observed["log"]) == [], variant
        assert isinstance(observed["error"], float), f"{variant}: {observed['error']}"
        assert observed["error"] < 1e-5, variant
    assert found["gradients"]["@"]["log"].count("ours linear.mm") == 2


def test_what_is_not_covered_refuses_by_name(found: dict) -> None:
    for name, line in found["refusals"].items():
        assert line.startswith(f"batch-invariant mode does not cover the operator {name}: "), line
        assert "; " in line
        assert "\n" not in line


def test_integers_elementwise_functions_and_losses_without_a_reduction_are_left_to_the_device(found: dict) -> None:
    assert found["integers"] == [66, [[14, 38, 62], [38, 126, 214], [62, 214, 366]]]
    assert found["losses"] == found["elementwise"] == 0.0


def test_the_rest_of_the_device_is_asked_to_be_deterministic(found: dict) -> None:
    assert found["deterministic"]


def test_the_device_gets_everything_back(found: dict) -> None:
    assert found["put back"]
    assert {"matmul PrivateUse1", "matmul AutogradPrivateUse1", "mean.dim PrivateUse1"} <= set(found["replaced"])
    for variant, observed in found["off again"].items():
        assert observed["log"] == found["off"][variant]["log"], variant


def test_operators_that_another_library_has_replaced_are_left_to_it_and_their_gaps_filled(found: dict) -> None:
    external_ops = {variant: natives(log) for variant, log in found["external_ops"].items()}
    assert external_ops == {
        "mm": ["native mm"],
        "mm, out": [],
        "@": ["native matmul"],
        "matmul, out": ["native mm"],
        "linear": ["native mm"],
        "bmm": [],
    }


def test_without_an_npu_nothing_of_it_is_imported() -> None:
    code = (
        "import sys, torch; from vllm_batch_invariant import batch_invariant_mode\n"
        "with batch_invariant_mode(): torch.ones(2, 2) @ torch.ones(2, 2)\n"
        "print(sorted(name for name in sys.modules if name.startswith('vllm_batch_invariant.ascend.')))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert printed.stdout.strip() == "[]"
