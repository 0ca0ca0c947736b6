"""Runs a schedule in an engine of this process, step by step, and counts what the schedule provoked.

The functions are called in the engine's process by ``Engine.call``; arguments and results are plain data.
"""

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch

from ...envs import is_exact
from ...integration.parallel.tensor_tree import k_slices
from ..harness import images, pooling
from ..harness.drive import add_request, bits, described, drive, is_pooled
from ..harness.engine import adapter_request, request_params, sampling_params
from ..harness.requests import BUDGET, EVERY_KIND, NOT_BESIDE_DRAFTS, OF_TEXT
from ..printing import one_line
from .compare import DIGEST

SHOWN = 24
"""Listed candidates of a position that are sent; a longer list ends in a digest."""
MOST_HEX = 1 << 17
"""Hexadecimal digits of several rows that are sent; of more rows digests."""
MOST_STEPS = 20_000
"""Engine steps after which a schedule is given up; none needs as many."""
_PAUSE = 0.002
"""Seconds."""
_STALE = 4
"""Prompts that other weights read before an update."""
_EMBEDDED = 2048
"""Tokens that are embedded at a time."""
_FACTOR = 0.75
"""Of other weights."""
_graphs_replayed = 0


def info(llm: Any) -> dict[str, Any]:
    """Settings that the fuzzer needs in addition to :func:`..harness.worker_main.describe_engine`."""
    config = llm.llm_engine.vllm_config
    left_out = {}
    if config.model_config.skip_tokenizer_init and config.model_config.runner_type != "pooling":
        left_out = dict.fromkeys((kind for kind in EVERY_KIND if kind in OF_TEXT), "the engine has no tokenizer")
    thought = _thought(getattr(config, "reasoning_config", None))
    if not thought[0] and config.model_config.runner_type != "pooling":
        left_out[BUDGET] = "the engine was started without a reasoning configuration"
    if config.speculative_config is not None:
        left_out |= dict.fromkeys(NOT_BESIDE_DRAFTS, "vLLM does not take it beside speculative decoding")
        left_out.setdefault(BUDGET, "the mode refuses it beside speculative decoding")
    second = bool(getattr(config, "use_v2_model_runner", False)) and torch.cuda.is_available()
    workers, tree = config.parallel_config.tensor_parallel_size, k_slices()
    of = f" of {workers} workers" * (workers > 1)  # whose number decides bits
    items = getattr(config.model_config, "multimodal_config", None)
    if workers > 1 and getattr(items, "mm_encoder_tp_mode", "") == "data":
        of += " that share images"
    if tree > 1:  # or does not
        of = f" with a tree of {tree}"
    if (stages := config.parallel_config.pipeline_parallel_size) > 1:  # each has a part of the cores
        of += f" in {stages} stages"
    if config.parallel_config.enable_expert_parallel and tree == 1:
        of += " with whole experts"
    if (dtype := str(config.cache_config.cache_dtype)).startswith("fp8"):
        of += f" with a KV cache in {dtype}"
    if rate := getattr(items, "video_pruning_rate", None):
        of += f" with videos pruned by {rate}"
    if is_exact():  # where nothing of these decides bits
        of = " in exact arithmetic"
    return {"left_out": left_out, "runner": f"v{1 + second}{of}", "thought": thought}


def _thought(reasoning: Any) -> list[list[int]]:
    """The tokens that begin a thought and those that end it."""
    return [list(getattr(reasoning, f"reasoning_{end}_token_ids", None) or ()) for end in ("start", "end")]


