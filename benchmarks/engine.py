"""Benchmark of whole engines: `python -m benchmarks.engine MODEL`. Plain vLLM, vLLM's own invariant mode and ours, in
its usual arithmetic or in exact arithmetic, take turns on one GPU. Bits first, then time.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from benchmarks import engine_online
from benchmarks.engine_online import LOADS, Latencies
from benchmarks.engine_worker import ENDED, POLL, STARTED
from benchmarks.engine_workloads import WORKLOADS, most_adapters, of_engine
from benchmarks.record import DATA, Bits, Measurement, Setting, case_text, update
from benchmarks.spread import Spread
from vllm_batch_invariant.envs import ARITHMETIC, FLAG, TP_TREE, UNTRIED
from vllm_batch_invariant.verify.arguments import at_least
from vllm_batch_invariant.verify.harness.mode import OURS, of_started
from vllm_batch_invariant.verify.printing import one_line

PROVIDERS: dict[str, dict[str, str]] = {
    "stock": {FLAG: "0"},
    "ours": {FLAG: "1"},
    "native": {FLAG: "1", "VLLM_PLUGINS": ""},
    "exact": {FLAG: "1", ARITHMETIC.name: "exact"},
    "tree": {FLAG: "1", TP_TREE.name: "2"},
}
"""What decides who computes, by provider; the first is what the others are compared with."""
USUAL = ("stock", "ours", "native")
"""Who takes part unless told otherwise: not every machine is offered exact arithmetic or a tree."""
_FORMS = {
    "exact": (f" {case_text(arithmetic='exact')}", "the usual arithmetic's"),
    "tree": (f" {case_text(tree=2)}", "that without a tree"),
}
"""Ours in other forms: what the cases of their rows end with, and what they are compared with, too."""
_OURS = ("ours", *_FORMS)
_OF_FEATURES = (
    *("adapters", "adapters-prefill", "adapters-small"),
    *("images", "images-small", "embeddings", "embeddings-small"),
)
"""Workloads of engines that do more than others."""
CONCURRENT = 63
"""Concurrent requests of the target request whose bits are checked."""
INTERRUPTED = "interrupted"
"""In the place of an exit status, of an engine that ran when this process was asked to end."""
_TURNS = 2
"""Loads of each server."""


def environment_of(provider: str) -> dict[str, str]:
    """The variables of a provider's engine: this process's, but for what decides who computes."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name == UNTRIED.name or not name.startswith((FLAG, "VLLM_PLUGINS"))
    }
    return inherited | PROVIDERS[provider]


def measure(provider: str, plan: dict[str, Any], timeout: float) -> dict[str, Any] | None:
    """What an engine of a provider's did, also if it was cut short; None if it failed, with the end of its log on
    stderr.
    """
    print(f"\n{provider}", flush=True)
    return _measure(provider, plan, timeout)


def measure_in_turns(plans: Sequence[tuple[str, dict[str, Any]]], timeout: float) -> Iterator[dict[str, Any] | None]:
    """The same of engines that share the memory. They start one after the other, because each chooses schedules by
    timing them; when all have started, they take turns on the GPU, a sample each.

    Args:
        plans: a provider and its plan, of each engine.
        timeout: seconds for each of them to start, and then for each.
    """
    share = {"gpu_memory_utilization": 0.9 / len(plans)}
    print(f"\n{', '.join(provider for provider, _ in plans)}", flush=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(plans)) as pool:
        turns = [str(Path(folder, str(number))) for number in range(len(plans))]
        running = []
        for (provider, plan), turn in zip(plans, turns, strict=True):
            waiting = plan | {"engine": plan["engine"] | share, "turn": turn, "provider": provider}
            running.append(pool.submit(_measure, provider, waiting, timeout * (1 + len(plans))))
            deadline = time.monotonic() + timeout
            while time.monotonic() < deadline and not (running[-1].done() or Path(turn + STARTED).exists()):
                time.sleep(0.1)
        for number in itertools.count():
            if all(one.done() for one in running):
                break
            for turn, one in zip(turns, running, strict=True):
                Path(f"{turn}.{number}").touch()
                while not one.done() and not Path(f"{turn}.{number}{ENDED}").exists():
                    time.sleep(POLL)
        yield from (one.result() for one in running)


