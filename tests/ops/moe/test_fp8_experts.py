"""Experts in FP8, weights and activations: what a token gets is what ``quantise`` and ``scaled_linear`` give it."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.scaled_linear.hopper_core import interpret
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.formats import FP8, FP8_BLOCK, Format
from vllm_batch_invariant.ops.moe import Experts, MoeReduction, StoredExperts, moe, reference, route
from vllm_batch_invariant.ops.moe.params import Codes
from vllm_batch_invariant.ops.quantise import E4M3, quantise
from vllm_batch_invariant.ops.scaled_linear import EXACT, WGMMA, ScaledLinearReduction, scaled_linear
from vllm_batch_invariant.ops.silu import silu_and_mul

EXPERTS, TOP_K = 5, 3
SIZES = (256, 256)
ODD = (200, 128)
"""Hidden and intermediate; the last group of K is a part of one."""


QUICK = (
    "test_a_token_has_the_same_bits_alone_and_among_others[interpreted-blocks-gate]",
    "test_a_token_has_the_same_bits_alone_and_among_others[interpreted-rows",
    "test_each_mistake_is_found[interpreted-gate-blocks-one scale a row]",
)
"""Of those in the interpreter, which take half a minute each: that run also where each minute counts."""


@pytest.fixture(autouse=True)
def tensor_core_of_the_interpreter(
    device, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    if device.is_interpreted:
        if not (request.config.option.exhaustive or request.node.name.startswith(QUICK)):
            pytest.skip("runs with --exhaustive")
        interpret(monkeypatch)
    yield


UNGATED = "relu2_no_mul"
by_activation = pytest.mark.parametrize(
    "activation", [pytest.param("silu", id="gate"), pytest.param(UNGATED, id="no gate")]
)
by_form = pytest.mark.parametrize("form", [pytest.param(FP8_BLOCK, id="blocks"), pytest.param(FP8, id="rows")])


def stored(device, n: int, k: int, dtype: torch.dtype, seed: int, form: Format = FP8_BLOCK) -> StoredExperts:
    """Codes of every size, and scales of no powers of two, all of them others."""
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randn(EXPERTS, n, k, generator=draw) * 10 ** (2 * torch.rand(EXPERTS, n, k, generator=draw))
    numbers[0, 0, 0], numbers[-1, -1, -1] = 448, -448
    shape = (n, 1) if form is FP8 else (-(-n // 128), -(-k // 128))
    scales = 10 ** (torch.rand(EXPERTS, *shape, generator=draw) - 3) * k**-0.5
    tensors = numbers.clamp(-448, 448).to(E4M3), scales
    return StoredExperts(form, tuple(one.to(device.type) for one in tensors), dtype)


def reduction_of(device, dtype: torch.dtype, form: Format = FP8_BLOCK, **fields: object) -> MoeReduction:
    mma = device.module("scaled_linear").mma_of(torch.empty(1, dtype=E4M3, device=device.type))
    products = ScaledLinearReduction.of(1, dtype, E4M3, form is FP8_BLOCK, mma)
    return MoeReduction(EXPERTS, TOP_K, dtype, products=products, **fields)


def layer(
    device,
    dtype: torch.dtype,
    sizes: tuple[int, int] = SIZES,
    biased: bool = False,
    form: Format = FP8_BLOCK,
    activation: str = "silu",
) -> Experts:
    hidden, intermediate = sizes
    draw = torch.Generator().manual_seed(7)
    rows = intermediate if activation == UNGATED else 2 * intermediate
    sides = (rows, hidden) if biased else ()
    biases = [torch.randn(EXPERTS, side, generator=draw).to(device.type, dtype) for side in sides]
    shapes = (rows, hidden), (hidden, intermediate)
    products = (stored(device, *shape, dtype, seed, form) for seed, shape in enumerate(shapes, 1))
    return Experts(*products, reduction_of(device, dtype, form, activation=activation), *biases)


def routed(device, of: Experts, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, of which one is large and one is zero, and their experts."""
    x = device.draw(count, of.gate_up.shape[2], seed=count)
    x[count // 2] *= 100
    x[count // 3, :128] = 0
    logits = device.draw(count, EXPERTS, seed=1)
    return x.to(of.reduction.dtype), *route(logits, of.reduction)


def activated(hidden: torch.Tensor, activation: str) -> torch.Tensor:
    """[1, intermediate] of what the first product gives."""
    return hidden.float().relu().square().to(hidden.dtype) if activation == UNGATED else silu_and_mul(hidden)


@dataclass(frozen=True)
class Written:
    """A loop over tokens and their experts, by the operations on a row alone; and what may be wrong in it."""

    quantised: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    product: Callable[..., torch.Tensor] = scaled_linear

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, of: Experts) -> torch.Tensor:
        out = torch.empty_like(x)
        for token, row in enumerate(x):
            total = torch.zeros(x.shape[1], device=x.device)
            for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
                hidden = self._multiply(row[None], of.gate_up, of.gate_up_bias, expert)
                made = self._multiply(activated(hidden, of.reduction.activation), of.down, of.down_bias, expert)
                total = total + made[0].float() * weight
            out[token] = total.to(x.dtype)
        return out

    def _multiply(self, row, weight: StoredExperts, bias, expert: int) -> torch.Tensor:
        codes, scales = (tensor[expert].contiguous() for tensor in weight.tensors)
        bias = None if bias is None else bias[expert]
        group, scales = (None, scales[:, 0]) if weight.format is FP8 else (128, scales)
        quantised = self.quantised or partial(quantise, codes=E4M3, group=group)
        return self.product(*quantised(row), codes, scales, bias, row.dtype)


def next_block(codes, scale, weight, weight_scale, bias, dtype):
    return scaled_linear(codes, scale, weight, weight_scale.roll(1, 0), bias, dtype)


def next_group(codes, scale, weight, weight_scale, bias, dtype):
    return scaled_linear(codes, scale, weight, weight_scale.roll(1, 1), bias, dtype)


def not_promoted(codes, scale, weight, weight_scale, bias, dtype):
    """One sum over all of K of numbers that were scaled before."""
    by_group = scale.repeat_interleave(128, -1)[:, : codes.shape[1]]
    whole = weight_scale.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)[:, : weight.shape[1]]
    out = (codes.float() * by_group) @ (weight.float() * whole).T
    return (out if bias is None else out + bias.float()).to(dtype)


