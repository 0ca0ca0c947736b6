"""Weights that are replaced while an engine runs: nothing made of the old ones serves afterwards.

A trainer writes into a running engine by vLLM's ``reload_weights``, by its weight transfer, or by a function of the
trainer's own that the workers are told to run: all of them calls of ``EngineCore.collective_rpc``. Keys in the prefix
cache and those of requests that run were computed with the weights before, and vLLM leaves them. Here they are let go
before the next step, if a weight differs. What a GPU computes with is read where vLLM keeps it; on a CPU matmuls have
copies, for which see :mod:`..layers.linear`.
"""

import atexit
import fcntl
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ... import envs
from ...errors import NotCovered
from .. import reviews
from ..layers import linear, quantised
from ..reviews import encoding, patch_points
from ..side_table import beside
from . import kv_connectors, refusals
from .endpoint import METHOD as ENGINE_INFO

logger = logging.getLogger("vllm.batch_invariant")

METHOD = "batch_invariant_weights"
"""Of a worker: gives layers their weights back, and tells one set of weights from another. To an engine's client the
engine answers it, with what it knows of the weights that it serves.
"""
_DISCARDS = 2
"""The level of sleep that keeps no weights."""
_SAMPLERS = ("sampler", "rejection_sampler", "prompt_logprobs_worker", "structured_outputs_worker")
"""Attributes of the second model runner, made while it loads the model."""
_OF_SAMPLERS = tuple(f"vllm.v1.worker.gpu.{name}" for name in ("sample.", "spec_decode.", "structured_outputs"))
"""Modules of what they are made of."""
_WORD = 8
_COLUMNS = 1024
"""Of the table of 64-bit words that a tensor on a GPU is summed as."""

_seen: dict[Path, str] = {}
"""What was last read of a file of :func:`_published_at`: one that is gone does not bring the weights of the start
back.
"""
_locks: list[int] = []
"""Descriptors of what this process holds until it ends, however it ends."""

_written = 0
"""How often a model of this process was told to load weights."""


@dataclass
class Watch:
    """What an engine knows of the weights that it serves."""

    fingerprint: str | None = None
    """None if it is not known."""
    written: int = field(default_factory=lambda: _written)
    """``_written`` when it was taken."""
    called: bool = False
    """Whether the workers were called since then."""
    emptied: bool = False
    """Whether vLLM has let the workers forget what was encoded since then, of which its scheduler does not know."""
    published: str | None = None
    """The digest that the servers were told; None while it is that of the start."""
    unpublished: bool = False
    """Whether that could not be written."""
    arrived: deque[dict[int, Any]] = field(default_factory=deque)
    """What steps gave outside of a step, which the next ones hand on."""


_REPLACING = ("reload_weights", "start_weight_update")
"""Calls by which vLLM replaces weights."""
_FORGETS = _REPLACING[0]
"""The one of them behind which workers have no embeddings of images: a scheduler that counts on some ends the engine.
"""


def install(device_of: Callable[[Any], Any]) -> None:
    """Have every engine of this process look for other weights after its workers were called.

    Args:
        device_of: gives the record of the device (:mod:`..devices`) that a configuration of vLLM is for.
    """
    core = patch_points.ENGINE_CORE.get()
    call = core.collective_rpc

    @wraps(call)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if method == METHOD:
            return [digest_in(_served(self))]
        if method in _REPLACING:  # before vLLM lets go of the old ones
            of_engine = self.vllm_config
            of_model, on = of_engine.model_config.architecture, of_engine.device_config.device_type
            quantised = bool(getattr(of_engine.model_config, "quantization", None))
            _refuse_beside_adapters(of_engine.lora_config is not None, of_model, on, quantised)
        if method != ENGINE_INFO:
            _before_call(self, device_of)
        _watch_of(self).emptied |= method == _FORGETS and self.vllm_config.model_config.is_multimodal_model
        return call(self, method, *args, **kwargs)

    core.collective_rpc = collective_rpc
    core.step_fn = WithKeys()
    core.reset_prefix_cache = _after_arrivals(core.reset_prefix_cache, core.step_with_batch_queue)
    for name in ("step", "step_with_batch_queue"):
        setattr(core, name, _looking(getattr(core, name)))
    if refusals.is_users_process() and (at := _published_at()):
        _take_away_what_was_left(at)
        _hold(at)


