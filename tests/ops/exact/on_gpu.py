"""Every launcher of exact arithmetic on a GPU beside the CPU's implementation, which has the bits of the definition.

Each case is a function that yields (what, found, right): tensors that must be the same bits, on any device.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from tests.ops.exact.cases import rows_of_all_kinds
from vllm_batch_invariant.ops.attention import AttentionReduction, paged_attention
from vllm_batch_invariant.ops.exact import cpu, cuda, definition, known_answers, sm90_linear
from vllm_batch_invariant.ops.exact.schedule import HOPPER_SCHEDULES
from vllm_batch_invariant.verify.check.operations import Chunk, Heads, Request, paged

Found = tuple[str, torch.Tensor, torch.Tensor]
GPU = "cuda"
LAYERS = (
    *((4096, 1024, False), (1024, 2048, True), (6144, 1024, False), (1024, 3072, True), (5000, 1024, False)),
    *((96, 200, False), (72, 512, True), (40, 65_535, False), (256, 12_288, True), (896, 896, True)),
)
"""(N, K, whether workers may share K): of Qwen3-0.6B, and borders."""
ROWS = (1, 2, 7, 16, 17, 32, 33, 100, 513, 600)
"""Of a product: both sides of every change of tile."""


def draws(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers in bf16, in the memory of the CPU."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def bf16(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16()


def differing(found: torch.Tensor, right: torch.Tensor) -> int:
    """How many elements have other bits; NaN for NaN is none. All of them where shapes or dtypes differ."""
    found, right = found.cpu(), right.cpu()
    if found.shape != right.shape or found.dtype != right.dtype:
        return max(right.numel(), 1)
    if not right.is_floating_point():
        return int((found != right).sum())
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = [one.contiguous().view(kinds[one.element_size()]) for one in (found, right)]
    return int(((bits[0] != bits[1]) & ~(found.isnan() & right.isnan())).sum())


def known() -> Iterator[Found]:
    """Operands that every machine has."""
    on_gpu = lambda x: bf16(x).to(GPU)  # noqa: E731 - what the function asks for
    for what, found, right in known_answers.comparisons(cuda, on_gpu):
        yield what, torch.from_numpy(found.copy()), torch.from_numpy(np.ascontiguousarray(right))


def grids() -> Iterator[Found]:
    """Weights and activations on their grids."""
    for rows, k, parts in ((18, 512, 1), (18, 512, 8), (18, 4096, 8), (18, 1001, 1), (1000, 1024, 1), (18, 12_288, 8)):
        x = bf16(np.resize(definition.bf16(rows_of_all_kinds(k)), (rows, k)))
        held, right = cuda.prepare(x.to(GPU), parts), cpu.prepare(x, parts)
        integers = held.digits[0].short() * 256 + held.digits[1].short()
        yield f"weight, {rows} x {k} in {parts}", integers.view(rows, parts, -1), right.integers
        yield f"its scales, {rows} x {k} in {parts}", held.scale, right.scale


def products(n: int, k: int, shared: bool) -> Iterator[Found]:
    """A linear layer: at the bounds of the integers in every tile, of rows of all kinds, and with third digits."""
    weight, bias, parts = draws(n, k, seed=n), draws(n, seed=50), definition.segments(k, shared)
    on_cpu, on_gpu = cpu.prepare(weight, parts), cuda.prepare(weight.to(GPU), parts)
    compared = cuda.certify(min(n, 1024), k, shared, torch.device(GPU))
    yield "the certificate", torch.tensor(compared > 0), torch.tensor(True)
    whole = draws(max(ROWS), k, seed=k)
    whole[:40] = bf16(known_answers.with_outliers(n, 40, k))
    whole[40::9, ::7] *= 300
    right = cpu.linear(whole, on_cpu, bias)
    for m in ROWS:
        yield f"{m} rows in {parts} segments", cuda.linear(whole[:m].to(GPU), on_gpu, bias.to(GPU)), right[:m]
    yield "without a bias", cuda.linear(whole[:33].to(GPU), on_gpu), cpu.linear(whole[:33], on_cpu)
    rows = cuda.quantize(whole[:65].to(GPU), parts, activations=True)
    for tile in HOPPER_SCHEDULES if sm90_linear.covers(k, parts) else ():
        found = cuda.product(rows, on_gpu, bias.to(GPU), tile)
        yield f"by {tile}", found, right[:65]
    for schedule in cuda.linear_schedules(parts):
        for int8 in (True, False)[: 1 + (k <= 1024)]:
            found = cuda.product(rows, on_gpu, bias.to(GPU), replace(schedule, int8=int8))
            yield f"by {schedule.block_m} x {schedule.block_n}, int8={int8}", found, right[:65]


def norms() -> Iterator[Found]:
    """Norms of hidden states with residuals and of heads that are parts of wider rows."""
    for length in (64, 80, 128, 896, 1024, 4096, 5001, 16_384):
        x = bf16(definition.bf16(rows_of_all_kinds(length)))
        residual, weight = draws(18, length, seed=1), draws(length, seed=2)
        for eps in (1e-6, 1e-5):
            found = cuda.rms_norm(x.to(GPU), weight.to(GPU), eps, residual.to(GPU))
            right = cpu.rms_norm(x, weight, eps, residual)
            yield f"{length} with a residual, {eps}", found[0], right[0]
            yield f"{length}, the residual, {eps}", found[1], right[1]
        yield f"{length}", cuda.rms_norm(x.to(GPU), weight.to(GPU), 1e-6), cpu.rms_norm(x, weight, 1e-6)
        wide = weight.float() + 1
        yield f"{length}, 1 + weight", cuda.rms_norm(x.to(GPU), wide.to(GPU), 1e-6), cpu.rms_norm(x, wide, 1e-6)
    for size in (64, 128, 256):
        heads = draws(700, 24 * size, seed=3)[:, : 16 * size].view(700, 16, size)
        on_gpu = draws(700, 24 * size, seed=3).to(GPU)[:, : 16 * size].view(700, 16, size)
        weight = draws(size, seed=4)
        yield f"heads of {size}", cuda.rms_norm(on_gpu, weight.to(GPU), 1e-6), cpu.rms_norm(heads, weight, 1e-6)


def elements() -> Iterator[Found]:
    """What computes an element from one, two or four others: every bf16 number, and pairs of all magnitudes."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    pairs = torch.stack((every, draws(2**16, seed=5))).reshape(2, 64, 1024).permute(1, 0, 2).reshape(64, 2048)
    for x in (pairs, draws(33, 2 * 3072, seed=8, scale=8), draws(3, 2 * 1001, seed=9)):
        yield f"SiLU, {x.shape[1]}", cuda.silu_and_mul(x.to(GPU)), cpu.silu_and_mul(x)
        yield f"GELU, {x.shape[1]}", cuda.gelu_and_mul(x.to(GPU)), cpu.gelu_and_mul(x)
    for cap in (30.0, 50.0, 3.7):
        yield f"soft cap {cap}", cuda.capped(every.view(8, -1).to(GPU), cap), cpu.capped(every.view(8, -1), cap)
    for heads, size in ((16, 64), (8, 128), (5, 80), (1, 256)):
        table = bf16(definition.rotary_table(3000, definition.turns(size, 1e6)))
        for tokens in (1, 3000):
            wide = draws(tokens, (heads + 3) * size, seed=6)
            x, on_gpu = (one[:, size : (heads + 1) * size].view(tokens, heads, size) for one in (wide, wide.to(GPU)))
            right = cpu.rotate(x, table[:tokens])
            yield f"rotation, {heads} x {size}, {tokens}", cuda.rotate(on_gpu, table[:tokens].to(GPU)), right


