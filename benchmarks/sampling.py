"""Times top-k, top-p and listed logprobs on a GPU against vLLM's own: `python -m benchmarks.sampling`. Bits first."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch

from benchmarks.record import DATA, Bits, Measurement, Setting, case_text, write
from benchmarks.spread import Spread
from benchmarks.timing import Timer
from vllm_batch_invariant.integration.sampling.sampler import compute_topk_scores
from vllm_batch_invariant.ops.top_k_top_p import top_k_top_p

VOCABULARY = 152_064
ROWS = (1, 8, 64, 256)
STDS = (1.0, 3.0)
LISTED = 20
_SAMPLES = 11
_EXPECTED_MICROSECONDS = 100.0

Ways = dict[str, Callable[[], object]]


def cases(rows: int, scale: float) -> dict[str, tuple[Ways, bool]]:
    """By name, ways to compute the same of some rows of logits, `stock` first, and whether ours kept its bits."""
    from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores as stock_scores

    generator = torch.Generator("cuda").manual_seed(rows)
    logits = (torch.randn(rows, VOCABULARY, generator=generator, device="cuda") * scale).bfloat16()
    wide = logits.float()
    k = torch.full((rows,), 50, dtype=torch.int32, device="cuda")
    p = torch.full((rows,), 0.9, device="cuda")
    sampled = logits.argmax(-1)
    found = {}
    for name, arguments in {"top_p": (None, p), "top_k": (k, None), "top_k_top_p": (k, p)}.items():
        last = [argument if argument is None else argument[-1:] for argument in arguments]
        kept = torch.equal(top_k_top_p(wide[-1:].clone(), *last), top_k_top_p(wide.clone(), *arguments)[-1:])
        ways = {
            "stock": lambda arguments=arguments: apply_top_k_top_p_triton(wide.clone(), *arguments),
            "ours": lambda arguments=arguments: top_k_top_p(wide.clone(), *arguments),
            "copy": wide.clone,
        }
        found[name] = ways, kept
    alone = compute_topk_scores(logits[-1:], 5, sampled[-1:]).logprob_token_ids
    kept = torch.equal(alone, compute_topk_scores(logits, LISTED, sampled).logprob_token_ids[-1:, :6])
    ways = {
        "stock": lambda: stock_scores(logits, LISTED, sampled),
        "ours": lambda: compute_topk_scores(logits, LISTED, sampled),
    }
    return found | {"logprobs": (ways, kept)}


def measured(case: str, ways: Ways, bits: Bits, timer: Timer, setting: Setting) -> list[Measurement]:
    """The rows of one case, `stock` first; a copy of the logits, with which both ways to filter begin, is timed too."""
    timings = timer.time({way: [call] for way, call in ways.items()}, _EXPECTED_MICROSECONDS, _SAMPLES)
    spreads = {way: Spread.of(timing.samples) for way, timing in timings.items()}
    return [
        Measurement(
            "sampling",
            way,
            case,
            "time",
            "us",
            **asdict(spread),
            ratio=spread.p50 / spreads["stock"].p50,
            bits=bits if way == "ours" else "-",
            **asdict(setting),
        )
        for way, spread in spreads.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status: 1 where bits are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sampling",
        description="Compare the bits of top-k, top-p and listed logprobs on a GPU, alone and among other rows, then "
        "time them against vLLM's own.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="rows of logits")
    parser.add_argument("--std", nargs="+", type=float, default=STDS, help="standard deviations of the logits")
    parser.add_argument("--out", type=Path, default=DATA / "sampling.csv", help="CSV file to replace")
    options = parser.parse_args(arguments)
    setting, timer, found = Setting.here(), Timer(), []
    print(f"{setting.gpu}, {setting.versions}, vocabulary {VOCABULARY}; microseconds", flush=True)
    for scale, rows in product(options.std, options.rows):
        for name, (ways, kept) in cases(rows, scale).items():
            case = case_text(operation=name, rows=rows, vocabulary=VOCABULARY, std=f"{scale:g}")
            these = measured(case, ways, "equal" if kept else "differ", timer, setting)
            values = "  ".join(f"{one.provider} {one.p50:.1f}" for one in these)
            ratio = next(one.ratio for one in these if one.provider == "ours")
            print(f"{case}: {values}  ratio {ratio:.2f}  bits {'equal' if kept else 'DIFFER'}", flush=True)
            found += these
            write(options.out, found)  # what is measured is kept if the run is interrupted
    return int(any(one.bits == "differ" for one in found))


if __name__ == "__main__":
    sys.exit(main())
