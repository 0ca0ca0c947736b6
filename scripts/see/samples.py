"""Makes the site's map of a recorded run out of what ``vllm-batch-invariant reproduce --json`` wrote.

usage: python -m scripts.see.samples FILE [FILE ...] [--machine NAME --torch VERSION] [--out FILE]

The site's recording is that of a GPU; the demonstration's is made in the same way:

    make demo
    python -m scripts.see.samples .cache/demo/report.json
"""

import argparse
import json
from collections.abc import Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from scripts.see.data import DATA, processor
from vllm_batch_invariant.verify.answers import first_difference


def of_result(result: dict[str, Any]) -> dict[str, Any]:
    """One setting: the different texts, the different answers, and runs of (answer, how many in a row gave it)."""
    samples, comparison = result["samples"], result["comparison"]
    running = sorted(map(int, result["batches"]["running"]))
    texts = list(dict.fromkeys(answer["text"] for answer in samples["different"]))
    return {
        "label": result["label"],
        "mode": result["info"]["mode"],
        "completions": comparison["completions"],
        "logprob_sequences": comparison["logprob_sequences"],
        "batch": [running[0], running[-1]],
        "seconds": round(result["seconds"], 1),
        "others": result["others"],
        "runs": [[answer, len(tuple(found))] for answer, found in groupby(samples["which"])],
        "texts": texts,
        "different": [
            {name: answer[name] for name in ("first_logprob", "first_token", "candidates")}
            | {"text": texts.index(answer["text"]), "length": len(answer["tokens"])}
            | {"first_number": first_number(samples["different"][0], answer)}
            for answer in samples["different"]
        ],
    }


def first_number(reference: dict[str, Any], answer: dict[str, Any]) -> int | None:
    """The first token that is another or whose logprob is another number; before it, only the list of candidates may be
    another, where several have the same logprob.
    """
    shown = ([*zip(one["tokens"], one["logprobs"], strict=True)] for one in (reference, answer))
    listed = [
        one["position"]
        for one in answer["candidates"]
        if [logprob for _, logprob in one["expected"]] != [logprob for _, logprob in one["got"]]
    ]
    return min([*filter(lambda place: place is not None, [first_difference(*shown)]), *listed], default=None)


def of_runs(runs: Sequence[dict[str, Any]], machine: str, torch: str) -> dict[str, Any]:
    """What the site shows of runs.

    Raises:
        ValueError: they are not of one request to one model in one setting.
    """
    run = runs[0]
    for name in ("target", "arguments", "request"):
        if any(other[name] != run[name] for other in runs):
            raise ValueError(f"these runs cannot be compared: they differ in {name}")
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
        "results": [of_result(result) for run in runs for result in run["results"]],
    }


def main(arguments: list[str] | None = None) -> None:
    """Write the map's data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="FILE", help="what reproduce --json wrote")
    parser.add_argument("--machine", help="the GPU, or the processor that served (default: this processor)")
    parser.add_argument("--torch", default=version("torch"), help="the PyTorch that served (default: that of here)")
    parser.add_argument("--out", type=Path, default=DATA / "samples.json", help="default: site/data/samples.json")
    options = parser.parse_args(arguments)
    runs = [json.loads(path.read_text()) for path in options.runs]
    machine = options.machine or f"{processor()}, {runs[0]['machine']['cores']} cores"
    options.out.write_text(json.dumps(of_runs(runs, machine, options.torch)) + "\n")
    print(options.out)


if __name__ == "__main__":
    main()
