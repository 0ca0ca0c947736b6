"""The receipt: a request, its completion bit for bit, and everything that these bits depend on, closed by a sha256.

The hash finds damage and careless edits. It is no signature: whoever changes a receipt can hash it again, and only a
recomputation finds that. To prove who made a receipt, sign its sha256 with a key of your own.
"""

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from ...provenance import OF_ADAPTERS, Environment
from ..outcome import NoTestError

FORMAT = "vllm-batch-invariant receipt"
VERSION = 1
"""Of the format: a reader refuses any other."""
UNNAMED = "nobody named the folder of the server's files"
"""Why most models of servers have no digest: --model-files names the folder."""
LOWEST_LOGPROB = -9999.0
"""vLLM's server sends this for anything below, -inf included, because JSON has no infinity."""

_NO_SEED = -1
"""vLLM takes this for none."""

Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Bits = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8}$")]
Token = Annotated[int, Field(ge=0)]
Part = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
_CONFIG = ConfigDict(extra="forbid", strict=True)
_Found = TypeVar("_Found")


class BadReceipt(NoTestError):
    """A file or value that is no receipt, or an inconsistent one; the text is one line."""


def canonical(data: Any) -> bytes:
    """JSON with sorted keys and without whitespace, in ASCII: one spelling for one value.

    Raises:
        ValueError: NaN or an infinity, which JSON does not have.
    """
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sha256_of(data: Any) -> str:
    """sha256 of the canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical(data)).hexdigest()


def bits_of_value(value: float, what: str = "value") -> str:
    """The bits of an fp32 number as 8 hexadecimal digits.

    Raises:
        NoTestError: fp32 does not have the number, so it was rounded on the way.
    """
    try:
        packed = struct.pack(">f", value)
    except OverflowError:
        packed = b""
    if not packed or (not math.isnan(value) and struct.unpack(">f", packed)[0] != value):
        raise NoTestError(f"the {what} {value!r} is no fp32 number: it was rounded on the way, and bits are lost")
    return packed.hex()


def bits_of(logprob: float) -> str:
    """The same of a logprob, clamped as vLLM's server clamps."""
    return bits_of_value(max(logprob, LOWEST_LOGPROB), "logprob")


def number_of(bits: str) -> float:
    """The number that :func:`bits_of` was given."""
    return struct.unpack(">f", bytes.fromhex(bits))[0]


@dataclass(frozen=True)
class Model:
    """A model: its name, and the sha256 of every file that decides what it computes."""

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    name: str
    files: dict[str, Hash] = field(default_factory=dict)
    """By file name; empty where the files could not be read."""
    digest: Hash | None = None
    """sha256 of the canonical JSON of ``files``."""
    why_no_digest: str = ""

    def __post_init__(self) -> None:
        if (self.digest is None) == (not self.why_no_digest) or self.digest != (
            sha256_of(self.files) if self.files else None
        ):
            raise BadReceipt("the model's digest is not that of its files")


@dataclass(frozen=True)
class Adapter:
    """The LoRA adapter of a request: its name, and one sha256 of its files, as engines tell adapters apart."""

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    name: str
    digest: Hash


