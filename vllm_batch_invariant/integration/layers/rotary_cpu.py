"""vLLM's rotary embedding on a CPU, for models that give it queries and keys by heads, as LFM2 does, or parts of heads,
as those with latent attention do.

Its kernel (``csrc/cpu/pos_encoding.cpp``, read and run in 0.32) steps from token to token by the last stride but one.
Of [tokens, heads, head_size] that is the stride of heads: a token's heads are turned by the angles of others, and again
with those. So a row follows its neighbours, and is wrong alone, too.
"""

from functools import wraps
from typing import Any

import torch

from ..reviews import patch_points


def install() -> None:
    """Have the kernel given rows."""
    patch_points.ROTARY.put(of_rows(patch_points.ROTARY.get()))


def of_rows(rotate: Any) -> Any:
    """vLLM's function, which turns queries and keys in place, given each token's heads as one row: a copy, where they
    are not one after the other.
    """
    if getattr(rotate, "of_rows", False):
        return rotate

    @wraps(rotate)
    def rotary_embedding(
        positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None, *rest: Any, **named: Any
    ) -> None:
        rows = [x.reshape(len(x), -1) if x is not None and x.dim() == 3 else x for x in (query, key)]
        rotate(positions, *rows, *rest, **named)
        for x, turned in zip((query, key), rows, strict=True):
            if x is not None and turned is not None and x.data_ptr() != turned.data_ptr():
                x.copy_(turned.view_as(x))

    rotary_embedding.of_rows = True  # type: ignore[attr-defined]  # what a function keeps of itself
    return rotary_embedding
