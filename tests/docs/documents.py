"""What a document names that does not exist: links, paths, commands, their options, environment variables."""

import argparse
import ast
import io
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from vllm_batch_invariant import cli, envs
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.serve import MODULE as SERVE

ROOT = Path(__file__).parents[2]
SOURCES = ("vllm_batch_invariant", "benchmarks", "examples", "scripts", "tests")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
_OPTIONS_OF_PYTEST = {"-m": True, "-k": True, "-q": False, "-x": False, "--exhaustive": False}
"""Those that documents may use, with whether a value follows."""
_VARIABLES_OF = {"VLLM": "envs.py", "NUMBA": "core/config.py", "TRITON": "knobs.py"}
"""Where a library reads the variables that begin with its name."""


class Parsed(BaseException):
    """A command's arguments are right; it is not run."""


def problems(document: Path, text: str) -> list[str]:
    """Everything wrong with a document, in words; none if all that it names is there."""
    found = [*_links(document, text), *_variables(text)]
    for language, block in blocks(text):
        found += _imports(block) if language == "python" else []
    for line in commands(text):
        found += [f"{line}: {problem}" for problem in of_command(line)]
    for code in _inline(text):
        found += [f"{code}: {problem}" for problem in (*_path(code), *_option(code))]
    return found


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, code) of every fenced block."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> Iterator[str]:
    """Every command of fenced blocks without a language, of workflows, and of the text where it has arguments."""
    for language, block in blocks(text):
        if not language:
            yield from filter(None, block.splitlines())
        if language == "yaml":
            yield from re.findall(r"^ *- run: (.+)$", block, re.MULTILINE)
    yield from (code for code in _inline(text) if len(_words(code)) > 1 and _words(code)[0] in _PROGRAMS)


def of_command(line: str) -> Iterator[str]:
    """What is wrong with a command."""
    words = _words(line)
    if words and words[0] not in _PROGRAMS:
        yield f"{words[0]} is not a program that the documents use"
    elif words:
        yield from _PROGRAMS[words[0]](words[1:])


def help_of(*command: str) -> str:
    """What a command prints for --help."""
    with redirect_stdout(io.StringIO()) as out:
        try:
            cli.main([*command, "--help"])
        except SystemExit:
            return out.getvalue()
    raise AssertionError("--help did not end the command")


def _words(line: str) -> list[str]:
    """The words of a command, without comment and without the variables before it."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a lone quote: prose
        return []
    while words and re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    return words


def _inline(text: str) -> list[str]:
    """What stands between backquotes, outside of blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def _links(document: Path, text: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        place = document.parent / path if path else document
        if not place.exists():
            yield f"a link to {target}, which is not there"
        elif anchor and anchor not in _anchors(text if place == document else place.read_text()):
            yield f"a link to {target}, and there is no such heading"


def _anchors(text: str) -> set[str]:
    """Headings as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _variables(text: str) -> Iterator[str]:
    names = set(re.findall(r"\bVLLM_[A-Z0-9_]*[A-Z0-9]\b", text))
    names |= set(re.findall(r"[`$]([A-Z][A-Z0-9]*_[A-Z0-9_]*[A-Z0-9])\b", text))
    names |= set(re.findall(r"^([A-Z_]+)=", "\n".join(commands(text)), re.MULTILINE))
    for name in sorted(names):
        if name.startswith(envs.FLAG):
            if name not in {variable.name for variable in envs.VARIABLES}:
                yield f"{name} is not a variable of this project"
        elif not re.search(rf"\b{name}\b", _read_by_library(name) + _sources()):
            yield f"{name} is read by nothing"


def _read_by_library(name: str) -> str:
    library = name.partition("_")[0]
    found = find_spec(library.lower()) if library in _VARIABLES_OF else None
    if library in _VARIABLES_OF and found is None:
        return name  # nobody to ask
    return Path(found.origin).parent.joinpath(_VARIABLES_OF[library]).read_text() if found else ""


@cache
def _sources() -> str:
    """All of the project's, without the test that makes names up."""
    paths = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py") if path.name != "test_docs.py"]
    return "\n".join(path.read_text() for path in (ROOT / "Makefile", *paths))


def _imports(block: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(cli.__package__):
            try:
                module = import_module(node.module)
            except NotCovered:  # an extra that is not installed
                module = _definitions(node.module)
            for name in node.names:
                is_module = hasattr(module, "__path__") and find_spec(f"{node.module}.{name.name}") is not None
                if not is_module and not hasattr(module, name.name):
                    yield f"{node.module} has no {name.name}"


def _definitions(module: str) -> SimpleNamespace:
    """What a module's source defines."""
    nodes = ast.parse(ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text()).body
    return SimpleNamespace(**{node.name: node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)})


def _path(code: str) -> Iterator[str]:
    if not re.fullmatch(r"[\w.{},*/-]+/[\w.{},*-]*(\.py|\.md|\.sh|/)", code):
        return
    parts = [part.split(",") for part in re.split(r"[{}]", code)]
    for path in map("".join, product(*parts)):
        if not any(any(root.glob(path)) for root in (ROOT, ROOT / cli.__package__)):
            yield f"there is no {path}"


def _option(code: str) -> Iterator[str]:
    if code.startswith("--"):
        name = re.match(r"--[\w-]+", code)
        if name and name[0] not in _options_of_project() | {"--help"}:
            yield from _vllm_options([name[0]])


@cache
def _options_of_project() -> set[str]:
    return set(re.findall(r'"(--[a-z][a-z-]+)"', _sources()))


def _vllm_options(words: list[str]) -> Iterator[str]:
    known = _options_of_vllm()
    for word in words:
        name = word.partition("=")[0]
        if known and name.startswith("--") and not {name, name.replace("--no-", "--", 1)} & known:
            yield f"vLLM has no option {name}"


@cache
def _options_of_vllm() -> set[str]:
    """Names of options and of the fields that vLLM makes options of, by reading; none where vLLM is not installed."""
    found = find_spec("vllm")
    if found is None:
        return set()
    package = Path(found.origin).parent
    files = (package / "engine" / "arg_utils.py", *package.glob("entrypoints/**/cli_args.py"))
    text = "\n".join(file.read_text() for file in files)
    fields = re.findall(r"^    ([a-z_0-9]+):", text, re.MULTILINE)
    return {*re.findall(r'"(--[a-z][a-z-]+)"', text), *(f"--{field.replace('_', '-')}" for field in fields)}


def _by_its_parser(main: Callable[..., object], arguments: list[str]) -> Iterator[str]:
    """Parse the arguments as the command would, and do nothing else."""
    parse = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, args: object = None, namespace: object = None) -> None:
        parse(self, args, namespace)
        raise Parsed

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args),
        mock.patch.object(subprocess, "Popen", side_effect=AssertionError("a program was started before parsing")),
        mock.patch.object(sys, "argv", ["command", *arguments]),
        redirect_stderr(io.StringIO()) as errors,
    ):
        try:
            main()
        except Parsed:
            pass
        except SystemExit:
            yield errors.getvalue().strip().splitlines()[-1]
        else:
            yield "it does not parse its arguments"
    for word in arguments:
        if word.startswith("--serve-args="):
            yield from _vllm_options(shlex.split(word.partition("=")[2]))


