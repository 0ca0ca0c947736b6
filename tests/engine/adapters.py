"""LoRA adapters of small models, as PEFT writes them, and what an engine with some is asked."""

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from vllm_batch_invariant.ops.lora import LoraReduction
from vllm_batch_invariant.verify.harness import adapters

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def written(
    folder: Path, model: Path, rank: int, seed: int, targets: Sequence[str] = (*adapters.ATTENTION, *adapters.MLP)
) -> Path:
    """A random adapter for a model of a folder."""
    return adapters.write(folder, json.loads((model / "config.json").read_text()), rank, seed, targets)


def step(
    llm: Any,
    requests: Sequence[Mapping[str, Any]],
    adapters: Mapping[str, Sequence[Any]],
    reset: bool = True,
    preempt_after: int = 0,
    then_load: Sequence[Any] = (),
) -> dict[str, Any]:
    """Send requests together; runs in the engine's process.

    Args:
        requests: each with the name of its adapter, or None; one that begins with "stacked" has stacked experts. Those
            with images are those of :func:`.images.answers`, with the pixels of a ``patch``.
        adapters: number and folder of each name.
        reset: whether the prefix cache is emptied first.
        preempt_after: after so many steps what runs is preempted; 0: never.
        then_load: after the first step, arguments of :func:`load`.

    Returns:
        What each request got, how many of its tokens the prefix cache had, preemptions, and what loading said.
    """
    from vllm.lora.request import LoRARequest

    from vllm_batch_invariant.verify.harness.drive import add_request, describe, drive
    from vllm_batch_invariant.verify.harness.engine import request_params
    from vllm_batch_invariant.verify.harness.worker_main import preemptions

    engine, before, said = llm.llm_engine, preemptions(llm), ""
    if reset:
        assert llm.reset_prefix_cache()
    done: dict[str, Any] = {}
    for number, request in enumerate(requests):
        name = request["adapter"]
        stacked = {"is_3d_lora_weight": True} if str(name).startswith("stacked") else {}
        lora = None if name is None else LoRARequest(name, *adapters[name], **stacked)
        add_request(engine, str(number), prompt_of(request), request_params(request["params"]), lora_request=lora)
    for number, outputs in enumerate(drive(engine), 1):
        if number == preempt_after:
            engine.reset_prefix_cache(reset_running_requests=True)
        if number == 1 and then_load:
            said = load(llm, *then_load)
        done |= {output.request_id: describe(output) for output in outputs if output.finished}
    answers = [done[str(number)] for number in range(len(requests))]
    return {
        "answers": [[one["completions"], one["prompt_logprobs"]] for one in answers],
        "cached": [one["cached"] for one in answers],
        "preemptions": preemptions(llm) - before,
        "said": said,
    }


def prompt_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """A request's prompt as vLLM takes it."""
    from tests.engine import images

    if "patch" in request:
        return images.prompt_of(request, request["patch"])
    return {"prompt_token_ids": request["prompt"]}


def load(llm: Any, name: str, number: int, folder: str, in_place: bool) -> str:
    """Have the engine load an adapter; returns what it said against that."""
    from vllm.lora.request import LoRARequest

    try:
        llm.llm_engine.add_lora(LoRARequest(name, number, folder, load_inplace=in_place))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def load_asleep(llm: Any, level: int, name: str, number: int, folder: str) -> None:
    """Have the engine load an adapter in place while it sleeps and only its weights are there, as trainers do."""
    llm.sleep(level)
    llm.wake_up(tags=["weights"])
    assert load(llm, name, number, folder, True) == ""
    llm.wake_up(tags=["kv_cache"])


def replace_unseen(llm: Any, way: str, folder: str) -> None:
    """Replace the weights by a function, and have the engine, which is in this process, not look at them after that."""
    from vllm_batch_invariant.integration.engine import weights
    from vllm_batch_invariant.integration.side_table import beside

    module, _, function = way.partition(":")
    core = llm.llm_engine.engine_core.engine_core
    getattr(import_module(module), function)(llm, folder)
    watch = beside(core).watch
    watch.called, watch.written = False, weights._written