def logits(rows: int, length: int) -> torch.Tensor:
    """With ties, with tokens that cannot be drawn, and with values far apart."""
    x = draws(rows, length, seed=7, scale=4).float()
    x[0] = x[0].round()
    x[1 % rows, 1:] = -torch.inf
    x[2 % rows] *= 30
    x[3 % rows, ::2] = -torch.inf
    return x


def vocabularies() -> Iterator[Found]:
    """Logprobs, filters, and draws over rows of logits."""
    for rows, length in ((5, 5), (6, 4096), (40, 20_001), (6, 151_936)):
        x = logits(rows, length)
        on_gpu = x.to(GPU)
        yield f"softmax, {length}", cuda.softmax(on_gpu), cpu.softmax(x)
        yield f"log_softmax, {length}", cuda.log_softmax(on_gpu), cpu.log_softmax(x)
        halves = x.bfloat16()
        found = cuda.log_softmax(halves.to(GPU), dtype=torch.float32)
        yield f"log_softmax of bf16, {length}", found, cpu.log_softmax(halves, dtype=torch.float32)
        k = torch.arange(rows) * length // (2 * rows) % 60 + 1
        p = torch.linspace(0.1, 1, rows)
        for ks, ps in ((k, p), (k, None), (None, p)):
            right = cpu.top_k_top_p(x.clone(), ks, ps)
            filters = (one if one is None else one.to(GPU) for one in (ks, ps))
            yield f"top-k, top-p, {length}", cuda.top_k_top_p(on_gpu.clone(), *filters), right
        keys = torch.arange(rows) * 7919 - 5
        yield f"draws, {length}", cuda.draw(on_gpu, keys.to(GPU)), cpu.draw(x, keys)
        temperatures = (torch.arange(rows) % 3).float() / 2
        right = torch.where(temperatures == 0, x.argmax(-1), cpu.draw(x, keys))
        yield f"draws beside greedy, {length}", cuda.draw(on_gpu, keys.to(GPU), temperatures.to(GPU)), right
        temperatures = torch.linspace(0, 1.7, rows)
        right = torch.from_numpy(x.numpy() / np.where(temperatures == 0, np.float32(1), temperatures)[:, None])
        yield f"temperature, {length}", cuda.heat(on_gpu.clone(), temperatures.to(GPU)), right
        right = np.stack([definition.min_p(*of) for of in zip(x.numpy(), p.numpy() / 2, strict=True)])
        yield f"min-p, {length}", cuda.min_p(on_gpu.clone(), p.to(GPU) / 2), torch.from_numpy(right)
        yield from penalties(x)


