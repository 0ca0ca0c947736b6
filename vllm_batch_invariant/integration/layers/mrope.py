"""The rotary embedding of multimodal models (M-RoPE).

A token's position has three rows: time, height and width of a picture, and each frequency takes its angle from one of
them (Qwen2-VL, arXiv:2409.12191). That is the plain rotation by a row of angles that is picked out of three. So the
angles are picked first, which copies numbers, and vLLM's plain kernel of every other model turns by them: a token of
text, whose rows are equal, has the bits of a text model, whatever pictures are in its batch.
"""

from types import SimpleNamespace
from typing import Any

import torch

from ...ops.norm_rotary import Sections
from ..reviews import patch_points
from ..reviews.encoding import encoded


def install() -> None:
    """Register the layer as the out-of-tree form of vLLM's, so that every model builds it instead."""
    layer: Any = patch_points.M_ROPE.get()
    if layer.__name__ in patch_points.CUSTOM_OP.module().op_registry_oot:
        return

    class PickedRotaryEmbedding(layer):
        """Turns queries and keys by angles that are picked out of those of three positions.

        Attributes:
            takes_pictures: whether a token's positions may differ; of a model that is served as text the first counts.
        """

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            model = patch_points.CURRENT_CONFIG.get()().model_config
            self.takes_pictures = model is not None and bool(encoded(model))

        def forward_native(
            self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            return _turn(self, "forward_native", positions, query, key)

        def forward_cpu(
            self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            return _turn(self, "forward_cpu", positions, query, key)

        def forward_cuda(
            self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            return _turn(self, "forward_cuda", positions, query, key)

    layer.register_oot(PickedRotaryEmbedding, name=layer.__name__)


def _turn(
    rotary: Any, forward: str, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A method of the plain layer, with angles that are picked."""
    plain = patch_points.ROTARY_EMBEDDING.get()
    if not rotary.takes_pictures or positions.dim() != 2:
        return getattr(plain, forward)(rotary, of_text(positions), query, key)
    rows, angles = row_of_angles(rotary, positions, rotary._match_cos_sin_cache_dtype(query))
    picked = SimpleNamespace(
        cos_sin_cache=angles,
        _match_cos_sin_cache_dtype=lambda query: angles,
        forward_static=plain.forward_static,
        head_size=rotary.head_size,
        rotary_dim=rotary.rotary_dim,
        is_neox_style=rotary.is_neox_style,
        use_flashinfer=rotary.use_flashinfer,
    )
    return getattr(plain, forward)(picked, rows, query, key)


def row_of_angles(
    rotary: Any, positions: torch.Tensor, cache: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the plain rotation turns by: the row of each token's angles, and the rows.

    Args:
        rotary: a rotary embedding, of any kind.
        positions: [tokens], or [3, tokens] of time, height and width.
        cache: [positions, rotary size] cosines and sines by position; else the embedding's own.

    Returns:
        [tokens], and [rows, rotary size].
    """
    cache = rotary.cos_sin_cache if cache is None else cache
    positions, sections = sections_of(rotary, positions)
    if sections is None:
        return positions, cache
    picked = positions[sections.rows(positions.device)].T  # [tokens, half of a head]
    angles = torch.cat([half.gather(0, picked) for half in cache.chunk(2, dim=-1)], dim=-1)
    return torch.arange(positions.shape[1], device=positions.device), angles


def sections_of(rotary: Any, positions: torch.Tensor) -> tuple[torch.Tensor, Sections | None]:
    """What :func:`...ops.norm_rotary.norm_rotary` turns by: positions, and how frequencies share three of them."""
    sections = sections_in(rotary)
    return (of_text(positions), None) if positions.dim() != 2 or sections is None else (positions, sections)


def sections_in(rotary: Any) -> Sections | None:
    """How the frequencies of a rotary embedding share three positions; None if it never takes pictures."""
    if not getattr(rotary, "takes_pictures", False):
        return None
    time, height, width = rotary.mrope_section
    return Sections(time, height, width, bool(rotary.mrope_interleaved))


def of_text(positions: torch.Tensor) -> torch.Tensor:
    """The positions [tokens] of text, of which M-RoPE has three equal rows [3, tokens]."""
    return positions[0] if positions.dim() == 2 else positions


def serves(rotary: object) -> bool:
    """Whether a rotary embedding is the layer here."""
    return type(rotary) is patch_points.CUSTOM_OP.module().op_registry_oot.get(patch_points.M_ROPE.attribute)
