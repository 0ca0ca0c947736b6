"""A request, its answer, and a comparison of answers bit for bit."""

import base64
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from .outcome import NoTestError
from .printing import printable


@dataclass(frozen=True)
class GeneratedToken:
    """One generated token, its logprob, and the candidates that the server lists with it."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()
    ranks: tuple[int, ...] = ()
    """Of the candidates, in the same order; empty where the server sends none."""

    @property
    def listed(self) -> tuple[tuple[str, float], ...]:
        """The token and every candidate in the listed order, with their logprobs."""
        return (self.token, self.logprob), *self.top

    def bits(self) -> bytes:
        """What is listed, with the exact bits of the logprobs, and the ranks; :meth:`of_bits` reads it."""
        parts = [struct.pack("<I", len(self.listed))]
        for token, logprob in self.listed:
            name = token.encode()
            parts.append(struct.pack("<I", len(name)) + name + struct.pack("<d", logprob))
        return b"".join(parts) + struct.pack(f"<{len(self.ranks)}q", *self.ranks)

    @classmethod
    def of_bits(cls, bits: bytes) -> "GeneratedToken":
        """The token whose :meth:`bits` these are."""
        [count], place, listed = struct.unpack_from("<I", bits), 4, []
        for _ in range(count):
            [length] = struct.unpack_from("<I", bits, place)
            name = bits[place + 4 : place + 4 + length].decode()
            [logprob] = struct.unpack_from("<d", bits, place + 4 + length)
            listed.append((name, logprob))
            place += 12 + length
        ranks = struct.unpack_from(f"<{(len(bits) - place) // 8}q", bits, place)
        return cls(*listed[0], tuple(listed[1:]), ranks)


def spelled(value: float) -> str:
    """A number in words that have all its bits, those of a NaN included, which ``float.hex`` loses."""
    return f"nan {struct.pack('>d', value).hex()}" if value != value else value.hex()


def number_of(text: str) -> float:
    """The number that :func:`spelled` was given."""
    kind, _, bits = text.partition(" ")
    return struct.unpack(">d", bytes.fromhex(bits))[0] if bits else float.fromhex(kind)


@dataclass(frozen=True)
class Answer:
    """One answer: its text, its tokens and the bits of the logprobs at each position; or what a pooling model gave.

    Attributes:
        bits: of the logprobs at each position; of a pooling model of each value, or of each row if there are rows.
        dtype: of a pooling model's values, as PyTorch calls it; :data:`DIGESTS` of tensors; empty for text.
        shape: of these values.
    """

    text: str
    tokens: tuple[str, ...]
    bits: tuple[bytes, ...]
    dtype: str = ""
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, text: str, generated: Sequence[GeneratedToken]) -> "Answer":
        """The answer of these generated tokens."""
        return cls(text, tuple(one.token for one in generated), tuple(one.bits() for one in generated))

    @classmethod
    def of_values(cls, raw: bytes, dtype: str, shape: Sequence[int]) -> "Answer":
        """What a pooling model gave.

        Args:
            raw: the values, C-contiguous and little-endian.
            dtype: "float32", "float64", "float16" or "bfloat16".
            shape: [values] or [rows, values].
        """
        size = SIZES[dtype] * (shape[-1] if len(shape) > 1 else 1)
        bits = tuple(raw[start : start + size] for start in range(0, len(raw), size or 1))
        return cls("", (), bits, dtype, tuple(shape))

    @classmethod
    def of_tensors(cls, described: Sequence[str]) -> "Answer":
        """What a processor made of an item: each tensor's name, shape, dtype and digest."""
        return cls("", (), tuple(one.encode() for one in described), DIGESTS, (len(described),))

    @property
    def unit(self) -> str:
        """What a position counts: "token", "value", "row" or "tensor"."""
        if self.dtype == DIGESTS:
            return "tensor"
        return "token" if not self.dtype else "row" if len(self.shape) > 1 else "value"

    def values(self, position: int) -> tuple[float, ...]:
        """Values of a pooling model at a position, with their bits but for those of a NaN; none behind the end."""
        return values_of(self.bits[position], self.dtype) if position < len(self.bits) else ()


DIGESTS = "digests"
"""Stands for a dtype of answers that are tensors, of which digests are compared."""
SIZES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
"""Bytes of a value, by dtype."""
_PACKED = {"float32": "f", "float64": "d", "float16": "e"}


def values_of(raw: bytes, dtype: str) -> tuple[float, ...]:
    """The values of these bytes, little-endian, of a dtype of ``SIZES``."""
    if dtype == "bfloat16":  # the upper half of an fp32
        halves = (raw[start : start + 2] for start in range(0, len(raw), 2))
        raw, dtype = b"".join(b"\0\0" + half for half in halves), "float32"
    return struct.unpack(f"<{len(raw) // SIZES[dtype]}{_PACKED[dtype]}", raw)


