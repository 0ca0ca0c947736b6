"""Calls that make the wrappers ask for every kernel, dtype and tile they can ask for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch

from vllm_batch_invariant.ascend.ops import linear, norm, reduce, reductions, softmax

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (100, 512, 2048, 151_936)
"""A row length for every block: the last is of many blocks, and of more than one chunk."""
COLUMNS = {128: (4096, 4095), 256: (8192, 8193)}
"""By the columns of a tile: values of N that are and are not whole tiles."""
DEPTHS = (1024, 1000)
"""Values of K that are and are not whole steps."""


@dataclass(frozen=True)
class Case:
    """A call, by a name that says what it covers."""

    name: str
    call: Callable[[], object]

    def __str__(self) -> str:
        return self.name


def _rows(length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(2, length, dtype=dtype)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def sums() -> Iterator[Case]:
    for length, dtype in product((*LENGTHS, 9000), DTYPES):
        for name in ("sum", "mean"):
            yield Case(
                f"{name} of {length} {_short(dtype)}",
                lambda name=name, length=length, dtype=dtype: getattr(reduce, name)(_rows(length, dtype), -1),
            )


def softmaxes() -> Iterator[Case]:
    for length, dtype, out, name in product(LENGTHS, DTYPES, DTYPES, ("softmax", "log_softmax")):
        yield Case(
            f"{name} of {length} {_short(dtype)} to {_short(out)}",
            lambda name=name, length=length, dtype=dtype, out=out: getattr(softmax, name)(
                _rows(length, dtype), -1, dtype=out
            ),
        )


def gradients() -> Iterator[Case]:
    for length, dtype, name in product(LENGTHS, DTYPES, ("softmax_backward", "log_softmax_backward")):
        # The gradient of a softmax with a dtype of fp32 returns to the input's dtype.
        for out in DTYPES if dtype == torch.float32 else (dtype,):
            yield Case(
                f"{name} of {length} {_short(dtype)} to {_short(out)}",
                lambda name=name, length=length, dtype=dtype, out=out: getattr(softmax, name)(
                    _rows(length, dtype), _rows(length, dtype), -1, out
                ),
            )


def norms() -> Iterator[Case]:
    for length, dtype, weight, residual in product(LENGTHS, DTYPES, (None, *DTYPES), (False, True)):
        scaled = "no weight" if weight is None else f"weight {_short(weight)}"
        yield Case(
            f"rms_norm of {length} {_short(dtype)}, {scaled}{', residual' * residual}",
            lambda length=length, dtype=dtype, weight=weight, residual=residual: norm.rms_norm(
                _rows(length, dtype),
                None if weight is None else torch.empty(length, dtype=weight),
                1e-6,
                _rows(length, dtype) if residual else None,
                None,
            ),
        )


def biases() -> Iterator[Case]:
    for dtype in DTYPES:
        yield Case(
            f"bias of {_short(dtype)}",
            lambda dtype=dtype: linear._with_bias(_rows(5000, torch.float32), torch.empty(5000, dtype=dtype), dtype),
        )


ROW_CASES = (*sums(), *softmaxes(), *gradients(), *norms(), *biases())


@dataclass(frozen=True)
class ProductCase(Case):
    """A product with the step that its kernel should have; None where the last one is shorter."""

    depth: int | None
    columns: int | None


def products() -> Iterator[ProductCase]:
    for width, depth, dtype, turned in product(COLUMNS, DEPTHS, DTYPES, (True, False)):
        for n in COLUMNS[width]:
            for out in {dtype, torch.float32}:
                b = torch.empty(n, depth, dtype=dtype).t() if turned else torch.empty(depth, n, dtype=dtype)
                function = linear.mm if out == dtype else linear.accumulate
                reduction = reductions.linear(n, depth, dtype)
                yield ProductCase(
                    f"product of {_short(dtype)} to {_short(out)}, N={n} K={depth}{', weight' * turned}",
                    lambda function=function, b=b, depth=depth, dtype=dtype: function(_rows(depth, dtype), b),
                    None if depth % reduction.k_step else reduction.k_step,
                    None if n % reduction.block_n else reduction.block_n,
                )


PRODUCT_CASES = tuple(products())
