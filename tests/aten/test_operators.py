"""Every operator of PyTorch has a row in the table of aten/operators.py, and those that shall keep a row's bits do."""

from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.assertions import DTYPES, RELATIVE_ERROR, assert_same_bits
from tests.aten import operator_cases
from tests.aten.operator_cases import ALONG, EACH, differing, draw, measure, plain, results, same
from vllm_batch_invariant import batch_invariant_mode
from vllm_batch_invariant.aten import operators
from vllm_batch_invariant.ops.reduce import reference

INSIDE = {
    "_cdist_backward", "_embedding_bag", "_euclidean_dist", "_logcumsumexp", "_pdist_backward", "_safe_softmax",
    "_segment_reduce_backward", "_upsample_lanczos2d_aa", "_upsample_lanczos2d_aa_backward",
    "adaptive_avg_pool3d_backward", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_avg_pool1d", "avg_pool1d",
    "log_softmax", "softmax", "_weight_norm_interface_backward",
}  # fmt: skip
FAULTS = {
    "linear", "nansum", "prod", "cumprod", "var", "std", "vector_norm", "vector_norm, 1", "norm", "normalize",
    "softmax", "glu", "cosine_similarity", "cdist", "LSTM", "selu", "pow",
}  # fmt: skip
"""Cases that stock PyTorch was seen to fail here."""


