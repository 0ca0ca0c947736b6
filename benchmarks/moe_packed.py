"""Tiles of experts in four bits on a Hopper: their bits against dense layers of the matrices, and their times, product
by product; what `python -m benchmarks.moe` prints of them is what the schedules are chosen by.
"""

import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch

from benchmarks.moe_cases import Inputs, MoeLayer, Weights
from benchmarks.spread import Spread
from vllm_batch_invariant.ops.common.compile_errors import reason
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.common.graph_timer import GraphTimer
from vllm_batch_invariant.ops.formats import Format
from vllm_batch_invariant.ops.linear import triton_gemm
from vllm_batch_invariant.ops.moe import StoredExperts, cuda
from vllm_batch_invariant.ops.moe.cuda import GroupedSchedule, LayerSchedule

TRIED = {
    8: (
        (64, 128, 8, 3, 1),
        (64, 128, 8, 3, 2),
        (64, 128, 8, 3, 4),
        (128, 128, 6, 2, 1),
        (128, 128, 6, 2, 2),
        (256, 128, 6, 1, 2),
        (256, 128, 6, 1, 4),
    ),
    16: (
        (64, 128, 8, 3, 2),
        (128, 128, 6, 2, 1),
        (128, 128, 6, 2, 2),
        (128, 128, 8, 1, 4),
        (256, 128, 6, 1, 2),
        (256, 128, 6, 1, 4),
    ),
    32: ((128, 128, 5, 2, 1), (128, 128, 8, 1, 2), (256, 128, 8, 1, 1)),
    64: ((128, 128, 4, 2, 1), (128, 128, 8, 1, 1), (128, 128, 8, 1, 2), (256, 128, 6, 1, 1)),
    128: ((128, 128, 5, 1, 1),),
}
"""By pairs of a tile: rows of the weight, elements of K in a step, stages, programs of a multiprocessor, partitions
that copy.
"""
BLOCKS = {8: (8,), 16: (8, 16), 64: (16, 32), 256: (32, 64), 2048: (64, 128)}
"""Pairs of a tile that are timed, by tokens up to which."""
SMALL = (6, 4, 208, 320)
"""Experts, those of a token, columns and elements of K: a part of a tile, and half of a step."""
COMPARED = (1, 3, 8, 33, 130)
_REPLAYS = 5
_PROCESSES = 12


