"""An engine in this process (``vllm.LLM``): its start, why it does not start, and a load without a server."""

import json
import os
import re
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any, NoReturn

from ..answers import Answer, RequestSpec, answer_of
from ..outcome import NoTestError
from ..printing import one_line, shortened
from . import adapters, images, pooling
from .drive import add_request, completions_of, drive
from .load import Arrival, Kind, Run
from .metrics import BatchLog, Reading
from .requests import varied

_ERROR = re.compile(r"(?:^|[\])] )(\S+: error|[\w.]*(?:Error|Exception|NotCovered|BadSetting)): (.+)$", re.MULTILINE)
"""The last line of a traceback or of a usage message, behind the prefix of a line of vLLM's log."""
_SPACE = "VLLM_CPU_KVCACHE_SPACE"
_SIZES_OF_A_CACHE = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
"""Arguments of ``vllm serve`` that choose the size of the KV cache."""
_BEHIND_PADDING = ("roberta", "xlm-roberta", "camembert")
"""Types of models whose first position has the number behind that of the padding token."""
_FOLLOWS = (" initialization failed", "check the stack trace above")
"""A process of vLLM logs these about another process, which has logged the reason itself."""
_OF_CODE = ("TypeError", "AttributeError", "KeyError", "IndexError", "NameError", "AssertionError")
"""Errors that say something only together with the place in the code."""
_PLACE = re.compile(r'File "(?:.*/site-packages/)?(.+?)", line (\d+), in (\S+)$', re.MULTILINE)


def reason_in(log: Path) -> str:
    """The last error in a log that is not the consequence of another, after a colon; empty if there is none."""
    text = log.read_text(errors="replace")
    found = [error for error in _ERROR.finditer(text) if not _follows(error[2])]
    if not found:
        return ""
    kind, why = found[-1].groups()
    places = _PLACE.findall(text, 0, found[-1].start()) if kind in _OF_CODE else []
    where = " ({} in {}, line {}, in {})".format(kind, *places[-1]) if places else ""
    return f": {shortened(why + where)}"


def _follows(error: str) -> bool:
    return any(words in error for words in _FOLLOWS)


def root_cause(error: str, log: Path) -> str:
    """The error of an engine; if it only says that another process failed, the error of that process."""
    return f"the engine did not start{reason_in(log)}" if _follows(error) else error


