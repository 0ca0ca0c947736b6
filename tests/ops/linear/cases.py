"""Operands of products on a GPU, and how to compute many of them at once."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from vllm_batch_invariant.ops.linear.cancelling import cancelling

HALVES = (torch.bfloat16, torch.float16)
KINDS = ("random", "cancelling")


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def operands(
    kind: str, rows: int, columns: int, depth: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [rows, depth], weight [columns, depth] and bias [columns]: random ones, or such whose product is rounding error
    and nothing else, with a bias of its size.
    """
    if kind == "random":
        return (
            draw(rows, depth, dtype=dtype),
            draw(columns, depth, dtype=dtype, seed=1),
            draw(columns, dtype=dtype, seed=2),
        )
    x, weight = cancelling(rows, columns, depth, dtype, "cuda")
    return x, weight, (draw(columns, seed=2) * 2**-24 * depth).to(dtype)


def chain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` by the kernel that every other way to compute it is compared with."""
    from vllm_batch_invariant.ops.linear.triton_gemm import by_pointers

    return by_pointers(x[None], weight.t()[None], bias, x.dtype)[0]


def turned(matrix: torch.Tensor, turn: bool = True) -> torch.Tensor:
    """The matrix with its other side as the inner one."""
    return matrix.t().contiguous().t() if turn else matrix


def at_once(calls: Iterable[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
    """The result of every call. They share the processor's cores, because Triton needs a second or two to compile each
    kernel.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
