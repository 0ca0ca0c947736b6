"""Reinforcement learning whose rollouts and trainer agree exactly, beside the same with plain vLLM: GRPO by TRL with
its colocated engine, on a task that a program verifies. All runs begin with the same weights and the same seeds.

usage: python -m examples.grpo.runs     needs the extra [on-policy] beside a vLLM; each run starts one engine
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Self

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.record import DATA, Measurement, Setting, case_text, read, write
from examples.grpo.task import SHAPES, warmed_up
from tests.fakes import torchvision
from vllm_batch_invariant import __version__
from vllm_batch_invariant.envs import FLAG
from vllm_batch_invariant.installing import how_to_install
from vllm_batch_invariant.verify.arguments import OneLineParser, above_zero, at_least
from vllm_batch_invariant.verify.harness.engine import kv_cache_space, reason_in
from vllm_batch_invariant.verify.outcome import NoTestError, Status

ROOT = Path(__file__).parents[2]
CONTEXT = 256
"""Tokens of a prompt and its completion."""
SMALL, OF_BLOCKS, HYBRID = "small", "small-128", "small-delta"
"""The sizes that a CPU trains, of :data:`.task.SHAPES`: in 16 bits, in FP8, and with a gated delta net."""
HYBRID_WARM_UP = 40
"""Steps at most, each of which takes longer than another model's."""
_SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
ENDS = 10
"""Steps whose mean is the first and the last reward."""


@dataclass(frozen=True)
class Schedule:
    """How an engine serves rollouts. With the mode on nothing of it moves a bit.

    Attributes:
        max_num_seqs: most requests in a step.
        max_num_batched_tokens: most tokens in a step; a prompt that has more is cut. TRL's own is 4096.
        shuffled: requests come in another order at every step of the trainer.
        others: so many requests of others run beside, most of them without a seed.
    """

    max_num_seqs: int
    max_num_batched_tokens: int = 4096
    shuffled: bool = False
    others: int = 0


@dataclass(frozen=True)
class Run:
    """What a run is, apart from its size.

    Attributes:
        mode: whether the engine has the mode.
        patched: whether the trainer is patched.
        corrected: whether TRL multiplies the loss by the importance ratio trainer / rollout, which is its default.
        rollouts: all completions of a step "together"; a "few" at a time, in another order, beside requests of others;
            or "one by one".
        fault: "stale cache" (nobody empties the prefix cache), "one layer" (one layer is not sent), "stale adapter"
            (the adapter is not sent after the first step), or None.
        adapter: whether a LoRA adapter is trained in the place of all weights. Plain TRL merges it into the weights
            that it sends.
        hybrid: whether the model is a Qwen3.5, of which some layers keep a state in the place of keys.
    """

    mode: bool
    patched: bool
    corrected: bool = True
    rollouts: str = "together"
    fault: str | None = None
    adapter: bool = False
    hybrid: bool = False

    @property
    def exact(self) -> bool:
        """Whether rollout and trainer have to agree."""
        return self.mode and self.patched and self.fault is None


RUNS = {
    "stock": Run(mode=False, patched=False, corrected=False),
    "stock-corrected": Run(mode=False, patched=False),
    "ours": Run(mode=True, patched=True),
    "ours-other-batch": Run(mode=True, patched=True, rollouts="few"),
}
SHORT = {
    "ours-one-by-one": Run(mode=True, patched=True, rollouts="one by one"),
    "unpatched-trainer": Run(mode=True, patched=False),
    "plain-engine": Run(mode=False, patched=True),
    "stale-cache": Run(mode=True, patched=True, fault="stale cache"),
    "one-layer": Run(mode=True, patched=True, fault="one layer"),
    "stock-one-by-one": Run(mode=False, patched=False, rollouts="one by one"),
    "ours-lora": Run(mode=True, patched=True, adapter=True),
    "ours-lora-other-batch": Run(mode=True, patched=True, rollouts="few", adapter=True),
    "stale-adapter": Run(mode=True, patched=True, fault="stale adapter", adapter=True),
    "stock-lora": Run(mode=False, patched=False, adapter=True),
    "ours-delta": Run(mode=True, patched=True, hybrid=True),
    "ours-delta-other-batch": Run(mode=True, patched=True, rollouts="few", hybrid=True),
    "stock-delta": Run(mode=False, patched=False, hybrid=True),
}
"""Runs of a few steps. Where not both engine and trainer are ours, or one has a fault, that has to be seen."""
ALL = RUNS | SHORT
SAME_WEIGHTS = {
    "ours-other-batch": "ours",
    "ours-one-by-one": "ours",
    "ours-lora-other-batch": "ours-lora",
    "ours-delta-other-batch": "ours-delta",
    "stock-one-by-one": "stock-corrected",
}
"""Runs whose weights are compared with those of one with other rollouts: ours has the same, plain vLLM has not."""


