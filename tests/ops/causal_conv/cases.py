"""Requests that are convolved in steps, as an engine does it: in pages that others have left, at any cut."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from vllm_batch_invariant.ops.causal_conv import ConvStates, causal_conv

CHANNELS = 40


@dataclass
class Layer:
    """One with weights, and pages that are full of NaN.

    Attributes:
        drafts: for so many in a step a page has more rows.
        channels_first: whether a page is [channels, rows].
    """

    device: str
    dtype: torch.dtype
    width: int = 3
    gated: bool = True
    has_bias: bool = False
    drafts: int = 0
    channels_first: bool = False
    channels: int = CHANNELS
    pages: int = 80
    weight: torch.Tensor = field(init=False)
    bias: torch.Tensor | None = field(init=False)
    states: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.weight = self.draw(self.channels, self.width, seed=1)
        self.bias = self.draw(self.channels, seed=2) if self.has_bias else None
        rows = self.width - 1 + self.drafts
        shape = (self.pages, *((self.channels, rows) if self.channels_first else (rows, self.channels)))
        states = torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)
        self.states = states.transpose(1, 2) if self.channels_first else states

    def draw(self, *shape: int, seed: int) -> torch.Tensor:
        """Numbers of many sizes, so that the order of a sum shows."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(*shape, generator=generator) * torch.randn(*shape, generator=generator).exp()
        return drawn.to(self.device, self.dtype)

    def tokens(self, count: int, seed: int) -> torch.Tensor:
        """Those of a request."""
        return self.draw(count, self.channels * (3 if self.gated else 1), seed=seed)

    def step(self, parts: Sequence[tuple[int, int, torch.Tensor]], padding: int = 0) -> list[torch.Tensor]:
        """What the layer gives for each request: its page, tokens before, and new ones. ``padding``: so many rows of
        NaN behind them, and requests without tokens.
        """
        new = [x for _, _, x in parts]
        behind = torch.full((padding, *new[0].shape[1:]), torch.nan, dtype=self.dtype, device=self.device)
        lengths = torch.tensor([0, *map(len, new), *padding * [0]])
        integers = {"dtype": torch.int32, "device": self.device}
        states = ConvStates(
            self.states,
            torch.tensor([page for page, _, _ in parts] + padding * [0], **integers),
            lengths.cumsum(0).to(**integers),
            torch.tensor([before for _, before, _ in parts] + padding * [7], **integers),
            int(lengths.max()),
        )
        out = causal_conv(torch.cat([*new, behind]), self.weight, self.bias, states, self.gated)
        return list(out[: sum(map(len, new))].split([len(x) for x in new]))

    def whole(self, x: torch.Tensor, page: int = 1) -> torch.Tensor:
        """A request in one step."""
        [out] = self.step([(page, 0, x)])
        return out

    def cut(self, x: torch.Tensor, *lengths: int, page: int = 1) -> torch.Tensor:
        """A request in steps of these lengths."""
        parts, before = [], 0
        for part in x.split(lengths):
            parts += self.step([(page, before, part)])
            before += len(part)
        return torch.cat(parts)
