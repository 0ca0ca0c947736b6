"""Every environment variable of this project, in one table. The flag itself, ``VLLM_BATCH_INVARIANT``, is shared with
vLLM.
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from .errors import BadSetting

FLAG = "VLLM_BATCH_INVARIANT"
_RESEMBLANCE = 0.85
"""Of ``difflib``: from here on a name is a misspelt one. None of vLLM's own variables comes above 0.65."""
_OF_A_SERVICE = re.compile(r"_(SERVICE_HOST|(SERVICE_)?PORT)(_\w+)?$")
"""What Kubernetes puts into every container for a service: one named vllm-batch-invariant begins like the flag."""

_SUPPOSED: ContextVar[Mapping[str, str]] = ContextVar("supposed", default={})  # noqa: B039 - nobody writes into it


@contextmanager
def supposed(variables: Mapping[str, str]) -> Iterator[None]:
    """Have this thread read variables as a process would that has these beside this process's: what would it say?"""
    token = _SUPPOSED.set(variables)
    try:
        yield
    finally:
        _SUPPOSED.reset(token)


@dataclass(frozen=True)
class Variable:
    """A variable with the values it may have; the first is the default."""

    name: str
    values: tuple[str, ...]
    meaning: str

    def read(self) -> str:
        """The value in force.

        Raises:
            BadSetting: a value that is not one of ``values``.
        """
        value = self._told()
        if value not in self.values:
            raise BadSetting(f"{self.name}={value!r} is not a value it can have; use {' or '.join(self.values)}.")
        return value

    def _told(self) -> str:
        return _SUPPOSED.get().get(self.name) or os.environ.get(self.name) or self.values[0]


@dataclass(frozen=True)
class PatternVariable(Variable):
    """A variable that matches a pattern or has its default, the first of ``values``; the second tells people of it."""

    pattern: str

    def read(self) -> str:
        """The value in force.

        Raises:
            BadSetting: a value that does not match.
        """
        value = self._told()
        if value != self.values[0] and not re.fullmatch(self.pattern, value):
            raise BadSetting(f"{self.name}={value!r} is not a value it can have; use {' or '.join(self.values)}.")
        return value


ATTENTION = Variable(
    f"{FLAG}_ATTENTION",
    ("auto", "flex", "numba", "triton"),
    "Implementation of attention: a compiled kernel (numba on a CPU, triton on a GPU; auto picks it) or FlexAttention.",
)
LINEAR = Variable(
    f"{FLAG}_LINEAR",
    ("auto", "triton"),
    "Matmuls on a GPU: cuBLASLt where a certificate says that it has the bits of Triton, or Triton alone.",
)
SEED = PatternVariable(
    f"{FLAG}_SEED",
    ("none", "an integer"),
    "Gives every request that samples without a seed one made of its prompt, its sampling parameters and this number.",
    r"-?[0-9]+",
)
CANARY = PatternVariable(
    f"{FLAG}_CANARY",
    ("none", "a number of minutes"),
    "Has a server compute the requests of its witness again every so many minutes, and count where bits differ.",
    r"(?=.*[1-9])[0-9]+(\.[0-9]+)?",
)
UNTESTED_VLLM = PatternVariable(
    f"{FLAG}_UNTESTED_VLLM",
    ("none", "a version"),
    "Starts a vLLM of exactly this version that was not tested. It names one, so that the next one is refused again.",
    r"[0-9][0-9A-Za-z.+_-]*|dev",
)
ARITHMETIC = Variable(
    f"{FLAG}_ARITHMETIC",
    ("float", "exact"),
    "Sums of floats in a fixed order, or exact arithmetic: sums of integers, which every machine gives the same bits.",
)
TP_TREE = Variable(
    f"{FLAG}_TP_TREE",
    ("1", "2", "4", "8"),
    "Up to how many tensor-parallel workers have the same bits: what they share is added as a tree of so many slices.",
)
UNTRIED = Variable(
    f"{FLAG}_UNTRIED",
    ("0", "1"),
    "Settings start that are refused for no other reason than that no GPU has run them.",
)
VARIABLES = (
    Variable(FLAG, ("0", "1"), "The mode, for vLLM and this plugin."),
    ARITHMETIC,
    ATTENTION,
    CANARY,
    LINEAR,
    SEED,
    TP_TREE,
    UNTESTED_VLLM,
    UNTRIED,
)


def cache_folder() -> Path:
    """Where measurements and digests are kept: ``$XDG_CACHE_HOME/vllm-batch-invariant``, by default under ``~/.cache``.

    Raises:
        RuntimeError: neither is set, and the user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-batch-invariant"


def enabled() -> bool:
    """Whether the mode is asked for.

    Raises:
        BadSetting: the flag has a value other than 0, 1 or nothing.
    """
    return VARIABLES[0].read() == "1"


def starts_untried() -> bool:
    """Whether what no GPU has run yet is asked for.

    Raises:
        BadSetting: :data:`UNTRIED` has another value than it can have.
    """
    return UNTRIED.read() == "1"


def is_exact() -> bool:
    """Whether exact arithmetic is asked for.

    Raises:
        BadSetting: :data:`ARITHMETIC` has another value than it can have.
    """
    return ARITHMETIC.read() == "exact"


def check_flag() -> None:
    """Refuse a misspelt flag: who sets one believes that the mode is on.

    Raises:
        BadSetting: a variable whose name is almost that of the flag.
    """
    _check([FLAG])


def check_names() -> None:
    """Refuse variables that look like this project's and are not, so that a typing error changes nothing silently.

    Raises:
        BadSetting: an unknown variable, with the nearest known one.
    """
    _check([variable.name for variable in VARIABLES], ours=f"{FLAG}_")


def _check(meant: list[str], ours: str | None = None) -> None:
    """Refuse a variable whose name is almost one of those that may be meant, or begins with ``ours`` and is unknown."""
    known = [variable.name for variable in VARIABLES]
    for name in sorted(os.environ):
        if name in known or not name.upper().startswith("V") or _OF_A_SERVICE.search(name):
            continue
        cutoff = 0 if ours and name.startswith(ours) else _RESEMBLANCE
        if near := difflib.get_close_matches(name.upper(), meant, n=1, cutoff=cutoff):
            raise BadSetting(f"unknown environment variable {name}; did you mean {near[0]}? Known: {', '.join(known)}.")