@dataclass(frozen=True)
class Specification:
    """One run, whole.

    Attributes:
        model: folder or name.
        out: file for the steps.
        run: what it is.
        schedule: of rollouts.
        steps: of the optimizer.
        prompts: different ones in a step.
        group: completions of each.
        max_tokens: of a completion.
        learning_rate: of AdamW, constant.
        seed: of the order of prompts, and of the requests' seeds.
        quantization: of the engine's linear layers, and of a patched trainer's; None: none.
    """

    model: str
    out: str
    run: Run
    schedule: Schedule
    steps: int
    prompts: int
    group: int
    max_tokens: int
    learning_rate: float
    seed: int
    quantization: str | None = None

    @classmethod
    def read(cls, path: Path) -> Self:
        """What :meth:`write` wrote."""
        found = json.loads(path.read_text())
        return cls(**found | {"run": Run(**found["run"]), "schedule": Schedule(**found["schedule"])})

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)))


@dataclass(frozen=True)
class Step:
    """One step of a run.

    Attributes:
        reward: mean of all completions.
        tokens: sampled ones.
        different: tokens whose logprob has other bits in the trainer's loss than in the rollout.
        largest: largest |difference| of two logprobs.
        kl: KL(rollout || trainer) per token, estimated as :class:`scripts.parity.Gap` does.
        clipped: share of tokens whose ratio trainer / rollout leaves GRPO's 1 +- epsilon.
        gradient_norm: before the gradient is clipped.
        batch: most requests of the rollout that got a token in one step of the engine.
        cached: tokens of prompts that were found in the prefix cache.
        weights: SHA-256 of the trainer's weights after the step.
    """

    reward: float
    tokens: int
    different: int
    largest: float
    kl: float
    clipped: float
    gradient_norm: float
    batch: int
    cached: int
    weights: str


@dataclass(frozen=True)
class Result:
    """The steps of a run, and how long it took with the start of its engine."""

    steps: list[Step]
    seconds: float


METRICS = {
    "reward": ("1", "reward"),
    "kl": ("nat", "kl"),
    "logprob-difference": ("nat", "largest"),
    "clipped": ("1", "clipped"),
    "gradient-norm": ("1", "gradient_norm"),
}
"""Name of a metric in the data, its unit, and the field of :class:`Step`."""


def schedule(run: Run, completions: int) -> Schedule:
    """How the rollouts of a run with so many completions a step are served.

    Few at a time cuts prompts, too. Plain vLLM ends with an error on a CPU where a seeded request's is cut.
    """
    return {
        "together": Schedule(completions),
        "few": Schedule(5, max_num_batched_tokens=64, shuffled=True, others=6),
        "one by one": Schedule(1),
    }[run.rollouts]


