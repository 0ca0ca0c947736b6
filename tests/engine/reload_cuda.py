"""Weights that are replaced in engines on GPUs, and engines that sleep: ``python -m tests.engine.reload_cuda``.

It takes three minutes. Four engines, with each of vLLM's model runners, eager and in CUDA graphs, start with one
checkpoint or another; with ``--gpus 2`` four that have two workers or two stages, and where Ray is installed one whose
workers Ray starts; with ``--models hybrids`` those of models whose layers keep states, and with ``--models adapters``
two with LoRA adapters, of which one is loaded in place whenever weights are replaced. What an engine answers after its
weights were replaced must have the bits of an engine that was started with them. Each line says what was done, whether
the answers agree, and how many tokens of the first were found in the prefix cache.
"""

import argparse
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

from tests.engine.adapters import written
from tests.engine.engines import ROOT, UNTRIED_THERE
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.requests import concurrent_requests, request, tokens
from vllm_batch_invariant.verify.harness.worker import Engine, EngineFailed

RELOADS = "tests.engine.reloads"
SHAPES = {
    "": Shape(hidden=896, intermediate=2432, layers=3, heads=14, kv_heads=2, head_size=64, max_length=4096),
    "convolutions": Shape(layers=4, hybrid="conv", dtype="bfloat16", max_length=4096),
    "delta rules": Shape(layers=4, hybrid="delta", experts=8, dtype="bfloat16", max_length=4096),
    "state spaces": Shape(layers=4, hybrid="mamba2", dtype="bfloat16", max_length=4096),
}
"""By what layers keep states of."""
LENGTHS = (5, 45, 300, 3000)
"""Of prompts that are asked together, so that keys are shared, split and merged."""
ARGUMENTS = (
    "--max-model-len=4096", "--max-num-seqs=32", "--max-num-batched-tokens=1024", "--skip-tokenizer-init",
    "--gpu-memory-utilization=0.1", f"--kv-cache-memory-bytes={1 << 30}", "--enable-sleep-mode",
    f"--worker-extension-cls={RELOADS}.Extension",
)  # fmt: skip
ADAPTERS = "tests.engine.adapters"
OF_ADAPTERS = ("--enable-lora", "--max-loras=2", "--max-cpu-loras=2", "--max-lora-rank=16")
STAYS, POSTED = "stays", "posted"
"""Names of two adapters: one has the same files throughout, the other those of the checkpoint that serves."""
LONG = 300
"""Tokens of a request during which the weights are replaced."""
PATIENCE = 170
"""Seconds for one command."""


@dataclass
class Case:
    """One engine: ``runner`` is vLLM's first or second, ``first`` the checkpoint that it is started with, ``model`` one
    of :data:`SHAPES`.
    """

    runner: int
    eager: bool
    first: int
    workers: int = 1
    stages: int = 1
    executor: str = ""
    model: str = ""
    adapters: bool = False
    answers: dict[int, Any] = field(default_factory=dict)
    """By checkpoint, of the fresh engine at first."""

    @property
    def name(self) -> str:
        words = [f"model runner {self.runner}", "eager" if self.eager else "graphs"]
        words += [f"{self.workers} workers"] if self.workers > 1 else []
        words += [f"{self.stages} stages"] if self.stages > 1 else []
        words += [self.model] if self.model else []
        words += ["adapters"] if self.adapters else []
        return ", ".join([*words, *([self.executor] if self.executor else [])])

    @property
    def bits(self) -> tuple[int, int, str, bool]:
        """What decides them: cases for which it is equal answer equally."""
        return self.runner, self.workers, self.model, self.adapters

    @property
    def gpus(self) -> int:
        return self.workers * self.stages


CASES = {
    "one GPU": (Case(1, True, 0), Case(1, False, 1), Case(2, True, 1), Case(2, False, 0)),
    "two GPUs": (
        Case(2, True, 1, workers=2),
        Case(2, False, 0, workers=2),
        Case(2, True, 0, stages=2),
        Case(2, False, 1, stages=2),
        *((Case(2, False, 1, workers=2, executor="ray"),) if find_spec("ray") else ()),
    ),
    "hybrids": tuple(Case(2, False, 0, model=model) for model in SHAPES if model),
    "adapters": (Case(2, True, 1, adapters=True), Case(2, False, 0, adapters=True)),
}


def transfer() -> str:
    """The backend of vLLM's weight transfer: by CUDA IPC, or where that lacks a library from files."""
    try:
        importlib.import_module("vllm.distributed.weight_transfer.ipc_engine")
    except ImportError as error:
        print(f"weight transfer from files, because the IPC backend cannot be imported: {error}")
        return "files"
    return "ipc"


