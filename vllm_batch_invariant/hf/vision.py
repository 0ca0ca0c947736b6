"""The encoders of images of Qwen-VL, by the engine's operations in the engine's order, with gradients.

Patches of all images lie one after the other, those that are merged into one token together. Attention sees both
directions of an image, or of a window of one, and every other layer computes row by row.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ..errors import NotCovered
from ..integration.layers.encoders import HEAD_SIZES
from ..ops import reduce
from .activation import elementwise, silu_and_mul
from .attention import attend_both_ways
from .families import Family
from .linear import linear
from .norm import layer_norm
from .refusals import refuse_found
from .rotary import cos_sin_cache

_POSITIONS, _BASE = 8192, 10000.0
"""Of the rotary embedding of vLLM's encoders, whatever a configuration says."""


class Rows(NamedTuple):
    """What a block of an encoder knows of its rows."""

    cos: torch.Tensor
    """[rows, half of a head], of the encoder's dtype."""
    sin: torch.Tensor
    starts: torch.Tensor
    """[sequences + 1] int32, where each begins whose rows see each other."""


def of_a_video() -> NotCovered:
    """The refusal of one."""
    return NotCovered("a video in a trainer", "its frames have not been compared with vLLM's", "train on images")


def grids_of(grid_thw: torch.Tensor) -> list[tuple[int, int]]:
    """Rows and columns of patches of each image.

    Raises:
        NotCovered: a video.
    """
    if bool((grid_thw[:, 0] != 1).any()):
        raise of_a_video()
    return [(height, width) for _, height, width in grid_thw.tolist()]


def places_of(height: int, width: int) -> tuple[torch.Tensor, ...]:
    """The row and the column of each place of a grid: [height, width] int64 each."""
    return torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")


