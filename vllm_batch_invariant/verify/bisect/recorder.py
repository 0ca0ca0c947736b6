"""Records the outputs of every operation for one request, inside a vLLM worker.

Operations are seen in two ways: by a mode of PyTorch's dispatcher, which gets every operator that Python calls,
including custom ones and the arguments that they write; and by hooks on modules, whose outputs show what a kernel wrote
that is launched without the dispatcher (Triton, numba, a library's own binding).
"""

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from inspect import signature
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .recording import ITEM, MODULE_OUTPUT, Key, Record, RecordedStep, Slice


@dataclass(frozen=True)
class Rows:
    """A request's rows ``start`` to ``start + count - 1`` among ``total`` of the batch."""

    start: int
    count: int
    total: int

    def parts(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """The request's part of a tensor, once for each dimension that may hold the rows of the batch, with one element
        a row or several (such as heads).
        """
        for dimension, size in enumerate(tensor.shape):
            each, rest = divmod(size, self.total)
            if each and not rest:
                yield tensor.narrow(dimension, self.start * each, self.count * each)


@dataclass(frozen=True)
class PoolerRows:
    """A request's rows in a pooler, whose tensors hold those of tokens or of requests."""

    tokens: Rows
    requests: Rows

    def parts(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """As :meth:`Rows.parts`: of tokens where a dimension has as many, else of requests."""
        for dimension, size in enumerate(tensor.shape):
            rows = self.tokens if size == self.tokens.total else self.requests
            each, rest = divmod(size, rows.total)
            if each and not rest:
                yield tensor.narrow(dimension, rows.start * each, rows.count * each)


@dataclass(frozen=True)
class Place:
    """The place of a request in the batch of a step."""

    tokens: Rows
    """Among the rows of the model's layers."""
    requests: Rows
    """Among the rows of logits."""
    position: int
    """Position of its first token in this step."""


class StepBatches:
    """The batch of each step of either of vLLM's model runners, from the moment when its inputs are prepared."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._batch = runner, None
        if hasattr(runner, "prepare_inputs"):
            prepare = runner.prepare_inputs

            def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
                self._batch = prepare(*args, **kwargs)
                return self._batch

            runner.prepare_inputs = prepare_inputs

    def place(self, request: str) -> Place | None:
        """The place of the request of that name in the current batch; None if it is not there."""
        batch = self._batch
        if batch is not None:
            # vLLM's second model runner describes each batch anew
            names, starts, computed = batch.req_ids, batch.query_start_loc_np, batch.num_computed_tokens_np
        else:
            # its first one updates one description
            batch = self._runner.input_batch
            names, starts = batch.req_ids, self._runner.query_start_loc.np
            computed = batch.num_computed_tokens_cpu
        index = _index(names, request)
        if index is None:
            return None
        start, stop, total = (int(starts[i]) for i in (index, index + 1, len(names)))
        return Place(Rows(start, stop - start, total), Rows(index, 1, len(names)), int(computed[index]))


def _index(names: Sequence[str], request: str) -> int | None:
    # vLLM adds a random suffix to names
    return next((i for i, name in enumerate(names) if name == request or name.startswith(f"{request}-")), None)


def _encoded(runner: Any, request: str) -> Iterator[tuple[int, torch.Tensor]]:
    """The items of a request, by their number, that are encoded and still kept; of either of vLLM's model runners."""
    held = getattr(runner, "encoder_cache", None)
    kept = getattr(held, "encoder_outputs", held)
    if not kept:
        return
    every = getattr(held, "mm_features", None)
    if every is None:
        every = {name: state.mm_features for name, state in runner.requests.items()}
    names = [*every]
    index = _index(names, request)
    for number, item in enumerate([] if index is None else every[names[index]]):
        if item.identifier in kept:
            yield number, kept[item.identifier]


ENCODER = "embed_multimodal"
"""Method of a model that encodes images and sounds; how paths of records of its items begin."""
BEFORE = (ENCODER, "embed_input_ids")
"""Methods of a model that encodes, which are called before its forward: rows are not those of a step there."""
SAMPLER = "sampler"
"""Path of the records of sampling, which is no part of the model."""
LORA_BASE, LORA_SHRINK, LORA_EXPAND = "lora.base", "lora.shrink", "lora.expand"
"""Records of a layer with LoRA adapters: what its base layer gives, x A^T, and both added up."""
CONVOLUTION, GATES, CORE, NORM = "convolution", "gates", "core", "norm"
"""Records of a layer that keeps states: what its convolution gives, with SiLU and norms of heads behind it, what its
decays are, what the delta rule or the state space makes of both, and the norm behind where that is no module.
"""
_INPUTS = (CONVOLUTION, CONVOLUTION, CONVOLUTION, GATES, GATES)
_UNWRITTEN = {
    f"aten.{name}"
    for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_")
}
"""Operators whose output is uninitialised."""
_BYTES = (torch.int8, torch.uint8)
"""Integer dtypes that hold quantised activations."""
_GATHERS = {"_C.shm_all_gather": (1, 2), "c10d._allgather_base_": (1, 0)}
"""Operators that write what each worker has, one after the other: the places of a worker's tensor and of all of them.
"""
_OPERATIONS = f"{__name__.partition('.')[0]}.ops."
"""Where the names of the modules begin that hold the mode's operations."""


@dataclass(frozen=True)
class Target:
    """The output to fetch whole."""

    step: int
    key: Key


@dataclass(frozen=True)
class _Effects:
    """What an operator writes, from its schema."""

    written: tuple[tuple[int, str], ...]
    """Arguments that it writes: position and name."""
    fresh: tuple[int, ...] | None
    """Results that are no views of an argument; None for all."""


class WorkerExtension:
    """Methods that vLLM adds to each worker (``--worker-extension-cls``), which are called by name.

    Every version from 0.26 to 0.33 has this way into a worker. It works in this process and in another, and pickles no
    function, which vLLM refuses by default.
    """

    model_runner: Any
    """The worker's."""

    def bisect_begin(self, request: str, reference: bool, target: list[Any] | None) -> None:
        """Record the request of that name from now on.

        Args:
            request: name of the request.
            reference: whether this is the run alone. It follows a run with concurrent requests, and records only
                outputs that have the shape of the request's part in that run.
            target: step and key of an output to fetch, instead of digests of all.
        """
        recorder = self.__dict__.get("_bisect_recorder")
        if recorder is None:
            recorder = self.__dict__["_bisect_recorder"] = Recorder(self.model_runner)
        recorder.begin(request, reference, Target(target[0], Key(*target[1])) if target else None)

    def bisect_end(self) -> dict[str, Any]:
        """Stop recording; returns the steps, the fetched output and the problem, if any, as plain data."""
        return self.__dict__["_bisect_recorder"].end()


class Recorder:
    """Hooks on one model runner that record while a request's step runs."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._batches = runner, StepBatches(runner)
        self._mode = _Mode(self)
        self._model = runner.get_model()
        self._request: str | None = None
        self._lasting = (*self._model.parameters(), *self._model.buffers(), *_tensors(runner.kv_caches))
        self._offsets: dict[tuple[Any, ...], int] = {}
        """Of the request's own among what a pooler computes for one request after another, by step and operation."""
        pooler = getattr(self._model, "pooler", None)
        self._pools = isinstance(pooler, torch.nn.Module)
        watched: set[int] = set()
        for path, module in (*self._model.named_modules(), *_poolers(pooler, "pooler")):
            if id(module) not in watched:
                watched.add(id(module))
                self._watch(path, module)
        for adds in _adds_adapters(self._model):
            self._watch_adapters(adds)
        for method in BEFORE if hasattr(self._model, ENCODER) else ():
            self._leave_out(method)
        for layers, operation, names in _between_modules(self._model):
            self._watch_operation(layers, operation, names)
        if isinstance(runner.sampler, torch.nn.Module):
            for path, module in runner.sampler.named_modules(prefix=SAMPLER):
                self._watch(path, module)
        elif not self._pools:
            self._watch_sampling(runner)

    def begin(self, request: str, reference: bool, target: Target | None) -> None:
        """See :meth:`WorkerExtension.bisect_begin`."""
        self._expected = self._shapes if reference else None
        if not reference:
            self._shapes: dict[tuple[Any, ...], set[tuple[int, ...]]] = {}
        if not reference and target is None:
            self._offsets = {}
        self._request, self._target = request, target
        if target is not None and not reference:  # where the operation ran among those of other requests
            offset = self._offsets.get((target.step, *target.key[:3]), 0)
            key = target.key._replace(occurrence=target.key.occurrence + offset)
            self._target = Target(target.step, key)
        self._steps: list[RecordedStep] = []
        self._fetched: dict[str, Any] | None = None
        self._problem = ""
        self._place: Place | None = None
        self._rows: Rows | PoolerRows | None = None
        self._whole: dict[Key, Slice] = {}
        """What a pooler gave as a whole, which is of one request if it gave one for each."""
        self._stack: list[tuple[str, int]] = []
        self._records: list[Record] = []
        self._left_out: Counter[str] = Counter()

    def end(self) -> dict[str, Any]:
        """See :meth:`WorkerExtension.bisect_end`."""
        self._close_step()
        self._request = None
        steps = [step.to_plain() for step in self._steps]
        return {"steps": steps, "fetched": self._fetched, "problem": self._problem}

    def _watch(self, path: str, module: torch.nn.Module) -> None:
        def enter(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is self._model:
                self._begin_step(kwargs.get("positions", args[1] if len(args) > 1 else None))
            self._enter(path)

        def leave(_: torch.nn.Module, __: tuple[Any, ...], output: Any) -> None:
            self._leave(path, output)
            if module is self._model and self._place is not None:
                place = self._place
                self._rows = PoolerRows(place.tokens, place.requests) if self._pools else place.requests

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave, always_call=True)

    def _leave_out(self, method: str) -> None:
        """Record nothing inside a method of the model that is called outside of its forward."""
        call = getattr(self._model, method)

        def called(*args: Any, **kwargs: Any) -> Any:
            if self._stack or self._request is None:
                return call(*args, **kwargs)
            rows, self._rows = self._rows, None
            try:
                return call(*args, **kwargs)
            finally:
                self._rows = rows

        setattr(self._model, method, called)

    def _record_items(self) -> None:
        """Record what the request's items were encoded into, each as a whole."""
        for number, made in _encoded(self._runner, self._request or ""):
            key = Key(f"{ENCODER}, item {number + 1}", 0, ITEM, 0, 0)
            dtype = str(made.dtype).removeprefix("torch.")
            if self._target is None:
                self._records.append(Record(key, dtype, (Slice(tuple(made.shape), digest(made)),)))
            elif self._target == Target(len(self._steps), key):
                parts = [[list(made.shape), bytes(_bytes(made))]]
                self._fetched = {"dtype": dtype, "parts": parts, "operands": None}

    def _watch_adapters(self, adds: Any) -> None:
        """Record the products of LoRA adapters, which are no modules: what the base layer gives, x A^T, and the sum."""
        add_products, add_rows = adds.add_products, adds.add_rows

        def products(y: torch.Tensor, x: torch.Tensor, a: Any, b: Any, slots: torch.Tensor) -> None:
            if not self._stack:
                add_products(y, x, a, b, slots)
                return
            with self._mode.paused():
                base, u = y.clone(), _shrunk(x, a, slots) if adds.in_use else None
                self._record(LORA_BASE, [y], {"x": x})
                add_products(y, x, a, b, slots)
                if u is not None:
                    self._record(LORA_SHRINK, [u], {"x": x})
                self._record(LORA_EXPAND, [y], {"base": base} | ({} if u is None else {"u": u}))

        def rows(y: torch.Tensor, u: torch.Tensor, b: torch.Tensor, slots: torch.Tensor) -> None:
            if not self._stack:
                add_rows(y, u, b, slots)
                return
            with self._mode.paused():
                base = y.clone()
                add_rows(y, u, b, slots)
                self._record(LORA_EXPAND, [y], {"base": base, "u": u})

        adds.add_products, adds.add_rows = products, rows

    def _watch_operation(self, layers: ModuleType, name: str, names: Sequence[str]) -> None:
        """Record what an operation gives that layers call under a name, each of its results by one of the names."""
        operation = getattr(layers, name)
        parameters = tuple(signature(operation).parameters)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            found = operation(*args, **kwargs)
            if self._stack:
                with self._mode.paused():
                    operands = {
                        parameter: value
                        for parameter, value in zip(parameters, args, strict=False)
                        if isinstance(value, torch.Tensor) and self._reason_against(value) is None
                    }
                    for record, output in zip(names, _tensors(found), strict=True):
                        self._record(record, [output], operands)
            return found

        setattr(layers, name, recorded)

    def _watch_sampling(self, runner: Any) -> None:
        sample = runner.sample

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self._enter(SAMPLER)
            try:
                return sample(*args, **kwargs)
            finally:
                self._leave(SAMPLER, None)

        runner.sample = recorded

    def _begin_step(self, positions: torch.Tensor | None) -> None:
        self._close_step()
        if self._request is None or self._problem:
            return
        place = self._batches.place(self._request)
        if place is None:
            return
        rows = None if positions is None else positions.shape[-1]
        if rows != place.tokens.total:
            self._problem = (
                f"the model was called with {rows} rows for {place.tokens.total} tokens, so a step of this engine is "
                "padded or split; leave out parallelism, micro-batches and speculative decoding"
            )
            return
        self._place, self._rows = place, place.tokens
        self._calls: Counter[str] = Counter()
        self._occurrences: Counter[tuple[Any, ...]] = Counter()
        self._record_items()

    def _close_step(self) -> None:
        if self._place is not None:
            tokens, requests = self._place.tokens, self._place.requests
            other_tokens = tokens.total - tokens.count
            self._tell_requests_apart(requests)
            records = tuple(self._records)
            left_out = dict(self._left_out)
            self._steps.append(
                RecordedStep(self._place.position, tokens.count, other_tokens, requests.total, left_out, records)
            )
        self._place = self._rows = None
        self._records, self._left_out, self._whole = [], Counter(), {}

    def _tell_requests_apart(self, requests: Rows) -> None:
        """Of operations of a pooler that ran for one request after another keep the request's own, as in a run alone.

        Args:
            requests: of the step.
        """
        if requests.total == 1 or self._expected is not None:
            return
        times = Counter(key[:3] for key in self._whole if not key.output)
        own, step = list[Record](), len(self._steps)
        for record in self._records:
            key, count = record.key, times[record.key[:3]]
            if not count or count % requests.total:
                own.append(record)
                continue
            each = count // requests.total
            offset = self._offsets[step, *key[:3]] = requests.start * each
            if offset <= key.occurrence < offset + each:
                mine = key._replace(occurrence=key.occurrence - offset)
                whole = self._whole[key]
                self._shapes[step, mine] = {whole.shape}
                own.append(Record(mine, record.dtype, (whole,)))
        self._records = own

    def _enter(self, path: str) -> None:
        if self._rows is None:
            return
        self._calls[path] += 1
        self._stack.append((path, self._calls[path] - 1))
        if len(self._stack) == 1:
            self._outside = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
            self._mode.__enter__()

    def _leave(self, path: str, output: Any) -> None:
        if not self._stack:
            return
        with self._mode.paused():
            rows = self._rows
            if isinstance(rows, PoolerRows) and isinstance(output, list) and len(output) == rows.requests.total:
                self._record(MODULE_OUTPUT, list(_tensors(output[rows.requests.start])), is_own=True)
            else:
                self._record(MODULE_OUTPUT, list(_tensors(output)))
        assert self._stack.pop()[0] == path
        if not self._stack:
            self._mode.__exit__(None, None, None)

    def operation(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of the dispatcher and record its outputs."""
        if _inside_an_operation():
            self._left_out["inside an operation of the mode"] += 1
            return operator(*args, **kwargs)
        name = str(operator).removesuffix(".default")
        effects = _effects(operator)
        operands = self._operands(name, effects, args, kwargs)
        # a custom operator written in Python may use vmap, which the dispatch keys of a mode exclude
        with nullcontext() if name.startswith("aten.") else torch._C._ForceDispatchKeyGuard(*self._outside):
            result = operator(*args, **kwargs)
        if name.startswith("c10d."):
            _wait(result)
        if ".".join(name.split(".")[:2]) not in _UNWRITTEN:
            results = result if isinstance(result, (tuple, list)) else (result,)
            fresh = results if effects.fresh is None else [results[i] for i in effects.fresh if i < len(results)]
            written = [args[place] if place < len(args) else kwargs.get(given) for place, given in effects.written]
            if name in _GATHERS:  # the rows of the batch are there once for each worker
                own, gathered = (args[place] for place in _GATHERS[name])
                fresh, written = (), [gathered.view(-1, *own.shape)]
            self._record(name, [*_tensors(fresh), *_tensors(written)], operands)
        return result

    def _record(
        self,
        operation: str,
        outputs: list[torch.Tensor],
        operands: list[Any] | dict[str, torch.Tensor] | None = None,
        is_own: bool = False,
    ) -> None:
        path, call = self._stack[-1]
        occurrence = self._occurrences[path, call, operation]
        self._occurrences[path, call, operation] += 1
        for number, tensor in enumerate(outputs):
            reason = self._reason_against(tensor)
            if reason is not None:
                self._left_out[reason] += 1
                continue
            key = Key(path, call, operation, occurrence, number)
            dtype = str(tensor.dtype).removeprefix("torch.")
            if self._target is None:
                parts = self._parts((len(self._steps), key), tensor, is_own)
                self._records.append(Record(key, dtype, tuple(Slice(tuple(p.shape), digest(p)) for p in parts)))
                if isinstance(self._rows, PoolerRows) and not is_own:
                    self._whole[key] = Slice(tuple(tensor.shape), digest(tensor))
            elif self._target == Target(len(self._steps), key):
                parts = self._parts((len(self._steps), key), tensor, is_own)
                if isinstance(self._rows, PoolerRows):
                    parts.append(tensor)
                whole = [[list(part.shape), bytes(_bytes(part))] for part in parts]
                if isinstance(operands, dict):
                    operands = [self._operand(name, tensor) for name, tensor in operands.items()]
                self._fetched = {"dtype": dtype, "parts": whole, "operands": operands}

    def _operands(
        self, name: str, effects: _Effects, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any] | None:
        """[name, [[shape, digest], ...]] of each operand that the target's operator reads and does not write."""
        if self._target is None or self._target.step != len(self._steps):
            return None
        path, call = self._stack[-1]
        wanted = self._target.key
        if (path, call, name, self._occurrences[path, call, name]) != wanted[:4]:
            return None
        written = {place_or_name for argument in effects.written for place_or_name in argument}
        found = []
        for place, value in (*enumerate(args), *kwargs.items()):
            for number, tensor in enumerate(_tensors(value)):
                if place in written or self._reason_against(tensor) is not None:
                    continue
                found.append(self._operand(f"{place}.{number}", tensor))
        return found

    def _operand(self, name: str, tensor: torch.Tensor) -> list[Any]:
        """[name, [[shape, digest], ...]] of what the target's operation reads; all of it where it is of one request."""
        assert self._target is not None
        is_own = (self._target.step, *self._target.key[:3]) in self._offsets
        parts = self._parts((len(self._steps), name), tensor, is_own)
        return [name, [[list(part.shape), digest(part)] for part in parts]]

    def _reason_against(self, tensor: torch.Tensor) -> str | None:
        """Why a tensor is not recorded."""
        storage = _storage(tensor)
        if storage is None:
            return "no elements of its own"
        # asked each time: a layer may let go of its weight, and an activation then lie where that was
        if any(_storage(lasting) == storage for lasting in self._lasting):
            return "weights and KV cache"
        if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype in _BYTES):
            return "integers"  # they are indices, which depend on the place in the batch
        return None

    def _parts(self, name: tuple[Any, ...], tensor: torch.Tensor, is_own: bool = False) -> list[torch.Tensor]:
        """The request's parts of a tensor, which may be its own; alone the whole tensor, if the concurrent run had a
        part of its shape.
        """
        if self._expected is None:
            assert self._rows is not None  # nothing is recorded where the request is not
            parts = [tensor] if is_own else list(self._rows.parts(tensor))
            self._shapes[name] = {tuple(part.shape) for part in parts}
            return parts
        return [tensor] if tuple(tensor.shape) in self._expected.get(name, ()) else []


class _Mode(TorchDispatchMode):
    """Hands every operator to the recorder."""

    supports_higher_order_operators = True

    # These two keep functions compiled that are compiled by themselves (FlexAttention, samplers): run eagerly, they
    # would have other bits than without recording.
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder, self._paused = recorder, False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operators inside are not recorded: they are the recorder's own, in a hook."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        return self._recorder.operation(func, args, kwargs or {})


def _poolers(pooler: Any, path: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Poolers that one of vLLM's chooses among, and their layers, which are not among the modules of a model."""
    from ...integration.layers import pooling

    for task, part in pooling.parts(pooler):
        yield from part.named_modules(prefix=f"{path}.{task}")


def _adds_adapters(model: torch.nn.Module) -> list[Any]:
    """What adds LoRA adapters to a model's layers, where it is the mode's."""
    manager = getattr(model, "lora_manager", None)
    adds = manager.punica_wrapper_mapping.values() if manager else ()
    return [one for one in adds if hasattr(one, "add_products")]


def _between_modules(model: torch.nn.Module) -> Iterator[tuple[ModuleType, str, Sequence[str]]]:
    """Operations that layers with states call between their modules: whose layers, under which name, and what each
    result is recorded as.
    """
    from ...integration.layers import delta_rule, kda, lightning, mamba2, short_conv
    from ...integration.reviews import patch_points

    for point, layers, operations in (
        (patch_points.SHORT_CONV, short_conv, {"causal_conv": (CONVOLUTION,)}),
        (patch_points.DELTA_RULE, delta_rule, {"gdn_inputs": _INPUTS, "delta_rule": (CORE,)}),
        (patch_points.MAMBA2, mamba2, {"mamba2_inputs": _INPUTS, "delta_rule": (CORE,)}),
        (patch_points.KDA, kda, {"kda_inputs": _INPUTS, "delta_rule": (CORE,), "gated_rms_norm": (NORM,)}),
        (
            *(patch_points.LIGHTNING, lightning),
            {"decayed_inputs": (*"qkv", GATES, GATES), "delta_rule": (CORE,), "gated_rms_norm": (NORM,)},
        ),
    ):
        if point.is_there() and any(isinstance(module, point.get()) for module in model.modules()):
            yield from ((layers, name, names) for name, names in operations.items())


def _shrunk(x: torch.Tensor, a: Sequence[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    """u [rows, slices * R] of the first product of LoRA adapters: what the operation adds to zeros where B is 1."""
    from ...ops.lora import LoraReduction, add_adapters

    count, _, rank, k = a[0].shape
    ones = torch.eye(rank, dtype=x.dtype, device=x.device).repeat(count, 1, 1, 1)
    u = torch.zeros(len(x), rank * len(a), dtype=x.dtype, device=x.device)
    add_adapters(u, x, a, [ones] * len(a), slots, LoraReduction.of_device(x.device.type, k, x.dtype))
    return u


def _inside_an_operation() -> bool:
    """Whether an operation of the mode runs. Its own steps are its schedule: tiles and padding follow the batch, so
    they have no counterparts in another run, and what it returns is recorded with the module that called it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_OPERATIONS):
            return True
        frame = frame.f_back
    return False


@cache
def _effects(operator: Callable[..., Any]) -> _Effects:
    schema = getattr(operator, "_schema", None)
    if schema is None:  # a higher-order operator
        return _Effects((), None)
    written = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return _Effects(written, tuple(i for i, result in enumerate(schema.returns) if result.alias_info is None))


def _wait(result: Any) -> None:
    """Wait for what PyTorch's collectives have begun: another thread writes their tensors, or another stream."""
    for one in result if isinstance(result, tuple) else (result,):
        if isinstance(one, torch.ScriptObject):
            torch.distributed.Work.unbox(one).wait()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in the output of a module or the arguments of an operator."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif hasattr(value, "tensors"):  # between the stages of a pipeline
        yield from _tensors(value.tensors)


def _storage(tensor: torch.Tensor) -> int | None:
    """Address of a plain tensor's storage; None for sparse ones and for wrappers such as vmap's."""
    try:
        return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided and not tensor.is_meta else None
    except (NotImplementedError, RuntimeError):
        return None


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).cpu().numpy().data


def digest(tensor: torch.Tensor) -> bytes:
    """SHA-256 of the elements in order, cut to 16 bytes."""
    return hashlib.sha256(_bytes(tensor)).digest()[:16]
