"""What the methods of a model's own classes call, read from their sources without importing them.

Objects are judged where they enter: a name is what a module imports, defines or assigns, and passes if it is PyTorch's
(but for operations that the mode leaves alone), Python's, or in ``reviews/calls.toml``. Functions and
classes of the models' own packages are followed to what they call in turn; a layer's class passes, because each layer
of a loaded model is looked at by itself. What a name gives (its results, their attributes and methods) passes with it:
whoever read the name answers for it. Everything else is found, and that includes names that cannot be resolved.
"""

import ast
import builtins
import importlib.util
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import torch

from .. import reviews

MODELS = ("vllm.model_executor.models.", "vllm.models.", "transformers.")
"""Packages of models' own classes."""
FOLLOWED = ("vllm.model_executor.models.", "vllm.models.", "transformers.models.", "transformers.activations.")
"""Those whose functions are followed."""
PYTORCH = ("torch", "torch.nn", "torch.nn.functional", "torch.nn.init", "torch.nn.parameter", "torch.nn.modules")
"""Modules of PyTorch whose public names the mode replaces or may leave as they are."""
_KINDS = (torch.Tensor, torch.nn.Module, torch.nn.ModuleList, torch.nn.ModuleDict, torch.Generator)
_CONTAINERS = (dict, list, tuple, set, frozenset, str, bytes, int, float, re.Pattern, re.Match)
_METHODS = frozenset(name for kind in (*_KINDS, *_CONTAINERS) for name in dir(kind))
"""Names of methods of tensors, layers, and of Python's containers."""
OTHERS = re.compile(
    r"_?load_(moe_expert_)?weights|get_expert_mapping"  # of weights
    r"|(embed_multimodal|get_multimodal|get_mm|get_num_mm|get_max_frames|get_placeholder_str|register_processor)"
    r"|_?(parse_and_validate|process|postprocess)_(image|video|audio|multimodal)"
    r"|\w*encoder_(cudagraph|eager)|_?recompute_mrope|_get_expanded_positions|_create_final_video"
    r"|get_(speech_to_text|generation_prompt|language_token|language_detection|num_audio)|parse_language_"
)
"""How the names of methods begin that compute nothing for a request of text: they load weights, encode what is refused,
or make prompts of recordings. No other method may use them.
"""


@dataclass(frozen=True)
class Called:
    """A name that a function calls, or hands on, and that must not pass."""

    function: str
    """"Class.method", or the function's name."""
    name: str
    """With its module."""


@dataclass(frozen=True)
class Imported:
    """What an ``import`` binds: a module, or with ``name`` what it has under that."""

    module: str
    name: str | None = None


Binding = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr | Imported | None
"""What a name stands for; None for what only running tells."""


class Module:
    """The syntax tree of a module."""

    def __init__(self, name: str, source: str, *, is_package: bool) -> None:
        self.name = name
        self.package = name if is_package else name.rpartition(".")[0]
        self.tree = ast.parse(source)

    @cached_property
    def names(self) -> dict[str, list[Binding]]:
        """What each name at its top level may stand for, in any condition; "*" for what it has all names of."""
        return bindings(self.tree.body, self.package)


class Sources:
    """Modules by their names, each read once.

    Args:
        read: the source of a module and whether it is a package, or None.
    """

    def __init__(self, read: Callable[[str], tuple[str, bool] | None]) -> None:
        self._read = read
        self._modules: dict[str, Module | None] = {}

    def get(self, name: str) -> Module | None:
        """A module, if there is one."""
        if name not in self._modules:
            found = self._read(name)
            self._modules[name] = Module(name, found[0], is_package=found[1]) if found else None
        return self._modules[name]

    @classmethod
    def installed(cls) -> "Sources":
        """Those that this process would import, or has imported."""
        return cls(installed)


def _folders(name: str) -> list[Path]:
    """Where a module's file may lie."""
    package = name.rpartition(".")[0]
    if not package:
        spec = importlib.util.find_spec(name)
        return [Path(spec.origin).parent.parent] if spec and spec.submodule_search_locations and spec.origin else []
    if package in sys.modules:
        return [Path(folder) for folder in getattr(sys.modules[package], "__path__", ())]
    last = package.rpartition(".")[2]
    return [folder / last for folder in _folders(package)]


