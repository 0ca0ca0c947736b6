"""Adapters on a GPU: a row's bits are its own and its adapter's, and those of dense products."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.assertions import assert_near, assert_same_bits
from tests.faults.lora import FAULTS, planted
from tests.ops.lora.cases import Layer, layer
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.common.cancelling import cancelling
from vllm_batch_invariant.ops.lora import LoraReduction, add_expanded, cuda, reference

SHAPES: dict[str, tuple[int, tuple[int, ...]]] = {
    "qkv of Qwen3-8B": (4096, (4096, 1024, 1024)),
    "down of Qwen3-8B": (12_288, (4096,)),
    "gate and up of Qwen2.5-0.5B": (896, (4864, 4864)),
    "down of Llama-3.2-3B, half": (4096 + 96, (3072,)),
    "odd": (1101, (77, 40, 3)),
}
"""K, and columns of slices."""
RANKS = (8, 16, 32, 64, 96, 128, 256, 320)
COUNTS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 2049)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def drawn(
    shape: str,
    dtype: torch.dtype = torch.bfloat16,
    rows: int = 300,
    rank: int = 64,
    cancels: bool = True,
) -> Layer:
    """Rows of five adapters of one rank, and of none; the last of six slots has NaN and no rows. What cancels shows
    every order of additions: sums of both leaves and ranks, of which nothing but rounding errors is left.
    """
    (k, columns), slots = SHAPES[shape], 6
    generator = torch.Generator("cuda").manual_seed(rank)

    def of_size(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device="cuda").to(dtype)

    x, a = of_size(rows, k), of_size(len(columns), slots, 1, rank, k) * k**-0.5
    y, b = of_size(rows, sum(columns)), [of_size(slots, 1, n, rank) for n in columns]
    if cancels:
        found = cancelling(rows, len(columns) * slots * rank, k - k % 2, dtype, "cuda", seed=rank)
        x, of_a = (torch.nn.functional.pad(64 * one, (0, k % 2)) for one in found)
        a = of_a.view_as(a)
        y[::2] = 0
        y *= 1e-3
    for one in (*a, *b):
        one[-1] = torch.nan
    used = torch.randint(-1, slots - 1, (rows,), generator=generator, device="cuda")
    return Layer(y, x, tuple(a.unbind()), tuple(b), used)


def schedules(dtype: torch.dtype) -> Iterator[cuda.LoraSchedule]:
    """Every one that may serve, with leaves of their own and without."""
    for one in cuda.lora_schedules(dtype):
        for by_leaf in (True, False):
            yield replace(one, shrink=replace(one.shrink, by_leaf=by_leaf))


def by(of: Layer, schedule: cuda.LoraSchedule | None, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
    out = of.y[rows].clone()
    cuda.add_adapters(out, of.x[rows], of.a, of.b, of.slots[rows], of.reduction, schedule)
    return out


def composed(of: Layer) -> torch.Tensor:
    return cuda.composed(of.y, of.x, of.a, of.b, of.slots, of.reduction)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_near_float64(shape: str, dtype: torch.dtype) -> None:
    of = drawn(shape, dtype, rows=40, cancels=False)
    assert_near(of(), reference.add_adapters(of.y, of.x, of.a, of.b, of.slots), factor=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tile_has_the_bits_of_dense_products(shape: str, dtype: torch.dtype) -> None:
    of = drawn(shape, dtype)
    expected = composed(of)
    for schedule in schedules(dtype):
        rows = slice(schedule.few_rows or len(of.y))
        assert_same_bits(by(of, schedule, rows), expected[rows], str(schedule))


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("shape", ["qkv of Qwen3-8B", "down of Qwen3-8B"])
def test_a_row_has_the_same_bits_among_any_number_of_rows(shape: str, rank: int) -> None:
    of = drawn(shape, rows=max(COUNTS), rank=rank)
    whole = of()
    for count in COUNTS:
        for start in (0, len(of.y) - count):
            rows = slice(start, start + count)
            assert_same_bits(of(rows), whole[rows], f"{count} rows from {start} on")
    assert_same_bits(whole, composed(of), "dense products")


def test_every_row_alone_has_the_bits_that_it_has_among_256() -> None:
    of = drawn("qkv of Qwen3-8B", rows=256, rank=16)
    whole = of()
    alone = torch.cat([of(slice(row, row + 1)) for row in range(256)])
    assert_same_bits(alone, whole, "alone")


def test_other_adapters_and_another_order_move_no_bit() -> None:
    of = drawn("qkv of Qwen3-8B", rows=200, rank=16)
    whole, generator = of(), torch.Generator("cuda").manual_seed(1)
    for seed in range(5):
        order = torch.randperm(200, generator=generator, device="cuda")
        assert_same_bits(of(order), whole[order], f"order {seed}")
    others = of.slots.roll(1)
    others[::2] = of.slots[::2]
    assert_same_bits(replace(of, slots=others)()[::2], whole[::2], "other adapters beside")
    of.x[1::2] = torch.nan
    assert_same_bits(of()[::2], whole[::2], "NaN beside")


@pytest.mark.parametrize("rows", [1, 16, 40, 200])
def test_an_adapter_has_the_same_bits_in_any_slot_of_any_number(rows: int) -> None:
    of = drawn("gate and up of Qwen2.5-0.5B", rows=rows, rank=32)
    whole, places = of(), torch.tensor([9, 3, 0, 7, 5, 12], device="cuda")
    moved = []
    for tensors in (of.a, of.b):
        more = [one.new_full((17, *one.shape[1:]), torch.nan) for one in tensors]
        for one, other in zip(tensors, more, strict=True):
            other[places] = one
        moved.append(tuple(more))
    slots = torch.where(of.slots < 0, of.slots, places[of.slots.clamp_min(0)])
    assert_same_bits(Layer(of.y, of.x, *moved, slots.int())(), whole, "other slots")


@pytest.mark.parametrize("rows", [1, 40, 300])
def test_an_adapter_alone_in_its_tensor_has_the_same_bits(rows: int) -> None:
    of = drawn("qkv of Qwen3-8B", rows=rows, rank=16)
    whole, groups = of(), cuda.RowGroups.empty(rows, 1, of.y.dtype, of.y.device)
    for slot in range(5):
        own = of.slots == slot
        alone = replace(
            of,
            a=tuple(one[slot : slot + 1].contiguous() for one in of.a),
            b=tuple(one[slot : slot + 1].contiguous() for one in of.b),
            slots=torch.where(own, 0, -1),
        )
        assert_same_bits(alone()[own], whole[own], f"slot {slot} alone")
        groups.set(alone.slots)
        out = of.y.clone()
        cuda.add_adapters(out, of.x, alone.a, alone.b, groups, of.reduction)
        assert_same_bits(out, alone(), f"slot {slot} alone, grouped before")


@pytest.mark.parametrize("room", [64, 128, 256, 320])
def test_bits_do_not_follow_from_the_room_for_ranks(room: int) -> None:
    of = layer(rows=70, k=4096, room=64, device="cuda")
    assert_same_bits(layer(rows=70, k=4096, room=room, device="cuda")(), of(), f"room for rank {room}")
    for slot, rank in enumerate((8, 16, 64, 8)):
        own = of.slots == slot
        a = tuple(one[:, :, :rank].contiguous() for one in of.a)
        b = tuple(one[..., :rank].contiguous() for one in of.b)
        assert_same_bits(replace(of, a=a, b=b)(own), of()[own], f"room for rank {rank} alone")


@pytest.mark.parametrize("rows", [1, 40, 300])
def test_a_row_without_an_adapter_is_not_written(rows: int) -> None:
    of = drawn("odd", rows=rows)
    none = of.slots < 0
    of.y[none] = -0.0
    assert_same_bits(of()[none].view(torch.int16), of.y[none].view(torch.int16), "-0.0")
    nobody = replace(of, slots=torch.full_like(of.slots, -1))
    assert_same_bits(nobody().view(torch.int16), of.y.view(torch.int16), "no adapter at all")


def test_rows_any_stride_apart_have_the_same_bits() -> None:
    of = drawn("down of Llama-3.2-3B, half", rows=70)
    wide_y, wide_x = (one.new_full((len(one), one.shape[1] + 24), torch.nan) for one in (of.y, of.x))
    y, x = wide_y[:, : of.y.shape[1]], wide_x[:, 8 : 8 + of.x.shape[1]]
    y.copy_(of.y)
    x.copy_(of.x)
    cuda.add_adapters(y, x, of.a, of.b, of.slots, of.reduction)
    assert_same_bits(y, of(), "strided")
    assert wide_y[:, of.y.shape[1] :].isnan().all()


@pytest.mark.parametrize("grouped", [False, True], ids=["by slots", "grouped before"])
@pytest.mark.parametrize("rows", [1, 16, 64, 100, 300])
def test_a_cuda_graph_serves_other_slots_and_fewer_rows(rows: int, grouped: bool) -> None:
    of = drawn("qkv of Qwen3-8B", rows=rows, rank=16)
    y, slots = of.y.clone(), of.slots.clone()
    groups = cuda.RowGroups.empty(512, len(of.a[0]), of.y.dtype, of.y.device)

    def step() -> None:
        cuda.add_adapters(y, of.x, of.a, of.b, groups if grouped else slots, of.reduction)

    groups.set(slots)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        step()
    none = torch.full_like(of.slots, -1)
    for name, used in {"those": of.slots, "others": of.slots.roll(1), "none": none}.items():
        slots.copy_(used)
        groups.set(used)
        y.copy_(of.y)
        graph.replay()
        assert_same_bits(y, replace(of, slots=used)(), name)
    half = max(1, rows // 2)
    slots[half:] = -1
    slots[:half] = of.slots[:half]
    groups.set(of.slots[:half])
    y.copy_(of.y)
    graph.replay()
    assert_same_bits(y[:half], of()[:half], "half of the rows")
    assert_same_bits(y[half:], of.y[half:], "rows behind the step's")


def test_launches_one_after_the_other_read_what_is_written() -> None:
    """Each is launched while the one before ends: sums of one step may lie where those of the next are."""
    of = drawn("qkv of Qwen3-8B", rows=8, rank=16)
    once = of.y.clone()
    steps = []
    for _ in range(20):
        cuda.add_adapters(once, of.x, of.a, of.b, of.slots, of.reduction)
        torch.cuda.synchronize()
        steps.append(once.clone())
    for _ in range(10):
        y = of.y.clone()
        for step in steps:
            cuda.add_adapters(y, of.x, of.a, of.b, of.slots, of.reduction)
            last = step
        assert_same_bits(y, last, "without a wait of the host")


@pytest.mark.parametrize("rows", [1, 40, 300])
def test_an_expanded_row_has_the_bits_that_it_has_behind_the_first_product(rows: int) -> None:
    of = drawn("down of Qwen3-8B", rows=rows)
    own, leaves = of.slots >= 0, of.reduction.k_leaf
    u = torch.zeros(rows, 64, dtype=of.y.dtype, device="cuda")
    for slot in of.slots[own].unique().tolist():
        rows_of = of.slots == slot
        total = torch.zeros(1, device="cuda")
        for leaf in zip(of.x[rows_of].split(leaves, 1), of.a[0][slot, 0].split(leaves, 1), strict=True):
            total = total + cuda._dense(*leaf)
        u[rows_of] = total.to(u.dtype)
    out = of.y.clone()
    add_expanded(out, u, of.b[0], of.slots, of.reduction)
    assert_same_bits(out, of(), "from u on")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_certificate_passes(shape: str, dtype: torch.dtype) -> None:
    k, columns = SHAPES[shape]
    assert cuda.certify(k, columns, 16, dtype, torch.device("cuda", 0)) > 10_000


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    """By the certificate and by the sweep of this file."""
    of = drawn("qkv of Qwen3-8B", rows=40)
    right = of()
    with planted(fault):
        assert not torch.equal(of(), right)
        with pytest.raises(NotCovered, match="has other bits"):
            cuda.certify(4096, (4096, 1024, 1024), 16, torch.bfloat16, torch.device("cuda", 0))


def test_another_leaf_moves_bits() -> None:
    """What the sweeps compare follows from the order of additions."""
    of = drawn("qkv of Qwen3-8B", rows=40)
    other = replace(of.reduction, k_leaf=1024)
    assert isinstance(other, LoraReduction)
    moved = cuda.composed(of.y, of.x, of.a, of.b, of.slots, other) != of()
    assert moved[of.slots >= 0].float().mean() > 0.1
