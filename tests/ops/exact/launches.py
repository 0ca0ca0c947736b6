"""Launches of every kernel of exact arithmetic, for programs that compile kernels for GPUs that are not here."""

from collections.abc import Callable
from dataclasses import replace

import torch

from tests.ops.attention.cases import Chunk, Heads, Request, call_of, paged
from vllm_batch_invariant.ops.attention.shapes import AttentionShape
from vllm_batch_invariant.ops.exact import cuda
from vllm_batch_invariant.ops.exact.definition import segments
from vllm_batch_invariant.ops.exact.schedule import HOPPER_SCHEDULES, HopperSchedule

MODEL = Heads(8, 2, 128, torch.bfloat16)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def grids(count: int, k: int = 512) -> None:
    """Rows of activations and of a weight on their grids."""
    cuda.quantize(zeros(count, k), 8, activations=True)
    cuda.prepare(zeros(40, k), segments(k, shared=True))


def products(count: int, shared: bool = True, bias: bool = True, int8: bool = True) -> None:
    """Of so many rows, by the tile that they get."""
    weight = cuda.prepare(zeros(96, 512), segments(512, shared))
    parts = weight.scale.shape[1]
    rows = cuda.quantize(zeros(count, 512), parts, activations=True)
    cuda.product(rows, weight, zeros(96) if bias else None, replace(cuda.linear_schedule(count, parts), int8=int8))


def hopper_products(
    count: int, shared: bool = True, bias: bool = True, tiles: tuple[HopperSchedule, ...] = HOPPER_SCHEDULES
) -> None:
    """Of so many rows, by tiles of wgmma's; nothing for other GPUs."""
    if torch.cuda.get_device_capability(0)[0] != 9:
        return
    weight = cuda.prepare(zeros(200, 1024), segments(1024, shared))
    held = cuda.quantize(zeros(count, 1024), weight.scale.shape[1], activations=True)
    for schedule in tiles:
        cuda.product(held, weight, zeros(200) if bias else None, schedule, overlaps=True)


def rows(count: int) -> None:
    """Norms of hidden states and of heads, SiLU, GELU and rotation."""
    x, heads = zeros(count, 896), zeros(count, 12 * 128)[:, : 8 * 128].view(count, 8, 128)
    cuda.rms_norm(x, x[0], 1e-6, x)
    cuda.rms_norm(heads, zeros(128), 1e-6)
    cuda.silu_and_mul(zeros(count, 2 * 1216))
    cuda.gelu_and_mul(zeros(count, 2 * 1216))
    cuda.rotate(heads, zeros(count, 128))


def vocabulary(count: int) -> None:
    """Logprobs, probabilities, a soft cap and the draw over a row of logits."""
    logits, numbers = torch.zeros(count, 20_000), torch.zeros(count, dtype=torch.int64)
    cuda.softmax(logits)
    cuda.log_softmax(logits)
    cuda.draw(logits, numbers)
    cuda.draw(logits, numbers, torch.zeros(count))
    cuda.capped(zeros(count, 20_000), 30.0)
    cuda.top_k_top_p(logits, numbers + 50, torch.full((count,), 0.5))


def attention(
    tokens: int, requests: int = 1, heads: Heads = MODEL, window: int | None = None, int8: bool = True,
    soft_cap: float | None = None,
) -> None:  # fmt: skip
    """Of so many new tokens a request, of 300 more keys each."""
    request = Request(heads, 300 + tokens, 1)
    tensors = paged([Chunk(request, 300, 300 + tokens)] * requests)
    call = call_of(tensors, cuda.REDUCTION, scale=0.1, sliding_window=window, logits_soft_cap=soft_cap)
    planner = cuda.ExactPlanner(AttentionShape.of(call), call.query.device, 8, 1000, 8000, int8=int8)
    plan = planner.plan(call.query_start_loc, call.seq_lens, len(call.query), tokens)
    cuda.paged_attention(call, torch.empty_like(call.query), plan)


def batch(count: int) -> None:
    """Everything that a batch of so many tokens launches."""
    grids(count)
    products(count)
    hopper_products(count)
    rows(count)
    vocabulary(count)
    attention(1, min(count, 8))
    attention(count)


KINDS: dict[str, Callable[[], object]] = {
    "grids": lambda: grids(3),
    "glue": lambda: (rows(3), vocabulary(3)),
    "products of few rows": lambda: products(3),
    "decode": lambda: attention(1, 2),
}
"""One variant of every kernel."""
MORE_KINDS: dict[str, Callable[[], object]] = {
    "products of some rows": lambda: products(64),
    "products by wgmma": lambda: [hopper_products(200, shared, shared) for shared in (True, False)],
    "products in one segment": lambda: [products(count, False, False) for count in (3, 64, 600)],
    "products in fp16": lambda: [products(count, shared, int8=False) for count in (3, 600) for shared in (True, False)],
    "prefill": lambda: (attention(200), attention(200, 8)),
    "attention in a window": lambda: (attention(1, 2, window=100), attention(200, window=100)),
    "attention with a soft cap": lambda: (attention(1, 2, soft_cap=50.0), attention(200, window=100, soft_cap=50.0)),
    "attention in fp16": lambda: (attention(1, 2, int8=False), attention(200, int8=False)),
    "attention of other heads": lambda: [
        attention(tokens, heads=Heads(query, kv, size, torch.bfloat16))
        for tokens in (1, 200)
        for query, kv, size in ((4, 4, 64), (8, 1, 256), (6, 2, 80))
    ],
}
"""The others that a launcher may ask for."""
EVERY_KIND = KINDS | MORE_KINDS
