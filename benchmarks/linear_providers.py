"""Who computes the linear operation in its benchmark."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from benchmarks import fp8_products
from benchmarks.shapes import WEIGHT_SHAPES
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.exact.definition import segments


class Absent(Exception):
    """A provider that the installed packages do not have."""


@dataclass(frozen=True)
class Provider:
    """One way to multiply."""

    name: str
    call: Callable[[torch.Tensor, Any], torch.Tensor]
    """x [M, K], weight [N, K] to [M, N]."""
    promises_bits: bool = True
    """Whether a row's bits shall not depend on M."""
    prepare: Callable[[Any, int], None] | None = None
    """Called once for a weight and the most rows that it will meet."""
    load: Callable[[Any], Any] = lambda weight: weight
    """What is made of a weight once, and given to ``call``."""


def _stock() -> Provider:
    return Provider("stock", lambda x, weight: torch.mm(x, weight.t()), promises_bits=False)


def _ours() -> Provider:
    """As an engine's layers call it."""
    linear = import_module("vllm_batch_invariant.ops.linear")
    return Provider("ours", partial(linear.linear, weight_is_constant=True), prepare=linear.prepare)


def _ours_tree(k_slices: int) -> Provider:
    """K in slices, which are added as a tree."""
    linear = import_module("vllm_batch_invariant.ops.linear")
    spec = linear.MatmulSpec(k_slices=k_slices)
    return Provider(
        f"ours-tree-{k_slices}",
        partial(linear.matmul, spec=spec),
        prepare=partial(linear.prepare, spec=spec),
    )


def _ours_triton() -> Provider:
    mm = import_module("vllm_batch_invariant.ops.linear.triton_gemm").mm
    return Provider("ours-triton", lambda x, weight: mm(x, weight.t()))


def _ours_exact() -> Provider:
    """Exact arithmetic. A weight is made integers once, in the way of o_proj and down_proj if it is of their shape."""
    name = f"vllm_batch_invariant.ops.exact.{'cuda' if torch.cuda.is_available() else 'cpu'}"
    try:
        exact = import_module(name)
    except ImportError as error:
        raise Absent(f"exact arithmetic: {error}") from error
    shared = {
        (shape.out_features, shape.in_features)
        for shape in WEIGHT_SHAPES
        if any(origin.projection in ("o", "down") for origin in shape.origins)
    }
    integers = WeakTensorKeyDictionary()

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if weight not in integers:
            parts = segments(weight.shape[1], tuple(weight.shape) in shared)
            integers[weight] = exact.prepare(weight, parts)
        return exact.linear(x, integers[weight])

    return Provider("ours-exact", call)


def gated(provider: Provider) -> Provider:
    """The provider with what a gated layer does behind its matmul, silu(gate) * up of [gate, up]; ours computes both in
    one operation. Whoever multiplies is followed by the same kernel, so that matmuls are compared.
    """
    if provider.name == "ours":
        linear = import_module("vllm_batch_invariant.ops.linear")
        call = partial(linear.matmul, spec=linear.GATED, weight_is_constant=True)
        return replace(provider, call=call, prepare=partial(linear.prepare, spec=linear.GATED))
    activate = import_module("vllm_batch_invariant.ops.silu").silu_and_mul
    return replace(provider, call=lambda x, weight: activate(provider.call(x, weight)))


def _native() -> Provider:
    from vllm_batch_invariant.integration.reviews import patch_points

    try:
        return Provider("native", replace(patch_points.INIT_BATCH_INVARIANCE, attribute="linear_batch_invariant").get())
    except (ImportError, NotCovered) as error:
        raise Absent(f"vLLM's own batch-invariant linear: {error}") from error


def _multiplied(x: torch.Tensor, multiply: fp8_products.Multiply) -> torch.Tensor:
    return multiply(x)


def _stock_fp8() -> Provider:
    """FlashInfer's kernel up to 31 rows, and DeepGEMM's; weights that an engine would give them."""
    try:
        from vllm.utils.deep_gemm import is_deep_gemm_supported
        from vllm.utils.flashinfer import is_flashinfer_fp8_blockscale_gemm_supported as has_flashinfer
    except ImportError as error:
        raise Absent(f"vLLM's products of FP8: {error}") from error
    if not (has_flashinfer() and is_deep_gemm_supported()):
        raise Absent("vLLM has no FlashInfer or no DeepGEMM here, or is told not to use them")
    return Provider("stock", _multiplied, promises_bits=False, load=fp8_products.plain)


def _ours_fp8() -> Provider:
    """As an engine's layers call it: by the tiles, cuBLASLt and DeepGEMM."""
    return Provider("ours", _multiplied, prepare=fp8_products.prepare, load=fp8_products.ours)


_LOADERS: dict[str, dict[str, Callable[[], Provider]]] = {
    "bf16": {
        "stock": _stock,
        "ours": _ours,
        "ours-triton": _ours_triton,
        "native": _native,
        "ours-exact": _ours_exact,
        "ours-tree-2": partial(_ours_tree, 2),
        "ours-tree-4": partial(_ours_tree, 4),
    },
    "fp8": {"stock": _stock_fp8, "ours": _ours_fp8},
}
"""By formats of weights."""
NAMES = tuple(_LOADERS["bf16"])
USUAL = tuple(name for name in NAMES if not name.startswith(("ours-exact", "ours-tree")))
"""Who takes part unless told otherwise: exact arithmetic and trees are options of an engine."""


def load(name: str, form: str = "bf16") -> Provider:
    """The provider of one of :data:`NAMES`, of weights in a format.

    Raises:
        Absent: it is not part of what is installed, or multiplies no such weights.
    """
    if name not in _LOADERS[form]:
        raise Absent(f"no weights in {form}")
    return _LOADERS[form][name]()