def penalties(x: torch.Tensor) -> Iterator[Found]:
    draw = np.random.default_rng(3)
    in_prompt, counts = draw.random(x.shape) < 0.2, draw.integers(-9, 4, x.shape).clip(0)
    asked = np.resize(np.array([[1.3, 0, 0], [1, 0.7, 0], [0.8, -0.3, 0.9], [1.1, 0.1, 1.7]], np.float32), (len(x), 3))
    rows = zip(x.numpy(), in_prompt, counts, asked, strict=True)
    right = np.stack([definition.penalised(row, seen, often, *map(float, of)) for row, seen, often, of in rows])
    on_gpu = (torch.from_numpy(one).to(GPU) for one in (x.numpy().copy(), in_prompt, counts))
    found = cuda.penalise(*on_gpu, *torch.from_numpy(asked).to(GPU).unbind(1))
    yield f"penalties, {x.shape[1]}", found, torch.from_numpy(right)


HEADS = [Heads(query, kv, size, torch.bfloat16) for query, kv, size in ((16, 8, 128), (14, 2, 64), (8, 1, 256))]


def newest(heads: Heads, length: int, count: int, seed: int) -> Chunk:
    request = Request(heads, length, seed)
    draw = torch.Generator().manual_seed(seed)
    request.key[0] *= 6
    request.value *= 2.0 ** torch.randint(-20, 20, (length, 1, 1), generator=draw)
    request.key[3::17] = request.key[min(3, length - 1)]
    request.value[7::23] = 0
    return Chunk(request, length - count, length)


def attentions(heads: Heads) -> Iterator[Found]:
    """Of steps of decode, of prefill and of both, with pages of 16 and, for layers without options, of 64 keys."""
    reduction = AttentionReduction.of_device("cpu", "exact")
    steps = {
        "one token": [newest(heads, 1, 1, 1)],
        "decode": [newest(heads, length, 1, length) for length in (1, 64, 65, 255, 256, 257, 300)],
        "long decode": [newest(heads, 2300, 1, 9)],
        "prefill": [newest(heads, 400, 400, 2)],
        "a chunk": [newest(heads, 700, 129, 3)],
        "mixed": [newest(heads, 90, 40, 4), newest(heads, 600, 5, 5), newest(heads, 300, 1, 6)],
    }
    options = {"": {}, ", window": {"sliding_window": 100}, ", soft cap": {"logits_soft_cap": 50.0}}
    for (name, chunks), (kind, option) in ((step, one) for step in steps.items() for one in options.items()):
        for page in (16, 64)[: 1 + (not option)]:
            tensors = paged(chunks, page, 0, 7.0)
            call = {"scale": heads.size**-0.5, "reduction": reduction, "implementation": "exact"} | option
            right = paged_attention(*tensors, **call)
            query, keys, values, *rest = (one.to(GPU) for one in tensors)
            caches = torch.cat((keys, values), -1).split(heads.size, -1)  # as in an engine
            found = paged_attention(query, *caches, *rest, **call)
            yield f"{name}{kind}, pages of {page}", found, right


CASES: dict[str, Callable[[], Iterator[Found]]] = {
    "known answers": known,
    "grids": grids,
    "norms": norms,
    "elements": elements,
    "vocabularies": vocabularies,
} | {
    **{f"attention, {heads.query} heads of {heads.size}": partial(attentions, heads) for heads in HEADS},
    **{f"products, {n} x {k}": partial(products, n, k, shared) for n, k, shared in LAYERS},
}
"""By name."""
