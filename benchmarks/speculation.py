"""Benchmark of speculative decoding: `python -m benchmarks.speculation MODEL`. Plain vLLM and ours take turns on one
GPU, with the same drafters. Bits first, against the engine without a drafter, then time.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console

from benchmarks.engine import Rows, measure, options_of, plan_of, print_summary
from benchmarks.engine_workloads import WORKLOADS
from benchmarks.record import Measurement, Setting, case_text, update
from vllm_batch_invariant.verify.harness.requests import NGRAMS

PROVIDERS = ("stock", "ours")
DRAFTERS = ("ngram", "itself")
"""N-grams of random prompts, which are hardly ever right, and the model itself, which is almost always."""


def configuration(drafter: str, model: str, drafts: int) -> dict[str, Any]:
    """vLLM's --speculative-config."""
    made = {
        "ngram": NGRAMS,
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
    rows = Rows(setting)
    for (provider, drafter, drafts), result in results.items():
        stock, of = results.get(("stock", drafter, drafts)), case_text(spec=drafter, k=drafts)
        add = partial(rows.add, provider, same_bits=result["same_bits"] and result["alone"] == alone)
        for place, workload in enumerate(WORKLOADS[workloads]):
            other = stock and stock["samples"][place]
            add(f"{workload.case} {of}", workload.metric, workload.unit, result["samples"][place], other)
        accepted = stock and [stock["accepted"]]
        add(f"workload=accepted {of}", "length", "tokens", [result["accepted"]], accepted)
    return rows.found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = options_of(
        "benchmarks.speculation",
        "Check that a request has the bits that it has without a drafter, then time tokens and count how many a verify "
        "step gives.",
        PROVIDERS,
        ("speculation", "speculation-small"),
        max_model_len=4096,
        kv_cache_gib=24,
    )
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS), help="which drafters")
    parser.add_argument("--drafts", nargs="+", type=int, default=[1, 3, 7], help="numbers of drafts")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = _parse(arguments)
    counted = partial(plan_of, options, disable_log_stats=False)
    plain = measure("ours", counted() | {"workloads": "none"}, options.timeout) if "ours" in options.providers else None
    results: dict[tuple[str, str, int], dict[str, Any]] = {}
    rows: list[Measurement] = []
    wanted = list(itertools.product(options.drafters, options.drafts, options.providers))
    for drafter, drafts, provider in wanted:
        print(f"\n{drafter}, {drafts} drafts", end="")
        plan = counted(speculative_config=configuration(drafter, options.model, drafts))
        result = measure(provider, plan, options.timeout)
        if result is not None:
            results[provider, drafter, drafts] = result
            rows = measurements(results, options.workloads, plain and plain["alone"], Setting.here())
            update(options.out, rows)
    print_summary(rows, Console())
    return 1 if len(results) < len(wanted) or any(row.bits == "differ" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
