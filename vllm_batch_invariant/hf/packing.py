"""The real tokens of a padded batch, one sequence after the other, as the engine holds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from ..errors import NotCovered
from ..ops.attention import AttentionReduction

PAGE_SIZE = AttentionReduction.of_device("cuda").key_tile
"""Tokens in a page of keys, which moves no bit: what every implementation of attention takes."""


@dataclass(frozen=True)
class Packed:
    """Which rows of a packed batch belong together.

    Attributes:
        shape: (rows, columns) of the padded batch.
        indices: [tokens] int64, where each token is in the padded batch, flattened.
        positions: [tokens] int64, counted from 0 in each sequence.
        cu_seqlens: [sequences + 1] int32, the first token of each sequence.
    """

    shape: tuple[int, int]
    indices: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor

    @classmethod
    def of(
        cls, mask: torch.Tensor, position_ids: torch.Tensor | None = None, bounds: Sequence[torch.Tensor] = ()
    ) -> "Packed":
        """Pack a batch.

        Args:
            mask: [rows, columns], nonzero where there is a token: one run of tokens a row, with padding before or
                after it.
            position_ids: [rows, columns] or [1, columns]; each 0 begins a sequence, so a row may hold several. None
                for one sequence a row, or for those of ``bounds``.
            bounds: each [sequences + 1]: the first token of each sequence and how many tokens there are, without
                padding; all of them the same.

        Raises:
            NotCovered: a mask with a hole, positions that are not counted from 0 by ones, or sequences that begin
                elsewhere than their positions.
        """
        real = mask.bool()
        indices = real.flatten().nonzero().squeeze(1)
        if position_ids is None and bounds:
            first, places = bounds[0].to(indices), torch.arange(len(indices), device=indices.device)
            positions = places - first[torch.searchsorted(first, places, right=True) - 1]
        else:
            counted = real.cumsum(1) - 1 if position_ids is None else position_ids
            positions = counted.expand(real.shape)[real].to(torch.int64)
        begins = positions == 0
        row = indices // real.shape[1]
        follows = (positions.diff() == 1) & (indices.diff() == 1) & (row.diff() == 0)
        if not bool(begins[:1].all() & (begins[1:] | follows).all()):
            raise NotCovered(
                "a batch with holes or positions of its own",
                "the engine counts a sequence's positions from 0 by ones",
                "pass one run of tokens a row, and no position_ids unless each sequence's begin at 0",
            )
        cu_seqlens = _bounds_of(begins)
        if any(not torch.equal(one.to(cu_seqlens), cu_seqlens) for one in bounds):
            raise NotCovered(
                "sequences that begin elsewhere than their positions",
                "attention and states begin anew where positions do",
                "pass cu_seq_lens and seq_idx of the sequences whose position_ids begin at 0",
            )
        return cls((real.shape[0], real.shape[1]), indices, positions, cu_seqlens)

    @cached_property
    def lengths(self) -> torch.Tensor:
        """[sequences] int32."""
        return self.cu_seqlens.diff()

    @cached_property
    def sequences(self) -> list[slice]:
        """The rows of each sequence."""
        cu_seqlens = self.cu_seqlens.tolist()
        return [slice(start, stop) for start, stop in pairwise(cu_seqlens)]

    @cached_property
    def states(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Pages, starts, context_lens and longest of states of sequences that begin, a page for each; see
        :class:`..ops.delta_rule.DeltaStates`.
        """
        pages = torch.arange(len(self.lengths), dtype=torch.int32, device=self.cu_seqlens.device)
        longest = max((rows.stop - rows.start for rows in self.sequences), default=0)
        return pages, self.cu_seqlens, torch.zeros_like(pages), longest

    @cached_property
    def _page_counts(self) -> list[int]:
        return [-(-(rows.stop - rows.start) // PAGE_SIZE) for rows in self.sequences]

    @cached_property
    def _first_pages(self) -> torch.Tensor:
        """[sequences + 1] int64: the first page of each sequence, and how many pages there are."""
        return torch.tensor([0, *self._page_counts], device=self.cu_seqlens.device).cumsum(0)

    @cached_property
    def pages(self) -> torch.Tensor:
        """[sequences, most pages] int32: the pages of each sequence; the last again where it has no more."""
        first, stop = self._first_pages[:-1, None], self._first_pages[1:, None]
        indices = torch.arange(max(self._page_counts, default=0), device=first.device)
        return torch.minimum(first + indices, stop - 1).to(torch.int32)

    @cached_property
    def _slots(self) -> torch.Tensor:
        """[tokens] int64: where each token is in its pages."""
        return self._first_pages[:-1].repeat_interleave(self.lengths.long()) * PAGE_SIZE + self.positions

    def to_pages(self, x: torch.Tensor) -> torch.Tensor:
        """[pages, heads, page size, head_size] of [tokens, heads, head_size], for :attr:`pages`."""
        count = sum(self._page_counts)
        paged = x.new_zeros(count * PAGE_SIZE, *x.shape[1:])
        paged[self._slots] = x
        return paged.unflatten(0, (count, PAGE_SIZE)).transpose(1, 2)

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """[tokens, ...] of [rows, columns, ...]."""
        return padded.flatten(0, 1)[self.indices]

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """[rows, columns, ...] of [tokens, ...], 0 where there is no token."""
        rows, columns = self.shape
        padded = packed.new_zeros(rows * columns, *packed.shape[1:]).index_copy(0, self.indices, packed)
        return padded.unflatten(0, self.shape)


def packed_of(
    given: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    *bounds: torch.Tensor | None,
) -> Packed:
    """A batch as a model's call has it.

    Args:
        given: [rows, columns, ...], its tokens or their embeddings.
        attention_mask: [rows, columns]; None: all are tokens.
        position_ids: as of :meth:`Packed.of`.
        bounds: as of :func:`_given_bounds`.
    """
    mask = given.new_ones(given.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask
    return Packed.of(mask.to(given.device), position_ids, _given_bounds(*bounds))


def _given_bounds(
    cu_seq_lens_q: torch.Tensor | None, cu_seq_lens_k: torch.Tensor | None, seq_idx: torch.Tensor | None
) -> list[torch.Tensor]:
    """Bounds for :meth:`Packed.of`, of what Hugging Face's collators say of sequences in one row: FlashAttention's, and
    the number of each token's sequence [1, tokens].
    """
    bounds = [one for one in (cu_seq_lens_q, cu_seq_lens_k) if one is not None]
    if seq_idx is not None:
        numbers = seq_idx.flatten()
        bounds.append(_bounds_of(numbers.diff(prepend=numbers[:1] - 1) != 0))
    return bounds


def _bounds_of(begins: torch.Tensor) -> torch.Tensor:
    """[sequences + 1] int32: where tokens [tokens] begin a sequence, and how many there are."""
    return torch.cat((begins.nonzero().squeeze(1), torch.tensor([len(begins)], device=begins.device))).to(torch.int32)
