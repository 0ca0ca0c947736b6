"""The rotary embedding on a CPU turns queries and keys that come by heads as it turns rows of them."""

import pytest
import torch

pytest.importorskip("vllm")

from tests.assertions import DTYPES, assert_same_bits
from vllm_batch_invariant.integration.layers import rotary_cpu
from vllm_batch_invariant.integration.reviews import patch_points

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's kernel for CPUs is not installed")
HEADS, KV_HEADS, SIZE, ROWS = 4, 2, 64, 17


def turned(rotate: object, rows: int, by_heads: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of the first rows, as rows."""
    patch_points.ROTARY.module()
    generator = torch.Generator().manual_seed(0)
    q, k, table = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((ROWS, HEADS, SIZE), (ROWS, KV_HEADS, SIZE), (100, SIZE))
    )
    q, k = (x[:rows].clone() if by_heads else x[:rows].flatten(1) for x in (q, k))
    rotate(torch.arange(ROWS)[:rows] * 5, q, k, SIZE, table, True)
    return q.view(rows, -1), k.view(rows, -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_turned_as_rows_are(dtype: torch.dtype) -> None:
    stock = patch_points.ROTARY.get()
    ours = rotary_cpu.of_rows(stock)
    for rows in (1, 2, ROWS):
        for by_heads, rows_too in zip(turned(ours, rows, True, dtype), turned(stock, rows, False, dtype), strict=True):
            assert_same_bits(by_heads, rows_too, f"{rows} rows")
    assert rotary_cpu.of_rows(ours) is ours


def test_plain_vllm_turns_a_tokens_heads_with_those_of_its_neighbours() -> None:
    """A version that has mended it no longer needs the function."""
    stock = patch_points.ROTARY.get()
    alone, among = (turned(stock, rows, True, torch.bfloat16)[0][0] for rows in (1, ROWS))
    assert not torch.equal(alone, among)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_heads_are_turned_as_heads_of_their_size(dtype: torch.dtype) -> None:
    """What latent attention turns of a query lies between what it does not."""
    ours, table = rotary_cpu.of_rows(patch_points.ROTARY.get()), torch.randn(100, SIZE).to(dtype)
    heads = torch.randn(ROWS, HEADS, 3 * SIZE).to(dtype)
    key, positions = torch.randn(ROWS, 1, SIZE).to(dtype), torch.arange(ROWS) * 5
    part, apart, keys = heads[..., SIZE : 2 * SIZE], heads.clone(), [key.clone() for _ in "ab"]
    alone = part.contiguous()
    ours(positions, alone, keys[0], SIZE, table, False)
    ours(positions, apart[..., SIZE : 2 * SIZE], keys[1], SIZE, table, False)
    assert_same_bits(apart[..., SIZE : 2 * SIZE].contiguous(), alone)
    assert_same_bits(keys[0], keys[1])
    for untouched in (slice(SIZE), slice(2 * SIZE, None)):
        assert_same_bits(apart[..., untouched].contiguous(), heads[..., untouched].contiguous())
