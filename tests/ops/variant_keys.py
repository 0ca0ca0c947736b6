"""A variant's key changes with what is compiled, wherever that is written, and with nothing else; a program of its own,
as :mod:`.compiled_kernels` is.

usage: python -m tests.ops.variant_keys
"""

import importlib
import sys
import tempfile
from pathlib import Path

import torch
import triton

from tests.ops.compiled_kernels import (
    NO_DRIVER,
    OTHERS,
    Cell,
    Compiled,
    check,
    compile_cell,
    compile_instead_of_running,
    compiled,
    launch_on,
    spills_in_loops,
)
from tests.ops.variants import Outcomes, compile_when_asked

HELPER = '''import triton
import triton.language as tl

FACTOR = tl.constexpr(3)
PLAIN = 5


@triton.constexpr_function
def of_plain(x):
    return x + PLAIN


@triton.jit
def scaled(x):
    """Larger."""
    # by a factor
    return x * FACTOR + of_plain(1)
'''
KERNEL = """import triton
import triton.language as tl
from {helper} import scaled


@triton.jit
def kernel(x_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x_ptr + at, scaled(tl.load(x_ptr + at)))
"""
CHANGES = {
    "nothing": ("", "", True),
    "a comment": ("# by a factor", "# by FACTOR\n", True),
    "a docstring": ('"""Larger."""', '"""Larger, by a factor."""', True),
    "a line above": ("PLAIN = 5", "PLAIN = 5\nOTHER = 6\n", True),
    "formatting": ("x * FACTOR + of_plain(1)", "((x*FACTOR)\n        + of_plain(1))", True),
    "the name of a helper's argument": ("scaled(x):", "scaled(value):\n    x = value", True),
    "a constant": ("constexpr(3)", "constexpr(4)", False),
    "a plain constant of a function that the compiler calls": ("PLAIN = 5", "PLAIN = 6", False),
    "a helper": ("x * FACTOR +", "x * FACTOR -", False),
}
"""Of the helper's module: before, after, and whether the same is compiled."""


def key_of(folder: Path, number: int, helper: str, length: int = 32, **options: object) -> str:
    """Of a kernel that calls a helper of another module."""
    (folder / f"helper_{number}.py").write_text(helper)
    (folder / f"kernel_{number}.py").write_text(KERNEL.format(helper=f"helper_{number}"))
    importlib.invalidate_caches()
    kernel = importlib.import_module(f"kernel_{number}").kernel
    options = {"enable_fp_fusion": False} | options
    [made] = launch_on(NO_DRIVER.capability, lambda: kernel[(1,)](torch.zeros(length), N=length, **options))
    return made.kernel.key


def check_outcomes(folder: Path) -> None:
    """What is recorded is not found anew, a variant that changed is, and a file that is wrong is told."""
    found = []

    def ask(outcomes: Outcomes, one: Compiled, said: int) -> int:
        return outcomes.of(one.kernel, one.name, "said", lambda: (found.append(one.name), said)[1])

    path, [first, *_, last] = folder / "outcomes.json", compiled
    written = Outcomes(path, (spills_in_loops,))
    ask(written, first, 1)
    written.write()
    known = Outcomes(path, (spills_in_loops,))
    check("what is recorded is not found again", ask(known, first, 2) == 1 and len(found) == 1 and not known.compiled)
    check("another variant is found", ask(known, last, 3) == 3 and known.compiled == {last.kernel.key})
    check("what other functions found is found again", ask(Outcomes(path, (Outcomes,)), first, 2) == 2)
    anew = Outcomes(path, (spills_in_loops,), anew=True)
    ask(anew, first, 2)
    check(f"a wrong record is told: {anew.wrong}", len(anew.wrong) == 1 and not known.wrong)


def check_cells(folder: Path) -> None:
    """A cell is compiled where its IR is not the known one, and what comes out has no names."""

    def cell_of(number: int, helper: str, known: str | None = None) -> Cell:
        compiled.clear()
        OTHERS["cell"] = (lambda: key_of(folder, number, helper),)
        return compile_cell(80, "cell", known)

    first = cell_of(300, HELPER)
    check(
        f"a cell is compiled: {first}",
        not first.problems and len(first.kernels) == 1 and first.kernels[0]["registers"] > 0,
    )
    again = cell_of(301, HELPER.replace("# by a factor", "# twice\n"), first.ir)
    check("with another comment it is not compiled again", again.ir == first.ir and again.kernels is None)
    renamed = cell_of(302, HELPER.replace("# by a factor", "# twice\n"))
    check("and would be the same PTX", (renamed.ir, renamed.ptx) == (first.ir, first.ptx))
    changed = cell_of(303, HELPER.replace("constexpr(3)", "constexpr(4)"), first.ir)
    check("with another constant it is", changed.kernels is not None and changed.ptx != first.ptx)
    broken = cell_of(304, HELPER.replace("* FACTOR", "@ FACTOR"), first.ir)
    check(f"what does not compile is a problem: {broken.problems}", len(broken.problems) == 1 and broken.kernels == [])


def main() -> None:
    triton.knobs.compilation.disable_line_info = True  # as scripts.check_triton does
    compile_when_asked()
    compile_instead_of_running()
    with tempfile.TemporaryDirectory() as name:
        sys.path.insert(0, name)
        folder = Path(name)
        first = key_of(folder, 0, HELPER)
        for number, (what, (before, after, same)) in enumerate(CHANGES.items(), 1):
            assert before in HELPER
            changed = HELPER.replace(before, after)
            check(
                f"{what} makes {'the same' if same else 'another'} key",
                (key_of(folder, number, changed) == first) == same,
            )
        for options in ({"length": 64}, {"num_warps": 8}, {"enable_fp_fusion": True}):
            check(f"so do {options}", key_of(folder, 100 + len(sys.modules), HELPER, **options) != first)
        NO_DRIVER.capability = 80
        check("and another GPU", key_of(folder, 200, HELPER) != first)
        check_outcomes(folder)
        check("nothing was compiled", not any("compiled" in vars(one.kernel) for one in compiled))
        check_cells(folder)


if __name__ == "__main__":
    main()
