"""Gradients of RMSNorm: right, and with the same bits for a row whatever other rows there are."""

import pytest
import torch

from tests.assertions import DTYPES, assert_near, assert_same_bits
from vllm_batch_invariant.ops import reduce
from vllm_batch_invariant.ops.norm_backward import rms_norm_backward

LENGTHS = (7, 64, 128, 777, 4096)
LONG = 17_000
"""Elements of a row that no program holds."""
MOST_COLUMNS_INTERPRETED = 64


@pytest.fixture(autouse=True)
def sums_of_many_columns_are_the_cpus(device, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds for each column of the weight's gradient. It adds those of short rows; what
    adds them is the same for long ones, and tests/ops/reduce has its tests.
    """
    if device.is_interpreted and request.node.callspec.params.get("length", 0) > MOST_COLUMNS_INTERPRETED:
        from vllm_batch_invariant.ops.reduce import cpu  # needs numba

        monkeypatch.setattr(reduce, "sum", cpu.sum)


def operands(device, rows: int, length: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    names = ("x", "grad", "residual", "grad_of_sum")
    made = {name: device.draw(rows, length, dtype=dtype, seed=seed) for seed, name in enumerate(names)}
    return made | {"weight": device.draw(length, dtype=dtype, seed=9)}


def expected(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    grad: torch.Tensor,
    residual: torch.Tensor | None = None,
    grad_of_sum: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """By PyTorch's autograd, in float64."""
    leaf = (x.double() if residual is None else x.double() + residual.double()).requires_grad_()
    scale = weight.double().requires_grad_()
    out = leaf * (leaf.square().mean(-1, keepdim=True) + eps).rsqrt() * scale
    out.backward(grad.double())
    return leaf.grad + (0 if grad_of_sum is None else grad_of_sum.double()), scale.grad


def check_near(found: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Gradients of rows are sums of three terms, those of the weight of a row each."""
    assert_near(found[0], right[0], factor=3)
    assert_near(found[1], right[1], factor=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [*LENGTHS, LONG])
def test_gradients_are_near_those_of_float64(length, dtype, device):
    of = operands(device, 2 if length == LONG else 21, length, dtype)
    plain = {name: of[name] for name in ("x", "weight", "grad")}
    check_near(rms_norm_backward(eps=1e-5, **plain), expected(eps=1e-5, **plain))
    check_near(rms_norm_backward(eps=1e-5, **of), expected(eps=1e-5, **of))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_row_has_the_same_bits_at_every_batch_size(length, dtype, device):
    most = device.row_counts[-1]
    of = operands(device, most, length, dtype)
    weight = of.pop("weight")
    whole, of_weight = rms_norm_backward(weight=weight, eps=1e-6, **of)
    again, of_weight_again = rms_norm_backward(weight=weight, eps=1e-6, **of)
    assert_same_bits(again, whole)
    assert_same_bits(of_weight_again, of_weight)
    for rows in device.row_counts:
        last = {name: tensor[most - rows :] for name, tensor in of.items()}
        assert_same_bits(rms_norm_backward(weight=weight, eps=1e-6, **last)[0], whole[most - rows :], f"{rows} rows")


def test_heads_side_by_side_have_the_gradients_of_copies(device):
    x, weight = device.draw(9, 6 * 64)[:, : 4 * 64].view(9, 4, 64), device.draw(64, seed=1)
    grad = device.draw(9, 4, 64, seed=2)
    found = rms_norm_backward(x, weight, 1e-6, grad)
    copied = rms_norm_backward(x.reshape(36, 64), weight, 1e-6, grad.view(36, 64))
    assert found[0].shape == (9, 4, 64)
    assert_same_bits(found[0].reshape(36, 64), copied[0])
    assert_same_bits(found[1], copied[1])


def test_without_an_eps_the_rows_that_fill_up_a_tile_add_nothing(device):
    of = operands(device, 3, 64, torch.float32)
    plain = {name: of[name] for name in ("x", "weight", "grad")}
    right = rms_norm_backward(eps=0.0, **plain)
    assert right[0].isfinite().all()
    assert right[1].isfinite().all()
    check_near(right, expected(eps=0.0, **plain))


def test_no_rows_have_no_gradients(device):
    weight = device.draw(64)
    of_x, of_weight = rms_norm_backward(device.draw(0, 64), weight, 1e-6, device.draw(0, 64))
    assert of_x.shape == (0, 64)
    assert_same_bits(of_weight, torch.zeros_like(weight))
