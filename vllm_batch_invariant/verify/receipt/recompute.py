"""A receipt computed again without an engine: by the definition of its arithmetic, from the model's files."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import NotCovered
from ...ops.exact import FORMAT, definition
from ...ops.exact.decoder import Decoder
from ...ops.exact.definition import Floats
from ..outcome import NoTestError
from ..printing import one_line
from . import items
from .comparison import Difference, Note, Verdict, extent, first_difference_of, notes_on
from .hopper import Hopper
from .model_files import local_folder, model_at
from .record import Completion, EngineInfo, Environment, Receipt, TracedStep

_STORED = {"BF16": "<u2", "F8_E4M3": "u1", "F32": "<f4"}
"""What weights are read as, by the names of safetensors."""
LOWEST_TEMPERATURE = 0.01
"""vLLM takes this for one above 0 and below (``SamplingParams.__post_init__``)."""
_OF_FILES = {"dtype", "kv_cache_dtype", "logprobs_mode", "max_model_len", "model_runner"}
"""Settings of an engine in exact arithmetic whose model is that of the files."""
_ROWS = 64
"""Of logits whose logprobs are held at a time."""


def recompute(
    receipt: Receipt,
    model: str,
    *,
    prompt_token_ids: Sequence[int] | None = None,
    before: Callable[[tuple[Note, ...]], None] = lambda _: None,
    hopper: Hopper | None = None,
) -> Verdict:
    """Compute a receipt's completion again, as one prefill of its prompt and completion, and compare it bit for bit.

    What ended the completion is taken from the receipt, but for a stop token of the request; the verdict says so.

    Args:
        model: a folder with the checkpoint, or a name in the cache of Hugging Face's hub.
        prompt_token_ids: the prompt of a private receipt.
        before: is called first, with the differences between this model and the receipt's.
        hopper: what is known of a Hopper's usual arithmetic; what this package knows if None.

    Raises:
        NoTestError: the receipt is neither of exact arithmetic in this format nor of a Hopper's usual arithmetic that
            a GPU has confirmed, its request has what is not computed here, the prompt or the model's files are missing,
            or these do not fit together or to the receipt.
        NotCovered: a model without a definition.
    """
    if receipt.adapter is not None:
        raise NoTestError("the completion has a LoRA adapter, which the definition has not")
    items.refuse(receipt, "the definition is of models that take tokens; start an engine here")
    prompt = receipt.prompt.ids(prompt_token_ids)
    arithmetic = _arithmetic_of(receipt, hopper)
    arithmetic.check(receipt)
    folder = local_folder(model)
    if folder is None:
        raise NoTestError(f"the files of {model} are not on this machine, and without an engine they are needed")
    here = EngineInfo(model_at(folder, model), receipt.environment)
    notes = notes_on(receipt.info, here, ("the receipt", "the definition")) + arithmetic.notes(receipt.environment)
    before(notes)
    sampling, ids = receipt.sampling, receipt.completion.token_ids
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        receipt = replace(receipt, sampling=replace(sampling, temperature=LOWEST_TEMPERATURE))
    given = [*prompt, *ids[:-1]]
    trace = _Trace(receipt.trace, len(given))
    count, reason = _end(receipt)
    try:
        config = config_of(folder)
        if (head := config.get("head_dtype")) not in (None, "model", config.get("dtype", config.get("torch_dtype"))):
            raise NoTestError(f"without an engine an output head in {head} is not computed again")
        decoder: Any = arithmetic.decoder(config, weights_of(folder, arithmetic.dtypes), receipt.environment)
        _check_tokens([*prompt, *ids], decoder.vocabulary)
        logits = decoder.logits(given, slice(len(prompt) - 1, None), trace.compare)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:  # of a made-up config.json
        raise NoTestError(f"the files of {model} do not fit together: {one_line(error)}") from error
    parts = (slice(start, min(start + _ROWS, count)) for start in range(0, count, _ROWS))
    got = Completion.of(
        chain.from_iterable(arithmetic.positions(decoder, logits, part, receipt, prompt) for part in parts),
        reason or receipt.completion.finish_reason,
    )
    compared = f"{extent(receipt)}, computed again by the definition of {arithmetic.name}"
    if reason is None:
        compared += f"; that it ended there ({receipt.completion.finish_reason}) is what the receipt says"
    if trace.compared:
        compared += f"; {trace.compared} outputs of layers"
    difference = first_difference_of(receipt.completion, got)
    if first := trace.first:
        text = difference.text if difference else "all tokens and logprobs are the same"
        difference = Difference(difference.position if difference else len(ids), f"{text}; {first}")
    return Verdict(notes, difference, compared)


def _end(receipt: Receipt) -> tuple[int, str | None]:
    """How many of its tokens the completion has by its request, and why it ends there; None if only the receipt says
    so: a tokenizer knows the end of a text and stop strings, and the engine how long a request may be.
    """
    sampling, completion = receipt.sampling, receipt.completion
    for count, token in enumerate(completion.token_ids, 1):
        if token in sampling.stop_token_ids:
            return count, "stop"
    is_full = len(completion.token_ids) == sampling.max_tokens
    return len(completion.token_ids), "length" if is_full and completion.finish_reason != "stop" else None


def _check_tokens(ids: Sequence[int], vocabulary: int) -> None:
    if (largest := max(ids)) >= vocabulary:
        raise NoTestError(f"the receipt has the token {largest}, and the model a vocabulary of {vocabulary}")


class _Trace:
    """The layers of a traced receipt beside those of the definition.

    Args:
        steps: of the receipt.
        rows: positions that are computed.

    Raises:
        NoTestError: a step has others.
    """

    def __init__(self, steps: tuple[TracedStep, ...], rows: int) -> None:
        if any(step.position + step.rows > rows for step in steps):
            raise NoTestError(f"the receipt's trace has other positions than the {rows} of its prompt and completion")
        self._steps = steps
        self._first: list[str | None] = [None] * len(steps)
        self.compared = 0

    def compare(self, layer: str, made: Floats) -> None:
        """Compare what a layer makes of each step's rows; layers come in the order in which they compute."""
        for number, step in enumerate(self._steps):
            known = step.digests.get(layer)
            if known is None:
                continue
            self.compared += 1
            rows = made[step.position : step.position + step.rows]
            if self._first[number] is None and _digest(rows) != known:
                self._first[number] = layer

    @property
    def first(self) -> str:
        """The first operation that differs, in words; empty if none does."""
        for step, layer in zip(self._steps, self._first, strict=True):
            if layer is not None:
                last = step.position + step.rows - 1
                where = f"position {last}" if step.rows == 1 else f"positions {step.position} to {last}"
                return f"the first operation that differs is {layer} at {where}"
        return ""


