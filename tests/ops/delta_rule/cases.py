"""Requests that pass through a gated delta net or a state space in steps, as an engine does it: in pages that others
have left, at any cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vllm_batch_invariant.ops.delta_rule import DeltaPages, DeltaRuleReduction, DeltaStates, delta_rule
from vllm_batch_invariant.ops.delta_rule.reference import delta_rule as definition

KINDS: dict[str, dict[str, Any]] = {
    "delta rule": {},
    "state space": {"solve": False},
    "gates of channels": {"gates": "channel"},
}
"""Of layers, by what :class:`Layer` is told."""


class Rows(NamedTuple):
    """Of tokens what the operation takes."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def part(self, first: int, end: int) -> "Rows":
        return Rows(*(one[first:end] for one in self))

    @staticmethod
    def joined(parts: Sequence["Rows"]) -> "Rows":
        return Rows(*(torch.cat(of_all) for of_all in zip(*parts, strict=True)))

    def with_end(self, other: "Rows", accepted: int) -> "Rows":
        """So many tokens of these, and then the other's."""
        return Rows.joined([self.part(0, accepted), other.part(accepted, len(self.q))])

    @property
    def tokens(self) -> int:
        return len(self.q)


@dataclass
class Layer:
    """One, and pages that are full of NaN: every byte is 255."""

    device: str
    dtype: torch.dtype
    key_heads: int = 2
    value_heads: int = 4
    key_size: int = 32
    value_size: int = 16
    drafts: int = 0
    pages: int = 40
    chunk: int = 16
    solve: bool = True
    gates: str = "head"
    skip: torch.Tensor | None = None
    reduction: DeltaRuleReduction = field(init=False)
    states: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.reduction = DeltaRuleReduction(
            self.key_size, self.value_size, self.dtype, self.chunk, solve=self.solve, gates=self.gates
        )
        self.rows = self.reduction.rows(self.drafts)
        if not self.solve:
            generator = torch.Generator().manual_seed(self.value_heads)
            self.skip = torch.randn(self.value_heads, generator=generator).to(self.device)
        size = self.reduction.page_bytes(self.key_heads, self.value_heads, self.rows)
        self.states = torch.full((self.pages, size), 255, dtype=torch.uint8, device=self.device)

    def tokens(self, count: int, seed: int, gate: float = 0.05, spread: float = 1.0) -> Rows:
        """Those of a request, with gates of a mean; keys are the more alike the less their spread."""
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        def unit(x: torch.Tensor) -> torch.Tensor:
            return x / x.square().sum(-1, keepdim=True).add(1e-6).sqrt()

        shape = count, self.key_heads, self.key_size
        base = drawn(*shape[1:])
        q, k = (unit((1 - spread) * base + spread * drawn(*shape)) for _ in range(2))
        v = drawn(count, self.value_heads, self.value_size) * drawn(count, self.value_heads, 1).exp()
        of_gates = count, self.value_heads, *self.reduction.of_gates
        g = -gate * torch.empty(of_gates).exponential_(generator=generator)
        beta = drawn(count, self.value_heads).sigmoid()
        return Rows(
            *(one.to(self.device, self.dtype) for one in (q, k, v)), *(one.to(self.device) for one in (g, beta))
        )

    @property
    def parts(self) -> DeltaPages:
        """Of the pages, views."""
        return self.reduction.pages(self.states, self.key_heads, self.value_heads, self.rows)

    def step(self, parts: Sequence[tuple[int, int, Rows]], padding: int = 0) -> list[torch.Tensor]:
        """What the layer gives for each request: its page, tokens before, and new ones. ``padding``: so many rows of
        NaN behind them, and requests without tokens.
        """
        new = Rows.joined([rows for _, _, rows in parts])
        behind = Rows(*(torch.full_like(one[:1], torch.nan).repeat_interleave(padding, 0) for one in new))
        lengths = torch.tensor([0, *(rows.tokens for _, _, rows in parts), *padding * [0]])
        integers = {"dtype": torch.int32, "device": self.device}
        states = DeltaStates(
            self.states,
            torch.tensor([page for page, _, _ in parts] + padding * [0], **integers),
            lengths.cumsum(0).to(**integers),
            torch.tensor([before for _, before, _ in parts] + padding * [7], **integers),
            int(lengths.max()),
            self.rows,
        )
        out = delta_rule(*Rows.joined([new, behind]), states, self.reduction, self.skip)
        return list(out[: new.tokens].split([rows.tokens for _, _, rows in parts]))

    def definition(self, x: Rows) -> torch.Tensor:
        """What a request gets in float64."""
        return definition(*x, self.solve, self.skip)[0]

    def whole(self, x: Rows, page: int = 1) -> torch.Tensor:
        """A request in one step."""
        [out] = self.step([(page, 0, x)])
        return out

    def cut(self, x: Rows, *lengths: int, page: int = 1) -> torch.Tensor:
        """A request in steps of these lengths."""
        parts, before = [], 0
        for length in lengths:
            parts += self.step([(page, before, x.part(before, before + length))])
            before += length
        return torch.cat(parts)
