"""Variants of kernels that are compiled only where what is asked of them is not known.

A variant's key is the digest of what Triton's front end makes of its source for its arguments (the first IR, without
positions and names), of the options and of Triton's version: of all that the rest of the compiler gets. So a change of
a helper or a constant in any module changes it, and a comment, a rename or a line that moves do not. Triton's own
``cache_key`` follows the text and its line instead, and no plain constant that a ``constexpr_function`` reads.
"""

import ast
import hashlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from vllm_batch_invariant.sources import syntax

_FINDERS = "finders"
_compile = triton.compiler.compile
_DEFINED = re.compile(r"\b(?:tt|ttg)\.func\b[^@\n]*(@\"[^\"\n]*\"|@[\w.$-]+)")


class Variant:
    """What a launch has compiled, before it is: in the place of Triton's ``CompiledKernel``."""

    def __init__(self, src: Any, target: GPUTarget, options: dict[str, Any]) -> None:
        self.src, self._target, self._options = src, target, options
        self.key = key(first_ir(src, target, options), target, options)

    @cached_property
    def compiled(self) -> Any:
        """Triton's kernel. Whatever Triton raises is raised here."""
        return _compile(self.src, target=self._target, options=self._options)

    @property
    def metadata(self) -> Any:
        return self.compiled.metadata

    @property
    def asm(self) -> Any:
        return self.compiled.asm


def compile_when_asked() -> None:
    """From now on launches make variants, which are compiled when somebody looks at what they are."""
    triton.compiler.compile = lambda src, target, options, **_: Variant(src, target, options)


class _Made(BaseException):
    """Ends a compilation after the front end; no ``except Exception`` of the compiler takes it for an error."""


def first_ir(src: Any, target: GPUTarget, options: dict[str, Any]) -> str:
    """What Triton's front end makes of a kernel, without positions in the source."""

    def made(*arguments: Any) -> None:
        raise _Made(make_ir(*arguments).str_nodebug())

    make_ir, src.make_ir = src.make_ir, made
    try:
        with triton.knobs.compilation.scope():
            triton.knobs.compilation.always_compile = True
            _compile(src, target=target, options=options)
    except _Made as ended:
        return ended.args[0]
    finally:
        del src.make_ir
    raise RuntimeError("Triton compiled a kernel without its front end")


def key(ir: str, target: GPUTarget, options: dict[str, Any]) -> str:
    """Of a variant: 16 hexadecimal digits."""
    backend = make_backend(target)
    of_compiler = triton.__version__, backend.hash(), backend.parse_options(dict(options)).hash()
    return hashlib.sha256("\0".join((*of_compiler, without_names(ir))).encode()).hexdigest()[:16]


def without_names(ir: str) -> str:
    """IR whose functions are numbered in their order, because their names have those of modules."""
    numbers = {name: f"@{number}" for number, name in enumerate(dict.fromkeys(_DEFINED.findall(ir)))}
    return re.sub(r"@\"[^\"\n]*\"|@[\w.$-]+", lambda found: numbers.get(found[0], found[0]), ir)


def _syntax_of(code: Sequence[Any]) -> str:
    trees = (ast.parse(textwrap.dedent(inspect.getsource(one))) for one in code)
    return hashlib.sha256("".join(map(syntax, trees)).encode()).hexdigest()[:16]


class Outcomes:
    """What variants were seen to be, by their keys: a file of JSON, with a line for each.

    Args:
        path: of the file; None to find everything.
        finds: the classes and functions that find what variants are: others may find something else.
        anew: find everything even so, to compare it with the file.
    """

    def __init__(self, path: Path | None = None, finds: Sequence[Any] = (), anew: bool = False) -> None:
        self._path, self._finders, self._anew = path, _syntax_of(finds), anew
        there = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self._known: dict[str, dict[str, Any]] = there if there.pop(_FINDERS, None) == self._finders else {}
        self._used: dict[str, dict[str, Any]] = {}
        self.compiled: set[str] = set()
        """Keys of variants that were not known, or not in all."""

    def of(self, variant: Any, name: str, what: str, find: Callable[[], Any]) -> Any:
        """One property of a variant, looked up or found; of a kernel that is compiled already always found."""
        if not isinstance(variant, Variant):
            return find()
        found = self._used.setdefault(variant.key, {"kernel": name})
        if what not in found:
            known = {} if self._anew else self._known.get(variant.key, {})
            if what not in known:
                self.compiled.add(variant.key)
            found[what] = known[what] if what in known else json.loads(json.dumps(find()))
        return found[what]

    @property
    def wrong(self) -> list[str]:
        """What the file says of variants and is not what was found."""
        both = [(each, self._known[each], found) for each, found in self._used.items() if each in self._known]
        return [
            f"{found['kernel']} ({each}): {what} is {found[what]}, not {said[what]}"
            for each, said, found in both
            for what in said.keys() & found.keys()
            if said[what] != found[what]
        ]

    @property
    def counted(self) -> int:
        """How many variants were asked for."""
        return len(self._used)

    def write(self) -> None:
        """Keep what was asked for, and nothing else."""
        assert self._path is not None
        content = {_FINDERS: self._finders} | dict(sorted(self._used.items()))
        lines = (f"{json.dumps(each)}: {json.dumps(found, sort_keys=True)}" for each, found in content.items())
        self._path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
