"""Images, videos and sounds of a receipt's request: what a processor makes of them, and where they stand.

A bit of an answer follows from what an encoder gets, and that is what a receipt holds a digest of. Files are decoded
and resized in vLLM's front end; another release of it may make other pixels of a file, which is found here.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..harness import images
from ..outcome import NoTestError
from ..printing import one_line
from .comparison import Difference, difference_of_items
from .record import Item, Receipt, Tensor

IS_EMBED = "is_embed"
"""Which tokens of an item get rows, among its tensors."""


def items_of(llm: Any, prompt: Any, output: Any) -> tuple[Item, ...]:
    """What the items of a request were made into, for :func:`.engine.make`.

    Args:
        llm: the idle ``vllm.LLM`` that answered; it lets go of what its processor keeps.
        prompt: as ``generate`` was given it, with ``multi_modal_data``.
        output: vLLM's ``RequestOutput``.

    Raises:
        NoTestError: the engine is busy or refuses the prompt, or the output is of another one.
    """
    made, items = processed(llm, prompt)
    if list(made["prompt_token_ids"]) != list(output.prompt_token_ids):
        raise NoTestError("the output is of another prompt than the one given, or of other items")
    return items


def processed(llm: Any, prompt: Any) -> tuple[dict[str, Any], tuple[Item, ...]]:
    """A prompt with its items as vLLM's engine takes it, made anew, and the items as a receipt has them.

    Raises:
        NoTestError: the engine is busy or refuses the prompt.
    """
    if llm.llm_engine.has_unfinished_requests():
        raise NoTestError("the engine is busy: use an idle one")
    images.forget(llm)
    try:
        made = llm._preprocess_cmpl_one(prompt)
    except Exception as error:  # processors raise anything
        raise NoTestError(f"the engine refuses the request: {one_line(error)}") from error
    finally:
        images.forget(llm)  # else the front end takes the engine to have items that it has not been sent
    found, contents = [], dict[str, Any]()
    for kind, places in made.get("mm_placeholders", {}).items():
        for place, name, content in zip(places, made["mm_hashes"][kind], made["mm_kwargs"][kind], strict=True):
            contents.setdefault(name, content)  # vLLM sends what comes twice once
            found.append(_item(kind, place, contents[name]))
    return made, tuple(sorted(found, key=lambda item: item.at))


def made(llm: Any, requests: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[list[str]]]:
    """What the items of requests are made into: of each item a line a tensor, with name, shape, dtype and the beginning
    of its digest.

    Args:
        llm: an idle ``vllm.LLM``.
        requests: items as :data:`..harness.images.Item`, in the order of the prompt.

    Raises:
        NoTestError: the engine is busy or refuses a request.
    """
    every = (processed(llm, images.prompt_of(llm, [], items))[1] for items in requests)
    return [[[f"{name} {one}" for name, one in item.tensors.items()] for item in items] for items in every]


def prompt_of(
    llm: Any, receipt: Receipt, token_ids: Sequence[int] | None, data: Mapping[str, Sequence[Any]]
) -> tuple[dict[str, Any], Difference | None]:
    """The request of a receipt as vLLM's engine takes it, with items of given data.

    Args:
        llm: an idle ``vllm.LLM``.
        receipt: with items.
        token_ids: of the prompt of a private receipt, which are looked at behind the items.
        data: by kind, in the order of the prompt, as ``multi_modal_data`` has it.

    Returns:
        The request, and the first item that differs from the receipt's; with one, it is not the receipt's request.

    Raises:
        NoTestError: the engine is busy, or refuses the items, or the prompt is missing or another one.
    """
    rest = {kind: iter(those) for kind, those in data.items()}
    given = [{"kind": item.kind, "at": 0, "data": next(rest[item.kind])} for item in receipt.items]
    images.require_encoded(llm, given)
    made, found = processed(llm, images.prompt_of(llm, [], given))
    moved = [replace(one, at=item.at) for one, item in zip(found, receipt.items, strict=True)]
    if difference := difference_of_items(receipt.items, moved):
        return made, difference
    ids = receipt.prompt.ids(token_ids)
    for number, (one, item) in enumerate(zip(found, receipt.items, strict=True)):
        here = made["prompt_token_ids"][one.at : one.at + one.tokens]
        if list(here) != list(ids[item.at : item.at + item.tokens]):
            return made, Difference(None, f"item {number} ({item.kind}): its tokens in the prompt are others")
    places = {kind: iter([item.at for item in receipt.items if item.kind == kind]) for kind in data}
    return made | {
        "prompt_token_ids": list(ids),
        "mm_placeholders": {
            kind: [replace(place, offset=next(places[kind])) for place in those]
            for kind, those in made["mm_placeholders"].items()
        },
    }, None


def require(receipt: Receipt, kinds: Sequence[str]) -> None:
    """Refuse to compute a receipt again with other items than it has, by their number.

    Args:
        kinds: of the items that are given.

    Raises:
        NoTestError: there are more, fewer, or others.
    """
    wanted = [item.kind for item in receipt.items]
    if sorted(wanted) == sorted(kinds):
        return
    if not wanted:
        raise NoTestError(f"the receipt's request has no images, videos or sounds: leave --{kinds[0]} out")
    raise NoTestError(
        f"the receipt's request has {_counted(wanted)}, and {_counted(kinds) or 'none'} "
        f"given: give the files in the order of the prompt, {', '.join(f'--{kind}' for kind in wanted)}"
    )


def refuse(receipt: Receipt, why: str) -> None:
    """Refuse a receipt with items.

    Raises:
        NoTestError: it has some.
    """
    if receipt.items:
        raise NoTestError(f"the receipt's request has {_counted([item.kind for item in receipt.items])}: {why}")


def _counted(kinds: Sequence[str]) -> str:
    named = {"image": "image", "video": "video", "audio": "sound"}
    counts = ((kinds.count(kind), name) for kind, name in named.items())
    return " and ".join(f"{count} {name}{'s' * (count != 1)}" for count, name in counts if count)


def _item(kind: str, place: Any, content: Any) -> Item:
    """Of vLLM's range of tokens, and of what its processor made."""
    tensors = _tensors(IS_EMBED, place.is_embed)
    for name, one in sorted(content.items()):
        tensors |= _tensors(name, one.data)
    return Item(kind, place.offset, place.length, tensors)


def _tensors(name: str, value: Any) -> dict[str, Tensor]:
    """Of a tensor, a number, or several of them."""
    import torch  # a client of a server need not have it

    if value is None:
        return {}
    if isinstance(value, list | tuple):
        return {
            inner: one for place, part in enumerate(value) for inner, one in _tensors(f"{name}.{place}", part).items()
        }
    if isinstance(value, float):
        value = torch.tensor(value, dtype=torch.float64)
    elif not isinstance(value, torch.Tensor):
        value = torch.tensor(value)
    held = value.detach().cpu().contiguous()
    digest = hashlib.sha256(held.reshape(-1).view(torch.uint8).numpy()).hexdigest()
    return {name: Tensor(tuple(held.shape), str(held.dtype).removeprefix("torch."), digest)}