def of_workers(found: Sequence[str]) -> str:
    """The :func:`fingerprint` of an engine: that of its worker, or one of those of all, each of which has a part of the
    model; empty where the workers only gave layers their weights back.
    """
    if len(found) == 1 or not all(found):
        return found[0]
    taken = ",".join(one.partition(" ")[0] for one in found)
    return f"{taken} {sha256(' '.join(map(digest_in, found)).encode()).hexdigest()}"


def digest_in(found: str) -> str:
    """The part of a :func:`fingerprint` that follows from weights and buffers alone."""
    return found.partition(" ")[2]


def published() -> str | None:
    """The digest of the weights that the last step was computed with, in any process of the engine's or its servers;
    None if they are those that the engine was started with.

    An engine writes it before a step that is computed with other weights, and again before a step that finds it gone.
    """
    at = _published_at()
    if at is None:
        return None
    with suppress(OSError):
        _seen[at] = at.read_text() or f"unknown, of {at.name} since {at.stat().st_mtime_ns}"
    return _seen.get(at)


def _publish(watch: Watch, digest: str) -> None:
    """Tell the servers, before they get anything that was computed with these weights. A folder that cannot be written
    ends no engine.
    """
    at = _published_at()
    if at is None:
        return
    written = at.with_suffix(f".{os.getpid()}")
    try:
        written.write_text(digest)
        written.replace(at)
        watch.unpublished = False
    except OSError as error:
        if not watch.unpublished:
            logger.error(
                "%s cannot be written (%s): until it can, the fingerprint that servers of this engine tell is not that "
                "of the weights.",
                at,
                error,
            )
        watch.unpublished = True
        with suppress(OSError):
            if digest != watch.published or not at.exists():
                at.write_text("")  # what is there is no longer true; to be empty takes no space
    finally:
        with suppress(OSError):
            written.unlink(missing_ok=True)
    watch.published = digest


def _publish_again(watch: Watch) -> None:
    """Before a step: somebody may have taken the file away, as those do who clean up temporary files."""
    if watch.published is not None and (watch.unpublished or not ((at := _published_at()) and at.exists())):
        _publish(watch, watch.published)


def _hold(at: Path) -> None:
    """Take a lock beside the file for as long as this process and those that it has forked live, and take both away
    when it ends.
    """
    lock = _lock_of(at)
    with suppress(OSError):
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _locks.append(descriptor)
    for path in (at, lock):
        atexit.register(path.unlink, missing_ok=True)


def _take_away_what_was_left(at: Path) -> None:
    """Of servers that were killed: files beside ``at`` whose lock nobody holds."""
    for lock in at.parent.glob(f"{refusals.PREFIX}*{at.suffix}.lock"):
        with suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lock.with_suffix("").unlink(missing_ok=True)
                lock.unlink(missing_ok=True)
            finally:
                os.close(descriptor)


def _lock_of(at: Path) -> Path:
    return at.with_name(f"{at.name}.lock")


def _published_at() -> Path | None:
    """Beside the file of refusals, which every process finds by a variable; None where nobody has set that."""
    left_at = os.environ.get(refusals.LEFT_AT)
    return Path(f"{left_at}.weights") if left_at else None


def install_in_worker() -> None:
    """Give this process's worker the method."""
    setattr(patch_points.WORKER.get(), METHOD, fingerprint)


