"""Who computes the linear operation in its benchmark."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from benchmarks.shapes import WEIGHT_SHAPES
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.exact.definition import segments


class Absent(Exception):
    """A provider that the installed packages do not have."""


@dataclass(frozen=True)
class Provider:
    """One way to multiply."""

    name: str
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """x [M, K], weight [N, K] to [M, N]."""
    promises_bits: bool = True
    """Whether a row's bits shall not depend on M."""
    prepare: Callable[[torch.Tensor, int], None] | None = None
    """Called once for a weight and the most rows that it will meet."""


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


_LOADERS: dict[str, Callable[[], Provider]] = {
    "stock": _stock,
    "ours": _ours,
    "ours-triton": _ours_triton,
    "native": _native,
    "ours-exact": _ours_exact,
    "ours-tree-2": partial(_ours_tree, 2),
    "ours-tree-4": partial(_ours_tree, 4),
}
NAMES = tuple(_LOADERS)
USUAL = tuple(name for name in NAMES if not name.startswith(("ours-exact", "ours-tree")))
"""Who takes part unless told otherwise: exact arithmetic and trees are options of an engine."""


def load(name: str) -> Provider:
    """The provider of one of :data:`NAMES`.

    Raises:
        Absent: it is not part of what is installed.
    """
    return _LOADERS[name]()
