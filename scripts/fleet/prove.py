"""What a fleet promises, counted: replicas behind the router of Ray Serve LLM, one for each GPU (or core) of a machine.

usage: python -m scripts.fleet.prove MODEL [--parts load,broken,throughput] [--json FILE] [options]

load: requests of many prompts, while a replica is killed every minute and comes back; each answer is compared with the
first one of its prompt. broken: answers that are cut at random tokens, by closing their connection and by killing
replicas, go on through the router, and are compared with unbroken ones. throughput: the same load for each replica, on
all replicas and on one, for which it is started again.

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
from .replicas import served, started

PARTS = ("load", "broken", "throughput")


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
        pace = Pace(options.concurrency, every=options.kill_every, ended=ended, patience=options.patience)
        kinds = mixture(options.prompts, options.max_tokens)
        found = ask(url, options.requests, options.replicas, options.kills, kinds, pace)
    return described(found) | {"asked_for": options.requests}


def break_off(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """The second part."""

    def replica() -> int:
        nothing = ask(url, 0, options.replicas, 0, mixture(1, 1), Pace(others=0, patience=options.patience))
        return next(iter(nothing.processes.values()))

    asked = broken.requests(options.length, min(broken.PROMPTS, options.broken))
    expected = broken.unbroken(url, asked, options.concurrency)
    with until(options.broken_seconds) as ended:
        found = broken.break_off(
            url, asked, expected, options.broken, options.concurrency, ended, replica, options.broken_kills
        )
    return {
        "broken": dict(found.asked),
        "asked_for": options.broken,
        "differences": found.differing.total(),
        "differing": dict(found.differing),
        "distinct_unbroken": dict(found.unbroken),
        "failed": dict(found.failed),
        "cut_connections": found.cuts,
        "kills": found.kills,
        "lost_streams": found.lost,
    }


def throughput(url: str, options: argparse.Namespace, replicas: int) -> dict[str, Any]:
    """The same load for each of so many replicas."""
    pace = Pace(options.rate_concurrency * replicas, others=0, patience=options.patience)
    kinds = mixture(options.prompts, options.max_tokens)
    return described(ask(url, options.rate_requests * replicas, replicas, 0, kinds, pace))


def is_proven(part: str, said: dict[str, Any]) -> bool:
    """Whether a part has no difference, and nothing is missing."""
    if part != "broken":
        return not said["differences"] and len(said["fingerprints"]) == len(said["witnesses"]) == 1
    is_whole = len(said["broken"]) == len(broken.kinds(1)) and {*said["broken"].values()} == {said["asked_for"]}
    return is_whole and not said["differences"] and not said["failed"]


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
        ("requests", 10_000, "of load, or more until the last kill"),
        ("kills", 3, "replicas that are killed in load"),
        ("concurrency", 64, "requests in flight, but for throughput"),
        ("broken", 200, "answers of each kind that are broken"),
        ("broken-kills", 2, "replicas that are killed in broken"),
        ("length", 32, "tokens of a broken answer"),
        ("rate-requests", 2000, "of throughput, for each replica"),
        ("rate-concurrency", 64, "requests in flight for each replica, of throughput"),
    ):
        made.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    for name, seconds, what in (
        ("kill-every", 60, "between two kills of load; a kill waits until all replicas are there"),
        ("seconds", 240, "of load at most"),
        ("broken-seconds", 240, "after which no answer is broken"),
        ("patience", 180, "until a request is answered or a replica is there; then the run ends with an error"),
    ):
        told = f"seconds {what} (default: {seconds})"
        made.add_argument(f"--{name}", type=float, default=seconds, metavar="S", help=told)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; returns the exit status."""
    options = parser().parse_args(arguments)
    parts = options.parts.split(",")
    logging.disable(logging.WARNING)
    proven = True

    def say(part: str, begin: float, said: dict[str, Any]) -> None:
        line = json.dumps({"part": part, "wall_seconds": round(time.monotonic() - begin, 1)} | said)
        print(line, flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(line + "\n")

    with started() as url:
        rates = {}
        for replicas in (options.replicas, 1) if "throughput" in parts else (options.replicas,):
            begin = time.monotonic()
            with served(options.model, replicas, {FLAG: "1"}):
                say("start", begin, {"replicas": replicas})
                for part in parts if replicas == options.replicas else ["throughput"]:
                    begin = time.monotonic()
                    if part == "throughput":
                        said = throughput(url, options, replicas)
                        rates[replicas] = said["tokens"] / said["seconds"]
                    else:
                        said = {"load": load, "broken": break_off}[part](url, options)
                    say(part, begin, said)
                    proven &= is_proven(part, said)
        if rates:
            ratio = rates[options.replicas] / rates[1]
            per_second = {str(replicas): round(rate, 1) for replicas, rate in rates.items()}
            say("ratio", begin, {"tokens_per_second": per_second, "ratio": round(ratio, 3)})
    return int(not proven)


if __name__ == "__main__":
    sys.exit(main())
