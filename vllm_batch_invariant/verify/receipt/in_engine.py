"""What ``receipt make`` and ``verify`` do in the process of their engine; arguments and results are plain data."""

from dataclasses import asdict
from typing import Any

from ..harness import images, worker_main
from ..harness.engine import lora_request_of
from . import engine, items, pooled
from .comparison import Note
from .record import Item, PooledReceipt, Pooling, Receipt, Sampling
from .text import Text


def make(llm: Any, asked: dict[str, Any]) -> str:
    """Complete the prompt; returns the receipt's text."""
    sampling, given = Sampling(**asked["sampling"]), images.read_all(llm, asked["items"])
    prompt, made = _prompt(llm, Text(**asked["prompt"]), given)
    token_ids = tuple(prompt["prompt_token_ids"])
    adapter = asked["adapter"] and lora_request_of(asked["adapter"])
    info = engine.engine_info(llm).asked_for(engine.adapter_of(adapter))
    if asked["trace"]:
        completion, trace = engine.traced(llm, prompt, sampling, adapter)
    else:
        (completion, _), trace = engine.complete(llm, prompt, sampling, lora_request=adapter), ()
    return Receipt.of(info, token_ids, sampling, completion, asked["private"], trace, made).to_json()


def verify(llm: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Compute the receipt's completion again. The notes on both engines are told first, then the verdict returned."""
    receipt = Receipt.from_json(asked["receipt"])
    given = images.read_all(llm, asked["items"])
    words = asked["prompt"] and Text(**asked["prompt"])
    token_ids = _prompt(llm, words, given)[0]["prompt_token_ids"] if words else None
    how: dict[str, Any] = {"concurrent": asked["concurrent"], "prompt_token_ids": token_ids, "before": _told}
    data = dict[str, list[Any]]()
    for one in given:
        data.setdefault(one["kind"], []).append(one["data"])
    how["multi_modal_data"] = data
    adapter = asked["adapter"] and lora_request_of(asked["adapter"])
    return asdict(engine.verify(receipt, llm, lora_request=adapter, **how))


def make_pooled(llm: Any, asked: dict[str, Any]) -> str:
    """Embed, score or classify the text; returns the receipt's text."""
    asking, private = Pooling(**asked["pooling"]), asked["private"]
    about = _about(llm, asked, asking)
    got, _ = pooled.compute(llm, about, asking)
    return PooledReceipt.of(engine.engine_info(llm), about, asking, got, private).to_json()


def verify_pooled(llm: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Compute again what the receipt holds; as :func:`verify`."""
    receipt = PooledReceipt.from_json(asked["receipt"])
    given = _about(llm, asked, receipt.pooling) if asked["prompt"] else None
    how: dict[str, Any] = {"pair" if receipt.pair else "prompt_token_ids": given, "concurrent": asked["concurrent"]}
    return asdict(pooled.verify_pooled(receipt, llm, before=_told, **how))


def _about(llm: Any, asked: dict[str, Any], asking: Pooling) -> tuple[Any, ...]:
    """Token ids of a prompt, or a pair of texts."""
    text = Text(**asked["prompt"])
    return (asked["query"], text.text) if asking.task == "score" else tuple(_token_ids(llm, text))


def _told(notes: tuple[Note, ...]) -> None:
    worker_main.tell([asdict(note) for note in notes])


def _prompt(llm: Any, text: Text, given: list[dict[str, Any]]) -> tuple[dict[str, Any], tuple[Item, ...]]:
    """A prompt behind items as vLLM takes it, and the items as a receipt has them."""
    if not given:
        return {"prompt_token_ids": _token_ids(llm, text)}, ()
    if text.chat:
        return items.processed(llm, images.chat_prompt(llm, text.text, given))
    images.require_encoded(llm, given)
    tokens = _token_ids(llm, text)
    behind = int(tokens[:1] == [getattr(llm.get_tokenizer(), "bos_token_id", None)])
    return items.processed(llm, images.prompt_of(llm, tokens, [one | {"at": behind} for one in given]))


def _token_ids(llm: Any, prompt: Text) -> list[int]:
    tokenizer = llm.get_tokenizer()
    if not prompt.chat:
        return tokenizer.encode(prompt.text)
    messages = [{"role": "user", "content": prompt.text}]
    templated = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(templated, add_special_tokens=False)
