"""What is computed again without an engine of receipts in a Hopper's usual arithmetic, and what is refused."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from ...envs import TP_TREE
from ...ops.exact import FORMAT
from ...ops.exact.definition import Floats
from ...ops.hopper import confirmed, tables
from ...ops.hopper.confirmed import OPERATIONS
from ...provenance import OF_EXPERTS
from ..outcome import NoTestError
from .comparison import Note
from .record import Environment, Receipt

if TYPE_CHECKING:
    from ...ops.hopper.decoder import HopperDecoder

CAPABILITY = "9.0"
"""Of a Hopper."""
TREE = "tensor_parallel_tree"
_RUNNER, _SECOND = "model_runner", "second"
_SETTINGS = {
    "dtype": ("bfloat16",),
    "kv_cache_dtype": ("auto", "bfloat16"),
    "logprobs_mode": ("raw_logprobs",),
    _RUNNER: ("first", _SECOND),
    TREE: TP_TREE.values,
}
"""Of an engine, with the values that the definition is of."""
_REDUCTIONS = ("attention", "linear (output head)", "norm", "softmax (logprobs)", "top-p")
"""Of a dense model. Those but attention's follow from its sizes."""
_PRODUCTS = "products mma"
"""A field of the reduction of experts that are codes."""
_OF_A_LAYER = "linear (model."
"""Of layers in 16 bits beside those in FP8, as routers are."""


@dataclass(frozen=True)
class Hopper:
    """The arithmetic of a dense model on a GPU of compute capability 9.0, as far as it is known.

    Attributes:
        confirmed: which operations a GPU had the definition's bits of.
        tables: of its special functions; None if nobody has recorded them.
    """

    confirmed: confirmed.Confirmed
    tables: tables.Tables | None
    name = "the usual arithmetic of a Hopper"
    dtypes = ("BF16", "F8_E4M3", "F32")

    @classmethod
    def here(cls) -> "Hopper":
        """What this package knows."""
        try:
            return cls(confirmed.recorded(), tables.recorded())
        except FileNotFoundError:
            return cls(confirmed.recorded(), None)

    def check(self, receipt: Receipt) -> None:
        """Refuse what no GPU has confirmed, and what has no definition.

        Raises:
            NoTestError: with the first thing that is missing.
        """
        environment = receipt.environment
        if environment.mode is not True or environment.device.get("capability") != CAPABILITY:
            raise NoTestError(
                f"without an engine only receipts in exact arithmetic {FORMAT}, and of a Hopper with the mode on, are "
                "verified, not in another arithmetic"
            )
        if missing := self.missing():
            raise NoTestError(
                f"without an engine receipts in {self.name} are not verified: of its definition no GPU has confirmed "
                f"{', '.join(missing)}; verify with an engine, or make receipts in exact arithmetic"
            )
        _check_engine(environment, self.missing)
        _check_sampling(receipt, self.missing, self.confirmed.machine.get("vllm"))

    def missing(self, operations: tuple[str, ...] = OPERATIONS) -> tuple[str, ...]:
        """What no GPU has confirmed of some operations."""
        from ...ops.hopper import known_answers

        missing, known = self.confirmed.missing(operations), self.confirmed.definition
        if self.tables is None or self._digest_of_tables != self.confirmed.tables:
            return *missing, "the special functions"
        answers = known_answers.digests(self.tables, {*operations} - {*missing})
        changed = (name for name in operations if name in answers and answers[name] != known.get(name))
        return *missing, *(f"what has changed since in {name}" for name in changed)

    @cached_property
    def _digest_of_tables(self) -> str | None:
        return None if self.tables is None else self.tables.digest

    def notes(self, environment: Environment) -> tuple[Note, ...]:
        """On a receipt of another GPU, or of other versions, than those that were compared."""
        here = {"gpu": str(environment.device.get("name"))}
        here |= {name: environment.versions.get(name, "unknown") for name in ("torch", "triton", "cuda")}
        other = {name: self.confirmed.machine.get(name) for name, value in here.items()}
        different = [f"{name} {other[name]} and not {value}" for name, value in here.items() if other[name] != value]
        text = f"the definition was compared with {', '.join(different)}"
        return (Note(text, promised=False),) if different else ()

    def decoder(
        self, config: dict[str, Any], weights: Mapping[str, NDArray[Any]], environment: Environment
    ) -> "HopperDecoder":
        """The decoder of a checkpoint."""
        from ...ops.hopper.decoder import HopperDecoder

        if self.tables is None:
            raise NoTestError("nobody has recorded the special functions of a Hopper")
        decoder = HopperDecoder(config, dict(weights), self.tables, int(environment.engine.get(TREE, 1)))
        if missing := self.missing(decoder.operations):
            raise NoTestError(
                f"without an engine receipts of this model are not computed again: no GPU has confirmed "
                f"{', '.join(missing)}"
            )
        _check_layers(environment, decoder)
        return decoder

    def positions(
        self, decoder: "HopperDecoder", logits: Floats, part: slice, receipt: Receipt, prompt: Sequence[int]
    ) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
        """Each position's token, its logprob, and the candidates that are listed beside it with theirs."""
        import torch

        from ...ops.hopper.sampling import largest

        sampling, rows = receipt.sampling, logits[part]
        by_logits = receipt.environment.engine.get(_RUNNER) == _SECOND

        def at(position: int, row: Floats, logprobs: Floats) -> tuple[int, float, list[tuple[int, float]]]:
            token = int(row.argmax())
            if sampling.temperature > 0:
                token = decoder.draw(row, sampling, len(prompt) + position - 1)
            first = largest(row if by_logits else logprobs, sampling.logprobs)
            listed = {int(one): float(logprobs[one]) for one in (*first, token)}
            return token, listed[token], sorted(listed.items())

        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            yield from threads.map(at, count(part.start), rows, decoder.log_softmax(rows))