@dataclass(frozen=True)
class Prompt:
    """The prompt's token ids; if it is private, only their number and their sha256.

    A short prompt can be found again from its sha256 by trying.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    tokens: int
    sha256: Hash
    """Of the canonical JSON of the list of ids."""
    token_ids: tuple[Token, ...] | None = None

    def __post_init__(self) -> None:
        if self.token_ids is not None and not self.is_of(self.token_ids):
            raise BadReceipt("the prompt's sha256 is not that of its token ids")

    @classmethod
    def of(cls, token_ids: tuple[int, ...], private: bool = False) -> Self:
        """The prompt that these ids are."""
        return cls(len(token_ids), sha256_of(list(token_ids)), None if private else token_ids)

    def is_of(self, token_ids: tuple[int, ...]) -> bool:
        """Whether it is the prompt of these ids."""
        return (len(token_ids), sha256_of(list(token_ids))) == (self.tokens, self.sha256)

    def is_like(self, other: "Prompt") -> bool:
        """Whether it is the same prompt as another, of which either may be private."""
        return (self.tokens, self.sha256) == (other.tokens, other.sha256)

    def ids(self, given: Sequence[int] | None = None) -> tuple[int, ...]:
        """The token ids: the receipt's or, if it is private, the given ones.

        Raises:
            NoTestError: none are given for a private prompt, or those of another prompt.
        """
        token_ids = self.token_ids if given is None else tuple(map(int, given))
        if token_ids is None:
            raise NoTestError("the receipt is private, it holds only a sha256 of its prompt: give the prompt")
        if not self.is_of(token_ids):
            raise NoTestError(
                f"the prompt given, of {len(token_ids)} tokens, is not the receipt's, of {self.tokens}: sha256 differs"
            )
        return token_ids


@dataclass(frozen=True)
class Tensor:
    """One tensor of what a processor made of an item: its shape, PyTorch's name of its dtype, and the sha256 of its
    bytes, row by row.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    shape: tuple[Annotated[int, Field(ge=0)], ...]
    dtype: str
    sha256: Hash

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype} ({self.sha256[:12]})"


@dataclass(frozen=True)
class Item:
    """An image, a video or a sound of a request, as an encoder gets it, and where it stands."""

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    kind: str
    at: Token
    """The first of its tokens in the prompt."""
    tokens: Annotated[int, Field(ge=1)]
    """How many tokens of the prompt are its own."""
    tensors: dict[str, Tensor]
    """By vLLM's names; ``is_embed`` says which of its tokens get rows of the encoder, where some get none."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, under vLLM's names; nothing is left to a server's defaults.

    A value that vLLM refuses is none of a receipt that is read.

    Raises:
        NoTestError: sampling without a seed cannot be repeated; an engine takes seeds of 64 bits.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    max_tokens: Annotated[int, Field(ge=1)] = 64
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_p: Annotated[Part, Field(gt=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Part = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[Token, ...] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0)] = 5
    """Candidates listed at each position, in addition to the chosen token."""

    def __post_init__(self) -> None:
        for number in fields(self):
            if isinstance(number.default, float):  # 1 and 1.0 are one value, with one hash
                object.__setattr__(self, number.name, float(getattr(self, number.name)))
        if self.temperature > 0 and self.seed in (None, _NO_SEED):
            raise NoTestError("sampling without a seed is random and cannot be repeated; give a seed, and not -1")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise NoTestError(f"the seed {self.seed} is no integer of 64 bits")


@dataclass(frozen=True)
class Completion:
    """The output tokens, and the exact bits of their logprobs and of the listed candidates' logprobs."""

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    token_ids: tuple[Token, ...]
    logprobs: tuple[Bits, ...]
    """Of the chosen tokens: fp32, big-endian, in hexadecimal."""
    top_logprobs: tuple[tuple[tuple[Token, Bits], ...], ...]
    """At each position (token id, bits) of every candidate that was listed, by ascending id."""
    finish_reason: str

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.top_logprobs) or not self.token_ids:
            raise BadReceipt("tokens and logprobs are not equally many")
        for candidates in self.top_logprobs:
            if any(left[0] >= right[0] for left, right in pairwise(candidates)):
                raise BadReceipt("the candidates of a position are not in ascending order, each once")

    @classmethod
    def of(cls, positions: Iterable[tuple[int, float, Iterable[tuple[int, float]]]], finish_reason: str) -> Self:
        """The completion of these positions: token id, its logprob, and ids and logprobs of the candidates.

        Raises:
            NoTestError: a logprob that fp32 does not have.
        """
        tokens, logprobs, tops = zip(*positions, strict=True)
        return cls(
            tokens,
            tuple(map(bits_of, logprobs)),
            tuple(tuple((token, bits_of(logprob)) for token, logprob in sorted(top)) for top in tops),
            finish_reason,
        )


