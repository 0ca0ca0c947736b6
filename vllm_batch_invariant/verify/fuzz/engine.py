"""Runs a schedule in an engine of this process, step by step, and counts what the schedule provoked.

The functions are called in the engine's process by ``Engine.call``; arguments and results are plain data.
"""

import hashlib
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...envs import is_exact
from ...integration.tensor_tree import leaves
from ..harness.engine import sampling_params
from ..harness.requests import KINDS, NOT_BESIDE_DRAFTS, OF_TEXT
from ..harness.worker_main import bits, preemptions
from ..printing import one_line
from .compare import DIGEST

SHOWN = 24
"""Listed candidates of a position that are sent; a longer list ends in a digest."""
MOST_STEPS = 20_000
"""Engine steps after which a schedule is given up; none needs as many."""
_PAUSE = 0.002
"""Seconds."""
_graphs_replayed = 0


def info(llm: Any) -> dict[str, Any]:
    """Settings that the fuzzer needs in addition to :func:`..harness.worker_main.describe_engine`."""
    config = llm.llm_engine.vllm_config
    left_out = {}
    if config.model_config.skip_tokenizer_init:
        left_out = dict.fromkeys((kind for kind in KINDS if kind in OF_TEXT), "the engine has no tokenizer")
    if config.speculative_config is not None:
        left_out |= dict.fromkeys(NOT_BESIDE_DRAFTS, "vLLM does not take it beside speculative decoding")
    second = bool(getattr(config, "use_v2_model_runner", False)) and torch.cuda.is_available()
    workers, tree = config.parallel_config.tensor_parallel_size, leaves()
    of = f" of {workers} workers" * (workers > 1)  # whose number decides bits
    if tree > 1:  # or does not
        of = f" with a tree of {tree}"
    if (stages := config.parallel_config.pipeline_parallel_size) > 1:  # each has a part of the cores
        of += f" in {stages} stages"
    if is_exact():  # where nothing of these decides bits
        of = " in exact arithmetic"
    return {"left_out": left_out, "runner": f"v{1 + second}{of}"}