def train(specification: Specification, folder: Path) -> Result:
    """Run it in a process of its own, because the mode holds for a whole process.

    Raises:
        NoTestError: the run failed.
    """
    told, log = folder / "specification.json", folder / "log"
    specification.write(told)
    environment = {name: value for name, value in os.environ.items() if name != FLAG} | _SETTINGS
    environment |= kv_cache_space(specification.model, ["--max-model-len", str(CONTEXT)])
    environment |= {FLAG: "1"} if specification.run.mode else {}
    if specification.run.hybrid:  # vLLM's file of Qwen3.5 imports what images need
        path = [*torchvision.where_missing(folder), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
    begin = time.perf_counter()
    with log.open("wb") as file:
        command = [sys.executable, "-m", "examples.grpo.run", str(told)]
        ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        raise NoTestError(f"a run ended with status {ended.returncode}{reason_in(log)}")
    steps = [Step(**found) for found in json.loads(Path(specification.out).read_text())]
    return Result(steps, time.perf_counter() - begin)


def problems(results: Mapping[str, Result]) -> Iterator[str]:
    """What the runs promise and did not keep, and controls that nothing was seen of."""
    for name, result in results.items():
        run, steps = ALL[name], result.steps
        if run.exact and any(step.different or step.kl or step.largest for step in steps):
            yield f"{name}: rollout and trainer differ"
        if not run.exact and not steps[-1].kl > 0:
            yield f"{name}: nothing was seen of it"
        other = SAME_WEIGHTS.get(name)
        if other in results:
            equal = equal_steps(steps, results[other].steps)
            if max(step.batch for step in steps) >= max(step.batch for step in results[other].steps):
                yield f"{name}: its batches are not smaller than those of {other}"
            if run.exact and equal < len(steps):
                yield f"{name}: from step {equal + 1} on its weights are not those of {other}"
            if not run.exact and equal == len(steps):
                yield f"{name}: its weights are those of {other}, so equal weights show nothing on this machine"


def equal_steps(steps: Sequence[Step], others: Sequence[Step]) -> int:
    """After how many steps from the first on two runs have the same weights."""
    pairs = list(zip(steps, others, strict=False))
    return next((number for number, (one, other) in enumerate(pairs) if one.weights != other.weights), len(pairs))


def measurements(results: Mapping[str, Result], model: str, setting: Setting) -> Iterator[Measurement]:
    """Every metric of every step; and for runs of another schedule how many steps ended with the same weights."""

    def row(name: str, metric: str, unit: str, value: float, bits: str, **keys: object) -> Measurement:
        where = case_text(model=model, **keys)
        return Measurement("on_policy", name, where, metric, unit, *[value] * 3, None, bits, **asdict(setting))

    for name, result in results.items():
        exact = ALL[name].exact
        for number, step in enumerate(result.steps, 1):
            bits = ("differ" if step.different else "equal") if exact else "-"
            for metric, (unit, field) in METRICS.items():
                yield row(name, metric, unit, float(getattr(step, field)), bits, step=number)
        other = SAME_WEIGHTS.get(name)
        if other in results:
            equal = equal_steps(result.steps, results[other].steps)
            bits = ("equal" if equal == len(result.steps) else "differ") if exact else "-"
            yield row(name, "same-weights", "steps", float(equal), bits, steps=len(result.steps), of=other)


def keep(path: Path, rows: Sequence[Measurement]) -> None:
    """Write rows in place of those of the same runs with the same model, machine and versions, and leave the others."""

    def run(row: Measurement) -> tuple[str, ...]:
        return row.gpu, row.versions, row.provider, row.keys["model"]

    own = {run(row) for row in rows}
    write(path, [*rows, *(row for row in (read(path) if path.is_file() else []) if run(row) not in own)])


def here() -> Setting:
    """This machine, and the versions that a training run depends on."""
    from vllm_batch_invariant.integration.reviews import patch_points

    found = Setting.here()
    names = {name: version(name) for name in ("torch", "transformers", "trl")}
    versions = case_text(vllm=patch_points.installed_version(), **names, **{"vllm-batch-invariant": __version__})
    return Setting(found.gpu, versions, found.date)


def table(results: Mapping[str, Result]) -> Table:
    """A line for each run."""
    columns = ("reward, first", "last", "tokens that differ", "largest difference", "KL", "clipped", "gradient norm")
    found = Table("run", "steps", *columns, "batch", "weights", "seconds", box=box.MARKDOWN)
    for name, result in results.items():
        steps = result.steps
        tokens, different = (sum(getattr(step, field) for step in steps) for field in ("tokens", "different"))
        found.add_row(
            name,
            str(len(steps)),
            f"{fmean(step.reward for step in steps[:ENDS]):.3f}",
            f"{fmean(step.reward for step in steps[-ENDS:]):.3f}",
            f"{different} of {tokens}",
            f"{max(step.largest for step in steps):.2g}",
            f"{fmean(step.kl for step in steps):.2g}",
            f"{fmean(step.clipped for step in steps):.2g}",
            f"{fmean(step.gradient_norm for step in steps):.2f}",
            str(max(step.batch for step in steps)),
            steps[-1].weights[:8],
            f"{result.seconds:.0f}",
        )
    return found


def main() -> int:
    """Train, compare, print, write. The exit status is 1 if a promise was not kept, 2 if nothing was compared."""
    parser = OneLineParser(prog="grpo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Qwen3 model's folder or name (default: one that is warmed up first)")
    parser.add_argument("--size", choices=SHAPES, help=f"of the model that is warmed up (default: {SMALL})")
    parser.add_argument("--only", nargs="+", choices=ALL, metavar="RUN", help=f"of {', '.join(ALL)} (default: all)")
    parser.add_argument(
        "--quantization",
        choices=("fp8_per_block", "fp8_per_channel", "fp8_per_tensor"),
        help=f"of linear layers of engines and trainers, by which --size is {OF_BLOCKS} (default: none)",
    )
    parser.add_argument("--steps", type=at_least(1), default=60, help="of the optimizer (default: 60)")
    parser.add_argument("--short", type=at_least(2), default=4, help="steps of the runs for a check (default: 4)")
    parser.add_argument("--prompts", type=at_least(1), default=4, help="different ones in a step (default: 4)")
    parser.add_argument("--group", type=at_least(2), default=8, help="completions of a prompt (default: 8)")
    parser.add_argument("--max-tokens", type=at_least(1), default=14, help="of a completion (default: 14)")
    parser.add_argument("--learning-rate", type=above_zero, default=3e-4, help="of AdamW (default: 3e-4)")
    parser.add_argument("--warm-up", type=at_least(1), default=400, help="steps of the model's (default: 400)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' order and of all requests (default: 0)")
    parser.add_argument("--out", type=Path, default=DATA / "on_policy.csv", help="the data (default: %(default)s)")
    options = parser.parse_args()
    served = [name for name, run in ALL.items() if options.quantization is None or (run.mode and not run.hybrid)]
    options.only = options.only or [name for name in served if options.model is None or not ALL[name].hybrid]
    if unserved := [name for name in options.only if name not in served]:
        parser.error(f"argument --only: {', '.join(unserved)} cannot have a --quantization: none was compared")
    options.size = options.size or (SMALL if options.quantization is None else OF_BLOCKS)
    try:
        return _compare(options)
    except NoTestError as error:
        print(f"grpo: {error}", file=sys.stderr)
        return Status.NO_TEST


def _compare(options: argparse.Namespace) -> int:
    for package in ("vllm", "trl", "peft"):
        if find_spec(package) is None:
            raise NoTestError(f"{package} is not installed: {how_to_install('on-policy')} beside a vLLM")
    console, results, setting = Console(width=200), {}, here()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models: dict[str, str] = {}
        sizes = {
            field: getattr(options, field)
            for field in ("prompts", "group", "max_tokens", "learning_rate", "seed", "quantization")
        }
        for run_name in options.only:
            run = ALL[run_name]
            size, warm_up = options.size, options.warm_up
            if run.hybrid:
                size, warm_up = HYBRID, min(warm_up, HYBRID_WARM_UP)
            elif options.model:
                size = Path(options.model).name
                models[size] = options.model
            if size not in models:
                begin = time.perf_counter()
                models[size] = str(warmed_up(folder / size, warm_up, options.seed, size))
                console.print(f"warm-up of {size}: {warm_up} steps, {time.perf_counter() - begin:.0f} s")
            place = folder / run_name
            place.mkdir()
            planned = schedule(run, options.prompts * options.group)
            steps = options.steps if run_name in RUNS else options.short
            out = str(place / "steps.json")
            results[run_name] = train(Specification(models[size], out, run, planned, steps, **sizes), place)
            name_of_model = f"{size},{options.quantization}" if options.quantization else size
            of_model = {name: result for name, result in results.items() if ALL[name].hybrid == run.hybrid}
            # whatever becomes of the next one
            keep(options.out, list(measurements(of_model, name_of_model, setting)))
            console.print(f"{run_name}: {results[run_name].seconds:.0f} s")
    console.print(table(results))
    console.print(f"{setting.gpu}, {setting.versions}", soft_wrap=True)
    found = list(problems(results))
    for problem in found:
        console.print(problem)
    return Status.DIVERGED if found else Status.REPRODUCIBLE


if __name__ == "__main__":
    raise SystemExit(main())
