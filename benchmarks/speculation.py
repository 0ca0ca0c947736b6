"""Benchmark of speculative decoding: `python -m benchmarks.speculation MODEL`. Plain vLLM and ours take turns on one
GPU, with the same drafters. Bits first, against the engine without a drafter, then time. Of random weights their texts
differ, and so do the drafts that they accept; with --predictable they write the same.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.engine import Rows, keys_of, measured_of, options_of, plan_of, print_summary
from benchmarks.engine_workloads import WORKLOADS
from benchmarks.predictable_model import make_predictable
from benchmarks.record import Measurement, Setting, case_text, update
from tests.engine.drafters import make_head
from vllm_batch_invariant.verify.harness.requests import NGRAMS

PROVIDERS = ("stock", "ours")
DRAFTERS = ("ngram", "ngram-repeats", "itself", "eagle3")
"""N-grams of random prompts, which are hardly ever right; of prompts that repeat themselves, as some answers then do;
the model itself, which is almost always right; and an EAGLE-3 head of random weights, which never is.
"""


def configuration(drafter: str, model: str, drafts: int, head: str = "") -> dict[str, Any]:
    """vLLM's --speculative-config.

    Args:
        drafter: of :data:`DRAFTERS`.
        model: the target's folder.
        drafts: how many.
        head: an EAGLE-3 head's folder.
    """
    made = {
        "ngram": NGRAMS,
        "ngram-repeats": NGRAMS,
        "itself": {"method": "draft_model", "model": model},
        "eagle3": {"method": "eagle3", "model": head},
    }[drafter]
    return made | {"num_speculative_tokens": drafts}


def workloads_of(drafter: str, workloads: str) -> str:
    """The name of the workloads that a drafter is timed with."""
    return f"{workloads}-repeats" if drafter.endswith("-repeats") else workloads


def _step_times(result: dict[str, Any], place: int) -> list[float]:
    """Of a verify step of a workload: whose answers have other tokens, have other drafts accepted."""
    return [sample * result["tokens_per_step"][place] for sample in result["samples"][place]]


def measurements(
    results: dict[tuple[str, str, int], dict[str, Any]],
    workloads: str,
    alone: str | None,
    setting: Setting,
    keys: str = "",
) -> list[Measurement]:
    """The rows for the data: time per token, time of a verify step, tokens that one gives.

    Args:
        results: by provider, drafter and number of drafts.
        workloads: their name.
        alone: the target's tokens and logprobs of our engine without a drafter; None where it failed.
        setting: of the run.
        keys: what every case says beside its own.
    """
    rows = Rows(setting)
    for (provider, drafter, drafts), result in results.items():
        stock = results.get(("stock", drafter, drafts))
        of = f"{keys} {case_text(spec=drafter, k=drafts)}".lstrip()
        same_bits = None if provider == "stock" else result["same_bits"] and result["alone"] == alone
        add = partial(rows.add, provider, same_bits=same_bits)
        for place, workload in enumerate(WORKLOADS[workloads_of(drafter, workloads)]):
            other = stock and stock["samples"][place]
            add(f"{workload.case} {of}", workload.metric, workload.unit, result["samples"][place], other)
            steps, other = _step_times(result, place), stock and _step_times(stock, place)
            add(f"{workload.case} {of}", "step", workload.unit, steps, other)
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
    known = "give the model an embedding and a head of which each token is followed by a certain one"
    parser.add_argument("--predictable", action="store_true", help=known)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = _parse(arguments)
    results: dict[tuple[str, str, int], dict[str, Any]] = {}
    rows: list[Measurement] = []
    wanted = list(itertools.product(options.drafters, options.drafts, options.providers))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as head:
        if options.predictable:
            options.keys = f"{options.keys} {case_text(model='predictable')}".lstrip()
            options.model = str(make_predictable(Path(options.model), Path(folder)))
        if "eagle3" in options.drafters:
            make_head(Path(options.model), Path(head), "eagle3")
        counted = partial(plan_of, options, disable_log_stats=False)
        plans = [("ours", counted() | {"workloads": "none"})] if "ours" in options.providers else []
        for drafter, drafts, provider in wanted:
            plan = counted(speculative_config=configuration(drafter, options.model, drafts, head))
            plans.append((provider, plan | {"workloads": workloads_of(drafter, options.workloads)}))
        found = measured_of(plans, options.together, options.timeout)
        plain = next(found) if "ours" in options.providers else None
        for drafter, drafts, provider in wanted:
            print(f"\n{drafter}, {drafts} drafts", end="")
            if (result := next(found)) is not None:
                results[provider, drafter, drafts] = result
                alone = plain and plain["alone"]
                rows = measurements(results, options.workloads, alone, Setting.here(), keys_of(options))
                update(options.out, rows)
    print_summary(rows, Console())
    return 1 if len(results) < len(wanted) or any(row.bits == "differ" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
