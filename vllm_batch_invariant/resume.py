"""A stream of an answer that goes on at another server when its own goes away, with the bits of the unbroken answer::

    from vllm_batch_invariant import resume

    client = openai.OpenAI(base_url="http://one:8000/v1", api_key=...)
    servers = ["http://one:8000/v1", "http://two:8000/v1"]
    for chunk in resume.stream(client, servers, model="MODEL", prompt="Call me", max_tokens=500, seed=7):
        print(chunk.choices[0].text, end="")

The request is sent again with the tokens that have come (:data:`TOKENS`), to the next server that says of itself what
the first one said: the same fingerprint, and the same witness. With ``equal_in=resume.WITNESS_ALONE`` the witness is
enough. It needs the package ``openai``, and vLLM neither here.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from .seeds import SAMPLE_ID, sample_seed

TOKENS = "resumed_token_ids"
"""Of a request's ``extra_args`` (``vllm_xargs`` over HTTP): the tokens of its answer that the client has."""
PATH = "/batch_invariant"
"""Of the route, under the base URL, by which a server says what it is."""
IDENTITY = ("fingerprint", "witness")
"""The fields of its answer in which two servers must be equal: they promise each other the same bits."""
WITNESS_ALONE = ("witness",)
"""Those of a client to whom the same bits as far as seen are enough, as across an update that keeps them."""
_REFUSED = {
    "echo": "the prompt would come again",
    "tools": "a parser of tools does not see what came before the break",
    "tool_choice": "a parser of tools does not see what came before the break",
    "prompt_logprobs": "logprobs of the prompt do not come in parts",
    "thinking_token_budget": "what a thought has used is not told to the next server",
    "use_beam_search": "beams are not parts of one answer",
    "prompt_embeds": "a prompt of embeddings cannot be followed by tokens",
}
"""Parameters of a request with which an answer cannot go on, and why."""
_PARSED = ("reasoning", "reasoning_content", "tool_calls")
"""What a chat's part has where a parser found it."""
_UNSEEN = "the next server parses thoughts or calls of tools, and has not seen what came before"


class NotResumed(RuntimeError):
    """An answer that cannot go on at another server; the text is one line."""


class _Left(Exception):
    """A server does not go on with the answer, for the next one to do it; the text says why."""


def stream(
    client: Any,
    base_urls: Sequence[str],
    known: Mapping[str, str] | None = None,
    /,
    *,
    equal_in: Sequence[str] = IDENTITY,
    **asked: Any,
) -> Iterator[Any]:
    """Stream an answer, from the first server on; where one goes away the next equal one goes on.

    Args:
        client: ``openai.OpenAI``; its key and timeouts hold for all servers.
        base_urls: of the servers, the first of which begins.
        known: what a server has to say of itself, as :func:`identity` gives it; by default what the first one says.
        equal_in: what of it two servers must have equal: :data:`IDENTITY`, or :data:`WITNESS_ALONE`. Either way a
            server that makes other tokens of the prompt is passed over, too.
        asked: arguments of ``client.completions.create`` or, with ``messages``, of ``client.chat.completions.create``,
            but ``stream``. One prompt; ``n`` and everything else that decides tokens as usual. With a temperature it
            has a seed.

    Yields:
        The chunks of the OpenAI API, as of one unbroken stream. They have the fields ``token_ids``, too. Samples of one
        request (``n``) may come in another order.

    Raises:
        ValueError: another ``equal_in``, or a ``known`` without its fields.
        NotResumed: a request that cannot go on elsewhere, before anything is sent; no server is left that says the same
            of itself; or what came does not tell the tokens of the answer.
        openai.APIStatusError: a server refuses the request.
    """
    import openai

    if tuple(equal_in) not in (IDENTITY, WITNESS_ALONE):
        raise ValueError(f"equal_in is IDENTITY or WITNESS_ALONE, not {equal_in!r}")
    if known is not None and (missing := [name for name in equal_in if not known.get(name)]):
        raise ValueError(f"known has no {' and no '.join(missing)}: ask identity() with what has to be equal")
    answer = Answer.of(asked)
    servers = [client.with_options(base_url=url, max_retries=0) for url in base_urls]
    lost: list[str] = []
    for server in servers:
        try:
            found = identity(server, equal_in)
            known = known or found
            if problem := _differing(known, found):
                lost.append(f"{server.base_url}: {problem}")
                continue
            while part := answer.next_part():
                api = server.chat.completions if answer.is_chat else server.completions
                with api.create(**part.asked, stream=True) as chunks:
                    for chunk in chunks:
                        yield from answer.take(part, chunk)
                if answer.is_open(part):
                    raise _Left("the stream ended early")
            yield from answer.last()
            return
        except openai.APIStatusError as error:
            if error.status_code < 500:
                raise
            lost.append(f"{server.base_url}: {error}")
        except Exception as error:
            if not (isinstance(error, openai.APIError) or _is_lost(error)):
                raise
            lost.append(f"{server.base_url}: {error or type(error).__name__}")
    raise NotResumed(f"no server goes on with the answer: {'; '.join(lost) or 'none was named'}")