class Recorder(TorchDispatchMode):
    """The names of the operators that are called in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function._schema.name.removeprefix("aten::").removesuffix("_"))
        return function(*args, **(kwargs or {}))


def test_every_operator_has_one_row() -> None:
    """A name in none is of a new PyTorch: measure it as operator_cases does, and put it into the table."""
    assert sorted({*operators.leaves()} - {*operators.rows()}) == []
    tables = (*operators.SAME.values(), *operators.OWN.values(), operators.BATCH, operators.ORDER)
    names = " ".join((*tables, operators.ELEMENTS, operators.MOVES, operators.RANDOM)).split()
    assert [name for name, times in Counter(names).items() if times > 1] == []
    assert sorted({*names} & operators.covered("cpu")) == []


def test_an_operator_that_nobody_has_looked_at_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "SAME", {"norms": "native_layer_norm"})
    assert {"native_group_norm", "logsumexp"} <= {*operators.leaves()} - {*operators.rows()}


@pytest.mark.parametrize("name", [*ALONG, *EACH])
def test_a_row_has_the_same_bits_whatever_the_batch(name: str, threads) -> None:
    threads(1)
    with batch_invariant_mode():
        ran, found = measure(name)
    assert ran
    assert found == []


@pytest.mark.parametrize("name", [*ALONG, *EACH])
def test_a_row_has_the_same_bits_whatever_the_batch_on_two_threads(name: str, threads, monkeypatch) -> None:
    threads(2)
    monkeypatch.setattr(operator_cases, "LENGTHS", (1031,))
    monkeypatch.setattr(operator_cases, "DTYPES", (torch.float32,))
    with batch_invariant_mode():
        ran, found = measure(name)
    assert ran
    assert found == []


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_stock_pytorch_fails_the_same_measurement(name: str, threads) -> None:
    threads(2)
    assert measure(name)[1]


def test_every_operator_that_is_left_to_pytorch_is_in_a_case() -> None:
    functions = {name: lambda x, f=f: f(x, 1) for name, f in ALONG.items()} | EACH
    with batch_invariant_mode(), Recorder() as recorder:
        for function in functions.values():
            x = plain(3, 100, torch.float32, "cpu")
            results(function, x, x, True)
    left = {*" ".join(operators.SAME.values()).split()} & {*operators.leaves()}
    assert sorted(left - recorder.names - INSIDE) == []


def _elementwise() -> Iterator[tuple[str, torch._ops.OpOverload]]:
    for base in sorted(
        {name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    ):
        packet = getattr(torch.ops.aten, base, None)
        for overload in packet.overloads() if packet is not None and not base.endswith("_") else ():
            operator = getattr(packet, overload)
            writes = any(argument.is_out for argument in operator._schema.arguments)
            if operator.namespace == "aten" and torch.Tag.pointwise in operator.tags and not writes:
                yield f"{base}.{overload}", operator


def _arguments(operator: torch._ops.OpOverload, x: torch.Tensor, y: torch.Tensor) -> tuple[list, dict]:
    values = {"Scalar": 0.3, "number": 0.3, "float": 0.3, "int": 2, "bool": False}
    tensors, positional, named = iter((x, y, (x * y).abs() + 0.5)), [], {}
    for argument in operator._schema.arguments:
        if argument.has_default_value():
            continue
        value = next(tensors) if str(argument.type) == "Tensor" else values[str(argument.type)]
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    return positional, named


def test_elementwise_operators_give_an_element_the_same_bits_at_every_place(threads) -> None:
    """Of arguments without a default; alpha is left out."""
    threads(1)
    ran, differ = set(), set()
    with batch_invariant_mode(), torch.no_grad():
        for (name, operator), dtype, length, inside in product(
            _elementwise(), (*DTYPES, torch.float64), (7, 777), (False, True)
        ):
            x, y = (plain(40, length + i, dtype, "cpu")[:, :length].contiguous() for i in (0, 1))
            x, y = (x.abs().clamp(0.01, 0.99), y.abs().clamp(0.01, 0.99)) if inside else (x, y)
            try:
                whole = operator(*(given := _arguments(operator, x, y))[0], **given[1])
                for rows in (slice(0, 1), slice(5, 8), slice(7, 40)):
                    positional, named = _arguments(operator, x[rows].contiguous(), y[rows].contiguous())
                    part = operator(*positional, **named)
                    pairs = zip(part, whole, strict=True) if isinstance(part, tuple) else [(part, whole)]
                    differ |= {
                        (name, dtype) for a, b in pairs if not torch.equal(a.nan_to_num(7), b[rows].nan_to_num(7))
                    }
            except (RuntimeError, KeyError, AttributeError, TypeError, StopIteration):
                continue  # of integers only, or of arguments that are made up here
            ran.add(name)
    assert len(ran) > 200
    assert differ == set()


WIDE = torch.Generator().manual_seed(3)
SPREAD = {
    "var": torch.var,
    "std": torch.std,
    "var_mean": torch.var_mean,
    "std_mean": torch.std_mean,
}


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("dim", [None, 0, 1, -1, [0, 2], [0, 1, 2]])
@pytest.mark.parametrize(("correction", "keepdim"), [(0, True), (1, False), (2.5, False)])
def test_spreads_are_near_the_float64_reference_and_so_are_their_gradients(keepdim, correction, dim, dtype) -> None:
    """To 4 roundings of the result: 1e-12 in fp64, 8e-6 in fp32, 3.2e-2 in bf16, 4e-3 in fp16."""
    x = (torch.randn(4, 9, 33, generator=WIDE) + 2).to(dtype)
    tolerance = 4 * RELATIVE_ERROR.get(dtype, 2.5e-13)
    squares, mean = reference.moments(x, dim, keepdim)
    variance = squares / (x.numel() / mean.numel() - correction)
    expected = {
        "var": [variance],
        "std": [variance.sqrt()],
        "var_mean": [variance, mean],
        "std_mean": [variance.sqrt(), mean],
    }
    for name, function in SPREAD.items():
        wide = x.double().clone().requires_grad_()
        given = x.clone().requires_grad_()
        stock = function(wide, dim, correction=correction, keepdim=keepdim)
        sum(part.sum() for part in (stock if isinstance(stock, tuple) else (stock,))).backward()
        with batch_invariant_mode():
            out = function(given, dim, correction=correction, keepdim=keepdim)
            out = list(out) if isinstance(out, tuple) else [out]
            sum(part.sum() for part in out).backward()
        for ours, right in zip(out, expected[name], strict=True):
            assert ours.shape == right.shape
            assert ours.dtype == dtype
            torch.testing.assert_close(ours.double(), right, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(given.grad.double(), wide.grad, rtol=2 * tolerance, atol=2 * tolerance)


def test_a_large_mean_does_not_drown_a_variance() -> None:
    x = torch.randn(3, 5000, generator=WIDE) + 1e4
    with batch_invariant_mode():
        torch.testing.assert_close(x.var(-1).double(), x.double().var(-1), rtol=1e-5, atol=0)


def test_spreads_of_complex_numbers_add_those_of_their_parts_and_integers_are_an_error() -> None:
    x = torch.randn(4, 33, dtype=torch.complex128, generator=WIDE)
    with batch_invariant_mode():
        variance, mean = torch.var_mean(x, 1)
        integers = torch.arange(5)
        for name in SPREAD:
            with pytest.raises(RuntimeError, match="only support floating point and complex"):
                SPREAD[name](integers)
    torch.testing.assert_close(variance, x.var(1))
    torch.testing.assert_close(mean, x.mean(1))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("length", [1, 2, 7, 300])
def test_products_are_near_the_float64_reference_and_so_are_their_gradients(length: int, dim: int) -> None:
    """To 1e-12, with none, one and two zeros in a row."""
    x = torch.rand(4, length, dtype=torch.float64, generator=WIDE) + 0.5
    for row in (1, 2):
        x[row, torch.randperm(length, generator=WIDE)[:row]] = 0
    x = x.t().contiguous() if dim == 0 else x

    def made(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        out = getattr(leaf, name)(dim)
        (out * torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
        return out.detach(), leaf.grad

    for name in ("prod", "cumprod"):
        stock = made(name)
        with batch_invariant_mode():
            for ours, right in zip(made(name), stock, strict=True):
                torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


def test_gradients_of_products_can_be_taken_again() -> None:
    x = torch.tensor([[0.5, -1.5, 0.0, 2.0]], dtype=torch.float64, requires_grad=True)
    with batch_invariant_mode():
        for name in ("prod", "cumprod"):
            assert torch.autograd.gradcheck(lambda x, name=name: getattr(x, name)(-1), x)
            assert torch.autograd.gradgradcheck(lambda x, name=name: getattr(x, name)(-1), x)


@pytest.mark.parametrize("order", [0, 0.5, 1, 2, 3, float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.complex64])
def test_norms_are_near_those_in_float64(dtype: torch.dtype, order: float) -> None:
    x = torch.randn(5, 33, generator=WIDE).to(dtype)
    wide = torch.linalg.vector_norm(x.to(torch.complex128 if dtype.is_complex else torch.float64), order, -1)
    with batch_invariant_mode():
        norm = torch.linalg.vector_norm(x, order, -1)
        old = torch.ops.aten.norm.ScalarOpt_dim(x, order, [-1])
    assert_same_bits(old, norm)
    tolerance = 4 * RELATIVE_ERROR.get(dtype, 2e-6)
    assert norm.dtype == torch.empty(0, dtype=dtype).abs().dtype
    torch.testing.assert_close(norm.double(), wide, rtol=tolerance, atol=0)


def test_integers_and_results_with_a_place_of_their_own_are_as_in_pytorch() -> None:
    integers, x = torch.arange(1, 7).view(2, 3), torch.randn(4, 9, generator=WIDE)
    with batch_invariant_mode():
        assert integers.prod(1).tolist() == [6, 120]
        assert integers.prod().item() == 720
        assert integers.cumprod(1).tolist() == [[1, 2, 6], [4, 20, 120]]
        assert integers.nansum(1).tolist() == [6, 15]
        assert torch.ones(3, 0).prod(1).tolist() == [1, 1, 1]
        assert torch.tensor(2.5).prod().item() == 2.5
        for exponent in (3.3, x.flip(0)):
            place = torch.zeros(4, 9)
            assert_same_bits(torch.pow(x.abs(), exponent, out=place), x.abs() ** exponent)
            assert_same_bits(x.abs().pow_(exponent), place)
        for name in ("prod", "nansum", "var"):
            place = torch.zeros(4)
            assert getattr(torch, name)(x, 1, out=place) is place
            assert_same_bits(place, getattr(x, name)(1))
        with pytest.raises(RuntimeError):
            torch.linalg.vector_norm(integers)


@pytest.mark.parametrize("p", [0, 1, 2, 3, float("inf")])
@pytest.mark.parametrize("rows", [5, 30])
def test_distances_are_near_those_in_float64_and_so_are_their_gradients(rows: int, p: float) -> None:
    """To 1e-5 in fp32; bf16 and fp16, which are computed in fp32, have its values, rounded."""
    x, y = torch.randn(2, rows, 20, generator=WIDE), torch.randn(7, 20, generator=WIDE)

    def made(dtype: torch.dtype, **mode: str) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.to(dtype, copy=True).requires_grad_()
        out = torch.cdist(leaf, y.to(dtype), p=p, **mode)
        out.square().sum().backward()
        return out.detach(), leaf.grad

    right = made(torch.float64)
    with batch_invariant_mode():
        modes = ({}, {"compute_mode": "use_mm_for_euclid_dist"}, {"compute_mode": "donot_use_mm_for_euclid_dist"})
        for mode in modes:
            for ours, exact in zip(made(torch.float32, **mode), right, strict=True):
                torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-4)
        low = torch.cdist(x.bfloat16(), y.bfloat16(), p=p)
        assert_same_bits(low, torch.cdist(x.bfloat16().float(), y.bfloat16().float(), p=p).bfloat16())


def test_a_cross_entropy_of_maps_has_a_gradient() -> None:
    x = torch.randn(2, 5, 3, 3, generator=WIDE, requires_grad=True)
    target = torch.zeros(2, 3, 3, dtype=torch.long)
    with batch_invariant_mode():
        torch.nn.functional.cross_entropy(x, target).backward()
    ours, x.grad = x.grad, None
    torch.nn.functional.cross_entropy(x, target).backward()
    torch.testing.assert_close(ours, x.grad)


def test_the_comparison_of_rows_finds_what_follows_the_batch() -> None:
    x = draw(65, 7, torch.float32, "cpu")
    assert differing(lambda x: x.nan_to_num() * len(x), x, operator_cases.PARTS, True)
    assert not differing(lambda x: x.nan_to_num() * 2, x, operator_cases.PARTS, True)
    assert not same(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
