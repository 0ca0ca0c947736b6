"""Adapters (LoRA) of an engine, told apart by what is in their files.

vLLM knows an adapter by a number, finds keys and values of prompts by its name and path, and reads its files again
where another adapter has taken its room: with files that have changed a request would get other weights, and other
keys, by what else is served. Here a digest of the files goes with each request. It is a part of what prompts are found
by; a number stands for one digest until its adapter is loaded in place while no request has it; and a worker takes no
other files for it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from hashlib import sha256
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import NotCovered
from ...provenance import OF_ADAPTERS
from .. import reviews
from ..reviews import expert_adapters, patch_points
from ..side_table import beside

if TYPE_CHECKING:
    import torch

    from ...ops.lora import LoraReduction

logger = logging.getLogger("vllm.batch_invariant")
METHOD = "batch_invariant_adapter_layers"
"""For ``collective_rpc`` of an engine that takes adapters."""
FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""That vLLM reads of an adapter's folder."""

_digests: dict[tuple[Any, ...], str] = {}
"""Of files that were read, by their names, times and sizes."""


def install(platform: type[Any], wrapper: str) -> None:
    """Have workers of a platform of vLLM's compute adapters by the operation, in layers that call a class of ours of
    that name, and engines of this process tell them apart.
    """
    platform.get_punica_wrapper = classmethod(lambda cls: wrapper)
    core = patch_points.ENGINE_CORE.get()
    core._initialize_kv_caches = _that_asks_for_layers(core._initialize_kv_caches)
    core.preprocess_add_request = _with_digest(core.preprocess_add_request)
    core.add_request = _that_stands(core.add_request)
    core.add_lora = _told_apart(core.add_lora, core.remove_lora)
    core.remove_lora = _forgotten(core.remove_lora)


def install_in_worker() -> None:
    """Have this process's worker read the files that a digest is of, and compute logits of a prompt's tokens with that
    prompt's adapter.
    """
    setattr(patch_points.WORKER.get(), METHOD, lambda worker: _layers_of(worker.model_runner.lora_manager))
    manager = patch_points.LORA_WORKER.get()
    manager._load_adapter = _verified(manager._load_adapter)
    runner = patch_points.MODEL_RUNNER.get()
    runner._get_prompt_logprobs_dict = _by_prompts(runner._get_prompt_logprobs_dict, lambda runner: runner.get_model())


def install_second_runner() -> None:
    """The same of prompts in the second model runner, which is told how to compute logits by a method of the model; and
    of what it samples, where it tells layers of one row a request, also where drafts add to them.
    """
    if not patch_points.installed_version().startswith(reviews.ran().lora["cuda"]):
        return  # adapters are refused with others
    runner = patch_points.SECOND_MODEL_RUNNER.get()
    runner.sample = _of_sampled_rows(runner.sample)
    worker = patch_points.PROMPT_LOGPROBS.get()
    for name in ("compute_prompt_logprobs", "compute_prompt_token_id_logprobs"):
        if (compute := getattr(worker, name, None)) is not None:  # newer ones alone score a prompt by given tokens
            setattr(worker, name, _by_prompts(compute, lambda _, logits: logits.__self__))


def reductions(ks: Iterable[int], dtype: "torch.dtype", device_type: str) -> dict[str, "LoraReduction"]:
    """Those of layers with so many inputs, by the names that engines and trainers have for them."""
    from ...ops.lora import LoraReduction

    return {f"{OF_ADAPTERS}(K {k})": LoraReduction.of_device(device_type, k, dtype) for k in sorted({*ks})}


