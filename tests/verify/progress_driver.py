"""The real driver with nothing for an engine: its calls take no model."""

import sys
import time
from typing import Any

from vllm_batch_invariant.verify.harness import worker_main


def count(_llm: Any, number: int) -> str:
    """Tell every number below, and return words."""
    for place in range(number):
        worker_main.tell({"place": place})
    return f"{number} were told"


def hang(_llm: Any) -> None:
    """Give no answer for long."""
    time.sleep(2)


def start(_driver: Any, _arguments: list[str]) -> dict[str, Any]:
    """Stand for the engine's description."""
    return {"mode": "none"}


def main(descriptor: int) -> None:
    """The real driver's loop."""
    worker_main.Driver.start = start
    worker_main.main(descriptor)


if __name__ == "__main__":
    main(int(sys.argv[1]))
