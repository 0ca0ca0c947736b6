"""A mixed online load for the engine benchmark: real servers, and vLLM's own client with Poisson arrivals."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import case_text
from vllm_batch_invariant.verify.harness.server import serve
from vllm_batch_invariant.verify.outcome import NoTestError

_CLIENT = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
"""`vllm bench serve` without vLLM's command, which not every build has."""


@dataclass(frozen=True)
class Load:
    """Requests whose lengths vary between a tenth and twice a mean, as in chats."""

    requests: int
    rate: float
    """Arrivals a second on average."""
    input: int
    output: int

    @property
    def case(self) -> str:
        """How it is written in the data."""
        return case_text(
            workload="online", rate=self.rate, requests=self.requests, input=self.input, output=self.output
        )


LOADS = {"full": Load(400, 20.0, 256, 200), "small": Load(6, 10.0, 32, 5)}


Latencies = dict[str, list[float]]
"""Milliseconds to the first token (ttft) and for each later one (tpot), of every request."""


def run(
    model: str, arguments: list[str], load: Load, environments: Mapping[str, Mapping[str, str]], turns: int
) -> dict[str, Latencies | Exception]:
    """What the clients of each server see. All servers are there from the first load to the last, and take turns at it:
    those that have none wait.

    Args:
        environments: of the servers, by name.
        turns: loads of each.

    Returns:
        By name; a NoTestError or CalledProcessError of a server that did not start, or whose requests or client failed.
    """
    with ExitStack() as stack:

        def start(environment: Mapping[str, str]) -> str | Exception:
            try:
                return stack.enter_context(serve(model, arguments, environment)).base_url
            except NoTestError as error:
                return error

        with ThreadPoolExecutor(len(environments)) as pool:
            started = dict(zip(environments, pool.map(start, environments.values()), strict=True))
        found: dict[str, Latencies | Exception] = {
            name: url if isinstance(url, Exception) else {"ttft": [], "tpot": []} for name, url in started.items()
        }
        for _ in range(turns):
            for name, url in started.items():
                if isinstance(found[name], Exception):
                    continue
                try:
                    for metric, samples in _load(model, url, load).items():
                        found[name][metric] += samples
                except (subprocess.CalledProcessError, NoTestError) as error:
                    found[name] = error
        return found


def _load(model: str, base_url: str, load: Load) -> Latencies:
    """One load of a server.

    Raises:
        subprocess.CalledProcessError: the client failed.
        NoTestError: requests failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "backend": "openai",
            "base-url": base_url.removesuffix("/v1"),
            "model": model,
            "dataset-name": "random",
            "random-input-len": load.input,
            "random-output-len": load.output,
            "random-range-ratio": 0.9,
            "num-prompts": load.requests,
            "request-rate": load.rate,
            "seed": 0,
            "result-dir": folder,
            "result-filename": "result.json",
        }
        flags = ["--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        subprocess.run([sys.executable, "-c", _CLIENT, *words, *flags], check=True, capture_output=True, text=True)
        found = json.loads(Path(folder, "result.json").read_text())
    if found["completed"] < load.requests:
        raise NoTestError(f"{load.requests - found['completed']} of {load.requests} requests failed")
    return {
        "ttft": [1e3 * seconds for seconds in found["ttfts"]],
        "tpot": [1e3 * sum(gaps) / len(gaps) for gaps in found["itls"] if gaps],
    }