def environment_from_json(data: Any) -> Environment:
    """The environment that an engine sent.

    Raises:
        NoTestError: it is none.
    """
    try:
        return TypeAdapter(Environment).validate_json(canonical(data))
    except (ValidationError, TypeError, ValueError) as error:
        raise NoTestError(f"the engine's description is not understood: {_first_line(error)}") from error


@dataclass(frozen=True)
class TracedStep:
    """What an engine's layers made of a request's rows in one step."""

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    position: Annotated[int, Field(ge=0)]
    """Of the first row."""
    rows: Annotated[int, Field(ge=1)]
    digests: dict[str, Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]]
    """By a layer's path: the first digits of the sha256 of the bytes of its first output."""


@dataclass(frozen=True)
class EngineInfo:
    """An engine: the model that it serves, and its environment."""

    model: Model
    environment: Environment
    of_items: frozenset[int] = frozenset()
    """Tokens that stand for images, videos and sounds in a prompt."""
    adapter: Adapter | None = None
    """Of the request, if it has one."""

    def asked_for(self, adapter: Adapter | None) -> "EngineInfo":
        """As a request meets it: without an adapter no bit follows from how those of others are added."""
        environment = self.environment
        if adapter is None:
            kept = {name: one for name, one in environment.reductions.items() if not name.startswith(OF_ADAPTERS)}
            environment = replace(environment, reductions=kept)
        return replace(self, environment=environment, adapter=adapter)


class _Kept:
    """What a receipt of either kind is beside its fields: a file with a hash."""

    of_what: ClassVar[str]
    """What it is a receipt of, in words."""
    _LEFT_OUT: ClassVar[tuple[str, ...]]
    """Fields that a file has not where they are empty."""

    def _body(self) -> dict[str, Any]:
        body = {"format": FORMAT, "version": VERSION} | asdict(self)  # type: ignore[call-overload]  # a mixin
        for name in self._LEFT_OUT:
            if not body[name]:
                del body[name]
        return body

    @property
    def sha256(self) -> str:
        """sha256 of the canonical JSON of everything else."""
        return sha256_of(self._body())

    def to_json(self) -> str:
        """The text of the file: one line a field, the hash last."""
        content = self._body() | {"sha256": self.sha256}
        lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def save(self, path: str | Path) -> None:
        """Write the file; an existing one is not overwritten.

        Raises:
            NoTestError: the file exists or cannot be written.
        """
        try:
            with Path(path).open("x") as file:
                file.write(self.to_json())
        except OSError as error:
            raise NoTestError(f"{path} cannot be written: {error.strerror or error}") from error

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read a receipt of this kind.

        Raises:
            BadReceipt: as :func:`read`, or it is of the other kind.
        """
        found = read(text)
        if not isinstance(found, cls):
            raise BadReceipt(f"this is a receipt of {found.of_what}, and not of {cls.of_what}")
        return found

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file; errors as in :meth:`from_json`, with the file's name."""
        return _load(path, cls.from_json)


