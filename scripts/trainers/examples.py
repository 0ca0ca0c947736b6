"""What all trainers' readers share: a mirror's files, defaults in Python sources, a configuration that was found."""

import ast
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from .shell import UNKNOWN, Script


class Unread(Exception):
    """An example whose rollout configuration is not in its files, and why."""


@dataclass
class Configuration:
    """The rollout of one example.

    Attributes:
        script: its path in the trainer's repository; where a file has several, with what tells them apart.
        model: Hugging Face's name of the model, or the folder's where it is a folder; empty if it was not read.
        engine: "vllm", or the other engine that it asks for.
        arguments: of vLLM's ``EngineArgs``, but for the model.
        variables: of the environment, vLLM's alone: those that the script exports and that the trainer sets.
        unread: why there are no arguments; empty if there are.
    """

    script: str
    model: str = ""
    engine: str = "vllm"
    arguments: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    unread: str = ""

    @property
    def gpus(self) -> int:
        """Of one replica."""
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        product = 1
        for size in sizes:
            product *= int(self.arguments.get(size) or 1)
        return product


class Mirror:
    """A git repository that is read without a work tree.

    Args:
        folder: the git directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _git(self, *arguments: str) -> str:
        command = ["git", f"--git-dir={self._folder}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    @cached_property
    def commit(self) -> str:
        """The one that is read, in ten digits."""
        return self._git("rev-parse", "--short=10", "HEAD").strip()

    @cached_property
    def date(self) -> str:
        """Of the commit: year, month, day."""
        return self._git("log", "-1", "--format=%cs", "HEAD").strip()

    @cached_property
    def _paths(self) -> list[str]:
        return self._git("ls-tree", "-r", "--name-only", "HEAD").splitlines()

    def paths(self, folder: str, *endings: str) -> list[str]:
        """Of files in a folder, by the ends of their names."""
        return [path for path in self._paths if path.startswith(folder) and path.endswith(endings)]

    def text(self, path: str) -> str:
        """A file's text.

        Raises:
            Unread: the mirror does not have it.
        """
        try:
            return self._git("show", f"HEAD:{path}")
        except subprocess.CalledProcessError as error:
            raise Unread(f"the mirror has no {path}") from error


def defaults(source: str, name: str) -> dict[str, Any]:
    """The defaults of a dataclass or a model of pydantic's, by reading: literals alone, and None for an expression."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {
                statement.target.id: _literal(statement.value)
                for statement in node.body
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value
            }
    raise Unread(f"there is no class {name}")


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):  # field(default=...), Field(...)
        named = {word.arg: word.value for word in node.keywords}
        inner = named.get("default", node.args[0] if node.args else None)
        return None if inner is None else _literal(inner)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def nested(overrides: list[str]) -> dict[str, Any]:
    """Overrides such as ``+a.b=1`` as dictionaries in each other. A value that only the machine knows stays a text."""
    found: dict[str, Any] = {}
    for override in overrides:
        name, sign, text = override.partition("=")
        if sign and not name.startswith(("-", "~")):
            put(found, name.lstrip("+"), parsed(text))
    return found


def put(into: dict[str, Any], name: str, value: Any) -> None:
    """Set the entry of a dotted name."""
    *path, last = name.split(".")
    for part in path:
        inner = into.setdefault(part, {})
        if not isinstance(inner, dict):
            inner = into[part] = {}
        into = inner
    into[last] = value


def parsed(text: str) -> Any:
    """A value of an override, as YAML reads it."""
    if UNKNOWN in text:
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def at(tree: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """The entry of a dotted name."""
    found: Any = tree
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return default
        found = found[part]
    return found


def known_model(text: Any) -> str:
    """A model's name: as Hugging Face has it, or the folder's where it is a folder.

    Raises:
        Unread: neither is in the script.
    """
    name = str(text or "").rstrip("/")
    if name.startswith(("/", "~", UNKNOWN, ".")) or name.count("/") > 1:
        name = name.rpartition("/")[2]
    if not name or UNKNOWN in name:
        raise Unread("the model is not in the script")
    return name


def exported(script: Script) -> dict[str, str]:
    """vLLM's variables that a script exports.

    Raises:
        Unread: one depends on the machine.
    """
    found = {name: str(script.variables[name]) for name in script.environment if name.startswith("VLLM_")}
    check_known(found)
    return found


def check_known(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of which a value is not known.

    Raises:
        Unread: the first one.
    """
    for name, value in arguments.items():
        if any(UNKNOWN in text for text in _texts(value)):
            raise Unread(f"{name} depends on the machine")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