def watch(worker: type[Any]) -> None:
    """See when the memory of a class of workers goes."""
    wake_up, sleep = worker.wake_up, worker.sleep

    @wraps(sleep)
    def sleep_and_keep(self: Any, level: int = 1, *args: Any, **kwargs: Any) -> None:
        if level == _DISCARDS:
            beside(self).discarded = [(tensor, tensor.cpu().clone()) for tensor in _beside_weights(self)]
        sleep(self, level, *args, **kwargs)

    @wraps(wake_up)
    def wake_up_and_restore(self: Any, tags: list[str] | None = None) -> None:
        wake_up(self, tags)
        if tags is None or "weights" in tags:
            for tensor, kept in beside(self).discarded:
                tensor.copy_(kept)
            beside(self).discarded = []
            for layer in self.vllm_config.compilation_config.static_forward_context.values():
                if hasattr(getattr(layer, "impl", None), "restore_after_sleep"):
                    layer.impl.restore_after_sleep()

    worker.wake_up, worker.sleep = wake_up_and_restore, sleep_and_keep
    for name in ("sleep", "discard"):
        if hasattr(worker, name):
            setattr(worker, name, _counted(getattr(worker, name)))


def _beside_weights(worker: Any) -> Iterator[torch.Tensor]:
    """Tensors that lie among the weights without being some, whose memory goes with theirs: those of the sampler, which
    vLLM's second model runner makes while it loads the model. Level 2 of sleep discards them, such as the tokens that
    begin and end a thought, and vLLM gives back buffers of the model alone.
    """
    open_, seen = [getattr(worker.model_runner, name, None) for name in _SAMPLERS], set()
    while open_:
        value = open_.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.device == worker.device:
                yield value
        elif isinstance(value, list | tuple):
            open_ += value
        elif type(value).__module__.startswith(_OF_SAMPLERS):
            open_ += vars(value).values()


def fingerprint(worker: Any, compare: bool = True, restore: bool = True) -> str:
    """What tells the weights and buffers of a worker's model, and what is left of its KV cache, from others: how often
    its memory was taken, and a digest of the weights and buffers.

    On a CPU the digest is of all bytes. On a GPU it is of the exact sums over each side of a tensor, because those are
    made where the weights are, at the speed of memory.

    Args:
        worker: of vLLM.
        compare: whether it is wanted; if not, only the layers get their weights back.
        restore: whether layers get their weights back, so that they can be written.
    """
    if restore:
        linear.restore_weights()
    if not compare:
        return ""
    model = worker.model_runner.get_model()
    if restore:
        quantised.check_loaded(model)
    tensors = [tensor for tensor in chain(model.parameters(), model.buffers()) if not tensor.is_meta]
    digest = sha256()
    for part in _digests([tensor for tensor in tensors if tensor.is_cpu]):
        digest.update(part)
    sums = [part for tensor in tensors if not tensor.is_cpu for part in _sums(_bytes(tensor))]
    for of_part in sums:  # all are made before the first is waited for
        digest.update(of_part.cpu().numpy().data)
    return f"{beside(worker).sleeps} {digest.hexdigest()}"


def _digests(tensors: list[torch.Tensor]) -> list[bytes]:
    """sha256 of the bytes of each tensor in the memory of a CPU, as many at a time as PyTorch has threads."""

    def digest(tensor: torch.Tensor) -> bytes:
        return sha256(_bytes(linear.as_loaded(tensor)).numpy().data).digest()

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(digest, tensors))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[bytes] uint8, the tensor's own memory where that is packed and aligned."""
    packed = tensor.detach().contiguous()
    if packed.data_ptr() % _WORD:
        packed = packed.clone()
    return packed.flatten().view(torch.uint8)


def _sums(raw: torch.Tensor) -> list[torch.Tensor]:
    """Sums of the columns and of the rows of a table of 64-bit words, modulo 2**64, and the bytes that are left over.

    Words, because PyTorch would first make a copy of narrower integers in 64 bits, of four times the memory.
    """
    whole = len(raw) // (_WORD * _COLUMNS) * (_WORD * _COLUMNS)
    table = raw[:whole].view(torch.int64).view(-1, _COLUMNS)
    return [table.sum(dim=0), table.sum(dim=1), raw[whole:]]


