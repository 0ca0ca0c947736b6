"""vLLM's top-k and top-p on CUDA, by one kernel with both filters, whatever the batch asks for.

vLLM takes one of two implementations by the number of rows, and leaves a filter out of the kernel that no row wants: a
row's mask could change with its company. A row that wants neither keeps all its logits.
"""

import torch

from . import seams


def install() -> None:
    """Put the one kernel in the place of both implementations."""
    kernel = seams.TOP_K_TOP_P_KERNEL.get()

    def apply(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, **_: object) -> torch.Tensor:
        rows, vocabulary = logits.shape
        if k is None:
            k = torch.full((rows,), vocabulary, dtype=torch.int32, device=logits.device)
        if p is None:
            p = torch.ones(rows, device=logits.device)
        return kernel(logits, k, p)

    seams.TOP_K_TOP_P_FEW_ROWS.put(apply)
    setattr(seams.TOP_K_TOP_P_FEW_ROWS.module(), kernel.__name__, apply)