def answer_of(completion: Mapping[str, Any]) -> Answer:
    """The answer of a completion of an engine, as :func:`.harness.drive.described` gives it, or of what it pooled.

    Raises:
        NoTestError: it has no logprobs.
    """
    if "raw" in completion:
        return Answer.of_values(bytes.fromhex(completion["raw"]), completion["dtype"], completion["shape"])
    if not completion["logprobs"]:
        why = "the engine returned no logprobs, so bits cannot be compared; use a model that gives logprobs"
        raise NoTestError(why)
    return Answer.of(completion["text"], listed_tokens(completion["tokens"], completion["logprobs"]))


def listed_tokens(ids: Sequence[int], logprobs: Sequence[list[tuple[int, str, int]]]) -> list[GeneratedToken]:
    """Tokens of an engine: their ids, and (id, exact logprob, rank) of every candidate in the listed order."""
    found = []
    for token, listed in zip(ids, logprobs, strict=True):
        values = {str(other): number_of(text) for other, text, _ in listed}
        ranks = tuple(rank or 0 for *_, rank in listed)
        found.append(GeneratedToken(str(token), values[str(token)], tuple(values.items()), ranks))
    return found


@dataclass(frozen=True)
class Divergence:
    """The position at which an answer first differs from sample 0, with both tokens and both continuations."""

    sample: int
    position: int
    expected: str
    got: str
    expected_text: str
    got_text: str

    @property
    def both(self) -> tuple[str, str]:
        """The token of sample 0, and the one that this answer has instead."""
        return self.expected, self.got

    @property
    def tokens(self) -> str:
        """Both tokens, in one printable line."""
        return printable(f"{self.got} instead of {self.expected}")

    @property
    def texts(self) -> tuple[str, str]:
        """The next characters of both texts, got and expected, quoted."""
        return printable(repr(self.got_text)), printable(repr(self.expected_text))

    def __str__(self) -> str:
        texts = " ({} instead of {})".format(*self.texts) if self.got_text or self.expected_text else ""
        return f"{self.tokens}{texts}"


@dataclass(frozen=True)
class AnswerComparison:
    """All answers compared with sample 0: counts, the earliest divergence and the divergences by position, for tokens
    and for logprobs.
    """

    samples: int
    completions: int
    logprob_sequences: int
    earliest_token: Divergence | None
    earliest_logprob: Divergence | None
    token_positions: dict[int, int]
    logprob_positions: dict[int, int]
    unit: str = "token"
    """What a position counts: "token"; of a pooling model, whose vectors are the logprob sequences here, "value" or
    "row"; of what a processor made, "tensor".
    """

    @property
    def identical(self) -> bool:
        """Whether there is one completion and one logprob sequence."""
        return self.completions == 1 and self.logprob_sequences == 1


@dataclass(frozen=True)
class Counts:
    """How many answers have come, and how many different ones."""

    samples: int = 0
    completions: int = 0
    logprob_sequences: int = 0

    @property
    def differ(self) -> bool:
        """Whether two answers have other bits."""
        return max(self.completions, self.logprob_sequences) > 1


class Tally:
    """Counts answers while they come."""

    def __init__(self) -> None:
        self._samples = 0
        self._completions: set[tuple[str, tuple[str, ...]]] = set()
        self._logprob_sequences: set[tuple[Any, ...]] = set()

    def add(self, answer: Answer) -> Counts:
        """Count an answer; returns the counts so far."""
        self._samples += 1
        self._completions.add((answer.text, answer.tokens))
        self._logprob_sequences.add((answer.bits, answer.dtype, answer.shape))
        return self.counts

    @property
    def counts(self) -> Counts:
        """The counts so far."""
        return Counts(self._samples, len(self._completions), len(self._logprob_sequences))


def first_difference(left: Sequence[object], right: Sequence[object]) -> int | None:
    """The first position at which two sequences differ, the end of the shorter one included; None if they are equal."""
    missing = object()
    for position, (a, b) in enumerate(zip_longest(left, right, fillvalue=missing)):
        if a != b:
            return position
    return None