def start(case: Case, folders: Sequence[str], backend: str) -> Engine:
    """The engine of a case, in processes of its own: the trainer and the workers are not one."""
    graphs = ["--enforce-eager"] if case.eager else ["--cudagraph-capture-sizes", "1", "2", "4", "8", "16", "32", "64"]
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "VLLM_USE_V2_MODEL_RUNNER": str(case.runner - 1),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    } | (UNTRIED_THERE if case.model or case.adapters else {})
    arguments = [*ARGUMENTS, *graphs, f'--weight-transfer-config={{"backend": "{backend}"}}']
    arguments += [f"--tensor-parallel-size={case.workers}", f"--pipeline-parallel-size={case.stages}"]
    arguments += [f"--distributed-executor-backend={case.executor}"] if case.executor else []
    arguments += OF_ADAPTERS if case.adapters else []
    if case.model:
        arguments += ["--mamba-ssm-cache-dtype=float32"]
    return Engine(folders[case.first], arguments, "1", settings, PATIENCE)


def ask(running: Engine, name: str) -> tuple[Any, int]:
    """Tokens and logprob bits of requests alone and with others, and what the first found in the prefix cache."""
    requests = [request(tokens(length, 1)) for length in LENGTHS]
    together = running.step(name, [*requests, *concurrent_requests(20, 20)]).requests[: len(LENGTHS)]
    warm = running.step(f"{name}, warm", requests[-1:]).requests
    return [answer["completions"] for answer in (*together, *warm)], together[-1]["cached"]


def ask_with_adapters(running: Engine, adapters: Mapping[str, str], which: int) -> tuple[Any, int]:
    """The same of requests with each adapter and with none."""
    known, names = {STAYS: [1, adapters[STAYS]], POSTED: [2, adapters[str(which)]]}, (STAYS, None, POSTED)
    sent = [{**request(tokens(length, 1)), "adapter": name} for name in names for length in LENGTHS]
    others = [{**one, "adapter": names[at % 3]} for at, one in enumerate(concurrent_requests(20, 20))]
    together = running.call(f"{ADAPTERS}:step", [*sent, *others], known, False)
    warm = running.call(f"{ADAPTERS}:step", sent[-1:], known, False)
    return [*together["answers"][: len(sent)], *warm["answers"]], together["cached"][len(sent) - 1]


def post(running: Engine, adapters: Mapping[str, str], which: int) -> None:
    """Load the adapter of a checkpoint in place of the other's.

    Raises:
        EngineFailed: the engine refused it.
    """
    if said := running.call(f"{ADAPTERS}:load", POSTED, 2, adapters[str(which)], True):
        raise EngineFailed(said, running.log)


def ways(case: Case, backend: str) -> Iterator[tuple[str, int, list[tuple[str, list[Any]]]]]:
    """What is done, which checkpoint the engine then has, and the functions that do it."""
    first, other = case.first, 1 - case.first
    by_transfer = f"by_{'ipc' if backend == 'ipc' else 'transfer'}"
    for way in ("by_reload_weights", by_transfer, "by_buckets", "by_name"):
        for which in (other, first):
            yield f"{way} {which}", which, [(way, [which])]
    yield "a call that replaces nothing", first, [("call", ["nothing"])]
    yield "sleep 1", first, [("sleep", [1])]
    yield "sleep 2, reload", first, [("sleep", [2]), ("by_reload_weights", [first])]
    for kind in ("sleep_of_engine", "sleep_of_workers"):
        for which in (other, first):
            yield f"{kind} 2, buckets {which}", which, [("asleep_while_loading", [kind, which])]


def run(case: Case, running: Engine, folders: Sequence[str], backend: str, adapters: Mapping[str, str]) -> list[str]:
    """Do all of a case; returns the lines of what went wrong."""
    wrong = []

    def asked(what: str, which: int) -> tuple[Any, int]:
        if not case.adapters:
            return ask(running, what)
        post(running, adapters, which)
        return ask_with_adapters(running, adapters, which)

    def check(what: str, which: int, cached: int | None, answers: Any) -> None:
        known = case.answers.setdefault(which, answers)
        unexpected = bool(cached) != ("nothing" in what)
        verdict = "equal" if known == answers else "DIFFERENT"
        line = f"{case.name}: {what}: {verdict}, {cached} tokens from the prefix cache{' UNEXPECTED' * unexpected}"
        print(f"{time.monotonic() - BEGIN:6.1f} s  {line}", flush=True)
        if unexpected or known != answers:
            wrong.append(line)

    def call(function: str, arguments: Sequence[Any]) -> Any:
        paths = [folders[value] if at == len(arguments) - 1 and function in TAKE_FOLDERS else value
                 for at, value in enumerate(arguments)]  # fmt: skip
        return running.call(f"{RELOADS}:{function}", *paths)

    answers, cached = asked("fresh", case.first)
    check("fresh", case.first, cached, answers)
    for what, which, functions in ways(case, backend):
        try:
            for function, arguments in functions:
                call(function, arguments)
            answers, cached = asked(what, which)
        except EngineFailed as error:
            print(error.log[-3000:], flush=True)
            wrong.append(f"{case.name}: {what}: FAILED {error}")
            break
        check(what, which, cached, answers)
    else:
        wrong += exchanged_meanwhile(case, running, folders)
    if case.answers[0] == case.answers.get(1):
        wrong.append(f"{case.name}: both checkpoints answer the same")
    print(*[line for line in running.log.splitlines() if "weights were replaced" in line][:2], sep="\n", flush=True)
    return wrong