def kv_cache_space(model: str, arguments: Sequence[str]) -> dict[str, str]:
    """``VLLM_CPU_KVCACHE_SPACE`` in GiB, for an engine that a command starts where nobody chose a size: enough for one
    request of the whole context. vLLM would take nearly all memory of the machine, and not start where some is in use.
    Only a CPU's vLLM reads it.
    """
    chosen = any(argument.partition("=")[0] in _SIZES_OF_A_CACHE for argument in arguments)
    if chosen or _SPACE in os.environ:
        return {}
    try:
        config = text_config(model)
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        wide = "float32" in (config.get("torch_dtype"), config.get("dtype")) or "float32" in " ".join(arguments)
        needed = (
            2 * (4 if wide else 2) * config["num_hidden_layers"] * heads * size * (context_of(model, arguments) or 0)
        )
    except (KeyError, TypeError, ZeroDivisionError):
        return {_SPACE: "4"}  # a name on a hub: as much as vLLM gave before
    return {_SPACE: str(1 + needed // (1 << 30))}


def context_of(model: str, arguments: Sequence[str]) -> int | None:
    """The longest request that a model accepts, from the arguments of ``vllm serve`` or its folder; None if neither has
    it.
    """
    for place, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == "--max-model-len":
            value = value or "".join(arguments[place + 1 : place + 2])
            return int(value) if value.isdigit() else None
    config = text_config(model)
    length = config.get("max_position_embeddings")
    if isinstance(length, int) and config.get("model_type") in _BEHIND_PADDING:
        length -= config.get("pad_token_id", 1) + 1
    return length if isinstance(length, int) else None


def argument_of(arguments: Sequence[str], *names: str) -> str:
    """The value of an argument of ``vllm serve``, the last one given by any of its names; empty if there is none."""
    found = ""
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names:
            found = value if equals else "".join(arguments[place + 1 : place + 2])
    return found


def text_config(model: str) -> dict[str, Any]:
    """The part of the configuration that describes the language model."""
    config = model_config(model)
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def model_config(model: str) -> dict[str, Any]:
    """The configuration in a model's folder; empty if there is none. ModelOpt's of a file of its own is that of its
    quantised weights.
    """
    folder = Path(model).expanduser()
    config, beside = (_read(folder / name) for name in ("config.json", "hf_quant_config.json"))
    if config and "quantization_config" not in config and isinstance(beside.get("quantization"), dict):
        config["quantization_config"] = {"quant_method": "modelopt"} | beside["quantization"]
    return config


def _read(file: Path) -> dict[str, Any]:
    """An object in a file; empty if there is none."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def pages_of_states(config: Mapping[str, Any]) -> int:
    """The most pages that the states of a request take beside its keys, by the configuration of its language model: two
    for each group of layers, which vLLM makes as large as that of the rarer kind.
    """
    kinds = config.get("layer_types") or config.get("layers_block_type") or config.get("hybrid_override_pattern") or ()
    if every := config.get("layer_group_size"):  # the last of each group has attention
        kinds = [
            "full_attention" if layer % every == 0 else "mamba" for layer in range(1, config["num_hidden_layers"] + 1)
        ]
    if config.get("model_type") == "falcon_h1":  # each layer is of both kinds
        kinds = ["mamba", "attention"]
    kinds = [kind for kind in kinds if kind not in ("mlp", "moe", "-", "E")]
    with_states = sum(kind in ("conv", "linear_attention", "mamba", "M") for kind in kinds)
    return 2 * -(-with_states // (min(with_states, len(kinds) - with_states) or 1))


def pages_of_windows(config: Mapping[str, Any], page: int, chunk: int) -> int:
    """Pages that the layers with a sliding window, or that see a token's own chunk alone, of one request take beside
    those of full attention, by the configuration of its language model, in groups of as many layers as the rarer kind
    has.

    Args:
        page: tokens in a page.
        chunk: most tokens in a step.
    """
    kinds = list(config.get("layer_types") or ())
    kinds = kinds[: len(kinds) - (config.get("num_kv_shared_layers") or 0)]  # these read the pages of others
    sliding, chunked, full = (kinds.count(f"{kind}_attention") for kind in ("sliding", "chunked", "full"))
    some, seen = sliding + chunked, config.get("sliding_window") or config.get("attention_chunk_size") or 0
    groups = -(-some // (min(some, full) or 1)) if full else 0
    return groups * (-(-(seen + chunk) // page) + 1)


def engine_arguments(model: str, arguments: Sequence[str]) -> Any:
    """vLLM's ``EngineArgs`` of arguments of ``vllm serve``.

    Raises:
        NoTestError: vLLM is missing or refuses an argument.
    """
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise NoTestError(f"an engine needs vLLM in this Python: {one_line(error)}") from error

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise NoTestError(f"--serve-args: {message}")

    return EngineArgs.from_cli_args(
        EngineArgs.add_cli_args(Parser(add_help=False)).parse_args(["--model", model, *arguments])
    )


def start_engine(model: str, arguments: Sequence[str]) -> Any:
    """A ``vllm.LLM`` that keeps statistics, made of the engine arguments of ``vllm serve``.

    Raises:
        NoTestError: vLLM is missing, refuses an argument, or does not start.
    """
    try:
        chosen = engine_arguments(model, arguments)
        chosen.disable_log_stats = False
        return import_module("vllm").LLM.from_engine_args(chosen)
    except NoTestError:
        raise
    except Exception as error:  # a truncated file or a model's own code may raise anything
        raise NoTestError(f"the engine did not start: {one_line(error)}") from error


def start_quiet_engine(model: str, arguments: Sequence[str]) -> Any:
    """:func:`start_engine` that prints nothing while the engine starts; later vLLM logs errors only. The log goes to a
    file, which stays only if the engine does not start.

    Raises:
        NoTestError: as :func:`start_engine`, with the root cause from the log and the path of the log.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update(kv_cache_space(model, arguments))
    handle, name = tempfile.mkstemp(prefix="vllm-engine-", suffix=".log")
    log = Path(name)
    try:
        with os.fdopen(handle, "wb") as file, _printed_to(file.fileno()):
            llm = start_engine(model, arguments)
    except NoTestError as error:
        raise NoTestError(f"{root_cause(str(error), log)} (the engine's log is {log})") from error
    except BaseException:
        log.unlink()
        raise
    log.unlink()
    return llm


@contextmanager
def _printed_to(file: int) -> Iterator[None]:
    """Redirect stdout and stderr of this process and of its children to a file descriptor."""
    streams = sys.stdout, sys.stderr
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        for stream, descriptor in zip(streams, (1, 2), strict=True):
            stream.flush()
            os.dup2(file, descriptor)
        yield
    finally:
        for stream, descriptor, before in zip(streams, (1, 2), kept, strict=True):
            stream.flush()
            os.dup2(before, descriptor)
            os.close(before)


def request_params(params: Mapping[str, Any]) -> Any:
    """vLLM's ``SamplingParams`` from plain data, or its ``PoolingParams`` if a pooling ``task`` is among them."""
    if "task" not in params:
        return sampling_params(params)
    from vllm import PoolingParams

    return PoolingParams(**params)


def lora_request_of(folder: str, number: int = 1) -> Any:
    """vLLM's request of an adapter in a folder, by a number that no other of the engine has."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(Path(folder).resolve().name, number, str(Path(folder).resolve()))


def adapter_request(llm: Any, number: int) -> Any:
    """vLLM's request for an adapter of :data:`.adapters.DRAWN`, or of :data:`.adapters.LINEAR`, counted from 1, of an
    engine in this process.
    """
    from vllm.lora.request import LoRARequest

    model = llm.llm_engine.model_config
    if model.architecture not in adapters.MODELS:
        return LoRARequest(f"adapter {number}", number, adapters.folder_for(model.hf_config, number))
    config = model.hf_text_config.to_dict()
    rank, targets = adapters.DRAWN[number - 1]
    folder = adapters.folder_of(json.dumps(config, sort_keys=True, default=str), rank, number, targets)
    return LoRARequest(f"adapter {number}", number, folder)


def sampling_params(params: Mapping[str, Any]) -> Any:
    """vLLM's ``SamplingParams`` from plain data."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    made = dict(params)
    if "repetition_detection" in made:
        from vllm.sampling_params import RepetitionDetectionParams  # of some versions

        made["repetition_detection"] = RepetitionDetectionParams(**made["repetition_detection"])
    if "logit_bias" in made:  # JSON has no whole numbers for keys
        made["logit_bias"] = {int(token): bias for token, bias in made["logit_bias"].items()}
    if "structured_outputs" in made:
        made["structured_outputs"] = StructuredOutputsParams(**made["structured_outputs"])
    if "output_kind" in made:
        made["output_kind"] = RequestOutputKind[made["output_kind"]]
    return SamplingParams(**made)


def run_offline(
    llm: Any,
    spec: RequestSpec,
    plan: Sequence[Arrival],
    log: BatchLog,
    on_sample: Callable[[Answer], object] = lambda _: None,
) -> Run:
    """Run the arrivals of a plan through the engine. Engine steps are the clock, so pauses are left out."""
    return _OfflineLoad(llm, spec, log, on_sample).run(plan)


class _OfflineLoad:
    def __init__(self, llm: Any, spec: RequestSpec, log: BatchLog, on_sample: Callable[[Answer], object]) -> None:
        self._llm, self._engine, self._spec, self._log, self._on_sample = llm, llm.llm_engine, spec, log, on_sample
        self._items = images.read_all(llm, spec.items)
        self._answers: list[Answer] = []
        self._waiting = deque[Arrival]()
        self._in_flight: dict[str, Arrival] = {}
        self._ids = iter(range(10**9))
        self._sent: list[dict[str, Any]] = []
        """Parameters of concurrent requests that pool."""
        self._leaving: list[str] = []
        """Requests that pool, which are aborted before the next step."""
        self._others = self._aborted = self._failed = 0
        self._failure = ""
        adapters = [{"lora_request": lora_request_of(one, number)} for number, one in enumerate(spec.adapters, 1)]
        self._adapter: dict[str, Any] = adapters[0] if adapters else {}
        self._in_turn: Iterator[dict[str, Any]] = cycle([{}, *adapters])

    def run(self, plan: Sequence[Arrival]) -> Run:
        begin = time.perf_counter()
        self._read_metrics(0)
        self._waiting += [Arrival(Kind.SAMPLE, 1, 0.0, streamed=False), *plan]
        for outputs in drive(self._engine, self._arrive):
            self._read(outputs)
        self._read_metrics(0)
        others = (arrival.params for arrival in plan if arrival.kind is not Kind.SAMPLE)
        asked = pooling.varied(self._sent) if self._spec.pools else varied(others)
        took = time.perf_counter() - begin
        return Run(tuple(self._answers), took, self._others, self._aborted, self._failed, self._failure, asked)

    def _arrive(self) -> bool:
        while self._leaving:
            name = self._leaving.pop()
            if self._in_flight.pop(name, None):
                self._engine.abort_request([name])
                self._aborted += 1
        while self._waiting and len(self._in_flight) < (self._waiting[0].concurrency if self._answers else 1):
            self._add(self._waiting.popleft())
        return bool(self._waiting)

    def _add(self, arrival: Arrival) -> None:
        name = f"reproduce-{next(self._ids)}"
        spec = self._spec
        if arrival.kind is Kind.SAMPLE:
            params, more = self._target()
            more |= self._adapter
            self._engine.add_request(name, self._prompt(spec.prompt, self._items), params, **more)
        else:
            self._others += 1
            try:
                params, more = self._params(arrival.params)
                more |= next(self._in_turn)
                for number, prompt in enumerate(arrival.beside):
                    add_request(self._engine, f"{name}-{number}", prompt, params, **more)
                items = self._items if arrival.same else arrival.items
                add_request(self._engine, name, self._prompt(arrival.prompt, items), params, **more)
                if spec.pools and arrival.kind is Kind.ABORTED and self._in_flight:
                    self._leaving.append(name)
            except Exception as error:  # vLLM refuses a request by any exception
                self._failed += 1
                self._failure = self._failure or one_line(error)
                return
        self._in_flight[name] = arrival

    def _target(self) -> tuple[Any, dict[str, Any]]:
        """vLLM's parameters of the target request, and what else the engine is told of it."""
        spec = self._spec
        if spec.pools:
            asked = {pooling.DIMENSIONS: spec.dimensions, pooling.ACTIVATION: spec.activation}
            return self._pooled(asked | {pooling.TRUNCATED: spec.truncate})
        params = {"temperature": spec.temperature, "seed": spec.seed, "max_tokens": spec.max_tokens}
        params |= {"logprobs": spec.logprobs, "ignore_eos": spec.ignore_eos}
        return sampling_params(params), {}

    def _params(self, params: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The same of a concurrent request."""
        if not self._spec.pools:
            return sampling_params(params), {}
        made, more = self._pooled(params)
        sent = {name: getattr(made, name) for name in (pooling.DIMENSIONS, pooling.ACTIVATION)}
        sent |= more.get("tokenization_kwargs", {})
        self._sent.append({name: value for name, value in sent.items() if value is not None})
        return made, more

    def _pooled(self, params: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The same of a request that pools."""
        model = self._llm.llm_engine.model_config
        asked = {name: params.get(name) for name in (pooling.DIMENSIONS, pooling.ACTIVATION)}
        if isinstance(asked[pooling.DIMENSIONS], float):  # a part of an embedding
            some = max(1, round(asked[pooling.DIMENSIONS] * model.embedding_size))
            asked[pooling.DIMENSIONS] = some if model.is_matryoshka else None
        made = request_params(asked | {"task": pooling.TASKS[self._spec.task].engine})
        most = params.get(pooling.TRUNCATED)
        return made, {"tokenization_kwargs": {pooling.TRUNCATED: most}} if most else {}

    def _prompt(self, text: str, items: Sequence[Mapping[str, Any]] = ()) -> Any:
        """A prompt behind items."""
        if items:
            return images.chat_prompt(self._llm, text, items)
        if not self._spec.chat:
            return text
        messages = [{"role": "user", "content": text}]
        return self._llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _read(self, outputs: Sequence[Any]) -> None:
        if outputs:
            self._read_metrics(len(outputs))
        for output in outputs:
            name = output.request_id
            arrival = self._in_flight.get(name)
            if arrival is None:  # it was aborted
                continue
            if output.finished:
                del self._in_flight[name]
                if arrival.kind is Kind.SAMPLE:
                    self._answers.append(answer_of(completions_of(output)[0]))
                    self._on_sample(self._answers[-1])
            elif arrival.kind is Kind.ABORTED and len(output.outputs[0].token_ids) >= arrival.abort_after:
                del self._in_flight[name]
                self._engine.abort_request([name])
                self._aborted += 1

    def _read_metrics(self, together: int) -> None:
        """Note the batch: as the engine counts it, or as many requests as got a token together."""
        from prometheus_client import REGISTRY

        counted = getattr(self._engine, "log_stats", True) and not self._spec.pools
        reading = Reading.of(REGISTRY.collect()) if counted else Reading(together, {})
        if reading is not None:
            self._log.add(reading)
