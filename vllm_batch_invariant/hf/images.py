"""The forward method of a model of text and images: what the encoder gives takes the place of image tokens, and each of
these has the positions of its row and column (M-RoPE), as in the engine.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import NotCovered
from ..ops.norm_rotary import Sections
from . import support
from .packing import Packed, packed_of
from .pixels import PixelNorm
from .rotary import Angles, table_of
from .vision import grids_of, of_a_video, places_of


def model_forward(
    self: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    use_cache: bool | None = None,
    pixel_values: torch.Tensor | None = None,
    image_grid_thw: torch.Tensor | None = None,
    mm_token_type_ids: torch.Tensor | None = None,
    pixel_values_videos: torch.Tensor | None = None,
    video_grid_thw: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """Hidden states [rows, columns, hidden] of input_ids [rows, columns]; those of padding are 0.

    Args:
        self: the model.
        position_ids: None; or [rows, columns] where each 0 begins a sequence; or [3, rows, columns] of time, height and
            width, which have to be the engine's; or [4, rows, columns] of both, one behind the other.
        pixel_values: [patches, channels * size], see :class:`.pixels.PixelNorm`.
        image_grid_thw: [images, 3], in the order of their tokens.
        mm_token_type_ids: [rows, columns], 1 at tokens of images; not needed.
    """
    if input_ids is None or inputs_embeds is not None:
        raise NotCovered(
            "inputs_embeds in a trainer of images", "tokens say where the engine puts images", "pass input_ids"
        )
    if pixel_values_videos is not None or video_grid_thw is not None:
        raise of_a_video()
    if (pixel_values is None) != (image_grid_thw is None):
        raise ValueError("pass pixel_values and image_grid_thw, or neither")
    support.check_call(
        input_ids.device, attention_mask, past_key_values=past_key_values, use_cache=use_cache, **options
    )
    of_images = None
    if position_ids is not None and position_ids.dim() == 3:
        of_images = position_ids[-3:]
        position_ids = position_ids[0] if len(position_ids) == 4 else None
    batch = packed_of(input_ids, attention_mask, position_ids, cu_seq_lens_q, cu_seq_lens_k, seq_idx)
    tokens = batch.pack(input_ids)
    is_image = tokens == self.config.image_token_id
    if mm_token_type_ids is not None and not torch.equal(batch.pack(mm_token_type_ids).to(tokens), is_image.to(tokens)):
        raise NotCovered(
            "mm_token_type_ids of others than image tokens", "the engine goes by the tokens", "leave them out"
        )
    hidden = self.get_input_embeddings()(tokens)
    positions = _positions(self, batch, is_image, image_grid_thw)
    if of_images is not None and any(
        not torch.equal(batch.pack(given), ours) for given, ours in zip(of_images, positions, strict=True)
    ):
        raise NotCovered("position_ids of images that are not the engine's", "it counts them itself", "leave them out")
    added: list[torch.Tensor] = []
    if pixel_values is not None and image_grid_thw is not None:
        features = _features(self, pixel_values, image_grid_thw)
        places = is_image.nonzero().squeeze(1)
        added = [torch.zeros_like(hidden).index_copy(0, places, one) for one in features[1:]]
        hidden = hidden.index_copy(0, places, features[0])
    config = self.language_model.config
    support.check_length(batch.positions, config.max_position_embeddings)
    angles = Angles.picked(table_of(config, hidden), positions, sections_of(config))
    last = batch.pad(self.language_model(hidden, batch, angles, added))
    output = getattr(sys.modules[type(self).__module__], f"{type(self).__name__}OutputWithPast")
    return output(last_hidden_state=last)


def sections_of(config: Any) -> Sections:
    """How frequencies share three positions, of a text model's configuration."""
    rope = config.rope_parameters
    time, height, width = rope["mrope_section"]
    return Sections(time, height, width, bool(rope.get("mrope_interleaved", False)))


def _features(self: Any, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> list[torch.Tensor]:
    """What the encoder gives for the tokens of all images, [tokens, hidden], and for each layer that adds some."""
    norm: PixelNorm | None = self.pixel_norm
    if norm is None:
        raise NotCovered(
            "images in a trainer without an image processor",
            "the engine normalises bytes itself, with the processor's mean and deviation",
            "call patch(model, image_processor=processor.image_processor)",
        )
    is_trained = any(weight.requires_grad for weight in self.visual.parameters())
    with torch.set_grad_enabled(is_trained and torch.is_grad_enabled()):
        found = self.visual(norm(pixel_values), grid_thw=image_grid_thw)
    return [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]


def _positions(self: Any, batch: Packed, is_image: torch.Tensor, image_grid_thw: torch.Tensor | None) -> torch.Tensor:
    """[3, tokens] int64: time, height and width of each token, counted from 0 in each sequence.

    Raises:
        NotCovered: image tokens that are not those of the images.
    """
    merge = self.config.vision_config.spatial_merge_size
    grids = [] if image_grid_thw is None else grids_of(image_grid_thw)
    tokens = iter([(height // merge, width // merge) for height, width in grids])
    seen = is_image.cpu()
    positions = torch.empty(3, len(seen), dtype=torch.int64)
    for rows in batch.sequences:
        place = position = 0
        of_sequence, into = seen[rows], positions[:, rows]
        for start, height, width in _images(of_sequence, tokens):
            into[:, place:start] = torch.arange(position, position + start - place)
            position += start - place
            place = start + height * width
            row, column = places_of(height, width)
            into[0, start:place] = position
            into[1, start:place] = position + row.flatten()
            into[2, start:place] = position + column.flatten()
            position += max(height, width)
        into[:, place:] = torch.arange(position, position + into.shape[1] - place)
    if next(tokens, None) is not None:
        raise _other_tokens()
    return positions.to(is_image.device)


def _images(seen: torch.Tensor, tokens: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Where each image of a sequence begins, and its rows and columns of tokens."""
    places = seen.nonzero().flatten().tolist()
    while places:
        start, (height, width) = places[0], next(tokens, (0, 0))
        count = height * width
        if not count or places[:count] != list(range(start, start + count)):
            raise _other_tokens()
        yield start, height, width
        places = places[count:]


def _other_tokens() -> NotCovered:
    return NotCovered(
        "image tokens that are not those of the images of a batch",
        "the engine has as many in a row as an image has patches, merged",
        "pass image_grid_thw in the order of the tokens, and no completion that has drawn an image token",
    )