def compare_answers(answers: Sequence[Answer]) -> AnswerComparison:
    """Compare every answer with the first."""
    reference, tally = answers[0], Tally()
    token_divergences: list[tuple[int, int]] = []
    logprob_divergences: list[tuple[int, int]] = []
    for sample, answer in enumerate(answers):
        tally.add(answer)
        for divergences, left, right in (
            (token_divergences, reference.tokens, answer.tokens),
            (logprob_divergences, reference.bits, answer.bits),
        ):
            position = first_difference(left, right)
            if position is not None:
                divergences.append((position, sample))
        if answer.bits == reference.bits and (answer.dtype, answer.shape) != (reference.dtype, reference.shape):
            logprob_divergences.append((0, sample))

    def earliest(divergences: list[tuple[int, int]]) -> Divergence | None:
        if not divergences:
            return None
        position, sample = min(divergences)
        return _divergence(reference, answers[sample], sample, position)

    return AnswerComparison(
        **vars(tally.counts),
        earliest_token=earliest(token_divergences),
        earliest_logprob=earliest(logprob_divergences),
        token_positions=dict(sorted(Counter(position for position, _ in token_divergences).items())),
        logprob_positions=dict(sorted(Counter(position for position, _ in logprob_divergences).items())),
        unit=reference.unit,
    )


def _divergence(reference: Answer, answer: Answer, sample: int, position: int) -> Divergence:
    def token(side: Answer) -> str:
        if side.unit == "tensor":
            return side.bits[position].decode() if position < len(side.bits) else "none"
        if side.dtype:
            return vector_at(side, position, reference if side is answer else answer)
        return side.tokens[position] if position < len(side.tokens) else "<end>"

    shared = first_difference(reference.text, answer.text)

    def continuation(side: Answer) -> str:
        return "" if shared is None else side.text[shared : shared + 24]

    return Divergence(sample, position, token(reference), token(answer), continuation(reference), continuation(answer))


def vector_at(answer: Answer, position: int, other: Answer) -> str:
    """What a pooling model gave at a position, with all digits; of a row the first value that another's has not."""
    mine, theirs = answer.values(position), other.values(position)
    if (len(mine), answer.dtype) != (len(theirs), other.dtype):
        return f"{list(answer.shape)} {answer.dtype}"
    size = SIZES[answer.dtype]
    sides = (one.bits[position] for one in (answer, other))
    pieces = ([raw[start : start + size] for start in range(0, len(raw), size)] for raw in sides)
    place = first_difference(*pieces)
    if place is None:
        return f"{list(answer.shape)} {answer.dtype}"
    of_row = f"value {place}: " if answer.unit == "row" else ""
    return f"{of_row}{mine[place]:.17g}" if answer.dtype == "float64" else f"{of_row}{mine[place]:.9g}"


