"""softmax and log_softmax: a row has the same bits alone and in any batch, and so has what is computed with them."""

import pytest
import torch
import torch.nn.functional as F

from tests.ascend.hardware.sweep import ROWS, assert_rows_keep_their_bits, draw
from tests.assertions import DTYPES, assert_same_bits
from vllm_batch_invariant import batch_invariant_mode
from vllm_batch_invariant.compare import assert_accuracy
from vllm_batch_invariant.ops import softmax as softmaxes

NAMES = ("softmax", "log_softmax")
LENGTHS = (1, 63, 64, 777, 4096, 9001)
VOCABULARY = 151_936


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_row_has_the_same_bits_in_any_batch(length, dtype, name, device):
    assert_rows_keep_their_bits(getattr(softmaxes, name), draw(ROWS, length, dtype=dtype, device=device) * 4)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_as_long_as_a_vocabulary_has_the_same_bits_in_any_batch(name, device):
    x = draw(5, VOCABULARY, device=device) * 4
    assert_rows_keep_their_bits(getattr(softmaxes, name), x, counts=range(1, 5))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [1, 2])
def test_an_entry_has_the_same_bits_in_any_batch_over_any_dimension(dim, name, device):
    x = draw(70, 6, 50, device=device)
    assert_rows_keep_their_bits(lambda entries: getattr(softmaxes, name)(entries, dim), x)
    turned = lambda entries: getattr(softmaxes, name)(entries.movedim(0, 2), dim - 1).movedim(2, 0)  # noqa: E731
    assert_rows_keep_their_bits(turned, x)


@pytest.mark.parametrize("name", NAMES)
def test_more_rows_than_a_grid_of_65535(name, device):
    x = draw(70_001, 40, device=device)
    function = getattr(softmaxes, name)
    assert_same_bits(function(x)[-9:], function(x[-9:]))


@pytest.mark.parametrize("name", NAMES)
def test_special_values_are_those_of_pytorch_on_a_cpu(name, device):
    x = draw(6, 40, device="cpu")
    x[0, ::2] = -torch.inf
    x[1] = -torch.inf
    x[2, 3] = torch.inf
    x[3, 5] = torch.nan
    x[4, 7] = 1e4
    ours, stock = getattr(softmaxes, name)(x.to(device)), getattr(torch, name)(x, -1)
    assert_same_bits(ours.isnan(), stock.isnan())
    assert_accuracy(ours, stock, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_pytorch_makes_of_them_keeps_the_bits_of_a_row_in_the_mode(dtype, device):
    x, targets = draw(ROWS, 777, dtype=dtype, device=device), (torch.arange(ROWS) % 777).to(device)
    with batch_invariant_mode(), torch.no_grad():
        assert_rows_keep_their_bits(lambda rows: torch.softmax(rows, -1, dtype=torch.float32), x)
        assert_rows_keep_their_bits(lambda rows: torch.nn.LogSoftmax(-1)(rows), x)
        assert_rows_keep_their_bits(lambda rows, of: F.cross_entropy(rows, of, reduction="none"), x, targets)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_gives_a_request_the_same_bits_in_any_batch_in_the_mode(dtype, device):
    query, key, value = (draw(40, 2, 33, 64, dtype=dtype, device=device, seed=seed) for seed in range(3))
    with batch_invariant_mode(), torch.no_grad():
        assert_rows_keep_their_bits(lambda *of: F.scaled_dot_product_attention(*of, is_causal=True), query, key, value)
