"""What a run of the fuzzer is asked to do."""

from dataclasses import dataclass
from pathlib import Path

from .trial import SHRINK_SECONDS


@dataclass(frozen=True)
class FuzzPlan:
    """The plan of a run of the fuzzer.

    Attributes:
        model: its folder or name.
        serve_args: more arguments of ``vllm serve``.
        mode: the value of VLLM_BATCH_INVARIANT.
        seed: of everything that is drawn.
        seconds: after which no schedule starts, except the first of an engine.
        engines: most engines; None for as many as fit in the time.
        schedules: schedules per engine; None for as long as its start took.
        jobs: engines that run at a time.
        folder: where findings are written.
        without: kinds of requests to leave out.
        context: longest request that the model accepts; None if unknown.
        shrinking: most seconds in which a finding is made small.
    """

    model: str
    serve_args: tuple[str, ...]
    mode: str
    seed: int
    seconds: float
    engines: int | None = None
    schedules: int | None = None
    jobs: int = 1
    folder: Path = Path(".")
    without: tuple[str, ...] = ()
    context: int | None = None
    shrinking: float = SHRINK_SECONDS
