"""Adapters of several ranks in the slots of one layer, and rows of some of them and of none."""

from dataclasses import dataclass

import torch

from vllm_batch_invariant.ops.lora import LoraReduction, add_adapters

RANKS = (8, 16, 64, 1)
"""Of the adapters in the slots."""
SLICES = (96, 32, 40)
"""Columns of a fused layer's parts."""


@dataclass(frozen=True)
class Layer:
    """Tensors as of :func:`add_adapters`."""

    y: torch.Tensor
    x: torch.Tensor
    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]
    slots: torch.Tensor

    @property
    def reduction(self) -> LoraReduction:
        return LoraReduction.of_device(self.x.device.type, self.x.shape[1], self.x.dtype)

    def __call__(self, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """What some rows of y become."""
        out = self.y[rows].clone()
        add_adapters(out, self.x[rows], self.a, self.b, self.slots[rows], self.reduction)
        return out


def layer(
    dtype: torch.dtype = torch.bfloat16,
    rows: int = 70,
    k: int = 160,
    room: int = 64,
    device: str = "cpu",
    slices: tuple[int, ...] = SLICES,
) -> Layer:
    """A layer with an adapter of each of :data:`RANKS`, in tensors with room for a rank; the second one has no target
    in the first part.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    a = [torch.zeros(len(RANKS), 1, room, k, dtype=dtype, device=device) for _ in slices]
    b = [torch.zeros(len(RANKS), 1, n, room, dtype=dtype, device=device) for n in slices]
    for slot, rank in enumerate(RANKS):
        for part, n in enumerate(slices):
            of_a, of_b = drawn(rank, k) / k**0.5, drawn(n, rank) / rank**0.5
            if (slot, part) != (1, 0) or len(slices) == 1:
                a[part][slot, 0, :rank], b[part][slot, 0, :, :rank] = of_a, of_b
    slots = torch.randint(-1, len(RANKS), (rows,), generator=generator).to(device)
    return Layer(drawn(rows, sum(slices)), drawn(rows, k), tuple(a), tuple(b), slots)
