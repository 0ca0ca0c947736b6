"""Times top-k, top-p and listed logprobs on a GPU against vLLM's own: `python -m benchmarks.sampling`. Bits first."""

import statistics
import sys
from collections.abc import Callable

import torch

from benchmarks.record import Setting
from benchmarks.timing import Timer
from vllm_batch_invariant.integration.sampling import compute_topk_scores
from vllm_batch_invariant.ops.top_k_top_p import top_k_top_p

VOCABULARY = 152_064
ROWS = (1, 8, 64, 256)
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
    for name, arguments in {"top_p": (None, p), "top_k": (k, None), "top_k top_p": (k, p)}.items():
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
    return found | {f"{LISTED} logprobs": (ways, kept)}


def main() -> int:
    """Print a line for every case; the exit status is the number of those whose bits are wrong."""
    setting, timer, wrong = Setting.here(), Timer(), 0
    print(f"{setting.gpu}, {setting.versions}, vocabulary {VOCABULARY}; microseconds", flush=True)
    for scale in (1.0, 3.0):
        for rows in ROWS:
            for name, (ways, kept) in cases(rows, scale).items():
                calls = {way: [call] for way, call in ways.items()}
                timings = timer.time(calls, _EXPECTED_MICROSECONDS, _SAMPLES)
                times = {way: statistics.median(timing.samples) for way, timing in timings.items()}
                wrong += not kept
                values = "  ".join(f"{way} {time:8.1f}" for way, time in times.items())
                ratio = times["ours"] / times["stock"]
                print(
                    f"scale={scale} rows={rows:<4} {name:12} {values}  ratio {ratio:5.2f}  bits "
                    f"{'equal' if kept else 'DIFFER'}",
                    flush=True,
                )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
