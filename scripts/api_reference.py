"""Writes docs/api.md: the public functions and classes in Python, from their signatures and docstrings.

usage: python -m scripts.api_reference

Sources are read and not imported, so that trainers need not be installed. ``tests/docs/test_api.py`` fails where the
page is another.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[1]
PACKAGE = "vllm_batch_invariant"
PAGE = ROOT / "docs" / "api.md"
MODULES = {
    PACKAGE: "PyTorch alone, or nothing where a device has no library of its own",
    f"{PACKAGE}.testing": "the extra [verify]; `assert_rows_invariant` PyTorch alone",
    f"{PACKAGE}.compare": "PyTorch",
    f"{PACKAGE}.hf": "the extra [hf]",
    f"{PACKAGE}.trl": "the extra [on-policy]",
    f"{PACKAGE}.verl": "verl 0.9.0 or 0.9.1",
    f"{PACKAGE}.seeds": "nothing",
    f"{PACKAGE}.resume": "openai",
    f"{PACKAGE}.verify.receipt": "the extra [verify], and vLLM where an engine computes",
    f"{PACKAGE}.batch_invariant_ops": "PyTorch",
    f"{PACKAGE}.errors": "nothing",
}
"""The public modules, and what each needs."""
WITHOUT_ALL = {
    f"{PACKAGE}.seeds": ("sample_seed",),
    f"{PACKAGE}.resume": ("stream", "identity", "NotResumed"),
    f"{PACKAGE}.errors": ("NotCovered", "BadSetting"),
}
"""What is public in modules that have no ``__all__``."""
LEFT_OUT = {PACKAGE: ("__version__", "register")}
"""Names of ``__all__`` that are no functions for users: vLLM calls ``register``."""
_INTRODUCTION = """# Python functions

What a program may import. Everything else may change without notice. The page is written from the docstrings by
`python -m scripts.api_reference`. The commands have [a page of their own](commands.md);
[trainer-parity.md](trainer-parity.md), [testing.md](testing.md) and [receipts.md](receipts.md) have examples."""
_NAMED = ("Args", "Attributes", "Raises")
"""Sections of a docstring whose entries have names."""
_SECTIONS = (*_NAMED, "Returns", "Yields")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


def path_of(module: str) -> Path:
    """The file of a module or a package."""
    place = ROOT.joinpath(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def public(module: str) -> list[str]:
    """The names of a module that users may import."""
    if module in WITHOUT_ALL:
        return list(WITHOUT_ALL[module])
    for node in ast.parse(path_of(module).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [name for name in ast.literal_eval(node.value) if name not in LEFT_OUT.get(module, ())]
    raise ValueError(f"{module} has no __all__")


def definition(module: str, name: str) -> Definition | None:
    """Where a name of a module is defined, here or where it is imported from; None for a constant.

    Raises:
        ValueError: it is defined nowhere.
    """
    tree = ast.parse(path_of(module).read_text())
    for node in ast.walk(tree):
        if isinstance(node, Definition) and node.name == name:
            return _with_inherited(tree, node)
        if isinstance(node, ast.ImportFrom) and any((one.asname or one.name) == name for one in node.names):
            [imported] = [one.name for one in node.names if (one.asname or one.name) == name]
            return definition(_absolute(module, node), imported)
    if any(name in _assigned(node) for node in tree.body):
        return None
    raise ValueError(f"{module} has no {name}")


def _with_inherited(tree: ast.Module, node: Definition) -> Definition:
    """A class with the methods of the private classes of its file that it extends."""
    if isinstance(node, ast.ClassDef):
        bases = {base.id for base in node.bases if isinstance(base, ast.Name) and base.id.startswith("_")}
        for other in tree.body:
            if isinstance(other, ast.ClassDef) and other.name in bases:
                node.body += [part for part in other.body if isinstance(part, Function)]
    return node


def _absolute(module: str, node: ast.ImportFrom) -> str:
    """The module that an import names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    levels = node.level - (path_of(module).name == "__init__.py")
    return ".".join([*(parts[:-levels] if levels else parts), *filter(None, [node.module])])


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def signature(node: Definition) -> str:
    """As it is called: a class as its constructor is, a dataclass by its fields."""
    if isinstance(node, Function):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        waits = "async " * isinstance(node, ast.AsyncFunctionDef)
        return f"{waits}{node.name}({ast.unparse(node.args)}){returns}"
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            return f"{node.name}({ast.unparse(part.args).removeprefix('self').removeprefix(', ')})"
    annotated = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    fields = [ast.unparse(part) for part in annotated if "ClassVar" not in ast.unparse(part.annotation)]
    return f"{node.name}({', '.join(fields)})"


