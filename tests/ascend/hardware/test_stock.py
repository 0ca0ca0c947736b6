"""The negative control: the sweep sees bits that follow the batch, and which stock operators have such bits."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.ascend.hardware.sweep import COUNTS, ROWS, assert_rows_keep_their_bits, counts_with_other_bits, draw
from tests.assertions import DTYPES
from vllm_batch_invariant.compare import Mismatch

Tensor = torch.Tensor

STOCK: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda x, w: torch.mm(x, w.t()),
    "linear": lambda x, w: F.linear(x, w),
    "addmm": lambda x, w: torch.addmm(w[:, 0], x, w.t()),
    "bmm": lambda x, w: torch.bmm(x[None], w.t()[None])[0],
    "baddbmm": lambda x, w: torch.baddbmm(w[:, 0], x[None], w.t()[None])[0],
    "sum": lambda x, w: x.sum(-1),
    "mean": lambda x, w: x.mean(-1),
    "softmax": lambda x, w: x.softmax(-1),
    "log_softmax": lambda x, w: x.log_softmax(-1),
    "rms_norm": lambda x, w: F.rms_norm(x, x.shape[1:], w[0], 1e-6),
}


def test_the_sweep_finds_an_operator_that_follows_the_batch(device):
    def halves_of_large_batches(x: Tensor) -> Tensor:
        return x.sum(-1) if len(x) < 64 else x[:, :300].sum(-1) + x[:, 300:].sum(-1)

    x = draw(130, 777, device=device)
    assert counts_with_other_bits(halves_of_large_batches, x)
    with pytest.raises(Mismatch, match="elements differ"):
        assert_rows_keep_their_bits(halves_of_large_batches, x)


def test_the_sweep_finds_an_operator_that_follows_the_place(device):
    x = draw(130, 777, device=device)
    places = torch.arange(130, device=device)
    with pytest.raises(Mismatch):
        assert_rows_keep_their_bits(lambda rows: rows + (places[: len(rows), None] == 64), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STOCK)
def test_where_a_stock_operator_follows_the_batch_is_reported(name, dtype, device, report):
    x, weight = draw(ROWS, 4864, dtype=dtype, device=device), draw(896, 4864, dtype=dtype, device=device, seed=1)
    found = counts_with_other_bits(lambda rows: STOCK[name](rows, weight), x)
    of = f"stock {name} in {str(dtype).removeprefix('torch.')}"
    report(f"{of}: other bits at {len(found)} of {len(COUNTS)} batch sizes {found}" if found else f"{of}: did not vary")