def installed(name: str) -> tuple[str, bool] | None:
    """The source of a module that this process would import, and whether it is a package."""
    last = name.rpartition(".")[2]
    for folder in _folders(name):
        for file, is_package in ((folder / last / "__init__.py", True), (folder / f"{last}.py", False)):
            if file.is_file():
                return file.read_text(), is_package
    return None


def bindings(body: list[ast.stmt], package: str) -> dict[str, list[Binding]]:
    """What each name that statements bind may stand for, but for those bound in functions and classes inside.

    Args:
        package: what imports that begin with a dot are relative to.
    """
    found: dict[str, list[Binding]] = {}

    def bind(name: str, value: Binding) -> None:
        found.setdefault(name, []).append(value)

    def assign(target: ast.expr, value: ast.expr | None) -> None:
        match target:
            case ast.Name(id=name):
                bind(name, value)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                values = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(targets) else None
                for place, inside in enumerate(targets):
                    assign(inside, values[place] if values else value)
            case ast.Starred(value=inside):
                assign(inside, value)

    def walk(node: ast.AST) -> None:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bind(name, node)
                return
            case ast.Lambda():
                return
            case ast.Import(names=names):
                for alias in names:
                    bind(
                        alias.asname or alias.name.partition(".")[0],
                        Imported(alias.name if alias.asname else alias.name.partition(".")[0]),
                    )
            case ast.ImportFrom(module=module, names=names, level=level):
                parts = package.split(".")
                base = ".".join(parts[: len(parts) - level + 1]) if level else ""
                origin = ".".join(part for part in (base, module) if part)
                for alias in names:
                    bind("*" if alias.name == "*" else alias.asname or alias.name, Imported(origin, alias.name))
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    assign(target, value)
            case ast.AnnAssign(target=target, value=value) if value is not None or isinstance(target, ast.Name):
                assign(target, value)
            case ast.NamedExpr(target=target, value=value) | ast.AugAssign(target=target, value=value):
                assign(target, value)
            case ast.For(target=target) | ast.AsyncFor(target=target):
                assign(target, None)
            case ast.withitem(optional_vars=ast.expr() as target):
                assign(target, None)
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                bind(name, None)
            case ast.MatchMapping(rest=str(name)):
                bind(name, None)
            case ast.comprehension():  # its targets are names of its own
                for inside in (node.iter, *node.ifs):
                    walk(inside)
                return
        for child in ast.iter_child_nodes(node):
            walk(child)

    for statement in body:
        walk(statement)
    return found


def defines_a_layer(sources: Sources, module: Module, values: list[Binding]) -> bool:
    """Whether one of the things that a name of a module stands for is a class of layers that the module defines."""
    return any(Walk(sources).is_layer(module, value) for value in values if isinstance(value, ast.ClassDef))


