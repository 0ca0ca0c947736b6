"""What an adapter makes of a row follows from the row and the adapter alone."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.assertions import DTYPES, assert_near, assert_same_bits
from tests.ops.lora.cases import RANKS, Layer, layer
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.linear import cpu as linear
from vllm_batch_invariant.ops.lora import LoraReduction, add_adapters, add_expanded, cpu, reference


def differing(of: Layer) -> list[int]:
    """Rows that have other bits alone than among all."""
    among = of()
    return [row for row in range(len(of.y)) if not torch.equal(of(slice(row, row + 1))[0], among[row])]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_near_float64(dtype: torch.dtype) -> None:
    of = layer(dtype)
    assert_near(of(), reference.add_adapters(of.y, of.x, of.a, of.b, of.slots))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    assert differing(layer(dtype)) == []


def test_a_row_has_the_same_bits_in_any_order_and_any_part() -> None:
    of = layer(rows=300)
    whole = of()
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    assert_same_bits(of(order), whole[order], "another order")
    for size in (2, 33, 129):
        parts = [of(slice(start, start + size)) for start in range(0, 300, size)]
        assert_same_bits(torch.cat(parts), whole, f"{size} rows at once")


def test_a_row_has_the_bits_of_the_definition_in_the_order_of_the_reduction() -> None:
    of = layer(rows=12)
    defined = reference.in_order(of.y, of.x, of.a, of.b, of.slots, of.reduction, linear.accumulate)
    assert_same_bits(of(), defined, "definition")


def test_leaves_are_added_in_ascending_order() -> None:
    of = layer(torch.float32, rows=12)
    cut = replace(of.reduction, k_leaf=48)
    out = of.y.clone()
    add_adapters(out, of.x, of.a, of.b, of.slots, cut)
    defined = reference.in_order(of.y, of.x, of.a, of.b, of.slots, cut, linear.accumulate)
    assert_same_bits(out, defined, "leaves of 48")
    assert not torch.equal(out, of())


def test_a_row_has_the_same_bits_with_its_adapter_in_another_slot_of_more() -> None:
    of = layer()
    places = torch.tensor([5, 2, 0, 3])
    moved = []
    for tensors in (of.a, of.b):
        more = [torch.full((7, *one.shape[1:]), torch.nan, dtype=one.dtype) for one in tensors]
        for one, other in zip(tensors, more, strict=True):
            other[places] = one
        moved.append(tuple(more))
    slots = torch.where(of.slots < 0, of.slots, places[of.slots.clamp_min(0)])
    assert_same_bits(Layer(of.y, of.x, *moved, slots.int())(), of(), "other slots, beside NaN")


@pytest.mark.parametrize("room", [128, 320])
def test_bits_do_not_follow_from_the_room_for_ranks(room: int) -> None:
    of = layer()
    assert_same_bits(layer(room=room)(), of(), f"room for rank {room}")
    narrow = [8 if rank < 8 else rank for rank in RANKS]
    for slot, rank in enumerate(narrow):
        own = of.slots == slot
        a = tuple(one[:, :, :rank].contiguous() for one in of.a)
        b = tuple(one[..., :rank].contiguous() for one in of.b)
        assert_same_bits(replace(of, a=a, b=b)(own), of()[own], f"room for rank {rank} alone")


def test_a_row_without_an_adapter_is_not_written() -> None:
    of = layer()
    of.y[of.slots < 0] = -0.0
    alone = of.slots < 0
    assert_same_bits(of()[alone].view(torch.int16), of.y[alone].view(torch.int16), "-0.0")
    none = replace(of, slots=torch.full_like(of.slots, -1))
    assert_same_bits(none().view(torch.int16), of.y.view(torch.int16), "no adapter at all")


def test_a_sum_of_zeros_is_positive_in_any_room() -> None:
    """Products of -0.0 and of zeros that fill a rank: what is added to y is +0.0 wherever the rank ends."""
    for room in (64, 128):
        of = layer(room=room)
        of.x.fill_(-0.0)
        of.y.fill_(-0.0)
        changed = of()[of.slots >= 0]
        assert not changed.signbit().any(), room


def test_rows_any_stride_apart_have_the_same_bits() -> None:
    of = layer()
    wide_y, wide_x = (torch.full((len(one), one.shape[1] + 7), torch.nan, dtype=one.dtype) for one in (of.y, of.x))
    y, x = wide_y[:, : of.y.shape[1]], wide_x[:, 3 : 3 + of.x.shape[1]]
    y.copy_(of.y)
    x.copy_(of.x)
    add_adapters(y, x, of.a, of.b, of.slots, of.reduction)
    assert_same_bits(y, of(), "strided")
    assert wide_y[:, of.y.shape[1] :].isnan().all()


def test_an_expanded_row_has_the_bits_that_it_has_behind_the_first_product() -> None:
    of = layer(slices=(96,))
    u = torch.zeros(len(of.y), of.a[0].shape[2], dtype=of.y.dtype)
    for slot in range(len(RANKS)):
        own = of.slots == slot
        u[own] = cpu._shrink(of.x[own], of.a[0][slot, 0], of.reduction)
    out = of.y.clone()
    add_expanded(out, u, of.b[0], of.slots, of.reduction)
    assert_same_bits(out, of(), "from u on")


def _rows_alone_are_added_in_halves(accumulate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def faulty(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        half = len(matrix) // 2
        if len(x) > 1:
            return accumulate(x, matrix)
        return accumulate(x[:, :half], matrix[:half]) + accumulate(x[:, half:], matrix[half:])

    return faulty


def test_a_product_whose_order_follows_from_the_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "accumulate", _rows_alone_are_added_in_halves(linear.accumulate))
    assert differing(layer(torch.float32))


def test_a_slot_of_no_adapter_that_is_read_from_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """-1 as an index of Python's is the last slot."""

    def faulty(slots: torch.Tensor):
        for slot in slots.unique().tolist():
            yield slot, (slots == slot).nonzero()[:, 0]

    monkeypatch.setattr(cpu, "_by_slot", faulty)
    of = layer()
    assert not torch.equal(of()[of.slots < 0], of.y[of.slots < 0])


def test_leaves_follow_from_k_alone() -> None:
    leaf = [LoraReduction.of_device("cuda", k, torch.bfloat16).k_leaf for k in (64, 8192, 8193, 16384, 28672)]
    assert leaf == [512, 512, 528, 1024, 1792]
    assert LoraReduction.of_device("cpu", 4096, torch.bfloat16).leaves == 1


def test_what_does_not_fit_is_refused() -> None:
    of = layer()
    for wrong in (
        replace(of, slots=of.slots[1:]),
        replace(of, slots=of.slots.float()),
        replace(of, y=of.y[:, 1:]),
        replace(of, a=of.a[:2]),
        replace(of, b=(of.b[0], of.b[1], of.b[2].float())),
        replace(of, a=tuple(one[:, :, :8] for one in of.a)),
    ):
        with pytest.raises(ValueError, match="no adapters of"):
            wrong()
    with pytest.raises(ValueError, match="no expanded adapters of"):
        add_expanded(of.y, of.x, of.b[0], of.slots, of.reduction)
    with pytest.raises(NotCovered, match="float64"):
        LoraReduction.of_device("cpu", 64, torch.float64)
