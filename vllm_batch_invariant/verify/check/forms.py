"""Forms in which a client can ask a server besides a plain completion, each with what an answer's bits are there.

A form asks through the OpenAI client, and returns the answer without what is random in it: ids and times.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import openai

from ..answers import PROMPT, Answer, GeneratedToken, answer_from, generated_tokens_from

LISTED = 5
"""Logprobs a token."""
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add rows of numbers.",
        "parameters": {
            "type": "object",
            "properties": {"order": {"enum": ["rising", "falling"]}, "rows": {"enum": [1, 2, 3]}},
            "required": ["order", "rows"],
            "additionalProperties": False,
        },
    },
}
_OF_A_CALL = 48
"""Tokens that a call of the tool has room in."""
_GREEDY = {"temperature": 0, "return_tokens_as_token_ids": True}
"""Token ids, because two tokens can have the same text."""


@dataclass(frozen=True)
class Asked:
    """Who asks for what: the client, the model, and the most tokens of an answer."""

    api: openai.AsyncOpenAI
    model: str
    max_tokens: int

    async def post(self, path: str, **body: Any) -> Any:
        """The answer to a request, as JSON."""
        return await self.api.post(path, body={"model": self.model} | body, cast_to=object)


Form = Callable[[Asked], Awaitable[Answer]]


async def _chat(asked: Asked, **more: Any) -> Answer:
    said = {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": LISTED}
    body = {"max_tokens": asked.max_tokens} | _GREEDY | said | more
    found = await asked.post("/chat/completions", **body)
    [choice] = found["choices"]
    message = choice.get("message") or {}
    called = [call["function"] for call in message.get("tool_calls") or ()]
    text = [message.get("content") or "", *(f"{call['name']}({call['arguments']})" for call in called)]
    return Answer.of("\n".join(text) + f" [{choice.get('finish_reason')}]", generated_tokens_from(choice, chat=True))


async def chat(asked: Asked) -> Answer:
    """A chat."""
    return await _chat(asked, ignore_eos=True)


async def named_tool(asked: Asked) -> Answer:
    """A chat with a tool that must be called: a grammar forces its arguments."""
    choice = {"type": "function", "function": {"name": "add"}}
    return await _chat(asked, tools=[_TOOL], tool_choice=choice, max_tokens=max(asked.max_tokens, _OF_A_CALL))


async def tools(asked: Asked) -> Answer:
    """A chat with a tool that the model may call: the server looks for a call in what it says."""
    return await _chat(asked, tools=[_TOOL], tool_choice="auto")


async def response(asked: Asked) -> Answer:
    """``/v1/responses``."""
    found = await asked.post(
        "/responses",
        input=PROMPT,
        max_output_tokens=asked.max_tokens,
        temperature=0,
        top_logprobs=LISTED,
        include=["message.output_text.logprobs"],
        store=False,
    )
    parts = [part for item in found.get("output") or () for part in item.get("content") or ()]
    text = "\n".join(str(part.get("text") or "") for part in parts)
    entries = (entry for part in parts for entry in part.get("logprobs") or ())
    return Answer.of(f"{text} [{found.get('status')}]", list(_listed(entries)))


def _listed(entries: Iterable[dict[str, Any]]) -> Iterable[GeneratedToken]:
    for entry in entries:
        top = tuple((one["token"], one["logprob"]) for one in entry.get("top_logprobs") or ())
        yield GeneratedToken(entry["token"], entry["logprob"], top)


async def _completion(asked: Asked, stream: bool, stop: list[str] | None) -> Answer:
    body: dict[str, Any] = {"model": asked.model, "prompt": PROMPT, "max_tokens": asked.max_tokens, "logprobs": LISTED}
    body |= {"temperature": 0, "stop": stop}
    more = {"ignore_eos": True, "return_tokens_as_token_ids": True}
    if not stream:
        whole = await asked.api.completions.with_raw_response.create(**body, extra_body=more)
        return answer_from(json.loads(whole.http_response.content)["choices"], chat=False)
    pieces = await asked.api.completions.create(**body, extra_body=more, stream=True)
    return answer_from([choice async for choice in _choices(pieces)], chat=False)


async def _choices(pieces: AsyncIterator[Any]) -> AsyncIterator[dict[str, Any]]:
    async for piece in pieces:
        for choice in piece.choices:
            yield choice.model_dump()


async def stop_string(asked: Asked) -> list[str]:
    """A stop string at which a completion ends before its last token: a part of what is said without it."""
    text = (await _completion(asked, stream=False, stop=None)).text
    return [text[len(text) // 2 :][:3]]


def stopped(stop: list[str], stream: bool) -> Form:
    """A completion that ends at a stop string, in one piece or streamed: the pieces joined are the whole."""

    async def ask(asked: Asked) -> Answer:
        return await _completion(asked, stream, stop)

    return ask


FORMS: dict[str, Form] = {
    "a chat": chat,
    "a chat with a tool that is named": named_tool,
    "a chat with tools": tools,
    "a response": response,
}
"""By name. A server may refuse some: tools without a parser, an API that it does not have."""
