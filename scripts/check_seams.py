"""Checks by reading, not running, that vLLM's sources have every place the plugin takes hold of.

usage: python -m scripts.check_seams VERSION...     downloads those wheels of vLLM, about 300 MB each
"""

import ast
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from vllm_batch_invariant.integration import seams


def defines(source: str, name: str) -> bool:
    """Whether a module binds ``name`` at its top level, by definition, assignment or import."""
    for node in ast.parse(source).body:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                names = [node.name]
            case ast.Assign():
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=target)):
                names = [target]
            case ast.Import() | ast.ImportFrom():
                names = [alias.asname or alias.name for alias in node.names]
            case _:
                names = []
        if name in names:
            return True
    return False


def missing(wheel: zipfile.ZipFile) -> list[str]:
    """Names of the seams that a wheel of vLLM does not have."""
    files = set(wheel.namelist())

    def has(seam: seams.Seam) -> bool:
        for module in seam.modules:
            path = module.replace(".", "/")
            for file in (f"{path}.py", f"{path}/__init__.py"):
                if file in files and defines(wheel.read(file).decode(), seam.attribute):
                    return True
        return False

    return [name for name, seam in seams.ALL.items() if not has(seam)]


def main(versions: list[str]) -> int:
    """Check each version; the exit status is the number of versions that lack something."""
    lacking = 0
    for version in versions:
        with tempfile.TemporaryDirectory() as folder:
            wanted = ["--no-deps", "--only-binary=:all:", "--dest", folder, f"vllm=={version}"]
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", *wanted], check=True)
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                absent = missing(wheel)
        lacking += bool(absent)
        print(f"vLLM {version}: " + (f"no {', '.join(absent)}" if absent else f"all {len(seams.ALL)} seams are there"))
    return lacking


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