def binned(positions: dict[int, int], length: int, bins: int = 8) -> list[tuple[int, int, int]]:
    """Counts by position, summed over at most ``bins`` ranges (first, last, count) of ``length`` positions."""
    length = max(length, *positions, 1) if positions else max(length, 1)
    width = -(-length // bins)
    return [
        (start, min(start + width, length) - 1, sum(n for p, n in positions.items() if start <= p < start + width))
        for start in range(0, length, width)
    ]


# long enough to fill a block of the prefix cache
PROMPT = (
    "Explain in detail why the sum of many floating-point numbers depends on the order in which they are added, "
    "what that means for a server that answers many people at once, and how it shows in what each of them reads. "
    "Begin with two numbers of very different size and a third that is nearly the first with its sign turned. "
    "Then say which parts of a transformer add up long rows of numbers, who chooses the order in each of them, "
    "and why that choice may look at how many requests happen to be in the batch. "
    "End with what an engineer can do about it, what it costs, and how one would prove that it worked."
)
GENERATE = "generate"
"""The task of a model that generates."""
OF_TEXT = ("chat", "max_tokens", "temperature", "logprobs", "ignore_eos", "items")
"""Fields of a request that only a model has which generates."""
OF_POOLING = ("dimensions", "activation", "truncate")
"""Those that only a model has which pools."""
NO_LOGPROBS = "the server returned no logprobs, so bits cannot be compared; serve a model that gives logprobs"


def is_url(where: str) -> bool:
    """Whether an item is at a URL with ``file:`` or ``data:``, and not at a path."""
    return where.startswith(("data:", "file:"))


def held_at(where: str) -> bytes:
    """The file at a path or at a URL of :func:`is_url`.

    Raises:
        OSError: it cannot be read.
        ValueError: the URL is none.
    """
    if not is_url(where):
        return Path(where).read_bytes()
    with urlopen(where) as opened:
        return opened.read()


@cache
def url_of(kind: str, where: str) -> str:
    """A file with an image, a sound or a video, by its kind, as an address that has all of it."""
    if where.startswith("data:"):
        return where
    suffix = Path(urlsplit(where).path if is_url(where) else where).suffix.lower().lstrip(".").replace("jpg", "jpeg")
    return url_with(f"{kind}/{suffix}", held_at(where))


def url_with(media: str, *held: bytes) -> str:
    """An address that has all of a file of a type, such as "image/png"; or several, as vLLM takes frames."""
    return f"data:{media};base64,{','.join(base64.b64encode(one).decode() for one in held)}"


def _part(url: str) -> dict[str, Any]:
    """What a chat has of an item at an address of :func:`url_with`."""
    name = f"{url.removeprefix('data:').partition('/')[0]}_url"
    return {"type": name, name: {"url": url}}


@dataclass(frozen=True)
class RequestSpec:
    """The target request, the same for every sample.

    Attributes:
        task: :data:`GENERATE`, or what a pooling model is asked, a key of :data:`.harness.pooling.TASKS`.
        dimensions: of an embedding; None for all.
        activation: whether a pooling model normalises an embedding, or makes classes of logits; None for its own way.
        truncate: tokens of a pooling model's prompt at most; None for all.
        items: kind and file of what stands before the prompt, in this order.
        adapters: folders of LoRA adapters, of which the request has the first.
    """

    prompt: str = PROMPT
    chat: bool = False
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    logprobs: int = 5
    ignore_eos: bool = False
    task: str = GENERATE
    dimensions: int | None = None
    activation: bool | None = None
    truncate: int | None = None
    items: tuple[tuple[str, str], ...] = ()
    adapters: tuple[str, ...] = ()

    @property
    def pools(self) -> bool:
        """Whether a pooling model answers it."""
        return self.task != GENERATE

    @property
    def asked(self) -> dict[str, Any]:
        """What the task of the request has, by name."""
        others = OF_TEXT if self.pools else OF_POOLING
        asked = {name: value for name, value in vars(self).items() if name not in (*others, "items")}
        if not self.adapters:
            del asked["adapters"]
        for kind, where in self.items:
            asked[kind] = (*asked.get(kind, ()), where)
        return asked

    @property
    def most_tokens(self) -> int:
        """Tokens that are generated at most."""
        return 0 if self.pools else self.max_tokens

    def body(self, model: str) -> dict[str, Any]:
        """The arguments of the OpenAI client's ``create``."""
        logprobs = {"logprobs": True, "top_logprobs": self.logprobs} if self.chat else {"logprobs": self.logprobs}
        # token ids, because two tokens can have the same text
        extra = {"return_tokens_as_token_ids": True, "ignore_eos": self.ignore_eos}
        asked = {"temperature": self.temperature, "seed": self.seed, "max_tokens": self.max_tokens}
        return (
            self.prompt_body(model, self.prompt, [url_of(*one) for one in self.items])
            | logprobs
            | asked
            | {"extra_body": extra}
        )

    def prompt_body(self, model: str, prompt: str, items: Sequence[str] = ()) -> dict[str, Any]:
        """The arguments that hold the model and a prompt, for the target request and for a concurrent one.

        Args:
            items: addresses of images, sounds and videos before it, in a chat.
        """
        content = [*map(_part, items), {"type": "text", "text": prompt}] if items else prompt
        text = {"messages": [{"role": "user", "content": content}]} if self.chat else {"prompt": prompt}
        return text | {"model": model}


def answer_from(choices: Iterable[dict[str, Any]], chat: bool) -> Answer:
    """The answer of a request: of one choice, or of one choice a chunk if it was streamed.

    Raises:
        NoTestError: it has no logprobs.
    """
    text: list[str | None] = []
    generated: list[GeneratedToken] = []
    for choice in choices:
        text.append((choice.get("message") or choice.get("delta") or {}).get("content") if chat else choice.get("text"))
        generated += generated_tokens_from(choice, chat)
    if not generated:
        raise NoTestError(NO_LOGPROBS)
    return Answer.of("".join(part or "" for part in text), generated)


def generated_tokens_from(choice: dict[str, Any], chat: bool) -> Sequence[GeneratedToken]:
    """The tokens of a choice with their logprobs; none if it has no logprobs."""
    return _chat_tokens(choice.get("logprobs")) if chat else _completion_tokens(choice.get("logprobs"))


def _chat_tokens(logprobs: dict[str, Any] | None) -> Sequence[GeneratedToken]:
    return [
        GeneratedToken(
            item["token"],
            item["logprob"],
            tuple((top["token"], top["logprob"]) for top in item.get("top_logprobs") or ()),
        )
        for item in (logprobs or {}).get("content") or ()
    ]


def _completion_tokens(logprobs: dict[str, Any] | None) -> Sequence[GeneratedToken]:
    if not logprobs:
        return []
    tokens, values = logprobs.get("tokens") or (), logprobs.get("token_logprobs") or ()
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    if None in values:
        raise NoTestError("the server returned a token without its logprob, so its bits cannot be compared")
    return [
        GeneratedToken(token, value, tuple((top or {}).items()))
        for token, value, top in zip(tokens, values, tops, strict=True)
    ]