def one_scale_a_row(row):
    codes, scale = quantise(row, codes=E4M3)
    return codes, scale[:, None].expand(-1, -(-row.shape[1] // 128)).contiguous()


def next_row(codes, scale, weight, weight_scale, bias, dtype):
    return scaled_linear(codes, scale, weight, weight_scale.roll(1), bias, dtype)


def summed_at_once(codes, scale, weight, weight_scale, bias, dtype):
    """One sum over all of K."""
    out = codes.float() @ weight.float().T * scale[:, None] * weight_scale
    return (out if bias is None else out + bias.float()).to(dtype)


def weight_first(codes, scale, weight, weight_scale, bias, dtype):
    """Scales multiplied in the other order."""
    out = scaled_linear(codes, torch.ones_like(scale), weight, torch.ones_like(weight_scale), None, torch.float32)
    out = out * weight_scale * scale[:, None]
    return (out if bias is None else out + bias.float()).to(dtype)


def one_scale_a_group(row):
    """Codes of groups by the scale of the row."""
    codes, scale = quantise(row, codes=E4M3, group=128)
    return codes, scale.amax(-1)


def powers_of_two(row):
    scale = 2 ** quantise(row, codes=E4M3, group=128)[1].log2().ceil()
    whole = scale.repeat_interleave(128, -1)[:, : row.shape[1]]
    return (row.float() / whole).clamp(-448, 448).to(E4M3), scale


MISTAKES = {
    FP8_BLOCK: {
        "the next block's scales": Written(product=next_block),
        "the next group's scales": Written(product=next_group),
        "no promotion": Written(product=not_promoted),
        "one scale a row": Written(quantised=one_scale_a_row),
        "scales of powers of two": Written(quantised=powers_of_two),
    },
    FP8: {
        "the next row's scale": Written(product=next_row),
        "no promotion": Written(product=summed_at_once),
        "the weight's scale first": Written(product=weight_first),
        "codes of groups": Written(quantised=one_scale_a_group),
    },
}


def dtype_of(device) -> torch.dtype:
    return torch.float32 if device.is_interpreted else torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "sizes", "biased"),
    [
        (torch.float32, SIZES, True),
        (torch.bfloat16, SIZES, False),
        (torch.bfloat16, ODD, True),
        (torch.float16, ODD, False),
    ],
)
@by_form
@by_activation
def test_a_token_has_the_bits_of_its_products_alone(
    device, dtype: torch.dtype, sizes, biased: bool, form: Format, activation: str
) -> None:
    of = layer(device, dtype, sizes, biased, form, activation)
    given = routed(device, of, 2 if device.is_interpreted else 7)
    found = moe(*given, of)
    assert found.isfinite().all()
    assert_same_bits(found, Written()(*given, of))


