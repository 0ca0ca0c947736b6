"""Refuses fields of vLLM's configuration and environment variables by what was found of them (:mod:`..reviews`).

A field that nobody has reviewed must have its default; a variable that nobody has read must not be set.
``make test-patch-points`` prints those that a version of vLLM has.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

from ... import envs
from ...errors import NotCovered
from .. import reviews

_ABSENT = object()


def unreviewed(name: str, fields: set[str]) -> set[str]:
    """The fields of a class of configurations that nobody has reviewed."""
    if reviews.classes().verdict(name) or name in reviews.judged_with_their_field():
        return set()
    review = reviews.fields().get(name, reviews.Review())
    return {field for field in fields if review.verdict(field) is None}


def check(config: Any, where: str = "") -> None:
    """Refuse a field that is not free and has not its default, in a configuration or in one that it holds.

    Raises:
        NotCovered: the first such field.
    """
    kind = type(config).__name__
    review = reviews.fields().get(kind, reviews.Review())
    for name, default in _defaults(config):
        value, path = getattr(config, name), f"{where}{name}"
        if dataclasses.is_dataclass(value) and type(value).__name__ in reviews.fields():
            check(value, f"{path}.")
        elif "known" in (review.verdict(name), reviews.classes().verdict(type(value).__name__)):
            continue
        elif value not in (default, *review.default_only.get(name, ())):
            why = "it has not been proven that it leaves a request's arithmetic alone"
            if name not in review.default_only:
                why = "this version of the plugin does not know it"
            raise NotCovered(f"{path}={_shown(value)}", why, f"leave it out, so that it is {_shown(default)}")


def _defaults(config: Any) -> Iterator[tuple[str, object]]:
    """The fields of a configuration that have a value, each with its default; a value of its own where it has none."""
    for field in dataclasses.fields(config):
        if not hasattr(config, field.name):
            continue
        default: Any = field.default
        if field.default_factory is not dataclasses.MISSING:
            yield field.name, field.default_factory()
        elif hasattr(default, "get_default"):  # a field of pydantic's
            made = default.default_factory
            yield field.name, made() if made is not None else default.default
        else:
            yield field.name, _ABSENT if default is dataclasses.MISSING else default


def _shown(value: object) -> str:
    if value is _ABSENT:
        return "not there"
    text = repr(value.value if isinstance(value, Enum) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def unread_variables(names: Iterable[str]) -> list[str]:
    """Those of vLLM's variables that nobody has read."""
    ours = {variable.name for variable in envs.VARIABLES}
    return sorted(name for name in {*names} - ours if reviews.variables().verdict(name) is None)


def check_variables(names: Iterable[str]) -> None:
    """Refuse an environment variable that could change arithmetic, or that nobody has read.

    Args:
        names: of all variables that the installed vLLM knows.

    Raises:
        NotCovered: the first that has another value than the covered one, or else the first unread one that is set.
    """
    for name, (covered, why) in reviews.variables().default_only.items():
        value = os.environ.get(name, covered)
        if value.lower() not in (covered, "", *(("false",) if covered == "0" else ())):
            raise NotCovered(f"{name}={value}", why, f"unset {name}")
    for name in unread_variables(names):
        if os.environ.get(name):  # what it is set to may be a secret
            raise NotCovered(f"the variable {name}", "this version of the plugin does not know it", f"unset {name}")
