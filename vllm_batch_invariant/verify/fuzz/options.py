"""Settings of an engine that one row each describes: :data:`OPTIONS`. A new row is drawn, labelled and passed on.

Those that decide sizes or how the model is shared among workers are fields of :class:`.schedule.Settings`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..harness.requests import BUDGET

NONE = ""
"""The value of every option that adds nothing to an engine."""
_BACKENDS = {
    "xgrammar": "xgrammar",
    "guidance": "llguidance",
    "outlines": "outlines_core",
    "lm-format-enforcer": "lmformatenforcer",
}
"""Values of the backend of ``--structured-outputs-config``, and the module that each needs."""


_INSTALLED = tuple(backend for backend, module in _BACKENDS.items() if find_spec(module) is not None)


@dataclass(frozen=True)
class Place:
    """Where an engine runs, as far as options depend on it.

    Attributes:
        device: "cpu" or "cuda".
        has_tokenizer: the model's folder has one, and the arguments leave it on.
        reloads: the weights can be read again from where the engine reads them.
        has_experts: the model is a mixture of experts.
        given: names of arguments that somebody has chosen: an option that has one is not drawn.
    """

    device: str
    has_tokenizer: bool = True
    reloads: bool = True
    has_experts: bool = False
    given: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Option:
    """A row.

    Attributes:
        name: of the setting, also in labels.
        arguments: what each value but :data:`NONE` adds to ``vllm serve``.
        values: those to draw from, as often as they are to be drawn.
        where: whether an engine in a place has it; everywhere if None.
        beside: whether it can be beside the rest of the settings, a :class:`.schedule.Settings`; if not, it is
            :data:`NONE`.
        decides: kinds of requests whose tokens follow from it.
    """

    name: str
    arguments: Mapping[str, tuple[str, ...]]
    values: tuple[str, ...]
    where: Callable[[Place], bool] | None = None
    beside: Callable[[Any], bool] | None = None
    decides: frozenset[str] = frozenset()

    def is_in(self, place: Place) -> bool:
        """Whether it is drawn in a place."""
        names = {arguments[0] for arguments in self.arguments.values() if arguments}
        return not names & place.given and (self.where is None or self.where(place))


def _thought(start: str, end: str) -> tuple[str, ...]:
    return ("--reasoning-config", json.dumps({"reasoning_start_str": start, "reasoning_end_str": end}))


def _keeps_requests(place: Place) -> bool:  # noqa: ARG001 - everywhere, in some versions
    """Whether requests that run go on after a sleep; earlier versions of vLLM abort them."""
    return in_vllm("v1/engine/__init__.py", '"keep"')


OPTIONS = (
    # the end of "phrase" has several tokens, that of "marker" one
    Option(
        "reasoning",
        {"phrase": _thought("def", "return self.x"), "marker": _thought("def", "self")},
        (NONE, "phrase", "marker"),
        lambda place: place.has_tokenizer and in_vllm("config/reasoning.py", "reasoning_start_str"),
        lambda settings: not settings.drafts,
        frozenset((BUDGET,)),
    ),
    # drafts follow the tokens of a prompt, which embeddings do not tell
    Option(
        "embeds",
        {"on": ("--enable-prompt-embeds",)},
        (NONE, "on"),
        beside=lambda settings: not settings.drafts and not settings.text and settings.stages == 1,
    ),
    Option("policy", {"priority": ("--scheduling-policy", "priority")}, (NONE, "priority")),
    Option(
        "grammar",
        {backend: ("--structured-outputs-config", json.dumps({"backend": backend})) for backend in _INSTALLED},
        _INSTALLED,
        lambda place: place.has_tokenizer and bool(_INSTALLED),
        decides=frozenset(("json", "regex", "choice")),
    ),
    Option(
        "sleep",
        {"on": ("--enable-sleep-mode",)},
        (NONE, "on"),
        lambda place: place.device == "cuda" and _keeps_requests(place),
    ),
    # a CPU sleeps without the argument, which vLLM refuses there, and forgets its prefix cache
    Option("sleep", {}, ("cache",), lambda place: place.device == "cpu" and _keeps_requests(place)),
    Option("updates", {}, (NONE, "on", NONE), lambda place: place.reloads),
    Option(
        "experts",
        {"whole": ("--enable-expert-parallel",)},
        (NONE, "whole"),
        lambda place: place.has_experts,
        lambda settings: settings.workers > 1,
    ),
)


def in_vllm(file: str, word: str) -> bool:
    """Whether a source file of the installed vLLM has a word: what a version has is seen without its import."""
    found = find_spec("vllm")
    folders = (found.submodule_search_locations or ()) if found else ()
    paths = [Path(folder) / file for folder in folders]
    return any(word in path.read_text() for path in paths if path.is_file())
