"""Benchmark of speculative decoding: `python -m benchmarks.speculation MODEL`. Plain vLLM and ours take turns on one
GPU, with the same drafters. Bits first, against the engine without a drafter, then time.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.engine import CONCURRENT, measure, print_summary
from benchmarks.engine_workloads import WORKLOADS
from benchmarks.record import DATA, Bits, Measurement, Setting, case_text, update
from benchmarks.spread import Spread

PROVIDERS = ("stock", "ours")
DRAFTERS = ("ngram", "itself")
"""N-grams of random prompts, which are hardly ever right, and the model itself, which is almost always."""


def configuration(drafter: str, model: str, drafts: int) -> dict[str, Any]:
    """vLLM's --speculative-config."""
    made = {
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "itself": {"method": "draft_model", "model": model},
    }[drafter]
    return made | {"num_speculative_tokens": drafts}


def measurements(
    results: dict[tuple[str, str, int], dict[str, Any]], workloads: str, alone: str | None, setting: Setting
) -> list[Measurement]:
    """The rows for the data.

    Args:
        results: by provider, drafter and number of drafts.
        workloads: their name.
        alone: the target's tokens and logprobs of our engine without a drafter; None where it failed.
        setting: of the run.
    """
    found = []
    for (provider, drafter, drafts), result in results.items():
        stock = results.get(("stock", drafter, drafts))
        equal = result["same_bits"] and result["alone"] == alone
        bits: Bits = "-" if provider == "stock" else "equal" if equal else "differ"
        cases = [
            (workload.case, workload.metric, workload.unit, result["samples"][place], stock and stock["samples"][place])
            for place, workload in enumerate(WORKLOADS[workloads])
        ]
        accepted = [result["accepted"]] * 2
        cases.append(("workload=accepted", "length", "tokens", accepted, stock and [stock["accepted"]] * 2))
        for case, metric, unit, samples, of_stock in cases:
            spread = Spread.of(samples)
            ratio = spread.p50 / Spread.of(of_stock).p50 if of_stock else None
            name = f"{case} {case_text(spec=drafter, k=drafts)}"
            spreads = asdict(spread)
            row = Measurement(
                "engine", provider, name, metric, unit, **spreads, ratio=ratio, bits=bits, **asdict(setting)
            )
            found.append(row)
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speculation",
        description="Check that a request has the bits that it has without a drafter, then time tokens and count how "
        "many a verify step gives. Exit status: 0 all well, 1 our bits differ or an engine failed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", help="a checkpoint")
    parser.add_argument("--out", type=Path, default=DATA / "engine.csv", help="CSV file; rows of other cases stay")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS), help="who takes part")
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS), help="which drafters")
    parser.add_argument("--drafts", nargs="+", type=int, default=[1, 3, 7], help="numbers of drafts")
    parser.add_argument("--workloads", choices=["speculation", "speculation-small"], default="speculation")
    parser.add_argument("--samples", type=int, default=3, help="how often each workload is timed")
    parser.add_argument("--max-model-len", type=int, default=4096, help="of the engine")
    parser.add_argument("--kv-cache-gib", type=float, default=24, help="KV cache, the same for all")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one engine")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = _parse(arguments)
    engine = {
        "model": options.model,
        "max_model_len": options.max_model_len,
        "kv_cache_memory_bytes": int(options.kv_cache_gib * 2**30),
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
    }
    plan = {"engine": engine, "concurrent": CONCURRENT, "workloads": options.workloads, "samples": options.samples}
    plain = measure("ours", plan | {"workloads": "none"}, options.timeout) if "ours" in options.providers else None
    results: dict[tuple[str, str, int], dict[str, Any]] = {}
    rows: list[Measurement] = []
    wanted = list(itertools.product(options.drafters, options.drafts, options.providers))
    for drafter, drafts, provider in wanted:
        print(f"\n{drafter}, {drafts} drafts", end="")
        speculation = {"speculative_config": configuration(drafter, options.model, drafts)}
        result = measure(provider, plan | {"engine": engine | speculation}, options.timeout)
        if result is not None:
            results[provider, drafter, drafts] = result
            rows = measurements(results, options.workloads, plain and plain["alone"], Setting.here())
            update(options.out, rows)
    print_summary(rows, Console())
    return 1 if len(results) < len(wanted) or any(row.bits == "differ" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