def _cli(words: list[str]) -> Iterator[str]:
    if words[0] not in cli.COMMANDS:
        yield f"there is no command {words[0]}"
    elif len(words) > 1:  # the name alone is a mention
        yield from _by_its_parser(lambda: cli.main(words), words[1:])


def _python(words: list[str]) -> Iterator[str]:
    if words[0] != "-m":
        if not (ROOT / words[0]).is_file():
            yield f"there is no {words[0]}"
            return
        module, arguments = words[0].removesuffix(".py").replace("/", "."), words[1:]
    else:
        module, arguments = words[1], words[2:]
    if module == "pytest":
        yield from _pytest(arguments)
        return
    top = module.partition(".")[0]
    file = ROOT if top in SOURCES else Path(getattr(find_spec(top), "origin", None) or ROOT).parents[1]
    place = file.joinpath(*module.split("."))
    if (place / "__main__.py").is_file():
        module, place = f"{module}.__main__", place / "__main__"
    if not place.with_suffix(".py").is_file():
        yield f"there is no module {module}"
    elif top == "vllm" or module == SERVE:
        yield from _vllm_options(arguments)
    elif arguments or top != "benchmarks":  # most benchmarks need an argument: the name alone is a mention
        yield from _by_its_parser(import_module(module).main, arguments)


def _uv(words: list[str]) -> Iterator[str]:
    if words[0] != "pip":
        yield f"uv {words[0]} is not known here"
    yield from _pip(words[1:])


def _pytest(words: list[str]) -> Iterator[str]:
    markers = {marker.partition(":")[0] for marker in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    left = iter(words)
    for word in left:
        if not word.startswith("-"):
            if not (ROOT / word.partition("::")[0]).exists():
                yield f"there is no {word}"
        elif word not in _OPTIONS_OF_PYTEST:
            yield f"the option {word} is not known here"
        elif _OPTIONS_OF_PYTEST[word]:
            value = next(left)
            if word == "-m":
                yield from (f"no marker {m}" for m in set(re.findall(r"\w+", value)) - markers - {"not", "and", "or"})


def _make(words: list[str]) -> Iterator[str]:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_variable, _ = word.partition("=")
        if not re.search(rf"^{re.escape(name)} ?{'[?]?=' if is_variable else ':'}", makefile, re.MULTILINE):
            yield f"the Makefile has no {name}"


def _pip(words: list[str]) -> Iterator[str]:
    for word in words if words[0] == "install" else ():
        package, _, extra = word.rstrip("]").partition("[")
        if package == PROJECT["project"]["name"]:
            yield f"no index has {package}: install it from the checkout, as '.'"
        if package == "." and extra:
            missing = set(extra.split(",")) - PROJECT["project"]["optional-dependencies"].keys()
            yield from (f"this project has no extra {name}" for name in missing)


def _git(words: list[str]) -> Iterator[str]:
    if words[0] != "clone":
        yield f"git {words[0]} is not known here"
    yield from (f"{word} is an address, and the project has none" for word in words if "://" in word)


def _source(words: list[str]) -> Iterator[str]:
    venv = re.search(r"^VENV \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    if words != [f"{venv}/bin/activate"]:
        yield f"make install makes {venv}, not {' '.join(words)}"


_PROGRAMS: dict[str, Callable[[list[str]], Iterable[str]]] = {
    "uv": _uv,
    "vllm-batch-invariant": _cli,
    "python": _python,
    "pytest": _pytest,
    "make": _make,
    "pip": _pip,
    "git": _git,
    "pre-commit": lambda words: () if words == ["install"] else (f"pre-commit {words[0]} is not known here",),
    ".": _source,
    "cd": lambda _: (),
    "vllm": lambda words: _vllm_options(words[1:]),
}