def refusal(llm: Any, request: Mapping[str, Any], name: str, number: int, folder: str) -> str:
    """What the engine says against a request with an adapter."""
    try:
        step(llm, [{**request, "adapter": name}], {name: [number, folder]}, reset=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def forget_digests(llm: Any) -> None:
    """Have prompts found by the name and the path of an adapter alone, as vLLM does; the engine is in this process."""
    from vllm.v1.request import Request

    of_client = Request.from_engine_core_request.__func__

    def from_engine_core_request(cls: type, request: Any, *args: Any) -> Any:
        request.cache_salt = None
        return of_client(cls, request, *args)

    Request.from_engine_core_request = classmethod(from_engine_core_request)


def plant(llm: Any, fault: str) -> None:
    """Have the workers compute adapters as one of :data:`FAULTS`; without one as ever."""
    llm.apply_model(_Planted(fault))


def plant_in_experts(llm: Any, fault: str) -> None:
    """The same of the adapters of experts alone, as one of :data:`EXPERT_FAULTS`, on any device without CUDA graphs."""
    llm.apply_model(_Planted(fault, of_experts=True))


class _Planted:
    """A function that travels to the workers."""

    def __init__(self, fault: str, of_experts: bool = False) -> None:
        self.fault, self.of_experts = fault, of_experts

    def __call__(self, model: torch.nn.Module) -> None:
        place, faults = (_in_experts, EXPERT_FAULTS) if self.of_experts else (_PLACES[DEVICE], FAULTS)
        owner, *names = place()
        if not hasattr(owner, "_right"):
            owner._right = [getattr(owner, name) for name in names]
        for name, right in zip(names, owner._right, strict=True):
            setattr(owner, name, right)
        if self.fault:
            faults[self.fault](owner)


def _in_experts() -> tuple[Any, ...]:
    from vllm_batch_invariant.ops.moe import ExpertAdapters

    return ExpertAdapters, "_add"


def _next_token(adapters: Any) -> None:
    add = adapters._add

    def faulty(self: Any, y: torch.Tensor, x: torch.Tensor, of: Any, tokens: torch.Tensor, experts: Any) -> None:
        add(self, y, x, of, tokens.roll(1), experts)

    adapters._add = faulty


def _pairs_rounded(adapters: Any) -> None:
    add = adapters._add

    def faulty(self: Any, y: torch.Tensor, x: torch.Tensor, of: Any, tokens: torch.Tensor, experts: Any) -> None:
        if len(tokens.unique()) == 1:
            add(self, y, x, of, tokens, experts)
            return
        delta = torch.zeros_like(y)
        add(self, delta, x, of, tokens, experts)
        y += delta

    adapters._add = faulty


EXPERT_FAULTS: dict[str, Callable[[Any], None]] = {
    "a pair has its neighbour's adapter": _next_token,
    "what is added is rounded first, for several tokens": _pairs_rounded,
}
"""What would have the bits of experts with adapters follow from the company."""


def _on_a_cpu() -> tuple[Any, ...]:
    from vllm_batch_invariant.ops.lora import cpu

    return cpu, "_by_slot", "_shrink", "_expand"


def _on_a_gpu() -> tuple[Any, ...]:
    """Where rows are grouped, before any CUDA graph."""
    from vllm_batch_invariant.ops.lora import cuda

    return cuda.RowGroups, "set"


_PLACES = {"cpu": _on_a_cpu, "cuda": _on_a_gpu}
"""What has the functions in whose place faults are, and their names."""


def _none_is_the_last(cpu: Any) -> None:
    def by_slot(slots: torch.Tensor) -> Any:
        for slot in slots.unique().tolist():
            yield slot, (slots == slot).nonzero()[:, 0]

    cpu._by_slot = by_slot


def _next_row(cpu: Any) -> None:
    right = cpu._by_slot

    def by_slot(slots: torch.Tensor) -> Any:
        return right(slots.roll(1) if len(slots) > 1 else slots)

    cpu._by_slot = by_slot


def _halves_by_rows(cpu: Any) -> None:
    right = cpu._shrink

    def shrink(x: torch.Tensor, a: torch.Tensor, reduction: Any) -> torch.Tensor:
        if len(x) == 1:
            return right(x, a, reduction)
        half = x.shape[1] // 2
        parts = (slice(half), slice(half, None))
        first, second = ((x[:, part].float() @ a[:, part].float().t()).to(x.dtype) for part in parts)
        return first + second

    cpu._shrink = shrink


def _rounded_by_rows(cpu: Any) -> None:
    right = cpu._expand

    def expand(y: torch.Tensor, rows: torch.Tensor, u: torch.Tensor, b: torch.Tensor, reduction: LoraReduction) -> None:
        if len(rows) == 1:
            right(y, rows, u, b, reduction)
            return
        delta = torch.zeros_like(y[rows])
        right(delta, torch.arange(len(rows)), u, b, reduction)
        y[rows] += delta

    cpu._expand = expand


def _grouped_as(slots_of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """Rows are grouped by other slots than theirs."""

    def plant(groups: Any) -> None:
        right = groups.set
        groups.set = lambda self, slots: right(self, slots_of(slots))

    return plant


def _none_is_the_first(slots: torch.Tensor) -> torch.Tensor:
    return slots.clamp_min(0)


def _rolled(slots: torch.Tensor) -> torch.Tensor:
    return slots.roll(1)


SHRINKS, EXPANDS = (
    "K is added in halves, each rounded, for several rows",
    "what is added is rounded first, for several rows",
)
_FAULTS: dict[str, dict[str, Callable[[Any], None]]] = {
    "cpu": {
        "no adapter is the last slot": _none_is_the_last,
        "a row has its neighbour's adapter": _next_row,
        SHRINKS: _halves_by_rows,
        EXPANDS: _rounded_by_rows,
    },
    "cuda": {
        "no adapter is the first slot": _grouped_as(_none_is_the_first),
        "a row has its neighbour's adapter": _grouped_as(_rolled),
    },
}
FAULTS = _FAULTS[DEVICE]
"""What would have an adapter's bits follow from the company."""