def measured_of(
    plans: Sequence[tuple[str, dict[str, Any]]], together: int, timeout: float
) -> Iterator[dict[str, Any] | None]:
    """The results of engines, of which so many share the GPU; then neither start-up nor memory is known."""
    for start in range(0, len(plans), together):
        group = plans[start : start + together]
        if len(group) == 1:
            yield measure(*group[0], timeout)
            continue
        for result in measure_in_turns(group, timeout):
            yield result and {name: value for name, value in result.items() if name not in ("startup", "memory")}


def _measure(provider: str, plan: dict[str, Any], timeout: float) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory() as folder:
        plan_path, result_path, log = (Path(folder, name) for name in ("plan.json", "result.json", "log"))
        plan_path.write_text(json.dumps(plan))
        command = [sys.executable, "-m", "benchmarks.engine_worker", plan_path, result_path]
        environment = {"VLLM_LOGGING_LEVEL": "WARNING"} | environment_of(provider)
        if provider in _OURS and (mode := of_started(environment)) != OURS:
            print(f"FAILED: {provider} is not started: {mode}", file=sys.stderr)
            return None
        status: int | str
        with log.open("w") as errors:
            try:
                status = run_whole(command, environment, errors, timeout)
            except KeyboardInterrupt:
                if not result_path.exists():
                    raise
                status = INTERRUPTED
        if status:
            lines = log.read_text().splitlines()
            causes = [line for line in lines[:-30] if "Error" in line][:10]  # of the process that started the last one
            tail = "\n".join([*causes, *lines[-30:]])
            print(f"FAILED: {provider}, exit status {status}; of its log:\n{tail}", file=sys.stderr)
            if not (isinstance(status, str) and result_path.exists()):
                return None
        result = json.loads(result_path.read_text())
        if provider in _OURS and result["mode"] != OURS:
            print(f"FAILED: {provider}: {result['mode']}", file=sys.stderr)
            return None
        return result | ({INTERRUPTED: True} if status == INTERRUPTED else {})


def run_whole(command: Sequence[str | Path], environment: dict[str, str], errors: IO[str], timeout: float) -> int | str:
    """Run a command and end whatever it has started.

    Args:
        errors: where it writes them.
        timeout: seconds that it has.

    Returns:
        Its exit status, or that it has none.
    """
    process = subprocess.Popen(command, env=environment, stderr=errors, start_new_session=True)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return f"none after {timeout:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure_online(options: argparse.Namespace, providers: Sequence[str]) -> dict[str, Latencies | None]:
    """Latencies of each provider's server under the online load; None if it failed, which is said on stderr. The
    servers are on one GPU at the same time, and share the room for KV caches.
    """
    print("\nonline", flush=True)
    modes = {provider: of_started(os.environ | PROVIDERS[provider]) for provider in providers}
    if others := [provider for provider in providers if provider in _OURS and modes[provider] != OURS]:
        print(f"FAILED: {', '.join(others)}, online: {modes[others[0]]}", file=sys.stderr)
        return dict.fromkeys(providers)
    count = len(providers)
    arguments = ["--max-model-len", str(options.max_model_len)]
    if options.kv_cache_gib:
        arguments += ["--kv-cache-memory-bytes", str(int(options.kv_cache_gib * 2**30 / count))]
        arguments += ["--gpu-memory-utilization", f"{0.9 / count:.3f}"]
    environments = {provider: PROVIDERS[provider] for provider in providers}
    found = engine_online.run(options.model, arguments, LOADS[options.workloads], environments, _TURNS)
    for provider, error in found.items():
        if isinstance(error, Exception):
            text = f"{one_line(error)}\n{getattr(error, 'stderr', '') or ''}"
            print(f"FAILED: {provider}, online: {text}", file=sys.stderr)
    return {provider: None if isinstance(seen, Exception) else seen for provider, seen in found.items()}


class Rows:
    """The rows for the data, of one setting."""

    def __init__(self, setting: Setting) -> None:
        self.found: list[Measurement] = []
        self._setting = asdict(setting)

    def add(
        self,
        provider: str,
        case: str,
        metric: str,
        unit: str,
        samples: list[float],
        stock: list[float] | None,
        *,
        same_bits: bool | None,
    ) -> None:
        """One more: a median, and its ratio to that of plain vLLM.

        Args:
            provider: whose samples.
            case: of :func:`case_text`.
            metric: what is measured.
            unit: of the samples.
            samples: one or more.
            stock: those of plain vLLM, if there are any.
            same_bits: whether a request had the bits that it should, or of plain vLLM, which promises none, those that
                it had alone; None where that was not looked at.
        """
        spread = Spread.of(samples if len(samples) > 1 else samples * 2)
        other = None if not stock else Spread.of(stock if len(stock) > 1 else stock * 2)
        ratio = spread.p50 / other.p50 if other and other.p50 else None
        bits: Bits = "-" if same_bits is None else "equal" if same_bits else "differ"
        spreads = asdict(spread) | self._setting
        self.found.append(Measurement("engine", provider, case, metric, unit, **spreads, ratio=ratio, bits=bits))


