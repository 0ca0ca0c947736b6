"""Operands of GEMMs on a GPU, and how to compute many of them at once."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from vllm_batch_invariant.ops.common.cancelling import cancelling
from vllm_batch_invariant.ops.linear import LinearReduction
from vllm_batch_invariant.ops.linear.schedule import NarrowTile, Tile

HALVES = (torch.bfloat16, torch.float16)
KINDS = ("random", "cancelling")


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def operands(kind: str, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [M, K], weight [N, K] and bias [N]: random ones, or such whose product is rounding error and nothing else, with
    a bias of its size.
    """
    assert kind in KINDS, kind
    if kind == "random":
        return (
            draw(m, k, dtype=dtype),
            draw(n, k, dtype=dtype, seed=1),
            draw(n, dtype=dtype, seed=2),
        )
    x, weight = cancelling(m, n, k, dtype, "cuda")
    return x, weight, (draw(n, seed=2) * 2**-24 * k).to(dtype)


def sequential_k(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` by the kernel that every other way to compute it is compared with."""
    from vllm_batch_invariant.ops.linear.triton_gemm import mm_ptr

    return mm_ptr(x, weight.t(), bias)


def launch(
    launcher: Callable[..., torch.Tensor],
    tile: Tile | NarrowTile,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``a @ b + bias`` by a launcher of ``triton_gemm`` with this tile. a: [..., M, K], b: [..., K, N]."""
    out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=a.dtype, device=a.device)
    return launcher(a, b, bias, out, LinearReduction.of_device("cuda", b.shape[-1], b.shape[-2], a.dtype), tile)


def turned(matrix: torch.Tensor, turn: bool = True) -> torch.Tensor:
    """The matrix with its other side as the inner one."""
    return matrix.t().contiguous().t() if turn else matrix


def at_once(calls: Iterable[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
    """The result of every call. They share the processor's cores, because Triton needs a second or two to compile each
    kernel.
    """
    enter = partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_available() else None
    with ThreadPoolExecutor(os.cpu_count(), initializer=enter) as pool:  # descriptors for TMA want a thread's context
        return [future.result() for future in [pool.submit(call) for call in calls]]
