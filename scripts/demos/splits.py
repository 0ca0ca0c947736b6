"""Attention in splits: a fixed number of them depends on how many keys there are, a fixed size of them does not.

usage: python -m scripts.demos.splits [--device cpu|cuda]

A query at position 999 sees 1000 keys. It is computed by decode, when there are 1000, and in prefills whose last query
sees more. A kernel that cuts the keys into a fixed number of splits cuts them elsewhere each time. Splits of a fixed
size, counted from position 0, lie where they lie, and those beyond the query have no part in it. The last column is 0
on any machine; the one before it was this on a Xeon with AVX-512 (PyTorch 2.13):

    The query at position 999: elements of 512 with other bits than in decode

    | keys there are | 4 splits | splits of 256 |
    |----------------|----------|---------------|
    | 1000           | 0        | 0             |
    | 1001           | 464      | 0             |
    | 1024           | 458      | 0             |
    | 1500           | 460      | 0             |
    | 2048           | 472      | 0             |
    | 4096           | 468      | 0             |
"""

import argparse

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_batch_invariant.ops.attention.merge import merge_splits

POSITION = 999
KEYS = (1000, 1001, 1024, 1500, 2048, 4096)
HEADS, HEAD_SIZE = 8, 64
NUMBER, SIZE = 4, 256


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, size: int) -> torch.Tensor:
    """One query [heads, head_size] over the keys [heads, keys, head_size] up to its position, in splits of ``size``.

    Each split is a softmax of its own, in fp32; the splits are merged in ascending order.
    """
    outputs, lses = [], []
    for start in range(0, key.shape[1], size):
        seen = slice(start, min(start + size, POSITION + 1))
        if seen.start >= seen.stop:
            break
        score = (query[:, None] * key[:, seen]).sum(-1) * HEAD_SIZE**-0.5
        lses.append(score.logsumexp(-1))
        outputs.append((torch.exp(score - lses[-1][:, None])[..., None] * value[:, seen]).sum(1))
    return merge_splits(torch.stack(outputs), torch.stack(lses))


def cuts() -> dict[str, dict[int, int]]:
    """Keys in a split: by the way of cutting, and by the number of keys there are."""
    return {
        f"{NUMBER} splits": {keys: -(-keys // NUMBER) for keys in KEYS},
        f"splits of {SIZE}": dict.fromkeys(KEYS, SIZE),
    }


def results(device: str = "cpu") -> dict[str, dict[int, torch.Tensor]]:
    """The query's result, as :func:`cuts` lists them."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(HEADS, HEAD_SIZE, generator=generator).to(device)
    key, value = (torch.randn(HEADS, max(KEYS), HEAD_SIZE, generator=generator).to(device) for _ in range(2))
    return {
        way: {keys: attend(query, key[:, :keys], value[:, :keys], size) for keys, size in sizes.items()}
        for way, sizes in cuts().items()
    }


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to compute")
    found = results(parser.parse_args(arguments).device)
    print(f"The query at position {POSITION}: elements of {HEADS * HEAD_SIZE} with other bits than in decode")
    table = Table("keys there are", *found, box=box.MARKDOWN)
    for keys in KEYS:
        table.add_row(str(keys), *(str(int((result[keys] != result[KEYS[0]]).sum())) for result in found.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
