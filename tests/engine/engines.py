"""Plans of requests, run through a real vLLM in a fresh process."""

import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.documents import blocks
from vllm_batch_invariant.envs import FLAG, UNTRIED
from vllm_batch_invariant.integration.engine.endpoint import METHOD
from vllm_batch_invariant.verify.bisect.engine import WORKER_EXTENSION
from vllm_batch_invariant.verify.check.engine import EngineRun
from vllm_batch_invariant.verify.check.guarantees import cases_of_engines
from vllm_batch_invariant.verify.check.presets import Preset
from vllm_batch_invariant.verify.check.results import CheckResults
from vllm_batch_invariant.verify.harness.requests import concurrent_requests, request, tokens
from vllm_batch_invariant.verify.harness.worker import Engine, EngineFailed

__all__ = [
    "CHECK", "EAGER_ON_GPU", "OF_DEVICE", "PATHS", "ROOT", "SETTINGS", "UNTRIED_THERE", "EngineFailed", "Result",
    "arguments_of", "certified", "check_of", "concurrent_requests", "differing_answers", "request", "run",
    "run_example", "selected", "some_exhaustive", "tokens", "untried_on_gpu",
]  # fmt: skip

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
SETTINGS = {"PYTHONPATH": PATHS, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
OF_DEVICE = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 4 << 30} if torch.cuda.is_available() else {}
"""A GPU may be shared with other engines, whose memory vLLM would count as its own."""
UNTRIED_THERE = {UNTRIED.name: "1"} if torch.cuda.is_available() else {}
"""Variables of engines with settings that start on a GPU only so, such as states beside other dtypes than bf16."""
untried_on_gpu = pytest.mark.skipif(
    torch.cuda.is_available() and UNTRIED.read() != "1", reason=f"no GPU has run it; {UNTRIED.name}=1 does"
)
"""Of tests whose settings start on a GPU only so, and that none has passed."""
CACHE = {} if torch.cuda.is_available() else {"kv_cache_memory_bytes": 256 << 20}
"""Less than the least of :data:`SETTINGS`, 1 GB: an engine fills its KV cache with zeros when it starts."""
EAGER_ON_GPU = {"enforce_eager": True} if torch.cuda.is_available() else {}
"""For a bisection, whose hooks see nothing inside CUDA graphs."""
CHECK = Preset("tests", 8, (16, 43), (64,), ("top_p",), (4, 8), (2, 16, 45), 1)


@dataclass
class Result:
    """What one engine answered."""

    steps: dict[str, list[dict[str, Any]]]
    preemptions: int
    kernels: dict[str, list[str]]
    compilation: str
    receipts: dict[str, Any] | None
    listed: dict[str, list[dict[str, Any]]] | None
    bisected: dict[str, Any] | None
    afterwards: Any
    log: str = field(repr=False)

    def completions(self, step: str, which: int = 0) -> list[dict[str, Any]]:
        """Tokens and logprob bits of one request of a step."""
        return self.steps[step][which]["completions"]


def run(
    engine: dict[str, Any],
    steps: list[dict[str, Any]],
    flag: str | None,
    receipts_of: list[int] | None = None,
    bisection: Sequence[Any] = (),
    listed_for: Sequence[list[list[int]]] = (),
    afterwards: Callable[[Engine], Any] = lambda engine: None,
    **environment: str,
) -> Result:
    """Run a plan with an engine of its own.

    Args:
        engine: arguments of ``vllm.LLM``, the model among them.
        receipts_of: a prompt; see ``receipts``.
        bisection: a function of ``bisected`` and its arguments.
        listed_for: arguments of ``listed``: prompts.
        afterwards: is given the engine after the plan's steps.

    Raises:
        EngineFailed: with what its process printed.
    """
    settings = CACHE | engine
    model = settings.pop("model")
    if bisection:
        settings.setdefault("worker_extension_cls", WORKER_EXTENSION)
    with Engine(model, arguments_of(settings), flag, SETTINGS | environment, patience=400) as running:
        done = {step["name"]: running.step(**step) for step in steps}
        return Result(
            steps={name: step.requests for name, step in done.items()},
            preemptions=sum(step.preemptions for step in done.values()),
            kernels=running.info["kernels"],
            compilation=running.info["compilation"],
            receipts=running.call("tests.engine.receipts:receipts", receipts_of) if receipts_of else None,
            listed=running.call("tests.engine.listed:listed", *listed_for) if listed_for else None,
            afterwards=afterwards(running),
            bisected=running.call(f"tests.engine.bisected:{bisection[0]}", *bisection[1:]) if bisection else None,
            log=running.log,
        )


def run_example(page: str, words: str, folder: Path, more: str = "", seconds: int = 300) -> subprocess.CompletedProcess:
    """Run the one example in Python that has these words, as a file in a folder that has its MODEL.

    Args:
        page: from the root.
        words: of the example.
        folder: where it runs.
        more: what is written behind it.
        seconds: that it may take.
    """
    code = [text for language, text in blocks((ROOT / page).read_text()) if language == "python"]
    [example] = [text for text in code if words in text]
    (folder / "example.py").write_text(example + more)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=folder,
        env=os.environ | SETTINGS,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def differing_answers(answers: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[int]:
    """Numbers of the requests whose tokens, logprobs, listed candidates or prompt logprobs are not the others'."""
    compared = ("completions", "prompt_logprobs")
    pairs = enumerate(zip(answers, others, strict=True))
    return [number for number, (one, other) in pairs if any(one[key] != other[key] for key in compared)]


def some_exhaustive(values: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Parameters of a test, of which ``make test`` takes those in ``quick``."""
    return [pytest.param(value, marks=[] if value in quick else [pytest.mark.exhaustive]) for value in values]


def selected(request: pytest.FixtureRequest, parameter: str) -> list[str]:
    """The values of a parameter that tests of this file run with, so that a fixture starts no other engine."""
    of_file = (
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    )
    return list(dict.fromkeys(found[parameter] for found in of_file if parameter in found))


def arguments_of(settings: dict[str, Any]) -> list[str]:
    """The same settings for ``vllm serve``."""
    arguments = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, list):
            arguments += [f"--{option}", *map(str, value)]
        else:
            arguments += [f"--{option}", str(value)]
    return arguments


def declared(llm: Any) -> list[dict[str, Any]]:
    """What the engine's workers say of themselves; runs in the engine's process."""
    return llm.collective_rpc(METHOD)


def certified(running: Engine) -> EngineRun:
    """A check of the mode that has made the certificates of every operation."""
    checked = check_of(running, "1")
    checked.certify()
    return checked


def check_of(running: Engine, flag: str) -> EngineRun:
    """What the command ``check`` puts an engine through, in a small size."""
    results = CheckResults(f"{FLAG}={flag}", cases_of_engines(CHECK))
    return EngineRun(running, "as served", CHECK, results, lambda now: None)