def watch_loading(model: torch.nn.Module, is_quantised: bool = False) -> None:
    """See when a trainer in this process writes weights without a call of the workers."""
    load_weights, copied = model.load_weights, _written_by_copies(model)
    on = next((one.device.type for one in model.parameters()), "cpu")  # vLLM's reload leaves them without memory

    @wraps(load_weights)
    def watched(*args: Any, **kwargs: Any) -> Any:
        has_adapters = getattr(model, "lora_manager", None) is not None
        _refuse_beside_adapters(has_adapters, type(model).__name__, on, is_quantised)
        global _written
        _written += 1
        linear.restore_weights()
        quantised.take_back(copied)
        waiting = quantised.expect(model)
        try:
            return load_weights(*args, **kwargs)
        finally:
            quantised.take_back(waiting)

    model.load_weights = watched


def _refuse_beside_adapters(has_adapters: bool, architecture: str, device_type: str, is_quantised: bool) -> None:
    """Refuse new weights of a model with LoRA adapters where vLLM does not take them, or nobody has replaced them.

    Args:
        has_adapters: whether the model may have some.
        architecture: of the model.
        device_type: where it is.
        is_quantised: whether its weights are.

    Raises:
        NotCovered: it is such a model.
    """
    if has_adapters and architecture in reviews.ran().lora_without_updates:
        raise NotCovered(
            f"new weights of {architecture} with LoRA adapters",
            "vLLM finds no layer for them once others are around its layers",
            "load new adapters, or start another engine",
        )
    ran = reviews.ran()
    kept = ran.convolution_models, ran.delta_rule_models, ran.mamba2_models
    others = {*ran.text_of, *(name for names in kept for name in names)}
    names = {*encoding.names_of(architecture)}
    if has_adapters and is_quantised and others & names:
        raise NotCovered(
            f"new quantised weights of {architecture} with LoRA adapters",
            "beside its states or images nobody has replaced them",
            "load new adapters, serve unquantised weights, or start another engine",
        )
    others -= {*ran.lora_updates_beside.get("cpu" if envs.starts_untried() else device_type, ())}
    if has_adapters and others & names:
        raise NotCovered(
            f"new weights of {architecture} with LoRA adapters on {device_type}",
            "beside its states or images nobody has replaced them there",
            f"load new adapters, or start another engine; {envs.UNTRIED.name}=1 takes on a GPU what a CPU has taken",
        )
    of_experts = any(architecture in models for models in reviews.ran().lora_experts.values())
    elsewhere = of_experts and device_type not in reviews.ran().lora_expert_updates
    if has_adapters and elsewhere and not envs.starts_untried():
        raise NotCovered(
            f"new weights of {architecture} with LoRA adapters on {device_type}",
            "they have been replaced beneath adapters of a mixture of experts on a CPU alone",
            f"load new adapters, or start another engine; {envs.UNTRIED.name}=1 takes them",
        )


