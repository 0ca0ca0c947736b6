"""The table of recipes, ``docs/recipes.csv``, and what ``docs/recipes.md`` shows of it."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..trainers import rows
from ..trainers.gate import NOT_MADE, ROOT, STARTS, UNKNOWN_DRAFTS, UNKNOWN_MODEL, Question
from ..trainers.rows import kind_of, reasons_of
from .models import checkpoint_of, drafts_of

TABLE = ROOT / "docs" / "recipes.csv"
PAGE = ROOT / "docs" / "recipes.md"
REPOSITORY = "vllm-project/recipes"
BEGIN, END = "<!-- written by scripts/recipes -->", "<!-- end -->"
OTHER_ENGINE, OTHER_HARDWARE = "another engine: ", "for other hardware: "


@dataclass(frozen=True)
class Row:
    """One variant of a recipe.

    Attributes:
        recipe: its path in ``models``.
        commit: of the repository, ten digits.
        date: of the commit.
        variant: its name.
        checkpoint: Hugging Face's name.
        architecture: vLLM's name of its class; empty if it is not known here.
        precision: as the recipe calls it.
        quantisation: the form of the checkpoint's weights; empty if they are not quantised, or nothing is known here.
        gpus: the fewest H200 whose memory is enough.
        arguments: of vLLM's engine, as JSON.
        variables: vLLM's of the environment, as JSON; empty if there are none.
        features: further arguments of features that are on by default, as JSON; empty if there are none.
        drafts: further arguments of speculative decoding, as JSON; empty if the variant has none.
        verdict: what the start-up check says without features.
        with_features: what it says with those that are on by default.
        with_drafts: what it says with these and speculative decoding; empty if the variant has none.
    """

    recipe: str
    commit: str
    date: str
    variant: str
    checkpoint: str
    architecture: str
    precision: str
    quantisation: str
    gpus: str
    arguments: str
    variables: str = ""
    features: str = ""
    drafts: str = ""
    verdict: str = ""
    with_features: str = ""
    with_drafts: str = ""

    @property
    def is_asked(self) -> bool:
        """Whether the start-up check has something to say of it."""
        return bool(self.arguments)

    @property
    def fits(self) -> bool:
        """Whether two GPUs are enough."""
        return int(self.gpus) <= 2


def read() -> list[Row]:
    """The rows of the file."""
    return rows.read(TABLE, Row)


def write(found: Iterable[Row]) -> None:
    """Write the file."""
    rows.write(TABLE, Row, found)


def questions(found: Sequence[Row]) -> list[Question]:
    """What to ask of rows, in their order: of each without features, with them, and with drafts where it has some."""
    asked = []
    for row in found:
        if not row.is_asked:
            continue
        checkpoint = checkpoint_of(row.checkpoint)
        model = checkpoint.model if checkpoint else None
        base, variables = json.loads(row.arguments), json.loads(row.variables or "{}")
        features, drafts = (json.loads(text or "{}") for text in (row.features, row.drafts))
        for more in ({}, features, features | drafts)[: 3 if drafts else 2]:
            whole = base | more
            name = (whole.get("speculative_config") or {}).get("model", "")
            asked.append(Question(model, whole, variables, drafts_of(name) if name else None))
    return asked


def judged(found: Sequence[Row], said: Iterable[str]) -> list[Row]:
    """The rows with what was said to :func:`questions`."""
    answers = iter(said)
    return [
        replace(
            row,
            verdict=next(answers),
            with_features=next(answers),
            with_drafts=next(answers) if row.drafts else "",
        )
        if row.is_asked
        else row
        for row in found
    ]


def _is_known(row: Row) -> bool:
    return row.is_asked and row.verdict != UNKNOWN_MODEL


def page_table(found: Sequence[Row]) -> str:
    """What the page shows."""
    return "\n\n".join((_totals(found), _by_reason(found), _of_drafts(found), _starting(found)))


_GROUPS: dict[str, Callable[[Row], bool]] = {
    "one GPU": lambda row: int(row.gpus) == 1,
    "two GPUs": lambda row: int(row.gpus) == 2,
    "more": lambda row: not row.fits,
}


def _totals(found: Sequence[Row]) -> str:
    """How many variants start, by the number of GPUs."""
    columns: dict[str, Callable[[Row], bool]] = {
        "variants": lambda row: bool(row.gpus),
        "for vLLM on such a GPU": lambda row: row.is_asked,
        "of these, known here": _is_known,
        "of these, start": lambda row: row.verdict == STARTS,
        "start with features": lambda row: row.with_features == STARTS,
        "known and with drafts": lambda row: bool(row.with_drafts) and _is_known(row),
        "of these, start with them": lambda row: row.with_drafts == STARTS,
    }
    lines = [f"| GPUs of 141 GB | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for group, is_in in (_GROUPS | {"all": lambda row: bool(row.gpus)}).items():
        numbers = (sum(is_in(row) and counts(row) for row in found) for counts in columns.values())
        lines.append(f"| {group} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


def kinds_of(verdict: str) -> list[str]:
    """Reasons of a verdict without their numbers and values, each once; the verdict where it refuses nothing."""
    if verdict.startswith(NOT_MADE) or verdict == UNKNOWN_DRAFTS:
        return [verdict]
    return list(dict.fromkeys(_brief(reason) for reason in reasons_of(verdict)))


def _brief(reason: str) -> str:
    """A kind of reason, with the method and codes of quantised weights alone."""
    of_weights = re.sub(r"([\w-]+) with (\w+) weights.* activations$", r"\1 with \2 weights and activations", reason)
    return re.sub(r"_e4m3$", "", kind_of(of_weights))


def _by_reason(found: Sequence[Row]) -> str:
    """What stops a variant with the features that are on by default; it may have several reasons."""
    every: dict[str, Counter[str]] = {group: Counter() for group in _GROUPS}
    alone: dict[str, Counter[str]] = {group: Counter() for group in _GROUPS}
    for row in found:
        kinds = kinds_of(row.with_features)
        group = next(group for group, is_in in _GROUPS.items() if is_in(row))
        every[group].update(kinds)
        alone[group].update(kinds if len(kinds) == 1 else [])
    lines = [
        f"| why a variant is refused | {' | '.join(f'{group} | it alone' for group in _GROUPS)} |",
        f"|---|{'---|' * 2 * len(_GROUPS)}",
    ]
    reasons = {reason for counts in every.values() for reason in counts}
    fitting = [counts for group, counts in every.items() if group != "more"]
    for reason in sorted(reasons, key=lambda one: (-sum(counts[one] for counts in fitting), -every["more"][one], one)):
        numbers = (counts[group][reason] or "" for group in _GROUPS for counts in (every, alone))
        lines.append(f"| {reason} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


def _of_drafts(found: Sequence[Row]) -> str:
    """What stops a variant with drafts that starts without them."""
    every: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    for row in found:
        if row.with_features == STARTS and row.with_drafts not in ("", STARTS):
            kinds = kinds_of(row.with_drafts)
            every.update(kinds)
            alone.update(kinds if len(kinds) == 1 else [])
    lines = ["| why a variant that starts is refused with drafts | variants | it alone |", "|---|---|---|"]
    for reason, number in sorted(every.items(), key=lambda item: (-item[1], item[0])):
        lines.append(f"| {reason} | {number} | {alone[reason] or ''} |")
    return "\n".join(lines)


def _starting(found: Sequence[Row]) -> str:
    lines = [
        "| recipe | variant | checkpoint | weights | GPUs | with features | with drafts |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        if row.verdict == STARTS:
            others = " | ".join(_shown(verdict) for verdict in (row.with_features, row.with_drafts))
            weights = row.quantisation or row.precision
            lines.append(f"| {row.recipe} | {row.variant} | {row.checkpoint} | {weights} | {row.gpus} | {others} |")
    return "\n".join(lines)


def _shown(verdict: str) -> str:
    if verdict == STARTS:
        return "starts"
    return f"refused: {', '.join(kinds_of(verdict))}" if reasons_of(verdict) else verdict


def counted(found: Sequence[Row]) -> Iterator[str]:
    """Lines for a terminal: how many variants start, by the number of GPUs."""
    for group, is_in in _GROUPS.items():
        own = [row for row in found if is_in(row)]
        known, starting = sum(map(_is_known, own)), sum(row.with_features == STARTS for row in own)
        yield f"{group}: {len(own)} variants, {known} known, {starting} start with their features"
