"""The one request whose answers are compared, and how an answer is read from what a server sends."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .divergence import Answer, GeneratedToken
from .outcome import NoTestError
from .request_parameters import over_http

# long enough to fill a block of the prefix cache
PROMPT = (
    "Explain in detail why the sum of many floating-point numbers depends on the order in which they are added, "
    "what that means for a server that answers many people at once, and how it shows in what each of them reads. "
    "Begin with two numbers of very different size and a third that is nearly the first with its sign turned. "
    "Then say which parts of a transformer add up long rows of numbers, who chooses the order in each of them, "
    "and why that choice may look at how many requests happen to be in the batch. "
    "End with what an engineer can do about it, what it costs, and how one would prove that it worked."
)
NO_LOGPROBS = "the server returned no logprobs, so bits cannot be compared; serve a model that gives logprobs"


@dataclass(frozen=True)
class RequestSpec:
    """What is asked of the server, the same for every sample."""

    prompt: str = PROMPT
    chat: bool = False
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    logprobs: int = 5
    ignore_eos: bool = False

    def body(self, model: str) -> dict[str, Any]:
        """The arguments of the OpenAI client's `create`."""
        logprobs = {"logprobs": True, "top_logprobs": self.logprobs} if self.chat else {"logprobs": self.logprobs}
        # token ids, because two tokens can read the same
        extra = {"return_tokens_as_token_ids": True, "ignore_eos": self.ignore_eos}
        asked = {"temperature": self.temperature, "seed": self.seed, "max_tokens": self.max_tokens}
        return self._prompt(model, self.prompt) | logprobs | asked | {"extra_body": extra}

    def concurrent_body(self, model: str, prompt: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments for another request of the load, with the sampling parameters that it has."""
        return self._prompt(model, prompt) | over_http(params, self.chat)

    def _prompt(self, model: str, prompt: str) -> dict[str, Any]:
        text = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        return text | {"model": model}


def answer_from(choices: Iterable[dict[str, Any]], chat: bool) -> Answer:
    """Put an answer together from its choices: one when it came whole, one a chunk when it was streamed."""
    text, steps = [], []
    for choice in choices:
        text.append((choice.get("message") or choice.get("delta") or {}).get("content") if chat else choice.get("text"))
        steps += generated_tokens_from(choice, chat)
    if not steps:
        raise NoTestError(NO_LOGPROBS)
    return Answer.of("".join(part or "" for part in text), steps)


def generated_tokens_from(choice: dict[str, Any], chat: bool) -> Sequence[GeneratedToken]:
    """The tokens of a choice with their logprobs; none where it has no logprobs."""
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
        GeneratedToken(token, value, tuple((top or {}).items())) for token, value, top in zip(tokens, values, tops, strict=True)
    ]
