"""Adapters by the GPU's kernels, in Triton's interpreter, whose products add K as a tensor core does."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from tests import interpreted_dot
from tests.assertions import assert_near, assert_same_bits
from tests.faults.lora import FAULTS, planted
from tests.ops.lora.cases import Layer, layer
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.lora import LoraReduction, cuda, reference

HOPPER = Gpu("a Hopper", 132, 232_448, has_tma=True, l2_bytes=50 << 20, has_wgmma=True)
K = 1100
"""Two leaves, and a part of one."""


@pytest.fixture(autouse=True)
def in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_dot", interpreted_dot.in_steps)
    monkeypatch.setattr(Gpu, "of", lambda _: HOPPER)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: HOPPER.name)


def small(dtype: torch.dtype = torch.float16, rank: int = 16, slices: tuple[int, ...] = (40,), **sizes: int) -> Layer:
    """A layer whose adapters have no more than a rank."""
    of = layer(dtype, slices=slices, **sizes)
    a, b = (tuple(one[:, :, :rank].contiguous() for one in of.a), tuple(one[..., :rank].contiguous() for one in of.b))
    return replace(of, a=a, b=b)


def of_gpu(of: Layer) -> LoraReduction:
    return LoraReduction.of_device("cuda", of.x.shape[1], of.x.dtype)


def made(of: Layer, schedule: cuda.LoraSchedule | None = None, rows: slice = slice(None)) -> torch.Tensor:
    out = of.y[rows].clone()
    cuda.add_adapters(out, of.x[rows], of.a, of.b, of.slots[rows], of_gpu(of), schedule)
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_values_are_near_float64(dtype: torch.dtype) -> None:
    of = small(dtype, rows=6, k=600, slices=(20, 12))
    assert_near(made(of), reference.add_adapters(of.y, of.x, of.a, of.b, of.slots))


TILES = [*dict.fromkeys(one for one, _ in cuda.certified(torch.float16))]


@pytest.mark.parametrize("schedule", TILES, ids=range(len(TILES)))
def test_every_tile_has_the_bits_of_dense_products(schedule: cuda.LoraSchedule) -> None:
    of = small(rank=24, rows=min(schedule.few_rows or 18, 18), k=K, slices=(20,))
    whole = made(of, schedule)
    assert_same_bits(whole, cuda.composed(of.y, of.x, of.a, of.b, of.slots, of_gpu(of)), str(schedule))
    assert_same_bits(made(of, schedule, slice(3, 4)), whole[3:4], "a row alone")
    none = of.slots < 0
    assert_same_bits(whole[none], of.y[none], "rows without an adapter")


def test_rows_that_are_grouped_once_for_all_layers_have_the_same_bits() -> None:
    of = small(rows=20, k=64)
    groups = cuda.RowGroups.empty(24, len(of.a[0]), of.x.dtype, of.x.device)
    for rows in (20, 7):
        groups.set(of.slots[:rows])
        out = of.y.clone()
        cuda.add_adapters(out, of.x, of.a, of.b, groups, of_gpu(of))
        assert_same_bits(out[:rows], made(of)[:rows], f"{rows} rows")
        assert_same_bits(out[rows:], of.y[rows:], "those behind the step's")


def test_an_expanded_row_has_the_bits_that_it_has_behind_the_first_product() -> None:
    of = small(rows=20, k=64)
    schedule = cuda.lora_schedules(torch.float16)[1]
    groups = cuda.grouped(of.slots, len(of.a[0]), schedule)
    u = torch.zeros(20, 16, dtype=torch.float16)
    has_one = of.slots >= 0
    u[has_one] = cuda.shrink(of.x, of.a, groups, of_gpu(of), schedule)[0, has_one].half()
    out = of.y.clone()
    cuda.add_expanded(out, u, of.b[0], of.slots, of_gpu(of))
    assert_same_bits(out, made(of), "from u on")


def test_slots_without_rows_are_not_read() -> None:
    of = small(rows=12, k=64)
    right, unused = made(of), 2
    of.slots[of.slots == unused] = -1
    expected = torch.where((of.slots < 0)[:, None], of.y, right)
    for one in (*of.a, *of.b):
        one[unused] = torch.nan
    assert_same_bits(made(of), expected, "beside NaN")


def test_the_smallest_number_of_blocks_that_is_enough_is_launched() -> None:
    for rows, slots, block_m in ((1, 8, 16), (17, 1, 16), (40, 3, 16), (64, 8, 16), (70, 100, 32)):
        used = min(rows, slots)
        worst = used - 1 + -(-(rows - used + 1) // block_m)  # a row each, and one slot the rest
        assert cuda.most_blocks(rows, slots, block_m) >= worst
        assert cuda.most_blocks(rows, slots, block_m) - worst <= 1


def test_a_tile_that_would_have_another_instruction_is_refused() -> None:
    with pytest.raises(ValueError, match="another instruction"):
        replace(cuda.lora_schedules(torch.float16)[0], block_m=64)


SMALL = torch.float16, K, (12,), 8


def certified(dtype: torch.dtype, k: int, columns: tuple[int, ...], rank: int) -> int:
    return cuda.certify(k, columns, rank, dtype, torch.device("cpu"))


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that the interpreter has time for."""
    monkeypatch.setattr(cuda, "_CERTIFIED_ROWS", (17,))


@pytest.mark.usefixtures("few_rows")
def test_the_certificate_passes() -> None:
    assert certified(*SMALL) > 500


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_certificate_finds_a_planted_fault(fault: str) -> None:
    with planted(fault), pytest.raises(NotCovered, match="has other bits"):
        certified(*SMALL)


def test_a_fault_in_the_steps_of_a_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor core of which large tiles add 32 elements at once."""

    def by_size(right: Callable[..., object]) -> Callable[..., object]:
        def faulty(self: object, a: object, *rest: object) -> object:
            with monkeypatch.context() as patch:
                patch.setattr(interpreted_dot, "STEP", 32 if a.data.shape[0] > 16 else 16)
                return right(self, a, *rest)

        return faulty

    monkeypatch.setattr(InterpreterBuilder, "create_dot", by_size(interpreted_dot.in_steps))
    of = small(rows=18, k=K)
    few, many = cuda.lora_schedules(torch.float16)[1], cuda.lora_schedules(torch.float16)[3]
    sums = [cuda.shrink(of.x, of.a, cuda.grouped(of.slots, 4, one), of_gpu(of), one) for one in (few, many)]
    own = of.slots >= 0
    assert not torch.equal(sums[0][:, own], sums[1][:, own])
