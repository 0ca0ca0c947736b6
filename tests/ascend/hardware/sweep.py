"""Computes rows alone, in batches of many sizes and at other places, and compares their bits."""

from collections.abc import Callable, Iterator, Sequence

import torch

from vllm_batch_invariant.compare import assert_same_bits, bitwise_comparison

ROWS = 300
COUNTS = (*range(1, 18), 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 299)
"""Batch sizes around every tile border."""
COUNTS_ON_A_CPU = (1, 2, 17, 33, 128, 257)
"""There the tests are tried, not the operations, which have tests of their own."""

Tensor = torch.Tensor
Function = Callable[..., Tensor | Sequence[Tensor]]
"""Takes tensors and returns one or several, all of one length: a row of the results belongs to a row of each tensor."""


def draw(*shape: int, dtype: torch.dtype = torch.float32, device: str, seed: int = 0) -> Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_rows_keep_their_bits(function: Function, *batch: Tensor, counts: Sequence[int] = COUNTS) -> None:
    """Fail when rows have other bits in a part of the batch, at another place, or when all is computed again."""
    whole = _several(function(*batch))
    for name, rows in _choices(batch[0], counts):
        results = _several(function(*(tensor[rows] for tensor in batch)))
        for i, (part, expected) in enumerate(zip(results, whole, strict=True)):
            assert_same_bits(part, expected[rows], f"{name}, result {i}" if len(whole) > 1 else name)


def counts_with_other_bits(function: Function, *batch: Tensor, counts: Sequence[int] = COUNTS) -> list[int]:
    """The batch sizes at which some row has other bits than in the whole batch."""
    whole = _several(function(*batch))
    return [
        count
        for count in counts
        if not all(
            bitwise_comparison(part, expected[:count])
            for part, expected in zip(_several(function(*(tensor[:count] for tensor in batch))), whole, strict=True)
        )
    ]


def _choices(batch: Tensor, counts: Sequence[int]) -> Iterator[tuple[str, slice | Tensor]]:
    rows = len(batch)
    for count in counts:
        if count <= rows and (batch.device.type != "cpu" or count in COUNTS_ON_A_CPU):
            yield f"first {count} rows", slice(count)
            yield f"last {count} rows", slice(rows - count, rows)
    yield "all again", slice(rows)
    yield "all in another order", torch.randperm(rows, generator=torch.Generator().manual_seed(0)).to(batch.device)


def _several(result: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return (result,) if isinstance(result, Tensor) else result
