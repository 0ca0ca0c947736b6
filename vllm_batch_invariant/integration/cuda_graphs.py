"""CUDA graphs for every step that fits one, in vLLM's second model runner: one for decode, one for any other mix.

vLLM captures one graph a number of tokens when the mode is FULL, as if every request had one token. Attention launches
less for steps of decode, so they get a graph of their own here; the graph of any other mix is captured with at least
one token more than requests. A step of decode that is padded to more tokens than there may be requests runs in the
graph of any other mix, and is planned as one: what a plan decides on the host follows from a graph's padded tokens and
requests alone.
"""

from dataclasses import replace
from typing import Any

from . import patch_points

_DEFAULT_LARGEST = 512
_DEFAULT_STEP = 16
_LARGEST = 2048
_MORE_SIZES = (*range(64, 513, 64), *range(640, _LARGEST + 1, 128))


def sizes(captured: list[int], most_requests: int, most_tokens: int) -> list[int]:
    """The numbers of tokens to capture: vLLM's, that of a step of decode with the most requests, and larger ones.

    A user's are kept: those whose largest is not the one that vLLM makes of the requests of a step. Layers that are not
    compiled keep the host busy longer than the GPU up to about 2000 tokens.
    """
    largest, limit = max(captured, default=0), min(2 * most_requests, _DEFAULT_LARGEST, most_tokens)
    if not limit - _DEFAULT_STEP < largest <= limit:
        return captured
    more = {*(size for size in _MORE_SIZES if size > largest), min(most_requests, _LARGEST)}
    return sorted({*captured, *(size for size in more if size <= most_tokens)})


def is_decode(requests: int, tokens: int, most_query_tokens: int) -> bool:
    """Whether every request of a step has one token, found from what a CUDA graph fixes: its padded requests and
    tokens. A step of decode may run in the graph of any other mix, and must then be planned as that mix.

    Raises:
        RuntimeError: fewer tokens than requests although one has several: vLLM never schedules a request without one.
    """
    decode = tokens <= requests
    if decode and most_query_tokens > 1:
        raise RuntimeError(f"a step of {requests} requests has {tokens} tokens, {most_query_tokens} of them of one")
    return decode


def install() -> None:
    """Have the model runner make and choose between both."""
    manager = patch_points.GRAPH_MANAGER.get()
    init_candidates = manager._init_candidates

    def _init_candidates(self: Any) -> None:
        init_candidates(self)
        full = patch_points.CUDAGRAPH_MODE.get().FULL
        if self.cudagraph_mode != full:
            return
        for key, descriptions in self._candidates.items():
            self._candidates[key] = _by_kind(descriptions, self.max_num_reqs)
        self._capture_descs[full] = _by_kind(self._capture_descs[full], self.max_num_reqs)

    manager._init_candidates = _init_candidates


def _by_kind(descriptions: list[Any], most_requests: int) -> list[Any]:
    """For each number of tokens a graph of decode, if so many requests may run, and then one of any other mix."""
    found = []
    for description in descriptions:
        tokens = description.num_tokens
        if tokens <= most_requests:
            found.append(replace(description, num_reqs=tokens, uniform_token_count=1))
        if tokens > 1:
            found.append(replace(description, num_reqs=min(description.num_reqs, tokens - 1)))
    return found
