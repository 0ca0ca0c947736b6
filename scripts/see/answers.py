"""The picture of a recorded run: two answers of plain vLLM to one request, and the plugin's one answer.

It shows the two most frequent texts, and marks their first other word. Where all texts are equal, it shows two answers
with other logprobs, and marks the first other logprob.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

from scripts.see.data import DATA
from scripts.see.samples import of_result

RECORDING = DATA / "samples.json"
"""What ``python -m scripts.see.samples`` wrote; what ``reproduce --json`` writes will do as well."""
_COLUMNS, _CHARACTER, _LINE, _SIZE = 82, 7.8, 20, 13
_MARGIN, _PADDING = 16, 12
_BEFORE, _BEHIND = 150, 130
"""Characters that are shown around the first other word."""
_STYLE = """
.paper { fill: #ffffff } .card { fill: #f4f5f7; stroke: #d5d8de } .ours { fill: #e8f3ec; stroke: #9cc9ab }
text { fill: #1c2024; font: 13px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace }
.small { fill: #565d66 } .head { font-weight: bold }
.mark { fill: #d55e00 } .marked { fill: #ffffff; font-weight: bold }
@media (prefers-color-scheme: dark) {
  .paper { fill: #161a1f } .card { fill: #20262d; stroke: #3a424c } .ours { fill: #17301f; stroke: #2f6b43 }
  text { fill: #e4e7ea } .small { fill: #a3abb5 } .marked { fill: #ffffff }
}
""".strip()


@dataclass(frozen=True)
class Card:
    """One answer: who gave it how often, its lines, and what is marked as (line, column, length)."""

    head: str
    lines: tuple[str, ...]
    mark: tuple[int, int, int] | None
    is_ours: bool


def recorded(path: Path = RECORDING) -> dict[str, Any]:
    """A recording in the form of ``scripts.see.samples``.

    Raises:
        ValueError: it has not one result without the mode and one with it.
    """
    run = json.loads(path.read_text())
    results = run["results"]
    if "samples" in results[0]:  # as reproduce --json writes it
        info = results[0]["info"]
        where = {
            "machine": info.get("device") or run["machine"]["processor"],
            "vllm": info["versions"]["vllm"],
            "date": run["began"][:10],
        }
        run = run | {"where": where, "results": [of_result(result) for result in results]}
    if [is_plain(result) for result in run["results"]] != [True, False]:
        raise ValueError(f"{path}: a result without the mode and one with it are needed, in this order")
    return run


def is_plain(result: dict[str, Any]) -> bool:
    """Whether a result is plain vLLM's."""
    return result["mode"].startswith("none")


def first_other_word(one: str, other: str) -> int | None:
    """Where the first word that differs begins, in characters of both texts; None if one text begins the other."""
    same = next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return None if same is None else max(one.rfind(" ", 0, same), one.rfind("\n", 0, same)) + 1


def cards(run: dict[str, Any]) -> list[Card]:
    """Two answers of plain vLLM, or one if it had one alone; and the plugin's."""
    plain, ours = run["results"]
    counts = _counts(plain)
    total = sum(counts.values())
    texts = Counter()
    for number, count in counts.items():
        texts[_said(plain, number)] += count
    (first, often), *others = texts.most_common(2)
    if others and (place := first_other_word(first, others[0][0])) is not None:
        shown = [
            _with_word(f"plain vLLM: {count} of {total} answers", text, place)
            for text, count in ((first, often), others[0])
        ]
    else:
        shown = _with_logprobs(plain, counts, total)
        place = 0
    answers = _counts(ours)
    return [
        *shown,
        _of_plugin(f"with the plugin: {max(answers.values())} of {sum(answers.values())} answers", ours, place),
    ]


def _counts(result: dict[str, Any]) -> Counter[int]:
    """How often each answer was given, by its number."""
    counts: Counter[int] = Counter()
    for answer, length in result["runs"]:
        counts[answer] += length
    return counts


def _said(result: dict[str, Any], number: int) -> str:
    """The text of an answer."""
    return result["texts"][result["different"][number]["text"]]


def _one_line(text: str) -> str:
    return "".join(" " if character.isspace() else character for character in text)


def _window(text: str, place: int) -> tuple[str, int]:
    """The part of a text around a place, and where the place is in it."""
    begin = max(0, place - _BEFORE)
    begin = text.find(" ", begin) + 1 if begin else 0
    end = place + _BEHIND
    end = text.rfind(" ", place, end) if end < len(text) else len(text)
    lead, tail = "... " * (begin > 0), " ..." * (end < len(text))
    return _one_line(f"{lead}{text[begin:end]}{tail}"), place - begin + len(lead)


def _with_word(head: str, text: str, place: int, is_ours: bool = False) -> Card:
    shown, at = _window(text, place)
    word = shown[at:].split(" ")[0] or shown[at : at + 1]
    return _card(head, shown, at, len(word), is_ours)


def _card(head: str, shown: str, at: int, length: int, is_ours: bool) -> Card:
    """A text in lines, with a mark of which the line and column are found again."""
    lines, begin = [], 0
    mark = None
    for line in wrap(shown, _COLUMNS, replace_whitespace=False, drop_whitespace=True, break_on_hyphens=False) or [""]:
        begin = shown.index(line, begin)
        if length and begin <= at < begin + len(line):
            mark = len(lines), at - begin, min(length, len(line) - (at - begin))
        lines.append(line)
        begin += len(line)
    return Card(head, tuple(lines), mark, is_ours)


def _with_logprobs(plain: dict[str, Any], counts: Counter[int], total: int) -> list[Card]:
    """Two answers of one text: the most frequent, and the next one with another number."""
    reference = _said(plain, 0)
    for number, count in counts.most_common():
        for listed in plain["different"][number]["candidates"]:
            expected, got = (listed[side][0][1] for side in ("expected", "got"))
            if expected != got:
                all_of_them = f"{total} answers, one text and {plain['logprob_sequences']} sequences of logprobs"
                return [
                    _logprob(f"plain vLLM: {times} of {all_of_them}", reference, listed["position"], value)
                    for times, value in ((counts[0], expected), (count, got))
                ]
    return [_with_word(f"plain vLLM: {total} of {total} answers", reference, 0)]


def _logprob(head: str, text: str, position: int, logprob: float) -> Card:
    shown, _ = _window(text, 0)
    value = f"{logprob:.9g}"
    begin = f"logprob of token {position}: "
    card = _card(head, shown, 0, 0, is_ours=False)
    return Card(head, (*card.lines, begin + value), (len(card.lines), len(begin), len(value)), is_ours=False)


def _of_plugin(head: str, ours: dict[str, Any], place: int) -> Card:
    text = _said(ours, _counts(ours).most_common(1)[0][0])
    shown, _ = _window(text, min(place, len(text)))
    return _card(head, shown, 0, 0, is_ours=True)


def caption(run: dict[str, Any]) -> str:
    """What was run, where and when."""
    where, plain = run["where"], run["results"][0]
    low, high = plain["batch"]
    model, total = Path(run["target"]).name, sum(_counts(plain).values())
    return (
        f"{model}, {total} samples at temperature {run['request']['temperature']:g}, in batches of {low} to {high}. "
        f"{where['machine']}, vLLM {where['vllm']}, {where['date']}"
    )


def describe(run: dict[str, Any]) -> str:
    """The picture in words, for screen readers and for a test."""
    words = [f"Question: {_one_line(run['request']['prompt'])}"]
    for card in cards(run):
        text = " ".join(card.lines)
        marked = ""
        if card.mark:
            line, column, length = card.mark
            marked = f" (marked: {card.lines[line][column : column + length]})"
        words.append(f"{card.head}: {text}{marked}")
    return ". ".join([*words, caption(run)])


def draw(run: dict[str, Any] | None = None) -> str:
    """The picture, as SVG."""
    run = recorded() if run is None else run
    width = round(_COLUMNS * _CHARACTER + 2 * (_MARGIN + _PADDING))
    parts: list[str] = []
    y = _MARGIN
    question = wrap(f"Question: {_one_line(run['request']['prompt'])}", _COLUMNS + 2, max_lines=3, placeholder=" ...")
    for line in question:
        y += _LINE
        parts.append(_text(_MARGIN, y - 6, line, "head"))
    y += 8
    for card in cards(run):
        tall = _LINE * (1 + len(card.lines)) + 2 * _PADDING - 4
        kind = "ours" if card.is_ours else "card"
        parts.append(
            f'<rect class="{kind}" x="{_MARGIN}" y="{y}" width="{width - 2 * _MARGIN}" height="{tall}" rx="6"/>'
        )
        parts.append(_text(_MARGIN + _PADDING, y + _PADDING + _SIZE, card.head, "small"))
        parts += _lines(card, y + _PADDING + _SIZE + _LINE)
        y += tall + 10
    for line in wrap(caption(run), _COLUMNS + 2):
        y += _LINE
        parts.append(_text(_MARGIN, y - 4, line, "small"))
    y += _MARGIN - 4
    label = escape(describe(run), quote=True)
    return (
        f'<svg width="{width}" height="{y}" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" role="img" '
        f'aria-label="{label}">\n<style>\n{_STYLE}\n</style>\n'
        f'<rect class="paper" width="{width}" height="{y}" rx="8"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _lines(card: Card, y: float) -> Sequence[str]:
    parts = []
    x = _MARGIN + _PADDING
    for number, line in enumerate(card.lines):
        at = y + number * _LINE
        if card.mark and card.mark[0] == number:
            _, column, length = card.mark
            left, word, right = line[:column], line[column : column + length], line[column + length :]
            begin = x + column * _CHARACTER
            wide = length * _CHARACTER + 6
            parts.append(
                f'<rect class="mark" x="{begin - 3:.1f}" y="{at - 15}" width="{wide:.1f}" height="20" rx="3"/>'
            )
            parts += [_text(x, at, left), _text(begin, at, word, "marked")]
            parts.append(_text(begin + length * _CHARACTER, at, right))
        else:
            parts.append(_text(x, at, line))
    return [part for part in parts if part]


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    """A line at its place; as wide as its characters are, whichever font there is."""
    if not words.strip():
        return ""
    leading = len(words) - len(words.lstrip(" "))
    shown = words.strip(" ")
    named = f' class="{kind}"' if kind else ""
    return (
        f'<text{named} x="{x + leading * _CHARACTER:.1f}" y="{y}" textLength="{len(shown) * _CHARACTER:.1f}" '
        f'lengthAdjust="spacingAndGlyphs">{escape(shown)}</text>'
    )
