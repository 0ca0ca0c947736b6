"""Every compile-time constant of a row kernel is in its reduction or its schedule, or is a part of the problem."""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from vllm_batch_invariant import ops

pytest.importorskip("triton")
from triton.runtime.jit import JITFunction

from vllm_batch_invariant.ops.common.dependent_launch import LaunchSchedule

NOT_ROWS = {"attention", "linear", "common"}
"""Packages whose kernels reduce tiles, and one whose functions have no constants of their own."""
PROBLEM = {
    "all_reduce": {
        "UNIT",
        "FLAG_BYTES",
        "HALF_BYTES",
        "REGION_BYTES",
        "REGIONS",
        "TIMEOUT",
        "FIRST",
        "SOURCE",
        "TOP_K",
        "IS_PART",
    },
    "attention_backward": {"NUM_HEADS", "NUM_KV_HEADS", "HEAD_DIM", "PADDED_HEAD_DIM"},
    "causal_conv": {"CHANNELS", "HAS_BIAS"},
    "delta_rule": {
        *("KEY_HEADS", "VALUE_HEADS", "PADDED_HEADS", "HAS_SKIP", "HAS_X", "KEYS", "ROWS", "STRIDE", "TRANSPOSED"),
        *("WIDTH", "HAS_BIAS"),  # of the convolution in front
        *("CHANNELS", "HAS_LEAST"),  # of gates, and whether they have a bound
    },
    "exact": {
        *("PARTS", "LENGTH", "ACTIVATIONS", "HAS_RESIDUAL", "HAS_WEIGHT", "HAS_BIAS", "EVEN_K", "NUM_HEADS", "HALF"),
        *("LOG", "AXIS"),  # of functions of rows
        *("GELU", "USE_SOFT_CAP", "MAY_BE_GREEDY"),
        *("LAYOUT", "SIZE"),  # of a tile's accumulators, and its elements
        *("USE_WINDOW", "PREFILL_LIKE", "NUM_KV_HEADS", "QUERIES_PER_KV", "HEAD_DIM", "PADDED_HEAD_DIM", "PAGE_SIZE"),
        *("SPLIT_SEGMENTS", "MAY_SHARE", "PARTIAL_ROWS", "PARTIAL_BLOCK"),  # of attention's reduction and plans
    },
    "formats": {
        *("BITS", "FORMAT", "DTYPE"),
        *("BLOCK_N", "BLOCK_K", "EVEN_K"),  # of the tile in which a kernel of another operation decodes
    },
    "kv_cache": {"HOLDS_CODES", "NUM_KV_HEADS", "HEAD_DIM", "PAGE_SIZE", "BLOCK"},
    "lora": {"RANK", "EVEN_K", "DTYPE", "WIDTH", "AHEAD"},
    "moe": {
        "FORMAT",
        *("PADDED_EXPERTS", "PADDED_TOP_K", "PADDED_GROUPS", "SUMS_TWO", "HAS_BIAS", "HAS_SCALE", "EVEN_K"),
        *("PAIRS_OF_A_ROW", "LENGTH", "IS_PART", "AXIS", "COUNTS", "GATED"),
        *("HALF", "LAYOUT"),  # a warpgroup's half of a tile, and where its threads have it
        *("GROUP", "WHICH"),  # of the format, and a partition's number
        "ROWS_OF_A_SCALE",  # of the weight
    },
    "norm": {"VARIANCE_SIZE", "HAS_RESIDUAL", "HAS_WEIGHT", "ADDS_ONE", "GROUPS"},
    "norm_backward": {"LENGTH", "HAS_RESIDUAL", "HAS_GRAD_OF_SUM"},
    "norm_rotary": {"NUM_HEADS", "NUM_KV_HEADS", "PAGE_SIZE", "HOLDS_CODES", "HAS_NORMS", "SECTIONS"},
    "quantise": {"LENGTH", "STATIC", "PADDED_STATIC", "DTYPE", "OF_16_BITS"},
    "reduce": {"DIVIDE"},
    "scaled_linear": {
        *("HAS_BIAS", "EVEN_K", "DTYPE", "SCALED_N"),
        *("GROUP", "COUNT", "layout"),  # a warpgroup's part of a tile, and where its threads have it
    },
    "silu": {"LENGTH", "DTYPE"},
    "silu_backward": {"LENGTH"},
    "softmax": {"LOG"},
    "top_k_top_p": {"WEIGH", "EXACT"},
}
"""By operation, what a call asks for."""
OPERATIONS = [one.name for one in pkgutil.iter_modules(ops.__path__) if one.ispkg and one.name not in NOT_ROWS]