def digest_of(path: str) -> str:
    """Of the files of an adapter that vLLM would read: 64 hexadecimal digits.

    Raises:
        ValueError: there are none.
    """
    folder = Path(patch_points.ADAPTER_PATH.get()(path))
    found = [file for name in FILES if (file := folder / name).is_file()]
    if len(found) < 2:
        raise ValueError(f"no LoRA adapter is in {path}")
    states = [file.stat() for file in found]
    # a copy onto the file that keeps its time and size has another time of change
    seen = (*found, *((one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in states))
    if seen not in _digests:
        parts = [f"{file.name} {sha256(file.read_bytes()).hexdigest()}" for file in found]
        _digests[seen] = sha256("\n".join(parts).encode()).hexdigest()
    return _digests[seen]


def _identified(lora_request: Any, digest: str, load_inplace: bool) -> Any:
    """The same adapter, with its digest."""
    from .adapter_request import AdapterRequest

    given = {name: getattr(lora_request, name) for name in type(lora_request).__struct_fields__}
    return AdapterRequest(**given | {"digest": digest, "load_inplace": load_inplace})


def _with_digest(preprocess: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's method that takes a request from a client. A request does not load its adapter anew: vLLM keeps that in
    what it sends to the workers, which would read it in each step.

    It then raises:
        ValueError: there is no such adapter, the engine does not serve it, or the files have changed since it was first
            used.
    """

    @wraps(preprocess)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        adapter = request.lora_request
        if adapter is not None:
            digest = digest_of(adapter.lora_path)
            if problem := _problem_of(self, adapter):
                raise ValueError(f"the LoRA adapter {adapter.lora_name} is not served: {problem}")
            if not _stands_for(self, adapter, digest):
                raise ValueError(_other_files(adapter))
            request.lora_request = _identified(adapter, digest, load_inplace=False)
            request.cache_salt = " ".join(filter(None, (digest, request.cache_salt)))
        return preprocess(self, request)

    return preprocess_add_request


def _that_asks_for_layers(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's method that ends the start of the workers, which say once which layers take adapters."""

    @wraps(initialize)
    def _initialize_kv_caches(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = initialize(self, *args, **kwargs)
        if self.vllm_config.lora_config is not None:
            beside(self).adapter_layers = self.model_executor.collective_rpc(METHOD)[0]
        return made

    return _initialize_kv_caches


def _layers_of(manager: Any) -> expert_adapters.Layers:
    """Of a worker's manager of adapters."""
    around = manager._adapter_manager
    mapper = getattr(around.model, "hf_to_vllm_mapper", None)
    parts = (part for packed in around.packed_modules.values() for part in packed)
    return expert_adapters.Layers(frozenset([*around.modules, *parts]), mapper and mapper.get_rename_mapper())


def _problem_of(core: Any, adapter: Any) -> str:
    """Why the engine does not serve an adapter that is there; empty if it does."""
    path = patch_points.ADAPTER_PATH.get()(adapter.lora_path)
    layers = beside(core).adapter_layers
    return expert_adapters.problem_of(path, adapter.is_3d_lora_weight, core.vllm_config, layers)


def _stands_for(core: Any, adapter: Any, digest: str) -> bool:
    """Whether the adapter's number stands for files of a digest, as it does from the first request on."""
    return beside(core).adapters.setdefault(adapter.lora_int_id, digest) == digest


def _other_files(adapter: Any) -> str:
    return (
        f"the files of the LoRA adapter {adapter.lora_name} are not those that number {adapter.lora_int_id} stands "
        "for: load it in place, or with a number of its own"
    )


def _that_stands(add: Callable[..., None]) -> Callable[..., None]:
    """vLLM's method that has a request scheduled. One that came while its adapter was replaced, which a thread of its
    own takes from the client, ends with an error.

    It then raises:
        ValueError: it is such a request, of an engine in its caller's process.
    """

    @wraps(add)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        adapter = request.lora_request
        if adapter is None or _stands_for(self, adapter, adapter.digest):
            add(self, request, *args, **kwargs)
        elif hasattr(self, "output_queue"):
            logger.warning("The request %s ends: %s.", request.request_id, _other_files(adapter))
            self._send_error_outputs_to_client([request.request_id], request.client_index)
        else:
            raise ValueError(_other_files(adapter))

    return add_request


def _told_apart(add: Callable[..., bool], remove: Callable[..., bool]) -> Callable[..., bool]:
    """vLLM's method that loads an adapter. Where it fails, a worker may hold a part of it, which ``remove`` takes away.

    It then raises:
        NotCovered: another adapter with that number is there and shall not be replaced, requests have it, or the
            engine does not serve it.
    """

    @wraps(add)
    def add_lora(self: Any, lora_request: Any) -> bool:
        try:
            digest = digest_of(lora_request.lora_path)
        except ValueError:
            return add(self, lora_request)  # vLLM says what is missing
        if problem := _problem_of(self, lora_request):
            raise NotCovered(f"the LoRA adapter {lora_request.lora_name}", problem, "serve the model with another one")
        held, number = beside(self).adapters, lora_request.lora_int_id
        if held.get(number, digest) != digest:
            if not lora_request.load_inplace:
                raise NotCovered(
                    f"another LoRA adapter with the number {number}",
                    "the number stands for one that was loaded before",
                    "load it in place, or with a number of its own",
                )
            if _is_asked(self, number):
                raise NotCovered(
                    f"to replace the LoRA adapter {lora_request.lora_name} while requests have it",
                    "their answers would be of both",
                    "wait for them, or load it by another name",
                )
        try:
            loaded = add(self, _identified(lora_request, digest, lora_request.load_inplace))
        except Exception:
            held.pop(number, None)
            with suppress(Exception):
                remove(self, number)
            raise
        held[number] = digest
        return loaded

    return add_lora


def _forgotten(remove: Callable[..., bool]) -> Callable[..., bool]:
    """vLLM's method that lets an adapter go; its number is free where no request has it."""

    @wraps(remove)
    def remove_lora(self: Any, lora_id: int) -> bool:
        removed = remove(self, lora_id)
        if not _is_asked(self, lora_id):
            beside(self).adapters.pop(lora_id, None)
        return removed

    return remove_lora


def _is_asked(core: Any, number: int) -> bool:
    """Whether a request that has not ended has the adapter of a number."""
    asked = (request.lora_request for request in core.scheduler.requests.values())
    return any(adapter is not None and adapter.lora_int_id == number for adapter in asked)


def _verified(load: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's method that reads an adapter's files. What it gives is memory of its own: of a mapped file it would follow
    what is written there.

    It then raises:
        RuntimeError: they are not those that the engine has seen.
    """

    @wraps(load)
    def _load_adapter(self: Any, lora_request: Any) -> Any:
        loaded = load(self, lora_request)
        for layer in loaded.loras.values():
            layer.lora_a, layer.lora_b = (
                one if one is None or one.is_pinned() else one.clone() for one in (layer.lora_a, layer.lora_b)
            )
        if getattr(lora_request, "digest", None) != digest_of(lora_request.lora_path):
            raise RuntimeError(
                f"the files of the LoRA adapter {lora_request.lora_name} changed while requests have it: answers would "
                "be of both"
            )
        return loaded

    return _load_adapter


def _by_prompts(compute: Callable[..., Any], model_of: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's method that computes logprobs of prompts, whose logits are of rows that are not sampled.

    Args:
        compute: the method; the states [tokens, K] of the step follow the arguments that ``model_of`` takes.
        model_of: gives the model, which knows what adds its adapters, of the method's first arguments.
    """
    of_states = len(signature(model_of).parameters)

    @wraps(compute)
    def by_prompts(*args: Any, **kwargs: Any) -> Any:
        with _told(model_of(*args[:of_states]), "hidden_states", args[of_states]):
            return compute(*args, **kwargs)

    return by_prompts


def _of_sampled_rows(sample: Callable[..., Any]) -> Callable[..., Any]:
    """The second model runner's method that computes logits of rows of a step, and samples of them."""

    @wraps(sample)
    def of_sampled_rows(self: Any, hidden_states: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        with _told(self.model, "sampled", input_batch.logits_indices):
            return sample(self, hidden_states, input_batch, *args, **kwargs)

    return of_sampled_rows


@contextmanager
def _told(model: Any, name: str, value: Any) -> Iterator[None]:
    """What adds a model's adapters has an attribute meanwhile."""
    manager = getattr(model, "lora_manager", None)
    wrappers = manager.punica_wrapper_mapping.values() if manager else ()
    for wrapper in wrappers:
        setattr(wrapper, name, value)
    try:
        yield
    finally:
        for wrapper in wrappers:
            setattr(wrapper, name, None)
