"""What is said of a GPU kernel that cannot be compiled."""

from triton.compiler.errors import CompilationError


def reason(error: BaseException) -> str:
    """What began it, in one line: Triton shows the source of every caller before it says what is wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return f"{type(error).__name__}: {lines[-1 if isinstance(error, CompilationError) else 0]}"
