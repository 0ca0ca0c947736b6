"""One binary serves every batch, and no grid is larger than the cores that the device reports."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton

from tests.ascend.offline.driver import CHIPS
from vllm_batch_invariant.ascend.ops import linear, norm, reduce, reductions, softmax

ROWS = (1, 2, 3, 15, 16, 17, 64, 100, 4096)
SIDE = 48
WEIGHT, BIAS = torch.ones(SIDE, SIDE, dtype=torch.bfloat16), torch.ones(SIDE, dtype=torch.bfloat16)
BATCHED = torch.ones(4096, SIDE, 3, dtype=torch.bfloat16)

CALLS: dict[str, tuple[int, Callable[[torch.Tensor], object]]] = {
    "sum": (1, lambda x: reduce.sum(x, -1)),
    "mean": (1, lambda x: reduce.mean(x, -1)),
    "mean over a middle axis": (1, lambda x: reduce.mean(x[:, :, None].expand(-1, -1, 3), 1)),
    "softmax": (1, lambda x: softmax.softmax(x, -1)),
    "log_softmax to fp32": (1, lambda x: softmax.log_softmax(x, -1, dtype=torch.float32)),
    "softmax_backward": (1, lambda x: softmax.softmax_backward(x, x, -1, x.dtype)),
    "log_softmax_backward": (1, lambda x: softmax.log_softmax_backward(x, x, -1, x.dtype)),
    "rms_norm": (1, lambda x: norm.rms_norm(x, BIAS, 1e-6, None, None)),
    "rms_norm with residual": (1, lambda x: norm.rms_norm(x, BIAS, 1e-6, x, 16)),
    "mm": (1, lambda x: linear.mm(x, WEIGHT.t())),
    "mm by rows": (1, lambda x: linear.mm(x, WEIGHT)),
    "mm with bias": (2, lambda x: linear.mm(x, WEIGHT.t(), BIAS)),
    "accumulate": (1, lambda x: linear.accumulate(x, WEIGHT)),
    "bmm of as many rows": (1, lambda x: linear.bmm(x[None], WEIGHT[None])),
    "bmm of as many entries": (1, lambda x: linear.bmm(x[:, None], BATCHED[: len(x)])),
}
"""By name: how many binaries a call needs, and the call with x: [rows, SIDE] bf16."""


def batches() -> list[torch.Tensor]:
    """[rows, SIDE] of every number of rows, each also where addresses are not multiples of 16."""
    rows = [torch.ones(count, SIDE, dtype=torch.bfloat16) for count in ROWS]
    shifted = [torch.ones(count * SIDE + 1, dtype=torch.bfloat16)[1:].view(count, SIDE) for count in ROWS]
    assert all(x.data_ptr() % 16 == 0 for x in rows)
    assert all(x.data_ptr() % 16 for x in shifted)
    return [x for pair in zip(rows, shifted, strict=True) for x in pair]


@pytest.mark.parametrize("name", CALLS)
def test_one_binary_serves_every_number_of_rows(name, device):
    binaries, call = CALLS[name]
    for x in batches():
        call(x)
    assert len(device.launches) == binaries * 2 * len(ROWS)
    assert len(device.variants()) == binaries, sorted(map(str, device.variants()))


@pytest.mark.parametrize("chip", CHIPS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_grid_is_as_large_as_the_cores_and_the_work_allow(name, chip, device):
    device.chip = chip
    for x in batches():
        device.launches.clear()
        CALLS[name][1](x)
        for launch in device.launches:
            cores = chip.cube if launch.variant.kernel == "_gemm_kernel" else chip.vector
            work = len(x) * 3 if "axis" in name else len(x)
            if launch.variant.kernel == "_gemm_kernel" and "entries" not in name:
                work = triton.cdiv(len(x), 128)
            assert launch.grid == (min(work, cores), 1, 1)


def test_70_000_rows_need_no_larger_grid(device):
    x = torch.ones(70_000, SIDE, dtype=torch.bfloat16)
    for _, call in (CALLS[name] for name in ("mean", "softmax", "rms_norm", "mm with bias")):
        call(x)
    assert {launch.grid for launch in device.launches} == {(40, 1, 1), (20, 1, 1)}


def test_row_lengths_of_one_block_share_a_binary(device):
    for length in (1, 3, 16, 100, 128):
        reduce.mean(torch.ones(5, length), -1)
    assert len(device.variants()) == 1


def count_variants(call: Callable[[torch.Tensor], object], device) -> int:
    device.launches.clear()
    for x in batches():
        call(x)
    return len(device.variants())


def test_a_kernel_that_specialises_its_counts_is_seen(device, monkeypatch):
    pointers = ["x_ptr", "sums_ptr"]
    careless = triton.jit(do_not_specialize_on_alignment=pointers)(reduce._sum_kernel.fn)
    monkeypatch.setattr(reduce, "_sum_kernel", careless)
    assert count_variants(CALLS["mean"][1], device) == 3


def test_a_kernel_that_specialises_its_pointers_is_seen(device, monkeypatch):
    careless = triton.jit(do_not_specialize=["num_items", "length", "num_chunks", "divisor"])(reduce._sum_kernel.fn)
    monkeypatch.setattr(reduce, "_sum_kernel", careless)
    assert count_variants(CALLS["mean"][1], device) == 2


def test_a_tile_that_follows_the_number_of_rows_is_seen(device, monkeypatch):
    def call(x):
        other = replace(known, block_m=16 if len(x) <= 16 else 128)
        monkeypatch.setattr(reductions, "linear", lambda *_: other)
        return linear.mm(x, WEIGHT)

    known = reductions.linear(SIDE, SIDE, torch.bfloat16)

    assert count_variants(call, device) == 2