def _digest(made: Floats) -> str:
    return hashlib.sha256(definition.to_bits(made).astype("<u2").tobytes()).hexdigest()[:16]


def _arithmetic_of(receipt: Receipt, hopper: Hopper | None) -> "_Exact | Hopper":
    environment = receipt.environment
    is_usual_of_a_gpu = environment.exact_format is None and environment.device.get("type") == "cuda"
    return (hopper or Hopper.here()) if is_usual_of_a_gpu else _Exact()


class _Exact:
    """Exact arithmetic, in the format that is defined here."""

    name = f"exact arithmetic {FORMAT}"
    dtypes = ("BF16",)

    def check(self, receipt: Receipt) -> None:
        """Refuse what has no definition."""
        environment = receipt.environment
        if environment.exact_format != FORMAT:
            found = environment.exact_format or "another arithmetic"
            raise NoTestError(
                f"without an engine only receipts in exact arithmetic {FORMAT} are verified, not in {found}"
            )
        mode = environment.engine.get("logprobs_mode", "raw_logprobs")
        if mode != "raw_logprobs":
            raise NoTestError(f"without an engine only raw logprobs are computed, and the receipt has {mode}")
        if others := environment.engine.keys() - _OF_FILES:
            other = f"{min(others)} {environment.engine[min(others)]}"
            raise NoTestError(f"without an engine a receipt of an engine with {other} is not computed again")
        if receipt.sampling.min_tokens:
            raise NoTestError(
                "without an engine min_tokens is not known: which tokens end a text follows the tokenizer"
            )

    def notes(self, _: Environment) -> tuple[Note, ...]:
        return ()

    def decoder(self, config: dict[str, Any], weights: Mapping[str, NDArray[np.uint16]], _: Environment) -> Decoder:
        return Decoder(config, dict(weights))

    def positions(
        self, _: Decoder, logits: Floats, part: slice, receipt: Receipt, prompt: Sequence[int]
    ) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
        """Each position's token, its logprob, and the candidates that are listed beside it with theirs."""
        rows, ids, sampling = logits[part], receipt.completion.token_ids, receipt.sampling
        vocabulary, generated = rows.shape[-1], ids[: part.start]
        in_prompt, counts = np.zeros(vocabulary, bool), np.bincount(np.array(generated, np.int64), minlength=vocabulary)
        in_prompt[list(prompt)] = True
        penalties = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
        for position, (row, logprobs) in enumerate(zip(rows, definition.log_softmax(rows), strict=True), part.start):
            if penalties != (1, 0, 0):
                row = definition.penalised(row, in_prompt, counts, *penalties)
            token = definition.draw(
                row, sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed or 0, position, sampling.min_p
            )
            first = np.argsort(-logprobs, kind="stable")[: sampling.logprobs]
            listed = {int(one): float(logprobs[one]) for one in (*first, token)}
            yield token, listed[token], sorted(listed.items())
            counts[ids[position]] += 1