@dataclass
class Walk:
    """Follows what classes and functions call."""

    sources: Sources
    seen: set[Any] = field(default_factory=set)
    found: dict[Called, None] = field(default_factory=dict)
    open: set[Any] = field(default_factory=set)
    """What is being judged: modules import from each other in circles."""

    def of_class(self, module: str, name: str) -> list[Called]:
        """What the methods of a class of a model must not call; empty if there is nothing.

        Args:
            module: that has it.
            name: its qualified name, with "<locals>" for the class of a function.
        """
        place = self.sources.get(module)
        kinds = list(_definitions(place.tree.body, name.split("."))) if place else []
        if place is None or not kinds:
            return [Called(name, f"what {module} has no source of")]
        before = len(self.found)
        for *functions, kind in kinds:
            if isinstance(kind, ast.ClassDef):
                reader = _Reader(self, place, kind.name)
                reader.scopes = [_local_names(function, place.package) for function in functions]
                reader.read_class(kind)
        return list(self.found)[before:]

    def _class(self, module: Module, kind: ast.ClassDef) -> None:
        if self._is_new(module, kind):
            _Reader(self, module, kind.name).read_class(kind)

    def function(self, module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> None:
        """Follow a function."""
        if self._is_new(module, node):
            _Reader(self, module, name).visit(node)

    def value(self, module: Module, name: str, value: ast.expr) -> None:
        """Follow what a module assigns to a name."""
        if self._is_new(module, value):
            _Reader(self, module, name).visit(value)

    def _is_new(self, module: Module, node: ast.stmt | ast.expr) -> bool:
        key = module.name, node.lineno, node.col_offset, type(node)
        new = key not in self.seen
        self.seen.add(key)
        return new

    def judge(self, function: str, binding: Binding, module: Module, name: str, attributes: tuple[str, ...]) -> None:
        """Judge what a name of a module stands for, with the attributes that are read of it."""
        key = module.name, name, id(binding)
        if _is_own(module.name) or reviews.calls().have(module.name, name, attributes) or key in self.open:
            return
        self.open.add(key)
        self._judge(function, binding, module, name, attributes)
        self.open.discard(key)

    def _judge(self, function: str, binding: Binding, module: Module, name: str, attributes: tuple[str, ...]) -> None:
        dotted = f"{module.name}.{name}"
        followed = f"{module.name}.".startswith(FOLLOWED)
        match binding:
            case Imported():
                self.imported(function, binding, attributes)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if followed:
                self.function(module, binding, name)
            case ast.ClassDef() if attributes and (members := self._members(module, binding, attributes[0])):
                for place, kind, member in members:
                    self.judge(function, member, place, f"{kind.name}.{attributes[0]}", attributes[1:])
            case ast.ClassDef() if self.is_layer(module, binding):
                if attributes and not attributes[0].startswith("__"):
                    self.tell(function, ".".join((dotted, *attributes)))
            case ast.ClassDef() if followed:
                self._class(module, binding)
            case ast.expr() if chain := _chain(binding):
                self.name(function, module, chain[0], (*chain[1], *attributes))
            case ast.expr() if followed:
                self.value(module, name, binding)
            case _:
                self.tell(function, ".".join((dotted, *attributes)))

    def imported(self, function: str, what: Imported, attributes: tuple[str, ...]) -> None:
        """Judge what an import binds."""
        module, place, parts = self._place_of(what, attributes)
        if module is None:
            self._foreign(function, (*place.split("."), *parts))
        elif not parts:
            self.tell(function, f"the module {place}")
        else:
            self.name(function, module, parts[0], parts[1:])

    def _place_of(self, what: Imported, attributes: tuple[str, ...]) -> tuple[Module | None, str, tuple[str, ...]]:
        """The module that has what an import binds, if its source is read; its name, and the names below."""
        parts = (what.name, *attributes) if what.name else attributes
        place, module = what.module, self.sources.get(what.module) if _has_source(what.module) else None
        while parts and module and parts[0] not in module.names:
            below = self.sources.get(f"{place}.{parts[0]}")
            if below is None:
                break
            place, module, parts = below.name, below, parts[1:]
        return module, place, parts

    def name(self, function: str, module: Module, name: str, attributes: tuple[str, ...]) -> None:
        """Judge a name at the top level of a module."""
        if name in module.names:
            for binding in module.names[name]:
                self.judge(function, binding, module, name, attributes)
        elif _is_own(module.name) or reviews.calls().have(module.name, name, attributes):
            return
        elif stars := [star for star in module.names.get("*", ()) if self._has(star, name)]:
            for star in stars:
                self.imported(function, Imported(star.module, name), attributes)
        elif hasattr(builtins, name):
            if name in reviews.calls().built_in:
                self.tell(function, name)
        else:
            self.tell(function, ".".join((module.name, name, *attributes)))

    def _has(self, star: Binding, name: str) -> TypeGuard[Imported]:
        """Whether a module that another has all names of has one."""
        open_ = [star]
        for inside in open_:
            module = (
                self.sources.get(inside.module) if isinstance(inside, Imported) and _has_source(inside.module) else None
            )
            if module and name in module.names:
                return True
            open_ += [other for other in module.names.get("*", ()) if other not in open_] if module else []
        return False

    def _foreign(self, function: str, parts: tuple[str, ...]) -> None:
        """Judge a name of a package whose source is not read: PyTorch's, Python's, others'."""
        module, name = ".".join(parts[:-1]), parts[-1]
        if any(reviews.calls().have(".".join(parts[:n]), parts[n], parts[n + 1 :]) for n in range(1, len(parts))):
            return
        if parts[0] == "torch":
            passes = _is_pytorch(parts)
        else:
            passes = parts[0] in sys.stdlib_module_names and parts[0] not in reviews.calls().modules
        if not passes:
            self.tell(function, f"{module}.{name}" if module else f"the module {name}")

    def _members(self, module: Module, kind: ast.ClassDef, name: str) -> list[tuple[Module, ast.ClassDef, Binding]]:
        """What a class of a model has under a name, or inherits, with the class that has it and its module."""
        if not f"{module.name}.".startswith(FOLLOWED):
            return []
        if found := bindings(kind.body, module.package).get(name):
            return [(module, kind, member) for member in found]
        return [
            member
            for place, base in self._bases(module, kind)
            if isinstance(base, ast.ClassDef)
            for member in self._members(place, base, name)
        ]

    def _bases(self, module: Module, kind: ast.ClassDef) -> Iterator[tuple[Module, ast.ClassDef | tuple[str, ...]]]:
        for base in kind.bases:
            if chain := _chain(base):
                yield from self._classes(module, chain[0], chain[1])

    def _classes(
        self, module: Module, name: str, attributes: tuple[str, ...], before: tuple[tuple[str, str], ...] = ()
    ) -> Iterator[tuple[Module, ast.ClassDef | tuple[str, ...]]]:
        """The classes that a name may stand for; of packages whose source is not read their names."""
        if (module.name, name) in before:
            return
        before = *before, (module.name, name)
        for binding in module.names.get(name, ()):
            match binding:
                case ast.ClassDef():
                    yield module, binding
                case Imported():
                    yield from self._imported_classes(module, binding, attributes, before)
                case ast.expr() if chain := _chain(binding):
                    yield from self._classes(module, chain[0], (*chain[1], *attributes), before)

    def _imported_classes(
        self, module: Module, what: Imported, attributes: tuple[str, ...], before: tuple[tuple[str, str], ...] = ()
    ) -> Iterator[tuple[Module, ast.ClassDef | tuple[str, ...]]]:
        place, origin, parts = self._place_of(what, attributes)
        if place is None:
            yield module, (*origin.split("."), *parts)
        elif parts and not (parts[1:] and reviews.calls().have(place.name, parts[0], parts[1:])):
            yield from self._classes(place, parts[0], parts[1:], before)

    def makes_a_layer(self, module: Module, binding: Binding, name: str, attributes: tuple[str, ...]) -> bool:
        """Whether a name that is called is a class of modules: what it stands for in a function, or in a module."""
        if isinstance(binding, Imported):
            kinds = self._imported_classes(module, binding, attributes)
        else:
            kinds = self._classes(module, name, attributes)
        return any(self._is_layer(place, kind) for place, kind in kinds)

    def is_layer(self, module: Module, kind: ast.ClassDef) -> bool:
        """Whether a class is one of modules."""
        return any(self._is_layer(place, base) for place, base in self._bases(module, kind))

    def _is_layer(self, module: Module, kind: ast.ClassDef | tuple[str, ...]) -> bool:
        if isinstance(kind, ast.ClassDef):
            return self.is_layer(module, kind)
        found = _of_pytorch(kind)
        return isinstance(found, type) and issubclass(found, torch.nn.Module)

    def tell(self, function: str, name: str) -> None:
        """Note a name that must not pass."""
        self.found[Called(function, name)] = None


class _Reader(ast.NodeVisitor):
    """Reads the expressions of one function, class or value, with what its local names stand for."""

    def __init__(self, walk: Walk, module: Module, function: str) -> None:
        self.walk, self.module, self.function = walk, module, function
        self.scopes: list[dict[str, list[Binding]]] = []

    def read_class(self, kind: ast.ClassDef) -> None:
        """A class: its decorators, what it inherits from, its attributes and methods."""
        decorators = [_without_processors(decorator) for decorator in kind.decorator_list]
        for expression in (*decorators, *(keyword.value for keyword in kind.keywords)):
            self.visit(expression)
        for base in kind.bases:  # a layer's class is looked at with the layer
            self.visit(base)
        of_class = bindings(kind.body, self.module.package)
        for statement in kind.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                if OTHERS.match(statement.name):
                    continue
                for expression in (*statement.decorator_list, *_defaults(statement.args)):
                    self._in(of_class, expression)
                reader = _Reader(self.walk, self.module, f"{kind.name}.{statement.name}")
                reader.scopes = list(self.scopes)
                reader.in_function(statement)
            else:
                self._in(of_class, statement)

    def _in(self, scope: dict[str, list[Binding]], node: ast.AST) -> None:
        self.scopes.append(scope)
        self.visit(node)
        self.scopes.pop()

    def in_function(self, node: "Function") -> None:
        """The body of a function."""
        self.scopes.append(_local_names(node, self.module.package))
        for statement in _body(node):
            self.visit(statement)
        self.scopes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for expression in (*node.decorator_list, *_defaults(node.args)):
            self.visit(expression)
        self.in_function(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for expression in _defaults(node.args):
            self.visit(expression)
        self.in_function(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.read_class(node)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        targets: dict[str, list[Binding]] = {
            name.id: [None]
            for generator in node.generators
            for name in ast.walk(generator.target)
            if isinstance(name, ast.Name)
        }
        first, *_ = node.generators
        self.visit(first.iter)
        self.scopes.append(targets)
        for generator in node.generators:
            for inside in (generator.iter, *generator.ifs):
                if inside is not first.iter:
                    self.visit(inside)
        for result in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(result)
        self.scopes.pop()

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.target)
        if node.value:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[of, ast.Constant(value=str(name)), *others]):
                self.visit(ast.copy_location(ast.Attribute(of, name, ast.Load()), node))
                for other in others:
                    self.visit(other)
            case ast.Call(func=ast.Name(id="getattr" | "vars"), args=[of, *_]) if self._is_outside(of):
                self.walk.tell(self.function, f"an attribute of {ast.unparse(of)} by its name")
            case ast.Call(func=ast.Name(id="vars"), args=[of]):
                self.visit(of)
            case ast.Call(func=ast.Attribute() as method) if self._is_unknown(method):
                self.walk.tell(self.function, ast.unparse(method))
                self.generic_visit(node)
            case _:
                self.generic_visit(node)
        if self._layer_is_called(node):
            self.walk.tell(self.function, f"{ast.unparse(node.func)}, a layer that no model holds")

    def _layer_is_called(self, node: ast.Call) -> bool:
        """Whether a layer is made where it is called, so that nobody looks at it: at once, or while a model runs."""
        made = node.func.func if isinstance(node.func, ast.Call) else node.func
        if made is node.func and not self.function.endswith(".forward"):
            return False
        chain = _chain(made)
        scope = next((scope for scope in reversed(self.scopes) if chain and chain[0] in scope), None)
        if chain is None:
            return False
        bindings_ = scope[chain[0]] if scope else [None]
        if scope and not any(isinstance(binding, Imported) for binding in bindings_):
            return False
        return any(self.walk.makes_a_layer(self.module, binding, *chain) for binding in bindings_)

    def _is_unknown(self, method: ast.Attribute) -> bool:
        """Whether a method of what a local name stands for, or of what was given, is none that is known."""
        match method.value:
            case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
                return False  # its own, or a layer that it holds
        chain = _chain(method)
        if chain is not None:
            owners = [scope[chain[0]] for scope in self.scopes if chain[0] in scope]
            if not owners or any(isinstance(binding, Imported) for binding in owners[-1]):
                return False  # judged by its name
        return method.attr not in _METHODS and method.attr not in reviews.calls().methods

    def _is_outside(self, node: ast.expr) -> bool:
        """Whether an expression begins with a name from outside the function."""
        chain = _chain(node)
        return chain is not None and not any(chain[0] in scope for scope in self.scopes)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        inside = node.value
        attributes: tuple[str, ...] = (node.attr,)
        while isinstance(inside, ast.Attribute):
            attributes, inside = (inside.attr, *attributes), inside.value
        for name in attributes:
            if name in reviews.calls().operations:
                self.walk.tell(self.function, name)
                return
        if isinstance(inside, ast.Name) and inside.id in ("self", "cls") and OTHERS.match(attributes[0]):
            self.walk.tell(self.function, f"{inside.id}.{attributes[0]}")
        if isinstance(inside, ast.Name):
            self._name(inside.id, attributes)
        else:
            self.visit(inside)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._name(node.id, ())

    def _name(self, name: str, attributes: tuple[str, ...]) -> None:
        for scope in reversed(self.scopes):
            if name in scope:
                for binding in scope[name]:
                    if isinstance(binding, Imported):
                        self.walk.imported(self.function, binding, attributes)
                return  # what a local name is bound to is read where that is written
        self.walk.name(self.function, self.module, name, attributes)


Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def _body(function: Function) -> list[ast.stmt]:
    return [ast.Expr(function.body)] if isinstance(function, ast.Lambda) else function.body


def _local_names(function: Function, package: str) -> dict[str, list[Binding]]:
    """What the names that a function binds stand for."""
    body, given = _body(function), function.args
    own = bindings(body, package)
    for statement in body:
        for inside in ast.walk(statement):
            for name in inside.names if isinstance(inside, ast.Global) else ():
                own.pop(name, None)
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    for argument in arguments:
        if argument:
            own.setdefault(argument.arg, []).append(None)
    return own


def _definitions(body: list[ast.stmt], name: list[str]) -> Iterator[tuple[Any, ...]]:
    """The functions and classes that have a qualified name, each after the functions around it."""
    first, *others = (part for part in name if part != "<locals>")
    open_: list[ast.AST] = list(body)
    for node in open_:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == first and not others:
                yield (node,)
            elif node.name == first:
                around = () if isinstance(node, ast.ClassDef) else (node,)
                yield from ((*around, *found) for found in _definitions(node.body, others))
        else:
            open_ += ast.iter_child_nodes(node)


def _without_processors(decorator: ast.expr) -> ast.expr:
    """A decorator of a class without the classes that it registers to process images and the like on the host."""
    match decorator:
        case ast.Call(func=ast.Attribute(attr="register_processor") as register):
            return register
    return decorator


def _defaults(arguments: ast.arguments) -> Iterator[ast.expr]:
    yield from arguments.defaults
    yield from (value for value in arguments.kw_defaults if value)


def _chain(node: ast.expr) -> tuple[str, tuple[str, ...]] | None:
    """A name and the attributes that are read of it; None for other expressions."""
    attributes: tuple[str, ...] = ()
    while isinstance(node, ast.Subscript):
        node = node.value
    while isinstance(node, ast.Attribute):
        attributes, node = (node.attr, *attributes), node.value
    return (node.id, attributes) if isinstance(node, ast.Name) else None


def _is_own(module: str) -> bool:
    return f"{module}.".startswith(f"{__package__.partition('.')[0]}.")


def _has_source(module: str) -> bool:
    """Whether modules of a package are read, rather than known by name."""
    return f"{module}.".startswith(("vllm.", *FOLLOWED))


def _of_pytorch(parts: tuple[str, ...]) -> Any:
    """What PyTorch has under a name in a module that is listed; None if there is none."""
    found: Any = torch if parts[0] == "torch" else None
    for place, part in enumerate(parts[1:], 1):
        if isinstance(found, types.ModuleType) and ".".join(parts[:place]) not in PYTORCH:
            return None
        found = getattr(found, part, None)
    return found


def _is_pytorch(parts: tuple[str, ...]) -> bool:
    """Whether a name of PyTorch's passes."""
    read = reviews.calls()
    for place, part in enumerate(parts[1:], 1):
        found = _of_pytorch(parts[: place + 1])
        if part in read.operations or part.startswith("_") or ".".join(parts[: place + 1]) in read.compilers:
            return False
        if found is None:
            return False
        if not isinstance(found, types.ModuleType):
            return True  # and what it has, passes with it
    return False
