"""What ``make fleet-demo`` shows: replicas behind the router of Ray Serve LLM give one answer, while some are killed.

usage: python -m scripts.fleet.demo MODEL [--samples N] [--replicas N] [--kills N] [--max-tokens N]

Exit status: 0 if with the mode no answer differs, every replica has answered and all say the same of themselves, and
plain vLLM in the same place gives other bits; 1 otherwise.
"""

import argparse
import logging
import sys
import time
from pathlib import Path

from vllm_batch_invariant.envs import FLAG

from .load import Found, ask, targets
from .replicas import served, started

OF_PLAIN = 60
"""Samples of plain vLLM at most: it shows other bits much sooner."""


def lines(found: Found, seconds: float) -> list[str]:
    """What came of a load, in sentences."""
    compared = sum(found.asked.values())
    answered = ", ".join(f"{name}: {count}" for name, count in found.answers.items())
    said = [
        f"{len(found.answers)} replicas answered ({answered}), beside {found.others} answers to other requests",
        f"{len(found.killed)} replicas were killed; {found.again} requests were sent again; {seconds:.0f} s",
        f"answers that differ: {found.differing.total()} of {compared} "
        f"({', '.join(f'{name}: {found.differing[name]} of {count}' for name, count in found.asked.items())})",
    ]
    if any(found.said.values()):
        said += [f"{name} of every replica: {', '.join(found.values(name))}" for name in ("fingerprint", "witness")]
    return said


def is_one_fleet(found: Found) -> bool:
    """Whether all replicas answered, with the same bits, and say the same of themselves."""
    same = all(len(found.values(name)) == 1 and "" not in found.values(name) for name in ("fingerprint", "witness"))
    return same and not found.silent and not found.differing.total()


def main(arguments: list[str] | None = None) -> int:
    """Run the demonstration; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="the folder that make-checkpoint --real wrote")
    for name, default, what in (
        ("samples", 200, "requests that are compared"),
        ("replicas", 2, "that are kept alive"),
        ("kills", 2, "replicas that are killed meanwhile"),
        ("max-tokens", 16, "tokens of an answer"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    with started() as url:
        found = {}
        for flag, mode, samples, kills in (
            ("1", "with the mode", options.samples, options.kills),
            ("0", "plain vLLM", min(options.samples, OF_PLAIN), 0),
        ):
            begin = time.monotonic()
            print(f"{mode}: {options.replicas} replicas start", flush=True)
            with served(options.model, options.replicas, {FLAG: flag}):
                print(f"  all there after {time.monotonic() - begin:.0f} s", flush=True)
                begin = time.monotonic()
                found[flag] = ask(url, samples, options.replicas, kills, targets(options.max_tokens))
                print("\n".join(f"  {line}" for line in lines(found[flag], time.monotonic() - begin)), flush=True)
    if not found["0"].differing.total():
        print("plain vLLM gave no other bits here: this run says nothing")
    return int(not (is_one_fleet(found["1"]) and found["0"].differing.total()))


if __name__ == "__main__":
    sys.exit(main())
