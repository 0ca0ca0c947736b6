"""Sends one request 1000 times while the load varies the batch, and compares the answers bit for bit: to plain vLLM and
to the mode, one after the other.

usage: python scripts/reproduce.py MODEL [...]
       python scripts/reproduce.py --base-url http://HOST:PORT [...]

It is the command ``vllm-batch-invariant reproduce``, with its arguments, words and exit status, and runs from a
checkout beside a vLLM. --compare is the default where a model is served.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # the folder of scripts has names of other modules

from vllm_batch_invariant.cli import main

ONE_RUN = ("--base-url", "--offline", "--plain", "--compare", "--help", "-h")
"""Arguments with which there is nothing to compare, or that say it already."""


def arguments_of(words: Sequence[str]) -> list[str]:
    """The command line of vllm-batch-invariant for the arguments of this script."""
    compares = words and not any(word.partition("=")[0] in ONE_RUN for word in words)
    return ["reproduce", *(words or ["--help"]), *(["--compare"] if compares else [])]


if __name__ == "__main__":
    sys.exit(main(arguments_of(sys.argv[1:])))
