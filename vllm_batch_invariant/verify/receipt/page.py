"""The HTML page of a receipt: what it holds, and whether another computation has its bits."""

from itertools import islice

from ..outcome import Outcome
from ..printing import printable
from ..report.html import Cell, Page, Part, Section, Table, Verdict
from ..report.parts import pairs, words
from .comparison import Kept
from .comparison import Verdict as Compared
from .record import PooledReceipt, Receipt, number_of

_CANDIDATES = 5


def page_of(receipt: Kept, compared: Compared | None = None) -> Page:
    """The receipt as a page, and the comparison with another computation of it, if there is one."""
    sections: list[Section] = []
    if compared is not None:
        sections.append(Section("engines", "The two engines", (_notes(compared),)))
    sections += [
        _answer(receipt, compared),
        Section("request", "The request", (_request(receipt),)),
        Section("engine", "The engine that computed it", _engine(receipt)),
    ]
    return Page(
        title=f"Receipt of {receipt.of_what} of {receipt.model.name}",
        info=f"sha256 {receipt.sha256}",
        verdicts=(_made(receipt) if compared is None else _verdict(receipt, compared),),
        partial="",
        sections=tuple(sections),
    )


def _numbers(receipt: Kept) -> tuple[tuple[str, str], ...]:
    if isinstance(receipt, PooledReceipt):
        return ((str(len(receipt.pooled.values)), "values"),)
    completion = receipt.completion
    logprobs = len(completion.logprobs) + sum(map(len, completion.top_logprobs))
    return (str(len(completion.token_ids)), "tokens"), (str(logprobs), "logprobs")


def _made(receipt: Kept) -> Verdict:
    promised = receipt.environment.mode is True
    headline = (
        "Anybody with the same engine can compute these bits again."
        if promised
        else (
            "The mode was off: nobody can promise these bits again."
            if receipt.environment.mode is False
            else "The engine did not say whether the mode was on, so nobody can promise these bits again."
        )
    )
    return Verdict("", Outcome.HOLDS if promised else Outcome.NOT_TESTED, headline, _numbers(receipt))


def _verdict(receipt: Kept, compared: Compared) -> Verdict:
    detail = (
        "Equal bits were promised."
        if compared.promised
        else "Equal bits were not promised: see how the engines differ."
    )
    if compared:
        what = "value" if isinstance(receipt, PooledReceipt) else "token and logprob"
        return Verdict("", Outcome.HOLDS, f"Equal. Every {what} has the same bits.", _numbers(receipt), detail)
    assert compared.difference is not None
    position = compared.difference.position
    if isinstance(receipt, PooledReceipt):
        headline = "Another number of values." if position is None else f"Different from value {position} on."
    else:
        headline = (
            "Different in an item of the request." if position is None else f"Different from token {position} on."
        )
    return Verdict("", Outcome.BREAKS, headline, _numbers(receipt), f"{compared.difference}. {detail}")


def _notes(compared: Compared) -> Part:
    if not compared.notes:
        return "Nothing differs that decides bits, so bits may be expected equal."
    rows = tuple((Cell(printable(note.text)), Cell("yes" if note.promised else "no")) for note in compared.notes)
    return Table("How the engines differ", ("difference", "equal bits promised in spite of it"), rows)


def _answer(receipt: Kept, compared: Compared | None) -> Section:
    first = compared.difference.position if compared is not None and compared.difference else None
    if isinstance(receipt, PooledReceipt):
        return Section("pooled", "What the model pooled", (_values(receipt, first),))
    return Section("completion", "The completion", (_tokens(receipt, first),))


def _values(receipt: PooledReceipt, first: int | None) -> Table:
    rows = tuple(
        (
            Cell(str(place)),
            Cell(f"{number_of(bits):.9g}", Outcome.BREAKS if place == first else None),
            Cell(f"0x{bits}"),
        )
        for place, bits in enumerate(receipt.pooled.values)
    )
    return Table(f"sha256 {receipt.pooled.sha256}", ("position", "value", "its bits"), rows)


def _tokens(receipt: Receipt, first: int | None) -> Table:
    completion = receipt.completion
    rows = tuple(
        (
            Cell(str(place)),
            Cell(str(token), Outcome.BREAKS if place == first else None),
            Cell(f"{number_of(bits):.9g}"),
            Cell(f"0x{bits}"),
            Cell(", ".join(f"{candidate}: {number_of(its):.6g}" for candidate, its in islice(top, _CANDIDATES))),
        )
        for place, (token, bits, top) in enumerate(
            zip(completion.token_ids, completion.logprobs, completion.top_logprobs, strict=True)
        )
    )
    header = ("position", "token id", "logprob", "its bits", "candidates by id")
    return Table(f"Ended by {printable(completion.finish_reason)}", header, rows).without_empty_columns()


_PRIVATE = "only their sha256 is kept"


def _request(receipt: Kept) -> Table:
    rows = dict[str, str]()
    if prompt := receipt.prompt:
        kept = _PRIVATE if prompt.token_ids is None else " ".join(map(str, prompt.token_ids))
        rows = {"tokens of the prompt": str(prompt.tokens), "their ids": kept, "sha256": prompt.sha256}
    if isinstance(receipt, PooledReceipt):
        if pair := receipt.pair:
            texts = pair.texts or (_PRIVATE,) * 2
            rows = {"query": printable(texts[0]), "text": printable(texts[1]), "sha256 of both": pair.sha256}
        return pairs("What was asked", rows | {name: words(value) for name, value in vars(receipt.pooling).items()})
    for number, item in enumerate(receipt.items):
        said = [f"{item.tokens} tokens from {item.at} on", *(f"{name} {one}" for name, one in item.tensors.items())]
        rows |= {f"item {number}, {printable(item.kind)}": printable("; ".join(said))}
    rows |= {name.replace("_", " "): words(value) for name, value in vars(receipt.sampling).items()}
    return pairs("The prompt, and how tokens were chosen", rows)


def _engine(receipt: Kept) -> tuple[Part, ...]:
    model, environment, adapter = receipt.model, receipt.environment, receipt.info.adapter
    about = {"name": printable(model.name), "digest": model.digest or f"none, because {printable(model.why_no_digest)}"}
    if adapter:
        about |= {"adapter": f"{printable(adapter.name)}, sha256 {adapter.digest}"}
    parts: list[Part] = [pairs("The model", about | model.files)]
    if environment.is_silent:
        return (*parts, "The receipt does not describe the engine that computed it.")
    rows = {"mode": "on" if environment.mode else "off"}
    for section in ("device", "versions", "engine", "reductions"):
        rows |= {f"{section}, {name}": words(value) for name, value in getattr(environment, section).items()}
    return (*parts, pairs("What the bits depend on", rows))
