"""What a call is given beside its operands."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ConvStates:
    """The last inputs of each request, and which tokens are new. A page is a ring: the input of position p is in row
    p % rows. So a row that a rejected draft has written is written anew by the token that takes its place.

    Attributes:
        states: [pages, rows, channels], in any layout. There are width - 1 rows or more; with k drafts in a call
            width - 1 + k, so that no draft takes the row of an input that is read once more.
        pages: [requests] integers, the page of each request; no page is two requests'.
        starts: [requests + 1] integers, ascending: new tokens of request r are rows starts[r] to starts[r + 1] of the
            call. A request without any is padding, and its page is neither read nor written.
        context_lens: [requests] integers: tokens of each request before its new ones. Of a request without any the page
            is not read: it may hold what another has left.
        longest: the most new tokens of a request, or more.
    """

    states: torch.Tensor
    pages: torch.Tensor
    starts: torch.Tensor
    context_lens: torch.Tensor
    longest: int
