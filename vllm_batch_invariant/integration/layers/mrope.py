"""The rotary embedding of multimodal models (M-RoPE), for requests that are text.

A token's position has three rows: time, height and width of a picture. Those of text are equal, and so M-RoPE is the
plain rotation by any of them (Qwen2-VL, arXiv:2409.12191). vLLM's plain kernel computes it here: the one of every other
model, which needs no proof of its own. The mode serves multimodal models as text only (``coverage.py``).
"""

from typing import Any

import torch

from ..reviews import patch_points


def install() -> None:
    """Register the layer as the out-of-tree form of vLLM's, so that every model builds it instead."""
    layer: Any = patch_points.M_ROPE.get()
    plain = patch_points.ROTARY_EMBEDDING.get()
    if layer.__name__ in patch_points.CUSTOM_OP.module().op_registry_oot:
        return

    class TextRotaryEmbedding(layer):
        """Turns queries and keys by the positions' first row."""

        def forward_native(
            self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            return plain.forward_native(self, of_text(positions), query, key)

        def forward_cpu(
            self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            return plain.forward_cpu(self, of_text(positions), query, key)

        def forward_cuda(
            self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            return plain.forward_cuda(self, of_text(positions), query, key)

    layer.register_oot(TextRotaryEmbedding, name=layer.__name__)


def of_text(positions: torch.Tensor) -> torch.Tensor:
    """The positions [tokens] of text, of which M-RoPE has three equal rows [3, tokens]."""
    return positions[0] if positions.dim() == 2 else positions


def serves(rotary: object) -> bool:
    """Whether a rotary embedding is the layer here."""
    return type(rotary) is patch_points.CUSTOM_OP.module().op_registry_oot.get(patch_points.M_ROPE.attribute)
