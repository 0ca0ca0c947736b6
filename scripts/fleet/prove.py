"""What a fleet promises, counted: replicas behind the router of Ray Serve LLM, one for each GPU (or core) of a machine.

usage: python -m scripts.fleet.prove MODEL [--parts load,broken,throughput] [--json FILE] [options]

load: requests of many prompts, while a replica is killed every minute and comes back; each answer is compared with the
first one of its prompt. broken: answers that are cut at random tokens, by closing their connection and by killing
replicas, go on through the router, and are compared with unbroken ones. throughput: the same load for each replica, on
all replicas and on one.

Prints a line of JSON for each part. Exit status: 0 if no answer differs and every request came to an end; 1 otherwise.
"""

import argparse
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_batch_invariant.envs import FLAG

from . import broken
from .load import Found, Pace, ask, mixture
from .replicas import scale, served, started

PARTS = ("load", "broken", "throughput")
ON = {FLAG: "1"}
ENDLESS = 1 << 40
"""Samples, or kills, of which a time is the limit."""


@contextmanager
def until(seconds: float) -> Iterator[threading.Event]:
    """An event that is set after a time."""
    ended = threading.Event()
    timer = threading.Timer(seconds, ended.set)
    timer.daemon = True
    timer.start()
    try:
        yield ended
    finally:
        timer.cancel()


def described(found: Found) -> dict[str, Any]:
    """What came of a load."""
    return {
        "requests": found.asked.total(),
        "prompts": len(found.distinct),
        "distinct_answers": sum(map(len, found.distinct.values())),
        "differences": found.differing.total(),
        "other_requests": found.others,
        "kills": len(found.killed),
        "retries": found.again,
        "replicas": dict(found.answers),
        "fingerprints": sorted(found.values("fingerprint")),
        "witnesses": sorted(found.values("witness")),
        "tokens": found.tokens,
        "seconds": round(found.seconds, 1),
    }


def load(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """The first part."""
    with until(options.seconds) as ended:
        pace = Pace(options.concurrency, every=options.kill_every, ended=ended)
        kinds = mixture(options.prompts, options.max_tokens)
        found = ask(url, options.requests, options.replicas, ENDLESS, kinds, pace)
    return described(found) | {"asked_for": options.requests}


def break_off(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """The second part: broken answers beside a load in which replicas are killed."""
    asked = broken.requests(options.length, min(broken.PROMPTS, options.broken))
    expected = broken.unbroken(url, asked, options.concurrency)
    found: list[broken.Continued] = []
    with until(options.broken_seconds) as ended:

        def continue_all() -> None:
            try:
                found.append(broken.break_off(url, asked, expected, options.broken, options.concurrency, ended))
            finally:
                ended.set()

        continuing = threading.Thread(target=continue_all)
        continuing.start()
        pace = Pace(min(4, options.concurrency), others=0, every=options.broken_kill_every, ended=ended)
        beside = ask(url, ENDLESS, options.replicas, ENDLESS, mixture(4, options.max_tokens), pace)
        continuing.join()
    [continued] = found
    return {
        "broken": dict(continued.asked),
        "asked_for": options.broken,
        "differences": continued.differing.total(),
        "differing": dict(continued.differing),
        "distinct_unbroken": dict(continued.unbroken),
        "failed": dict(continued.failed),
        "cut_connections": continued.cuts,
        "lost_streams": continued.lost,
        "beside": described(beside),
    }


def throughput(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """The third part: the application has one replica afterwards."""
    kinds, rates, found = mixture(options.prompts, options.max_tokens), {}, {}
    for replicas in (options.replicas, 1):
        scale(options.model, replicas, ON)
        pace = Pace(options.rate_concurrency * replicas, others=0)
        found[replicas] = ask(url, options.rate_requests * replicas, replicas, 0, kinds, pace)
        rates[replicas] = found[replicas].tokens / found[replicas].seconds
    return {
        "tokens_per_second": {str(replicas): round(rate, 1) for replicas, rate in rates.items()},
        "requests": {str(replicas): one.asked.total() for replicas, one in found.items()},
        "replicas": {str(replicas): dict(one.answers) for replicas, one in found.items()},
        "differences": sum(one.differing.total() for one in found.values()),
        "ratio": round(rates[options.replicas] / rates[1], 3),
    }


def is_proven(part: str, said: dict[str, Any]) -> bool:
    """Whether a part has no difference, and nothing is missing."""
    if part == "load":
        return not said["differences"] and len(said["fingerprints"]) == len(said["witnesses"]) == 1
    if part == "broken":
        counts = {*said["broken"].values()}
        is_whole = not said["failed"] and counts == {said["asked_for"]} and len(said["broken"]) == len(broken.kinds(1))
        return is_whole and not said["differences"] and not said["beside"]["differences"]
    return not said["differences"]


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", type=Path, metavar="MODEL", help="the folder that make-checkpoint wrote")
    made.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)} (default: all)")
    made.add_argument("--json", type=Path, metavar="FILE", help="where to write what is printed, too")
    for name, default, what in (
        ("replicas", 2, "that are kept alive"),
        ("prompts", 48, "different requests of load and throughput"),
        ("max-tokens", 32, "tokens of their answers at most"),
        ("requests", 10_000, "of load, at most"),
        ("concurrency", 64, "requests in flight, but for throughput"),
        ("broken", 200, "answers of each kind that are broken"),
        ("length", 32, "tokens of a broken answer"),
        ("rate-requests", 2000, "of throughput, for each replica"),
        ("rate-concurrency", 64, "requests in flight for each replica, of throughput"),
    ):
        made.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    for name, seconds, what in (
        ("kill-every", 60, "between two kills of load; a kill waits until all replicas are there"),
        ("seconds", 240, "of load at most, without the start of the last replica that was killed"),
        ("broken-kill-every", 15, "between two kills of broken"),
        ("broken-seconds", 150, "of broken at most, in the same way"),
    ):
        told = f"seconds {what} (default: {seconds})"
        made.add_argument(f"--{name}", type=float, default=seconds, metavar="S", help=told)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; returns the exit status."""
    options = parser().parse_args(arguments)
    parts = {"load": load, "broken": break_off, "throughput": throughput}
    logging.disable(logging.WARNING)
    proven, begin = True, time.monotonic()
    with started() as url, served(options.model, options.replicas, ON):
        print(json.dumps({"part": "start", "seconds": round(time.monotonic() - begin, 1)}), flush=True)
        for part in options.parts.split(","):
            begin = time.monotonic()
            said = parts[part](url, options)
            line = json.dumps({"part": part, "wall_seconds": round(time.monotonic() - begin, 1)} | said)
            print(line, flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(line + "\n")
            proven &= is_proven(part, said)
    return int(not proven)


if __name__ == "__main__":
    sys.exit(main())
