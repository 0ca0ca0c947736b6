"""Replicas that come and go with the load: Ray Serve starts more where requests wait, and all give one set of bits.

usage: python -m scripts.fleet.scale MODEL [--at-most N] [--waits S] [--max-tokens N] [--patience S]

One replica answers; a load comes and more start, up to the limit; the load goes, one request at a time stays, and all
but one end. Every answer is compared with the first of its kind.

Prints a line of JSON for each stage. Exit status: 0 if no answer differs, all replicas say the same of themselves, and
as many came and went as were allowed; 1 otherwise.
"""

import argparse
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from vllm_batch_invariant.envs import FLAG

from .load import Found, Pace, ask, targets
from .prove import described
from .replicas import ONGOING, running, served, started

ENDLESS = 1 << 30
"""Samples of a load that ends when it is told to."""


@contextmanager
def loaded(url: str, concurrency: int, options: argparse.Namespace) -> Iterator["Future[Found]"]:
    """A load beside the block, which ends with it; then what came of it is there."""
    ended = threading.Event()
    pace = Pace(concurrency, others=0, ended=ended, patience=options.patience)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(ask, url, ENDLESS, 1, 0, targets(options.max_tokens), pace)
        try:
            yield coming
        finally:
            ended.set()


def await_replicas(count: int, patience: float) -> None:
    """Wait until so many replicas run.

    Raises:
        TimeoutError: they do not.
    """
    deadline = time.monotonic() + patience
    while (found := running()) != count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{found} replicas run, and not {count}")
        time.sleep(0.5)


def stages(url: str, options: argparse.Namespace) -> Iterator[tuple[str, float, Found]]:
    """Each stage with the seconds until its replicas were there, and what came of its load."""
    asked, quiet = targets(options.max_tokens), Pace(1, others=0, patience=options.patience)
    yield "one", 0.0, ask(url, 6, 1, 0, asked, quiet)
    begin = time.monotonic()
    with loaded(url, 4 * ONGOING * options.at_most, options) as coming:
        await_replicas(options.at_most, options.patience)
        until_more = time.monotonic() - begin
        met = ask(url, 20, options.at_most, 0, asked, quiet)
    yield "load", until_more, coming.result()
    yield "all", 0.0, met
    begin = time.monotonic()
    with loaded(url, 1, options) as coming:
        await_replicas(1, options.patience)
        until_one = time.monotonic() - begin
    yield "less", until_one, coming.result()
    yield "one again", 0.0, ask(url, 6, 1, 0, asked, quiet)


def is_one_set(found: list[Found]) -> bool:
    """Whether every request had one answer in all stages, and all replicas say the same of themselves."""
    kinds = {name for each in found for name in each.distinct}
    answers = {name: set().union(*(each.distinct.get(name, set()) for each in found)) for name in kinds}
    said = {name: set().union(*(each.values(name) for each in found)) for name in ("fingerprint", "witness")}
    return bool(kinds) and all(len(one) == 1 and "" not in one for one in (*answers.values(), *said.values()))


def main(arguments: list[str] | None = None) -> int:
    """Run the stages; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="the folder that make-checkpoint wrote")
    for name, default, metavar, what in (
        ("at-most", 2, "N", "replicas under load"),
        ("max-tokens", 16, "N", "tokens of an answer"),
        ("waits", 5, "S", "seconds before a replica more, and twice as many before one less"),
        ("patience", 300, "S", "seconds until a request is answered or a number of replicas is there"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar=metavar, help=f"{what} (default: {default})"
        )
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    found = []
    with started() as url, served(options.model, 1, {FLAG: "1"}, options.at_most, options.waits):
        for stage, waited, of_stage in stages(url, options):
            print(json.dumps({"stage": stage, "waited": round(waited, 1)} | described(of_stage)), flush=True)
            found.append(of_stage)
    return int(not is_one_set(found))


if __name__ == "__main__":
    sys.exit(main())