def _merged(places: torch.Tensor, merge: int) -> torch.Tensor:
    """[height * width] of [height, width], so that those of one token follow each other."""
    height, width = places.shape
    return places.reshape(height // merge, merge, width // merge, merge).transpose(1, 2).flatten()


def _angles(grids: Sequence[tuple[int, int]], size: int, merge: int, like: torch.Tensor) -> list[torch.Tensor]:
    """Cosines and sines [rows, half of a head] of each patch's row, then of its column."""
    table = cos_sin_cache(size // 2, _POSITIONS, _BASE, None, like.dtype, like.device)
    places = []
    for height, width in grids:
        row, column = places_of(height, width)
        places.append(torch.stack([_merged(row, merge), _merged(column, merge)], -1))
    at = torch.cat(places).to(like.device)
    return [half[at].flatten(1) for half in table.chunk(2, dim=-1)]


def _windows(grids: Sequence[tuple[int, int]], side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of tokens by windows of so many rows and columns, and how many each window has.

    Args:
        grids: rows and columns of tokens.
    """
    orders, sizes, count = [], [], 0
    for height, width in grids:
        row, column = places_of(height, width)
        window = (row // side * -(-width // side) + column // side).flatten()
        orders.append(window.argsort(stable=True) + count)
        sizes.append(window.bincount())
        count += height * width
    return torch.cat(orders), torch.cat(sizes)


def _starts(sizes: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(device, torch.int32)


def _starts_of(grids: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Of images."""
    return _starts(torch.tensor([height * width for height, width in grids]), device)


def _output(self: Any, name: str, **fields: Any) -> Any:
    """Of Transformers' class of a name, from the module of the encoder."""
    return getattr(sys.modules[type(self).__module__], name)(**fields)


def windows_tower_forward(self: Any, hidden_states: torch.Tensor, grid_thw: torch.Tensor, **_: Any) -> Any:
    """Qwen2.5-VL's: patches see a window of their image, and in some blocks all of it.

    Args:
        hidden_states: [patches, channels * size], what the engine's encoder is given.
        grid_thw: [images, 3].
    """
    merge, grids = self.spatial_merge_size, grids_of(grid_thw)
    size = self.config.hidden_size // self.config.num_heads
    hidden = self.patch_embed(hidden_states)
    tokens = [(height // merge, width // merge) for height, width in grids]
    order, sizes = _windows(tokens, self.window_size // merge // self.patch_size)
    order = order.to(hidden.device)

    def by_windows(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (-1, merge * merge))[order].flatten(0, 1)

    hidden, cos, sin = (by_windows(x) for x in (hidden, *_angles(grids, size, merge, hidden)))
    whole = _starts_of(grids, hidden.device)
    in_windows = _starts(sizes * merge * merge, hidden.device)
    for number, block in enumerate(self.blocks):
        hidden = block(hidden, Rows(cos, sin, whole if number in self.fullatt_block_indexes else in_windows))
    merged = self.merger(hidden)[order.argsort()]
    return _output(self, "BaseModelOutputWithPooling", last_hidden_state=hidden, pooler_output=merged)


def stacked_tower_forward(self: Any, hidden_states: torch.Tensor, grid_thw: torch.Tensor, **_: Any) -> Any:
    """Qwen3-VL's: patches see all of their image, and some blocks give something to the first layers of the text model,
    too (DeepStack, arXiv:2406.04334).

    Args:
        hidden_states: [patches, channels * size], what the engine's encoder is given.
        grid_thw: [images, 3].
    """
    merge, grids = self.spatial_merge_size, grids_of(grid_thw)
    size = self.config.hidden_size // self.config.num_heads
    hidden = self.patch_embed(hidden_states)
    side = int(self.config.num_position_embeddings**0.5)
    hidden = hidden + torch.cat([_interpolated(self.pos_embed.weight, grid, side, merge) for grid in grids])
    cos, sin = _angles(grids, size, merge, hidden)
    rows = Rows(cos, sin, _starts_of(grids, hidden.device))
    stacked = []
    for number, block in enumerate(self.blocks):
        hidden = block(hidden, rows)
        if number in self.deepstack_visual_indexes:
            merger = self.deepstack_merger_list[self.deepstack_visual_indexes.index(number)]
            stacked.append(merger(hidden))
    return _output(
        self,
        "BaseModelOutputWithDeepstackFeatures",
        last_hidden_state=hidden,
        pooler_output=self.merger(hidden),
        deepstack_features=stacked,
    )


def _interpolated(weight: torch.Tensor, grid: tuple[int, int], side: int, merge: int) -> torch.Tensor:
    """[patches, hidden] of an image: each patch's position between four of a square of so many, as vLLM has it."""
    places = [torch.linspace(0, side - 1, length, device=weight.device) for length in grid]
    row, column = torch.meshgrid(*places, indexing="ij")
    row, column = _merged(row, merge), _merged(column, merge)
    first, left = row.long(), column.long()
    last, right = ((place + 1).clamp(max=side - 1) for place in (first, left))
    down, across = row - first, column - left
    both = down * across
    shares = torch.stack([1 - down - (across - both), across - both, down - both, both])
    at = torch.stack([first * side + left, first * side + right, last * side + left, last * side + right])
    embedded = torch.nn.functional.embedding(at, weight) * shares.to(weight.dtype)[..., None]
    return _Sum.apply(embedded)


def patch_embed_forward(self: Any, pixels: torch.Tensor) -> torch.Tensor:
    """A convolution whose windows are whole patches is a matmul."""
    return linear(pixels.to(self.proj.weight.dtype), self.proj.weight.flatten(1), biases=(self.proj.bias,))


def adding_block_forward(self: Any, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The sum with what attention gave enters the second norm unrounded."""
    normed, summed = self.norm2(self.attn(self.norm1(hidden), rows), hidden)
    return summed + self.mlp(normed)


def block_forward(self: Any, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
    hidden = hidden + self.attn(self.norm1(hidden), rows)
    return hidden + self.mlp(self.norm2(hidden))


def attention_forward(self: Any, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
    qkv = linear(hidden, self.qkv.weight, biases=(self.qkv.bias,)).unflatten(-1, (3, self.num_heads, -1))
    query, key, value = qkv.unbind(1)
    query, key = (_Rotation.apply(x, rows.cos, rows.sin) for x in (query, key))
    out = attend_both_ways(query, key, value, rows.starts, self.scaling)
    return linear(out.flatten(1), self.proj.weight, biases=(self.proj.bias,))


def gated_mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = self.gate_proj, self.up_proj
    gate_up = linear(x, first.weight, second.weight, biases=(first.bias, second.bias))
    return linear(silu_and_mul(gate_up), self.down_proj.weight, biases=(self.down_proj.bias,))


def _mlp(x: torch.Tensor, first: Any, activation: str, second: Any) -> torch.Tensor:
    inner = linear(x, first.weight, biases=(first.bias,))
    return linear(elementwise(activation, inner), second.weight, biases=(second.bias,))


def merger_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    first, _, second = self.mlp
    return _mlp(self.ln_q(x).reshape(-1, self.hidden_size), first, "gelu", second)


def gelu_mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return _mlp(x, self.linear_fc1, "gelu of tanh", self.linear_fc2)


def normed_merger_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The norm is of a patch, or where it is the later one, of those that are merged."""
    x = x.reshape(-1, self.hidden_size) if self.use_postshuffle_norm else x
    return _mlp(self.norm(x).reshape(-1, self.hidden_size), self.linear_fc1, "gelu", self.linear_fc2)


def layer_norm_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return layer_norm(x, self.weight, self.bias, self.eps)


class _Rotation(torch.autograd.Function):
    """Heads [rows, heads, head_size] turned, in their dtype as vLLM's encoders on a CPU do it; the gradient is turned
    back in fp32.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        first, second = x.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = (x.float()[:, None] for x in ctx.saved_tensors)
        first, second = grad.float().chunk(2, dim=-1)
        return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1).to(grad.dtype), None, None


class _Sum(torch.autograd.Function):
    """[...] of [N, ...]."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.count = len(x)
        return reduce.sum(x, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        return grad.expand(ctx.count, *grad.shape)


_QWEN2_5: dict[str, Callable[..., Any]] = {
    "Qwen2_5_VisionTransformerPretrainedModel": windows_tower_forward,
    "Qwen2_5_VisionPatchEmbed": patch_embed_forward,
    "Qwen2_5_VLVisionBlock": adding_block_forward,
    "Qwen2_5_VLVisionAttention": attention_forward,
    "Qwen2_5_VLMLP": gated_mlp_forward,
    "Qwen2_5_VLPatchMerger": merger_forward,
}
_QWEN3: dict[str, Callable[..., Any]] = {
    "Qwen3VLVisionModel": stacked_tower_forward,
    "Qwen3VLVisionPatchEmbed": patch_embed_forward,
    "Qwen3VLVisionBlock": block_forward,
    "Qwen3VLVisionAttention": attention_forward,
    "Qwen3VLVisionMLP": gelu_mlp_forward,
    "Qwen3VLVisionPatchMerger": normed_merger_forward,
}


class _Encoder(NamedTuple):
    forwards: dict[str, Callable[..., Any]]
    """By the names of classes of the family's module."""
    activation: str
    """Of its MLPs, by Transformers' name."""
    others: tuple[str, ...]
    """Classes that are not called, or patched as parts of the text model."""


_ENCODERS = {
    "Qwen2_5_VL": _Encoder(_QWEN2_5, "silu", ("Qwen2_5_VLVisionRotaryEmbedding", "Qwen2_5_VLRMSNorm")),
    "Qwen3VL": _Encoder(_QWEN3, "gelu_pytorch_tanh", ("Qwen3VLVisionRotaryEmbedding",)),
}
"""By the prefix of the family."""


def forwards_of(family: Family) -> dict[type[torch.nn.Module], Callable[..., Any]]:
    """The forward methods of an encoder's modules, by their classes."""
    found = {getattr(family.module, name): of for name, of in _ENCODERS[family.prefix].forwards.items()}
    return found | {torch.nn.LayerNorm: layer_norm_forward}


def check(tower: Any, config: Any, family: Family) -> None:
    """Whether the engine's operations can stand for all of an encoder's.

    Args:
        tower: the encoder.
        config: of the whole model.
        family: of the model.

    Raises:
        NotCovered: the first thing for which they cannot.
    """
    from transformers.activations import ACT2FN

    vision, encoder = tower.config, _ENCODERS[family.prefix]
    size = vision.hidden_size // vision.num_heads
    found = {
        f"the activation {vision.hidden_act} of an encoder": vision.hidden_act != encoder.activation,
        f"an encoder with heads of {size}": size not in HEAD_SIZES,
        "an encoder with another rotary embedding": (getattr(vision, "rope_parameters", None) or {}).get(
            "rope_theta", _BASE
        )
        != _BASE,
        "an encoder with rms_norm_eps of its own": getattr(config, "rms_norm_eps", 1e-6) != 1e-6,
    }
    refuse_found(found)
    known = {*forwards_of(family), *(getattr(family.module, name) for name in encoder.others)}
    known |= {type(ACT2FN[vision.hidden_act]), torch.nn.GELU, torch.nn.Conv3d, torch.nn.Linear, torch.nn.Embedding}
    known |= {torch.nn.ModuleList, torch.nn.Sequential}
    for name, module in tower.named_modules(prefix="model.visual"):
        if type(module) not in known:
            raise NotCovered(
                f"a trainer's {type(module).__name__} at {name}",
                f"vLLM's {family.prefix} has no such layer in its encoder",
                "patch a model without quantised layers or adapters there",
            )