def identity(server: Any, fields: Sequence[str] = IDENTITY) -> dict[str, str]:
    """What a server says of itself; to be kept by who wants the same bits later.

    Args:
        server: ``openai.OpenAI``.
        fields: of it, :data:`IDENTITY` or :data:`WITNESS_ALONE`.

    Raises:
        NotResumed: it says nothing, so that nobody knows which server has the same bits.
    """
    import openai

    try:
        said = server.get(PATH, cast_to=object)
    except openai.NotFoundError as error:
        raise NotResumed(f"{server.base_url} has no {PATH}: batch-invariant mode is off there") from error
    found = {name: said.get(name) for name in fields}
    if missing := [name for name, value in found.items() if not value]:
        raise NotResumed(f"{server.base_url} tells no {' and no '.join(missing)}, so no server is known to be equal")
    return found


def _is_lost(error: Exception) -> bool:
    """Whether a connection broke while chunks came: openai hands on the error of whichever HTTP library it has."""
    return isinstance(error, _Left) or any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


def _differing(known: Mapping[str, str], found: Mapping[str, str]) -> str:
    return " and ".join(
        f"its {name} is {value} instead of {known[name]}" for name, value in found.items() if value != known[name]
    )


@dataclass
class Sample:
    """One of the samples of a request, as far as it has come."""

    token_ids: list[int] = field(default_factory=list)
    text_offset: int = 0
    """Of the next token, in logprobs of a completion."""
    is_parsed: bool = False
    """Whether a parser of the server's made something else than content of a part."""
    is_finished: bool = False


@dataclass(frozen=True)
class Part:
    """A request that brings all samples, or the rest of one.

    Attributes:
        asked: arguments of ``create``.
        sample: the index of that one; None for all.
        text_offset: where its text begins.
    """

    asked: dict[str, Any]
    sample: int | None = None
    text_offset: int = 0


