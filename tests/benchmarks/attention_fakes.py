"""Small steps, providers that keep their promise, break it or fail, and a timer without a GPU."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from benchmarks.attention_batch import Batch
from benchmarks.attention_cases import Case, Request, Shape
from benchmarks.timing import Timing
from vllm_batch_invariant.ops.attention import AttentionReduction, paged_attention
from vllm_batch_invariant.ops.common.graph_timer import Calls

SMALL = Shape("small", 4, 2, 16)
DECODE = Case(SMALL, "decode", (Request(1, 64),) * 3)
PREFILL = Case(SMALL, "prefill", (Request(40, 40),))
CHUNK = Case(SMALL, "chunk", (Request(8, 64),))
WINDOW = Case(replace(SMALL, sinks=True), "chunk", (Request(8, 64), Request(30, 30)), window=20)
TOWER = Case(replace(SMALL, encodes=True), "encode", (Request(40, 40), Request(17, 17)))
MIXED = Case(SMALL, "mixed", (Request(20, 20), Request(1, 48), Request(1, 33)))


def exact(batch: Batch, out: torch.Tensor) -> None:
    """By the definition; PyTorch's products may give a row other bits among other rows."""
    for place, rows in enumerate(batch.rows):
        one = batch.pick([place])
        caches = one.keys.transpose(1, 2), one.values.transpose(1, 2)
        out[rows] = paged_attention(
            one.query, *caches, one.table, one.seq_lens, one.query_start_loc,
            scale=batch.scale, reduction=AttentionReduction(16), implementation="reference", **batch.layer.added,
        )  # fmt: skip


def row_by_row(batch: Batch, out: torch.Tensor) -> None:
    """Each row alone, so that its bits follow from nothing else."""
    for place, rows in enumerate(batch.rows):
        cache = batch.cache[batch.pages(place)].flatten(0, 1).float()
        first = batch.requests[place].context - batch.requests[place].tokens
        for offset, row in enumerate(range(rows.start, rows.stop)):
            visible = cache[: first + offset + 1].repeat_interleave(batch.heads // batch.kv_heads, dim=1)
            keys, values = visible.split(batch.head_size, dim=-1)
            weights = torch.softmax((keys * batch.query[row].float()).sum(-1) * batch.scale, dim=0)
            out[row] = (weights[..., None] * values).sum(0)


def refusing(batch: Batch, out: torch.Tensor) -> None:
    if batch.most_tokens == 1:
        raise RuntimeError("no such tile")
    exact(batch, out)


def wrong(batch: Batch, out: torch.Tensor) -> None:
    exact(batch, out)
    out.mul_(1.125)


def lazy(batch: Batch, out: torch.Tensor) -> None:
    """Leaves the last row as it was."""
    before = out[-1].clone()
    exact(batch, out)
    out[-1] = before


class SteadyTimer:
    """Calls everything once; every way takes the next of 1, 2, 3, ... microseconds."""

    def __init__(self, *without_graph: str) -> None:
        self.without_graph = without_graph
        self.calls: list[int] = []

    def time(self, ways: Mapping[str, Calls], expected_microseconds: float, samples: int) -> dict[str, Timing]:
        for calls in ways.values():
            self.calls.append(len(calls))
            for call in calls:
                call()
        return {
            name: Timing([way + 0.5, way + 1, way + 1.5], in_graph=name not in self.without_graph)
            for way, name in enumerate(ways)
        }