def run_schedule(llm: Any, schedule: dict[str, Any]) -> dict[str, Any]:
    """Run a schedule from an empty prefix cache.

    Returns:
        ``answers`` of the targets by name, ``refused`` (why the engine did not take a request, by name) and ``counts``.
    """
    engine = llm.llm_engine
    _drain(engine)
    if engine.vllm_config.cache_config.enable_prefix_caching and not llm.reset_prefix_cache():
        raise RuntimeError("vLLM did not reset its prefix cache although no request runs")
    if images.placeholders(llm):
        images.forget(llm)
    encoded = images.encoded(llm)["items"]
    items = {item["name"]: item for item in schedule["items"]}
    arrivals = sorted(schedule["items"], key=lambda item: item["at"])
    events = {name: sorted(schedule.get(name, ()), key=lambda event: event["at"]) for name in _EVENTS}
    prompts = _prompts(llm, arrivals)
    answers: dict[str, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    there: set[str] = set()
    counts = {"aborts": 0, "prefix_hits": 0} | dict.fromkeys(events, 0)
    step, graphs = 0, _graphs_replayed

    def arrive() -> bool:
        nonlocal step
        if step > MOST_STEPS:
            waiting = sorted(there) or sorted(map(_name, engine.output_processor.request_states))
            raise RuntimeError(f"requests were not answered within {MOST_STEPS} engine steps: {', '.join(waiting)}")
        if not there and arrivals:  # the engine is idle until the next request
            step = max(step, arrivals[0]["at"])
        for kind, happen in _EVENTS.items() if arrivals or there else ():
            while events[kind] and events[kind][0]["at"] <= step:
                counts[kind] += happen(llm, events[kind].pop(0), arrivals)
        while arrivals and arrivals[0]["at"] <= step:
            item = arrivals.pop(0)
            try:
                params, prompt = request_params(item["params"]), prompts[item["name"]]
                with_adapter = {"lora_request": adapter_request(llm, item["adapter"])} if item.get("adapter") else {}
                add_request(engine, item["name"], prompt, params, priority=item.get("priority", 0), **with_adapter)
                there.add(item["name"])
            except Exception as error:  # vLLM refuses a request by any exception
                refused[item["name"]] = one_line(error)
        leaving = [name for name in there if items[name]["leaves"] is not None and items[name]["leaves"] <= step]
        if leaving:
            engine.abort_request(leaving)
            there.difference_update(leaving)
            counts["aborts"] += len(leaving)
        step += 1
        return bool(arrivals or there)

    with _watched(engine, {name for name, item in items.items() if item["target"]}) as watch:
        for outputs in _steps(engine, arrive):
            for output in outputs:
                name = output.request_id
                if name in there and items[name]["target"]:
                    delta = items[name]["params"].get("output_kind") == "DELTA"
                    _gather(answers.setdefault(name, {"completions": {}, "prompt_logprobs": []}), output, delta)
                if name in there and output.finished:
                    there.discard(name)
                    counts["prefix_hits"] += bool(items[name]["target"] and output.num_cached_tokens)
        _drain(engine)
    counts |= watch | {"graph_replays": _graphs_replayed - graphs}
    counts |= {"encoded": images.encoded(llm)["items"] - encoded}
    return {
        "answers": {name: _finished(answer) for name, answer in answers.items()},
        "refused": refused,
        "counts": counts,
    }


def _prompts(llm: Any, items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The prompt of each item, by name: its tokens, or their embeddings, which the model's own layer gives."""
    embedded = [item for item in items if item.get("embeds")]
    prompts = {item["name"]: images.prompt_of(llm, item["prompt"], item.get("images", ())) for item in items}
    if embedded:
        tokens = [token for item in embedded for token in item["prompt"]]
        found = llm.apply_model(partial(_embed, tokens))[0]
        parts = found.split([len(item["prompt"]) for item in embedded])
        prompts |= {item["name"]: {"prompt_embeds": part} for item, part in zip(embedded, parts, strict=True)}
    return prompts


def _embed(tokens: list[int], model: Any) -> torch.Tensor:
    """[tokens, hidden] on the CPU; runs in the engine's workers, which may each have a part of the layer."""
    ids = torch.tensor(tokens, device=next(model.parameters()).device)
    with torch.inference_mode():
        return torch.cat([model.embed_input_ids(part).cpu() for part in ids.split(_EMBEDDED)])


def _reset(llm: Any, event: dict[str, Any], waiting: list[dict[str, Any]]) -> bool:  # noqa: ARG001 - of every event
    return bool(llm.reset_prefix_cache(reset_running_requests=event["running"]))


def _sleep(llm: Any, event: dict[str, Any], waiting: list[dict[str, Any]]) -> bool:  # noqa: ARG001 - of every event
    llm.sleep(event["level"], mode="keep")
    if event["level"] > 1:
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
    else:
        llm.wake_up()
    return True


def _update(llm: Any, event: dict[str, Any], waiting: list[dict[str, Any]]) -> bool:
    if event["how"] == "paused":
        llm.sleep(0, mode="keep")
    elif event["how"] == "others before":
        llm.collective_rpc(_change_weights)
        for number, item in enumerate(waiting[:_STALE]):  # their keys must not serve later
            pools = "task" in item["params"]
            params = sampling_params({"temperature": 0.0, "max_tokens": 1, "ignore_eos": True})
            params = request_params(item["params"]) if pools else params
            prompt = images.prompt_of(llm, item["prompt"], item.get("images", ()))
            llm.llm_engine.add_request(f"stale{number}", prompt, params)
        _drain(llm.llm_engine)
    llm.collective_rpc("reload_weights")
    if event["how"] == "paused":
        llm.wake_up(tags=["scheduling"])
    return True


def _change_weights(worker: Any) -> None:
    """Have the model answer otherwise; runs in the engine's workers."""
    with torch.inference_mode():
        for weight in worker.model_runner.get_model().parameters():
            if weight.is_floating_point() and weight.dtype.itemsize > 1:  # codes of quantised weights have no product
                weight.data.mul_(_FACTOR)


_EVENTS: dict[str, Callable[[Any, dict[str, Any], list[dict[str, Any]]], bool]] = {
    "resets": _reset,
    "sleeps": _sleep,
    "updates": _update,
}
"""What happens at an event, by the attribute of a schedule; each returns whether it happened."""


def _drain(engine: Any) -> None:
    """Run aborted requests to their end."""
    core = engine.engine_core.engine_core
    steps = _steps(engine, lambda: bool(core.scheduler.has_requests() or getattr(core, "batch_queue", None)))
    if sum(1 for _ in islice(steps, MOST_STEPS)) == MOST_STEPS:
        raise RuntimeError("the engine does not come to rest")


def _steps(engine: Any, arrive: Callable[[], bool]) -> Iterator[list[Any]]:
    """The outputs of steps. While every request waits for its grammar, the thread that compiles it gets the time."""
    for outputs in drive(engine, arrive):
        if not (outputs or engine.engine_core.engine_core.scheduler.running):
            time.sleep(_PAUSE)
        yield outputs


def _gather(answer: dict[str, Any], output: Any, delta: bool) -> None:
    """Add an output to the answer: new tokens if ``delta``, otherwise a completion that has ended, or what a pooling
    model gave.
    """
    if is_pooled(output):
        answer["completions"][0] = _short(pooling.described(output.outputs.data))
        return
    for completion in output.outputs:
        if not delta and completion.finish_reason is None:
            continue
        new = described(completion)
        new["logprobs"] = [*map(_listed, new["logprobs"] or ())]
        new |= {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
        old = answer["completions"].get(completion.index)
        if delta and old:
            new |= {name: old[name] + new[name] for name in ("text", "tokens", "logprobs")}
        answer["completions"][completion.index] = new
    if (delta or output.finished) and not answer["prompt_logprobs"]:  # a delta has them once
        answer["prompt_logprobs"] = [_listed(bits(entry)) for entry in output.prompt_logprobs or ()]


def _short(pooled: dict[str, Any]) -> dict[str, Any]:
    """What a pooling model gave; of many rows a digest of each."""
    rows = pooled["shape"][0] if len(pooled["shape"]) > 1 else 1
    if rows < 2 or len(pooled["raw"]) <= MOST_HEX:
        return pooled
    raw = bytes.fromhex(pooled["raw"])
    size = len(raw) // rows
    digests = [hashlib.sha256(raw[start : start + size]).hexdigest()[:16] for start in range(0, len(raw), size)]
    return pooled | {"raw": "", "rows": digests}


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
    """Count the scheduler's steps, those in which a prompt was cut, and the requests that it preempts by itself, which
    no reset or sleep of the schedule does; and collect targets that ran with others.
    """
    _watch_graphs()
    scheduler = engine.engine_core.engine_core.scheduler
    schedule, preempt = scheduler.schedule, scheduler._preempt_request
    seen: dict[str, Any] = {"steps": 0, "chunked_steps": 0, "largest_batch": 0, "preemptions": 0, "concurrent": []}
    times = 0

    def preempted(*arguments: Any, **more: Any) -> Any:
        nonlocal times
        times += 1
        return preempt(*arguments, **more)

    def watched(*arguments: Any, **more: Any) -> Any:
        before = times
        made = schedule(*arguments, **more)
        seen["preemptions"] += times - before
        running = made.num_scheduled_tokens
        seen["steps"] += bool(running)
        requests = (scheduler.requests[name] for name in running)
        # after scheduling, so a request with tokens left to compute is one whose prompt was cut
        seen["chunked_steps"] += any(request.num_computed_tokens < request.num_tokens for request in requests)
        seen["largest_batch"] = max(seen["largest_batch"], len(running))
        together = {_name(request) for request in running}
        if len(together) > 1:
            seen["concurrent"] = sorted({*seen["concurrent"], *(together & targets)})
        return made

    scheduler.schedule, scheduler._preempt_request = watched, preempted
    try:
        yield seen
    finally:
        del scheduler.schedule, scheduler._preempt_request


def _name(request: str) -> str:
    """The item's name from vLLM's, which has a sample number in front and random characters at the end."""
    return re.sub(r"^\d+_|-[0-9a-f]+$", "", request)


def _watch_graphs() -> None:
    """Count every replay of a CUDA graph in this process, once it is called."""
    graphs: Any = torch.cuda.CUDAGraph
    if torch.cuda.is_available() and not hasattr(graphs.replay, "counted"):
        replay = graphs.replay

        def counted(graph: torch.cuda.CUDAGraph) -> None:
            global _graphs_replayed
            _graphs_replayed += 1
            replay(graph)

        vars(counted)["counted"] = True
        graphs.replay = counted
