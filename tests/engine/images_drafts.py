"""Faults of verify steps, in the process of an engine that takes images; planted again, one is taken out."""

from typing import Any

from tests.engine.states import soften_verify_steps as _soften

_PLANTED: dict[str, Any] = {}


def soften_verify_steps(llm: Any) -> None:
    """Have attention scale the scores of steps of a few tokens of each request a little less."""
    layers = llm.apply_model(lambda model: [layer for layer in model.modules() if hasattr(layer, "impl")])[0]
    if before := _PLANTED.pop("scores", None):
        for layer, call in zip(layers, before, strict=True):
            layer.impl._call = call
        return
    _PLANTED["scores"] = [layer.impl._call for layer in layers]
    _soften(llm)


def move_drafts(llm: Any) -> None:
    """Have drafts stand one place further on (M-RoPE)."""
    [worker] = llm.collective_rpc(lambda worker: worker)
    runner = worker.model_runner
    if before := _PLANTED.pop("places", None):
        runner._calc_mrope_positions = before
        return
    original = _PLANTED["places"] = runner._calc_mrope_positions

    def _calc_mrope_positions(step: Any, *others: Any) -> Any:
        found, start = original(step, *others), 0
        for request in runner.input_batch.req_ids:
            end = start + step.num_scheduled_tokens[request]
            drafts = len(step.scheduled_spec_decode_tokens.get(request, ()))
            runner.mrope_positions.cpu[:, end - drafts : end] += 1
            start = end
        return found

    runner._calc_mrope_positions = _calc_mrope_positions