def run_schedule(llm: Any, schedule: dict[str, Any]) -> dict[str, Any]:
    """Run a schedule from an empty prefix cache.

    Returns:
        ``answers`` of the targets by name, ``refused`` (why the engine did not take a request, by name) and ``counts``.
    """
    engine = llm.llm_engine
    _drain(engine)
    if engine.vllm_config.cache_config.enable_prefix_caching and not llm.reset_prefix_cache():
        raise RuntimeError("vLLM did not reset its prefix cache although no request runs")
    items = {item["name"]: item for item in schedule["items"]}
    arrivals = sorted(schedule["items"], key=lambda item: item["at"])
    resets = sorted(schedule["resets"], key=lambda reset: reset["at"])
    answers: dict[str, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    there: set[str] = set()
    counts = {"aborts": 0, "resets": 0, "prefix_hits": 0}
    before, graphs = preemptions(llm), _graphs_replayed
    with _watched(engine, {name for name, item in items.items() if item["target"]}) as watch:
        step = 0
        while arrivals or there:
            if not there and arrivals:  # the engine is idle until the next request
                step = max(step, arrivals[0]["at"])
            while resets and resets[0]["at"] <= step:
                counts["resets"] += bool(llm.reset_prefix_cache(reset_running_requests=resets.pop(0)["running"]))
            while arrivals and arrivals[0]["at"] <= step:
                item = arrivals.pop(0)
                try:
                    prompt = {"prompt_token_ids": list(item["prompt"])}
                    engine.add_request(item["name"], prompt, sampling_params(item["params"]))
                    there.add(item["name"])
                except Exception as error:  # vLLM refuses a request by any exception
                    refused[item["name"]] = one_line(error)
            leaving = [name for name in there if items[name]["leaves"] is not None and items[name]["leaves"] <= step]
            if leaving:
                engine.abort_request(leaving)
                there -= set(leaving)
                counts["aborts"] += len(leaving)
            for output in _step(engine):
                name = output.request_id
                if name in there and items[name]["target"]:
                    delta = items[name]["params"].get("output_kind") == "DELTA"
                    _gather(answers.setdefault(name, {"completions": {}, "prompt_logprobs": []}), output, delta)
                if name in there and output.finished:
                    there.discard(name)
                    counts["prefix_hits"] += bool(items[name]["target"] and output.num_cached_tokens)
            step += 1
            if step > MOST_STEPS:
                raise RuntimeError(f"requests were not answered within {MOST_STEPS} engine steps: {sorted(there)}")
        _drain(engine)
    counts |= watch | {"preemptions": preemptions(llm) - before, "graph_replays": _graphs_replayed - graphs}
    return {
        "answers": {name: _finished(answer) for name, answer in answers.items()},
        "refused": refused,
        "counts": counts,
    }


def _drain(engine: Any) -> None:
    """Run what is left of aborted requests."""
    core = engine.engine_core.engine_core
    for _ in range(MOST_STEPS):
        if not (core.scheduler.has_requests() or getattr(core, "batch_queue", None)):
            return
        _step(engine)
    raise RuntimeError("the engine does not come to rest")


def _step(engine: Any) -> list[Any]:
    """A step's outputs. While every request waits for its grammar, the thread that compiles it gets the time."""
    outputs = engine.step()
    if not (outputs or engine.engine_core.engine_core.scheduler.running):
        time.sleep(_PAUSE)
    return outputs


def _gather(answer: dict[str, Any], output: Any, delta: bool) -> None:
    """Add an output to the answer: new tokens if ``delta``, otherwise a completion that has ended."""
    for completion in output.outputs:
        if not delta and completion.finish_reason is None:
            continue
        logprobs = [] if completion.logprobs is None else [_listed(bits(entry)) for entry in completion.logprobs]
        new = {
            "text": completion.text,
            "tokens": list(completion.token_ids),
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        old = answer["completions"].get(completion.index)
        if delta and old:
            new |= {name: old[name] + new[name] for name in ("text", "tokens", "logprobs")}
        answer["completions"][completion.index] = new
    if (delta or output.finished) and not answer["prompt_logprobs"]:  # a delta has them once
        answer["prompt_logprobs"] = [_listed(bits(entry)) for entry in output.prompt_logprobs or ()]


def _finished(answer: dict[str, Any]) -> dict[str, Any]:
    completions = answer["completions"]
    return answer | {"completions": [completions[index] for index in sorted(completions)]}


def _listed(entry: list[tuple[int, str, int]] | None) -> list[list[Any]] | None:
    """The candidates of a position in order; beyond ``SHOWN`` their number, with a digest of all as the logprob."""
    if entry is None or len(entry) <= SHOWN:
        return None if entry is None else [list(candidate) for candidate in entry]
    digest = hashlib.sha256(repr(entry).encode()).hexdigest()
    return [*([*candidate] for candidate in entry[:SHOWN]), [len(entry), f"{DIGEST}{digest}", 0]]


@contextmanager
def _watched(engine: Any, targets: set[str]) -> Iterator[dict[str, Any]]:
    """Count the scheduler's steps and those in which a prompt was cut, and collect targets that ran with others."""
    _watch_graphs()
    scheduler = engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule
    seen: dict[str, Any] = {"steps": 0, "chunked_steps": 0, "largest_batch": 0, "in_company": []}

    def watched(*arguments: Any, **more: Any) -> Any:
        made = schedule(*arguments, **more)
        running = made.num_scheduled_tokens
        seen["steps"] += bool(running)
        requests = (scheduler.requests[name] for name in running)
        # after scheduling, so a request with tokens left to compute is one whose prompt was cut
        seen["chunked_steps"] += any(request.num_computed_tokens < request.num_tokens for request in requests)
        seen["largest_batch"] = max(seen["largest_batch"], len(running))
        together = {_name(request) for request in running}
        if len(together) > 1:
            seen["in_company"] = sorted({*seen["in_company"], *(together & targets)})
        return made

    scheduler.schedule = watched
    try:
        yield seen
    finally:
        del scheduler.schedule


def _name(request: str) -> str:
    """The item's name from vLLM's, which has a sample number in front and random characters at the end."""
    return re.sub(r"^\d+_|-[0-9a-f]+$", "", request)


def _watch_graphs() -> None:
    """Count every replay of a CUDA graph in this process, once it is called."""
    if torch.cuda.is_available() and not hasattr(torch.cuda.CUDAGraph.replay, "counted"):
        replay = torch.cuda.CUDAGraph.replay

        def counted(graph: torch.cuda.CUDAGraph) -> None:
            global _graphs_replayed
            _graphs_replayed += 1
            replay(graph)

        counted.counted = True
        torch.cuda.CUDAGraph.replay = counted
