"""What ``receipt make`` and ``verify`` do in the process of their engine; arguments and results are plain data."""

from dataclasses import asdict
from typing import Any

from ..harness import worker_main
from ..harness.engine import lora_request_of
from . import engine
from .comparison import Note
from .record import Receipt, Sampling
from .text import Text


def make(llm: Any, asked: dict[str, Any]) -> str:
    """Complete the prompt; returns the receipt's text."""
    sampling = Sampling(**asked["sampling"])
    token_ids = tuple(_token_ids(llm, Text(**asked["prompt"])))
    adapter = asked["adapter"] and lora_request_of(asked["adapter"])
    info = engine.engine_info(llm).asked_for(engine.adapter_of(adapter))
    if asked["trace"]:
        completion, trace = engine.traced(llm, token_ids, sampling, adapter)
    else:
        (completion, _), trace = engine.complete(llm, token_ids, sampling, lora_request=adapter), ()
    return Receipt.of(info, token_ids, sampling, completion, asked["private"], trace).to_json()


def verify(llm: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Compute the receipt's completion again. The notes on both engines are told first, then the verdict returned."""

    def before(notes: tuple[Note, ...]) -> None:
        worker_main.tell([asdict(note) for note in notes])

    receipt = Receipt.from_json(asked["receipt"])
    token_ids = None if asked["prompt"] is None else _token_ids(llm, Text(**asked["prompt"]))
    how = {"concurrent": asked["concurrent"], "prompt_token_ids": token_ids, "before": before}
    adapter = asked["adapter"] and lora_request_of(asked["adapter"])
    return asdict(engine.verify(receipt, llm, lora_request=adapter, **how))


def _token_ids(llm: Any, prompt: Text) -> list[int]:
    tokenizer = llm.get_tokenizer()
    if not prompt.chat:
        return tokenizer.encode(prompt.text)
    messages = [{"role": "user", "content": prompt.text}]
    templated = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(templated, add_special_tokens=False)
