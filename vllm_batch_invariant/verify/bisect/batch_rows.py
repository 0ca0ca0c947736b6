"""Which rows of a step's batch belong to one request, in either of vLLM's two model runners."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Rows:
    """A request's rows ``start`` to ``start + count - 1`` among ``total`` of the batch."""

    start: int
    count: int
    total: int

    def parts(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """The request's part of a tensor, once for each dimension that may hold the batch's rows, several elements a
        row included (heads of rows, say).
        """
        for dimension, size in enumerate(tensor.shape):
            each, rest = divmod(size, self.total)
            if each and not rest:
                yield tensor.narrow(dimension, self.start * each, self.count * each)


@dataclass(frozen=True)
class Place:
    """Where a request is in a step's batch."""

    tokens: Rows
    """Among the rows of the model's layers."""
    requests: Rows
    """Among the rows of logits."""
    position: int
    """Of its first token in this step."""


class StepBatches:
    """The batches of a vLLM model runner, each from the moment when its inputs are prepared."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._batch = runner, None
        if hasattr(runner, "prepare_inputs"):
            prepare = runner.prepare_inputs

            def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
                self._batch = prepare(*args, **kwargs)
                return self._batch

            runner.prepare_inputs = prepare_inputs

    def place(self, request: str) -> Place | None:
        """Where the request of that name is in the batch at hand; None where it is not."""
        batch = self._batch
        if batch is not None:
            # vLLM's second model runner describes each batch anew
            names, starts, computed = batch.req_ids, batch.query_start_loc_np, batch.num_computed_tokens_np
        else:
            # its first one keeps one description up to date
            batch = self._runner.input_batch
            names, starts = batch.req_ids, self._runner.query_start_loc.np
            computed = batch.num_computed_tokens_cpu
        index = _index(names, request)
        if index is None:
            return None
        start, stop, total = (int(starts[i]) for i in (index, index + 1, len(names)))
        return Place(Rows(start, stop - start, total), Rows(index, 1, len(names)), int(computed[index]))


def _index(names: Sequence[str], request: str) -> int | None:
    # vLLM adds a random ending to the names it is given
    return next((i for i, name in enumerate(names) if name == request or name.startswith(f"{request}-")), None)
