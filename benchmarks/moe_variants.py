"""Candidate schedules of mixtures of experts, timed product by product: `python -m benchmarks.moe --variants`."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from math import inf
from unittest import mock

import torch

from benchmarks.moe_cases import Inputs, MoeLayer, Weights, ours
from benchmarks.spread import Spread
from vllm_batch_invariant.ops.common.dependent_launch import LaunchSchedule
from vllm_batch_invariant.ops.common.graph_timer import GraphTimer
from vllm_batch_invariant.ops.moe import cuda
from vllm_batch_invariant.ops.moe.cuda import GroupedSchedule, GroupingSchedule, LayerSchedule, WalkSchedule

GATE_UP = (
    *(GroupedSchedule(16, *rest) for rest in (
        (32, 128, 4, 4), (32, 128, 4, 5), (32, 256, 4, 3), (64, 64, 4, 5), (64, 128, 4, 2), (64, 128, 4, 3),
        (64, 128, 4, 5), (64, 256, 4, 2), (128, 64, 4, 3), (128, 64, 4, 5), (128, 128, 8, 3), (64, 128, 4, 3, False),
    )),
    *(GroupedSchedule(32, *rest) for rest in (
        (32, 128, 4, 4), (64, 64, 4, 5), (64, 128, 4, 2), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 5),
        (128, 128, 8, 2), (64, 128, 4, 2, False),
    )),
    *(GroupedSchedule(64, *rest) for rest in (
        (64, 64, 4, 4), (64, 128, 4, 2), (128, 64, 4, 2), (128, 64, 4, 4), (128, 64, 8, 4), (64, 64, 4, 4, False),
    )),
    *(GroupedSchedule(128, *rest) for rest in (
        (64, 64, 4, 3), (64, 64, 8, 4), (128, 64, 8, 3), (128, 64, 8, 4), (64, 128, 8, 3), (128, 64, 8, 4, False),
        (64, 64, 4, 3, True, True), (128, 64, 8, 3, True, True), (128, 64, 8, 4, True, True),
        (128, 64, 8, 4, True, True, True),
    )),
)  # fmt: skip
DOWN = (
    *(GroupedSchedule(16, *rest) for rest in (
        (32, 128, 4, 6), (64, 64, 4, 6), (64, 128, 4, 3), (64, 128, 4, 5), (64, 256, 4, 3), (128, 64, 4, 5),
        (128, 128, 4, 2), (128, 128, 4, 3), (128, 128, 4, 5), (256, 64, 8, 4), (64, 128, 4, 4, False),
    )),
    *(GroupedSchedule(32, *rest) for rest in (
        (64, 128, 4, 4), (128, 64, 4, 5), (128, 128, 4, 2), (128, 128, 4, 3), (256, 64, 8, 3), (256, 128, 4, 2),
        (128, 128, 4, 2, False),
    )),
    *(GroupedSchedule(64, *rest) for rest in (
        (64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 4, 2), (256, 64, 4, 3), (256, 64, 8, 4), (128, 64, 4, 4, False),
    )),
    *(GroupedSchedule(128, *rest) for rest in (
        (128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 5), (128, 128, 8, 3), (256, 64, 8, 3), (256, 64, 8, 4),
        (128, 64, 8, 3, True, True), (256, 64, 8, 3, True, True), (256, 64, 8, 4, True, True),
        (256, 64, 8, 4, True, True, True),
    )),
)  # fmt: skip
"""What is tried of the first and of the second product: ``block_m``, ``block_n``, ``block_k``, warps, stages, TMA,
halves, the persistent kernel.
"""
COMBINE = tuple(WalkSchedule(block) for block in (256, 512, 1024, 2048))
"""What is tried of the sum."""
GROUPING = (
    *(GroupingSchedule(block, min(block, 32), 2048, 8) for block in (16, 32, 64)),
    GroupingSchedule(128, 16, 0),
    GroupingSchedule(256, 32, 0),
)
"""What is tried of the kernel that groups, alone or behind one that counts."""
FEW_PAIRS = 64
"""Up to this many, programs that look for their own pairs are tried."""
_REPLAYS = 5
_SHOWN = 3
_MOST_BLOCKS, _MOST_PLACES = 4, 4
"""Of an expert with its share of the pairs, and of a pair, where a ``block_m`` is worth a try."""


def blocks_tried(pairs: int, experts: int) -> list[int]:
    """The ``block_m`` that are worth a try for so many pairs."""
    share = pairs / experts
    tried = [size for size in (16, 32, 64, 128) if share / _MOST_BLOCKS <= size <= _MOST_PLACES * share]
    return tried or [16 if share <= 16 else 128]


class Candidates:
    """Times candidates for one case; what fails or has other bits is told and left out."""

    def __init__(self, timer: GraphTimer) -> None:
        self.timer = timer
        self.problems = 0

    def best(self, layer: MoeLayer, weights: Weights, inputs: Sequence[Inputs]) -> list[str]:
        """Lines that say what was fastest for these tokens, and what the other kernels take."""
        pairs = len(inputs[0].x) * layer.top_k
        routed = [cuda.route(one.logits, layer.reduction, None) for one in inputs]
        x = [one.x for one in inputs]
        lines = []
        for few, size in product((FEW_PAIRS, 0) if pairs <= FEW_PAIRS else (0,), blocks_tried(pairs, layer.experts)):
            tiles = {
                "gate_up": [one for one in GATE_UP if one.block_m == size],
                "down": [one for one in DOWN if one.block_m == size],
            }
            used = LayerSchedule(tiles["gate_up"][0], tiles["down"][0], few_pairs=few)
            groups = [cuda.group(ids, layer.experts, used) for _, ids in routed]
            hidden = [torch.randn(pairs, layer.intermediate, dtype=layer.dtype, device=one.device) for one in x]
            calls = {
                "gate_up": lambda tile, of, into=groups: cuda.grouped_gemm(
                    x[of], weights.gate_up, None, into[of], pairs, layer.dtype, tile, activation="silu"
                ),
                "down": lambda tile, of, into=groups, hidden=hidden: cuda.grouped_gemm(
                    hidden[of], weights.down, None, into[of], pairs, layer.dtype, tile
                ),
            }
            total = 0.0
            for name, call in calls.items():
                found = sorted(self._times(name, tiles[name], call, len(x)), key=lambda one: one[0])
                if not found:
                    continue
                total += found[0][0]
                text = ", ".join(f"{_short(tile)} {time:.1f}" for time, tile in found[:_SHOWN])
                lines.append(f"  {'few' if few else 'grouped'} {size:3} {name:7} {text}")
            lines.append(f"  {'few' if few else 'grouped'} {size:3} both    {total:.1f}")
            if not few:
                grouping = [[partial(group, how, ids, layer.experts, used) for _, ids in routed] for how in GROUPING]
                samples = self.timer.time(grouping, 10.0, _REPLAYS)
                lines.append(f"  grouped {size:3} group by {_medians(map(_named, GROUPING), samples)}")
        made = torch.zeros_like(x[0]).repeat_interleave(layer.top_k, 0)
        routing = [partial(cuda.route, one.logits, layer.reduction, None) for one in inputs]
        out = torch.empty_like(x[0])
        given = [cuda.Products(made, *one, None) for one in routed]
        ways = [[partial(combine, walk, one, out) for one in given] for walk in COMBINE]
        [routes, *sums] = self.timer.time([routing, *ways], 10.0, _REPLAYS)
        by_block = _medians((str(walk.block) for walk in COMBINE), sums)
        lines.append(f"  route {Spread.of(routes).p50:.1f}, combine by {by_block}")
        layers = [partial(ours().call, layer, weights, one) for one in inputs]
        used = LaunchSchedule.of(x[0].device)
        for how, text in ((used, ""), (LaunchSchedule(False), ", launches do not overlap")):
            with mock.patch.object(LaunchSchedule, "of", partial(_always, how)):
                [times] = self.timer.time([layers], 50.0, _REPLAYS)
            lines.append(f"  layer as it is{text} {Spread.of(times).p50:.1f}")
        return lines

    def _times(
        self, name: str, tiles: Sequence[GroupedSchedule], call: Callable[[GroupedSchedule, int], torch.Tensor], of: int
    ) -> Iterator[tuple[float, GroupedSchedule]]:
        expected = None
        for tile in tiles:
            try:
                found = call(tile, 0)
                expected = found if expected is None else expected
                if not torch.equal(found, expected):
                    self._problem(f"BITS DIFFER: {name} {_short(tile)} from {_short(tiles[0])}")
                    continue
                [samples] = self.timer.time([[partial(call, tile, one) for one in range(of)]], 50.0, _REPLAYS)
            except Exception as error:  # a tile that takes more than a GPU has
                self._problem(f"FAILED: {name} {_short(tile)}: {type(error).__name__}: {str(error)[:200]}")
            else:
                yield Spread.of(samples).p50, tile

    def _problem(self, line: str) -> None:
        self.problems += 1
        print(line, file=sys.stderr, flush=True)


def combine(walk: WalkSchedule, of: cuda.Products, out: torch.Tensor) -> None:
    """The sum by one of :data:`COMBINE`."""
    with mock.patch.object(cuda, "_COMBINING", walk):
        cuda.combine(of, out)


def group(how: GroupingSchedule, ids: torch.Tensor, experts: int, schedule: LayerSchedule) -> cuda.Groups:
    """Pairs by one of :data:`GROUPING`."""
    with mock.patch.object(cuda, "_GROUPING", {inf: how}):
        return cuda.group(ids, experts, schedule)


def _always(how: LaunchSchedule, _: object) -> LaunchSchedule:
    return how


def _medians(names: Iterable[str], samples: Sequence[Sequence[float]]) -> str:
    return ", ".join(f"{name} {Spread.of(times).p50:.1f}" for name, times in zip(names, samples, strict=True))


def _named(how: GroupingSchedule) -> str:
    return f"{how.block}{'' if how.counted_at_once else ' counted before'}"


def _short(tile: GroupedSchedule) -> str:
    shape = f"{tile.block_n}x{tile.block_k} w{tile.num_warps} s{tile.num_stages}"
    how = "" if tile.by_tma else " pointers"
    return f"{shape}{how}{' persistent' if tile.persistent else ' halves' * tile.halves}"
