"""Compiles every variant of the GPU's kernels with other versions of Triton than the installed one; needs no GPU.

usage: python -m scripts.check_triton TRITON...     such as triton==3.8.0, or triton for the newest: 250 MB each
"""

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def compiles_with(requirement: str, which: str) -> bool:
    """Whether ``tests.ops.compiled_kernels`` passes with that Triton, which is unpacked for it alone."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = ["--no-deps", "--only-binary=:all:", "--dest", folder, requirement]
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", *wanted], check=True)
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            for member in packed.infolist():
                path = Path(packed.extract(member, folder))
                path.chmod(path.stat().st_mode | member.external_attr >> 16 & 0o111)  # compilers are programs
        places = {"PYTHONPATH": f"{folder}:{ROOT}", "TRITON_CACHE_DIR": f"{folder}/cache"}
        program = [sys.executable, "-m", "tests.ops.compiled_kernels", which]
        return subprocess.run(program, cwd=ROOT, env=os.environ | places).returncode == 0


def main(arguments: list[str] | None = None) -> int:
    """Check each version; the exit status is the number of those with which a kernel does not compile or fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requirements", nargs="+", metavar="TRITON")
    parser.add_argument("--gluon", action="store_true", help="only the kernels in Gluon")
    parsed = parser.parse_args(arguments)
    which = "--gluon" if parsed.gluon else "--all"
    wrong = [one for one in parsed.requirements if not compiles_with(one, which)]
    for one in parsed.requirements:
        print(f"{one}: {'some kernel does not compile or fit' if one in wrong else 'every kernel compiles and fits'}")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