def tile_of(
    block_m: int, rows: int, block_k: int, stages: int, ctas: int, copiers: int, gated: bool
) -> GroupedSchedule:
    columns = rows // 2 if gated else rows
    return GroupedSchedule(block_m, columns, block_k, rows // 16, stages, packed_ctas=ctas, copiers=copiers)


def tiles(gated: bool, blocks: Sequence[int] = tuple(TRIED)) -> list[GroupedSchedule]:
    """Those that are tried of a product, and those that serve."""
    tried = [tile_of(size, *rest, gated) for size in blocks for rest in TRIED[size]]
    serving = [one.gate_up if gated else one.down for one in cuda.layer_schedules(torch.bfloat16, Gpu.of(0), True)]
    return list(dict.fromkeys([*tried, *(one for one in serving if one.block_m in blocks)]))


def random_experts(form: Format, experts: int, n: int, k: int) -> StoredExperts:
    """Of random codes; scales near one, and of MXFP4 some of every size."""
    generator = torch.Generator("cuda").manual_seed(n + k)
    like = form.stored(torch.ones(2, k, dtype=torch.bfloat16, device="cuda"))
    made: list[torch.Tensor] = []
    for number, one in enumerate(like):
        shape = (experts, n, *one.shape[1:])
        if one.dtype.is_floating_point:
            drawn = torch.rand(shape, generator=generator, device="cuda").to(one.dtype) / 64
        elif number == 1:
            drawn = torch.randint(118, 126, shape, generator=generator, dtype=one.dtype, device="cuda")
            drawn[0, ::3] = torch.randint(0, 120, drawn[0, ::3].shape, generator=generator, device="cuda")
            drawn[1, ::5] = torch.randint(126, 131, drawn[1, ::5].shape, generator=generator, device="cuda")
        else:
            low, high = (-(2**31), 2**31) if one.dtype == torch.int32 else (0, 256 if number == 0 else 16)
            drawn = torch.randint(low, high, shape, generator=generator, dtype=one.dtype, device="cuda")
        made.append(drawn)
    return StoredExperts(form, tuple(made), torch.bfloat16)


def routings(tokens: int, experts: int, top_k: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Every expert alike, some without tokens, and one that every token has."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    scores = torch.rand(tokens, experts, generator=generator, device="cuda")
    yield "uniform", scores.topk(top_k, 1).indices
    scores[:, experts - 1] = -1
    scores[:, 0] = 2
    yield "one has all, one none", scores.topk(top_k, 1).indices.contiguous()


class Case:
    """A small product and its tokens, with what a dense layer of the matrix makes of them."""

    def __init__(self, activation: str, experts: StoredExperts, ids: torch.Tensor) -> None:
        generator = torch.Generator("cuda").manual_seed(7)
        rows, k = experts.shape[1:]
        self.experts, self.ids, self.activation = experts, ids, activation
        self.pairs = ids.numel()
        self.of_row = ids.shape[1] if activation else 1  # pairs of a row of x, as in a layer
        self.x = torch.randn(self.pairs // self.of_row, k, generator=generator, device="cuda").bfloat16()
        self.bias = torch.randn(len(experts), rows, generator=generator, device="cuda").bfloat16()

    def found(self, tile: GroupedSchedule) -> torch.Tensor:
        groups = cuda.group(self.ids, len(self.experts), LayerSchedule(tile, tile))
        given = self.x, self.experts, self.bias, groups, self.pairs, torch.bfloat16, tile
        return cuda.grouped_gemm(*given, activation=self.activation)

    def expected(self) -> torch.Tensor:
        rows = self.experts.shape[1]
        made = self.x.new_empty(self.pairs, rows // 2 if self.activation else rows)
        for expert, matrix in enumerate(self.experts):
            pairs = (self.ids.flatten() == expert).nonzero().squeeze(1)
            if len(pairs):
                dense = triton_gemm.accumulate(self.x[pairs // self.of_row], matrix.t())
                dense = (dense + self.bias[expert].float()).bfloat16()
                made[pairs] = cuda._activated(dense, self.activation) if self.activation else dense
        return made


def _cases(form: Format, activation: str, counts: Sequence[int] = COMPARED) -> Iterator[tuple[str, Case]]:
    experts, top_k, n, k = SMALL
    stored = random_experts(form, experts, 2 * n if activation else n, k)
    for tokens in counts:
        for name, ids in routings(tokens, experts, top_k):
            yield f"{tokens} tokens, {name}", Case(activation, stored, ids)


def _compile(tile: GroupedSchedule, form: Format, activation: str) -> None:
    """In a process of its own, for the others to find."""
    for _, case in _cases(form, activation, (3,)):
        case.found(tile)


class PackedTiles:
    """Compares and times tiles; what is wrong is told."""

    def __init__(self, timer: GraphTimer) -> None:
        self.timer = timer
        self.problems = 0
        self.right: set[tuple[str, GroupedSchedule]] = set()

    def compare(self, layer: MoeLayer) -> None:
        """Every tile with dense layers."""
        assert layer.form is not None
        form, activation, compared = layer.form, layer.reduction.activation, 0
        products = [(gate, one) for gate in (activation, "") for one in tiles(bool(gate))]
        with ProcessPoolExecutor(_PROCESSES, multiprocessing.get_context("spawn")) as pool:
            compiled = [pool.submit(_compile, one, form, gate) for gate, one in products]
        for (gate, one), outcome in zip(products, compiled, strict=True):
            if (error := outcome.exception()) is not None:
                self._problem(f"FAILED: {gate or 'down'} {short(one)}: {reason(error)[:300]}")
        for gate in (activation, ""):
            for name, case in _cases(form, gate):
                expected = case.expected()
                for one in tiles(bool(gate)):
                    try:
                        found = case.found(one)
                    except Exception as error:
                        self._problem(f"FAILED: {gate or 'down'} {short(one)}: {reason(error)[:300]}")
                        continue
                    compared += found.numel()
                    if torch.equal(found, expected):
                        self.right.add((gate, one))
                    else:
                        differ = (found != expected).float().mean().item()
                        self._problem(f"BITS DIFFER: {gate or 'down'} {short(one)}, {name}: {differ:.3%}")
        print(f"tiles of {form.name}: {len(products)}, {compared} elements compared", flush=True)

    def times(self, layer: MoeLayer, weights: Weights, inputs: Sequence[Inputs]) -> list[str]:
        """Lines with the times of both products by every tile, the fastest first."""
        tokens = len(inputs[0].x)
        blocks = next((sizes for most, sizes in BLOCKS.items() if tokens <= most), (128,))
        pairs = tokens * layer.top_k
        routed = [cuda.route(one.logits, layer.reduction, None)[1] for one in inputs]
        hidden = [torch.randn(pairs, layer.intermediate, dtype=layer.dtype, device="cuda") for _ in inputs]
        lines = []
        for name, gate in (("gate_up", layer.reduction.activation), ("down", "")):
            found = []
            for tile in tiles(bool(gate), blocks):
                groups = [cuda.group(ids, layer.experts, LayerSchedule(tile, tile)) for ids in routed]
                x, weight, bias = (
                    ([one.x for one in inputs], weights.gate_up, weights.gate_up_bias)
                    if gate
                    else (hidden, weights.down, weights.down_bias)
                )
                calls: list[Any] = [
                    partial(
                        cuda.grouped_gemm, *given, pairs=pairs, dtype=layer.dtype, schedule=tile, activation=gate
                    )
                    for given in ((x[of], weight, bias, groups[of]) for of in range(len(inputs)))
                ]  # fmt: skip
                try:
                    [samples] = self.timer.time([calls], 50.0, _REPLAYS)
                except Exception as error:
                    self._problem(f"FAILED: {name} {short(tile)}: {reason(error)[:300]}")
                else:
                    found.append((Spread.of(samples).p50, tile))
            texts = [f"{short(tile)} {time:.1f}" for time, tile in sorted(found, key=lambda one: one[0])]
            lines.append(f"  {name:7} {', '.join(texts)}")
        return lines

    def _problem(self, line: str) -> None:
        self.problems += 1
        print(line, file=sys.stderr, flush=True)


def short(tile: GroupedSchedule) -> str:
    """Pairs, rows, elements of K, stages, programs of a multiprocessor and partitions that copy."""
    return f"{tile.block_m}/{tile.rows}x{tile.block_k}/{tile.num_stages}/{tile.packed_ctas}/{tile.copiers}"
