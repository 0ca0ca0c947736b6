"""What is said of a GPU kernel that cannot be compiled."""

import torch
from triton.compiler.errors import CompilationError


def is_of_a_compiler(error: Exception) -> bool:
    """Whether an error may be what a compiler, an assembler or a loader makes of a kernel, or an API that moved: not a
    lack of memory, and not a module of this project that cannot be imported.
    """
    ours = isinstance(error, ImportError) and (error.name or "").split(".")[0] == __package__.split(".")[0]
    return not (ours or isinstance(error, torch.OutOfMemoryError))


def reason(error: BaseException) -> str:
    """What began it, in one line: Triton shows the source of every caller before it says what is wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return f"{type(error).__name__}: {lines[-1 if isinstance(error, CompilationError) else 0]}"
