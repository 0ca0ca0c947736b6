"""What ``make demo`` shows: a small trained model is asked one question many times, by plain vLLM and with the mode.

usage: python -m scripts.demo MODEL [--samples N] [--max-tokens N] [--folder FOLDER]

The question is one at which plain vLLM was seen to part on a CPU, with AVX-512 and without, in bf16. It is long enough
that attention reads more than a block of keys from the first token of the answer on: without AVX-512 plain vLLM's sums
follow the batch there, and hardly anywhere else.
"""

import argparse
import csv
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from vllm_batch_invariant.cli import main as command

QUESTION = (
    "Last night I had a long dream in which I could fly over the roofs of my town, and in the morning I remembered "
    "every detail. Why do people dream, why do we forget most of our dreams as soon as we wake up, and do animals "
    "dream as well? Please explain in plain words what science knows about it, and what it does not know yet."
)
SERVE = "--dtype=bfloat16 --max-model-len=1024 --max-num-batched-tokens=16384"
"""Of both servers. With large steps no prompt is cut: plain vLLM ends with an error on a CPU where a seeded request's
is.
"""
ON_A_CPU = " --enforce-eager"
"""Compilation takes longer there than what it saves."""
SAMPLES = {"AVX512": 150}
"""By PyTorch's name of the CPU's vector instructions, so that the demonstration takes minutes."""
FEWER_SAMPLES = 60
"""Without AVX-512, where plain vLLM's matmuls in bf16 are slow."""
RECORDED = Path(__file__).parents[1] / "benchmarks" / "data" / "samples.csv"


def recorded_on_a_gpu() -> str:
    """The newest recorded run of plain vLLM on a GPU, in a sentence; empty if there is none."""
    with RECORDED.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["mode"] == "off" and "NVIDIA" in row["machine"]]
    if not rows:
        return ""
    row = max(rows, key=lambda row: row["date"])
    return (
        f"On an {row['machine'].removeprefix('NVIDIA ')} plain vLLM {row['vllm']} gave {row['completions']} different "
        f"texts and {row['logprob_sequences']} different logprobs in {row['samples']} answers "
        f"({row['model']}, {row['date']}): docs/results.md."
    )


def closing(results: list[dict[str, Any]], model: str, page: Path) -> list[str]:
    """What is said below the result: whether this CPU shows other texts, the page, and what to try next.

    Args:
        results: as in the JSON of ``reproduce``.
        model: the model's folder.
        page: the written page.
    """
    lines = []
    plain = results[0]["comparison"]
    if plain["completions"] == 1:
        same = "On this CPU all texts of plain vLLM are equal"
        found = (
            f"{same}; its logprobs are not." if plain["logprob_sequences"] > 1 else f"{same}, and so are its logprobs."
        )
        lines += [found, recorded_on_a_gpu()]
    program = os.path.relpath(Path(sys.executable).with_name("vllm-batch-invariant"))
    on = f"{program} {{}} {shlex.quote(model)}"
    lines += [
        f"The page with every answer: {page}",
        "Next, to be pasted:",
        f"  {on.format('check --quick')}    # which guarantees hold on this machine",
        f"  {on.format('bisect --plain')}    # the first operation of plain vLLM whose bits follow the batch",
        f"  {program} reproduce --base-url http://HOST:PORT    # a server of yours, as it runs",
    ]
    return [line for line in lines if line]


def main(arguments: list[str] | None = None) -> int:
    """Run the demonstration; returns the exit status of ``reproduce``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="the folder that make-checkpoint --real wrote")
    samples = SAMPLES.get(torch.backends.cpu.get_cpu_capability(), FEWER_SAMPLES)
    parser.add_argument("--samples", type=int, default=samples, metavar="N", help=f"answers (here: {samples})")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens of an answer (default: 64)")
    parser.add_argument("--folder", type=Path, default=Path(".cache/demo"), help="of the page and the JSON")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    page, report = options.folder / "index.html", options.folder / "report.json"
    print(f"3/4 and 4/4 asking plain vLLM, then the mode, the same question {options.samples} times:\n{QUESTION}\n")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    served = SERVE if torch.cuda.is_available() else SERVE + ON_A_CPU
    status = command(
        [
            *("reproduce", "--model", options.model, "--compare", "--chat", "--prompt", QUESTION),
            *("--samples", str(options.samples), "--max-tokens", str(options.max_tokens), "--concurrency", "64"),
            *("--serve-args", served, "--html", str(page), "--json", str(report)),
        ]
    )
    if status in (0, 1):
        results = json.loads(report.read_text())["results"]
        print("\n".join(closing(results, options.model, page)))
    return status


if __name__ == "__main__":
    sys.exit(main())
