"""What a call is given beside its operands."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..causal_conv import ConvStates


class Convolution(NamedTuple):
    """Of a layer in front of the rule: what :func:`..causal_conv.causal_conv` is given beside its rows. SiLU follows.

    Attributes:
        weight: [channels, width]
        bias: [channels], or None.
        states: the requests' earlier inputs.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    states: ConvStates


@dataclass(frozen=True)
class DeltaStates:
    """The state of each request, and which tokens are new. A page has the state at a multiple of the chunk, and a ring
    with the rows of later tokens: that of position p is in row p % rows, so a row that a rejected draft has written is
    written anew by the token that takes its place. A state is kept when all tokens before it are known to stay: of a
    call with up to ``DeltaRuleReduction.drafts(rows)`` tokens of a request behind the first, the first alone is. All
    bytes of a page moved to another are the same state.

    Attributes:
        states: [pages, bytes] uint8, as ``DeltaRuleReduction.pages`` reads it. Rows may be any multiple of 16 bytes
            apart, and start at one.
        pages: [requests] integers, the page of each request; no page is two requests'.
        starts: [requests + 1] integers, ascending: new tokens of request r are rows starts[r] to starts[r + 1] of the
            call. A request without any is padding, and its page is neither read nor written.
        context_lens: [requests] integers: tokens of each request before its new ones. Of a request without any the page
            is not read: it may hold what another has left.
        longest: the most new tokens of a request, or more.
        rows: of the ring: the chunk and twice the drafts of a call, or more.
    """

    states: torch.Tensor
    pages: torch.Tensor
    starts: torch.Tensor
    context_lens: torch.Tensor
    longest: int
    rows: int = 16