@dataclass(frozen=True)
class Receipt(_Kept):
    """One completion with everything that it takes to compute it again. Equal receipts have equal hashes: nothing in
    them is a time, a name of a machine or of a person.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    model: Model
    prompt: Prompt
    sampling: Sampling
    completion: Completion
    environment: Environment
    trace: tuple[TracedStep, ...] = ()
    """What the layers made, if it was asked for: with it a difference is found in its operation."""
    adapter: Adapter | None = None
    items: tuple[Item, ...] = ()
    """In the order of the prompt."""

    of_what: ClassVar[str] = "a completion"
    _LEFT_OUT: ClassVar[tuple[str, ...]] = ("trace", "adapter", "items")

    def __post_init__(self) -> None:
        end = 0
        for item in self.items:
            if item.at < end or item.at + item.tokens > self.prompt.tokens:
                raise BadReceipt("the items of the request do not stand one behind the other in its prompt")
            end = item.at + item.tokens
        if (tokens := len(self.completion.token_ids)) > self.sampling.max_tokens:
            raise BadReceipt(f"the completion has {tokens} tokens, and the request at most {self.sampling.max_tokens}")

    @classmethod
    def of(
        cls,
        info: EngineInfo,
        token_ids: tuple[int, ...],
        sampling: Sampling,
        completion: Completion,
        private: bool,
        trace: tuple[TracedStep, ...] = (),
        items: tuple[Item, ...] = (),
    ) -> "Receipt":
        """The receipt of a completion, as it would be read from a file; ``private`` leaves out the prompt's ids."""
        prompt, info = Prompt.of(token_ids, private), info.asked_for(info.adapter)
        made = cls(info.model, prompt, sampling, completion, info.environment, trace, info.adapter, items)
        return cls.from_json(made.to_json())

    @property
    def info(self) -> EngineInfo:
        """The engine that computed it."""
        return EngineInfo(self.model, self.environment, adapter=self.adapter)


@dataclass(frozen=True)
class Pooling:
    """What a model that pools was asked; what is None is the model's own way, which its environment tells."""

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    task: Literal["embed", "score", "classify"]
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Of an embedding."""
    activation: bool | None = None
    """Whether an embedding is normalised, or classes or a score are made of logits."""

    def __post_init__(self) -> None:
        if self.dimensions is not None and self.task != "embed":
            raise BadReceipt(f"dimensions are of an embedding, and the request is of the task {self.task}")


@dataclass(frozen=True)
class Pair:
    """A query and the text that is scored against it; if they are private, only their sha256.

    Short texts can be found again from it by trying.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    sha256: Hash
    """Of the canonical JSON of both."""
    texts: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if self.texts is not None and sha256_of(list(self.texts)) != self.sha256:
            raise BadReceipt("the sha256 of the pair is not that of its texts")

    @classmethod
    def of(cls, query: str, text: str, private: bool = False) -> Self:
        """The pair of these texts."""
        return cls(sha256_of([query, text]), None if private else (query, text))

    def both(self, given: tuple[str, str] | None = None) -> tuple[str, str]:
        """The texts: the receipt's or, if it is private, the given ones.

        Raises:
            NoTestError: none are given for a private pair, or those of another.
        """
        texts = self.texts if given is None else given
        if texts is None:
            raise NoTestError("the receipt is private, it holds only a sha256 of its pair: give both, query and prompt")
        if sha256_of(list(texts)) != self.sha256:
            raise NoTestError("the query and the prompt given are not the receipt's: sha256 differs")
        return texts


@dataclass(frozen=True)
class Pooled:
    """What a model gave: an embedding, the one value of a score, or one of each class."""

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    values: Annotated[tuple[Bits, ...], Field(min_length=1)]
    """fp32, big-endian, in hexadecimal; exact where a model gives 16 bits."""
    sha256: Hash
    """Of the bytes of all values, one after the other."""

    def __post_init__(self) -> None:
        if self.sha256 != _sha256_of_bits(self.values):
            raise BadReceipt("the sha256 of the values is not theirs")

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """What these values are.

        Raises:
            NoTestError: a value that fp32 does not have.
        """
        bits = tuple(map(bits_of_value, values))
        return cls(bits, _sha256_of_bits(bits))


def _sha256_of_bits(values: Iterable[str]) -> str:
    return hashlib.sha256(bytes.fromhex("".join(values))).hexdigest()


