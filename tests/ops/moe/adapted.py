"""Adapters of a small layer's experts."""

import torch

from tests.ops.moe.layers import EXPERTS, HIDDEN, INTERMEDIATE, Layer
from vllm_batch_invariant.ops.lora import LoraReduction
from vllm_batch_invariant.ops.moe import ExpertAdapters, Experts
from vllm_batch_invariant.ops.moe.params import Slices

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


def composed(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: Experts) -> torch.Tensor:
    """What a GPU gives, of dense products of an expert's rows by the smallest tile, and of additions of PyTorch's."""
    from vllm_batch_invariant.ops.lora import cuda as lora
    from vllm_batch_invariant.ops.moe import cuda

    top_k, adapters = experts.reduction.top_k, experts.adapters
    assert adapters is not None
    terms = torch.empty(ids.numel(), x.shape[1], dtype=x.dtype, device=x.device)

    def product(rows: torch.Tensor, slots: torch.Tensor, weight: torch.Tensor, of: tuple[Slices, Slices], expert: int):
        y = lora._dense(rows, weight[expert]).to(x.dtype)
        a, b = ([one[:, expert : expert + 1] for one in slices] for slices in of)
        return lora.composed(y, rows, a, b, slots, LoraReduction.of_device("cuda", rows.shape[1], rows.dtype))

    for expert in ids.unique().tolist():
        pairs = (ids.flatten() == expert).nonzero()[:, 0]
        slots = adapters.slots[pairs // top_k]
        hidden = product(x[pairs // top_k], slots, experts.gate_up, adapters.gate_up, expert)
        activated = cuda._activated(hidden, experts.reduction.activation)
        terms[pairs] = product(activated, slots, experts.down, adapters.down, expert)
    return cuda.Products(terms, weights, ids, None).added()
