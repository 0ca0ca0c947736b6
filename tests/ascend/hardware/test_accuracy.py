"""Values: what a device computes against float64 on the CPU, rounded to the dtype, within the dtype's tolerance."""

import pytest
import torch
import torch.nn.functional as F

from tests.ascend.hardware.sweep import draw
from tests.assertions import DTYPES
from vllm_batch_invariant import batch_invariant_mode
from vllm_batch_invariant.compare import assert_accuracy
from vllm_batch_invariant.ops import reduce
from vllm_batch_invariant.ops import softmax as softmaxes
from vllm_batch_invariant.ops.linear import bmm, linear
from vllm_batch_invariant.ops.linear import reference as exact_linear
from vllm_batch_invariant.ops.norm import reference as exact_norm
from vllm_batch_invariant.ops.norm import rms_norm
from vllm_batch_invariant.ops.reduce import reference as exact_reduce
from vllm_batch_invariant.ops.softmax import reference as exact_softmax

EXACT_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
ANY_DIMS = (None, 0, 1, 2, -1, [0, 2], [1, 2], [0, 1, 2], [])

Tensor = torch.Tensor


def assert_near(actual: Tensor, exact: Tensor, what: str = "") -> None:
    """The dtype's rule; in bf16 one step is more than the rule allows, so a step it is."""
    step = torch.finfo(torch.bfloat16).eps if actual.dtype == torch.bfloat16 else None
    assert_accuracy(actual, exact.to(actual.dtype), what, rtol=step)


@pytest.mark.parametrize("rows", [1, 17, 300])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), [(896, 4864), (100, 300), (17, 1), (1, 512)])
def test_products(columns, depth, dtype, rows, device):
    x, weight, bias = (
        draw(*shape, dtype=dtype, device="cpu") for shape in ((rows, depth), (columns, depth), (columns,))
    )
    weight = weight * depth**-0.5
    on_device = [tensor.to(device) for tensor in (x, weight, bias)]
    assert_near(linear(*on_device), exact_linear.linear(x, weight, bias), "with a bias")
    assert_near(linear(*on_device[:2]), exact_linear.linear(x, weight, None), "without")


@pytest.mark.parametrize("dtype", DTYPES)
def test_batched_products(dtype, device):
    a, b = draw(9, 21, 48, dtype=dtype, device="cpu"), draw(9, 48, 33, dtype=dtype, device="cpu", seed=1) * 48**-0.5
    assert_near(bmm(a.to(device), b.to(device)), a.double() @ b.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", ANY_DIMS)
def test_sums_and_means_over_any_dimensions(dim, dtype, device):
    x = draw(7, 65, 33, dtype=dtype, device="cpu") * 0.1 + 1
    for name in ("sum", "mean"):
        for keepdim in (False, True):
            expected = getattr(exact_reduce, name)(x, dim, keepdim)
            assert_near(getattr(reduce, name)(x.to(device), dim, keepdim), expected, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [4096, 65_537, 200_000])
def test_sums_and_means_of_long_rows(length, dtype, device):
    x = draw(3, length, dtype=dtype, device="cpu") * 0.01 + 0.1
    for name in ("sum", "mean"):
        assert_near(getattr(reduce, name)(x.to(device), -1), getattr(exact_reduce, name)(x, -1), name)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), [((6, 40, 50), 0), ((6, 40, 50), 1), ((6, 40, 50), 2), ((3, 9001), -1)])
def test_softmaxes(shape, dim, dtype, name, device):
    x = draw(*shape, dtype=dtype, device="cpu") * 4
    assert_near(getattr(softmaxes, name)(x.to(device), dim), getattr(exact_softmax, name)(x, dim))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [64, 100, 4096, 9001])
def test_norms(length, dtype, device):
    x, residual = (draw(17, length, dtype=dtype, device="cpu", seed=seed) for seed in (0, 1))
    weight = draw(length, dtype=dtype, device="cpu", seed=2)
    on_device = [tensor.to(device) for tensor in (x, weight)]
    assert_near(rms_norm(*on_device, 1e-6), exact_norm.rms_norm(x, weight, 1e-6))
    fused, summed = rms_norm(*on_device, 1e-6, residual.to(device))
    assert_near(fused, exact_norm.rms_norm(x.double() + residual.double(), weight, 1e-6), "with a residual")
    assert_near(summed, x.double() + residual.double(), "the residual")


@pytest.mark.parametrize("dtype", EXACT_DTYPES)
def test_integers_and_booleans_are_exact_in_the_mode(dtype, device):
    x = (torch.arange(-3000, 3000).view(60, 100) % (2 if dtype == torch.bool else 120)).to(dtype)
    with batch_invariant_mode():
        for dim in (0, 1, (0, 1)):
            assert_accuracy(x.to(device).sum(dim), x.sum(dim), f"sum over {dim}")
        assert_accuracy(x.to(device).sum(), x.sum(), "sum")
        assert_accuracy((x.to(device) > 0).sum(-1), (x > 0).sum(-1), "how many are positive")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_small_network_and_its_gradient_in_the_mode(dtype, device):
    torch.manual_seed(0)
    layers = torch.nn.Linear(96, 200), torch.nn.SiLU(), torch.nn.RMSNorm(200), torch.nn.Linear(200, 50)
    network = torch.nn.Sequential(*layers, torch.nn.LogSoftmax(-1)).to(dtype)
    x = draw(130, 96, dtype=dtype, device="cpu")

    def run(of: torch.device | str, in_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows = x.to(of, in_dtype, copy=True).requires_grad_()
        out = network.to(of, in_dtype)(rows)
        out[:, 3].sum().backward()
        return out.detach(), rows.grad

    expected = run("cpu", torch.float64)
    with batch_invariant_mode():
        results = run(device, dtype)
    # Each layer rounds what it gives to the next.
    allowed = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    for name, actual, exact in zip(("output", "gradient"), results, expected, strict=True):
        assert_accuracy(actual, exact.to(dtype), name, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_in_the_mode(dtype, device):
    query, key, value = (draw(4, 2, 33, 64, dtype=dtype, device="cpu", seed=seed) for seed in range(3))
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), is_causal=True)
    with batch_invariant_mode():
        out = F.scaled_dot_product_attention(*(tensor.to(device) for tensor in (query, key, value)), is_causal=True)
    # Weights are rounded to the dtype before they meet the values.
    allowed = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    assert_accuracy(out, exact.to(dtype), rtol=allowed, atol=allowed)