def prose(text: str) -> str:
    """A docstring's text as Markdown: code in single backquotes, sections as lists."""
    text = re.sub(r":(?:func|class|mod|data|meth|attr):`[~.]*([^`]+)`", r"`\1`", text.replace("``", "`"))
    text = re.sub(r"::\n", ":\n", text)
    out: list[str] = []
    for block in re.split(r"\n\n+", text):
        head, _, body = block.partition("\n")
        if head.rstrip(":") in _SECTIONS and head.endswith(":"):
            out.append("\n".join([f"{head[:-1]}:", "", *_items(body, is_named=head[:-1] in _NAMED)]))
        elif block.startswith("    ") and out and out[-1].startswith("```"):
            out[-1] = f"{out[-1].removesuffix('```')}\n{dedent(block)}\n```"
        elif block.startswith("    "):
            out.append(f"```text\n{dedent(block)}\n```")
        else:
            out.append(block)
    return "\n\n".join(out)


def _items(body: str, is_named: bool) -> Iterator[str]:
    """The entries of a section as a list: a name if they have one, then words."""
    for entry in re.split(r"\n(?! {8})", dedent_once(body)):
        name, colon, words = re.sub(r"\n +", " ", entry).strip().partition(":")
        yield f"- `{name}`:{words}" if is_named and colon else f"- {name}{colon}{words}"


def dedent_once(body: str) -> str:
    """The body of a section keeps four blanks before an entry, and eight before the rest of it."""
    return "\n".join(line for line in body.splitlines() if line.strip())


def page() -> str:
    """The page."""
    parts = [_INTRODUCTION]
    for module, needs in MODULES.items():
        about = ast.get_docstring(ast.parse(path_of(module).read_text())) or ""
        parts += [f"## {module}", prose(about), f"It needs: {needs}."]
        constants = []
        for name in public(module):
            node = definition(module, name)
            if node is None:
                constants.append(name)
                continue
            kind = "class " * isinstance(node, ast.ClassDef)
            parts += [f"### {name}", f"```text\n{kind}{_wrapped(signature(node))}\n```"]
            parts.append(prose(cleandoc(ast.get_docstring(node) or "")))
            parts += _methods(node)
        if constants:
            parts.append(f"Constants: {', '.join(f'`{name}`' for name in constants)}.")
    return "\n\n".join(filter(None, parts)) + "\n"


def _methods(node: Definition) -> Iterator[str]:
    """The public methods and properties of a class, a line each."""
    lines = []
    for part in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(part, Function) and not part.name.startswith("_"):
            about = prose(ast.get_docstring(part) or "").split("\n\n")[0].replace("\n", " ")
            is_property = any(ast.unparse(one) in ("property", "cached_property") for one in part.decorator_list)
            call = part.name if is_property else signature(part).replace("(self, ", "(").replace("(self)", "()")
            call = call.replace("(cls, ", "(").partition(" -> ")[0]
            lines.append(f"- `{call}`: {about}" if about else f"- `{call}`")
    if lines:
        yield "\n".join(["Methods:", "", *lines])


def _wrapped(text: str) -> str:
    """A signature in lines of its arguments, where it is long."""
    if len(text) <= 100:
        return text
    head, _, rest = text.partition("(")
    depth, begin, parts = 0, 0, []
    end = rest.rfind(")")
    for place, character in enumerate(rest[:end]):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(rest[begin:place].strip())
            begin = place + 1
    parts.append(rest[begin:end].strip())
    return "\n".join([f"{head}(", *(f"    {part}," for part in parts), rest[end:]])


def main(arguments: list[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    PAGE.write_text(page())
    print(PAGE)


if __name__ == "__main__":
    main()
