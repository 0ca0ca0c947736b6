"""What decides the bits of the gated delta rule, and where a page of a request's state has what."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...errors import NotCovered

VALUE_SIZES = (16, 32, 64, 128)
"""That the kernels have."""
KEY_SIZES = (*VALUE_SIZES, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT = 16
"""Bytes: every part of a page starts at a multiple of it, so that views of any dtype and wide loads are possible."""
GATES = ("head", "channel")
"""What has a decay of its own: a value head, or each element of its keys."""
COLUMNS = 16
"""Values whose states one program may have: they have a border's position of their own."""
_TILE = 16
"""Values and keys of a tile of the state."""


class DeltaPages(NamedTuple):
    """Views of the parts of all pages. The state is S transposed, fp32 in two planes: ``(high << 16) + low`` are its
    bits, where ``high`` is what it is rounded to in bf16, halves away from zero. A plane has the indices of value v and
    key k as [v // 16, v // 8 % 2, v % 8, k // 16, k // 8 % 2, k // 2 % 4, k % 2]; in memory tiles of 16 values and 16
    keys are as tensor cores take them, each thread's 8 elements side by side. The row of position p is ``p % rows``.
    """

    high: torch.Tensor
    """[pages, value_heads, value_size / 16, 2, 8, key_size / 16, 2, 4, 2] int16."""
    low: torch.Tensor
    """The same, signed."""
    borders: torch.Tensor
    """[pages, value_heads, value_size / COLUMNS] int32: tokens that the state has seen."""
    k: torch.Tensor
    """[pages, rows, key_heads, key_size]"""
    v: torch.Tensor
    """[pages, rows, value_heads, value_size]"""
    total: torch.Tensor
    """[pages, rows, value_heads] fp32: G; with gates of channels [pages, rows, value_heads, key_size]."""
    beta: torch.Tensor
    """[pages, rows, value_heads] fp32."""
    x: torch.Tensor
    """[pages, rows, value_heads, chunk] fp32: X before it is rounded, which a GPU reads to decode; no rows without
    ``solve`` or with drafts.
    """