def _written_by_copies(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Layers with tensors into which a model copies by itself: sinks, and gpt-oss's experts and biases of 16 bits.

    vLLM's reload puts tensors without memory in the place of all, which have a loader that keeps what comes. A copy
    into those is lost, and what was there before would serve. So these layers have their own tensors while they are
    loaded.
    """
    if not (patch_points.RELOAD_STATE.is_there() and patch_points.PLACE_BACK.is_there()):
        return []
    of_gpt_oss = any(type(module).__name__ == "GptOssModel" for module in model.modules())
    return [
        module
        for module in model.modules()
        if "sinks" in module._parameters
        or (of_gpt_oss and isinstance(getattr(module, "quant_method", None), patch_points.EXPERTS_METHOD.get()))
    ]


def _counted(method: Callable[..., None]) -> Callable[..., None]:
    """A worker's method that takes memory away from the KV cache."""

    @wraps(method)
    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        beside(self).sleeps += 1

    return counted


def _watch_of(core: Any) -> Watch:
    kept = beside(core)
    kept.watch = kept.watch or Watch()
    return kept.watch


class WithKeys:
    """An engine's attribute with its step, which its constructor sets when it has workers, scheduler and hashes. From
    then on what it stores outside of its cache has the weights in its name. The constructor itself cannot be replaced:
    in a process of an engine's own it is what loads plugins.
    """

    def __get__(self, core: Any, owner: type | None = None) -> Any:
        return self if core is None else core.__dict__["step_fn"]

    def __set__(self, core: Any, step: Callable[..., Any]) -> None:
        is_first = "step_fn" not in core.__dict__
        core.__dict__["step_fn"] = step
        if is_first and kv_connectors.of_engine(core) is not None:
            kv_connectors.take_weights(core, digest_in(_served(core)))


def _before_call(core: Any, device_of: Callable[[Any], Any]) -> None:
    """The workers are about to run something that may read or write weights."""
    watch = _watch_of(core)
    asleep = core.model_executor.is_sleeping  # a GPU that sleeps has no weights to look at
    first = watch.fingerprint is None and not asleep
    if first or device_of(core.vllm_config).copies_weights:
        found = of_workers(core.model_executor.collective_rpc(METHOD, kwargs={"compare": first}))
        watch.fingerprint = found or watch.fingerprint
    watch.called = True


def _served(core: Any) -> str:
    """The fingerprint of the weights that the last step was computed with, taken if it is not known."""
    watch = _watch_of(core)
    if watch.fingerprint is None:
        watch.fingerprint = of_workers(core.model_executor.collective_rpc(METHOD, kwargs={"restore": False}))
    return watch.fingerprint


def _looking(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step of an engine that first lets go of what was made of other weights."""

    @wraps(step)
    def looking(self: Any) -> Any:
        watch = _watch_of(self)
        if watch.called or watch.written != _written:
            _look(self, watch)
        _publish_again(watch)
        return (watch.arrived.popleft(), True) if watch.arrived else step(self)

    return looking


def _after_arrivals(reset: Callable[..., bool], step: Callable[..., Any]) -> Callable[..., bool]:
    """An engine's method that resets the prefix cache, after what is being computed has arrived.

    Where the engine runs ahead of its workers, vLLM throws away what running requests get from the steps that are on
    their way: a seeded request has then drawn more numbers than it has tokens, and prompt logprobs that come with such
    a step end the engine.
    """

    @wraps(reset)
    def reset_prefix_cache(self: Any, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:
        if reset_running_requests and self.batch_queue:
            state = self.scheduler.pause_state
            self.scheduler.set_pause_state(patch_points.PAUSE_STATE.get().PAUSED_ALL)
            try:
                while any(scheduled.total_num_scheduled_tokens for _, scheduled, *_ in self.batch_queue):
                    outputs, _ = step(self)
                    _deliver(self, outputs or {})
            finally:
                self.scheduler.set_pause_state(state)
        return reset(self, reset_running_requests, *args, **kwargs)

    return reset_prefix_cache


def _deliver(core: Any, outputs: dict[int, Any]) -> None:
    """Hand on what a step gave: to the engine's queue, or for an engine that its caller steps as of the next step."""
    if hasattr(core, "output_queue"):
        for output in outputs.items():
            core.output_queue.put_nowait(output)
    elif outputs:
        _watch_of(core).arrived.append(outputs)


def _look(core: Any, watch: Watch) -> None:
    scheduler = core.scheduler
    paused = scheduler.pause_state == patch_points.PAUSE_STATE.get().PAUSED_ALL
    if paused or core.model_executor.is_sleeping or not scheduler.has_requests():
        return  # nothing is served now
    found = of_workers(core.model_executor.collective_rpc(METHOD))
    is_replaced, running = found != watch.fingerprint, len(scheduler.running)
    if is_replaced or watch.emptied:
        has_stored = kv_connectors.of_engine(core) is not None
        core.reset_prefix_cache(reset_running_requests=True, **({"reset_connector": True} if has_stored else {}))
        if core.vllm_config.model_config.is_multimodal_model:
            core.reset_encoder_cache()  # embeddings of images and sounds are found by those alone
    if is_replaced:
        kv_connectors.take_weights(core, digest_in(found))
        logger.info(
            "The weights were replaced: the prefix cache is empty, and %d running requests are computed again.", running
        )
        _publish(watch, digest_in(found))
    watch.fingerprint, watch.written, watch.called, watch.emptied = found, _written, False, False
