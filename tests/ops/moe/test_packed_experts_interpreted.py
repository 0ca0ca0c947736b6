"""Experts in four bits by the GPU's kernel, in Triton's interpreter: the bits of the matrices that they stand for."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.ops.moe.packed import every_product
from tests.ops.moe.test_triton_moe_interpreted import HOPPER, OLDER
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.formats import INT8, MXFP4, NVFP4, Format, integers, triton_decode
from vllm_batch_invariant.ops.formats.fp4 import NVFP4_STEPS
from vllm_batch_invariant.ops.formats.triton_decode import PackedTile
from vllm_batch_invariant.ops.moe import Experts, MoeReduction, StoredExperts, cuda

EXPERTS, TOP_K = 4, 2
CASES = {
    "int4 by 32": (integers(4, 32), torch.float16),
    "int4 by 32 with zeros": (integers(4, 32, zeros=True), torch.float16),
    "int4 by 64": (integers(4, 64), torch.float16),
    "int4 by 128 with zeros": (integers(4, 128, zeros=True), torch.float16),
    "int4 by row": (integers(4), torch.float16),
    "int4 by row with zeros, wide": (integers(4, zeros=True), torch.float32),
    "mxfp4, wide": (MXFP4, torch.float32),
    "nvfp4 by steps, wide": (NVFP4_STEPS, torch.float32),
}
"""The interpreter has no bf16."""
FORMATS = {
    name: case
    for name, case in CASES.items()
    if name in ("int4 by 32 with zeros", "mxfp4, wide", "nvfp4 by steps, wide")
}


@pytest.fixture(autouse=True, params=[HOPPER], ids=lambda gpu: gpu.name)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """What the launchers take the interpreter for."""
    monkeypatch.setattr(Gpu, "of", lambda _: request.param)
    return request.param


def stored(form: Format, n: int, k: int, dtype: torch.dtype, seed: int) -> StoredExperts:
    """Every code, and scales of every size that products of the dtype have."""
    draw = torch.Generator().manual_seed(seed)
    groups = k // form.group if form.name[:7] != "w4a16-c" else 1
    if form is MXFP4:
        codes = torch.randint(0, 256, (EXPERTS, n, k // 2), generator=draw, dtype=torch.uint8)
        scales = torch.randint(118, 127, (EXPERTS, n, groups), generator=draw, dtype=torch.uint8)
        scales[0, 0, 0], scales[1, 1, -1] = 0, 60
        return StoredExperts(form, (codes, scales), dtype)
    if form is NVFP4_STEPS:
        codes = torch.randint(0, 256, (EXPERTS, n, k // 2), generator=draw, dtype=torch.uint8)
        scales = torch.randint(-120, 120, (EXPERTS, n, groups), generator=draw).to(torch.float8_e4m3fn)
        scales.view(torch.uint8)[0, 0, 0] = 0
        of_matrices = torch.rand(EXPERTS, 2, 1, generator=draw) / 1024
        return cuda.as_read(StoredExperts(NVFP4, (codes, scales, of_matrices), dtype))
    words = torch.randint(-(2**31), 2**31, (EXPERTS, n, k // 8), generator=draw, dtype=torch.int32)
    scales = (torch.rand(EXPERTS, n, groups, generator=draw) / 16).to(dtype)
    scales[0, 0, 0] = 0
    zeros = torch.randint(0, 17, scales.shape, generator=draw, dtype=torch.uint8)
    return StoredExperts(form, (words, scales, zeros)[: len(form.names)], dtype)


def layer(form: Format, dtype: torch.dtype, hidden: int, intermediate: int, activation: str) -> Experts:
    reduction = MoeReduction(EXPERTS, TOP_K, dtype, activation=activation)
    rows = (1 + reduction.is_gated) * intermediate
    gate_up, down = stored(form, rows, hidden, dtype, 1), stored(form, hidden, intermediate, dtype, 2)
    draw = torch.Generator().manual_seed(3)
    biases = [torch.randn(EXPERTS, n, generator=draw).to(dtype) for n in (rows, hidden)]
    return Experts(gate_up, down, reduction, *biases)


def unpacked(of: Experts) -> Experts:
    return replace(of, gate_up=of.gate_up.matrices(), down=of.down.matrices())


def routed(of: Experts, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(count)
    x = torch.randn(count, of.gate_up.shape[2], generator=draw).to(of.reduction.dtype)
    return x, *cuda.route(torch.randn(count, EXPERTS, generator=draw), of.reduction, None)


def made(of: Experts, count: int) -> torch.Tensor:
    return cuda.moe(*routed(of, count), of)


@pytest.mark.parametrize("gpu", [HOPPER, OLDER], indirect=True, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize(("form", "dtype"), CASES.values(), ids=CASES)
def test_experts_have_the_bits_of_the_matrices(form: Format, dtype: torch.dtype, gpu: Gpu) -> None:
    """A product of both halves of a weight, or of rows in turn."""
    assert PackedTile.of(form, dtype) is not None
    of = layer(form, dtype, 128, 128, "silu" if form.name.endswith("-zp") else "swigluoai")
    for count in (1, 20):
        found = made(of, count)
        assert torch.equal(found, made(unpacked(of), count))
        assert found.isfinite().all()


@pytest.mark.parametrize("sizes", [(96, 32), pytest.param((160, 224), marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("form", "dtype"), FORMATS.values(), ids=FORMATS)
def test_odd_numbers_of_groups_have_the_bits_of_the_matrices(
    form: Format, dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    of = layer(form, dtype, *sizes, "silu")
    for count in (3, 80):
        assert torch.equal(made(of, count), made(unpacked(of), count))


@pytest.mark.parametrize(("form", "dtype"), FORMATS.values(), ids=FORMATS)
def test_experts_without_a_gate_have_the_bits_of_the_matrices(form: Format, dtype: torch.dtype) -> None:
    of = layer(form, dtype, 96, 64, "relu2_no_mul")
    for count in (3, 80):
        assert torch.equal(made(of, count), made(unpacked(of), count))
    codes, *others = of.gate_up.tensors
    wrong = codes.clone()
    wrong[:, 5, 1] ^= 1  # so the comparison sees one code
    other = replace(of, gate_up=replace(of.gate_up, tensors=(wrong, *others)))
    assert not torch.equal(made(other, 80), made(of, 80))


def test_odd_numbers_of_groups_of_16_have_the_bits_of_the_matrices() -> None:
    of = layer(*CASES["nvfp4 by steps, wide"], 80, 48, "silu")
    assert torch.equal(made(of, 3), made(unpacked(of), 3))


def test_a_part_of_the_experts_has_the_bits_of_that_part() -> None:
    of = layer(*CASES["int4 by 32 with zeros"], 96, 64, "silu")
    here = torch.tensor([3, 1])
    places = torch.full((EXPERTS,), -1, dtype=torch.int32)
    places[here] = torch.arange(2, dtype=torch.int32)
    part = Experts(
        *(replace(one, tensors=tuple(tensor[here] for tensor in one.tensors)) for one in (of.gate_up, of.down)),
        of.reduction, of.gate_up_bias[here], of.down_bias[here], places,
    )  # fmt: skip
    x, weights, ids = routed(of, 20)
    found = cuda.moe(x, weights, ids, part)
    assert torch.equal(found, cuda.moe(x, weights, ids, unpacked(part)))
    assert not torch.equal(found, cuda.moe(x, weights, ids, of))


def test_every_code_times_every_scale_is_the_definitions() -> None:
    every_product(MXFP4, torch.float32, torch.device("cpu"))
    every_product(NVFP4_STEPS, torch.float32, torch.device("cpu"))
    every_product(integers(4, 32, zeros=True), torch.float16, torch.device("cpu"))


def test_what_no_kernel_reads_is_written_to_memory() -> None:
    form = integers(8, 32)
    assert PackedTile.of(form, torch.float16) is None
    assert PackedTile.of(integers(4, ordered=True), torch.float16) is None
    assert PackedTile.of(MXFP4, torch.float16) is None
    assert PackedTile.of(NVFP4_STEPS, torch.float16) is PackedTile.of(NVFP4, torch.bfloat16) is None
    assert PackedTile.of(INT8, torch.float16) is None
    words = torch.randint(-(2**31), 2**31, (EXPERTS, 64, 24), dtype=torch.int32)
    scales = torch.rand(EXPERTS, 64, 3).half()
    weight = StoredExperts(form, (words, scales), torch.float16)
    ids, x = torch.arange(10).view(5, 2) % EXPERTS, torch.randn(5, 96).half()
    schedule = cuda.layer_schedule(10, EXPERTS, 64, torch.float16, HOPPER)
    given = None, cuda.group(ids, EXPERTS, schedule), 10, torch.float16, schedule.gate_up
    assert torch.equal(cuda.grouped_gemm(x, weight, *given), cuda.grouped_gemm(x, weight.matrices(), *given))


@pytest.mark.parametrize("scale", [2.0**-120, -(2.0**111)])
def test_scales_of_matrices_with_which_steps_would_be_rounded_are_refused(scale: float) -> None:
    codes, scales = torch.zeros(2, 32, 32, dtype=torch.uint8), torch.ones(2, 32, 4).to(torch.float8_e4m3fn)
    of_matrices = torch.tensor([0.0, 1.0, scale, 1.0]).view(2, 2, 1)
    with pytest.raises(NotCovered, match="with a scale of a matrix that is not between"):
        cuda.as_read(StoredExperts(NVFP4, (codes, scales, of_matrices), torch.bfloat16))
    in_fp16 = StoredExperts(NVFP4, (codes, scales, of_matrices), torch.float16)
    assert cuda.as_read(in_fp16) is in_fp16


integers_of, e2m1_of, power_of = triton_decode._integers, triton_decode._e2m1, triton_decode._power
steps_of = triton_decode._by_steps


@triton.jit
def zeros_of_one_more(words, zeros, DTYPE: tl.constexpr):
    return integers_of(words, zeros + 1, DTYPE)


@triton.jit
def nibbles_swapped(words, zeros, DTYPE: tl.constexpr):
    return integers_of(((words >> 4) & 0x0F0F0F0F) | ((words & 0x0F0F0F0F) << 4), zeros, DTYPE)


@triton.jit
def scales_twice_as_large(codes, DTYPE: tl.constexpr):
    return power_of(codes + 1, DTYPE)


@triton.jit
def without_sign(words, DTYPE: tl.constexpr):
    return e2m1_of(words & 0x77777777, DTYPE)


@triton.jit
def steps_swapped(words, one, three_halves, DTYPE: tl.constexpr):
    return steps_of(words, three_halves, one, DTYPE)


FAULTS = {
    "steps swapped": ("nvfp4 by steps, wide", "_by_steps", steps_swapped),
    "zero points of one more": ("int4 by 32 with zeros", "_integers", zeros_of_one_more),
    "nibbles swapped": ("int4 by 32 with zeros", "_integers", nibbles_swapped),
    "scales twice as large": ("mxfp4, wide", "_power", scales_twice_as_large),
    "codes without their sign": ("mxfp4, wide", "_e2m1", without_sign),
}


@pytest.fixture(params=FAULTS)
def faulty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The case in which a fault is planted."""
    case, name, fault = FAULTS[request.param]
    monkeypatch.setattr(triton_decode, name, fault)
    return case