@dataclass
class Answer:
    """What is asked, and what has come of it."""

    asked: dict[str, Any]
    samples: list[Sample]
    usage: Any = None
    """The last chunk of a stream that tells its usage."""
    id: str = ""
    """Of the first chunk, which all have."""
    prompt: list[int] | None = None
    """The tokens that the first server has made of the prompt."""

    @classmethod
    def of(cls, asked: Mapping[str, Any]) -> "Answer":
        """An answer of which nothing has come.

        Raises:
            NotResumed: a parameter with which it could not go on.
        """
        extra = dict(asked.get("extra_body") or {})
        given = {**extra, **asked}
        for name, why in _REFUSED.items():
            if given.get(name) not in (None, False, 0, "none", []):
                raise NotResumed(f"an answer with {name} cannot go on elsewhere: {why}")
        if (given.get("stream_options") or {}).get("continuous_usage_stats"):
            raise NotResumed("an answer with continuous_usage_stats cannot go on elsewhere: each server counts its own")
        prompt = given.get("prompt")
        if isinstance(prompt, list) and prompt and not all(type(one) is int for one in prompt):
            raise NotResumed("several prompts in one request cannot go on elsewhere: send each by itself")
        if given.get("temperature") != 0 and given.get("seed") is None:
            raise NotResumed("sampling without a seed cannot go on elsewhere: give a seed, or temperature=0")
        kept = {name: value for name, value in asked.items() if name != "stream"}
        kept["extra_body"] = extra | {"return_token_ids": True}
        return cls(kept, [Sample() for _ in range(given.get("n") or 1)])

    @property
    def is_chat(self) -> bool:
        """Whether it is of the chat API."""
        return "messages" in self.asked

    def is_open(self, part: Part) -> bool:
        """Whether something of a part is yet to come."""
        of_part = self.samples if part.sample is None else [self.samples[part.sample]]
        return not all(sample.is_finished for sample in of_part)

    def next_part(self) -> Part | None:
        """What is to be asked next; None if everything has come.

        Raises:
            NotResumed: what came is not all content.
        """
        if not any(sample.token_ids or sample.is_finished for sample in self.samples):
            return Part(self.asked)
        for index, sample in enumerate(self.samples):
            if not sample.is_finished:
                return Part(self._rest(index), index, sample.text_offset)
        return None

    def _rest(self, index: int) -> dict[str, Any]:
        """The request of the rest of a sample: its seed is that of the request and its index, as vLLM has it."""
        if self.samples[index].is_parsed:
            raise NotResumed(_UNSEEN)
        asked, tokens = copy(self.asked), self.samples[index].token_ids
        extra = dict(asked["extra_body"])
        more = dict(extra.get("vllm_xargs") or {})
        seed, sample_id = asked.get("seed", extra.pop("seed", None)), more.pop(SAMPLE_ID, None)
        if seed is not None:
            asked["seed"] = (seed if sample_id is None else sample_seed(seed, sample_id)) + index
        extra.pop("n", None)
        asked["n"] = 1
        asked["extra_body"] = extra | {"vllm_xargs": more | ({TOKENS: list(tokens)} if tokens else {})}
        return asked

    def take(self, part: Part, chunk: Any) -> Iterator[Any]:
        """A chunk of a part, as the unbroken stream would have it; none where that has had it already.

        Raises:
            NotResumed: it does not tell the tokens, or what a parser makes of the rest is not all content.
            _Left: another prompt came before it.
        """
        self.id = chunk.id = self.id or chunk.id
        if not chunk.choices:
            self.usage = chunk
            return
        [choice] = chunk.choices
        is_rest = part.sample is not None
        choice.index = part.sample if is_rest else choice.index
        sample, tokens = self.samples[choice.index], getattr(choice, "token_ids", None)
        prompt = getattr(chunk if self.is_chat else choice, "prompt_token_ids", None)
        self.prompt = self.prompt or prompt
        if prompt and prompt != self.prompt:
            raise _Left("it makes other tokens of the prompt")
        if prompt and is_rest and not self.is_chat:
            choice.prompt_token_ids = None  # it has come
        if tokens is None and choice.finish_reason:
            raise NotResumed("the server tells no token ids, so no other could go on with its answer")
        if tokens is None and is_rest:
            return  # the role, which has come
        if self.is_chat:
            sample.is_parsed |= any(getattr(choice.delta, name, None) for name in _PARSED)
            if sample.is_parsed and is_rest:
                raise NotResumed(_UNSEEN)
        elif choice.logprobs and choice.logprobs.tokens:
            logprobs = choice.logprobs
            logprobs.text_offset = [offset + part.text_offset for offset in logprobs.text_offset]
            sample.text_offset = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
        sample.token_ids += tokens or []
        sample.is_finished = choice.finish_reason is not None
        yield chunk

    def last(self) -> Iterator[Any]:
        """The chunk with the usage of all parts, if it was asked for."""
        if self.usage is None:
            return
        usage, made = self.usage.usage, sum(len(sample.token_ids) for sample in self.samples)
        usage.completion_tokens, usage.total_tokens = made, usage.prompt_tokens + made
        yield self.usage
