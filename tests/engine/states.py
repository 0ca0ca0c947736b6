"""What is done to the states of layers that keep one of each request, in an engine's process."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vllm_batch_invariant.ops.attention import PagedAttention

LAYERS = (
    *("ShortConv", "QwenGatedDeltaNetAttention", "MambaMixer2"),
    *("BailingMoELinearAttention", "BailingMoeV3KimiDeltaAttention"),
)
"""How the names of layers with states end."""


def _layers(model: torch.nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if type(layer).__name__.endswith(LAYERS)]


def poison(llm: Any) -> int:
    """Fill the state of every page with NaN, as a request may find one that another has left: bytes of 255 are NaN in
    every dtype. Returns how many a worker has.
    """
    llm.reset_prefix_cache()
    return llm.apply_model(_fill)[0]


def poison_keys(llm: Any) -> list[tuple[str, int, bool]]:
    """The same of keys and values. Returns of each layer its class, the size of its heads and whether its cache is
    another's.
    """
    llm.reset_prefix_cache()
    return llm.apply_model(_fill_keys)[0]


def _fill_keys(model: torch.nn.Module) -> list[tuple[str, int, bool]]:
    from vllm_batch_invariant.integration.layers.attention import cache_of, reads_another_cache

    layers = [layer for layer in model.modules() if hasattr(layer, "impl")]
    for layer in layers:
        cache_of(layer).view(torch.uint8).fill_(255)
    return [(type(layer).__name__, layer.head_size, reads_another_cache(layer)) for layer in layers]


def _fill(model: torch.nn.Module) -> int:
    held = [state for layer in _layers(model) for state in layer.kv_cache]
    for state in held:
        state.view(torch.uint8).fill_(255)
    return sum(len(state) for state in held)


_LOW_PLANE = slice(1 << 15, 1 << 16)
"""Of a page of 4 states of 64 x 64, the bytes of the lower halves of their numbers."""


def _round_states(states: Any) -> dict[str, Any]:
    states.states[:, _LOW_PLANE] = 0
    return {}


def _read_page(states: Any) -> dict[str, Any]:
    return {"context_lens": states.context_lens.clamp(min=4)}


def _begin_anew(states: Any) -> dict[str, Any]:
    return {"context_lens": torch.where(states.starts.diff() > 1, 0, states.context_lens)}


def _share_a_page(states: Any) -> dict[str, Any]:
    return {"pages": states.pages.clamp(max=states.pages.min())}


FAULTS: dict[str, dict[str, Callable[[Any], dict[str, Any]]]] = {
    "ConvStates": {
        "a new request reads its page": _read_page,
        "a chunk begins anew": _begin_anew,
        "all states are in one page": _share_a_page,
    },
    "DeltaStates": {
        "a chunk begins anew": _begin_anew,
        "states are rounded to bf16": _round_states,
    },
}
"""By the class of states that are told so; what an operation is given of a step. Delta rules must not read a page that
is not theirs: how many tokens its state has seen lies in it.
"""


def _with(
    change: Callable[[Any], dict[str, Any]], of: str, states_of: Any, self: Any, held: torch.Tensor, kind: Any
) -> Any:
    states = states_of(self, held, kind)
    return kind(**{**vars(states), **change(states)}) if kind.__name__ == of else states


def plant(llm: Any, fault: str, of: str = "ConvStates") -> None:
    """Have the layers take a step for another than it is, from now on; "" for what it is.

    Args:
        of: the class of states that are told so.
    """
    from vllm_batch_invariant.integration.layers.state_backend import StateStep

    llm.reset_prefix_cache()
    StateStep.states_of = vars(StateStep).get("original", StateStep.states_of)
    StateStep.original = StateStep.states_of
    if fault:
        changed = partial(_with, FAULTS[of][fault], of, StateStep.original)
        StateStep.states_of = lambda self, held, kind: changed(self, held, kind)


def keep_drafts(llm: Any) -> None:
    """Have steps take drafts for tokens that stay, from now on: then a state is kept that has seen rejected ones."""
    llm.collective_rpc(_keep_drafts)


def _keep_drafts(_worker: Any) -> None:
    from vllm_batch_invariant.ops.delta_rule import DeltaRuleReduction

    DeltaRuleReduction.drafts = lambda self, rows: 0


def leave_no_room_for_drafts(_llm: Any) -> None:
    """Have short convolutions keep as many inputs as without drafts, from now on: a rejected one takes the place of
    one that is read once more.
    """
    from vllm_batch_invariant.integration.layers import short_conv

    states = short_conv._states
    short_conv._states = lambda layer: states(layer)[:, : layer.L_cache - 1]


def soften_verify_steps(llm: Any) -> None:
    """Have attention scale the scores of steps of a few tokens of each request a little less, from now on."""
    llm.apply_model(_soften_verify_steps)


def _soften_verify_steps(model: torch.nn.Module) -> None:
    for layer in model.modules():
        if hasattr(layer, "impl"):
            layer.impl._call = partial(_with_lower_scores, layer.impl._call)


def _with_lower_scores(call: Callable[..., PagedAttention], *given: Any) -> PagedAttention:
    made = call(*given)
    few = 1 < int(made.query_start_loc.diff().max()) <= 6
    return replace(made, spec=replace(made.spec, scale=made.spec.scale * (1 - 2**-10))) if few else made


def accept_every_draft(llm: Any) -> None:
    """Have verify steps of either model runner take drafts for what was sampled, from now on: CUDA graphs have no part
    of that.
    """
    llm.collective_rpc(_accept_every_draft)


def _accept_every_draft(_worker: Any) -> None:
    from vllm_batch_invariant.integration.sampling import speculation

    speculation.accept = partial(_accepted_all, speculation.accept)


def _accepted_all(
    accept: Callable[..., Any], sampled: torch.Tensor, inputs: torch.Tensor, starts: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    drafts = inputs.roll(-1).to(sampled.dtype)
    is_draft = drafts >= 0
    is_draft[starts[1:].long() - 1] = False  # the last row of a request, which none follows
    taken: tuple[torch.Tensor, torch.Tensor] = accept(torch.where(is_draft, drafts, sampled), inputs, starts, width)
    return taken


def leave_full_pages(llm: Any) -> None:
    """Have a verify step that fills a page leave it as it was before, from now on: what is found there is the state
    before the step.
    """
    llm.reset_prefix_cache()
    llm.collective_rpc(_leave_full_pages)


def _leave_full_pages(_worker: Any) -> None:
    from vllm.v1.worker import mamba_utils

    def leave(*, num_reqs: int, num_accepted_tokens_cpu_tensor: torch.Tensor, **_: object) -> None:
        num_accepted_tokens_cpu_tensor[:num_reqs] = 1

    mamba_utils.postprocess_mamba_align_gpu = leave