@dataclass(frozen=True)
class DeltaRuleReduction:
    """The reduction of a value head. Chunks have ``chunk`` tokens and begin at multiples of it, counted from the
    request's first token; S [key_size, value_size] is the state at a chunk's begin, 0 at the request's. Of the rows t
    and j of a chunk::

        G[t] = g[0] + ... + g[t]                           # from the chunk's begin, ascending, fp32; g is -128 at least
        P[t] = (k[t] . S~) e^G[t],  Q[t] = (q[t] . S~) e^G[t]
        r[t] = beta[t] (v[t] - P[t])
        A[t, j] = beta[t] ((k[t] . k[j]) e^(G[t] - G[j]))  # j < t, else 0
        X[t] = -A[t] - sum over i < t of A[t, i] X[i]      # fp32, i ascending, one fma each: (1 + A)^-1 - 1
        u[t] = r[t] + round(X[t]) . round(r)               # begins with r[t] in fp32
        M[t, j] = (q[t] . k[j]) e^(G[t] - G[j])            # j <= t, else 0
        o[t] = scale (Q[t] + round(M[t]) . round(u))       # begins with Q[t] in fp32
        S' = fma(S, e^G[-1], sum over j of k[j] round(u[j] e^(G[-1] - G[j])))          # behind the last row

    A row reads those above it and S alone, so a token's bits are the same however many tokens a call has. ``round`` is
    the one to ``dtype``. S~ is S rounded to it: to bf16 with halves away from zero, as one of the two planes holds it.
    Products add in fp32: on a CPU one fma after the other, ascending; on a GPU as tensor cores do, in steps of 16,
    ascending, and fp32 by fmas. ``scale`` is ``key_size ** -0.5``.

    Without ``solve`` nothing is taken from a value of what the state holds: ``u[t] = beta[t] v[t]``, and ``scale`` is
    1. That is the state space of Mamba-2 (Dao, Gu: arxiv.org/abs/2405.21060), whose C, B, x, dt are q, k, v, beta.

    With gates of channels, as Kimi Delta Attention has them (Kimi Team: arxiv.org/abs/2510.26692), g and G have a
    number for each element of a key, and so have decays; a sum over these has them inside, so that no exponent is above
    0::

        P[t] = round(k[t] e^G[t]) . S~,  Q[t] = round(q[t] e^G[t]) . S~
        A[t, j] = beta[t] (sum over d of k[t, d] (e^(G[t, d] - G[j, d]) k[j, d])),  M[t, j] the same of q[t]
        S' = fma(S, e^G[-1], sum over j of round(k[j] e^(G[-1] - G[j])) round(u[j]))

    The sums over d are in fp32, one fma after the other, ascending. The rest is as above.

    With one g for all tokens, beta 1 and no ``solve`` this is lightning attention (Qin et al.: arxiv.org/abs/
    2401.04658), whose queries are scaled before.

    With a skip d of the head, which Mamba-2 calls D, the result is ``fma(d, v[t], o[t])``; it is rounded once.

    Attributes:
        key_size: elements of a query and a key.
        value_size: elements of a value.
        dtype: of queries, keys, values and result.
        chunk: tokens between two states that are kept.
        accumulate: the dtype of every addition, and of the state.
        solve: whether a value is corrected by what the state gives for its key.
        gates: of :data:`GATES`.
    """

    key_size: int
    value_size: int
    dtype: torch.dtype
    chunk: int = 16
    accumulate: torch.dtype = torch.float32
    solve: bool = True
    gates: str = GATES[0]

    @classmethod
    def of(
        cls, key_size: int, value_size: int, dtype: torch.dtype, solve: bool = True, gates: str = GATES[0]
    ) -> "DeltaRuleReduction":
        """The same on every device.

        Raises:
            NotCovered: a size that is not 16, 32, 64 or 128, or of keys 256; a dtype that is not fp32, bf16 or fp16.
        """
        if key_size not in KEY_SIZES or value_size not in VALUE_SIZES:
            raise NotCovered(
                f"a delta rule with keys of {key_size} and values of {value_size}",
                f"the kernels have {', '.join(map(str, KEY_SIZES))}, of values to {VALUE_SIZES[-1]}",
                "serve another model",
            )
        if dtype not in DTYPES:
            raise NotCovered(f"a delta rule in {dtype}", "its state is fp32", "use fp32, bf16 or fp16")
        return cls(key_size, value_size, dtype, solve=solve, gates=gates)

    @property
    def has_channels(self) -> bool:
        """Whether each element of a key has a decay of its own."""
        return self.gates == "channel"

    @property
    def of_gates(self) -> tuple[int, ...]:
        """The shape of a value head's g."""
        return (self.key_size,) if self.has_channels else ()

    @property
    def scale(self) -> float:
        """Of the result."""
        return self.key_size**-0.5 if self.solve else 1.0

    def drafts(self, rows: int) -> int:
        """For how many drafts in a call a ring of so many rows has room: at the next call the state may be older by as
        many tokens, and both calls' rows are in the ring.
        """
        return (rows - self.chunk) // 2

    def rows(self, drafts: int) -> int:
        """The least of a ring with room for so many drafts in a call."""
        return self.chunk + 2 * drafts

    def page_bytes(self, key_heads: int, value_heads: int, rows: int) -> int:
        """Bytes of a request's page with a ring of so many rows."""
        return self._layout(key_heads, value_heads, rows)[1]

    def pages(self, states: torch.Tensor, key_heads: int, value_heads: int, rows: int) -> DeltaPages:
        """Views of states [pages, bytes] uint8."""
        layout, _ = self._layout(key_heads, value_heads, rows)
        views = []
        for begin, shape, dtype in layout:
            end = begin + math.prod(shape) * dtype.itemsize
            views.append(states[:, begin:end].view(dtype).unflatten(1, shape))
        planes = (plane.permute(0, 1, 2, 7, 4, 3, 6, 5, 8) for plane in views[:2])
        return DeltaPages(*planes, *views[2:])

    def _layout(
        self, key_heads: int, value_heads: int, rows: int
    ) -> tuple[list[tuple[int, tuple[int, ...], torch.dtype]], int]:
        """Of each part where it begins, its shape and its dtype; and the bytes of all."""
        # A tile's elements by value % 8, key // 2 % 4, key // 8, value // 8, key % 2: a thread has the last three.
        state = value_heads, self.value_size // _TILE, self.key_size // _TILE, 8, 4, 2, 2, 2
        rows_of_x = rows if self.solve and rows < self.rows(drafts=1) else 0
        parts = (
            (state, torch.int16),
            (state, torch.int16),
            ((value_heads, self.value_size // COLUMNS), torch.int32),
            ((rows, key_heads, self.key_size), self.dtype),
            ((rows, value_heads, self.value_size), self.dtype),
            ((rows, value_heads, *self.of_gates), torch.float32),
            ((rows, value_heads), torch.float32),
            ((rows_of_x, value_heads, self.chunk), torch.float32),
        )
        layout, end = [], 0
        for shape, dtype in parts:
            layout.append((end, shape, dtype))
            end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return layout, end
