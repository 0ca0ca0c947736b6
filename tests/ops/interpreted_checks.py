"""How a program of :mod:`.interpreted_programs` says what it found: a line a check; the first that fails ends it."""

import sys
import time
from collections.abc import Callable, Mapping


def check(name: str, ok: bool) -> None:
    """Say whether a check passed, and after how many seconds of this process's."""
    print("ok" if ok else "FAILED", name, f"({time.process_time():.0f} s)", flush=True)
    if not ok:
        sys.exit(1)


def run_all(checks: Mapping[str, Callable[[], None]]) -> None:
    """Run functions that assert, by their names."""
    for name, run in checks.items():
        try:
            run()
        except AssertionError as error:
            check(f"{name} {error}", False)
        check(name, True)
