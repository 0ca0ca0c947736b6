"""The sum over ranks adds rank after rank, wherever an element lies."""

import pytest
import torch

from tests.assertions import assert_near, assert_same_bits
from tests.ops.conftest import Device
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.all_reduce import add_ranks, cpu
from vllm_batch_invariant.ops.all_reduce.reference import add_ranks as reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
RANKS = (1, 2, 3, 4, 8)
HIDDEN = 77
"""No whole number of vectors."""


def partials(ranks: int, rows: int, dtype: torch.dtype, large: float = 0.0) -> torch.Tensor:
    """[ranks, rows, HIDDEN]; the first and the last rank's nearly cancel, so that another order gives other bits."""
    made = torch.randn(ranks, rows, HIDDEN, generator=torch.Generator().manual_seed(ranks)).to(dtype)
    made[0] += large
    made[-1] -= large
    return made


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("ranks", RANKS)
def test_it_is_near_the_reference(ranks: int, dtype: torch.dtype) -> None:
    held = partials(ranks, 40, dtype)
    assert_near(add_ranks(held), reference(held))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_threads(ranks: int, dtype: torch.dtype) -> None:
    held = partials(ranks, 1000, dtype)
    whole = add_ranks(held)
    for rows in (slice(0, 1), slice(1, 2), slice(3, 50), slice(999, 1000)):
        assert_same_bits(add_ranks(held[:, rows]), whole[rows])
    threads = torch.get_num_threads()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            assert_same_bits(add_ranks(held), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ranks", [4, 8])
def test_the_ranks_are_added_in_ascending_order_and_rounded_once(ranks: int, dtype: torch.dtype) -> None:
    held = partials(ranks, 300, dtype, 30_000 if dtype == torch.float16 else 2.0**24)
    chain = held[0].float()
    for rank in range(1, ranks):
        chain = chain + held[rank].float()
    assert_same_bits(add_ranks(held), chain.to(dtype))
    others = {
        "from another rank": add_ranks(held.roll(-1, 0)),
        "rounded each time": sum(held[1:], held[0]),
        "from both ends": (held[: ranks // 2].float().sum(0) + held[ranks // 2 :].float().sum(0)).to(dtype),
    }
    for name, other in others.items():
        assert not torch.equal(other, add_ranks(held)), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tree_has_the_same_bits_whoever_adds_its_parts(dtype: torch.dtype) -> None:
    k_slices = partials(8, 50, dtype)
    whole = add_ranks(k_slices, tree=True)
    for ranks in (1, 2, 4, 8):
        parts = [add_ranks(part, tree=True) for part in k_slices.split(8 // ranks)]
        assert_same_bits(add_ranks(torch.stack(parts), tree=True), whole, f"{ranks} ranks")
    if dtype.itemsize == 2:
        assert_near(whole, reference(k_slices), 3)
        assert not torch.equal(add_ranks(k_slices), whole), "a chain is rounded once"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("ranks", "tree"), [(1, True), (2, True), (3, False), (4, False), (4, True), (8, True)])
def test_a_device_has_the_bits_of_whole_tensors(device: Device, ranks: int, tree: bool, dtype: torch.dtype) -> None:
    for rows in (1, 3, 64):  # 64: rows are whole vectors together
        held = partials(ranks, rows, dtype, 100.0)
        assert_same_bits(add_ranks(held.to(device.type), tree).cpu(), cpu.add_ranks(held, tree), f"{rows} rows")
    if dtype.itemsize == 2 and ranks == 4:
        assert not torch.equal(add_ranks(held.to(device.type), tree).cpu(), cpu.add_ranks(held, not tree))


def test_a_tree_of_three_is_refused() -> None:
    with pytest.raises(ValueError, match="a power of two of ranks, got 3"):
        add_ranks(torch.zeros(3, 2), tree=True)


def test_integers_are_refused() -> None:
    with pytest.raises(NotCovered, match=r"an all-reduce in torch\.int32"):
        add_ranks(torch.zeros(2, 3, dtype=torch.int32))