def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the certificate add integers: the interpreter's sums of other numbers follow the tile."""

    def integers_of(m: int, n: int, k: int, dtype: torch.dtype, device: Any, seed: int = 0, **_: int) -> Any:
        draw = torch.Generator().manual_seed(seed)
        return [torch.randint(-3, 4, (rows, k), generator=draw).to(dtype) / 64 for rows in (m, n)]

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "the interpreter")
    monkeypatch.setattr(cuda, "cancelling", integers_of)
    monkeypatch.setattr(cuda.triton_gemm, "accumulate", lambda a, b: (a.double() @ b.double()).float())


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        pytest.param(*FORMATS["int4 by 32 with zeros"], marks=pytest.mark.exhaustive),
        FORMATS["mxfp4, wide"],
        FORMATS["nvfp4 by steps, wide"],
    ],
    ids=FORMATS,
)
def test_tiles_are_certified(form: Format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    exact(monkeypatch)
    assert cuda.certify(24, 64, dtype, torch.device("cpu"), form=form) > 0


def test_a_planted_fault_is_found(faulty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exact(monkeypatch)
    form, dtype = CASES[faulty]
    of = layer(form, dtype, 96, 64, "silu")
    assert not torch.equal(made(of, 5), made(unpacked(of), 5))
    with pytest.raises(NotCovered, match=f"stored as {form.name} on .*schedule 0 .* has other bits than a dense layer"):
        cuda.certify(40, 96, dtype, torch.device("cpu"), form=form)
