"""CUDA graphs for every step that fits one, in vLLM's second model runner: of decode, of verify steps, and of any other
mix.

vLLM captures one graph a number of tokens when the mode is FULL, as if every request had one token. Attention launches
less for requests of few tokens, so steps in which all requests have one token, or all 1 + k with speculative decoding,
get graphs of their own here. What a plan decides on the host follows from a graph's padded requests and tokens alone,
so the graph of any other mix has other numbers of them: at least one token more than requests, and not as many tokens
as the most requests have in a verify step. A step of decode that is padded to more tokens than there may be requests
runs in the graph of any other mix, and is planned as one.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..reviews import patch_points

_DEFAULT_LARGEST = 512
_DEFAULT_STEP = 16
_LARGEST = 2048
_MOST_TOKENS = 16_384
"""What vLLM has in a step by default where memory is large."""
_MORE_SIZES = (
    *range(64, 513, 64),
    *range(640, _LARGEST + 1, 128),
    *range(_LARGEST + 256, 4097, 256),
    *range(4608, 8193, 512),
    *range(9216, _MOST_TOKENS + 1, 1024),
)
_WEIGHTS = 192 << 20
"""Of a layer of Qwen3-8B, about: with so many the host is busier up to :data:`_LARGEST` tokens, measured on an H200."""


def verify_lengths(vllm_config: Any) -> tuple[int, ...]:
    """The tokens that every request of a verify step may have: 1 + k, and what a schedule by batch size has for k."""
    drafts = {vllm_config.num_speculative_tokens}
    speculation = vllm_config.speculative_config
    for *_, number in getattr(speculation, "num_speculative_tokens_per_batch_size", None) or ():
        drafts.add(min(number, vllm_config.num_speculative_tokens))
    return tuple(sorted(1 + number for number in drafts if number > 0))


def most_tokens_of_a_step(config: Any) -> int:
    """What requests may have together: a graph of more tokens would be captured with some that have no pages."""
    scheduler, model = config.scheduler_config, config.model_config
    longest = scheduler.max_num_batched_tokens if model is None else model.max_model_len
    return min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * longest)


def weights_of_layer(config: Any) -> int | None:
    """Elements of the weights of a decoder layer that one worker multiplies; None where that is not known: the layers
    are no dense attention and MLP.
    """
    model, parallel = config.model_config, config.parallel_config
    if model is None or model.is_moe or model.is_hybrid or model.use_mla:
        return None
    width = getattr(model.hf_text_config, "intermediate_size", None)
    if not isinstance(width, int):
        return None
    heads = model.get_num_attention_heads(parallel) + model.get_num_kv_heads(parallel)
    rows = 2 * heads * model.get_head_size() + 3 * width // parallel.tensor_parallel_size
    return model.get_hidden_size() * rows


def largest_size(weights: int | None) -> int:
    """The most tokens of a step that is a CUDA graph: layers that are not compiled keep the host busy for a time of
    their own, the GPU for one that grows with their weights.
    """
    return min(max(_LARGEST, _LARGEST * _WEIGHTS // weights), _MOST_TOKENS) if weights else _LARGEST


def sizes(
    captured: list[int], most_requests: int, most_tokens: int, longest: int = 1, largest_more: int = _LARGEST
) -> list[int]:
    """The numbers of tokens to capture: vLLM's, that of a step of decode with the most requests, and larger ones.

    A user's are kept: those whose largest is not the one that vLLM makes of the requests of a step.

    Args:
        captured: those of vLLM's configuration.
        most_requests: of a step.
        most_tokens: of a step.
        longest: tokens of a request in a step of decode or the longest verify step.
        largest_more: of :func:`largest_size`.
    """
    largest, limit = max(captured, default=0), min(2 * most_requests * longest, _DEFAULT_LARGEST, most_tokens)
    if not limit - _DEFAULT_STEP < largest <= limit:
        return captured
    more = {*(size for size in _MORE_SIZES if size > largest), min(most_requests, _LARGEST)}
    return sorted({*captured, *(size for size in more if size <= min(most_tokens, largest_more))})


def most_tokens(requests: int, tokens: int, most_query_tokens: int, verify: tuple[int, ...] = ()) -> int:
    """The most tokens that a request of a step may have, found from what a CUDA graph fixes: its padded requests and
    tokens. A step of decode may run in the graph of any other mix, and must then be planned as that mix.

    Args:
        requests: of the step, padded.
        tokens: of the step, padded.
        most_query_tokens: the most tokens that a request has; a step without a graph may have any.
        verify: of :func:`verify_lengths`.

    Raises:
        RuntimeError: fewer tokens than requests although one has several: vLLM never schedules a request without one.
    """
    if tokens <= requests:
        if most_query_tokens > 1:
            raise RuntimeError(f"a step of {requests} requests has {tokens} tokens, {most_query_tokens} of them of one")
        return 1
    return next((length for length in verify if tokens == requests * length and most_query_tokens <= length), tokens)


def install() -> None:
    """Have the model runner, and a drafter, make and choose between them."""
    manager = patch_points.GRAPH_MANAGER.get()
    init_candidates = manager._init_candidates

    def _init_candidates(self: Any) -> None:
        init_candidates(self)
        full = patch_points.CUDAGRAPH_MODE.get().FULL
        if self.cudagraph_mode != full or full not in self._capture_descs:
            return
        put(self, _graphs(self._capture_descs[full], self.max_num_reqs, verify_lengths(self.vllm_config)))

    manager._init_candidates = _init_candidates


def put(manager: Any, graphs: list[Any]) -> None:
    """Have a manager capture these graphs, the largest first, and choose among them; the first kinds come first. A step
    has those of as many LoRA adapters alone.
    """
    full = patch_points.CUDAGRAPH_MODE.get().FULL
    manager._capture_descs = {full: sorted(graphs, key=lambda one: one.num_tokens, reverse=True)}
    manager._candidates = {}
    for loras in dict.fromkeys(one.num_active_loras for one in graphs):
        those = [one for one in graphs if one.num_active_loras == loras]
        kinds = [
            sorted((one for one in those if one.uniform_token_count == kind), key=lambda one: one.num_tokens)
            for kind in dict.fromkeys(one.uniform_token_count for one in those)
        ]
        for tokens in range(max(one.num_tokens for one in those) + 1):
            manager._candidates[tokens, loras] = [graph for kind in kinds for graph in _next_two(kind, tokens)]


def _next_two(kind: list[Any], tokens: int) -> list[Any]:
    """Of a kind in ascending order the smallest that have room for so many tokens: as many requests as tokens, not of
    decode, are too many for the first of any other mix.
    """
    first = bisect_left(kind, tokens, key=lambda graph: graph.num_tokens)
    return kind[first : first + 2]


def _graphs(descriptions: Iterable[Any], most_requests: int, verify: tuple[int, ...]) -> list[Any]:
    """Of vLLM's graphs, one a number of tokens and of LoRA adapters: those of decode, those of verify steps, and those
    of any other mix.
    """
    by_loras: dict[int, list[Any]] = {}
    for one in descriptions:
        by_loras.setdefault(one.num_active_loras, []).append(one)
    return [graph for those in by_loras.values() for graph in _of_loras(those, most_requests, verify)]


def _of_loras(descriptions: Iterable[Any], most_requests: int, verify: tuple[int, ...]) -> list[Any]:
    """Those of one number of LoRA adapters."""
    by_tokens = {one.num_tokens: one for one in descriptions}
    largest = max(by_tokens)
    requests = sorted({*(tokens for tokens in by_tokens if tokens <= most_requests), most_requests})
    found = [
        replace(one, num_reqs=tokens, uniform_token_count=1)
        for tokens, one in by_tokens.items()
        if tokens <= most_requests
    ]
    for length in verify:
        found += [
            replace(by_tokens[largest], num_tokens=count * length, num_reqs=count, uniform_token_count=length)
            for count in requests
            if count * length <= largest
        ]
    found += [
        replace(one, num_reqs=min(one.num_reqs, tokens - 1))
        for tokens, one in by_tokens.items()
        if tokens > 1 and not is_verify(min(one.num_reqs, tokens - 1), tokens, verify)
    ]
    return found


def is_verify(requests: int, tokens: int, verify: tuple[int, ...]) -> bool:
    """Whether so many requests and tokens are those of a verify step's graph. A request alone may have all of them."""
    return requests > 1 and any(tokens == requests * length for length in verify)