@by_activation
def test_scales_of_rows_serve_sizes_that_blocks_do_not(device, activation: str) -> None:
    of = layer(device, dtype_of(device), (136, 72), True, FP8, activation)
    given = routed(device, of, 5)
    assert_same_bits(moe(*given, of), Written()(*given, of))


def test_rows_of_up_alone_end_within_a_block(device) -> None:
    """As no gate's do, behind which those of up begin."""
    of = layer(device, dtype_of(device), (136, 72), True, activation=UNGATED)
    given = routed(device, of, 5)
    assert_same_bits(moe(*given, of), Written()(*given, of))


@by_activation
def test_one_scale_of_a_matrix_is_that_of_each_of_its_rows(device, activation: str) -> None:
    """Gate and up have one each."""
    of = layer(device, dtype_of(device), form=FP8, activation=activation)
    parts = 1 + of.reduction.is_gated
    few = [
        replace(one, tensors=(one.tensors[0], one.tensors[1][:, :: one.shape[1] // count].contiguous()))
        for one, count in ((of.gate_up, parts), (of.down, 1))
    ]
    all_rows = [
        replace(one, tensors=(one.tensors[0], one.tensors[1].repeat_interleave(one.shape[1] // count, 1)))
        for one, count in zip(few, (parts, 1), strict=True)
    ]
    given = routed(device, of, 3)
    found, expected = (moe(*given, replace(of, gate_up=of_all[0], down=of_all[1])) for of_all in (few, all_rows))
    assert_same_bits(found, expected)
    codes, scales = few[0].tensors
    other = scales[:, :1].contiguous() if parts == 2 else scales.roll(1, 0)  # of gate for both, or of another expert
    wrong = replace(of, gate_up=replace(few[0], tensors=(codes, other)), down=few[1])
    assert not torch.equal(found, moe(*given, wrong))


@by_activation
def test_rows_have_codes_by_a_given_scale(device, activation: str) -> None:
    of = layer(device, dtype_of(device), form=FP8, activation=activation)
    scales = tuple(torch.tensor([scale / 2, scale, scale / 3], device=device.type) for scale in (0.031, 0.0017))
    x, weights, ids = routed(device, of, 3)
    found = moe(x, weights, ids, replace(of, given=scales))
    turns = itertools.cycle(scales)
    written = Written(quantised=lambda row: quantise(row, next(turns), codes=E4M3))
    assert_same_bits(found, written(x, weights, ids, of))
    other = Written(quantised=lambda row: quantise(row, scales[0], codes=E4M3))
    assert not torch.equal(found, other(x, weights, ids, of))


@pytest.mark.parametrize(
    ("form", "mistake"),
    [
        pytest.param(form, name, id=f"{'rows' if form is FP8 else 'blocks'}-{name}")
        for form, mistakes in MISTAKES.items()
        for name in mistakes
    ],
)
@by_activation
def test_each_mistake_is_found(device, form: Format, mistake: str, activation: str) -> None:
    """In fp32, in which every sum shows."""
    of = layer(device, torch.float32, form=form, activation=activation)
    given = routed(device, of, 3)
    found = moe(*given, of)
    assert not torch.equal(found, MISTAKES[form][mistake](*given, of))


def counts_of(device) -> tuple[int, ...]:
    return (1, 24) if device.is_interpreted else (1, 2, 17, 65, 300)


def differing(device, of: Experts) -> list[int]:
    """Among how many tokens the last ones have other bits than among all."""
    counts = counts_of(device)
    most = counts[-1]
    x, weights, ids = routed(device, of, most)
    whole = moe(x, weights, ids, of)
    return [
        count
        for count in counts
        if not torch.equal(moe(*(one[most - count :] for one in (x, weights, ids)), of), whole[most - count :])
    ]


@by_activation
@by_form
def test_a_token_has_the_same_bits_alone_and_among_others(device, form: Format, activation: str) -> None:
    assert differing(device, layer(device, dtype_of(device), form=form, activation=activation)) == []


@by_activation
@by_form
def test_one_scale_of_all_tokens_fails_the_same_sweep(
    device, monkeypatch: pytest.MonkeyPatch, form: Format, activation: str
) -> None:
    module, of = device.module("moe"), layer(device, dtype_of(device), form=form, activation=activation)

    def of_step(rows: torch.Tensor, reduction: MoeReduction, *_: object) -> Codes:
        codes, scales = quantise(rows, rows.abs().max().float().reshape(1) / 448, codes=E4M3)
        if form is FP8_BLOCK:
            scales = scales[:, None].expand(-1, -(-rows.shape[1] // 128)).contiguous()
        return Codes(codes, scales, rows.dtype)

    monkeypatch.setattr(module, "_operand", of_step)
    assert differing(device, of)


@by_activation
@by_form
def test_a_part_of_the_experts_has_the_bits_of_that_part(device, form: Format, activation: str) -> None:
    of = layer(device, dtype_of(device), biased=True, form=form, activation=activation)
    x, weights, ids = routed(device, of, 20)
    here = torch.tensor([4, 1])
    places = torch.full((EXPERTS,), -1, dtype=torch.int32).index_copy_(0, here, torch.arange(2, dtype=torch.int32))

    def part(one):
        return replace(one, tensors=tuple(tensor.view(torch.uint8)[here].view(tensor.dtype) for tensor in one.tensors))

    products = [part(one) for one in (of.gate_up, of.down)]
    there = Experts(*products, of.reduction, of.gate_up_bias[here], of.down_bias[here], places.to(device.type))
    absent = ~torch.isin(ids.cpu(), here).to(device.type)
    assert absent.any()
    found = moe(x, weights, ids, there)
    assert_same_bits(found, moe(x, weights.masked_fill(absent, 0), ids, of))


@pytest.mark.parametrize("mma", [EXACT, WGMMA])
@by_form
def test_a_cpu_has_the_sums_of_each_tensor_core_that_has_a_model(device, form: Format, mma: str) -> None:
    if device.name != "cpu":
        pytest.skip("of CPUs")
    of = layer(device, torch.bfloat16, form=form)
    products = replace(of.reduction.products, mma=mma)
    of = replace(of, reduction=replace(of.reduction, products=products))
    given = routed(device, of, 3)
    by = Written(product=lambda *operands: scaled_linear(*operands, mma))
    assert_same_bits(moe(*given, of), by(*given, of))
    other = {EXACT: WGMMA, WGMMA: EXACT}[mma]
    assert not torch.equal(moe(*given, of), Written(product=lambda *o: scaled_linear(*o, other))(*given, of))


@by_activation
@by_form
def test_results_are_near_the_float64_reference(device, form: Format, activation: str) -> None:
    """Where a number lies between two codes a rounding may decide, and that moves it by up to 1 in 16."""
    of = layer(device, torch.float32, biased=True, form=form, activation=activation)
    given = [one.cpu() for one in routed(device, of, 12)]
    expected = reference.moe(*given, _on_cpu(of))
    found = moe(*(one.to(device.type) for one in given), of).cpu().double()
    of_row = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert of_row.max() < (1e-3 if device.name == "cpu" else 2e-2)


def _on_cpu(of: Experts) -> Experts:
    stored = [replace(one, tensors=tuple(tensor.cpu() for tensor in one.tensors)) for one in (of.gate_up, of.down)]
    return Experts(*stored, of.reduction, *(one.cpu() for one in (of.gate_up_bias, of.down_bias)))


@by_form
def test_what_is_not_finite_has_nan_and_its_neighbours_have_not(device, form: Format) -> None:
    of = layer(device, dtype_of(device), form=form)
    x, weights, ids = routed(device, of, 9)
    clean = moe(x, weights, ids, of)
    x[2, 5], x[7] = torch.inf, torch.nan
    found = moe(x, weights, ids, of)
    others = [token for token in range(9) if token not in (2, 7)]
    assert found[[2, 7]].isnan().all()
    assert_same_bits(found[others], clean[others])


def scales_of_next_columns(right: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What a grouped product gives with the scales of other blocks of the weight."""

    def wrong(x, weight, *of: object, **named: object) -> torch.Tensor:
        codes, scales = weight.tensors
        return right(x, replace(weight, tensors=(codes, scales.roll(1, 1))), *of, **named)

    return wrong


@by_activation
@by_form
def test_tiles_are_certified_and_a_wrong_scale_is_found(
    device, monkeypatch: pytest.MonkeyPatch, form: Format, activation: str
) -> None:
    if device.name == "cpu":
        pytest.skip("of GPUs")
    cuda, dtype = device.module("moe"), dtype_of(device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    given = 256, 136, dtype, torch.device(device.type), activation, form, reduction_of(device, dtype, form).products
    if device.is_interpreted:
        few = cuda.layer_schedules(dtype, cuda.Gpu.of(0), scaled=True)[:1]
        monkeypatch.setattr(cuda, "layer_schedules", lambda *_, **__: few)
        monkeypatch.setattr(cuda, "_activated", lambda hidden, *_: activated(hidden, activation))
    assert cuda.certify(*given) > 0
    monkeypatch.setattr(cuda, "grouped_gemm", scales_of_next_columns(cuda.grouped_gemm))
    with pytest.raises(
        NotCovered, match=rf"stored as {form.name} on a GPU: schedule 0 .* has other bits than a dense layer"
    ):
        cuda.certify(*given)


def test_operands_of_the_certificate_have_scales_in_fp32_while_a_model_in_16_bits_is_loaded(device) -> None:
    if device.name == "cpu":
        pytest.skip("of GPUs")
    cuda, on = device.module("moe"), torch.device(device.type)
    schedule = cuda.layer_schedules(torch.bfloat16, cuda.Gpu.of(0), scaled=True)[0]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        cases = list(cuda._cases_of_codes(schedule, 256, 136, torch.bfloat16, on, FP8_BLOCK))
    finally:
        torch.set_default_dtype(before)
    assert {one.dtype for _, _, x, weight in cases for one in (x.scales, weight.tensors[1])} == {torch.float32}


def test_no_tokens_give_no_rows(device) -> None:
    of = layer(device, dtype_of(device))
    x, weights, ids = routed(device, of, 3)
    assert moe(x[:0], weights[:0], ids[:0], of).shape == (0, SIZES[0])


def test_what_does_not_fit_is_refused(device) -> None:
    of = layer(device, dtype_of(device))
    given = routed(device, of, 2)
    codes, scales = of.down.tensors
    for wrong, words in (
        (replace(of.down, tensors=(codes, scales[:, :1])), r"down as e4m3 with fp32 scales \[5, 2, 2\]"),
        (replace(of.down, tensors=(codes, scales.double())), "down as e4m3 with fp32 scales"),
        (replace(of.down, format=FP8), "down as codes in blocks"),
        (codes.to(of.reduction.dtype), "down as codes in blocks"),
        (replace(of.down, tensors=(codes.view(torch.int8), scales)), "down as e4m3"),
    ):
        with pytest.raises(ValueError, match=words):
            moe(*given, replace(of, down=wrong))
    halves = of.down.tensors[0][..., :192].contiguous(), scales
    with pytest.raises(ValueError, match="a block of 128 rows has one scale, and gate has 192 rows"):
        gate_up = replace(of.gate_up, tensors=(of.gate_up.tensors[0][:, :384].contiguous(), of.gate_up.tensors[1]))
        moe(*given, replace(of, gate_up=gate_up, down=replace(of.down, tensors=halves)))
    of = layer(device, dtype_of(device), form=FP8)
    codes, scales = of.down.tensors
    for wrong, words in (
        (replace(of.down, format=FP8_BLOCK), "down as codes in rows"),
        (replace(of.down, tensors=(codes, scales[..., 0])), r"down as e4m3 with fp32 scales \[5, 256, 1\]"),
        (replace(of.down, tensors=(codes, scales[:, :100])), r"down as e4m3 with fp32 scales \[5, 256, 1\]"),
    ):
        with pytest.raises(ValueError, match=words):
            moe(*given, replace(of, down=wrong))
    scale = torch.ones(EXPERTS, device=device.type)
    of_blocks = layer(device, dtype_of(device))
    for wrong in (replace(of, given=(scale, scale.double())), replace(of_blocks, given=(scale, scale))):
        with pytest.raises(ValueError, match="scales in fp32 of what both products are given"):
            moe(*given, wrong)
    with pytest.raises(NotCovered, match="experts in FP8 whose rows are those of gate and up in turn"):
        reduction_of(device, torch.bfloat16, activation="swigluoai")
    with pytest.raises(NotCovered, match="experts whose products are ScaledLinearReduction"):
        MoeReduction(EXPERTS, TOP_K, torch.bfloat16, products=ScaledLinearReduction(torch.bfloat16))
