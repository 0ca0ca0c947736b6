"""Proves on the GPU at hand that prefill, decode and verify of a layer give a token the same bits.

That tensor cores give a row the same bits in programs of other blocks and warps, with whatever instruction a compiler
chooses, is a measurement, so it is made when a model is loaded. Copies of one request pass as prefills with other cuts,
and by decode, with rejected drafts where a layer has any; what tokens get and what is left in the pages is
compared as bits. The operands show the order of sums over keys: what tokens get is rounding error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ...compare import bitwise_comparison
from ...errors import NotCovered
from .cuda import SCHEDULES, delta_rule
from .params import DeltaStates
from .reduction import DeltaPages, DeltaRuleReduction

_LENGTH = 40
"""Tokens of the request, and as many more as a step has drafts: two chunks and a half."""
_LARGE = 2.0**8
"""Of queries, and of values: what is left of their sums is large enough that fp16 has it."""
_OF_STATE = 3
"""Parts of a page that are no ring."""


def certify(key_heads: int, value_heads: int, reduction: DeltaRuleReduction, drafts: int, device: torch.device) -> int:
    """Compare prefills in two steps, and every schedule of decode, with a prefill in one step.

    Args:
        key_heads: of the layer.
        value_heads: of the layer.
        reduction: of the layer. Without ``solve`` results have a skip.
        drafts: of a step, of each request.
        device: a GPU.

    Returns:
        How many elements were compared.

    Raises:
        NotCovered: some have other bits.
    """
    request = _Request.of(key_heads, value_heads, reduction, drafts, device)
    whole, sizes = _Copies(request, 1), SCHEDULES[reduction.gates].sizes(drafts > 0)
    (_, expected), compared = whole.step([request.tokens]), 0
    by_steps = "verify" if drafts else "decode"
    ways = ("prefill in two steps", max(sizes)), *((f"{by_steps} of {size} at once", size) for size in sizes)
    for way, size in ways:
        copies = _Copies(request, size)
        steps = [copies.step([(13 + 5 * copy) % (_LENGTH // 2 - 1) for copy in range(size)])]
        if way == ways[0][0]:
            steps.append(copies.step([request.tokens] * size))
        while min(copies.done) < request.tokens:
            steps.append(copies.verified(len(steps)))
        positions, rows = (torch.cat(of_steps) for of_steps in zip(*steps, strict=True))
        pairs = {"results": (rows, expected[positions])}
        left = whole.left()
        pairs |= {name: (made, left[name].expand_as(made)) for name, made in copies.left().items()}
        for name, (made, known) in pairs.items():
            if not (same := bitwise_comparison(made, known)):
                raise NotCovered(
                    f"a {'delta rule' if reduction.solve else 'state space'} of {value_heads} heads of "
                    f"{reduction.key_size} x {reduction.value_size} in {reduction.dtype} on "
                    f"{torch.cuda.get_device_name(device)}",
                    f"{way} has other {name} than prefill ({same.different} of {same.elements} elements)",
                    "use another GPU or another version of Triton, or serve another model",
                )
            compared += same.elements
    return compared


@dataclass(frozen=True)
class _Request:
    """One, of a layer.

    Attributes:
        key_heads: of the layer, as the next three.
        value_heads: see there.
        reduction: see there.
        drafts: see there.
        tokens: its length.
        operands: q, k, v, g and beta of its tokens, and behind these of as many drafts that are rejected.
        skip: of the layer.
    """

    key_heads: int
    value_heads: int
    reduction: DeltaRuleReduction
    drafts: int
    tokens: int
    operands: tuple[torch.Tensor, ...]
    skip: torch.Tensor | None

    @classmethod
    def of(
        cls, key_heads: int, value_heads: int, reduction: DeltaRuleReduction, drafts: int, device: torch.device
    ) -> "_Request":
        """Keys are a half and the half in another order, negative in every other token. So a query, or such a key,
        times what the others have left in the state is 0 but for rounding; such tokens have values of 0.
        """
        generator, tokens = torch.Generator(device).manual_seed(0), _LENGTH + drafts
        rows, half, dtype = 2 * tokens, reduction.key_size // 2, reduction.dtype
        order = torch.randperm(half, generator=generator, device=device)
        cancels = torch.arange(rows, device=device) % 2 > 0

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(rows, *shape, generator=generator, dtype=torch.float32, device=device)

        def mirrored(x: torch.Tensor, is_negative: torch.Tensor) -> torch.Tensor:
            other = x[..., order]
            return torch.cat([x, torch.where(is_negative[:, None, None], -other, other)], -1).to(dtype)

        q = mirrored(_LARGE * drawn(key_heads, half), torch.ones_like(cancels))
        k = mirrored(drawn(key_heads, half) * reduction.key_size**-0.5, cancels)
        v = torch.where(cancels[:, None, None], 0.0, _LARGE * drawn(value_heads, reduction.value_size)).to(dtype)
        g, beta = drawn(value_heads, *((half,) if reduction.has_channels else ())), drawn(value_heads).sigmoid()
        # What cancels decays alike.
        g = -0.1 * (torch.cat([g, g[..., order]], -1) if reduction.has_channels else g).square()
        skip = None if reduction.solve else 2.0**-16 * drawn(value_heads)[0]
        return cls(key_heads, value_heads, reduction, drafts, tokens, (q, k, v, g, beta), skip)


class _Copies:
    """So many of a request, in pages that are full of NaN.

    Attributes:
        done: tokens of each.
    """

    def __init__(self, request: _Request, count: int) -> None:
        self._request, self.done = request, [0] * count
        heads = request.key_heads, request.value_heads
        self._rows = request.reduction.rows(request.drafts)
        size, device = request.reduction.page_bytes(*heads, self._rows), request.operands[0].device
        self._states = torch.full((count, size), 255, dtype=torch.uint8, device=device)
        self._parts = request.reduction.pages(self._states, *heads, self._rows)

    def step(self, ends: Sequence[int], computed: Sequence[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens up to an end of each, and rejected drafts up to where a step has computed.

        Returns:
            Positions of tokens, and what these get.
        """
        request, device = self._request, self._states.device
        computed = ends if computed is None else computed
        rows, kept, lengths = [], [], []
        for begin, end, last in zip(self.done, ends, computed, strict=True):
            kept += range(len(rows), len(rows) + end - begin)
            rows += [*range(begin, end), *range(request.tokens + end, request.tokens + last)]
            lengths.append(last - begin)

        def integers(of: Sequence[int]) -> torch.Tensor:
            return torch.tensor(of, dtype=torch.int32, device=device)

        states = DeltaStates(
            self._states,
            integers(range(len(ends))).flip(0),
            integers(list(accumulate(lengths, initial=0))),
            integers(self.done),
            max(lengths),
            self._rows,
        )
        positions = torch.tensor(rows, dtype=torch.int64, device=device)
        operands = (one[positions] for one in request.operands)
        out = delta_rule(*operands, states, request.reduction, request.skip)
        self.done = list(ends)
        return positions[kept], out[kept]

    def verified(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The step of a number, of one token or with drafts, of which other numbers are accepted. The last token comes
        alone: so a state is kept of all chunks, as in prefill.
        """
        last, drafts = self._request.tokens - 1, self._request.drafts
        accepted = [(number + copy) % (drafts + 1) for copy in range(len(self.done))]
        ends = [min(begin + 1 + more, last + (begin >= last)) for begin, more in zip(self.done, accepted, strict=True)]
        computed = [min(begin + 1 + drafts, last + 1) for begin in self.done]
        return self.step(ends, computed)

    def left(self) -> dict[str, torch.Tensor]:
        """What all tokens have left in the pages, by name: the state, and the rows behind it."""
        tokens, chunk = self._request.tokens, self._request.reduction.chunk
        rows = [position % self._rows for position in range(tokens // chunk * chunk, tokens)]
        state, ring = self._parts[:_OF_STATE], self._parts[_OF_STATE:]
        kept = *state, *(part[:, rows] for part in ring if part.numel())
        return dict(zip(DeltaPages._fields, kept, strict=False))