@dataclass(frozen=True)
class PooledReceipt(_Kept):
    """What a model pooled of a text, with everything that it takes to compute it again."""

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    model: Model
    pooling: Pooling
    pooled: Pooled
    environment: Environment
    prompt: Prompt | None = None
    """Of an embedding and of classes."""
    pair: Pair | None = None
    """Of a score."""

    of_what: ClassVar[str] = "what a model pooled"
    _LEFT_OUT: ClassVar[tuple[str, ...]] = ("prompt", "pair")

    def __post_init__(self) -> None:
        of_pair, count, wanted = self.pooling.task == "score", len(self.pooled.values), self.pooling.dimensions
        if (self.pair is None) == of_pair or (self.prompt is None) != of_pair:
            raise BadReceipt("a score is of a pair of texts, and an embedding and classes are of a prompt")
        if (of_pair and count != 1) or wanted not in (None, count):
            asked = "a score" if of_pair else f"an embedding of {wanted}"
            raise BadReceipt(f"the receipt has {count} values, and the request asks for {asked}")

    @classmethod
    def of(
        cls,
        info: EngineInfo,
        about: tuple[int, ...] | tuple[str, str],
        pooling: Pooling,
        pooled: Pooled,
        private: bool = False,
    ) -> "PooledReceipt":
        """The receipt of what was pooled, as it would be read from a file.

        Args:
            about: token ids of a prompt; of a score the query and the text.
            private: leave them out.
        """
        environment = info.asked_for(None).environment
        made = cls(info.model, pooling, pooled, environment, **_asked_about(about, pooling, private))
        return cls.from_json(made.to_json())

    @property
    def info(self) -> EngineInfo:
        """The engine that computed it."""
        return EngineInfo(self.model, self.environment)


def _asked_about(about: tuple[Any, ...], pooling: Pooling, private: bool) -> dict[str, Any]:
    if pooling.task == "score":
        query, text = about
        return {"pair": Pair.of(query, text, private)}
    return {"prompt": Prompt.of(about, private)}


def read(text: str | bytes) -> Receipt | PooledReceipt:
    """Read a receipt of either kind.

    Raises:
        BadReceipt: another kind of file, another version of the format, a hash that is not that of the content, or
            content that does not fit together.
    """
    try:
        data = json.loads(text, object_pairs_hook=_without_doubles)
    except BadReceipt:
        raise
    except (ValueError, RecursionError) as error:
        raise BadReceipt("this is no receipt: not JSON") from error
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise BadReceipt(f'this is no receipt: it does not say "format": "{FORMAT}"')
    if data.get("version") != VERSION:
        raise BadReceipt(
            f"the receipt's format has version {data.get('version')!r}, and this reads version {VERSION}; "
            "use the vllm-batch-invariant that wrote it"
        )
    claimed = data.pop("sha256", None)
    try:
        actual = sha256_of({"format": FORMAT} | data)
    except ValueError as error:
        raise BadReceipt("the receipt was tampered with or damaged: it holds NaN or an infinity") from error
    if claimed != actual:
        raise BadReceipt(f"the receipt was tampered with or damaged: its sha256 is {actual}, and it says {claimed}")
    del data["version"]
    try:
        return _adapter(PooledReceipt if "pooled" in data else Receipt).validate_json(canonical(data))
    except ValidationError as error:
        raise BadReceipt(f"the receipt has a right hash and wrong content: {_first_line(error)}") from error


def load(path: str | Path) -> Receipt | PooledReceipt:
    """Read a file; errors as in :func:`read`, with the file's name."""
    return _load(path, read)


def _load(path: str | Path, reads: Callable[[bytes], _Found]) -> _Found:
    try:
        return reads(Path(path).read_bytes())
    except OSError as error:
        raise BadReceipt(f"{path} cannot be read: {error.strerror or error}") from error
    except NoTestError as error:
        raise BadReceipt(f"{path}: {error}") from error


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. If a field is there twice, some readers take the first and others the last."""
    held = dict(pairs)
    if len(held) < len(pairs):
        raise BadReceipt("the receipt was tampered with: a field is in it twice")
    return held


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return " ".join(str(error).split())
