"""Writes fakes of the libraries of CANN that torch_npu needs, so that the real torch_npu runs where no NPU is.

usage: python libraries.py SITE_PACKAGES OUT

The functions that must answer are in runtime.c. Every other symbol that torch_npu imports, or looks up by name, becomes
a function that returns 0; an operator of libopapi.so also leaves its name in the log of launched operators.
"""

import re
import subprocess
import sys
from pathlib import Path

RUNTIME = Path(__file__).with_name("runtime.c")
EMPTY = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
"""Libraries that torch_npu is linked against, beside libascendcl.so, in which all symbols are."""
SYSTEM = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "libpthread.so.0")
SET_BY_OTHERS = ("Py", "_Py", "_ZTH", "_ITM", "__gmon")
"""Beginnings of symbols that the interpreter or the toolchain provides."""
RUNTIME_NAME = re.compile(r"acl(?!nn)[a-zA-Z]*[A-Z]\w+|Hccl[A-Z]\w+|HcomGet[A-Za-z]+|mstx[A-Z][A-Za-z]+")
OPERATOR_NAME = re.compile(r"(aclnn[A-Z]\w+?)(?:GetWorkspaceSize)?")


def symbols(library: Path, kind: str) -> set[str]:
    """The ``undefined`` or ``defined`` dynamic symbols of a library, without versions; weak imports left out."""
    listing = subprocess.run(["nm", "-D", f"--{kind}-only", library], capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in listing.splitlines()]
    return {line[-1].split("@")[0] for line in lines if not (kind == "undefined" and line[-2] in "wv")}


def strings(library: Path) -> set[str]:
    """The identifiers among the C strings of a library: the names that it may look up."""
    return {match.decode() for match in re.findall(rb"(?<=\0)[A-Za-z]\w{5,}(?=\0)", library.read_bytes())}


def system_library(name: str) -> Path | None:
    found = subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    path = Path(found.strip())
    return path if path.is_absolute() else None


def compile_library(source: str, name: str, out: Path, *flags: str) -> None:
    """A shared library of C source."""
    soname = f"lib{name}.so"
    command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{soname}", "-o", out / soname, "-x", "c", "-", *flags]
    subprocess.run(command, input=source, text=True, check=True)


def build(site_packages: Path, out: Path) -> tuple[int, int]:
    """Write all fakes to ``out``; returns how many functions of the runtime and how many operators there are."""
    out.mkdir(parents=True, exist_ok=True)
    npu = site_packages / "torch_npu"
    main = npu / "lib" / "libtorch_npu.so"
    importing = [main, *npu.glob("_C*.so")]
    providing = [*(site_packages / "torch" / "lib").glob("*.so*"), *(npu / "lib").glob("*.so")]
    providing += [path for path in map(system_library, SYSTEM) if path]
    imported = set().union(*(symbols(library, "undefined") for library in importing))
    provided = set().union(*(symbols(library, "defined") for library in providing))
    names = strings(main)
    runtime = {name for name in imported - provided if not name.startswith(SET_BY_OTHERS)}
    runtime |= set(filter(RUNTIME_NAME.fullmatch, names))
    operators = sorted({match[1] for match in map(OPERATOR_NAME.fullmatch, names) if match})

    answered = RUNTIME.read_text()
    silent = [name for name in sorted(runtime) if not re.search(rf"\b{re.escape(name)}\(", answered)]
    compile_library(answered + "".join(f"int {name}(void) {{ return 0; }}\n" for name in silent), "ascendcl", out)
    linked = ("-Wl,--no-as-needed", f"-L{out}", "-lascendcl")
    for name in EMPTY:
        compile_library("", name, out, *linked)
    launchers = "".join(
        f"int {name}GetWorkspaceSize(void) {{ return 0; }}\n"
        f'int {name}(void) {{ fake_launched_add("{name}"); return 0; }}\n'
        for name in operators
    )
    compile_library("extern void fake_launched_add(const char *);\n" + launchers, "opapi", out, *linked)
    return len(runtime), len(operators)


if __name__ == "__main__":
    functions, operators = build(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"fakes of CANN: {functions} functions of the runtime, {operators} operators")