def measurements(
    results: dict[str, dict[str, Any]], workloads: str, setting: Setting, keys: str = ""
) -> list[Measurement]:
    """The rows for the data: every workload, start-up and memory, of every provider. Those of exact arithmetic and of a
    tree are ours, and their case says so.

    Args:
        results: by provider.
        workloads: their name.
        setting: of the run.
        keys: what every case says beside its own.
    """
    rows, stock = Rows(setting), results.get("stock")
    for provider, result in results.items():
        recorded, differs = ("ours", _FORMS[provider][0]) if provider in _FORMS else (provider, "")
        differs = f" {keys}{differs}" if keys else differs
        add = partial(rows.add, recorded, same_bits=result.get("same_bits"))
        others = (stock or {}).get("samples", ())
        for workload, samples, other in zip_longest(WORKLOADS[workloads], result.get("samples", ()), others):
            if samples:  # an engine that was cut short has the first ones
                add(workload.case + differs, workload.metric, workload.unit, samples, other)
        for metric, unit in (("startup", "s"), ("memory", "MiB")):
            if metric in result:
                other = (stock or {}).get(metric)
                add(case_text(workload=metric) + differs, metric, unit, [result[metric]], other and [other])
        for metric, samples in (result.get("online") or {}).items():
            case, other = LOADS[workloads].case + differs, ((stock or {}).get("online") or {}).get(metric)
            add(case, metric, "ms", samples, other)
            add(case, f"{metric}-p99", "ms", [_p99(samples)], other and [_p99(other)])
    return rows.found


def _p99(samples: list[float]) -> float:
    return statistics.quantiles(samples, n=100, method="inclusive")[98]


def print_summary(rows: Sequence[Measurement], console: Console) -> None:
    """Print a line for each case: each provider's median, and its ratio to stock; of ours in another form also that
    to the usual one.
    """
    medians = {(row.case, row.metric, row.provider): row.p50 for row in rows}
    providers = list(dict.fromkeys(row.provider for row in rows))
    table = Table("case", *providers, title="Engines: median, and ratio to stock", title_justify="left")
    cases = dict.fromkeys((row.case, row.metric, row.unit) for row in rows)
    for case, metric, unit in cases:
        cells = []
        for provider in providers:
            own = [row for row in rows if (row.case, row.metric, row.provider) == (case, metric, provider)]
            ratio = f", {own[0].ratio:.3f}" if own and own[0].ratio is not None else ""
            for ending, of_what in _FORMS.values():
                usual = medians.get((case.removesuffix(ending), metric, provider))
                if own and usual and case.endswith(ending):
                    ratio += f", {own[0].p50 / usual:.3f} of {of_what}"
            cells.append(f"{own[0].p50:.4g} {unit}{ratio}" if own else "")
        table.add_row(case if f"workload={metric}" in case.split() else f"{case}: {metric}", *cells)
    bits = {provider: {row.bits for row in rows if row.provider == provider} for provider in providers}
    table.add_row(
        "bits alone and with concurrent requests",
        *(next(bit for bit in ("differ", "equal", "-") if bit in bits[provider]) for provider in providers),
    )
    console.print(table)


