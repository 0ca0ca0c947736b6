"""Adapters of a small layer's experts."""

import torch

from tests.ops.moe.layers import EXPERTS, HIDDEN, INTERMEDIATE, Layer
from vllm_batch_invariant.ops.moe import ExpertAdapters

SLOTS = 3
RANK = 16


def adapted(of: Layer, count: int, rank: int = RANK, padding: int = 3) -> ExpertAdapters:
    """Of three slots, the second with half the rank, for so many tokens, of which some have none. Behind their slots
    are others. gpt-oss's first product has one slice, of both halves in turn; one without a gate has one, too.
    """
    generator, dtype, reduction = torch.Generator().manual_seed(3), of.reduction.dtype, of.reduction
    in_one = reduction.activation == "swigluoai"
    columns = [INTERMEDIATE * 2] if in_one else [INTERMEDIATE] * (1 + reduction.is_gated)

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    def pair(k: int, columns: list[int]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        a = tuple(drawn(SLOTS, EXPERTS, rank, k) for _ in columns)
        b = tuple(drawn(SLOTS, EXPERTS, n, rank) for n in columns)
        for one in a:
            one[1, :, rank // 2 :] = 0
        return a, b

    slots = torch.randint(-1, SLOTS, (count + padding,), generator=generator)
    return ExpertAdapters(slots, pair(HIDDEN, columns), pair(INTERMEDIATE, [HIDDEN]))
