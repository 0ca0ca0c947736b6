"""Weights as codes of FP8: what has one scale has the codes and the scale of a row that is quantised, on any device."""

import pytest
import torch

from tests.assertions import assert_same_bits
from vllm_batch_invariant.ops.quantise import E4M3, quantise
from vllm_batch_invariant.ops.quantise.weights import quantise_weight


def of_row(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = quantise(part.reshape(1, -1), codes=E4M3)
    return codes.view(torch.uint8).view(part.shape), scale[0]


def parts_of(shared: str, n: int, k: int, widths: list[int]) -> list[tuple[slice, slice]]:
    sides = {"channel": (1, k), "block": (128, 128)}
    if shared == "tensor":
        ends = torch.tensor(widths).cumsum(0).tolist()
        return [(slice(end - width, end), slice(None)) for width, end in zip(widths, ends, strict=True)]
    rows, columns = sides[shared]
    return [
        (slice(row, row + rows), slice(column, column + columns))
        for row in range(0, n, rows)
        for column in range(0, k, columns)
    ]


@pytest.mark.parametrize("shared", ["tensor", "channel", "block"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_has_one_scale_is_quantised_as_a_row(shared, dtype, device):
    """With sides that no block divides, more rows than are widened at a time, a block of zeros, tiny ones and ties."""
    first = 400 if device.is_interpreted else 2000
    n, k, widths = first + 200, 150, [first, 72, 128]
    weight = device.draw(n, k, dtype=torch.float32) * 10.0 ** torch.linspace(-3, 3, n, device=device.type)[:, None]
    weight[:128], weight[128:256, :128] = 0, 1e-39
    weight[256:384] = 448 - torch.arange(k, device=weight.device) * 0.25
    weight = weight.to(dtype)
    codes, scale = quantise_weight(weight, shared, widths)
    assert codes.dtype == E4M3
    assert scale.shape == {"tensor": (3,), "channel": (n, 1), "block": (-(-n // 128), 2)}[shared]
    for part, found in zip(parts_of(shared, n, k, widths), scale.flatten(), strict=True):
        right, of_part = of_row(weight[part])
        assert_same_bits(codes.view(torch.uint8)[part], right)
        assert_same_bits(found, of_part)


@pytest.mark.parametrize("shared", ["tensor", "channel", "block"])
@pytest.mark.parametrize("strange", [torch.inf, torch.nan])
def test_what_is_not_finite_makes_its_scale_nan(shared, strange, device):
    weight = device.draw(256, 256, dtype=torch.float32)
    weight[130, 7] = strange
    _, scale = quantise_weight(weight, shared)
    assert scale.isnan().sum() == 1