Missing = Callable[[tuple[str, ...]], tuple[str, ...]]
"""Gives those of some operations that no GPU has confirmed."""


def _check_engine(environment: Environment, missing_of: Missing) -> None:
    for name, value in environment.engine.items():
        if value not in _SETTINGS.get(name, ()):
            raise NoTestError(f"without an engine a receipt of an engine with {name} {value} is not computed again")
    of_codes = codes()
    defined: dict[str, Any] = {"attention": attention(), **of_codes}
    defined |= {name: experts(of) for name, of in environment.reductions.items() if name.startswith(OF_EXPERTS)}
    for name, reduction in environment.reductions.items():
        is_defined = name in (*_REDUCTIONS, *defined) or name.startswith(_OF_A_LAYER)
        if not is_defined or defined.get(name, {}) is None:
            raise NoTestError(f"without an engine a receipt of an engine with {name} is not computed again")
        if name in defined and reduction != defined[name]:
            raise NoTestError(f"the definition has {name} with {defined[name]}, and the receipt's engine {reduction}")
    has_codes = any(name in of_codes or _PRODUCTS in of for name, of in environment.reductions.items())
    has_experts = any(name.startswith(OF_EXPERTS) for name in environment.reductions)
    if has_experts and environment.engine.get(TREE, "1") != "1":
        raise NoTestError("without an engine a receipt of experts with a tree is not computed again")
    kinds = {"FP8 in blocks": (has_codes, confirmed.OF_CODES), "experts": (has_experts, confirmed.OF_EXPERTS)}
    for kind, (is_there, operations) in kinds.items():
        if is_there and (missing := missing_of(operations)):
            raise NoTestError(
                f"without an engine receipts of {kind} are not computed again: no GPU has confirmed "
                f"{', '.join(missing)}"
            )


def _check_layers(environment: Environment, decoder: "HopperDecoder") -> None:
    """Refuse a receipt whose engine had other layers than the files: what it says is what was checked."""
    from ...provenance import plain

    of_files = [] if decoder.experts is None else [plain(decoder.experts)]
    said = [of for name, of in environment.reductions.items() if name.startswith(OF_EXPERTS)]
    if said != of_files:
        raise NoTestError(f"the receipt's engine has the experts {said}, and the files {of_files}")
    has_codes = any(name in environment.reductions for name in codes())
    if has_codes != decoder.has_codes:
        kinds = {True: "layers of codes", False: "no layers of codes"}
        raise NoTestError(f"the receipt's engine has {kinds[has_codes]}, and the files {kinds[decoder.has_codes]}")


def _check_sampling(receipt: Receipt, missing_of: Missing, known_vllm: str | None) -> None:
    sampling, environment = receipt.sampling, receipt.environment
    penalties = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
    others = {
        "min_p": sampling.min_p > 0,
        "penalties": penalties != (1, 0, 0),
        "min_tokens": sampling.min_tokens > 0,
    }
    if asked := [name for name, is_asked in others.items() if is_asked]:
        raise NoTestError(f"without an engine a Hopper's completions with {' and '.join(asked)} are not computed again")
    if sampling.temperature == 0:
        return
    if environment.engine.get(_RUNNER) != _SECOND:
        raise NoTestError("without an engine the noise of vLLM's first model runner is not computed again")
    missing, vllm = missing_of(confirmed.OF_SEEDS), environment.versions.get("vllm")
    if missing or vllm != known_vllm:
        what = ", ".join(missing) or f"the noise of vLLM {vllm}"
        raise NoTestError(
            f"without an engine a Hopper's completions with a seed are not computed again: no GPU has confirmed {what}"
        )


def attention() -> dict[str, str | int]:
    """The reduction of attention as the environment of an engine has it."""
    from ...ops.attention.reduction import AttentionReduction
    from ...provenance import plain

    return {"implementation": "triton", **plain(AttentionReduction.of_device("cuda"))}


def experts(of: Mapping[str, str | int]) -> dict[str, str | int] | None:
    """The reduction of experts that has a definition, with the numbers of one of an engine's environment; None where
    these are missing.
    """
    from ...ops.hopper.decoder import of_experts
    from ...provenance import plain

    try:
        renormalise = str(of["renormalise"]) == "True"
        return plain(of_experts(int(of["num_experts"]), int(of["top_k"]), renormalise, _PRODUCTS in of))
    except (KeyError, ValueError):
        return None


def codes() -> dict[str, dict[str, str | int]]:
    """The reductions of layers in FP8 by blocks, as the environment of an engine has them."""
    import torch

    from ...ops.hopper.decoder import PRODUCTS
    from ...ops.quantise import QuantiseReduction
    from ...provenance import plain

    quantised = QuantiseReduction.of_dtype(torch.bfloat16, PRODUCTS.codes, PRODUCTS.promote)
    return {
        "quantise (FP8 by block)": plain(quantised),
        "linear (FP8 by block)": plain(PRODUCTS),
    }