INJECTED = """
import triton
import triton.language as tl


@triton.jit
def injected_kernel(x_ptr, BLOCK: tl.constexpr, LOG: tl.constexpr, ROWS_AT_ONCE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 0.0)
"""


def modules_of(operation: str) -> Iterator[ModuleType]:
    package = importlib.import_module(f"{ops.__name__}.{operation}")
    for one in pkgutil.iter_modules(package.__path__):
        yield importlib.import_module(f"{package.__name__}.{one.name}")


def kernels_of(module: ModuleType) -> dict[str, set[str]]:
    """The compile-time constants of the functions for Triton that a module defines, by their names."""
    return {
        name: {parameter.name for parameter in value.params if parameter.is_constexpr}
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and value.fn.__module__ == module.__name__
    }


def declared_by(operation: str) -> set[str]:
    """Fields and properties of an operation's reductions and schedules, and of every launch's, in upper case; and of a
    reduction as a whole its name.
    """
    kinds = [LaunchSchedule] + [
        value
        for module in modules_of(operation)
        for name, value in vars(module).items()
        if is_dataclass(value) and name.endswith(("Reduction", "Schedule"))
    ]
    properties = {
        name for kind in kinds for base in kind.__mro__ for name, value in vars(base).items() if type(value) is property
    }
    wholes = {kind.__name__.removesuffix("Reduction") for kind in kinds}
    return {name.upper() for name in properties | wholes | {field.name for kind in kinds for field in fields(kind)}}


def undeclared(module: ModuleType, known: set[str]) -> dict[str, set[str]]:
    return {name: constants - known for name, constants in kernels_of(module).items() if constants - known}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_constexpr_is_in_the_reduction_or_the_schedule(operation):
    known = declared_by(operation) | PROBLEM.get(operation, set())
    for module in modules_of(operation):
        assert not undeclared(module, known), module.__name__


def test_every_operation_with_row_kernels_is_looked_at():
    found = {
        operation: [name for module in modules_of(operation) for name in kernels_of(module)] for operation in OPERATIONS
    }
    assert found.keys() >= {"attention_backward", "norm", "norm_rotary", "reduce", "softmax", "ranking", "top_k_top_p"}
    without = {operation for operation, kernels in found.items() if not kernels}
    assert without == {"pointwise", "delta_rule_backward", "hopper"}  # the last two are computed on a CPU alone
    assert {"_rms_norm_kernel", "_load_rows"} <= set(found["norm"])
    shared = {
        name: set().union(*kernels_of(importlib.import_module(f"{ops.__name__}.common.{name}")).values())
        for name in ("triton_rows", "triton_exact_math", "triton_e4m3", "dependent_launch")
    }
    assert shared == {
        "triton_rows": {"NUM_THREADS"},  # of the warps that every row reduction has
        "triton_exact_math": {"COEFFICIENTS", "BITS", "LIMIT", "AXIS"},  # of functions of numbers, and of a row's
        "triton_e4m3": {"DTYPE", "CONVERTS_E4M3"},  # of the numbers, and what a GPU has
        "dependent_launch": {"OVERLAPS", "LENGTH"},  # of its schedule, and of what is asked for
    }


def test_an_injected_constexpr_is_found(tmp_path: Path):
    path = tmp_path / "injected.py"
    path.write_text(INJECTED)
    spec = spec_from_file_location("injected", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    known = declared_by("softmax") | PROBLEM["softmax"]
    assert undeclared(module, known) == {"injected_kernel": {"ROWS_AT_ONCE"}}