def exchanged_meanwhile(case: Case, running: Engine, folders: Sequence[str]) -> list[str]:
    """Replace the weights of a running request: the rest is what the new ones make of its prompt and first tokens.

    Which token is the first of the rest is seen by its logprobs, since the engine runs ahead of who is told.
    """
    prompt = tokens(300, 9)
    [old] = running.step("old", [request(prompt, max_tokens=LONG)]).requests[0]["completions"]
    asked = request(prompt, max_tokens=LONG)
    arguments = (asked, 3, folders[1 - case.first])
    [whole] = running.call(f"{RELOADS}:replaced_while_it_runs", *arguments)["completions"]
    begun = next((n for n in range(LONG) if whole["logprobs"][n] != old["logprobs"][n]), LONG)
    line = f"{case.name}: weights replaced after {begun} of {LONG} tokens: "
    if begun == LONG:
        return [f"{line}they did not serve"]
    rest = request(prompt + whole["tokens"][:begun], max_tokens=LONG - begun)
    [new] = running.step("new", [rest]).requests[0]["completions"]
    same = all(whole[part][begun:] == new[part] for part in ("tokens", "logprobs"))
    print(f"{time.monotonic() - BEGIN:6.1f} s  {line}{'equal' if same else 'DIFFERENT'}", flush=True)
    return [] if same else [f"{line}the rest differs"]


TAKE_FOLDERS = ("by_reload_weights", "by_transfer", "by_ipc", "by_buckets", "by_name", "asleep_while_loading")
BEGIN = time.monotonic()


def differences(cases: Sequence[Case]) -> list[str]:
    """What went wrong, in lines; nothing is good."""
    import vllm

    print(f"vLLM {vllm.__version__}", flush=True)
    backend = transfer()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack, ThreadPoolExecutor(len(cases)) as pool:
        folders = {
            model: [str(make_checkpoint(Path(folder, model, str(seed)), SHAPES[model], seed)) for seed in (0, 1)]
            for model in {case.model for case in cases}
        }
        of_cases = (STAYS, "0", "1") if any(case.adapters for case in cases) else ()
        adapters = {
            name: str(written(Path(folder, "adapters", name), Path(folders[""][0]), 8 + 4 * seed, seed))
            for seed, name in enumerate(of_cases)
        }
        engines = [start(case, folders[case.model], backend) for case in cases]
        started = [pool.submit(engine.__enter__) for engine in engines]
        wrong, up = [], []
        for case, engine, one in zip(cases, engines, started, strict=True):
            try:
                one.result()
            except EngineFailed as error:
                print(error.log[-3000:], flush=True)
                wrong.append(f"{case.name}: did not start: {error}")
            else:
                stack.push(engine.__exit__)
                up.append((case, engine))
                print(f"{time.monotonic() - BEGIN:6.1f} s  {case.name}: started", flush=True)
        for case, engine in up:
            wrong += run(case, engine, folders[case.model], backend, adapters)
    for (one, _), (other, _) in combinations(up, 2):
        both = one.answers.keys() & other.answers.keys() if one.bits == other.bits else ()
        wrong += [f"{one.name} and {other.name} differ for checkpoint {which}" for which in both
                  if one.answers[which] != other.answers[which]]  # fmt: skip
    return wrong


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, run, and print what went wrong; the exit status is 1 if anything did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runner", type=int, choices=(1, 2), help="only this model runner")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="of each engine")
    parser.add_argument("--models", choices=("dense", "hybrids", "adapters"), default="dense", help="which")
    options = parser.parse_args(argv)
    name = ("one GPU", "two GPUs")[options.gpus - 1] if options.models == "dense" else options.models
    wrong = differences([case for case in CASES[name] if options.runner in (None, case.runner)])
    print(*(wrong or [f"all equal, in {time.monotonic() - BEGIN:.0f} s"]), sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
