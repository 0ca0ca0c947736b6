"""What vLLM's first model runner keeps of a request from step to step, made a function of the request's own tokens.

A row of the batch is left and taken again: by a preempted request, by one that waits a step, by another one. What was
kept for the row must then be what the request would have had without that. Three things of vLLM 0.26 to 0.33 are not:

* A thinking budget is counted step by step, begins anew with the prompt where the request comes back, and stays in a
  row whose request has gone, for whoever moves there.
* With async scheduling ``min_tokens`` counts placeholders of tokens, most of which go where a neighbour has penalties.
* A prompt of embeddings has, for its repetition penalty, the tokens of the row's request before.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from ..reviews import patch_points

_PLACEHOLDER = -1
"""vLLM's, of a token that is not known yet."""
_COUNTED = "counted"
"""The key of a budget's state that has the number of output tokens it was advanced by."""


class Output:
    """The first tokens of an output, of which all but the last were searched before.

    vLLM searches an output of n tokens for a mark at every step until it finds one. So a mark that it can find ends
    with the last token.

    Args:
        tokens: at least ``end``.
        end: how many there are.
        start: the first one's place.
    """

    def __init__(self, tokens: list[int], end: int, start: int = 0) -> None:
        self._tokens, self._end, self._start = tokens, end, start

    def __len__(self) -> int:
        return max(0, self._end - self._start)

    def __getitem__(self, part: slice) -> "Output":
        return Output(self._tokens, self._end, self._start + (part.start or 0))

    def __contains__(self, token: int) -> bool:
        return token in self._tokens[self._start : self._end]

    def find_last(self, mark: list[int]) -> int:
        """Where the mark begins, counted from ``start``, if it ends with the last token; -1 otherwise."""
        begin = self._end - len(mark)
        return begin - self._start if mark and begin >= self._start and self._tokens[begin : self._end] == mark else -1


def install() -> None:
    """Mend the first model runner's classes."""
    budgets_follow_tokens(patch_points.THINKING_BUDGETS.get())
    batch = patch_points.INPUT_BATCH.get()
    outputs_keep_their_lengths(batch)
    embeddings_have_no_tokens(batch)


def budgets_follow_tokens(holder: type[Any]) -> None:
    """Have a thinking budget's state advance by one output token after the other, however many are new, and move with
    its row. No request with a budget has drafts: it is refused (:mod:`.thoughts`).
    """
    original, find = holder.sync_batch, holder._find_last_sequence_index

    @wraps(original)
    def sync_batch(self: Any, batch_update: Any) -> None:
        if not self.is_enabled or not batch_update:
            return
        original(self, replace(batch_update, moved=()))
        swap = patch_points.MOVE_DIRECTIONS.get().SWAP
        for row, other, direction in batch_update.moved:
            moving, there = self._state.pop(row, None), self._state.pop(other, None)
            if moving is not None:
                self._state[other] = moving
            if there is not None and direction == swap:
                self._state[row] = there

    @wraps(holder.update_state)
    def update_state(
        self: Any,
        output_token_ids: list[list[int]],
        spec_token_ids: list[list[int]] | None,  # there are none
        repeat_indices: object = None,
    ) -> None:
        for row, state in self._state.items():
            if row < len(output_token_ids):
                _advance(self, state, output_token_ids[row])

    def find_last_sequence_index(target_list: Any, token_ids: list[int]) -> int:
        return target_list.find_last(token_ids) if isinstance(target_list, Output) else find(target_list, token_ids)

    holder.sync_batch, holder.update_state = sync_batch, update_state
    holder._find_last_sequence_index = staticmethod(find_last_sequence_index)


def _advance(holder: Any, state: dict[str, Any], tokens: list[int]) -> None:
    """Bring a state to an output: by its new tokens, or from the prompt on if it has fewer than were counted."""
    if state.get(_COUNTED, -1) > len(tokens):
        state |= holder._init_state_entry(state["prompt_tok_ids"], state["thinking_token_budget"]) | {_COUNTED: -1}
    for end in range(state.get(_COUNTED, -1) + 1, len(tokens) + 1):
        state["output_tok_ids"], state["force_index"] = Output(tokens, end), []
        holder._update_think_state(state)
        state[_COUNTED] = end


def outputs_keep_their_lengths(batch: type[Any]) -> None:
    """Have an output keep its length when vLLM puts the last step's token in the place of its placeholders. It has many
    where the step's requests did not need tokens before: vLLM then takes all of them out for the one token.
    """
    original: Callable[[Any], None] = batch.update_async_output_token_ids

    @wraps(original)
    def update_async_output_token_ids(self: Any) -> None:
        outputs = self.sampling_metadata.output_token_ids
        lengths = [len(tokens) for tokens in outputs]
        original(self)
        for tokens, length in zip(outputs, lengths, strict=True):
            missing = length - len(tokens)
            if missing > 0:
                tokens[-1:-1] = [_PLACEHOLDER] * missing

    batch.update_async_output_token_ids = update_async_output_token_ids


def embeddings_have_no_tokens(batch: type[Any]) -> None:
    """Have the tokens of a prompt of embeddings be 0, as in a row that no request has had, and in the second runner."""
    original = batch.add_request

    @wraps(original)
    def add_request(self: Any, request: Any) -> int:
        row: int = original(self, request)
        if request.prompt_token_ids is None:
            self.token_ids_cpu[row, : self.num_prompt_tokens[row]] = 0
        return row

    batch.add_request = add_request