def options_of(
    program: str, does: str, providers: Sequence[str], workloads: Sequence[str], max_model_len: int, kv_cache_gib: float
) -> argparse.ArgumentParser:
    """What every benchmark of engines is told: the checkpoint, who takes part, what they do, and room. The first of the
    workloads is the default.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=f"{does} Exit status: 0 all well, 1 our bits differ or an engine failed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", help="a checkpoint")
    drawn = "vLLM's: with dummy it draws the weights, and the model's folder needs a config.json alone"
    parser.add_argument("--load-format", default="auto", help=drawn)
    parser.add_argument(
        "--out", type=Path, default=DATA / "engine.csv", help="CSV file; rows of other cases, versions and GPUs stay"
    )
    usual = [provider for provider in providers if provider in USUAL]
    parser.add_argument("--providers", nargs="+", choices=providers, default=usual, help="who takes part")
    parser.add_argument("--workloads", choices=workloads, default=workloads[0], help="what they do")
    parser.add_argument("--samples", type=int, default=3, help="how often each workload is timed")
    parser.add_argument("--max-model-len", type=int, default=max_model_len, help="of the engine")
    parser.add_argument("--kv-cache-gib", type=float, default=kv_cache_gib, help="KV cache, the same for all")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one engine")
    together = "engines that share the GPU, where it has memory for so many; they start, and are timed, one by one"
    parser.add_argument("--together", type=at_least(1), default=1, help=together)
    parser.add_argument("--tensor-parallel-size", type=at_least(1), default=1, help="GPUs of an engine")
    rank = "of the adapters (LoRA) that requests of the workloads with adapters have"
    parser.add_argument("--rank", type=at_least(1), default=16, help=rank)
    parser.add_argument("--keys", default="", help="what each case in the data says, too, such as 'model=30b-a3b'")
    return parser


def keys_of(options: argparse.Namespace) -> str:
    """What every case says: what the user told, how many GPUs an engine has, if more than one, and the rank of its
    adapters, if it takes any.
    """
    size = options.tensor_parallel_size
    more = {"tp": size} if size > 1 else {}
    more |= {"rank": options.rank} if most_adapters(options.workloads) else {}
    return " ".join(filter(None, (options.keys, case_text(**more))))


def plan_of(options: argparse.Namespace, **engine: Any) -> dict[str, Any]:
    """What :mod:`benchmarks.engine_worker` reads: the workloads, and an engine with some more arguments."""
    arguments = {
        "model": options.model,
        "max_model_len": options.max_model_len,
        "kv_cache_memory_bytes": int(options.kv_cache_gib * 2**30),
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "tensor_parallel_size": options.tensor_parallel_size,
        "load_format": options.load_format,
    }
    if most := most_adapters(options.workloads):
        arguments |= {"enable_lora": True, "max_loras": most, "max_lora_rank": options.rank}
    return {
        "engine": arguments | of_engine(options.workloads) | engine,
        "concurrent": CONCURRENT,
        "workloads": options.workloads,
        "samples": options.samples,
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = options_of(
        "benchmarks.engine",
        "Check that a request has the same bits alone and with concurrent requests, then time engines.",
        list(PROVIDERS),
        [*LOADS, "short", "steps", "prefill", *_OF_FEATURES],
        max_model_len=40_000,
        kv_cache_gib=48,
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--offline", action="store_true", help="leave out the server under an online load")
    part.add_argument("--online", action="store_true", help="only that server, whose bits are not looked at")
    more = 'more arguments of vllm.LLM for the others than ours, such as \'{"gdn_prefill_backend": "triton"}\''
    parser.add_argument("--theirs", type=json.loads, default={}, metavar="JSON", help=more)
    options = parser.parse_args(arguments)
    options.offline |= options.workloads not in LOADS
    if options.theirs and not options.offline:
        parser.error("--theirs is of engines and not of servers: pass --offline, too")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = _parse(arguments)
    plan = plan_of(options)
    results: dict[str, dict[str, Any]] = {}

    def keep() -> list[Measurement]:
        """After each part, so that a run that is cut short has what it measured."""
        rows = measurements(results, options.workloads, Setting.here(), keys_of(options))
        update(options.out, rows)
        return rows

    theirs = plan | {"engine": plan["engine"] | options.theirs}
    plans = [(provider, plan if provider in _OURS else theirs) for provider in options.providers]
    measured = ({} for _ in plans) if options.online else measured_of(plans, options.together, options.timeout)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was measured until then is kept, too
    try:
        for provider, result in zip(options.providers, measured, strict=True):
            if result is None:
                continue
            results[provider] = result
            keep()
            if INTERRUPTED in result:
                raise KeyboardInterrupt
        if not options.offline and results:
            for provider, latencies in measure_online(options, list(results)).items():
                results[provider]["online"] = latencies
    except KeyboardInterrupt:
        print("interrupted: the rest was not measured", file=sys.stderr)
    finally:
        signal.signal(signal.SIGTERM, before)
    print_summary(keep(), Console())
    whole = len(WORKLOADS[options.workloads])
    failed = len(results) < len(options.providers)
    failed |= any(len(result.get("samples", range(whole))) < whole for result in results.values())
    failed |= not options.offline and any(result.get("online") is None for result in results.values())
    kept = all(results.get(provider, {}).get("same_bits", True) for provider in _OURS)
    return 1 if failed or not kept else 0


if __name__ == "__main__":
    sys.exit(main())
