"""Makes the site's map of a recorded run out of what ``vllm-batch-invariant reproduce --compare --json`` wrote.

usage: python -m scripts.see.samples FILE [--out FILE]

The site's recording was made on a CPU by

    vllm-batch-invariant make-checkpoint demo-model
    vllm-batch-invariant reproduce --model demo-model --compare --samples 1000 --max-tokens 24 --json run.json \
        --serve-args='--enforce-eager --max-num-batched-tokens=16384'
"""

import argparse
import json
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from scripts.see.data import DATA, processor


def of_result(result: dict[str, Any]) -> dict[str, Any]:
    """One setting: the different answers, and runs of (answer, how many samples in a row gave it)."""
    samples, comparison = result["samples"], result["comparison"]
    running = sorted(map(int, result["batches"]["running"]))
    return {
        "label": result["label"],
        "mode": result["info"]["mode"],
        "completions": comparison["completions"],
        "logprob_sequences": comparison["logprob_sequences"],
        "batch": [running[0], running[-1]],
        "seconds": round(result["seconds"], 1),
        "others": result["others"],
        "runs": [[answer, len(tuple(found))] for answer, found in groupby(samples["which"])],
        "different": [
            {name: answer[name] for name in ("text", "first_logprob", "first_token", "candidates")}
            | {"length": len(answer["tokens"])}
            for answer in samples["different"]
        ],
    }


def of_run(run: dict[str, Any], machine: str, torch: str) -> dict[str, Any]:
    """What the site shows of a run."""
    return {
        "written_by": "python -m scripts.see.samples",
        "where": {
            "machine": machine,
            "torch": torch,
            "vllm": run["results"][0]["info"]["versions"]["vllm"],
            "vllm-batch-invariant": run["written_by"],
            "date": run["began"][:10],
        },
        "target": run["target"],
        "arguments": run["arguments"],
        "request": {name: run["request"][name] for name in ("prompt", "max_tokens", "temperature", "logprobs")},
        "results": [of_result(result) for result in run["results"]],
    }


def main(arguments: list[str] | None = None) -> None:
    """Write the map's data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="FILE", help="what reproduce --compare --json wrote on this machine")
    parser.add_argument("--out", type=Path, default=DATA / "samples.json", help="default: site/data/samples.json")
    options = parser.parse_args(arguments)
    run = json.loads(options.run.read_text())
    machine = f"{processor()}, {run['machine']['cores']} cores"
    options.out.write_text(json.dumps(of_run(run, machine, version("torch"))) + "\n")
    print(options.out)


if __name__ == "__main__":
    main()