def decoder_of(folder: Path) -> Decoder:
    """The decoder of a checkpoint's files in exact arithmetic: config.json, and weights in safetensors.

    Raises:
        NotCovered: a model or a file without a definition.
        NoTestError: a file is not whole.
    """
    return Decoder(config_of(folder), weights_of(folder))


def config_of(folder: Path) -> dict[str, Any]:
    """The configuration of a checkpoint.

    Raises:
        NoTestError: it has none that can be read.
    """
    try:
        return dict(json.loads((folder / "config.json").read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise NoTestError(f"the model's config.json cannot be read: {one_line(error)}") from error


def weights_of(folder: Path, dtypes: Sequence[str] = ("BF16",)) -> dict[str, NDArray[Any]]:
    """The bits of every weight of a checkpoint by name, uint16 of bf16 and uint8 of e4m3, or fp32, which stay in their
    files until they are read: a model may be larger than memory.

    Args:
        dtypes: of :data:`_STORED`, those that have a definition.

    Raises:
        NotCovered: there is none in safetensors, or one in another dtype.
        NoTestError: a file is not whole.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise NotCovered("a checkpoint without safetensors", "its weights are read from these alone", "convert it")
    return dict(chain.from_iterable(_weights_of(file, dtypes) for file in files))


def _weights_of(file: Path, dtypes: Sequence[str]) -> Iterator[tuple[str, NDArray[Any]]]:
    """The names and bits of one file: eight bytes, the length of the JSON that follows; then the weights, where it says
    (https://huggingface.co/docs/safetensors).
    """
    try:
        content = np.memmap(file, np.uint8, "r")
        start = 8 + int.from_bytes(content[:8].tobytes(), "little")
        for name, tensor in json.loads(content[8:start].tobytes()).items():
            if name == "__metadata__":
                continue
            if tensor["dtype"] not in dtypes:
                raise NotCovered(
                    f"the weight {name} in {tensor['dtype']}",
                    f"this arithmetic is defined for {' and '.join(dtypes)}",
                    "verify with an engine",
                )
            stored = _STORED[tensor["dtype"]]
            yield name, np.ndarray(tensor["shape"], stored, content, start + tensor["data_offsets"][0])
    except (ValueError, TypeError, KeyError) as error:  # empty, no JSON, or too short
        raise NoTestError(f"{file.name} is no whole file of safetensors") from error
